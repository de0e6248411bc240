"""Provisional closes: at the deadline an edge counts with what it has sent, and states the rest as withheld."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from center.budgets.processing_delay import AnswerMargin
from center.ledger import EdgesChanged, Emission, Ledger, TimeAdvanced
from center.ledger.slices import ReportedSlices
from center.ledger.state import EdgeIncarnation, SliceState
from edgewater.answers import Phase
from edgewater.wire import FrameBody, Rest, SliceClose, Withheld, body_from_wire, body_to_wire
from tests.center.ledger.test_ledger import MARGIN_MS, MINUTE, REF, Center, close, spec
from tests.center.snapshots import snapshot
from tests.center.statement_world import missing, quality_of

DUE_MS = MINUTE + 1_800


def provisional(slice_start_ms: int, observed: int, withheld: int) -> SliceClose:
    rest = Withheld("n", float(withheld), 0.0, 1, rest=Rest(withheld))
    return SliceClose(slice_start_ms, observed, 0, (rest,) if withheld else (), provisional=True)


def site(**query: Any) -> Center:
    return Center("a", "b", budget={"staleness": "2s"}, **query)


def only(answers: list[Emission]) -> Emission:
    (answer,) = answers
    return answer


def test_at_the_deadline_an_edge_with_a_provisional_close_has_reported_and_states_what_it_withholds() -> None:
    center = site()
    center.says("a", MINUTE, close(0, 3), now_ms=MINUTE)
    assert center.says("b", MINUTE - 1, provisional(0, 9, 4), now_ms=MINUTE + 100) == [], "the answer waits"
    assert center.tick(DUE_MS - 1) == []
    answer = only(center.tick(DUE_MS))
    assert answer.phase is Phase.EARLY and missing(answer) == ()
    stated = quality_of(answer)
    assert stated["completeness"]["reported"] == 2 and stated["records"]["observed"] == 12
    assert answer.facts.withheld["n"].above == 4 and stated["contract"]["met"]


def test_an_edge_that_never_sends_its_last_close_never_completes_a_window() -> None:
    center = site()
    center.says("a", MINUTE, close(0, 3), now_ms=MINUTE)
    center.says("b", MINUTE - 1, provisional(0, 9, 4), now_ms=MINUTE)
    center.tick(DUE_MS)
    later = [*center.says("b", MINUTE - 1, provisional(0, 9, 0), now_ms=DUE_MS + 5_000), *center.tick(10 * MINUTE)]
    assert {a.phase for a in later if a.window_start_ms == 0} == {Phase.EARLY}
    assert Phase.FINAL in {a.phase for a in center.says("b", MINUTE, close(0, 9), now_ms=11 * MINUTE)}


def test_a_close_without_progress_that_is_not_provisional_is_no_report() -> None:
    center = site()
    center.says("a", MINUTE, close(0, 3), now_ms=MINUTE)
    center.says("b", MINUTE - 1, close(0, 9), now_ms=MINUTE)
    assert missing(only(center.tick(DUE_MS))) == ("b",)


def test_a_sliding_window_needs_a_close_of_each_slice_that_the_progress_does_not_include() -> None:
    for closes, expected in (((0,), ("b",)), ((MINUTE // 2,), ("b",)), ((0, MINUTE // 2), ())):
        center = site(window={"sliding": "1m", "every": "30s"})
        center.says("a", MINUTE, close(0, 3), close(MINUTE // 2, 1), now_ms=MINUTE)
        center.says("b", -1, *(provisional(start, 5, 1) for start in closes), now_ms=MINUTE)
        assert [missing(a) for a in center.tick(DUE_MS) if a.window_start_ms == 0] == [expected]


class CountedCloses(dict[EdgeIncarnation, SliceClose]):
    reads = 0

    def items(self) -> Any:
        CountedCloses.reads += 1
        return super().items()


def test_an_answer_does_not_read_the_closes_of_each_slice_of_its_window() -> None:
    query = spec(window={"sliding": "1m", "every": "1s"}, budget={"staleness": "2s"})
    slices = ReportedSlices(query)
    for start in range(0, MINUTE, 1_000):
        closes = CountedCloses({(edge, "i1"): provisional(start, 9, 4) for edge in ("a", "b")})
        slices.open.put(start, SliceState.of(closes, True, query))
    CountedCloses.reads = 0
    assert slices.stated_by(range(0, MINUTE, 1_000), {"a": MINUTE // 2}) == {"a", "b"}
    assert slices.stated_by(range(-1_000, MINUTE, 1_000), {"a": 0, "b": -1}) == {"a"}
    assert CountedCloses.reads == 0


def test_a_provisional_close_does_not_replace_the_last_close_of_the_same_records() -> None:
    center = site()
    center.says("b", MINUTE, close(0, 9), now_ms=MINUTE)
    center.says("b", MINUTE, provisional(0, 9, 4), now_ms=MINUTE, touched=())
    answer = only(center.says("a", MINUTE, close(0, 3), now_ms=MINUTE))
    assert not answer.facts.withheld


def test_an_edge_that_has_lost_input_is_missing_in_spite_of_its_provisional_close() -> None:
    center = site()
    center.says("a", MINUTE, close(0, 3), now_ms=MINUTE)
    lost = replace(center.fact("b", MINUTE - 1, provisional(0, 9, 4)), since_ms=MINUTE // 2)
    center.reports(lost, now_ms=MINUTE)
    assert missing(only(center.tick(DUE_MS))) == ("b",)


def test_a_restarted_center_keeps_provisional_closes() -> None:
    center = site()
    center.says("a", MINUTE, close(0, 3), now_ms=MINUTE)
    center.says("b", MINUTE - 1, provisional(0, 9, 4), now_ms=MINUTE)
    again = Ledger(AnswerMargin(MARGIN_MS))
    again.handle(EdgesChanged(tuple(center.edges.values())))
    again.load({REF: snapshot(center.ledger, REF)})
    answer = only(again.handle(TimeAdvanced(DUE_MS)))
    assert missing(answer) == () and answer.facts.withheld["n"].above == 4


def test_a_provisional_close_survives_the_wire_and_another_close_has_no_byte_of_it() -> None:
    body = FrameBody(0, (), (provisional(0, 9, 4), close(MINUTE, 1)))
    assert body_from_wire(body_to_wire(body)) == body
    plain = FrameBody(0, (), (close(0, 9),))
    marked = FrameBody(0, (), (replace(close(0, 9), provisional=True),))
    assert len(body_to_wire(marked).SerializeToString()) == len(body_to_wire(plain).SerializeToString()) + 2
