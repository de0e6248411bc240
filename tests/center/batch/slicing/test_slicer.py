"""Slicing and bucketing against windows that are worked out record by record."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from center.batch.slicing import (
    Bucketing,
    CountWindow,
    LateCounts,
    SessionWindow,
    Slicer,
    SlidingCount,
    SlidingWindow,
    TumblingWindow,
    WindowResult,
)
from edgewater.model.errors import Conflict, InvalidQuery, InvalidRecord, InvalidRequest, StorageError
from edgewater.synopses import (
    BloomFilter,
    CountMin,
    DDSketch,
    EquiWidthHistogram,
    FastAgms,
    FifoSample,
    GroupedAggregate,
    HaarWavelet,
    HyperLogLog,
    Point,
    RangeSum,
    ReservoirSample,
    SliceManager,
    function_named,
)
from tests.center.batch.slicing.naive_windows import Naive
from tests.examples import examples

pytestmark = pytest.mark.slow

FAMILIES = (
    TumblingWindow(10),
    TumblingWindow(7, 3),
    SlidingWindow(12, 4),
    SlidingWindow(9, 5),
    SlidingWindow(22, 2),
    SessionWindow(3),
    SessionWindow(6),
    SessionWindow(4, 9),
    SessionWindow(5, 5),
    CountWindow(5),
    SlidingCount(6, 2),
    SlidingCount(5, 3),
)
MAKERS = {
    "count_min": lambda: CountMin(16, 2),
    "histogram": lambda: EquiWidthHistogram(0, 50, 5),
    "agms": lambda: FastAgms(16, 3),
    "hyperloglog": lambda: HyperLogLog(6),
    "bloom": lambda: BloomFilter(64, 2),
    "ddsketch": lambda: DDSketch(0.05),
}


steps = st.lists(
    st.one_of(
        st.tuples(st.just("records"), st.lists(st.tuples(st.integers(-6, 14), st.integers(0, 50)), max_size=12)),
        st.tuples(st.just("advance"), st.integers(0, 12)),
    ),
    min_size=1,
    max_size=14,
)


def play(slicer: Slicer, naive: Naive, script: list, make: object, restored: bool = False) -> None:
    """One stream through both; every answer is what a synopsis of the window's records is."""
    now, revisions = 0, {}
    for what, given_ in [*script, ("advance", 200)]:
        if what == "records":
            times = [now + at for at, _ in given_]
            values = [value for _, value in given_]
            late = slicer.update(np.array(values, np.int64), np.array(times, np.int64))
            assert late.dropped == naive.update(values, times)
            assert late.records == len(values)
            continue
        if restored:
            slicer = type(slicer).restore(make, slicer.windows, slicer.snapshot(), slicer.lateness_ms)
        now += given_
        results = slicer.advance("", now)
        news = naive.advance(now)
        assert {(r.window_index, r.start, r.end): r.records for r in results} == {k: len(v) for k, v in news.items()}
        for result in results:
            key = (result.window_index, result.start, result.end)
            check(result, news[key], make)
            before = [revisions.pop((key[0], *bounds)) for bounds in result.replaces]
            assert result.revision > max([*before, revisions.get(key, 0)])
            revisions[key] = result.revision


def check(result: WindowResult, rows: list, make) -> None:
    whole = make()
    values, times = (np.array([row[i] for row in rows], np.int64) for i in (2, 0))
    whole.update(values, times=times)
    assert result.synopsis.to_bytes() == whole.to_bytes()
    assert (result.first_ms, result.last_ms) == (rows[0][0], rows[-1][0])


@examples(120)
@given(
    st.sampled_from([Slicer, Bucketing]),
    st.sampled_from(sorted(MAKERS)),
    st.lists(st.sampled_from(FAMILIES), min_size=1, max_size=5),
    st.sampled_from([0, 5, 20]),
    steps,
    st.booleans(),
)
def test_windows_are_what_their_records_are(strategy, name, families, lateness, script, restored) -> None:
    make = MAKERS[name]
    slicer = strategy(make, families, lateness, sites=[""])
    naive = Naive(tuple(families), lateness)
    slicer.advance("", -1000)
    play(slicer, naive, script, make, restored)


