"""The edge agent: reads sources, aggregates their records per query, and ships mergeable synopses to the center.

`edgewater edge run` runs the agent. The package imports neither Spark nor pandas nor anything of `center`. Import the
facades of its subpackages (`edge.core`, `edge.sources`, …). This module imports nothing, so that `edgewater edge
--help` is fast.
"""

OWNER = "edgewater"
"""Distinguishes this package from packages of the same name in other distributions."""
