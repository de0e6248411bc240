"""Spark reads the files of the sink `parquet`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from center.sinks import SinkContext, SinkQuery, read_definition
from center.sinks.testing import DAY, HOUR, QUERY, REF, SCHEMA, answer

pytestmark = pytest.mark.spark


def test_spark_reads_days_as_a_partition_and_times_in_utc(spark: Any, tmp_path: Path) -> None:
    sink = read_definition("files", {"kind": "parquet", "path": str(tmp_path)}).make(SinkContext("files", 1))
    sink.open([SinkQuery(REF, QUERY, SCHEMA)])
    sink.write([answer(1, 0, {"a": 1, None: 2}), answer(2, HOUR, {"a": 3}), answer(3, DAY, {"b": 4})], {REF: 3})
    sink.close()
    rows = spark.read.parquet(f"{tmp_path}/kit_v3").selectExpr("cast(day as string) day", "k", "n",
                                                             "unix_millis(window_start) at").collect()  # fmt: skip
    assert sorted((row.day, row.at, str(row.k), row.n) for row in rows) == [
        ("1970-01-01", 0, "None", 2),
        ("1970-01-01", 0, "a", 1),
        ("1970-01-01", HOUR, "a", 3),
        ("1970-01-02", DAY, "b", 4),
    ]
