"""This edge's shares of a budget: which slice gets which, the drift reports, and the path delay."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.core.budget_schedule import MAX_STEPS, ShareSchedule
from edge.core.core import EdgeCore
from edge.core.drift import DriftRates
from edge.core.events import BudgetSet, Ingested, PullEvent
from edge.core.streams import StreamSpec
from edge.durability.event_records import decode_event, encode_event
from edgewater.base.streams import MIN_TIME_MS, TIME_COLUMN
from edgewater.wire import FrameBody, QueryRef
from tests.cores import drained, open_core, pulled
from tests.query_specs import query_spec

REF = QueryRef("q", 1)
SPEC = query_spec(
    stream="events", group_by=["k"], measures={"s": "sum(x)"}, budget={"error": {"s": 1000}}, lateness="1m"
)


STREAM = StreamSpec({"k": pa.string(), "x": pa.int64()})


def core() -> EdgeCore:
    return open_core(STREAM, (REF, SPEC), stream="events")


def ingest(edge: EdgeCore, time_ms: int, value: int) -> None:
    columns = {"k": pa.array(["p"]), "x": pa.array([value]), TIME_COLUMN: pa.array([time_ms])}
    edge.handle(Ingested("events", "file", pa.record_batch(columns), 1 << 40))


def pull(edge: EdgeCore) -> list[FrameBody]:
    return [frame.unpack() for frame in drained(edge)]


def withheld(bodies: list[FrameBody]) -> dict[int, float]:
    return {c.slice_start_ms: max((w.largest_above for w in c.withheld), default=0.0) for b in bodies for c in b.closes}


def test_a_share_applies_from_the_first_slice_that_is_not_closed() -> None:
    edge = core()
    edge.handle(BudgetSet(REF, {"s": 100.0}, 1))
    ingest(edge, 500, 60)
    ingest(edge, 1_500, 60)
    assert withheld(pull(edge)) == {0: 60.0}
    edge.handle(BudgetSet(REF, {"s": 50.0}, 2))
    assert edge.queries[REF].store.schedule.last.from_ms == 1_000
    assert pull(edge) == [], "what is closed stays as it is"
    ingest(edge, 2_500, 1)
    assert withheld(pull(edge)) == {1_000: 0.0}, "60 is more than the new share"
    ingest(edge, 700, 30)
    assert withheld(pull(edge)) == {0: 90.0}, "a late record is kept back under the slice's own share"


def test_a_smaller_share_applies_to_a_slice_of_which_only_a_part_has_been_sent() -> None:
    edge = core()
    edge.handle(BudgetSet(REF, {"s": 100.0}, 1))
    keys, values = [f"group-{n:04}" for n in range(2_000)], [1_000] * 1_900 + [60] * 100
    columns = {"k": pa.array(keys), "x": pa.array(values), TIME_COLUMN: pa.array([500] * len(keys))}
    edge.handle(Ingested("events", "file", pa.record_batch(columns), 1 << 40))
    ingest(edge, 1_500, 1)
    (first,) = pulled(edge, PullEvent(2_000))
    assert withheld([first.unpack()]) == {}, "there was no room for all, so the slice is not closed"
    edge.handle(BudgetSet(REF, {"s": 50.0}, 2))
    assert edge.queries[REF].store.schedule.last.from_ms <= 0
    assert withheld(pull(edge)) == {0: 0.0}


def test_a_share_for_a_later_slice_does_not_apply_before_it() -> None:
    edge = core()
    edge.handle(BudgetSet(REF, {"s": 100.0}, 1, from_ms=1_000))
    ingest(edge, 500, 60)
    ingest(edge, 1_500, 60)
    ingest(edge, 2_500, 60)
    assert withheld(pull(edge)) == {0: 0.0, 1_000: 60.0}


def test_an_older_version_is_ignored() -> None:
    edge = core()
    edge.handle(BudgetSet(REF, {"s": 10.0}, 2))
    edge.handle(BudgetSet(REF, {"s": 100.0}, 1))
    assert edge.queries[REF].store.shares == {"s": 10.0}


def test_shares_survive_a_checkpoint_and_the_journal() -> None:
    edge, again = core(), EdgeCore({"events": STREAM})
    edge.handle(BudgetSet(REF, {"s": 100.0}, 1))
    edge.handle(BudgetSet(REF, {"s": 10.0}, 2, from_ms=7_000))
    again.restore(edge.to_state())
    assert again.queries[REF].store.schedule == edge.queries[REF].store.schedule
    event = BudgetSet(REF, {"s": 10.0}, 2, 7_000)
    assert decode_event(encode_event(event)) == event


@given(
    words=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=90),
    slice_start=st.integers(-5, 120),
)
def test_every_slice_gets_a_share_that_the_center_allowed(
    words: list[tuple[float, int, int]], slice_start: int
) -> None:
    schedule, through, given_here = ShareSchedule(), MIN_TIME_MS, {0.0}
    for version, (share, from_ms, advance) in enumerate(words, 1):
        before = schedule.at(slice_start).get("s", 0.0)
        schedule = schedule.updated(version, {"s": share}, from_ms, through)
        if from_ms <= slice_start:
            given_here.add(share)
        if slice_start < max(from_ms, through) and len(words) <= MAX_STEPS:
            assert schedule.at(slice_start).get("s", 0.0) == before, "closed, or not meant"
        through = advance if through == MIN_TIME_MS else through + advance
    assert schedule.at(slice_start).get("s", 0.0) in given_here
    assert len(schedule.steps) <= MAX_STEPS


def test_steps_that_no_slice_needs_are_dropped() -> None:
    schedule = ShareSchedule()
    for version in range(1, 6):
        schedule = schedule.updated(version, {"s": float(version)}, version * 10, MIN_TIME_MS)
    shorter = schedule.without_before(35)
    assert [s.from_ms for s in shorter.steps] == [30, 40, 50]
    assert shorter.at(35) == schedule.at(35)


def test_the_drift_is_estimated_from_groups_near_the_share() -> None:
    edge = core()
    edge.handle(BudgetSet(REF, {"s": 100.0}, 1))
    for second, value in enumerate([60, 150, 10, 9_000, 60]):  # kept back, sent; too small, too large; still open
        ingest(edge, second * 1_000 + 500, value)
    pull(edge)
    assert edge.queries[REF].frames.drift["s"] == pytest.approx(100.0 * 2 / 1.5)


def test_without_a_share_the_drift_is_the_total_change() -> None:
    edge = core()
    for second in range(4):
        ingest(edge, second * 1_000 + 500, -10)
    pull(edge)
    assert edge.queries[REF].frames.drift["s"] == 30.0


def test_rates_follow_the_load_slowly_and_need_a_whole_window() -> None:
    meter = DriftRates(1_000)
    meter.update({"s": 10.0}, MIN_TIME_MS)
    meter.update({"s": 10.0}, 0)
    assert meter.per_s == {}, "one point is no rate"
    meter.update({"s": 60.0}, 500)
    assert meter.per_s == {}, "half a window is noise"
    meter.update({"s": 110.0}, 1_000)
    assert meter.per_s == {"s": pytest.approx(100.0)}
    meter.update({"s": 110.0}, 6_000)
    assert meter.per_s == {"s": pytest.approx(100.0 * math.exp(-1))}
    meter.update({"s": 999.0}, 1 << 62)
    assert meter.per_s == {"s": pytest.approx(100.0 * math.exp(-1))}, "the end of time is no time"
