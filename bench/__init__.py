"""Every benchmark: what it runs, and a table of its results. A benchmark is not a test."""
