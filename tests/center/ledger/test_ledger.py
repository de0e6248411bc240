from __future__ import annotations

import json
import math
from dataclasses import replace

import pyarrow as pa
import pytest

from center.budgets.processing_delay import AnswerMargin
from center.ledger import (
    AT_ONCE_MS,
    ClockStepped,
    EdgesChanged,
    Emission,
    FramesMerged,
    FrameSummary,
    Ledger,
    QueryDeleted,
    QueryRegistered,
    TimeAdvanced,
)
from center.ledger.answer_work import MAX_WORK
from center.ledger.slices import MAX_SEALED_STATEMENTS
from center.ledger.state import WindowState
from center.ledger.time_windows import MAX_OVERDUE
from center.ledger.window_facts import keeps_error
from edgewater.answers import Phase
from edgewater.base.errors import NotFound, StorageError
from edgewater.base.streams import LIVE, MAX_TIME_MS, MIN_TIME_MS, EdgeId, StreamClock
from edgewater.model.edge_records import EdgeRecord, StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.window_range import WindowRange
from edgewater.wire import InputLoss, LossReason, QueryRef, Rest, SliceClose, Withheld
from tests.center import results_world
from tests.center.snapshots import snapshot
from tests.center.statement_world import missing, quality_of, violations
from tests.query_specs import query_spec

REF = QueryRef("q", 1)
MINUTE = 60_000
REGISTERED_AT_MS = 0
MARGIN_MS = 200


def edge_record(name: str, *, clock: StreamClock = LIVE, retired: bool = False, stream: str = "events") -> EdgeRecord:
    served = StreamRecord(stream, {"x": pa.int64()}, clock)
    return results_world.edge_record(name, served, retired=retired, incarnation="i1")


def spec(**parts: object) -> QuerySpec:
    return query_spec(parts, stream="events", window={"tumbling": "1m"})


class Center:
    """A ledger with one query, spoken to in the words of the tests."""

    def __init__(
        self, *edges: str, clock: StreamClock = LIVE, registered_at_ms: int = REGISTERED_AT_MS, **query: object
    ):
        self.ledger = Ledger(AnswerMargin(MARGIN_MS))
        self.clock = clock
        self.edges = {name: edge_record(name, clock=clock) for name in edges}
        self.position = 0
        self.ledger.handle(EdgesChanged(tuple(self.edges.values())))
        self.ledger.handle(QueryRegistered(RegisteredQuery(REF, spec(**query), registered_at_ms, None)))

    def fact(
        self,
        edge: str,
        through_ms: int,
        *closes: SliceClose,
        touched: tuple[int, ...] | None = None,
        incarnation: str = "i1",
    ) -> FrameSummary:
        self.position += 1
        starts = tuple(c.slice_start_ms for c in closes if c.observed) if touched is None else touched
        return FrameSummary(REF, self.position, EdgeId(edge), through_ms, closes, starts, 100, 0, incarnation)

    def reports(self, *facts: FrameSummary, now_ms: int = 0) -> list[Emission]:
        return self.ledger.handle(FramesMerged(facts, now_ms))

    def says(
        self,
        edge: str,
        through_ms: int,
        *closes: SliceClose,
        now_ms: int = 0,
        touched: tuple[int, ...] | None = None,
        incarnation: str = "i1",
    ) -> list[Emission]:
        fact = self.fact(edge, through_ms, *closes, touched=touched, incarnation=incarnation)
        return self.reports(fact, now_ms=now_ms)

    def tick(self, now_ms: int) -> list[Emission]:
        return self.ledger.handle(TimeAdvanced(now_ms))

    def joins(self, name: str) -> None:
        self.edges[name] = edge_record(name, clock=self.clock)
        self.ledger.handle(EdgesChanged(tuple(self.edges.values())))

    def retires(self, name: str) -> None:
        self.edges[name] = replace(self.edges[name], retired=True)
        self.ledger.handle(EdgesChanged(tuple(self.edges.values())))


def close(slice_start_ms: int, observed: int, late: int = 0, *withheld: Withheld) -> SliceClose:
    return SliceClose(slice_start_ms, observed, late, withheld)


def withheld(measure: str, above: float, below: float = 0.0, rest: Rest | None = None) -> Withheld:
    return Withheld(measure, above, below, 1, rest=rest)


def told(emissions: list[Emission]) -> list[tuple[int, int, str]]:
    """(window start, revision, phase) of each."""
    return [(e.window_start_ms, e.revision, e.phase.value) for e in emissions]


# Complete and final


def test_a_window_is_answered_once_every_expected_edge_has_closed_it() -> None:
    center = Center("a", "b")
    assert center.says("a", MINUTE, close(0, 3)) == []
    (answer,) = center.says("b", MINUTE, close(0, 4), now_ms=MINUTE + 250)
    assert told([answer]) == [(0, 1, "final")]
    assert (answer.window_end_ms, answer.answered_at_ms, answer.facts.staleness_ms) == (MINUTE, MINUTE + 250, 250)
    quality = quality_of(answer)
    assert quality["completeness"] == {"ratio": 1.0, "expected": 2, "reported": 2, "missing": []}
    assert quality["records"] == {
        "observed": 7,
        "expected": 7,
        "sampled": 7,
        "late": 0,
        "after_final": 0,
        "rejected": 0,
    }
    error = quality["error"]
    assert (error["sampling"], error["withheld"], error["missing"]) == ({"n": 0}, {}, {"n": 0})
    assert quality["contract"] == {"requested": {"exact": True}, "met": True, "violations": []}


def test_without_lateness_complete_is_final_in_one_emission() -> None:
    assert told(Center("a").says("a", MINUTE, close(0, 1))) == [(0, 1, "final")]


def test_with_lateness_a_window_is_complete_first_and_final_when_the_lateness_has_passed_everywhere() -> None:
    center = Center("a", "b", lateness="30s")
    center.says("a", MINUTE + 30_000, close(0, 1))
    assert told(center.says("b", MINUTE, close(0, 1))) == [(0, 1, "complete")]
    assert center.says("b", MINUTE + 29_999) == []
    assert told(center.says("b", MINUTE + 30_000)) == [(0, 2, "final")]


