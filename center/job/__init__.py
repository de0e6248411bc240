"""The job: merges the frames of the log on Spark, drives the ledger and writes answers.

`center.ops` starts it; edges and clients never reach it. Nothing is imported here: Spark's Python workers load modules
of this package and must not import SQLAlchemy, gRPC or FastAPI. Use full module paths, such as `center.job.job`.
"""
