from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.utilization import LOOK_S, BusyMeter


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


def test_the_busy_share_excludes_idle_time(clock: Clock, meter: BusyMeter) -> None:
    with meter.busy("f"):
        clock.s += 0.3
        with meter.idle("f"):
            clock.s += 0.6
        clock.s += 0.1
    assert meter.take_busy_share() == pytest.approx(0.4)


def test_the_share_is_that_of_the_busiest_source(clock: Clock, meter: BusyMeter) -> None:
    for source, busy_s in (("a", 0.1), ("b", 0.7), ("c", 0.2)):
        with meter.busy(source):
            clock.s += busy_s
    assert meter.take_busy_share() == pytest.approx(0.7)


def test_sections_that_span_a_heartbeat_are_divided_between_the_intervals(clock: Clock, meter: BusyMeter) -> None:
    with meter.busy("f"):
        clock.s += 1
        assert meter.take_busy_share() == pytest.approx(1.0)
        clock.s += 0.25
        with meter.idle("f"):
            clock.s += 0.75
            assert meter.take_busy_share() == pytest.approx(0.25)
            clock.s += 1
            assert meter.take_busy_share() == 0.0
    clock.s += 1
    assert meter.take_busy_share() == 0.0, "a source that has ended is not busy"


def test_overlapping_busy_sections_of_a_source_count_once(clock: Clock, meter: BusyMeter) -> None:
    """Two pushed requests, decoded at the same time, of a source whose own read loop is always idle."""
    with meter.busy("s:http"), meter.idle("s:http"):
        first, second = meter.busy("s:http"), meter.busy("s:http")
        first.__enter__()
        clock.s += 0.2
        second.__enter__()
        clock.s += 0.2
        first.__exit__(None, None, None)
        clock.s += 0.2
        second.__exit__(None, None, None)
        clock.s += 0.4
        assert meter.take_busy_share() == pytest.approx(0.6)


def test_a_failure_ends_the_busy_section(clock: Clock, meter: BusyMeter) -> None:
    with pytest.raises(OSError, match="gone"), meter.busy("f"), meter.idle("f"):
        clock.s += 1
        raise OSError("gone")
    clock.s += 5
    assert meter.take_busy_share() == 0.0


def test_the_recent_share_covers_the_previous_and_the_current_interval(clock: Clock, meter: BusyMeter) -> None:
    with meter.busy("f"):
        clock.s += 1
    meter.take_busy_share()
    assert meter.recent_busy_share == pytest.approx(1.0), "right after a heartbeat it is the last interval's"
    clock.s += 1
    assert meter.recent_busy_share == pytest.approx(0.5)
    clock.s += 8
    assert meter.recent_busy_share == pytest.approx(0.1), (
        "without a center there are no heartbeats, and it is not stale"
    )
    assert meter.take_busy_share() == 0.0, "reading it does not begin an interval"


def test_an_empty_interval_has_share_0(meter: BusyMeter) -> None:
    assert meter.take_busy_share() == 0.0 == meter.recent_busy_share


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=20))
def test_shares_of_intervals_add_up_to_the_busy_time(steps: list[tuple[float, float]]) -> None:
    clock, total = Clock(), 0.0
    meter = BusyMeter(clock)
    with meter.busy("f"):
        for busy_s, idle_s in steps:
            began_s = clock.s
            clock.s += busy_s
            with meter.idle("f"):
                clock.s += idle_s
                length_s = clock.s - began_s
                share = meter.take_busy_share()
            assert 0.0 <= share <= 1.0
            total += share * length_s
    assert total == pytest.approx(sum(busy_s for busy_s, _ in steps), abs=1e-9)


def test_a_wait_that_input_ends_counts_as_empty_until_a_moment_ago_however_long_it_is(
    clock: Clock, meter: BusyMeter
) -> None:
    with meter.busy("f"), meter.idle("f"):
        for _ in range(10):
            clock.s += 60
            assert meter.empty_for_s("f") == LOOK_S
    clock.s += 60
    assert meter.empty_for_s("f") > 600, "the begin of the wait is the last time that is certain after its end"


def test_a_source_that_sleeps_saw_its_input_before_it_slept(clock: Clock, meter: BusyMeter) -> None:
    async def poll() -> None:
        with meter.busy("f"), meter.idle("f"):
            sleeping = meter.sleep(3600)
            await sleeping

    async def main() -> None:
        task = asyncio.create_task(poll())
        await asyncio.sleep(0)
        clock.s += 60
        assert meter.empty_for_s("f") == 60
        task.cancel()

    asyncio.run(main())
