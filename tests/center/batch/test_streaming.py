"""Windows of streaming DataFrames: revisions, late records, restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from center.batch import build, latest_revisions
from edgewater.model.errors import InvalidRequest
from edgewater.model.windows import SessionWindow, SlidingWindow, TumblingWindow
from edgewater.synopses import CountMin, HaarWavelet, HyperLogLog, from_bytes

pytestmark = pytest.mark.spark

SCHEMA = "t long, site string, v long"


class Files:
    """A directory that a stream reads, file by file, and the one that it writes."""

    def __init__(self, spark: Any, path: Path) -> None:
        self.spark, self.path, self.rows = spark, path, []  # type: list[tuple[Any, Any, int]]
        self._files = 0
        (path / "in").mkdir()

    def add(self, rows: list[tuple[Any, Any, int]]) -> None:
        self._files += 1
        frame = pd.DataFrame(rows, columns=["t", "site", "v"]).astype({"t": "Int64"})
        frame.to_parquet(self.path / "in" / f"{self._files:04}.parquet")
        self.rows += rows

    def run(self, **arguments: Any) -> pd.DataFrame:
        """All that is there and was not read yet; gives all that was ever written."""
        stream = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(self.path / "in"))
        out = build(stream, of="v", **arguments)
        started = out.writeStream.format("parquet").option("checkpointLocation", str(self.path / "checkpoint"))
        query = started.trigger(availableNow=True).start(str(self.path / "out"))
        query.awaitTermination(120)
        assert query.exception() is None
        return self.written()

    def written(self) -> pd.DataFrame:
        return self.read().toPandas()

    def read(self) -> Any:
        return self.spark.read.parquet(str(self.path / "out"))


@pytest.fixture
def files(spark: Any, tmp_path: Path) -> Files:
    return Files(spark, tmp_path)


def local(prototype: Any, values: list[int]) -> bytes:
    prototype.update(values)
    return prototype.to_bytes()  # type: ignore[no-any-return]


def newest(files: Files) -> dict[tuple[str | None, int], Any]:
    rows = latest_revisions(files.read()).collect()
    return {(getattr(r, "site", None), int(r.window_start.timestamp() * 1000)): r for r in rows}


def test_a_window_grows_by_revisions_and_a_restarted_stream_goes_on_where_it_was(files: Files) -> None:
    asked = {"synopsis": CountMin(64, 3), "time": "t", "window": SlidingWindow("20s", "10s"), "stratify_by": "site"}
    files.add([(1_000 * i, "jfk", i % 7) for i in range(30)])
    files.run(**asked, lateness="1 minute")
    files.add([(1_000 * i, "lga", i) for i in range(15, 40)])
    files.add([(5_000, "jfk", 99), (35_000, None, 3)])
    written = files.run(**asked, lateness="1 minute")
    of_one = written[(written.site == "jfk") & (written.window_start == pd.Timestamp(0))]
    assert sorted(zip(of_one.revision, of_one.records, strict=True)) == [(1, 20), (2, 21)]
    found = newest(files)
    expected = {}
    for t, site, v in files.rows:
        for start in SlidingWindow("20s", "10s").windows_of_slice(t // 10_000 * 10_000):
            expected.setdefault((site, start), []).append(v)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert bytes(found[key].synopsis) == local(CountMin(64, 3), values)
    assert written.late.sum() == 0


def test_records_after_a_final_window_are_counted_and_change_nothing(files: Files) -> None:
    asked = {"synopsis": HyperLogLog(), "time": "t", "window": TumblingWindow("10s"), "lateness": "5 seconds"}
    asked["null_times"] = "count"
    files.add([(1_000, "a", 1), (12_000, "a", 2), (14_999, "a", 3)])
    files.add([(2_000, "a", 4), (40_000, "a", 5)])  # the watermark is at 9.999: not late
    files.run(**asked)
    files.add([(3_000, "a", 6), (9_000, "a", 7), (36_000, "a", 8), (None, "a", 9)])  # at 35: late, late, in time
    written = files.run(**asked)
    assert [(int(r.window_start.timestamp()), r.late) for r in written[written.late > 0].itertuples()] == [(0, 2)]
    untimed = written[written.window_start.isna()]
    assert [(r.records, r.synopsis) for r in untimed.itertuples()] == [(1, None)]
    held = {key[1] // 1000: bytes(row.synopsis) for key, row in newest(files).items()}
    assert held == {
        0: local(HyperLogLog(), [1, 4]),
        10: local(HyperLogLog(), [2, 3]),
        30: local(HyperLogLog(), [8]),
        40: local(HyperLogLog(), [5]),
    }


def test_a_record_that_joins_two_sessions_withdraws_both_of_them(files: Files) -> None:
    asked = {"synopsis": HyperLogLog(), "time": "t", "window": SessionWindow("5s"), "lateness": "1 minute"}
    files.add([(1_000, "a", 1), (2_000, "a", 2), (9_000, "a", 3), (30_000, "a", 4)])
    files.run(**asked)
    assert sorted(key[1] for key in newest(files)) == [1_000, 9_000, 30_000]
    files.add([(5_500, "a", 5)])
    files.run(**asked)
    found = {key[1]: (int(r.window_end.timestamp() * 1000), bytes(r.synopsis)) for key, r in newest(files).items()}
    assert found == {
        1_000: (14_000, local(HyperLogLog(), [1, 2, 3, 5])),
        30_000: (35_000, local(HyperLogLog(), [4])),
    }


def test_one_synopsis_over_everything_needs_no_time(files: Files) -> None:
    for part in range(3):
        files.add([(0, "a", part * 100 + i) for i in range(100)])
    written = files.run(synopsis=HyperLogLog())
    assert sorted(zip(written.revision, written.records, strict=True)) == [(1, 100), (2, 200), (3, 300)]
    last = written[written.revision == 3].synopsis.iloc[0]
    assert from_bytes(last).to_bytes() == local(HyperLogLog(), list(range(300)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"synopsis": HyperLogLog(), "window": TumblingWindow("1s")}, "lateness: it bounds how long"),
        ({"synopsis": HaarWavelet(), "window": TumblingWindow("1s"), "lateness": "1 second"}, "needs all records"),
    ],
)  # fmt: skip
def test_strategies_that_a_stream_cannot_run_are_refused(
    spark: Any, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    stream = spark.readStream.schema(SCHEMA).parquet(str(tmp_path))
    with pytest.raises(InvalidRequest, match=message):
        build(stream, of="v", time="t", **arguments)
