"""The Spark session and what its Python workers need, for `center.job` and `center.batch`.

Nothing is imported here: workers load `center.spark.workers` without a session. It knows nothing about queries.
"""
