from __future__ import annotations

import copy
import datetime
import math
import pickle
import zoneinfo
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edgewater.base.errors import InvalidQuery
from edgewater.model.calendar_units import CALENDAR_UNITS
from edgewater.model.windows import (
    MAX_COUNT,
    MAX_SLICES_PER_WINDOW,
    CalendarWindow,
    CountWindow,
    SessionWindow,
    SlidingWindow,
    TumblingWindow,
    Window,
)
from tests.refusals import refused

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
    ("given_", "field"),
    [
        (None, "window"),
        ("60s", "window"),
        ({}, "window"),
        ({"hopping": "5s"}, "window"),
        ({"tumbling": "5s", "sliding": "5s"}, "window"),
        ({"session": "30s", "offset": "1s"}, "window.offset"),
        ({"session": "0s"}, "window.session"),
        ({"session": 30}, "window.session"),
        ({"session": "30s", "max": "29s"}, "window.max"),
        ({"session": "1s", "max": "3h"}, "window.max"),
        ({"count": 0}, "window.count"),
        ({"count": True}, "window.count"),
        ({"count": "1000"}, "window.count"),
        ({"count": 10, "max": "1s"}, "window.max"),
        ({"tumbling": "5s", "every": "5s"}, "window.every"),
        ({"tumbling": "5s", "ofset": "5s"}, "window.ofset"),
        ({"tumbling": 5}, "window.tumbling"),
        ({"tumbling": "0s"}, "window.tumbling"),
        ({"tumbling": "-5s"}, "window.tumbling"),
        ({"sliding": "5s"}, "window.every"),
        ({"sliding": "5s", "every": "0s"}, "window.every"),
        ({"sliding": "5s", "every": "6s"}, "window.every"),
        ({"sliding": "1d", "every": "1001ms"}, "window.every"),
    ],
)
def test_a_bad_window_names_the_field_and_what_is_accepted(given_: Any, field: str) -> None:
    with refused(InvalidQuery, field):
        Window.from_mapping(given_)


def test_sizes_and_steps_are_positive_and_slices_bounded() -> None:
    for size, every in ((0, 1), (1, 0), (-5, 5)):
        with refused(InvalidQuery, "window"):
            SlidingWindow(size, every)
    assert SlidingWindow(MAX_SLICES_PER_WINDOW, 1).slices_per_window == MAX_SLICES_PER_WINDOW
    with refused(InvalidQuery, "window.every"):
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
        with refused(InvalidQuery, "window.size"):
            TumblingWindow(bad)  # type: ignore[arg-type]
    with refused(InvalidQuery, "window.session"):
        SessionWindow(-5)


# Calendar windows

HOUR_MS = 3_600_000
CHANGES = [
    ("Europe/Berlin", 2026, 3, 29),  # 23 hours
    ("Europe/Berlin", 2026, 10, 25),  # 25 hours
    ("America/Havana", 2024, 11, 3),  # midnight is repeated
    ("America/Sao_Paulo", 2018, 11, 4),  # midnight is skipped
    ("America/St_Johns", 2010, 11, 7),  # at 00:01, clocks go back to 23:01
    ("Australia/Lord_Howe", 2026, 4, 5),  # half an hour
]


def calendar_windows() -> st.SearchStrategy[CalendarWindow]:
    zones = st.sampled_from(["UTC", *sorted({zone for zone, *_ in CHANGES}), "Asia/Kathmandu"])
    return st.builds(
        CalendarWindow, st.sampled_from(sorted(CALENDAR_UNITS)), zones, st.integers(-23, 23).map(HOUR_MS.__mul__)
    )


@given(calendar_windows(), st.lists(st.integers(0, 4_000_000_000_000), min_size=1, max_size=20))
def test_calendar_windows_divide_all_times(window: CalendarWindow, times: list[int]) -> None:
    starts = window.slice_starts(np.array(times))
    for time, start in zip(times, starts.tolist(), strict=True):
        end = window.slice_end(start)
        assert window.slice_start(time) == start <= time < end <= start + window.longest_ms
        assert (window.slice_start(end), window.slice_start(end - 1)) == (end, start)
        assert window.windows_of_slice(start) == [start] == list(window.slices_of_window(start))
        assert (window.following(start), window.first_ending_after(end - 1)) == (end, start)
        assert (window.next_start(start), window.next_start(start + 1)) == (start, end)
        assert (window.end_of_windows_before(start), window.end_of_windows_before(start + 1)) == (start, end)


