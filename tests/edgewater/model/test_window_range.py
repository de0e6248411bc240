"""Where the windows of one version of a query end, and those of the next one begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.model.window_range import ALL_WINDOWS, WindowRange, next_border
from edgewater.model.windows import SessionWindow, SlicedWindow, SlidingWindow, TumblingWindow
from tests.examples import examples

WINDOWS = (
    TumblingWindow(60),
    TumblingWindow(60, 7),
    SlidingWindow(60, 25),
    SlidingWindow(50, 20, 3),
    SessionWindow(30, 300),
    SessionWindow(45, 450),
)


def test_a_version_without_borders_has_all_windows_and_slices() -> None:
    assert ALL_WINDOWS.slices(TumblingWindow(60)) == (MIN_TIME_MS, MAX_TIME_MS)
    assert 0 in ALL_WINDOWS


@examples(200)
@given(st.sampled_from(WINDOWS), st.integers(-1000, 1000), st.integers(0, 500))
def test_the_slices_of_a_range_are_those_of_the_windows_that_start_in_it(
    window: SlicedWindow, from_ms: int, length: int
) -> None:
    own = WindowRange(from_ms, from_ms + length)
    begin, end = own.slices(window)
    if isinstance(window, SlidingWindow):
        origin, every = window.offset_ms, window.every_ms
        starts = [s for s in range(origin - 100 * every, origin + 200 * every, every) if s in own]
        slices = {s for start in starts for s in window.slices_of_window(start)}
        taken = {s for s in range(origin - 100 * every, origin + 200 * every, window.slice_ms) if begin <= s < end}
        assert slices == taken or (not slices and begin >= own.until_ms)
    else:
        assert begin % window.slice_ms == end % window.slice_ms == 0
        assert begin - from_ms < window.slice_ms


@examples(300)
@given(st.sampled_from(WINDOWS), st.sampled_from(WINDOWS), st.integers(-1000, 1000))
def test_a_border_is_a_start_of_the_new_windows_and_cuts_old_sessions_between_slices(
    before: SlicedWindow, after: SlicedWindow, time_ms: int
) -> None:
    border = next_border(time_ms, before, after)
    if border is None:
        assert isinstance(before, SessionWindow)
        assert isinstance(after, SlidingWindow)
        assert after.offset_ms
        return
    assert border >= time_ms
    assert after.next_start(border) == border
    if isinstance(before, SessionWindow):
        assert border % before.gap_ms == 0
    # No record is between the versions.
    assert WindowRange(until_ms=border).slices(before)[1] >= WindowRange(border).slices(after)[0]


@pytest.mark.parametrize("time_ms", [-61, -60, -1, 0, 1, 59, 60])
def test_a_border_that_is_possible_stays(time_ms: int) -> None:
    border = next_border(time_ms, TumblingWindow(60), TumblingWindow(60))
    assert border is not None
    assert border - time_ms in range(60)
    assert next_border(border, TumblingWindow(60), TumblingWindow(60)) == border
