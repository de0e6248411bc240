"""An accuracy is not met by an answer that lacks records of an edge."""

from __future__ import annotations

from center.ledger import EdgesChanged, FramesMerged, FrameSummary, Ledger, QueryRegistered
from edgewater.answers import Phase
from edgewater.base.streams import EdgeId
from edgewater.model.registered_query import RegisteredQuery
from edgewater.wire import SliceClose
from tests.center.accuracy_world import BEGIN_MS, REF, WINDOW_MS, record_of, spec
from tests.center.statement_world import missing


def test_a_final_window_that_lacks_records_of_an_edge_does_not_meet_its_accuracy() -> None:
    query = spec({"total": "sum(x)"})
    ledger = Ledger()
    ledger.handle(EdgesChanged((record_of("a"), record_of("b"))))
    ledger.handle(QueryRegistered(RegisteredQuery(REF, query, BEGIN_MS, None)))
    close = (SliceClose(BEGIN_MS, 3, 0),)
    through_ms = BEGIN_MS + WINDOW_MS + query.lateness_ms
    whole = FrameSummary(REF, 1, EdgeId("a"), through_ms, close, (BEGIN_MS,), 100, through_ms, "i")
    since_ms = BEGIN_MS + WINDOW_MS // 2  # it had read a part of the window before it knew the query
    part = FrameSummary(REF, 2, EdgeId("b"), through_ms, close, (BEGIN_MS,), 100, through_ms, "i", since_ms)
    answers = [a for a in ledger.handle(FramesMerged((whole, part), through_ms)) if a.window_start_ms == BEGIN_MS]
    assert [a.phase for a in answers] == [Phase.FINAL]
    assert missing(answers[0]) == ("b",) and answers[0].codes() == ["missing-edges"]
