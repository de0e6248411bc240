"""Increments of cumulative series, compared with a loop over single points."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge.series import FORGET_NS, Increments, SeriesMemory, SeriesUpdate, Totals
from tests.examples import examples

SINCE_NS = 100
MANY = 1000


@dataclass(frozen=True)
class Point:
    series: int
    start_ns: int
    time_ns: int
    total: int | float


def totals(points: list[Point]) -> Totals:
    keys = [point.series.to_bytes(16, "big") for point in points]
    is_int = np.array([isinstance(point.total, int) for point in points], np.bool_)
    bits = [p.total if isinstance(p.total, int) else int(np.float64(p.total).view(np.int64)) for p in points]
    times = (np.array([getattr(p, name) for p in points], np.int64) for name in ("start_ns", "time_ns"))
    return Totals(keys, *times, np.array(bits, np.int64), is_int)


def found(result: Increments) -> list[int | float | str | None]:
    """Returns per point its increment, None, or why it is rejected."""
    columns = [result.out_of_order, result.too_many, result.counts, result.bits, result.is_int, result.floats]
    return [
        "old" if old else "many" if many else None if not counts else bits if is_int else value
        for old, many, counts, bits, is_int, value in zip(*(column.tolist() for column in columns), strict=True)
    ]


def add(memory: SeriesMemory, points: list[Point], most: int = MANY, now_ns: int = 0) -> list[int | float | str | None]:
    result = memory.increments(totals(points), now_ns, most)
    memory.apply(SeriesUpdate.from_bytes(result.update.to_bytes()))
    return found(result)


def one_by_one(last: dict[int, Point], batch: list[Point]) -> list[int | float | str | None]:
    """Does what `add` promises, in a loop."""
    results: list[int | float | str | None] = [None] * len(batch)
    newest: dict[int, int] = {}
    for at in sorted(range(len(batch)), key=lambda at: (batch[at].time_ns, at)):
        point, before = batch[at], last.get(batch[at].series)
        has_start = 0 < point.start_ns < point.time_ns
        newest_start = max(newest.get(point.series, 0), before.start_ns if before else 0)
        if before is None:
            results[at] = point.total if has_start and point.start_ns >= SINCE_NS else None
        elif point.time_ns < before.time_ns or (point.start_ns and point.start_ns < newest_start):
            is_process = point.start_ns in (0, before.start_ns) or not before.start_ns
            is_known = point.time_ns < before.time_ns or point.total == before.total
            results[at] = None if is_process and is_known and point.start_ns >= newest_start else "old"
            continue
        elif point.time_ns == before.time_ns:
            results[at] = None if point.total == before.total else "old"
            continue
        elif before.start_ns and point.start_ns > before.start_ns:
            results[at] = point.total if has_start else None
        elif point.total < before.total:
            results[at] = point.total
        else:
            results[at] = point.total - before.total
        newest[point.series] = max(newest_start, point.start_ns)
        last[point.series] = point
    return results


numbers = st.integers(0, 1 << 60) | st.sampled_from([0.5, 2.0, 1e300])
batches = st.lists(
    st.lists(
        st.builds(Point, st.integers(0, 3), st.sampled_from([0, 50, 120, 150]), st.integers(51, 400), numbers),
        max_size=12,
    ),
    max_size=4,
)


@examples(300)
@given(batches)
def test_increments_are_the_same_as_one_by_one(given_batches: list[list[Point]]) -> None:
    # The starts of a series are remembered: a loop over unlike starts is compared only where each series has one.
    starts: dict[int, int] = {}
    for batch in given_batches:
        batch[:] = [Point(p.series, starts.setdefault(p.series, p.start_ns), p.time_ns, p.total) for p in batch]
    memory, last = SeriesMemory(SINCE_NS), dict[int, Point]()
    for batch in given_batches:
        assert add(memory, batch) == one_by_one(last, batch)
        memory = SeriesMemory.from_bytes(memory.to_bytes())


def test_a_first_total_counts_if_the_series_began_after_the_memory_did() -> None:
    memory = SeriesMemory(SINCE_NS)
    batch = [Point(1, 150, 200, 7), Point(2, 99, 200, 7), Point(3, 0, 200, 7), Point(4, 200, 200, 7)]
    assert add(memory, batch) == [7, None, None, None]
    assert add(memory, [Point(n, p.start_ns, 300, 9) for n, p in enumerate(batch, 1)]) == [2, 2, 2, 2]


def test_a_later_start_or_a_smaller_total_begins_a_series_anew() -> None:
    memory = SeriesMemory(SINCE_NS)
    assert add(memory, [Point(1, 150, 200, 7), Point(1, 250, 300, 9), Point(1, 250, 310, 2)]) == [7, 9, 2]
    assert add(memory, [Point(1, 400, 400, 50)]) == [None], "its true start is unknown"
    assert add(memory, [Point(1, 400, 410, 53)]) == [3]


def test_a_late_point_and_a_repetition_add_nothing_and_an_older_start_is_rejected() -> None:
    memory = SeriesMemory(SINCE_NS)
    add(memory, [Point(1, 250, 300, 9)])
    assert add(memory, [Point(1, 250, 299, 8), Point(1, 250, 300, 9), Point(1, 250, 300, 10)]) == [None, None, "old"]
    assert add(memory, [Point(1, 200, 310, 100), Point(1, 250, 320, 12)]) == ["old", 3]
    assert add(memory, [Point(1, 0, 330, 13), Point(1, 240, 340, 14)]) == [1, "old"]


def test_integers_keep_all_their_digits_and_mix_with_floats() -> None:
    memory, large = SeriesMemory(SINCE_NS), (1 << 60) + 1
    assert add(memory, [Point(1, 150, 200, large), Point(1, 150, 201, large + 2)]) == [large, 2]
    assert add(memory, [Point(2, 150, 200, 3), Point(2, 150, 201, 3.5)]) == [3, 0.5]


def test_a_second_total_may_fall_and_begins_anew_with_the_first() -> None:
    memory = SeriesMemory(SINCE_NS)
    given = [(200, 1, -5.0), (210, 3, -9.0), (220, 2, 4.0)]
    found_extra = []
    for time_ns, total, extra in given:
        one = totals([Point(1, 150, time_ns, total)])
        result = memory.increments(
            Totals(one.keys, one.start_ns, one.time_ns, one.bits, one.is_int, np.array([extra])), 0, MANY
        )
        memory.apply(SeriesUpdate.from_bytes(result.update.to_bytes()))
        found_extra += result.extra.tolist()
    assert found_extra == [-5.0, -4.0, 4.0]


def test_a_full_memory_rejects_new_series_and_forgets_silent_ones() -> None:
    memory, late = SeriesMemory(SINCE_NS), 2 * FORGET_NS
    assert add(memory, [Point(n, 150, 200, n) for n in range(4)], most=3) == [0, 1, 2, "many"]
    assert add(memory, [Point(0, 150, late, 5), Point(7, late - 1, late, 6)], most=3, now_ns=late) == [5, 6]
    assert len(memory) == 2, "the others were silent for a day"
    # A series that was forgotten may have been counted, so its total is no increment.
    assert add(memory, [Point(1, 150, late, 100)], most=3, now_ns=late) == [None]
