"""The center receives frames from edges, merges them on Spark, and answers queries over REST.

Entry points are `center.cli` (commands) and `center.config` (configuration). The package never imports `edge` or `sim`.
"""

OWNER = "edgewater"
"""Distinguishes this package from packages with the same name in other distributions."""
