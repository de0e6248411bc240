"""The parent of Spark's Python workers: `pyspark.daemon`, with our modules imported before it forks.

Spark starts half a dozen workers one after another before the first batch, each of which would spend
a second importing the same modules; forked from here they share them, memory too. Run by Spark
(``spark.python.daemon.module``). Importing must start no threads, as they do not survive a fork.
"""

from __future__ import annotations

import pyspark.daemon
import pyspark.sql.worker.create_data_source
import pyspark.sql.worker.plan_data_source_read
import pyspark.worker

import center.spark.merging
import center.spark.source  # noqa: F401

if __name__ == "__main__":
    pyspark.daemon.manager()
