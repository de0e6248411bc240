"""Sessions that late records join, and those that are too long."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from center.batch.slicing import Bucketing, LateCounts, SessionWindow, Slicer, TumblingWindow
from center.ledger.sessionize import connected_slices, session_windows
from edgewater.synopses import CountMin
from tests.examples import examples


def count_min() -> CountMin:
    return CountMin(16, 2)


def test_sessions_that_a_late_record_joins_become_one_that_names_them() -> None:
    slicer = Slicer(count_min, [SessionWindow(10), TumblingWindow(100)], 1000)
    slicer.update([1, 2, 3], [0, 15, 60])
    assert [(r.start, r.end) for r in slicer.advance("", 90)] == [(0, 10), (15, 25), (60, 70)]
    assert slicer.update([4], [8]) == LateCounts(1, 1, (0, 0))
    (joined,) = slicer.advance("", 91)
    assert (joined.start, joined.end, joined.revision, joined.records) == (0, 25, 2, 3)
    assert joined.replaces == ((0, 10), (15, 25))
    assert slicer.advance("", 92) == []


def test_a_session_that_is_too_long_is_cut_and_the_next_begins_there() -> None:
    slicer = Slicer(count_min, [SessionWindow(10, 30)], 5)
    slicer.update(np.arange(50), np.arange(3, 103, 2))
    (first,) = slicer.advance("", 34)
    assert (first.start, first.end, first.records, first.cut) == (3, 30, 14, True)
    assert slicer.update([7, 7], [29, 30]) == LateCounts(2, 2, (0,))
    (again,) = slicer.advance("", 35)
    assert (again.start, again.end, again.revision, again.records, again.cut) == (3, 30, 2, 15, True)
    assert slicer.update([7, 7], [29, 30]) == LateCounts(2, 1, (1,)), "the first is final, and the second is not"
    rest = slicer.finish()
    assert [(r.start, r.end, r.cut) for r in rest] == [(30, 60, True), (61, 90, True), (91, 111, False)]
    assert sum(r.records for r in rest) == 50 - 14 + 2


def test_a_record_that_moves_the_beginning_of_a_run_moves_all_its_cuts() -> None:
    slicer = Slicer(count_min, [SessionWindow(10, 20)], 1000)
    slicer.update(np.arange(6), np.arange(12, 62, 9))
    assert [(r.start, r.end) for r in slicer.advance("", 100)] == [(12, 30), (30, 50), (57, 67)]
    slicer.update([1], [9])
    moved = slicer.advance("", 101)
    assert [(r.start, r.end, r.revision) for r in moved] == [(9, 20, 2), (21, 40, 2), (48, 67, 2)]
    assert [r.replaces for r in moved] == [((12, 30),), ((30, 50),), ((57, 67),)]


@examples(60)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=80),
    st.integers(1, 12),
    st.integers(1, 5),
    st.sampled_from([Slicer, Bucketing]),
)
def test_sessions_are_cut_where_the_center_cuts_them(times: list[int], gap: int, most: int, strategy: type) -> None:
    family = SessionWindow(gap, gap * most)
    slicer = strategy(count_min, [family])
    for at in range(0, len(times), 9):
        slicer.update(times[at : at + 9], times[at : at + 9])
    extents: dict[int, tuple[int, int]] = {}
    for time in sorted(times):
        first, _ = extents.get(family.slice_start(time), (time, time))
        extents[family.slice_start(time)] = (first, time)
    expected, drawn = [], set()
    for start in sorted(extents):
        if start not in drawn:
            run = connected_slices(start, extents, family)
            drawn.update(run)
            expected += [(r.start_ms, r.end_ms, r.cut) for r in session_windows(run, extents, family)]
    assert [(r.start, r.end, r.cut) for r in slicer.finish()] == expected
