"""The wall clock that does not follow steps at once, and what it protects: watermarks."""

from __future__ import annotations

import pyarrow as pa
import pytest

from edge.core.events import Configured, Dropped, Ingested
from edge.core.streams import StreamSpec
from edge.process import CLOCK_STEP_CONFIRMED_S, WallClock
from edgewater.base.streams import TIME_COLUMN
from edgewater.wire import QueryRef
from tests.cores import open_core
from tests.query_specs import query_spec

START_S = 1_800_000_000.0


class Machine:
    """A system whose clock can be set."""

    def __init__(self) -> None:
        self.elapsed_s, self.offset_s = 0.0, START_S
        self.clock = WallClock(lambda: self.offset_s + self.elapsed_s, lambda: self.elapsed_s)

    def after(self, seconds: float) -> float:
        """Seconds since the start by the clock, read now and `seconds` later."""
        self.clock()
        self.elapsed_s += seconds
        return self.clock() / 1000 - START_S


def test_a_steady_clock_is_followed() -> None:
    machine = Machine()
    assert machine.after(10) == 10
    machine.offset_s += 0.4  # NTP slews
    assert machine.after(10) == pytest.approx(20.4, abs=0.002)
    assert machine.clock.step_s == 0


def test_a_step_that_is_taken_back_is_never_followed() -> None:
    machine = Machine()
    for step_s in (40, -40):
        machine.offset_s += step_s
        machine.after(12)
        assert machine.clock.step_s == step_s
        machine.offset_s -= step_s
        machine.after(1)
        assert machine.clock.step_s == 0
    assert machine.after(0) == 26


def test_a_step_that_lasts_is_followed() -> None:
    machine = Machine()
    machine.offset_s += 40
    assert machine.after(CLOCK_STEP_CONFIRMED_S - 1) == CLOCK_STEP_CONFIRMED_S - 1
    assert machine.after(1) == CLOCK_STEP_CONFIRMED_S + 40
    assert machine.clock.step_s == 0


def test_each_further_step_is_confirmed_anew() -> None:
    machine = Machine()
    machine.offset_s += 40
    machine.after(CLOCK_STEP_CONFIRMED_S - 1)
    machine.offset_s += 40
    assert machine.after(2) == CLOCK_STEP_CONFIRMED_S + 1


def test_records_around_a_step_are_not_late() -> None:
    """A device and its edge on a machine whose clock is 40 s ahead for 12 s; the query has no lateness."""
    machine = Machine()
    spec = query_spec(name="n", window={"tumbling": "5s"})
    core = open_core(StreamSpec({}), source="http")
    core.handle(Configured(((QueryRef("n", 1), spec),)))
    effects = []
    for tenth in range(600):
        if tenth in (200, 320):
            machine.offset_s += 40 if tenth == 200 else -40
        machine.elapsed_s += 0.1
        stamp = int((machine.offset_s + machine.elapsed_s) * 1000)
        batch = pa.record_batch({TIME_COLUMN: pa.array([stamp], pa.int64())})
        effects += core.handle(Ingested("s", "http", batch, machine.clock()))
    assert [e for e in effects if isinstance(e, Dropped)] == []
    assert core.streams["s"].records == 600
