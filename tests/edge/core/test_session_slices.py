"""What an edge ships of a session query: ordinary slices, and where the records of each begin and end."""

from __future__ import annotations

import pyarrow as pa
import pytest

from edge.core.core import EdgeCore
from edge.core.events import Dropped, Effect, Ingested, PullEvent
from edge.core.streams import StreamSpec
from edgewater.base.streams import TIME_COLUMN
from edgewater.model.algebra import LateRecordPolicy
from edgewater.model.query import QuerySpec
from edgewater.wire import FrameBody, QueryRef, SliceClose
from tests.cores import drained, open_core

REF = QueryRef("q", 1)
STREAM = StreamSpec({"k": pa.string()})
ALMOST_OVER = {"events": 999}


def make_core(**parts: object) -> EdgeCore:
    given = {"name": "q", "from": "events", "measures": {"n": "count()"}, "window": {"session": "1s", "max": "3s"}}
    return open_core(STREAM, (REF, QuerySpec.from_mapping({**given, **parts})), stream="events")


def reads(core: EdgeCore, *times: int) -> list[Effect]:
    columns = {"k": pa.array([f"k{t}" for t in times]), TIME_COLUMN: pa.array(times, pa.int64())}
    return core.handle(Ingested("events", "file", pa.record_batch(columns), 1 << 40))


def ships(core: EdgeCore, *, early: bool = False, capacity: int = 1 << 20) -> list[FrameBody]:
    return [f.unpack() for f in drained(core, PullEvent(capacity, ALMOST_OVER if early else {}))]


def extents(bodies: list[FrameBody]) -> list[tuple[int, int | None, int | None]]:
    return [(c.slice_start_ms, c.first_ms, c.last_ms) for b in bodies for c in b.closes]


def test_a_close_has_the_first_and_last_event_time() -> None:
    core = make_core()
    reads(core, 700, 300, 1400)
    reads(core, 600, 4000)
    assert extents(ships(core)) == [(0, 300, 700), (1000, 1400, 1400)]


def test_a_close_of_other_windows_has_no_event_times() -> None:
    core = make_core(window={"tumbling": "1s"})
    reads(core, 700, 4000)
    assert extents(ships(core)) == [(0, None, None)]


@pytest.mark.parametrize("early", [True, False])
def test_every_frame_with_records_of_a_slice_has_their_event_times(early: bool) -> None:
    core = make_core(group_by="k", budget={"staleness": "2s"})
    reads(core, *range(200, 800, 10))
    if not early:
        reads(core, 1500)
    bodies = ships(core, early=early, capacity=600)
    assert len([b for b in bodies if b.partials]) > 3
    for body in bodies:
        told = {c.slice_start_ms: (c.first_ms, c.last_ms) for c in body.closes}
        assert all(told[p.slice_start_ms] == (200, 790) for p in body.partials)


def test_a_late_record_extends_the_event_times_of_a_completely_sent_slice() -> None:
    core = make_core()
    reads(core, 500, 2000)
    ships(core)
    assert core.queries[REF].store.slices.keys() == {2000} and core.queries[REF].store.finished.recent == {
        0: (1, 0, 500, 500)
    }
    again = EdgeCore({"events": STREAM})
    again.restore(core.to_state())
    for held in (core, again):
        reads(held, 200)
        (body,) = ships(held)
        assert body.closes == (SliceClose(0, 2, 1, (), 200, 500),)
    assert again.to_state() == core.to_state()


def test_a_slice_is_kept_until_no_session_over_it_can_be_revised() -> None:
    core = make_core(lateness="2s")
    reads(core, 500, 5900)
    ships(core)
    assert reads(core, 100) == [], "a session of 3 s from here is closed at 4 s, and final 2 s later"
    reads(core, 6000)
    assert reads(core, 100) == [Dropped(REF, "too-late", 1)]
    ships(core)
    assert core.queries[REF].store.finished.recent.keys() == {5000}


def test_a_query_that_needs_order_follows_the_watermark() -> None:
    core = make_core(window={"tumbling": "1s"})
    pipeline = core.queries[REF]
    assert pipeline.intake.late_record_policy is LateRecordPolicy.MERGED
    pipeline.intake.late_record_policy = LateRecordPolicy.DROPPED
    reads(core, 500, 1100)
    assert reads(core, 600, 1200) == [Dropped(REF, "out-of-order", 1)]
