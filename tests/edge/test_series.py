"""Increments of cumulative series, compared with a loop over single points."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge.series import FORGET_NS, Increments, Points, SeriesMemory, SeriesUpdate
from tests.examples import examples

SINCE_NS = 100
MANY = 1000


@dataclass(frozen=True)
class Point:
    series: int
    start_ns: int
    time_ns: int
    total: int | float


def totals(points: list[Point]) -> Points:
    keys = [point.series.to_bytes(16, "big") for point in points]
    is_int = np.array([isinstance(point.total, int) for point in points], np.bool_)
    bits = [p.total if isinstance(p.total, int) else int(np.float64(p.total).view(np.int64)) for p in points]
    times = (np.array([getattr(p, name) for p in points], np.int64) for name in ("start_ns", "time_ns"))
    return Points(keys, *times, np.array(bits, np.int64), is_int, np.zeros(len(points)))


def found(result: Increments) -> list[int | float | str | None]:
    """Returns per point its increment, None, or why it is rejected."""
    added = result.added
    columns = [result.out_of_order, result.too_many, result.counts, added.bits, added.is_int, added.floats]
    return [
        "old" if old else "many" if many else None if not counts else bits if is_int else value
        for old, many, counts, bits, is_int, value in zip(*(column.tolist() for column in columns), strict=True)
    ]


def add(memory: SeriesMemory, points: list[Point], most: int = MANY, now_ns: int = 0) -> list[int | float | str | None]:
    result = memory.increments(totals(points), now_ns, most)
    memory.apply(SeriesUpdate.from_bytes(result.update.to_bytes()))
    return found(result)


def guessed(
    memory: SeriesMemory, points: list[Point], ended: dict[int, list[int]] | None = None
) -> list[tuple[object, str]]:
    """Returns per point its increment, as `found`, and the guess that it depends on; "" without a guess."""
    ends = {series.to_bytes(16, "big"): times_ns for series, times_ns in (ended or {}).items()}
    result = memory.increments(totals(points), 0, MANY, ends)
    memory.apply(SeriesUpdate.from_bytes(result.update.to_bytes()))
    reasons = [""] * len(points)
    for reason, mask in result.guesses.items():
        for at in np.flatnonzero(mask).tolist():
            assert not reasons[at], "one guess per point"
            reasons[at] = reason.label
    return list(zip(found(result), reasons, strict=True))


def one_by_one(last: dict[int, Point], batch: list[Point]) -> list[tuple[int | float | str | None, str]]:
    """Does what `guessed` promises, in a loop."""
    results: list[tuple[int | float | str | None, str]] = [(None, "")] * len(batch)
    remembered = dict(last)
    for at in sorted(range(len(batch)), key=lambda at: (batch[at].time_ns, at)):
        point, before, first = batch[at], last.get(batch[at].series), remembered.get(batch[at].series)
        has_start = 0 < point.start_ns < point.time_ns
        if first is not None and point.time_ns < first.time_ns:
            is_included = point.start_ns == first.start_ns > 0 and point.total <= first.total
            if point.start_ns != first.start_ns:
                results[at] = "old", ""
            elif not is_included and point.total:
                results[at] = None, "late-total"
            continue
        if before is not None and point.time_ns == before.time_ns:
            results[at] = (None if point.total == before.total else "old"), ""
            continue
        if before is None:
            known = has_start and point.start_ns >= SINCE_NS
            results[at] = (point.total, "") if known else (None, "first-total" if point.total else "")
        elif point.start_ns != before.start_ns and point.start_ns >= before.time_ns:
            results[at] = (point.total, "") if has_start else (None, "first-total" if point.total else "")
        elif point.total < before.total:
            results[at] = point.total, "assumed-reset"
        else:
            overlaps = point.start_ns != before.start_ns and before.total
            results[at] = point.total - before.total, "overlapping-total" if overlaps else ""
        last[point.series] = point
    return results


numbers = st.integers(0, 1 << 60) | st.sampled_from([0.5, 2.0, 1e300])
batches = st.lists(
    st.lists(
        st.builds(Point, st.integers(0, 3), st.sampled_from([50, 120, 150, 300]), st.integers(51, 400), numbers),
        max_size=12,
    ),
    max_size=4,
)


@examples(300)
@given(batches)
def test_increments_are_the_same_as_one_by_one(given_batches: list[list[Point]]) -> None:
    # Series 0 has no starts: the start of a point without one is the one before, which the loop does not know.
    for batch in given_batches:
        batch[:] = [Point(p.series, p.start_ns * (p.series > 0), p.time_ns, p.total) for p in batch]
    memory, last = SeriesMemory(SINCE_NS), dict[int, Point]()
    for batch in given_batches:
        assert guessed(memory, batch) == one_by_one(last, batch)
        memory = SeriesMemory.from_bytes(memory.to_bytes())


def test_an_interval_that_overlaps_the_last_one_goes_on_with_it_on_a_guess() -> None:
    """The start of a counter is computed as now - uptime, so it moves by a little, later or earlier."""
    memory = SeriesMemory(SINCE_NS)
    assert guessed(memory, [Point(1, 150, 200, 7)]) == [(7, "")]
    assert guessed(memory, [Point(1, 153, 210, 9), Point(1, 156, 220, 12)]) == [
        (2, "overlapping-total"),
        (3, "overlapping-total"),
    ]
    assert guessed(memory, [Point(1, 149, 230, 13)]) == [(1, "overlapping-total")]
    assert guessed(memory, [Point(1, 149, 240, 15)]) == [(2, "")], "a start that moved back rejects nothing later"


def test_a_reset_is_certain_only_if_the_new_interval_begins_after_the_last_one() -> None:
    memory = SeriesMemory(SINCE_NS)
    guessed(memory, [Point(1, 150, 200, 7)])
    assert guessed(memory, [Point(1, 200, 210, 9)]) == [(9, "")]
    assert guessed(memory, [Point(1, 205, 220, 3)]) == [(3, "assumed-reset")]
    assert guessed(memory, [Point(1, 140, 230, 2)]) == [(2, "assumed-reset")], "the clock was set back at a restart"


def test_a_total_after_the_reported_end_of_its_series_goes_on_with_it_on_a_guess() -> None:
    memory = SeriesMemory(SINCE_NS)
    guessed(memory, [Point(1, 0, 200, 7), Point(2, 0, 200, 7), Point(3, 0, 200, 7)])
    assert guessed(memory, [Point(3, 0, 205, 8)], {1: [210], 2: [210], 3: [201], 4: [210]}) == [
        (1, "overlapping-total")
    ]
    memory = SeriesMemory.from_bytes(memory.to_bytes())
    again = [Point(n, 0, 220, 9) for n in (1, 2, 3)]
    assert guessed(memory, again) == [(2, "overlapping-total"), (2, "overlapping-total"), (1, "")]
    assert guessed(memory, [Point(1, 0, 230, 10)]) == [(1, "")]
    batch = [Point(1, 0, time_ns, total) for time_ns, total in ((240, 10), (250, 13), (260, 2), (270, 5))]
    assert guessed(memory, batch, {1: [235, 238, 255, 265, 225]}) == [
        (0, "overlapping-total"),
        (3, ""),
        (2, "assumed-reset"),
        (3, "overlapping-total"),
    ]


def test_a_first_total_counts_if_the_series_began_after_the_memory_did() -> None:
    memory = SeriesMemory(SINCE_NS)
    batch = [Point(1, 150, 200, 7), Point(2, 99, 200, 7), Point(3, 0, 200, 7), Point(4, 200, 200, 7)]
    assert add(memory, batch) == [7, None, None, None]
    assert add(memory, [Point(n, p.start_ns, 300, 9) for n, p in enumerate(batch, 1)]) == [2, 2, 2, 2]


def test_a_later_start_or_a_smaller_total_begins_a_series_anew() -> None:
    memory = SeriesMemory(SINCE_NS)
    assert add(memory, [Point(1, 150, 200, 7), Point(1, 250, 300, 9), Point(1, 250, 310, 2)]) == [7, 9, 2]
    assert add(memory, [Point(1, 0, 320, 4), Point(1, 330, 340, 9)]) == [2, 9]
    memory = SeriesMemory(SINCE_NS)
    assert add(memory, [Point(1, 0, 200, 5), Point(1, 250, 300, 9)]) == [None, 9], "a start that was unknown"
    assert add(memory, [Point(1, 400, 400, 50)]) == [None], "its true start is unknown"
    assert add(memory, [Point(1, 400, 410, 53)]) == [3]


def test_a_late_point_and_a_repetition_add_nothing() -> None:
    memory = SeriesMemory(SINCE_NS)
    add(memory, [Point(1, 250, 300, 9)])
    assert add(memory, [Point(1, 250, 299, 8), Point(1, 250, 300, 9), Point(1, 250, 300, 10)]) == [None, None, "old"]
    assert guessed(memory, [Point(1, 250, 299, 8), Point(1, 250, 300, 9)]) == [(None, ""), (None, "")]
    assert guessed(memory, [Point(1, 250, 299, 80), Point(1, 0, 299, 8)]) == [(None, "late-total")] * 2
    assert guessed(memory, [Point(1, 200, 299, 8)]) == [("old", "")]


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
        result = memory.increments(replace(one, extra=np.array([extra])), 0, MANY)
        memory.apply(SeriesUpdate.from_bytes(result.update.to_bytes()))
        found_extra += result.added.extra.tolist()
    assert found_extra == [-5.0, -4.0, 4.0]


def test_a_full_memory_rejects_new_series_and_forgets_silent_ones() -> None:
    memory, late = SeriesMemory(SINCE_NS), 2 * FORGET_NS
    assert add(memory, [Point(n, 150, 200, n) for n in range(4)], most=3) == [0, 1, 2, "many"]
    assert add(memory, [Point(0, 150, late, 5), Point(7, late - 1, late, 6)], most=3, now_ns=late) == [5, 6]
    assert len(memory) == 2, "the others were silent for a day"
    # A series that was forgotten may have been counted, so its total is no increment.
    assert add(memory, [Point(1, 150, late, 100)], most=3, now_ns=late) == [None]
