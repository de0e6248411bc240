"""Parquet files that tasks read with Arrow give the bytes that they give when Spark reads them; or Spark reads them."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import center.batch.builder
from center.batch import Strategy, build
from center.batch.parquet_scan import parquet_scan
from edgewater.model.windows import SlidingWindow, TumblingWindow
from edgewater.synopses import CountMin, GroupedAggregate, HyperLogLog, Kll, ReservoirSample, function_named

pytestmark = pytest.mark.spark

ROWS = 9_000
ORIGIN_US = 1_640_995_200_000_000


def columns(seed: int) -> pa.Table:
    """Columns of every type, with nulls, a NaN and a negative zero."""
    rng = np.random.default_rng(seed)
    some = rng.random(ROWS) < 0.1
    value = rng.lognormal(3, 1, ROWS)
    value[:2] = np.nan, -0.0
    micros = ORIGIN_US + rng.integers(0, 100_000_000, ROWS)
    return pa.table(
        {
            "ts": micros // 1000,
            "at": pa.array(micros, pa.timestamp("us", "UTC"), mask=some),
            "local": pa.array(micros // 1000, pa.timestamp("ms")),
            "old": pa.array(np.where(some, -3_000_000_000_000_000, micros), pa.timestamp("us", "UTC")),
            "ip": pa.array([f"10.0.0.{i}" for i in rng.integers(0, 99, ROWS)], mask=some),
            "size": pa.array(rng.integers(-50, 5000, ROWS).astype(np.int32), mask=rng.random(ROWS) < 0.05),
            "value": value,
            "small": value.astype(np.float32),
            "ok": rng.random(ROWS) < 0.5,
            "amount": pa.array([1] * ROWS, pa.decimal128(9, 2)),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of several row groups; Spark splits each of them."""
    path = tmp_path_factory.mktemp("of") / "a folder%20"
    path.mkdir()
    for seed in (1, 2):
        pq.write_table(columns(seed), path / f"{seed}, ä.parquet", row_group_size=1700)
    return path