@pytest.mark.parametrize("strategy", [Slicer, Bucketing])
def test_samples_keep_a_records_number_in_whichever_slice_it_is(strategy: type[Slicer]) -> None:
    rng = np.random.default_rng(1)
    times, values = rng.integers(0, 1000, 3000), rng.integers(0, 10**6, 3000)
    for make in (lambda: ReservoirSample(20), lambda: FifoSample(20)):
        slicer = strategy(make, [SlidingWindow(200, 50), SessionWindow(4), CountWindow(500)], 100)
        for at in range(0, 3000, 300):
            slicer.update(values[at : at + 300], times[at : at + 300])
        for result in slicer.finish():
            if result.window_index == 0:
                inside = (times >= result.start) & (times < result.end)
                whole = make()
                whole.update(values[inside], times=times[inside], ids=np.flatnonzero(inside))
                assert result.synopsis.items() == whole.items()
            assert result.synopsis.records == result.records


def test_groups_are_sliced_like_one_synopsis() -> None:
    def make() -> GroupedAggregate:
        count, total = function_named("count"), function_named("sum")
        return GroupedAggregate(
            {"url": pa.string()},
            {"n": count.make((), None), "bytes": total.make((), pa.int64())},
        )

    rng = np.random.default_rng(2)
    times, urls, sizes = rng.integers(0, 100, 500), rng.integers(0, 5, 500), rng.integers(0, 1000, 500)
    slicer = Slicer(make, [TumblingWindow(10), SlidingCount(100, 50)])
    for at in range(0, 500, 50):
        part = slice(at, at + 50)
        slicer.update({"url": [f"/{u}" for u in urls[part]], "bytes": sizes[part]}, times[part], site="fra")
    results = [r for r in slicer.advance("fra", 100) if r.window_index == 0]
    assert [r.start for r in results] == list(range(0, 100, 10))
    for result in results:
        inside = times // 10 * 10 == result.start
        (keys,) = result.synopsis.rows()
        held = dict(zip(keys.to_pylist(), result.synopsis.query("bytes").value.tolist(), strict=True))
        assert held == {f"/{u}": sizes[inside & (urls == u)].sum() for u in np.unique(urls[inside])}
    with pytest.raises(InvalidRecord, match="url"):
        slicer.update({"bytes": [1]}, [1000])


