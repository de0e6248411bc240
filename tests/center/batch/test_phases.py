"""The phases without Spark: what a task gives, what slices become, and strata that are no number, which are one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from center.batch import Strategy, plan
from center.batch import compute_phase as compute
from center.batch.compute_phase import BatchJob, ComputePhase
from center.batch.layout import RecordLayout
from center.batch.merge_phase import MergePhase, SliceSynopsis, bounds_of, session_windows, sliding_windows
from center.batch.ordered import _ManagerBuilder, _PartBuilder
from center.batch.pattern import SynopsisPattern
from edgewater.base.errors import InvalidRequest
from edgewater.model.windows import CountWindow, SessionWindow, SlidingWindow, TumblingWindow
from edgewater.synopses import (
    CountMin,
    GroupedAggregate,
    HaarWavelet,
    HyperLogLog,
    Properties,
    ReservoirSample,
    from_bytes,
    function_named,
)
from tests.examples import examples


class Noted:
    """A synopsis that is the list of what went into it, and counts merges."""

    merges = 0

    def __init__(self, *values: int) -> None:
        self.values = values

    def merge_many(self, others: list[Noted]) -> Noted:
        Noted.merges += len(others)
        return Noted(*self.values, *(v for o in others for v in o.values))


def piece(start: int, first_ms: int | None = None, last_ms: int | None = None) -> SliceSynopsis:
    first_ms = start if first_ms is None else first_ms
    return SliceSynopsis(start, first_ms, first_ms if last_ms is None else last_ms, 1, 0, held=Noted(start))


@examples(200)
@given(st.sets(st.integers(-40, 60)), st.integers(1, 12), st.integers(1, 12), st.integers(0, 5), st.data())
def test_sliding_windows_hold_their_slices_in_order_whatever_is_missing(
    numbers: set[int], size: int, every: int, offset: int, data: Any
) -> None:
    window = SlidingWindow(max(size, every), min(size, every), offset)
    starts = sorted({window.slice_start(n) for n in numbers})
    expected: dict[int, tuple[int, ...]] = {}
    for start in starts:
        for w in window.windows_of_slice(start):
            expected[w] = (*expected.get(w, ()), start)
    low = offset + window.every_ms * data.draw(st.integers(-10, 5))
    end = low + window.every_ms * data.draw(st.integers(1, 30))
    found = {w: p.held.values for w, p in sliding_windows((piece(s) for s in starts), window, low, end)}
    assert found == {w: slices for w, slices in sorted(expected.items()) if low <= w < end}


def test_a_sliding_window_costs_three_merges_a_slice_whatever_the_overlap() -> None:
    window = SlidingWindow(100, 1)
    Noted.merges = 0
    assert len(list(sliding_windows((piece(s) for s in range(1000)), window, -100, 1000))) == 1099
    assert Noted.merges <= 3 * 1000 + 100


def test_a_session_is_cut_where_the_gap_is_reached_or_it_would_be_too_long() -> None:
    window = SessionWindow(10, 30)
    slices = [piece(0, 3, 9), piece(10, 12), piece(20, 21), piece(30, 30), piece(50, 51, 55), piece(60, 65)]
    job = BatchJob(SynopsisPattern.of(CountMin()), RecordLayout((), ("int64",), ("v",), "t"), window)
    found = [(p.held.values, *bounds_of(job, p)) for p in session_windows(iter(slices), window)]
    assert found == [((0, 10, 20), 3, 30), ((30,), 30, 40), ((50,), 51, 65), ((60,), 65, 75)]


@pytest.mark.nightly
@pytest.mark.parametrize("by_windows", [False, True], ids=["slicing", "bucketing"])
def test_a_task_with_little_memory_emits_early_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, by_windows: bool
) -> None:
    rng = np.random.default_rng(5)
    n = 5000
    keys = pa.array([None if k == 9 else f"k{k}" for k in rng.integers(0, 10, n)])
    times, values = rng.integers(0, 50_000, n), rng.integers(0, 100, n)
    names = ["_s0", "_v0", "_t"]
    batch = pa.RecordBatch.from_arrays([keys, pa.array(values), pa.array(times)], names=names)
    layout = RecordLayout((("key", "string"),), ("int64",), ("v",), "t")
    job = BatchJob(SynopsisPattern.of(CountMin(64, 3)), layout, SlidingWindow("10s", "5s"), by_windows=by_windows)

    def run(memory: int) -> tuple[int, list[dict[str, Any]]]:
        monkeypatch.setattr(compute, "MEMORY_BYTES", memory)
        monkeypatch.setattr(compute, "CHUNK_ROWS", 1000)
        partials = pa.Table.from_batches(ComputePhase(job)(iter([batch.slice(at, 500) for at in range(0, n, 500)])))
        order = [(c, "ascending") for c in ("_s0", "block", "slice_start", "part")]
        results: Iterator[pa.RecordBatch] = MergePhase(job)(iter(partials.sort_by(order).to_batches()))
        return len(partials), pa.Table.from_batches(results).to_pylist()

    many, bounded = run(20_000)
    few, free = run(1 << 30)
    assert many > few
    assert bounded == free
    for row in free:
        start, end = (int(row[c].timestamp() * 1000) for c in ("window_start", "window_end"))
        inside = (times >= start) & (times < end)
        held = inside & np.array([k == row["_s0"] for k in keys.to_pylist()])
        one = CountMin(64, 3)
        one.update(values[held])
        assert row["synopsis"] == one.to_bytes()


@pytest.mark.parametrize(
    ("synopsis", "window", "strata", "expected"),
    [
        (CountMin(), None, None, ("round_robin", "bucketing")),
        (CountMin(), TumblingWindow("1s"), "k", ("stratified", "bucketing")),
        (CountMin(), SlidingWindow("2s", "1s"), None, ("round_robin", "slicing")),
        (CountMin(), SessionWindow("1s"), None, ("round_robin", "slicing")),
        (CountMin(), CountWindow(5), None, ("order_based", "slicing")),
        (HaarWavelet(), SlidingWindow("2s", "1s"), None, ("order_based", "slicing")),
        (HaarWavelet(), TumblingWindow("2s"), "k", ("order_based", "bucketing")),
    ],
)  # fmt: skip
def test_the_strategy_is_read_off_the_algebra(
    synopsis: Any, window: Any, strata: Any, expected: tuple[str, ...]
) -> None:
    chosen = plan(synopsis, window=window, stratify_by=strata)
    assert (chosen.divide, chosen.compute) == expected
    assert chosen.reason in chosen.explain()


def test_what_does_not_merge_is_built_by_one_task_and_has_no_sessions() -> None:
    from center.batch.strategy import choose

    alone = Properties(mergeable=False, commutative=False)
    chosen = choose(alone, SlidingWindow("2s", "1s"), stratified=False)
    assert (chosen.divide, chosen.compute) == ("centralised", "bucketing")
    with pytest.raises(InvalidRequest, match="cannot be built over session windows"):
        choose(alone, SessionWindow("1s"), stratified=False)
    with pytest.raises(InvalidRequest, match="cannot be built over session windows"):
        plan(HaarWavelet(), window=SessionWindow("1s"))
    with pytest.raises(InvalidRequest, match=r"strategy\.partitions: 0"):
        Strategy("round_robin", "slicing", partitions=0)


def test_a_pattern_is_an_empty_synopsis_that_can_be_built_in_parts() -> None:
    full = HyperLogLog()
    full.update([1, 2])
    with pytest.raises(InvalidRequest, match="HyperLogLog of 2 values"):
        SynopsisPattern.of(full)
    assert from_bytes(SynopsisPattern.of(ReservoirSample(10, source=7)).data).source == 7
    sample = function_named("sample")
    if sample is not None:
        stack = sample.make(sample.read_parameters([], {}, "m"), pa.int64())
        with pytest.raises(InvalidRequest, match="need an identity"):
            SynopsisPattern.of(GroupedAggregate({}, {"some": stack}))


LAYOUT = RecordLayout((("key", "float64"),), ("int64",), ("v",), "t")
ORDER = [(name, "ascending") for name in ("_s0", "block", "slice_start", "part")]


def partials_of(job: BatchJob, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """What several tasks give, sorted."""
    tables = [pa.Table.from_batches(ComputePhase(job)(iter([batch]))) for batch in batches]
    return pa.concat_tables(tables).sort_by(ORDER).to_batches()


def counts(rows: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(str(r["_s0"]), int(r["window_start"].timestamp() * 1000), r["records"]) for r in rows]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (TumblingWindow("10s"), [("1.0", 0, 2), ("nan", 0, 4), ("nan", 10_000, 2)]),
        (SlidingWindow("20s", "10s"), [("1.0", -10_000, 2), ("1.0", 0, 2), ("nan", -10_000, 4), ("nan", 0, 6),
                                 ("nan", 10_000, 2)]),
    ],
    ids=["tumbling", "sliding"],
)  # fmt: skip
def test_partials_of_a_nan_stratum_belong_to_one_stratum(window: SlidingWindow, expected: Any) -> None:
    job = BatchJob(SynopsisPattern.of(CountMin(64, 3)), LAYOUT, window)
    keys, times = pa.array([math.nan, 1.0, math.nan, math.nan]), pa.array([1_000, 2_000, 3_000, 11_000])
    batch = pa.RecordBatch.from_arrays([keys, pa.array([5, 6, 7, 8]), times], names=["_s0", "_v0", "_t"])
    partials = partials_of(job, [batch, batch])
    rows = pa.Table.from_batches(MergePhase(job)(iter(partials))).to_pylist()
    assert counts(rows) == expected


def test_a_manager_of_a_stratum_that_is_nan_has_all_its_parts() -> None:
    job = BatchJob(SynopsisPattern.of(HaarWavelet()), LAYOUT, TumblingWindow("10s"), by_windows=True)
    numbers = np.arange(8)
    names = ["_s0", "_slice", "_p", "_n", "_t", "_v0"]
    columns = [pa.array([math.nan] * 8), pa.array([0] * 8), pa.array(numbers % 2), pa.array(numbers)]
    columns += [pa.array(numbers * 1000), pa.array(numbers)]
    placed = pa.Table.from_arrays(columns, names=names).sort_by([("_p", "ascending"), ("_n", "ascending")])
    # A part that lies in two batches, as Spark cuts them, is one part.
    parts = pa.Table.from_batches(_PartBuilder(job)(iter(placed.to_batches(max_chunksize=3))))
    assert parts.column("records").to_pylist() == [4, 4]
    registered = parts.sort_by(ORDER).to_batches(max_chunksize=1)
    (row,) = pa.Table.from_batches(_ManagerBuilder(job, 2)(iter(registered))).to_pylist()
    assert row["records"] == 8
