"""The edge agent: reads sources, aggregates their records per query, and ships mergeable synopses to the center.

Run by `edgewater edge run`. Imports neither Spark nor pandas nor anything of `center`. Import the subpackages' facades
(`edge.core`, `edge.sources`, …); this module imports nothing, so that `edgewater edge --help` is fast.
"""

OWNER = "edgewater"
"""Distinguishes this package from packages of this name in other distributions."""
