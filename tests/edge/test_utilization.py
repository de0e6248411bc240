from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.utilization import BusyMeter


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> BusyMeter:
    return BusyMeter(clock)


def test_what_a_source_does_not_wait_is_its_share(clock: Clock, meter: BusyMeter) -> None:
    with meter.working("f"):
        clock.s += 0.3
        with meter.waiting("f"):
            clock.s += 0.6
        clock.s += 0.1
    assert meter.take() == pytest.approx(0.4)


def test_the_busiest_source_is_said(clock: Clock, meter: BusyMeter) -> None:
    for source, busy_s in (("a", 0.1), ("b", 0.7), ("c", 0.2)):
        with meter.working(source):
            clock.s += busy_s
    assert meter.take() == pytest.approx(0.7)


def test_work_and_waits_that_go_on_over_a_heartbeat_are_divided_there(clock: Clock, meter: BusyMeter) -> None:
    with meter.working("f"):
        clock.s += 1
        assert meter.take() == pytest.approx(1.0)
        clock.s += 0.25
        with meter.waiting("f"):
            clock.s += 0.75
            assert meter.take() == pytest.approx(0.25)
            clock.s += 1
            assert meter.take() == 0.0
    clock.s += 1
    assert meter.take() == 0.0, "a source that has ended is not busy"


def test_overlapping_work_of_a_source_counts_once(clock: Clock, meter: BusyMeter) -> None:
    """Two pushed requests, decoded at the same time, of a source whose own reading waits for ever."""
    with meter.working("s:http"), meter.waiting("s:http"):
        first, second = meter.working("s:http"), meter.working("s:http")
        first.__enter__()
        clock.s += 0.2
        second.__enter__()
        clock.s += 0.2
        first.__exit__(None, None, None)
        clock.s += 0.2
        second.__exit__(None, None, None)
        clock.s += 0.4
        assert meter.take() == pytest.approx(0.6)


def test_a_failure_ends_the_work_and_the_wait_for_a_retry_is_not_busy(clock: Clock, meter: BusyMeter) -> None:
    with pytest.raises(OSError, match="gone"), meter.working("f"), meter.waiting("f"):
        clock.s += 1
        raise OSError("gone")
    clock.s += 5
    assert meter.take() == 0.0


def test_the_recent_share_is_of_the_last_interval_and_the_one_that_runs(clock: Clock, meter: BusyMeter) -> None:
    with meter.working("f"):
        clock.s += 1
    meter.take()
    assert meter.recent == pytest.approx(1.0), "right after a heartbeat it is the last interval's"
    clock.s += 1
    assert meter.recent == pytest.approx(0.5)
    clock.s += 8
    assert meter.recent == pytest.approx(0.1), "without a center there are no heartbeats, and it is not stale"
    assert meter.take() == 0.0, "asking for it begins no interval"


def test_no_time_gives_no_share(meter: BusyMeter) -> None:
    assert meter.take() == 0.0 == meter.recent


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=20))
def test_shares_of_intervals_add_up_to_the_time_worked(steps: list[tuple[float, float]]) -> None:
    clock, total = Clock(), 0.0
    meter = BusyMeter(clock)
    with meter.working("f"):
        for busy_s, idle_s in steps:
            began_s = clock.s
            clock.s += busy_s
            with meter.waiting("f"):
                clock.s += idle_s
                length_s = clock.s - began_s
                share = meter.take()
            assert 0.0 <= share <= 1.0
            total += share * length_s
    assert total == pytest.approx(sum(busy_s for busy_s, _ in steps), abs=1e-9)
