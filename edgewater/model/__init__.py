"""The domain: queries, measures, windows, expressions, streams, and their notations in YAML and SQL.

The package does no I/O and reads no clock.
"""