def test_a_window_that_becomes_complete_and_final_at_once_is_answered_once() -> None:
    center = Center("a", lateness="30s")
    assert told(center.says("a", 2 * MINUTE, close(0, 1))) == [(0, 1, "final")]


def test_the_end_of_a_stream_makes_all_its_windows_final() -> None:
    center = Center("a", lateness="10m")
    emissions = center.says("a", MAX_TIME_MS, close(0, 1), close(5 * MINUTE, 1))
    assert told(emissions) == [(0, 1, "final"), (5 * MINUTE, 1, "final")]
    assert center.ledger.next_deadline() is None


def test_a_window_without_records_is_not_answered() -> None:
    center = Center("a")
    assert center.says("a", 3 * MINUTE, close(0, 0)) == []


def test_through_never_goes_back() -> None:
    center = Center("a", "b")
    center.says("a", MINUTE, close(0, 1))
    center.says("a", 0)
    assert told(center.says("b", MINUTE)) == [(0, 1, "final")]


def test_frames_of_a_batch_apply_in_the_order_of_their_positions() -> None:
    center = Center("a")
    older, newer = center.fact("a", 0, close(0, 5)), center.fact("a", MINUTE, close(0, 9))
    (answer,) = center.reports(newer, older)
    assert answer.facts.observed == 9


def test_without_a_staleness_budget_there_is_no_early_answer_and_no_deadline() -> None:
    center = Center("a", "b")
    center.says("a", MINUTE, close(0, 1))
    center.tick(10**9)
    assert center.ledger.next_deadline() is None
    assert center.tick(10**12) == []


def test_nothing_is_complete_as_long_as_no_edge_is_known() -> None:
    center = Center()
    center.tick(10**9)
    assert center.ledger.queries() == [REF]
    center.joins("a")
    center.joins("b")
    assert center.says("a", MINUTE, close(0, 1)) == []


# Staleness


def test_the_staleness_deadline_fires_on_a_tick_without_any_data() -> None:
    center = Center("a", "b", budget={"staleness": "2s"})
    center.says("a", 30_000, close(0, 3), now_ms=30_000)
    deadline = center.ledger.next_deadline()
    assert deadline == MINUTE + 2000 - MARGIN_MS
    assert center.tick(deadline - 1) == []
    (answer,) = center.tick(deadline)
    assert told([answer]) == [(0, 1, "early")]
    assert missing(answer) == ("a", "b")
    mapping = quality_of(answer)
    assert mapping["records"]["expected"] is None
    assert mapping["error"]["missing"] == {"n": None}
    assert mapping["contract"]["requested"] == {"staleness_ms": 2000} and not mapping["contract"]["met"]
    assert answer.codes() == ["missing-edges"], "in time, but nobody knows how far off"


def test_a_silent_edge_does_not_hold_up_an_early_answer_but_does_hold_up_complete() -> None:
    center = Center("a", "b", budget={"staleness": "2s"})
    assert center.says("a", MINUTE, close(0, 3), now_ms=MINUTE) == []
    (early,) = center.tick(MINUTE + 1800)
    assert early.phase is Phase.EARLY
    assert missing(early) == ("b",)
    assert center.tick(10 * MINUTE)[0].window_start_ms == MINUTE
    assert told(center.says("b", MINUTE, now_ms=10 * MINUTE)) == [(0, 2, "final")]


def test_all_edges_silent_still_gets_an_answer_per_window() -> None:
    center = Center("a", "b", budget={"staleness": "2s"})
    assert told(center.tick(MINUTE + 1800)) == [(0, 1, "early")]
    assert center.tick(MINUTE + 1801) == []
    assert center.ledger.next_deadline() == 2 * MINUTE + 1800
    assert told(center.tick(3 * MINUTE + 1800)) == [(MINUTE, 1, "early"), (2 * MINUTE, 1, "early")]


def test_an_early_answer_without_reports_is_completed_when_the_edges_report_again() -> None:
    center = Center("a", budget={"staleness": "2s"})
    center.tick(MINUTE + 1800)
    (answer,) = center.says("a", MINUTE, close(0, 8), now_ms=2 * MINUTE)
    assert told([answer]) == [(0, 2, "final")]
    assert answer.facts.observed == 8
    assert not answer.codes(), "the first answer was in time, later ones are extra"


def test_an_early_answer_to_an_empty_window_becomes_final_without_data() -> None:
    center = Center("a", budget={"staleness": "2s"})
    center.tick(MINUTE + 1800)
    assert told(center.says("a", MINUTE)) == [(0, 2, "final")]


def test_edges_that_are_up_and_have_no_events_leave_no_empty_answers() -> None:
    center = Center("a", budget={"staleness": "2s"})
    center.says("a", 5 * MINUTE, now_ms=5 * MINUTE)
    assert center.tick(5 * MINUTE + 1800) == []
    assert center.ledger.next_deadline() == 6 * MINUTE + 1800


def test_a_window_closed_before_its_deadline_is_answered_at_once_and_only_once() -> None:
    center = Center("a", budget={"staleness": "2s"})
    assert told(center.says("a", MINUTE, close(0, 3), now_ms=MINUTE + 10)) == [(0, 1, "final")]
    assert center.tick(MINUTE + 1800) == []


def test_data_that_arrives_after_its_deadline_is_answered_with_its_batch() -> None:
    center = Center("a", "b", budget={"staleness": "2s"}, registered_at_ms=10 * MINUTE)
    (answer,) = center.says("a", 30_000, close(0, 1), now_ms=10 * MINUTE)
    assert told([answer]) == [(0, 1, "early")]
    assert answer.codes() == ["staleness-budget", "missing-edges"]
    assert "540000 ms" in violations(answer)[0].message
    assert told(center.says("b", 30_000, close(0, 1), now_ms=11 * MINUTE)) == [(0, 2, "early")]


