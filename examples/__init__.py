"""Examples of third-party packages. They run as they are; the product does not import them."""
