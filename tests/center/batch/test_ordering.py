"""Wavelets on Spark: parts at a manager, asked as if they were one."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from center.batch import Strategy, build, evaluate
from center.batch.windows import SlidingCount
from edgewater.model.windows import CountWindow, SlidingWindow, TumblingWindow
from edgewater.synopses import HaarWavelet, Point, RangeSum, from_bytes

pytestmark = pytest.mark.spark

MANAGED = Strategy("order_based", "slicing", partitions=3)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("window", "strategy"),
    [
        (None, "auto"),
        (TumblingWindow("10s"), MANAGED),
        pytest.param(SlidingWindow("20s", "5s"), MANAGED, marks=pytest.mark.nightly),
        (SlidingWindow("20s", "5s"), Strategy("order_based", "bucketing", partitions=4)),
        pytest.param(CountWindow(1500), MANAGED, marks=pytest.mark.nightly),
        (SlidingCount(1500, 900), MANAGED),
    ],
    ids=["global", "tumbling", "sliding by slices", "sliding by windows", "count", "sliding count"],
)
def test_a_manager_answers_by_the_index_of_the_whole_window(
    df: Any, records: pd.DataFrame, window: Any, strategy: Any
) -> None:
    rows = build(df, HaarWavelet(1 << 12), of="size", time="ts", window=window, strategy=strategy).collect()
    ordered = records.sort_values(["ts", "size"])
    assert rows
    for number, row in enumerate(sorted(rows, key=lambda r: r.window_start)):
        start, end = (int(t.timestamp() * 1000) for t in (row.window_start, row.window_end))
        signal = ordered[(ordered.ts >= start) & (ordered.ts < end)]["size"].to_numpy()
        if isinstance(window, CountWindow | SlidingCount):
            begin = number * getattr(window, "every", window.count)
            signal = ordered["size"].to_numpy()[begin : begin + window.count]
        manager = from_bytes(bytes(row.synopsis))
        assert manager.records == row.records == len(signal)
        for first, last in ((0, len(signal) - 1), (7, len(signal) // 2), (len(signal) // 3, len(signal) // 3)):
            answer = manager.query(RangeSum(first, last))
            assert answer.lower <= signal[first : last + 1].sum() <= answer.upper
        if window is not None and len(signal) < 1 << 12:
            assert manager.query(Point(5)).value == pytest.approx(signal[5])  # every coefficient is held


def test_a_manager_is_evaluated_as_any_other_synopsis(df: Any, records: pd.DataFrame) -> None:
    out = build(df, HaarWavelet(1 << 15), of="size", time="ts", stratify_by="site", strategy=MANAGED)
    answers = evaluate(out, '{"question": "range_sum", "first": 0, "last": 99}').collect()
    for row in answers:
        truth = records[records.site == row.site].sort_values(["ts", "size"])["size"].head(100).sum()
        assert (row.error, row.estimate) == (None, pytest.approx(truth))
