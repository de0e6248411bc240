"""The center: receives frames from edges, merges them on Spark, and answers queries over REST.

Entry points: `center.cli` (commands), `center.config` (configuration). It never imports `edge` or `sim`.
"""

OWNER = "edgewater"
"""Distinguishes this package from packages of this name in other distributions."""
