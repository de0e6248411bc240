"""Every benchmark: what it runs, and a table of what came out. A benchmark is not a test."""
