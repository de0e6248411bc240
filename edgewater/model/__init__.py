"""The domain: queries, measures, windows, expressions, streams, and their notations in YAML and SQL.

No I/O, no clock.
"""
