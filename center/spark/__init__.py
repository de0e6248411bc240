"""The Spark session and the support for its Python workers, for `center.job` and `center.batch`.

This file imports nothing, because workers load `center.spark.workers` without a session. This package contains nothing
about queries.
"""
