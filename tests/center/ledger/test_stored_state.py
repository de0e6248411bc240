"""A query's rows, written in parts of its edges, give the state back, whatever fails in between."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from center.ledger import EdgesChanged, FramesMerged, FrameSummary, Ledger, QueryRegistered, pack_state, stored_state
from edgewater.base.streams import EdgeId, StreamClock
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.wire import SliceClose
from tests.center.ledger.test_ledger_properties import CLOCKS, COURSE, REF, SPECS, course
from tests.center.results_world import edge_record
from tests.center.snapshots import snapshot
from tests.examples import examples
from tests.query_specs import query_spec

SPEC = query_spec(stream="events", lateness="1h")


class Rows:
    """A table of rows, as the result store keeps them."""

    def __init__(self) -> None:
        self.state = ""
        self.rows: dict[tuple[str, int], str] = {}
        self.written = 0

    def handle(self, ledger: Ledger, event: Any, *, fails: bool = False) -> Any:
        """Applies an event and stores the changes in one transaction."""
        with ledger.transaction() as transaction:
            emissions = ledger.handle(event)
            (change,) = transaction.changes() or (None,)
            if fails:
                raise InterruptedError
        self.written = 0
        if change is not None:
            assert change.state is not None
            self.state, self.written = change.state, len(change.state)
            for kind, start, text in change.entries:
                self.rows.pop((kind, start), None)
                if text is not None:
                    self.rows[kind, start] = text
                    self.written += len(text)
        return emissions

    def snapshot(self) -> bytes:
        return pack_state(self.state, ((kind, start, text) for (kind, start), text in reversed(self.rows.items())))


@given(SPECS, CLOCKS, COURSE, st.sampled_from([1, 2, 64]), st.data())
@examples(40)
def test_rows_give_the_state_back_after_any_event_and_any_failure(
    spec: QuerySpec, clock: StreamClock, steps: list[tuple[Any, ...]], edges_per_part: int, data: st.DataObject
) -> None:
    with patch.object(stored_state, "EDGES_PER_PART", edges_per_part):
        steady, ledger, rows, listed = Ledger(), Ledger(), Rows(), EdgesChanged(())
        for event in course(spec, clock, steps)[1]:
            wanted = steady.handle(event)
            if rows.state and data.draw(st.booleans()):
                try:
                    rows.handle(ledger, event, fails=True)
                except InterruptedError:
                    ledger.load({REF: rows.snapshot()})
            assert rows.handle(ledger, event) == wanted
            listed = event if isinstance(event, EdgesChanged) else listed
            if rows.state and data.draw(st.booleans()):  # a takeover
                ledger = Ledger()
                ledger.handle(listed)
                ledger.load({REF: rows.snapshot()})
            if rows.state:
                assert snapshot(ledger, REF) == snapshot(steady, REF)


def fed(edges: int, rows: Rows) -> Ledger:
    """A ledger of many edges, of which each has closed a slice."""
    ledger = Ledger()
    ledger.handle(EdgesChanged(tuple(edge_record(f"e{n:04d}") for n in range(edges))))
    rows.handle(ledger, QueryRegistered(RegisteredQuery(REF, SPEC, 0, None)))
    rows.handle(ledger, FramesMerged(tuple(closing(n, 0) for n in range(edges)), 10_000))
    return ledger


def closing(edge: int, second: int) -> FrameSummary:
    start, position = second * 1000, 1 + edge + second * 10_000
    return FrameSummary(REF, position, EdgeId(f"e{edge:04d}"), start + 1000, (SliceClose(start, 1, 0),), (start,), 1, 0)


def test_a_frame_of_one_edge_among_many_writes_the_parts_of_that_edge() -> None:
    rows = Rows()
    ledger = fed(1_000, rows)
    assert rows.written > 60_000
    rows.handle(ledger, FramesMerged((closing(900, 0), closing(900, 1)), 10_000))
    first = rows.written
    rows.handle(ledger, FramesMerged((closing(900, 2),), 10_000))
    assert max(first, rows.written) < 16_000
    again = Ledger()
    again.restore(REF, rows.snapshot())
    assert snapshot(again, REF) == snapshot(ledger, REF)
    assert len(again.book(REF).state.through_ms) == 1_000
