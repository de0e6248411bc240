"""Condor's evaluation (VLDB 2021, section 7) on Spark, compared with a single thread and Spark's sketches."""