def test_windows_from_before_the_registration_are_not_due_without_data() -> None:
    center = Center("a", budget={"staleness": "2s"}, registered_at_ms=10 * MINUTE + 1)
    assert told(center.tick(11 * MINUTE + 1800)) == [(10 * MINUTE, 1, "early")]


def test_after_a_long_pause_an_event_answers_a_bounded_number_of_windows_and_asks_for_another() -> None:
    center = Center("a", "b", budget={"staleness": "2s"})
    now = (MAX_WORK + 150) * MINUTE + 1800
    closes = [close(m * MINUTE, 1) for m in range(MAX_WORK + 150)]
    assert len(center.says("a", (MAX_WORK + 150) * MINUTE, *closes, now_ms=now)) == MAX_WORK
    assert (center.ledger.next_deadline() or 0) <= now
    assert len(center.tick(now)) == 150
    assert (center.ledger.next_deadline() or 0) > now


@pytest.mark.parametrize("ahead_ms", [0, 10**9])
def test_after_a_long_pause_only_the_last_windows_without_data_are_answered_at_once(ahead_ms: int) -> None:
    center = Center("a", "b", budget={"staleness": "2s"})
    days = 40_000
    now = days * MINUTE + 1800
    center.ledger.handle(ClockStepped(ahead_ms))
    emissions = center.tick(now + ahead_ms)
    assert [e.window_start_ms // MINUTE for e in emissions] == list(range(days - MAX_OVERDUE, days))
    assert (center.ledger.next_deadline() or 0) > now + ahead_ms
    assert center.ledger.book(REF).state.empty_through_ms == MIN_TIME_MS, "nothing is known of the others"

    # When edges report, the others have answers, or are known to be empty.
    assert told(center.says("a", 7 * MINUTE, close(3 * MINUTE, 1), now_ms=now)) == [(3 * MINUTE, 1, "early")]
    assert told(center.says("b", 6 * MINUTE, close(5 * MINUTE, 1), now_ms=now)) == [
        (3 * MINUTE, 2, "final"), (5 * MINUTE, 1, "final"),
    ]  # fmt: skip
    assert center.ledger.book(REF).state.empty_through_ms == 6 * MINUTE


def test_a_version_that_ended_in_a_long_pause_waits_for_no_deadline() -> None:
    center = Center("a", budget={"staleness": "2s"}, registered_at_ms=0)
    query = center.ledger.book(REF).state.query
    center.ledger.handle(QueryRegistered(replace(query, windows=WindowRange(until_ms=5 * MINUTE))))
    assert center.tick(40_000 * MINUTE) == []
    assert center.ledger.next_deadline() is None


def test_deadlines_of_a_replay_run_on_the_replays_clock() -> None:
    clock = StreamClock(event_origin_ms=1000 * MINUTE, wall_origin_ms=5_000_000, speed=60.0)
    center = Center("a", clock=clock, budget={"staleness": "2s"}, registered_at_ms=0)
    deadline = 5_000_000 + 1000 + 1800
    assert center.ledger.next_deadline() == deadline
    (answer,) = center.tick(deadline)
    assert answer.window_start_ms == 1000 * MINUTE
    assert answer.facts.staleness_ms == 1800


def test_an_ended_stream_has_no_deadlines() -> None:
    center = Center("a", budget={"staleness": "2s"})
    center.says("a", MAX_TIME_MS, close(0, 1), now_ms=MINUTE)
    assert center.ledger.next_deadline() is None
    assert center.tick(10**9) == []


def test_handling_a_deadline_always_moves_the_deadline_forward() -> None:
    center = Center("a", "b", budget={"staleness": "2s"}, window={"sliding": "5m", "every": "1m"}, lateness="2m")
    center.says("a", 3 * MINUTE, *(close(m * MINUTE, 1) for m in range(3)), now_ms=3 * MINUTE)
    answered: set[int] = set()
    for _ in range(20):
        deadline = center.ledger.next_deadline()
        assert deadline is not None
        starts = {e.window_start_ms for e in center.tick(deadline)}
        assert starts and not starts & answered
        answered |= starts
        after = center.ledger.next_deadline()
        assert after is not None and after > deadline


# Who is expected


def test_an_edge_that_joins_late_is_expected_from_then_on() -> None:
    center = Center("a")
    assert told(center.says("a", MINUTE, close(0, 1))) == [(0, 1, "final")]
    center.joins("b")
    assert center.says("a", 2 * MINUTE, close(MINUTE, 1)) == []
    (answer,) = center.says("b", 2 * MINUTE, close(MINUTE, 1))
    assert told([answer]) == [(MINUTE, 1, "final")]
    assert answer.facts.expected == 2


def test_an_edge_that_joins_after_complete_does_not_take_the_phase_back() -> None:
    center = Center("a", lateness="1m")
    center.says("a", MINUTE, close(0, 1))
    center.joins("b")
    center.tick(0)
    (answer,) = center.says("b", 30_000, close(0, 2), now_ms=MINUTE)
    assert told([answer]) == [(0, 2, "complete")]
    assert missing(answer) == ("b",)
    assert answer.codes() == ["missing-edges"]


def test_a_complete_window_is_answered_again_when_an_edge_that_joined_later_has_closed_it() -> None:
    center = Center("a", lateness="1h")
    (whole,) = center.says("a", MINUTE, close(0, 5))
    assert whole.phase is Phase.COMPLETE and missing(whole) == ()
    center.joins("b")
    (lacking,) = center.says("b", 0, touched=(0,), now_ms=MINUTE)
    assert lacking.phase is Phase.COMPLETE and missing(lacking) == ("b",)
    restored = Ledger(AnswerMargin(MARGIN_MS))
    restored.restore(REF, snapshot(center.ledger, REF))
    restored.handle(EdgesChanged(tuple(center.edges.values())))
    for ledger in (center.ledger, restored):
        (again,) = ledger.handle(FramesMerged((center.fact("b", MINUTE),), MINUTE))
        assert (again.revision, again.phase, missing(again)) == (3, Phase.COMPLETE, ())
        assert ledger.handle(TimeAdvanced(0)) == []


def test_an_edge_that_reports_before_the_catalog_lists_it_is_expected() -> None:
    center = Center("a")
    center.says("b", 30_000, close(0, 1))
    assert center.says("a", MINUTE, close(0, 1)) == []
    assert told(center.says("b", MINUTE, close(0, 2))) == [(0, 1, "final")]


def test_a_retired_edge_no_longer_holds_a_window_up() -> None:
    center = Center("a", "b")
    center.says("a", MINUTE, close(0, 3))
    center.says("b", 30_000, close(0, 1))
    assert center.ledger.next_deadline() is None
    center.retires("b")
    assert center.ledger.next_deadline() == AT_ONCE_MS
    (answer,) = center.tick(77)
    assert told([answer]) == [(0, 1, "final")]
    assert answer.facts.expected == 1
    assert answer.facts.observed == 4, "what it had sent stays in"
    assert center.ledger.next_deadline() is None


def test_retiring_the_last_edge_keeps_its_closes() -> None:
    center = Center("a", "b")
    center.says("a", MINUTE, close(0, 1), close(MINUTE, 1))
    center.retires("a")
    center.retires("b")
    assert told(center.tick(0)) == [(0, 1, "final")]


def test_a_query_that_names_its_edges_expects_them_before_they_connect() -> None:
    center = Center("a", edges=["a", "z"])
    assert center.says("a", MINUTE, close(0, 1)) == []
    assert told(center.says("z", MINUTE)) == [(0, 1, "final")]


def test_a_query_that_names_its_edges_expects_no_others() -> None:
    center = Center("a", "b", edges=["a"])
    center.says("b", 0, close(0, 4))
    (answer,) = center.says("a", MINUTE, close(0, 1))
    assert (answer.facts.observed, answer.facts.expected) == (5, 1)


def test_an_edge_that_does_not_serve_the_stream_is_not_expected() -> None:
    center = Center("a")
    others = (*center.edges.values(), edge_record("b", stream="others"))
    center.ledger.handle(EdgesChanged(others))
    assert told(center.says("a", MINUTE, close(0, 1))) == [(0, 1, "final")]


def test_a_window_whose_beginning_an_edge_lacks_is_final_but_incomplete() -> None:
    center = Center("a", "b")
    center.says("a", 2 * MINUTE, close(0, 3), close(MINUTE, 3))
    late = replace(center.fact("b", 2 * MINUTE, close(0, 1), close(MINUTE, 2)), since_ms=30_000)
    first, second = center.reports(late)
    assert told([first, second]) == [(0, 1, "final"), (MINUTE, 1, "final")]
    assert missing(first) == ("b",)
    assert quality_of(first)["records"]["expected"] is None
    message = "1 of 2 expected edges have closed the window with all their records"
    assert [(v.code, v.message) for v in violations(first)] == [("missing-edges", message)]
    assert missing(second) == () and second.codes() == []


def test_an_edge_that_lost_its_state_lacks_the_slices_that_are_not_final() -> None:
    center = Center("a", lateness="10m")
    center.says("a", MINUTE, close(0, 3))
    new = replace(center.fact("a", MINUTE, close(MINUTE, 1), incarnation="i2"), since_ms=MINUTE + 30_000)
    center.reports(new)
    again = replace(new, position=9, through_ms=3 * MINUTE, closes=(close(2 * MINUTE, 1),), touched=(2 * MINUTE,))
    emissions = center.reports(again)
    assert [(e.window_start_ms, missing(e)) for e in emissions] == [(MINUTE, ("a",)), (2 * MINUTE, ())]
    (revised,) = center.says("a", 3 * MINUTE, close(0, 1), incarnation="i2", now_ms=MINUTE)
    assert missing(revised) == ("a",), "its records may be those that the old incarnation had counted"


# Revisions


def test_late_data_after_complete_revises_only_its_window() -> None:
    center = Center("a", lateness="10m")
    center.says("a", 3 * MINUTE, close(0, 1), close(MINUTE, 1), close(2 * MINUTE, 1))
    (answer,) = center.says("a", 3 * MINUTE, close(MINUTE, 2, 1), now_ms=MINUTE)
    assert told([answer]) == [(MINUTE, 2, "complete")]
    assert (answer.facts.observed, answer.facts.late) == (2, 1)


def test_late_data_revises_exactly_the_sliding_windows_over_its_slice() -> None:
    center = Center("a", lateness="1h", window={"sliding": "3m", "every": "1m"})
    center.says("a", 10 * MINUTE, *(close(m * MINUTE, 1) for m in range(10)))
    emissions = center.says("a", 10 * MINUTE, close(5 * MINUTE, 4, 3), now_ms=MINUTE)
    assert told(emissions) == [(m * MINUTE, 2, "complete") for m in (3, 4, 5)]
    assert [e.facts.observed for e in emissions] == [6, 6, 6]


def test_a_repeated_close_is_no_revision() -> None:
    center = Center("a", lateness="10m")
    center.says("a", MINUTE, close(0, 1))
    assert center.says("a", MINUTE, close(0, 1), touched=()) == []


def test_partials_without_a_new_close_are_a_revision() -> None:
    center = Center("a", lateness="10m")
    center.says("a", MINUTE, close(0, 1))
    assert told(center.says("a", MINUTE, touched=(0,), now_ms=MINUTE)) == [(0, 2, "complete")]


def test_counters_of_a_new_incarnation_add_to_those_of_the_old_one() -> None:
    center = Center("a", lateness="10m")
    center.says("a", 0, close(0, 10), incarnation="i1")
    (answer,) = center.says("a", MINUTE, close(0, 5), incarnation="i2")
    assert answer.facts.observed == 15


def test_revisions_of_a_window_count_up_by_one_and_phases_never_go_back() -> None:
    center = Center("a", "b", budget={"staleness": "2s"}, lateness="1m")
    emissions = center.tick(MINUTE + 1800)
    emissions += center.says("a", MINUTE, close(0, 1), now_ms=2 * MINUTE)
    emissions += center.says("b", MINUTE, close(0, 1), now_ms=2 * MINUTE)
    emissions += center.says("b", 2 * MINUTE, close(0, 2, 1), now_ms=3 * MINUTE)
    emissions += center.says("a", 2 * MINUTE, now_ms=3 * MINUTE)
    mine = [e for e in emissions if e.window_start_ms == 0]
    assert [e.revision for e in mine] == [1, 2, 3, 4, 5]
    assert [e.phase.value for e in mine] == ["early", "early", "complete", "complete", "final"]


# Waiting revisions


def reload(center: Center) -> None:
    """The job starts again."""
    state = snapshot(center.ledger, REF)
    center.ledger = Ledger(AnswerMargin(MARGIN_MS))
    center.ledger.restore(REF, state)
    center.ledger.handle(EdgesChanged(tuple(center.edges.values())))


@pytest.mark.parametrize("restarts", [False, True])
def test_late_records_of_every_second_make_few_revisions_and_none_is_left_out(restarts: bool) -> None:
    center = Center("a", lateness="5m")
    emissions = center.says("a", MINUTE, close(0, 100), now_ms=MINUTE)
    for second in range(1, 121):
        emissions += center.says("a", MINUTE, close(0, 100 + second, second), now_ms=MINUTE + 1000 * second)
        due = center.ledger.next_deadline()
        while due is not None and due < MINUTE + 1000 * second:
            emissions += center.tick(due)
            due = center.ledger.next_deadline()
        if restarts:
            reload(center)
            emissions += center.tick(MINUTE + 1000 * second)
    given_s = [(e.answered_at_ms - MINUTE) // 1000 for e in emissions]
    assert given_s == [0, 1, 3, 7, 15, 31, 61, 91]
    assert [e.facts.observed for e in emissions] == [100 + s for s in given_s]
    assert center.ledger.next_deadline() == MINUTE + 121_000, "the last change waits, and is not forgotten"
    (last,) = center.tick(MINUTE + 121_000)
    assert (last.facts.observed, last.phase) == (220, Phase.COMPLETE)
    assert center.ledger.next_deadline() is None and center.tick(MINUTE + 500_000) == []


def test_late_records_are_answered_as_soon_after_a_restoration_as_before_it() -> None:
    center = Center("a", lateness="5m")
    center.ledger.load({REF: snapshot(center.ledger, REF)}, revisions_after=1_700_000_000_000)
    emissions = center.says("a", MINUTE, close(0, 100), now_ms=MINUTE)
    for second in range(1, 9):
        emissions += center.says("a", MINUTE, close(0, 100 + second, second), now_ms=MINUTE + 1000 * second)
    assert emissions[0].revision > 1_700_000_000_000
    assert [(e.answered_at_ms - MINUTE) // 1000 for e in emissions] == [0, 1, 3, 7]


def test_a_phase_is_given_at_once_however_new_the_last_answer_is() -> None:
    center = Center("a", "b", lateness="1m", budget={"staleness": "2s"})
    emissions = center.tick(MINUTE + 1800)
    emissions += center.says("a", MINUTE, close(0, 1), now_ms=MINUTE + 1801)
    emissions += center.says("b", MINUTE, close(0, 1), now_ms=MINUTE + 1802)
    emissions += center.says("b", 2 * MINUTE, close(0, 2, 1), now_ms=MINUTE + 1803)
    emissions += center.says("a", 2 * MINUTE, now_ms=MINUTE + 1804)
    mine = [(e.answered_at_ms - MINUTE, e.phase.value, e.facts.observed) for e in emissions if e.window_start_ms == 0]
    assert mine == [(1800, "early", 0), (1802, "complete", 2), (1804, "final", 3)]


def test_a_loss_is_stated_at_once() -> None:
    center = Center("a", lateness="10m")
    assert len(center.says("a", MINUTE, close(0, 3), now_ms=MINUTE)) == 1
    loss = InputLoss("log", LossReason.FRAME_DAMAGED, 0, MINUTE)
    (answer,) = center.reports(replace(center.fact("a", MINUTE), losses=(loss,)), now_ms=MINUTE + 1)
    assert (answer.revision, missing(answer)) == (2, ("a",))


def test_under_a_combined_budget_the_first_answer_that_keeps_the_error_does_not_wait() -> None:
    center = Center("a", lateness="10m", budget={"error": {"n": 10}, "staleness": "2s"}, measures={"n": "count()"})
    (first,) = center.says("a", MINUTE, close(0, 5, 0, withheld("n", 100)), now_ms=MINUTE)
    assert not keeps_error(first.facts, first.spec)
    (second,) = center.says("a", MINUTE, close(0, 100, 0, withheld("n", 5)), now_ms=MINUTE + 100)
    assert keeps_error(second.facts, second.spec) and second.revision == 2
    assert center.says("a", MINUTE, close(0, 101, 0, withheld("n", 5)), now_ms=MINUTE + 200) == []


def test_a_clock_that_is_set_back_lengthens_no_wait() -> None:
    center = Center("a", lateness="10m")
    center.says("a", MINUTE, close(0, 1), now_ms=100 * MINUTE)
    assert len(center.says("a", MINUTE, close(0, 2), now_ms=MINUTE)) == 1


# After final


def test_data_after_final_is_counted_and_never_applied() -> None:
    center = Center("a", "b")
    center.says("a", MINUTE, close(0, 5))
    center.says("b", MINUTE, close(0, 5))
    assert center.ledger.sealed_before(REF) == MINUTE
    assert center.says("b", MINUTE, close(0, 7, 2)) == []
    assert center.ledger.after_final(REF) == 2
    assert center.says("b", MINUTE, close(0, 7, 2)) == [], "counters are totals: said twice is counted once"
    assert center.ledger.after_final(REF) == 2
    center.says("a", 2 * MINUTE, close(MINUTE, 1))
    (answer,) = center.says("b", 2 * MINUTE)
    assert quality_of(answer)["records"]["after_final"] == 0, "they are not of this window"


def test_an_edge_that_comes_back_from_retirement_has_only_its_new_records_counted_after_final() -> None:
    center = Center("a", "b")
    center.says("b", 30_000, close(0, 4))
    center.says("a", MINUTE, close(0, 1))
    center.retires("b")
    assert told(center.tick(0)) == [(0, 1, "final")]
    center.says("b", MINUTE, close(0, 10))
    assert center.ledger.after_final(REF) == 6


def test_a_late_record_still_counts_in_those_sliding_windows_that_are_not_final() -> None:
    center = Center("a", window={"sliding": "3m", "every": "1m"})
    final = center.says("a", 3 * MINUTE, *(close(m * MINUTE, 1) for m in range(3)))
    assert told(final) == [(m * MINUTE, 1, "final") for m in (-2, -1, 0)]
    center.says("a", 3 * MINUTE, close(2 * MINUTE, 5, 4))
    assert center.ledger.after_final(REF) == 4, "the window at 0 lacks them"
    emissions = center.says("a", 5 * MINUTE)
    assert [(e.window_start_ms, e.facts.observed) for e in emissions] == [(MINUTE, 6), (2 * MINUTE, 5)]


@pytest.mark.slow
def test_the_state_of_final_windows_is_dropped() -> None:
    center = Center("a")
    for minute in range(10_000):
        center.says("a", (minute + 1) * MINUTE, close(minute * MINUTE, 1))
    kinds = [kind for kind, _, _ in json.loads(snapshot(center.ledger, REF))["entries"]]
    assert set(kinds) == {"sealed"}
    assert len(kinds) == MAX_SEALED_STATEMENTS
    assert center.ledger.book(REF).deadlines.entries == 0


def test_an_edge_that_joins_late_and_closes_an_old_slice_twice_is_counted_once() -> None:
    center = Center("a")
    for minute in range(MAX_SEALED_STATEMENTS + 10):
        center.says("a", (minute + 1) * MINUTE, close(minute * MINUTE, 1))
    center.joins("b")
    center.says("b", 10 * MINUTE, *(close(m * MINUTE, 5) for m in range(10)))
    center.says("b", 10 * MINUTE, *(close(m * MINUTE, 7, 2) for m in range(10)))
    assert center.ledger.after_final(REF) == 70


def test_a_window_that_lacks_records_from_before_two_joins_says_so() -> None:
    center = Center("a", "b", lateness="1h")
    center.says("a", 5 * MINUTE, *(close(m * MINUTE, 1) for m in range(5)))
    first = replace(center.fact("b", 2 * MINUTE), since_ms=2 * MINUTE)
    again = replace(center.fact("b", 5 * MINUTE, close(0, 1)), since_ms=4 * MINUTE)
    center.reports(first)
    lacking = {e.window_start_ms for e in center.reports(again) if missing(e)}
    final = center.says("a", 100 * MINUTE) + center.says("b", 100 * MINUTE)
    lacking |= {e.window_start_ms for e in final if missing(e)}
    assert {0, MINUTE, 2 * MINUTE, 3 * MINUTE} <= lacking
    assert 4 * MINUTE not in {e.window_start_ms for e in final if missing(e)}


# What is withheld, and the contract


def test_withheld_bounds_of_a_sum_add_up_over_edges_and_slices() -> None:
    center = Center(
        "a", "b", measures={"s": "sum(x)"}, window={"sliding": "2m", "every": "1m"}, budget={"error": {"s": 10}}
    )
    center.says("a", 2 * MINUTE, close(0, 1, 0, withheld("s", 2.0, 1.0)), close(MINUTE, 1, 0, withheld("s", 3.0, 0.5)))
    emissions = center.says("b", 2 * MINUTE, close(MINUTE, 1, 0, withheld("s", 4.0, 0.0)))
    answer = emissions[-1]
    assert answer.window_start_ms == 0
    assert quality_of(answer)["error"]["withheld"] == {"s": {"above": 9.0, "below": 1.5}}
    assert answer.codes() == []


def test_the_withheld_bound_of_an_extremum_is_the_largest_and_not_the_sum() -> None:
    center = Center("a", "b", measures={"m": "max(x)"}, budget={"error": {"m": 5}})
    center.says("a", MINUTE, close(0, 1, 0, withheld("m", 5.0)))
    (answer,) = center.says("b", MINUTE, close(0, 1, 0, withheld("m", 4.0)))
    assert answer.facts.withheld["m"].above == 5.0
    assert answer.codes() == []


def test_an_exceeded_error_budget_is_a_violation_with_its_numbers() -> None:
    center = Center("a", "b", measures={"s": "sum(x)"}, budget={"error": {"s": 5}})
    center.says("a", MINUTE, close(0, 1, 0, withheld("s", 3.0)))
    (answer,) = center.says("b", MINUTE, close(0, 1, 0, withheld("s", 3.0)))
    contract = quality_of(answer)["contract"]
    assert contract["requested"] == {"error": {"s": 5.0}}
    assert not contract["met"]
    message = "s: edges withhold up to 6 per group; the budget is 5"
    assert contract["violations"] == [{"code": "error-budget", "message": message}]


def rests(emission: Emission) -> dict[str, Rest | None]:
    return dict(emission.facts.rests)


def test_the_rests_of_edges_and_slices_add_up() -> None:
    center = Center("a", "b", measures={"n": "count()"}, window={"sliding": "2m", "every": "1m"},
                    budget={"error": {"n": 100}})  # fmt: skip
    center.says("a", 2 * MINUTE, close(0, 9, 0, withheld("n", 4, 0, Rest(5))), close(MINUTE, 1))
    emissions = center.says("b", 2 * MINUTE, close(MINUTE, 9, 0, withheld("n", 1, 0, Rest(2))))
    assert rests(next(e for e in emissions if e.window_start_ms == 0)) == {"n": Rest(7)}
    assert rests(next(e for e in emissions if e.window_start_ms == -MINUTE)) == {"n": Rest(5)}


def test_the_rest_is_unknown_while_late_records_come_in_several_frames() -> None:
    """The first frame has sent a part of what was withheld, so adding the earlier rest would count it twice."""
    center = Center("a", measures={"n": "count()"}, budget={"error": {"n": 100}}, lateness="1h")
    (first,) = center.says("a", MINUTE, close(0, 9, 0, withheld("n", 4, 0, Rest(5))))
    (second,) = center.says("a", MINUTE, touched=(0,), now_ms=10 * MINUTE)
    reload(center)
    (third,) = center.says("a", MINUTE, close(0, 20, 11, withheld("n", 1, 0, Rest(1))), now_ms=20 * MINUTE)
    assert [rests(e) for e in (first, second, third)] == [{"n": Rest(5)}, {"n": None}, {"n": Rest(1)}]


def test_frames_of_one_batch_leave_the_rest_of_the_last_close() -> None:
    center = Center("a", measures={"n": "count()"}, budget={"error": {"n": 100}}, lateness="1h")
    early = center.fact("a", 0, touched=(0,))
    closed = center.fact("a", MINUTE, close(0, 9, 0, withheld("n", 4, 0, Rest(5))))
    (answer,) = center.reports(early, closed)
    assert rests(answer) == {"n": Rest(5)}
    late, again = center.fact("a", MINUTE, touched=(0,)), center.fact("a", MINUTE, close(0, 12, 3), touched=(0,))
    further = center.fact("a", MINUTE, close(0, 12, 3, withheld("n", 2, 0, Rest(2))), touched=(0,))
    assert rests(center.reports(late, again, further, now_ms=10 * MINUTE)[-1]) == {"n": Rest(2)}


@pytest.mark.parametrize("measures", [{"s": "sum(x)"}, {"s": "max(x)"}])
@pytest.mark.parametrize("bad", [withheld("s", math.nan), withheld("s", -1e9), withheld("s", 0.0, math.nan)])
@pytest.mark.parametrize("first", ["a", "b"])
def test_an_amount_that_cannot_be_one_neither_keeps_a_contract_nor_hides_what_others_withhold(
    measures: dict[str, str], bad: Withheld, first: str
) -> None:
    center = Center("a", "b", measures=measures, budget={"error": {"s": 10}})
    said = {"a": withheld("s", 1e6), "b": bad}
    second = "b" if first == "a" else "a"
    center.says(first, MINUTE, close(0, 1, 0, said[first]))
    (answer,) = center.says(second, MINUTE, close(0, 1, 0, said[second]))
    assert answer.codes() == ["error-budget"]
    bound = answer.facts.withheld["s"]
    assert bound.above >= 1e6 and bound.below >= 0
    json.dumps(quality_of(answer), allow_nan=False)


def test_an_unsent_maximum_that_is_no_number_bounds_nothing() -> None:
    center = Center("a", measures={"m": "max(x)"}, budget={"error": {"m": 10}})
    stated = replace(withheld("m", 0.0), largest_unsent=math.nan)
    (answer,) = center.says("a", MINUTE, close(0, 1, 0, stated))
    assert answer.facts.withheld["m"].unsent == math.inf and not keeps_error(answer.facts, answer.spec)


def test_shares_that_add_up_to_the_budget_keep_it_in_spite_of_rounding() -> None:
    edges = tuple("abcdefghij")
    center = Center(*edges, measures={"s": "sum(x)"}, budget={"error": {"s": 0.3}})
    for edge in edges:
        emissions = center.says(edge, MINUTE, close(0, 1, 0, withheld("s", 0.03)))
    assert sum([0.03] * 10) > 0.3 - 1e-12
    assert emissions[0].codes() == []


def test_withholding_from_an_exact_query_violates_its_contract() -> None:
    center = Center("a")
    (answer,) = center.says("a", MINUTE, close(0, 1, 0, withheld("n", 1.0)))
    assert answer.codes() == ["withheld"]


def test_withholding_under_a_staleness_budget_is_reported_and_no_violation() -> None:
    center = Center("a", budget={"staleness": "2s"})
    (answer,) = center.says("a", MINUTE, close(0, 1, 0, withheld("n", 7.0)), now_ms=MINUTE)
    assert quality_of(answer)["error"]["withheld"] == {"n": {"above": 7.0, "below": 0.0}}
    assert answer.codes() == []


COMBINED = {"budget": {"error": {"n": 5}, "staleness": "2s"}}


def test_a_combined_budget_is_met_by_an_answer_in_time_within_the_error() -> None:
    center = Center("a", lateness="1m", **COMBINED)
    (answer,) = center.says("a", MINUTE, close(0, 9, 0, withheld("n", 5.0)), now_ms=MINUTE + 2000)
    contract = quality_of(answer)["contract"]
    assert contract == {"requested": {"error": {"n": 5.0}, "staleness_ms": 2000}, "met": True, "violations": []}
    (late,) = center.says("a", MINUTE + 1, close(0, 10, 1, withheld("n", 4.0)), now_ms=MINUTE + 9000)
    assert late.codes() == [], "a window that was answered in time stays so when late records come"


def test_a_combined_budget_is_not_met_by_what_comes_after_the_deadline() -> None:
    center = Center("a", "b", lateness="1m", **COMBINED)
    center.says("a", MINUTE, close(0, 9), now_ms=MINUTE)
    (early,) = center.tick(MINUTE + 2000 - MARGIN_MS)
    assert early.codes() == ["missing-edges"]
    (complete,) = center.says("b", MINUTE, close(0, 9), now_ms=MINUTE + 2001)
    (violation,) = violations(complete)
    assert (violation.code, complete.phase) == ("staleness-budget", "complete")
    assert "the first answer within the error budget came 2001 ms" in violation.message
    (revised,) = center.says("b", MINUTE + 1, close(0, 10, 1), now_ms=MINUTE + 9000)
    assert "came 2001 ms" in violations(revised)[0].message


def test_an_answer_in_time_that_exceeds_the_error_does_not_meet_a_combined_budget_later_either() -> None:
    center = Center("a", lateness="1m", **COMBINED)
    (answer,) = center.says("a", MINUTE, close(0, 9, 0, withheld("n", 6.0)), now_ms=MINUTE + 100)
    assert answer.codes() == ["error-budget"]
    (revised,) = center.says("a", MINUTE + 1, close(0, 9, 0, withheld("n", 2.0)), now_ms=MINUTE + 3000)
    assert revised.codes() == ["staleness-budget"]


def test_when_the_error_was_kept_survives_a_restart() -> None:
    state = WindowState(True, 1, Phase.COMPLETE, 300, kept_staleness_ms=700)
    assert WindowState.from_state(json.loads(state.to_state())) == state


# Queries come and go


def test_frames_of_an_unregistered_query_are_refused() -> None:
    center = Center("a")
    before = snapshot(center.ledger, REF)
    stray = replace(center.fact("a", MINUTE, close(0, 1)), query=QueryRef("other", 1))
    with pytest.raises(NotFound):
        center.reports(center.fact("a", MINUTE, close(0, 1)), stray)
    assert snapshot(center.ledger, REF) == before


def test_frames_of_a_deleted_query_are_ignored() -> None:
    center = Center("a")
    center.ledger.handle(QueryDeleted(REF))
    assert center.says("a", MINUTE, close(0, 1)) == []
    assert center.ledger.queries() == []
    center.ledger.handle(QueryRegistered(RegisteredQuery(REF, spec(), 0, None)))
    assert center.ledger.queries() == [], "a stale list of queries does not bring it back"


def test_registering_again_changes_nothing() -> None:
    center = Center("a")
    center.says("a", 30_000, close(0, 1))
    before = snapshot(center.ledger, REF)
    center.ledger.handle(QueryRegistered(RegisteredQuery(REF, spec(), 99, None)))
    assert snapshot(center.ledger, REF) == before


def test_a_heartbeat_in_the_list_of_edges_changes_nothing() -> None:
    center = Center("a")
    center.tick(0)
    center.ledger.handle(EdgesChanged((replace(center.edges["a"], last_seen_ms=999, watermarks={"events": 5}),)))
    assert center.ledger.next_deadline() is None


def test_a_snapshot_of_another_query_or_of_nothing_is_refused() -> None:
    center = Center("a")
    with pytest.raises(StorageError):
        Ledger().restore(QueryRef("q", 2), snapshot(center.ledger, REF))
    with pytest.raises(StorageError):
        Ledger().restore(REF, b"{}")


# Transactions


def test_a_ledger_loaded_after_a_failed_transaction_decides_what_the_first_attempt_did() -> None:
    center = Center("a", "b", lateness="1m", budget={"staleness": "2s"})
    center.says("a", 2 * MINUTE, close(0, 1), close(MINUTE, 1), now_ms=MINUTE)
    before, deadline = snapshot(center.ledger, REF), center.ledger.next_deadline()
    facts = (center.fact("b", 5 * MINUTE, close(0, 1), close(MINUTE, 3)), center.fact("a", 5 * MINUTE))

    def attempt() -> list[Emission]:
        emissions = center.ledger.handle(FramesMerged(facts, 6 * MINUTE))
        emissions += center.ledger.handle(TimeAdvanced(9 * MINUTE))
        return emissions

    with pytest.raises(ZeroDivisionError), center.ledger.transaction():
        first = attempt()
        center.ledger.handle(
            QueryRegistered(RegisteredQuery(QueryRef("other", 1), replace(spec(), name="other"), 0, None))
        )
        center.ledger.handle(QueryDeleted(REF))
        raise ZeroDivisionError
    assert center.ledger.next_deadline() == AT_ONCE_MS, "somebody has to load it"
    with pytest.raises(AssertionError):
        attempt()
    center.ledger.load({REF: before})
    assert center.ledger.queries() == [REF]
    assert snapshot(center.ledger, REF) == before
    assert center.tick(MINUTE) == [] and center.ledger.next_deadline() == deadline
    assert attempt() == first


def test_edges_that_a_failed_transaction_listed_are_not_kept() -> None:
    center = Center("a")
    before = snapshot(center.ledger, REF)
    listed = EdgesChanged((edge_record("a"), edge_record("b")))
    with pytest.raises(ZeroDivisionError), center.ledger.transaction():
        center.ledger.handle(listed)
        raise ZeroDivisionError
    center.ledger.load({REF: before})
    assert snapshot(center.ledger, REF) == before
    with center.ledger.transaction() as transaction:
        center.ledger.handle(listed)
        (change,) = transaction.changes()
    assert change.state is not None and '"expected":["a","b"]' in change.state


def test_a_deletion_that_is_loaded_stays() -> None:
    ledger = Ledger()
    ledger.load({REF: None})
    ledger.handle(QueryRegistered(RegisteredQuery(REF, spec(), 0, None)))
    assert ledger.queries() == [] and ledger.is_deleted(REF)


def test_a_transaction_lists_only_what_changed() -> None:
    center = Center("a", lateness="1d")
    for minute in range(500):
        center.says("a", (minute + 1) * MINUTE, close(minute * MINUTE, 1))
    with center.ledger.transaction() as transaction:
        center.says("a", 500 * MINUTE, close(7 * MINUTE, 2, 1))
        (change,) = transaction.changes()
    assert {(kind, start) for kind, start, _ in change.entries} == {("slice", 7 * MINUTE), ("window", 7 * MINUTE)}


def test_a_transaction_in_which_nothing_happens_has_no_changes() -> None:
    center = Center("a", budget={"staleness": "2s"})
    center.tick(0)
    with center.ledger.transaction() as transaction:
        center.tick(1)
        assert transaction.changes() == []
