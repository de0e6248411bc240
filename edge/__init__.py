"""The edge agent: reads sources, aggregates their records per query, and ships mergeable synopses to the center.

Run by `edgewater edge run`. Imports neither Spark nor pandas nor anything of `center`. Import the subpackages' facades
(`edge.core`, `edge.sources`, …); this module stays empty so that `edgewater edge --help` is fast.
"""
