"""An edge counts the records of its version's windows only, also if it hears of the border late."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from edge.core.core import EdgeCore
from edge.core.events import BackfillIngested, Configured, Ingested, PullEvent, SourcesOpened
from edge.core.streams import StreamSpec
from edge.durability.event_records import decode_event, encode_event
from edgewater.base.streams import MIN_TIME_MS, TIME_COLUMN
from edgewater.model.query import QuerySpec
from edgewater.model.window_range import WindowRange
from edgewater.wire import DropReason, FrameBody, LossReason, QueryRef
from tests.cores import drained

SECOND = 1_000
OLD, NEW = QueryRef("n", 1), QueryRef("n", 2)
BORDER = 60 * SECOND
OPEN = {"s": -(1 << 61)}


def spec(**changes: Any) -> QuerySpec:
    mapping = {"name": "n", "from": "s", "measures": {"n": "count()"}, "window": {"tumbling": "60s"}, "lateness": "1h"}
    return QuerySpec.from_mapping({**mapping, **changes})


def core(*queries: tuple[QueryRef, QuerySpec]) -> EdgeCore:
    result = EdgeCore({"s": StreamSpec({"k": pa.string()})})
    result.handle(SourcesOpened((("s", "file"),), ("file",)))
    result.handle(Configured(queries))
    return result


def batch(*times_s: float) -> pa.RecordBatch:
    times = pa.array([int(t * SECOND) for t in times_s], pa.int64())
    return pa.record_batch({"k": pa.array(["a"] * len(times)), TIME_COLUMN: times})


def reads(edge: EdgeCore, *times_s: float) -> None:
    edge.handle(Ingested("s", "file", batch(*times_s), 1_000 * SECOND))


def changes(edge: EdgeCore, new: QuerySpec, old: QuerySpec, border_ms: int = BORDER) -> None:
    borders = {OLD: WindowRange(until_ms=border_ms), NEW: WindowRange(border_ms)}
    edge.handle(Configured(((OLD, old), (NEW, new)), borders))


def ships(edge: EdgeCore) -> dict[QueryRef, list[FrameBody]]:
    bodies: dict[QueryRef, list[FrameBody]] = {}
    for frame in drained(edge, PullEvent(1 << 20, OPEN)):
        bodies.setdefault(frame.query, []).append(frame.unpack())
    return bodies


def counted(bodies: list[FrameBody]) -> dict[int, int]:
    """Records by slice, in seconds."""
    return {c.slice_start_ms // SECOND: c.observed for body in bodies for c in body.closes}


def test_each_version_counts_the_records_of_its_windows() -> None:
    edge = core((OLD, spec()))
    reads(edge, 1, 2, 59)
    changes(edge, spec(window={"tumbling": "30s"}), spec())
    reads(edge, 58, 60, 61, 95, 500)
    bodies = ships(edge)
    assert counted(bodies[OLD]) == {0: 4}
    assert counted(bodies[NEW]) == {60: 2, 90: 1}
    assert all(not body.dropped for body in (*bodies[OLD], *bodies[NEW])), "records of other versions are not dropped"


def test_sliding_windows_that_start_before_the_border_have_their_records_behind_it() -> None:
    window = {"sliding": "60s", "every": "20s"}
    edge = core((OLD, spec(window=window)))
    changes(edge, spec(window=window), spec(window=window))
    reads(edge, 10, 50, 70, 90, 110, 500)
    bodies = ships(edge)
    assert counted(bodies[OLD]) == {0: 1, 40: 1, 60: 1, 80: 1}  # [40, 100) is the last window before the border
    assert counted(bodies[NEW]) == {60: 1, 80: 1, 100: 1}


def test_a_session_is_cut_at_the_border() -> None:
    window = {"session": "20s"}
    edge = core((OLD, spec(window=window)))
    changes(edge, spec(window=window), spec(window=window))
    reads(edge, 45, 55, 65, 75, 500)
    bodies = ships(edge)
    assert counted(bodies[OLD]) == {40: 2}
    assert counted(bodies[NEW]) == {60: 2}


def test_an_edge_that_hears_late_states_what_it_lacks() -> None:
    edge = core((OLD, spec()))
    reads(edge, 59, 61, 130)
    changes(edge, spec(), spec())
    reads(edge, 131, 190, 500)
    bodies = ships(edge)
    assert counted(bodies[OLD]) == {0: 1}, "what it had counted behind the border is dropped"
    assert {body.since_ms for body in bodies[NEW]} == {180 * SECOND}
    assert counted(bodies[NEW]) == {180: 1}


def test_an_edge_that_hears_late_reads_again_with_since() -> None:
    edge = core((OLD, spec()))
    reads(edge, 1, 59, 61, 130)
    changes(edge, spec(since="beginning"), spec())
    backfill = edge.queries[NEW].backfill
    assert backfill is not None
    assert backfill.since_ms == BORDER
    edge.handle(BackfillIngested(NEW, "file", batch(1, 59, 61, 130), 1_000 * SECOND))
    reads(edge, 131, 500)
    bodies = ships(edge)
    assert counted(bodies[NEW]) == {60: 1, 120: 2}
    assert not [loss for body in bodies[NEW] for loss in body.losses if loss.reason == LossReason.BEFORE_QUERY]


def test_borders_survive_journal_and_checkpoint() -> None:
    event = Configured(((OLD, spec()),), {OLD: WindowRange(until_ms=BORDER)})
    assert decode_event(encode_event(event)) == event
    edge = core((OLD, spec()))
    changes(edge, spec(), spec())
    again = EdgeCore({"s": StreamSpec({"k": pa.string()})})
    again.restore(edge.to_state())
    assert again.to_state() == edge.to_state()
    reads(again, 59, 61, 500)
    assert [counted(each) for each in ships(again).values()] == [{0: 1}, {60: 1}]


def late(bodies: list[FrameBody]) -> list[tuple[int, int]]:
    """Slice and number of late records that were not counted."""
    return [(d.slice_start_ms, d.records) for body in bodies for d in body.dropped if d.reason is DropReason.TOO_LATE]


def test_late_records_of_a_version_that_is_gone_are_counted_on_the_oldest_version() -> None:
    edge = core((OLD, spec(lateness="0s")))
    reads(edge, 1, 2, 59)
    changes(edge, spec(lateness="0s"), spec(lateness="0s"))
    reads(edge, 61, 200)
    ships(edge)
    reads(edge, 3, 4)  # for a final window, while its version is there: in no frame yet
    edge.handle(Configured(((NEW, spec(lateness="0s")),), {NEW: WindowRange(BORDER)}))
    reads(edge, 5, 58, 300)
    edge.handle(Configured(((NEW, spec(lateness="0s")),), {NEW: WindowRange(BORDER)}))
    bodies = ships(edge)
    assert late(bodies[NEW]) == [(MIN_TIME_MS, 4)]
    again = EdgeCore({"s": StreamSpec({"k": pa.string()})})
    again.restore(edge.to_state())
    reads(again, 6, 400)
    assert late(ships(again)[NEW]) == [(MIN_TIME_MS, 1)], "after a restart, too"


def test_a_version_that_is_there_counts_its_late_records_itself() -> None:
    edge = core((OLD, spec()))
    changes(edge, spec(), spec())
    reads(edge, 10, 61, 500)
    ships(edge)
    reads(edge, 20)
    bodies = ships(edge)
    assert not late(bodies.get(NEW, [])) and counted(bodies[OLD])[0] == 2


def test_records_that_are_read_again_were_counted_before() -> None:
    edge = EdgeCore({"s": StreamSpec({"k": pa.string()})})
    edge.handle(SourcesOpened((("s", "file"),), ("file",)))
    edge.handle(Configured(()))
    reads(edge, 1, 2, 70)
    edge.handle(Configured(((NEW, spec(since="beginning")),), {NEW: WindowRange(BORDER)}))
    edge.handle(BackfillIngested(NEW, "file", batch(1, 2, 70), 1_000 * SECOND))
    reads(edge, 500)
    bodies = ships(edge)
    assert not late(bodies[NEW]) and counted(bodies[NEW])[60] == 1


def test_a_journal_of_an_earlier_release_is_replayed_as_it_was() -> None:
    record = encode_event(Configured(((NEW, spec()),), {NEW: WindowRange(BORDER)}, counts_earlier=False))
    event = decode_event(record)
    assert isinstance(event, Configured) and not event.counts_earlier
    edge = EdgeCore({"s": StreamSpec({"k": pa.string()})})
    edge.handle(SourcesOpened((("s", "file"),), ("file",)))
    edge.handle(event)
    reads(edge, 1, 500)
    assert not late(ships(edge).get(NEW, []))
