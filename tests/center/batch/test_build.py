"""What Spark builds is what one synopsis over the same records would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from center.batch import Strategy, build
from center.batch.windows import SlidingCount
from edgewater.base.errors import InvalidRequest
from edgewater.model.windows import CountWindow, SessionWindow, SlidingWindow, TumblingWindow
from edgewater.synopses import (
    BloomFilter,
    CountMin,
    DDSketch,
    FifoSample,
    GroupedAggregate,
    HaarWavelet,
    HyperLogLog,
    Quantile,
    ReservoirSample,
    from_bytes,
    function_named,
)

pytestmark = pytest.mark.spark


def local(prototype: Any, values: pd.Series, times: pd.Series | None = None) -> Any:
    made = from_bytes(prototype.to_bytes())
    made.update(values.tolist(), times=None if times is None else times.to_numpy())
    return made


def windows(out: Any) -> pd.DataFrame:
    found = out.toPandas()
    for name in ("window_start", "window_end"):
        found[name] = found[name].map(lambda t: None if t is pd.NaT else int(t.timestamp() * 1000))
    return found


def within(records: pd.DataFrame, row: Any) -> pd.DataFrame:
    return records[(records.ts >= row.window_start) & (records.ts < row.window_end)]


@pytest.mark.parametrize(
    ("prototype", "column"),
    [
        (CountMin(1024, 4), "ip"),
        (HyperLogLog(), "latency"),
        pytest.param(HyperLogLog(), "ip", marks=pytest.mark.nightly),
        pytest.param(BloomFilter(1 << 13), "size", marks=pytest.mark.nightly),
    ],
    ids=["count-min", "hyperloglog of floats", "hyperloglog", "bloom"],
)
def test_bytes_built_on_spark_are_those_of_one_local_synopsis(
    df: Any, records: pd.DataFrame, prototype: Any, column: str
) -> None:
    (row,) = build(df, prototype, of=column).collect()
    assert bytes(row.synopsis) == local(prototype, records[column]).to_bytes()
    assert row.records == len(records)


def test_what_spark_builds_merges_with_what_an_edge_ships(df: Any, records: pd.DataFrame) -> None:
    (row,) = build(df, HyperLogLog(), of="ip").collect()
    others = pd.Series([f"192.168.0.{i}" for i in range(100)])
    at_the_edge = local(HyperLogLog(), others)
    both = from_bytes(at_the_edge.to_bytes()).merge_many([from_bytes(bytes(row.synopsis))])
    assert both.to_bytes() == local(HyperLogLog(), pd.concat([others, records.ip])).to_bytes()


@pytest.mark.parametrize(
    "strategy",
    ["auto", Strategy("round_robin", "bucketing"), Strategy("round_robin", "slicing", 3)],
    ids=["slicing", "bucketing", "slicing by three tasks"],
)
def test_sliding_windows_equal_brute_force_per_stratum(df: Any, records: pd.DataFrame, strategy: Any) -> None:
    window = SlidingWindow("20s", "6s", "1s")
    out = build(df, CountMin(64, 3), of="ip", time="ts", window=window, stratify_by="site", strategy=strategy)
    found = windows(out)
    first, last = records.ts.min(), records.ts.max()
    starts = {s for t in (first, last) for s in window.windows_of_slice(window.slice_start(int(t)))}
    assert sorted(found.window_start.unique()) == list(range(min(starts), max(starts) + 1, window.every_ms))
    for row in found.itertuples():
        truth = within(records, row)
        truth = truth[truth.site == row.site]
        assert (row.records, bytes(row.synopsis)) == (len(truth), local(CountMin(64, 3), truth.ip).to_bytes())


def test_sessions_end_where_nothing_happens_for_the_gap(spark: Any) -> None:
    rng = np.random.default_rng(7)
    data = pd.DataFrame(
        {"t": np.cumsum(rng.exponential(40, 3000)).astype("int64"), "user": rng.choice(["a", "b"], 3000)}
    )
    data["v"] = np.arange(3000)
    out = build(
        spark.createDataFrame(data).repartition(5), HyperLogLog(), of="v", time="t", window=SessionWindow("300ms"),
        stratify_by="user",
    )  # fmt: skip
    expected = []
    for user, of in data.groupby("user"):
        number = (of.t.diff() >= 300).cumsum()
        expected += [
            (user, s.t.min(), s.t.max() + 300, local(HyperLogLog(), s.v).to_bytes()) for _, s in of.groupby(number)
        ]
    found = windows(out).sort_values(["user", "window_start"])
    assert len(expected) > 50
    assert [(r.user, r.window_start, r.window_end, bytes(r.synopsis)) for r in found.itertuples()] == expected


def test_count_windows_take_records_in_the_order_of_event_time(df: Any, records: pd.DataFrame) -> None:
    found = windows(build(df, HyperLogLog(), of="size", time="ts", window=CountWindow(3000)))
    ordered = records.sort_values(["ts", "size"])["size"].to_numpy()
    expected = [local(HyperLogLog(), pd.Series(ordered[at : at + 3000])).to_bytes() for at in range(0, 20_000, 3000)]
    assert [bytes(s) for s in found.sort_values("window_start").synopsis] == expected


def test_sliding_count_windows_hold_the_records_that_brute_force_puts_there(df: Any, records: pd.DataFrame) -> None:
    window = SlidingCount(3000, 800)
    ordered = {site: of.sort_values(["ts", "size"]) for site, of in records.groupby("site")}
    found = windows(build(df, CountMin(64, 3), of="size", time="ts", window=window, stratify_by="site"))
    for site, rows in found.groupby("site"):
        truth = [ordered[site][at : at + 3000] for at in range(0, len(ordered[site]), 800)]
        expected = [(t.ts.min(), t.ts.max() + 1, len(t), local(CountMin(64, 3), t["size"]).to_bytes()) for t in truth]
        held = [(r.window_start, r.window_end, r.records, bytes(r.synopsis)) for r in rows.itertuples()]
        assert sorted(held) == sorted(expected)
    assert set(found.site) == set(ordered)


def test_samples_of_tasks_are_one_sample_of_distinct_records(df: Any, records: pd.DataFrame) -> None:
    (row,) = build(df, ReservoirSample(500), of="size", time="ts").collect()
    sample = from_bytes(bytes(row.synopsis))
    assert (row.records, len(sample.items())) == (20_000, 500)
    # The standard error of the mean is 1443 / √500 = 65; six of them fail once in 5e8 seeds.
    assert abs(np.mean(sample.items().to_numpy()) - records["size"].mean()) < 390
    (row,) = build(df, FifoSample(50), of="latency", time="ts").collect()
    newest = records.sort_values("ts").latency.tail(49)
    assert set(newest) <= set(from_bytes(bytes(row.synopsis)).items().to_pylist())


def test_grouped_aggregates_are_built_as_edges_build_them(df: Any, records: pd.DataFrame) -> None:
    import pyarrow as pa

    made = {}
    for name, function in (("n", "count"), ("bytes", "sum")):
        known = function_named(function)
        assert known is not None
        made[name] = known.make((), pa.int64())
    prototype = GroupedAggregate({"site": pa.string()}, made)
    out = build(df, prototype, of={"site": "site", "bytes": "size"}, time="ts", window=TumblingWindow("50s"))
    for row in windows(out).itertuples():
        grouped = from_bytes(bytes(row.synopsis))
        truth = within(records, row).groupby("site")["size"]
        sites = grouped.rows()[0].to_pylist()
        assert dict(zip(sites, grouped.query("bytes").value, strict=True)) == truth.sum().to_dict()
        assert dict(zip(sites, grouped.query("n").value, strict=True)) == truth.count().to_dict()


def test_nulls_are_counted_and_a_record_without_a_time_is_refused(spark: Any) -> None:
    rows = [(1000, 1.0), (1500, None), (None, 2.0), (None, 3.0), (2500, 4.0)]
    given = spark.createDataFrame(rows, "t long, v double").coalesce(1)
    out = build(given.where("t is not null"), DDSketch(), of="v", time="t", window=TumblingWindow("1s"))
    assert [(r.records, r.nulls) for r in out.orderBy("window_start").collect()] == [(1, 1), (1, 0)]
    for prototype in (DDSketch(), HaarWavelet()):
        with pytest.raises(Exception, match=r"2 of \d records have none"):
            build(given.na.fill(0.0, "v"), prototype, of="v", time="t", window=TumblingWindow("1s")).collect()


def test_a_quantile_of_timestamps_without_a_zone_is_the_same_in_any_session_zone(spark: Any) -> None:
    given = spark.sql("select timestamp_ntz'2022-03-13 02:30:00' as t, 7.5 as d, 7 as v")
    (row,) = windows(build(given, DDSketch(), of="v", time="t", window=TumblingWindow("1h"))).itertuples()
    assert row.window_start == 1_647_136_800_000
    assert from_bytes(bytes(row.synopsis)).query(Quantile(0.5)).value == pytest.approx(7, rel=0.02)
    with pytest.raises(InvalidRequest, match=r"column d of type decimal\(2,1\).*cast it first"):
        build(given, DDSketch(), of="d")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"of": "adress"}, "one of the columns ts, ip"),
        ({"of": "ip", "synopsis": DDSketch()}, "column ip of type string"),
        ({"of": "ip", "stratify_by": 3}, "stratify_by: 3 .* a list of columns"),
        ({"of": "ip", "time": "latency"}, "column latency of type double"),
        ({"of": "ip", "window": TumblingWindow("1s")}, "a tumbling window needs it"),
        ({"of": "ip", "time": "ts", "window": "5s"}, "window: '5s'"),
        ({"of": "ip", "synopsis": CountMin}, "an empty synopsis"),
        ({"of": "ip", "strategy": Strategy("stratified", "slicing")}, "there are no strata"),
        ({"of": "size", "synopsis": FifoSample(5)}, "fifo needs it"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused_before_a_job_runs(df: Any, arguments: dict[str, Any], message: str) -> None:
    given = {"synopsis": CountMin(), **arguments}
    with pytest.raises(InvalidRequest, match=message):
        build(df, given.pop("synopsis"), **given)


def test_a_streaming_dataframe_is_refused(spark: Any, tmp_path: Path) -> None:
    stream = spark.readStream.schema("v long").parquet(str(tmp_path))
    with pytest.raises(InvalidRequest, match="each micro-batch of foreachBatch"):
        build(stream, CountMin(), of="v")


@pytest.mark.parametrize("name", ["records", "late"])
def test_strata_with_names_of_the_results_columns_are_refused(df: Any, name: str) -> None:
    with pytest.raises(InvalidRequest, match="results have this column"):
        build(df.withColumnRenamed("ip", name), CountMin(), of="size", stratify_by=name)
