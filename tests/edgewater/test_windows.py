from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edgewater.errors import InvalidQuery
from edgewater.windows import MAX_SLICES_PER_WINDOW, Window

TIMES = st.integers(-(1 << 50), 1 << 50)


@st.composite
def windows(draw: st.DrawFn) -> Window:
    slice_ms = draw(st.integers(1, 100_000))
    per_step, per_window = draw(st.integers(1, 30)), draw(st.integers(1, 60))
    assume(per_step <= per_window)
    return Window.sliding(slice_ms * per_window, slice_ms * per_step, draw(st.integers(-1_000_000, 1_000_000)))


def windows_containing(window: Window, time: int) -> list[int]:
    """The definition: every k with offset + k·every ≤ time < offset + k·every + size."""
    newest = (time - window.offset_ms) // window.every_ms
    starts = [
        window.offset_ms + k * window.every_ms
        for k in range(newest - window.size_ms // window.every_ms - 1, newest + 1)
    ]
    return [start for start in starts if start <= time < start + window.size_ms]


@given(windows(), TIMES)
def test_a_record_is_in_the_windows_that_contain_its_time(window: Window, time: int) -> None:
    start = window.slice_start(time)
    assert start <= time < start + window.slice_ms
    assert window.windows_of_slice(start) == windows_containing(window, time)


@given(windows(), TIMES)
def test_every_window_is_a_merge_of_whole_slices(window: Window, time: int) -> None:
    for start in window.windows_of_slice(window.slice_start(time)):
        slices = list(window.slices_of_window(start))
        assert len(slices) == window.slices_per_window
        assert slices[0] == start and slices[-1] + window.slice_ms == window.end(start)
        assert all(window.slice_start(s) == s and start in window.windows_of_slice(s) for s in (slices[0], slices[-1]))
        assert window.slice_start(time) in slices


@given(windows(), TIMES)
def test_a_slice_is_of_use_until_the_end_of_its_last_window(window: Window, time: int) -> None:
    start = window.slice_start(time)
    end = window.last_window_end(start)
    assert end == max(s + window.size_ms for s in windows_containing(window, time)) >= start + window.slice_ms


@given(windows(), st.lists(TIMES, max_size=20))
def test_slices_of_many_times_are_those_of_each(window: Window, times: list[int]) -> None:
    starts = window.slice_starts(np.array(times, np.int64))
    assert starts.dtype == np.int64 and starts.tolist() == [window.slice_start(t) for t in times]


@given(st.integers(1, 10**9), TIMES, st.integers(0, 10**9))
def test_tumbling_windows_do_not_overlap_and_leave_no_gap(size: int, time: int, offset: int) -> None:
    window = Window.tumbling(size, offset)
    assert window.is_tumbling and window.slice_ms == size and window.slices_per_window == 1
    (start,) = window.windows_of_slice(window.slice_start(time))
    assert start <= time < window.end(start)
    assert window.windows_of_slice(window.end(start)) == [start + size]


def test_times_before_the_epoch_round_down() -> None:
    assert Window.tumbling(1000).slice_start(-1) == -1000
    assert Window.tumbling(1000, 300).slice_start(299) == -700
    assert Window.sliding(5000, 2000).slice_ms == 1000


@given(windows())
def test_the_canonical_form_is_read_back(window: Window) -> None:
    assume(window.offset_ms >= 0)
    assert Window.from_mapping(window.to_mapping()) == window


def test_the_forms_a_user_writes() -> None:
    assert Window.from_mapping({"tumbling": "60s"}) == Window(60_000, 60_000)
    assert Window.from_mapping({"tumbling": "1d", "offset": "5h"}) == Window(86_400_000, 86_400_000, 18_000_000)
    assert Window.from_mapping({"sliding": "5m", "every": "30s"}) == Window(300_000, 30_000)
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
        ({"session": "30s"}, "window.session", "not available yet"),
        ({"count": 1000}, "window.count", "not available yet"),
        ({"tumbling": "5s", "every": "5s"}, "window.every", "unknown key of a tumbling window"),
        ({"tumbling": "5s", "ofset": "5s"}, "window.ofset", "unknown key"),
        ({"tumbling": 5}, "window.tumbling", "a duration needs a unit"),
        ({"tumbling": "0s"}, "window.tumbling", "at least 1 ms"),
        ({"tumbling": "-5s"}, "window.tumbling", "at least 1 ms"),
        ({"tumbling": "5s", "offset": "-1s"}, "window.offset", "at least 0 ms"),
        ({"sliding": "5s"}, "window.every", "needs its step"),
        ({"sliding": "5s", "every": "0s"}, "window.every", "at least 1 ms"),
        ({"sliding": "5s", "every": "6s"}, "window.every", "at most the window's size, 5s"),
        ({"sliding": "1d", "every": "1001ms"}, "window.every", "this one makes 86400000"),
    ],
)
def test_a_bad_window_names_the_field_and_what_is_accepted(given_: Any, field: str, reason: str) -> None:
    with pytest.raises(InvalidQuery, match=reason) as caught:
        Window.from_mapping(given_)
    assert caught.value.field == field


def test_sizes_and_steps_are_positive_and_slices_bounded() -> None:
    for size, every in ((0, 1), (1, 0), (-5, 5)):
        with pytest.raises(InvalidQuery, match="positive"):
            Window(size, every)
    assert Window.sliding(MAX_SLICES_PER_WINDOW, 1).slices_per_window == MAX_SLICES_PER_WINDOW
    with pytest.raises(InvalidQuery, match=f"at most {MAX_SLICES_PER_WINDOW} slices"):
        Window.sliding(MAX_SLICES_PER_WINDOW + 1, 1)


@given(windows())
def test_slices_are_the_widest_that_fit(window: Window) -> None:
    assert window.slice_ms == math.gcd(window.size_ms, window.every_ms)