@pytest.fixture
def read(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reads files in ranges of about two row groups."""
    before = spark.conf.get("spark.sql.files.maxPartitionBytes")
    spark.conf.set("spark.sql.files.maxPartitionBytes", "100k")
    yield spark.read
    spark.conf.set("spark.sql.files.maxPartitionBytes", before)


def grouped() -> GroupedAggregate:
    measures = {"n": function_named("count"), "total": function_named("sum")}
    return GroupedAggregate(
        {"ip": pa.string()}, {"n": measures["n"].make({}, None), "total": measures["total"].make({}, pa.int64())}
    )


DEALT_OUT = Strategy("round_robin", "slicing")
JOBS: list[tuple[Any, dict[str, Any], Callable[[Any], Any]]] = [
    (Kll(64), {"of": "value", "time": "ts", "window": TumblingWindow("5s")}, lambda df: df),
    (ReservoirSample(100), {"of": "small", "time": "local", "window": SlidingWindow("20s", "5s")}, lambda df: df),
    (
        HyperLogLog(8),
        {"of": "n", "time": "at", "stratify_by": "ok", "strategy": DEALT_OUT},
        lambda df: df.withColumnRenamed("size", "n").where("at is not null and ip is not null"),
    ),
    (grouped(), {"of": {"ip": "ip", "total": "size"}}, lambda df: df.where("size is not null")),
]


@pytest.mark.parametrize("number", range(len(JOBS)))
def test_results_equal_those_of_rows_that_spark_reads(
    read: Any, folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prototype, arguments, of = JOBS[number]
    df = of(read.parquet(str(folder)))
    scans: list[Any] = []

    def seen(records: Any) -> Any:
        scans.append(parquet_scan(records))
        return scans[-1]

    monkeypatch.setattr(center.batch.builder, "parquet_scan", seen)
    scanned = build(df, prototype, **arguments)
    monkeypatch.setattr(center.batch.builder, "parquet_scan", lambda records: None)
    passed = build(df, prototype, **arguments)
    assert scans[0] is not None and len(scans[0].plan.partitions) > 3
    mine, theirs = (sorted(map(repr, out.collect())) for out in (scanned, passed))
    assert mine == theirs and len(mine) > 0


def frames_left_to_spark(spark: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """DataFrames that look like plain scans and are not."""

    def written(name: str, *tables: pa.Table, **options: Any) -> str:
        path = folder.parent / name
        path.mkdir(exist_ok=True)
        for i, table in enumerate(tables):
            pq.write_table(table, path / f"{i}.parquet", **options)
        return str(path)

    one = columns(1).select(["ts", "size", "ip"])
    old = [datetime.datetime(1850, 1, 1, tzinfo=datetime.UTC)] * 5
    read = spark.read
    return {
        "an expression": lambda: read.parquet(str(folder)).selectExpr("size + 1 as size"),
        "a cast that rounds": lambda: read.parquet(str(folder)).selectExpr("cast(value as int) as size"),
        "a decimal": lambda: read.parquet(str(folder)).selectExpr("cast(amount as double) as size"),
        "a filter by a number": lambda: read.parquet(str(folder)).where("size > 100").select("size"),
        "a filter by a float": lambda: read.parquet(str(folder)).where("value > 3").select("size"),
        "a filter by a function": lambda: read.parquet(str(folder)).where("size % 2 = 0").select("size"),
        "an alternative": lambda: read.parquet(str(folder)).where("size > 3 or ip is null").select("size"),
        "a limit": lambda: read.parquet(str(folder)).select("size").limit(10),
        "a union": lambda: read.parquet(str(folder)).select("size").union(read.parquet(str(folder)).select("size")),
        "a cached frame": lambda: read.parquet(written("cached", one)).cache().select("size"),
        "a column of the file's": lambda: read.parquet(str(folder)).selectExpr("_metadata.file_size as size"),
        "a time before 1900": lambda: read.parquet(str(folder)).selectExpr("old as time"),
        "another type in a file": lambda: read.schema("size bigint").parquet(
            written("types", one, one.set_column(1, "size", one["size"].cast(pa.int64())))
        ),
        "a column that a file lacks": lambda: read.parquet(written("lacks", one, one.drop_columns(["size"]))).select(
            "size"
        ),
        "another case": lambda: read.schema("SIZE int").parquet(written("case", one)).selectExpr("SIZE as size"),
        "INT96": lambda: read.parquet(
            written("int96", pa.table({"time": old}), use_deprecated_int96_timestamps=True)
        ),
        "partition columns": lambda: read.parquet(str(Path(written("parts/day=1", one)).parent)).select("day"),
        "an option": lambda: read.option("pathGlobFilter", "1.parquet").parquet(str(folder)).select("size"),
        "CSV": lambda: read.schema("size int").csv(written("csv", one)),
        "rows of the driver's": lambda: spark.createDataFrame([(1,)], "size int"),
    }  # fmt: skip


def test_whatever_may_be_read_otherwise_is_left_to_spark(spark: Any, folder: Path) -> None:
    (folder.parent / "parts").mkdir(exist_ok=True)
    for name, made in frames_left_to_spark(spark, folder).items():
        assert parquet_scan(made()) is None, name
    for setting in ("spark.sql.files.ignoreCorruptFiles", "spark.sql.parquet.mergeSchema"):
        spark.conf.set(setting, "true")
        try:
            assert parquet_scan(spark.read.parquet(str(folder)).select("size")) is None
        finally:
            spark.conf.unset(setting)
    assert parquet_scan(spark.read.parquet(str(folder)).select("size")) is not None


def test_a_file_that_changes_before_the_job_runs_is_refused(spark: Any, tmp_path: Path) -> None:
    pq.write_table(columns(1).select(["size"]), tmp_path / "1.parquet")
    listed = spark.read.parquet(str(tmp_path))
    out = build(listed, CountMin(64, 3), of="size")
    # Row groups beyond the planned ranges would be lost.
    pq.write_table(pa.concat_tables([columns(1).select(["size"])] * 2), tmp_path / "1.parquet")
    with pytest.raises(Exception, match="the file has changed"):
        out.collect()
    assert parquet_scan(listed) is None, "Spark cuts files as they were when it listed them"
