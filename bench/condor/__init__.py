"""Condor's evaluation (VLDB 2021, section 7) on Spark, beside a single thread and Spark's own sketches."""
