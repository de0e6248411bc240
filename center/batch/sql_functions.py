"""SQL functions over synopses in binary columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.functions import arrow_udf

from center.batch.pattern import merged
from center.batch.questions import ESTIMATE_DDL, ESTIMATE_TYPE, estimate_of, sql_question
from center.spark.workers import settle
from edgewater.synopses import from_bytes

FAN_IN = 64  # limit: memory of a merge
"""Synopses that are merged at once: a limit of the memory of a task."""


def register_sql(spark: SparkSession) -> None:
    """Registers two functions for `spark.sql`.

    - ``edgewater_estimate(synopsis, 'quantile', 0.99)`` returns a struct of estimate, lower, upper, confidence and
      basis. The parameters after the question's name are the question's fields, in order.
    - ``edgewater_merge(synopsis)`` is an aggregate function. It returns the union of synopses with equal parameters, or
      null without rows.
    """
    spark.udf.register("edgewater_estimate", arrow_udf(_estimates, f"struct<{ESTIMATE_DDL}>"))
    spark.udf.register("edgewater_merge", merge_function())


def merge_function() -> Any:
    """Returns an aggregate function for Spark: the union of a column of synopses."""
    return arrow_udf(_merge, "binary")


def _estimates(synopsis: pa.Array, question: pa.Array, *parameters: pa.Array) -> pa.Array:
    settle()
    decoded: dict[bytes, Any] = {}
    results: list[dict[str, Any] | None] = []
    for data, name, *given in zip(*(c.to_pylist() for c in (synopsis, question, *parameters)), strict=True):
        if data is None or name is None:
            results.append(None)
            continue
        if data not in decoded:
            decoded = {data: from_bytes(data)}  # consecutive rows often have the same synopsis
        results.append(estimate_of(decoded[data], sql_question(name, given)))
    return pa.array(results, ESTIMATE_TYPE)


def _merge(batches: Iterator[pa.Array]) -> bytes:
    settle()
    synopses: list[Any] = []
    for batch in batches:
        for data in batch.drop_null().to_pylist():
            synopses.append(from_bytes(data))
            if len(synopses) > FAN_IN:
                synopses = [merged(synopses[0], synopses[1:])]
    return merged(synopses[0], synopses[1:]).to_bytes() if synopses else None  # type: ignore[return-value]