@pytest.mark.parametrize("strategy", [Slicer, Bucketing])
def test_a_window_of_an_order_based_synopsis_is_a_manager_of_its_slices_in_order(strategy: type[Slicer]) -> None:
    rng = np.random.default_rng(3)
    times = rng.permutation(400)
    signal = rng.normal(0, 1, 400)
    slicer = strategy(lambda: HaarWavelet(64), [SlidingWindow(100, 25), CountWindow(150)])
    for at in range(0, 400, 40):
        slicer.update(signal[times[at : at + 40]], times[at : at + 40])
    results = slicer.finish()
    assert len(results) == 19 + 2
    for result in results:
        assert isinstance(result.synopsis, SliceManager)
        start, end = max(result.start, 0), min(result.end, 400)
        assert result.records == end - start
        answer = result.synopsis.query(RangeSum(0, end - start - 1))
        assert answer.lower <= signal[start:end].sum() <= answer.upper
        point = result.synopsis.query(Point((end - start) // 2))
        assert point.lower <= signal[start + (end - start) // 2] <= point.upper
    late = slicer.update([1.0], [5])
    assert late == LateCounts(1, 0, (1, 1))
    with pytest.raises(InvalidQuery, match="order-based"):
        strategy(lambda: HaarWavelet(), [TumblingWindow(10)], 5)


def test_the_least_watermark_of_live_sites_counts_and_a_silent_site_never_blocks() -> None:
    slicer = Slicer(MAKERS["count_min"], [TumblingWindow(10)], sites=["a", "b", "c"])
    slicer.update([1, 2], [3, 14], site="a")
    assert slicer.advance("a", 50) == [] and slicer.advance("b", 30) == []
    (first, second) = slicer.idle("c")
    assert (first.start, second.start, slicer.watermark_ms) == (0, 10, 30)
    assert slicer.update([7], [33], site="c").late == 0, "heard of again: it holds the stream back, which goes not back"
    assert slicer.advance("b", 60) == [] and slicer.watermark_ms == 30
    assert [r.start for r in slicer.retire("c")] == [30]
    assert slicer.advance("a", 20) == [] and slicer.watermark_ms == 50
    with pytest.raises(InvalidRequest, match="a, b"):
        slicer.retire("x")
    lagging = Slicer(MAKERS["count_min"], [TumblingWindow(10)], sites=["a", "b"], idle_after_ms=100)
    lagging.update([1], [3], site="a")
    assert lagging.advance("b", 20) == lagging.advance("b", 110) == []
    assert lagging.watermark_ms < 0
    assert [r.start for r in lagging.advance("b", 121)] == [0]


def test_moved_count_borders_are_repaired_where_values_can_be_removed() -> None:
    times = np.arange(0, 1000)
    for make, repaired in ((MAKERS["count_min"], True), (MAKERS["hyperloglog"], False)):
        slicer = Slicer(make, [CountWindow(100)], 10_000)
        slicer.update(times, times)
        slicer.advance("", 1000)
        slicer.update([5, 6], [150, 420])
        results = slicer.advance("", 1001)
        assert [(r.start, r.revision) for r in results] == [(s, 2) for s in range(100, 1000, 100)]
        assert (slicer.repaired > 5) == repaired


def test_a_result_shares_nothing_with_a_slice() -> None:
    for strategy in (Slicer, Bucketing):
        slicer = strategy(
            MAKERS["count_min"], [TumblingWindow(10), SlidingWindow(20, 10), SessionWindow(5), CountWindow(2)], 100
        )
        slicer.update([1, 2, 3, 4], [1, 2, 3, 4])
        for result in slicer.advance("", 50):
            result.synopsis.update(np.arange(1000))
        slicer.update([9], [5])
        for result in slicer.advance("", 51):
            assert result.synopsis.records == result.records <= 5


def test_a_sliding_window_costs_a_constant_number_of_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    merges = states = 0
    real = CountMin.merge_many

    def counted(self: CountMin, others: list[CountMin]) -> CountMin:
        nonlocal merges, states
        merges, states = merges + 1, states + 1 + len(others)
        return real(self, others)

    slicer = Slicer(MAKERS["count_min"], [SlidingWindow(100, 1)])
    slicer.update(np.arange(2000), np.arange(2000))
    monkeypatch.setattr(CountMin, "merge_many", counted)
    for now in range(0, 2000, 10):
        slicer.advance("", now)
    assert merges < 1.7 * 2000
    assert states < 6.6 * 2000


def test_a_record_far_away_costs_no_more_than_another() -> None:
    slicer = Slicer(MAKERS["count_min"], [SlidingWindow(1000, 10), SessionWindow(5)], 0)
    slicer.update([1, 2, 3], [-(1 << 60), 0, 1 << 60])
    assert sum(r.records for r in slicer.finish() if r.window_index == 0) == 300


def test_invalid_records_are_refused_and_nothing_is_added() -> None:
    slicer = Slicer(MAKERS["ddsketch"], [TumblingWindow(10)])
    for values, times, match in (
        ([1, 2], [1], "whole numbers"),
        ([1], [1.5], "whole numbers"),
        ([1], pa.array([None], pa.int64()), "whole numbers|nulls"),
        ([1], [1 << 61], "2\\^60"),
        (["a"], [1], "float64"),
    ):
        with pytest.raises(InvalidRecord, match=match):
            slicer.update(values, times)
    assert slicer.slices == 0
    for windows, lateness in (([], 0), (["60s"], 0), ([TumblingWindow(10)], -1)):
        with pytest.raises(InvalidQuery):
            Slicer(MAKERS["ddsketch"], windows, lateness)
    with pytest.raises(InvalidQuery, match="at most"):
        SlidingCount(5, 6)


def test_a_snapshot_of_something_else_is_refused() -> None:
    slicer = Slicer(MAKERS["ddsketch"], [TumblingWindow(10)])
    slicer.update([1.5], [3])
    data = slicer.snapshot()
    with pytest.raises(Conflict, match="ddsketch"):
        Slicer.restore(MAKERS["bloom"], [TumblingWindow(10)], data)
    with pytest.raises(Conflict):
        Slicer.restore(MAKERS["ddsketch"], [TumblingWindow(20)], data)
    for at in range(0, len(data), 7):
        with pytest.raises(StorageError):
            Slicer.restore(MAKERS["ddsketch"], [TumblingWindow(10)], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    strings = Slicer(MAKERS["hyperloglog"], [CountWindow(2)])
    strings.update(pa.array(["a", None, "b"]), [1, 2, 3])
    again = Slicer.restore(MAKERS["hyperloglog"], [CountWindow(2)], strings.snapshot())
    again.update(["c"], [4])
    assert [r.records for r in again.finish()] == [2, 2]
