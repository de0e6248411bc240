from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edgewater.model.errors import InvalidQuery
from edgewater.model.windows import (
    MAX_COUNT,
    MAX_SLICES_PER_WINDOW,
    CountWindow,
    SessionWindow,
    SlidingWindow,
    TumblingWindow,
    Window,
)

TIMES = st.integers(-(1 << 50), 1 << 50)


@st.composite
def windows(draw: st.DrawFn) -> SlidingWindow:
    slice_ms = draw(st.integers(1, 100_000))
    per_step, per_window = draw(st.integers(1, 30)), draw(st.integers(1, 60))
    assume(per_step <= per_window)
    return SlidingWindow(slice_ms * per_window, slice_ms * per_step, draw(st.integers(-1_000_000, 1_000_000)))


def windows_containing(window: SlidingWindow, time: int) -> list[int]:
    """The definition: every k with offset + k·every ≤ time < offset + k·every + size."""
    newest = (time - window.offset_ms) // window.every_ms
    starts = [
        window.offset_ms + k * window.every_ms
        for k in range(newest - window.size_ms // window.every_ms - 1, newest + 1)
    ]
    return [start for start in starts if start <= time < start + window.size_ms]


@given(windows(), TIMES)
def test_a_record_belongs_to_the_windows_that_contain_its_time(window: SlidingWindow, time: int) -> None:
    start = window.slice_start(time)
    assert start <= time < start + window.slice_ms
    assert window.windows_of_slice(start) == windows_containing(window, time)


@given(windows(), TIMES)
def test_every_window_is_a_merge_of_whole_slices(window: SlidingWindow, time: int) -> None:
    for start in window.windows_of_slice(window.slice_start(time)):
        slices = list(window.slices_of_window(start))
        assert len(slices) == window.slices_per_window
        assert slices[0] == start and slices[-1] + window.slice_ms == window.end(start)
        assert all(window.slice_start(s) == s and start in window.windows_of_slice(s) for s in (slices[0], slices[-1]))
        assert window.slice_start(time) in slices


@given(windows(), TIMES)
def test_the_last_window_end_of_a_slice_is_that_of_its_latest_window(window: SlidingWindow, time: int) -> None:
    start = window.slice_start(time)
    end = window.last_window_end(start)
    assert end == max(s + window.size_ms for s in windows_containing(window, time)) >= start + window.slice_ms


@given(windows(), st.lists(TIMES, max_size=20))
def test_vectorised_slice_starts_equal_the_scalar_ones(window: SlidingWindow, times: list[int]) -> None:
    starts = window.slice_starts(np.array(times, np.int64))
    assert starts.dtype == np.int64 and starts.tolist() == [window.slice_start(t) for t in times]


@given(st.integers(1, 10**9), TIMES, st.integers(0, 10**9))
def test_tumbling_windows_do_not_overlap_and_leave_no_gap(size: int, time: int, offset: int) -> None:
    window = TumblingWindow(size, offset)
    assert window.is_tumbling and window.slice_ms == size and window.slices_per_window == 1
    (start,) = window.windows_of_slice(window.slice_start(time))
    assert start <= time < window.end(start)
    assert window.windows_of_slice(window.end(start)) == [start + size]


def test_times_before_the_epoch_round_down() -> None:
    assert TumblingWindow(1000).slice_start(-1) == -1000
    assert TumblingWindow(1000, 300).slice_start(299) == -700
    assert SlidingWindow(5000, 2000).slice_ms == 1000


@given(windows())
def test_the_canonical_form_is_read_back(window: SlidingWindow) -> None:
    assume(window.offset_ms >= 0)
    assert Window.from_mapping(window.to_mapping()) == window


def test_every_documented_form_is_read() -> None:
    assert Window.from_mapping({"tumbling": "60s"}) == TumblingWindow(60_000) == SlidingWindow("1m", "60s")
    assert Window.from_mapping({"tumbling": "1d", "offset": "5h"}) == TumblingWindow("1d", "5h")
    assert Window.from_mapping({"sliding": "5m", "every": "30s"}) == SlidingWindow("5m", "30s")
    assert Window.from_mapping({"sliding": "5m", "every": "5m"}).to_mapping() == {"tumbling": "5m"}
    assert Window.from_mapping({"sliding": "5m", "every": "30s", "offset": "1s"}).to_mapping() == {
        "sliding": "5m", "every": "30s", "offset": "1s"}  # fmt: skip


@pytest.mark.parametrize(
    ("given_", "field", "reason"),
    [
        (None, "window", "tumbling: 60s"),
        ("60s", "window", "tumbling: 60s"),
        ({}, "window", "tumbling: 60s"),
        ({"hopping": "5s"}, "window", "exactly one kind"),
        ({"tumbling": "5s", "sliding": "5s"}, "window", "exactly one kind"),
        ({"session": "30s", "offset": "1s"}, "window.offset", "unknown key of a session window"),
        ({"session": "0s"}, "window.session", "at least 1 ms"),
        ({"session": 30}, "window.session", "a duration needs a unit"),
        ({"session": "30s", "max": "29s"}, "window.max", "from the gap, 30s, to 10000 gaps"),
        ({"session": "1s", "max": "3h"}, "window.max", "limits the length of a session"),
        ({"count": 0}, "window.count", f"from 1 to {MAX_COUNT}"),
        ({"count": True}, "window.count", "a whole number of records"),
        ({"count": "1000"}, "window.count", "a whole number of records"),
        ({"count": 10, "max": "1s"}, "window.max", "unknown key of a count window"),
        ({"tumbling": "5s", "every": "5s"}, "window.every", "unknown key of a tumbling window"),
        ({"tumbling": "5s", "ofset": "5s"}, "window.ofset", "unknown key"),
        ({"tumbling": 5}, "window.tumbling", "a duration needs a unit"),
        ({"tumbling": "0s"}, "window.tumbling", "at least 1 ms"),
        ({"tumbling": "-5s"}, "window.tumbling", "at least 1 ms"),
        ({"tumbling": "5s", "offset": "-1s"}, "window.offset", "at least 0 ms"),
        ({"sliding": "5s"}, "window.every", "missing key of a sliding window"),
        ({"sliding": "5s", "every": "0s"}, "window.every", "at least 1 ms"),
        ({"sliding": "5s", "every": "6s"}, "window.every", "at most the window's size, 5s"),
        ({"sliding": "1d", "every": "1001ms"}, "window.every", "this step gives 86400000 slices"),
    ],
)
def test_a_bad_window_names_the_field_and_what_is_accepted(given_: Any, field: str, reason: str) -> None:
    with pytest.raises(InvalidQuery, match=reason) as caught:
        Window.from_mapping(given_)
    assert caught.value.field == field


def test_sizes_and_steps_are_positive_and_slices_bounded() -> None:
    for size, every in ((0, 1), (1, 0), (-5, 5)):
        with pytest.raises(InvalidQuery, match="positive"):
            SlidingWindow(size, every)
    assert SlidingWindow(MAX_SLICES_PER_WINDOW, 1).slices_per_window == MAX_SLICES_PER_WINDOW
    with pytest.raises(InvalidQuery, match=f"at most {MAX_SLICES_PER_WINDOW} slices"):
        SlidingWindow(MAX_SLICES_PER_WINDOW + 1, 1)


@given(windows())
def test_slices_are_as_long_as_possible(window: SlidingWindow) -> None:
    assert window.slice_ms == math.gcd(window.size_ms, window.every_ms)


@given(st.integers(1, 10**9), st.integers(1, MAX_SLICES_PER_WINDOW), TIMES)
def test_a_session_over_a_slice_closes_by_the_last_window_end_of_the_slice(gap: int, slices: int, time: int) -> None:
    window = SessionWindow(gap, gap * slices)
    start = window.slice_start(time)
    assert start <= time < start + window.slice_ms == start + gap and window.slices_per_window == slices
    longest_end = start + slices * gap - 1 + gap
    assert longest_end <= window.closes_at(longest_end) <= window.last_window_end(start)
    assert longest_end - start <= window.longest_ms


def test_a_session_closes_with_the_slice_that_contains_its_end() -> None:
    window = SessionWindow("1s")
    assert [window.closes_at(end) for end in (1000, 1001, 2000, -1500)] == [1000, 2000, 2000, -1000]


def test_the_default_maximum_of_sessions_is_a_day_or_the_maximal_number_of_slices() -> None:
    assert SessionWindow("30s").to_mapping() == {"session": "30s", "max": "1d"}
    assert SessionWindow(10).max_ms == 100_000
    assert SessionWindow("2d").max_ms == 2 * 86_400_000
    assert SessionWindow("30s", "1h") == Window.from_mapping({"session": "30s", "max": "60m"})


@given(
    st.one_of(
        st.builds(SessionWindow, st.integers(1, 10**8)),
        st.integers(1, 10**6).flatmap(lambda g: st.builds(SessionWindow, st.just(g), st.integers(g, g * 1000))),
        st.builds(CountWindow, st.integers(1, MAX_COUNT)),
    )
)
def test_the_canonical_form_of_sessions_and_counts_is_read_back(window: Window) -> None:
    assert Window.from_mapping(window.to_mapping()) == window


def test_windows_survive_pickling_and_are_hashable() -> None:
    for window in (TumblingWindow("1m"), SlidingWindow("5m", "1m", "10s"), SessionWindow("30s"), CountWindow(7)):
        assert pickle.loads(pickle.dumps(window)) == window and len({window, copy.copy(window)}) == 1


def test_constructors_refuse_values_of_other_types() -> None:
    for bad in ("soon", True, 1.5, None):
        with pytest.raises(InvalidQuery, match=r"window\.size.*a duration such as"):
            TumblingWindow(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidQuery, match=r"window\.session"):
        SessionWindow(-5)