@pytest.mark.parametrize(("zone", "year", "month", "day"), CHANGES)
@pytest.mark.parametrize("hours", [0, 2, -1])
def test_a_day_begins_when_its_clocks_first_show_the_border(
    zone: str, year: int, month: int, day: int, hours: int
) -> None:
    window, clock = CalendarWindow("day", zone, hours * HOUR_MS), zoneinfo.ZoneInfo(zone)
    noon = datetime.datetime(year, month, day, 12, tzinfo=datetime.UTC)
    minutes = [noon + datetime.timedelta(minutes=m) for m in range(-2880, 2880)]
    dates = [(at.astimezone(clock).replace(tzinfo=None) - datetime.timedelta(hours=hours)).date() for at in minutes]
    reached = list(np.maximum.accumulate([date.toordinal() for date in dates]))
    first = {n: int(minutes[reached.index(n)].timestamp() * 1000) for n in sorted(set(reached))}
    times = np.array([int(at.timestamp() * 1000) for at in minutes[1500:]])  # the first days are not whole
    assert window.slice_starts(times).tolist() == [first[number] for number in reached[1500:]]
    for start in sorted({first[number] for number in reached[1500:]}):
        assert (window.slice_start(start), window.slice_start(start + HOUR_MS)) == (start, start)
        assert window.slice_start(start - 1) < start


def test_times_outside_the_calendar_have_windows_of_the_usual_length() -> None:
    window = CalendarWindow("month", "Europe/Berlin")
    for time in (-(1 << 62), 1 << 62):
        start = window.slice_start(time)
        assert start <= time < window.slice_end(start) == start + window.slice_ms


@pytest.mark.parametrize(
    ("mapping", "canonical"),
    [
        ({"tumbling": "1 day", "zone": "Europe/Berlin"}, {"tumbling": "1 day", "zone": "Europe/Berlin"}),
        ({"tumbling": "1d", "zone": "Europe/Berlin"}, {"tumbling": "1 day", "zone": "Europe/Berlin"}),
        ({"tumbling": "1 month"}, {"tumbling": "1 month", "zone": "UTC"}),
        ({"tumbling": "1w", "zone": "UTC", "offset": "-1d"}, {"tumbling": "1 week", "zone": "UTC", "offset": "-1d"}),
        ({"tumbling": "1d"}, {"tumbling": "1d"}),
        ({"tumbling": "1h", "offset": "-10m"}, {"tumbling": "1h", "offset": "-10m"}),
    ],
)
def test_the_canonical_form_of_calendar_windows_and_negative_offsets(
    mapping: dict[str, str], canonical: dict[str, str]
) -> None:
    window = Window.from_mapping(mapping)
    assert window.to_mapping() == canonical and Window.from_mapping(canonical) == window
    assert pickle.loads(pickle.dumps(window)) == window


@pytest.mark.parametrize(
    ("mapping", "field"),
    [
        ({"tumbling": "6h", "zone": "UTC"}, "window.tumbling"),
        ({"tumbling": "2 days", "zone": "UTC"}, "window.tumbling"),
        ({"tumbling": "1 day", "zone": "Europe/Berln"}, "window.zone"),
        ({"tumbling": "1 day", "zone": 2}, "window.zone"),
        ({"tumbling": "1 day", "offset": "24h"}, "window.offset"),
        ({"sliding": "1d", "every": "1h", "zone": "UTC"}, "window.zone"),
    ],
)
def test_what_is_no_calendar_window_is_refused_by_field(mapping: dict[str, object], field: str) -> None:
    with refused(InvalidQuery, field):
        Window.from_mapping(mapping)
