"""Input that edges have lost: the windows that may lack it are never complete, whenever the loss becomes known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from center.ledger import EdgesChanged, Emission, TimeAdvanced
from center.ledger.losses import MAX_LOSS_TEXT
from center.ledger.state import MAX_LOSSES
from center.ledger.time_windows import MAX_LACKING, MAX_UNANSWERED
from edgewater.answers import Cause, Phase
from edgewater.base.streams import LIVE, Delivery
from edgewater.model.edge_records import StreamRecord
from edgewater.wire import InputLoss
from tests.center.ledger.test_ledger import MINUTE, REF, Center, close
from tests.center.snapshots import snapshot
from tests.center.statement_world import missing, quality_of, violations

SOURCE = "events:file:/var/log/a.log"


def lost(from_ms: int | None, to_ms: int | None, records: int | None = None) -> InputLoss:
    return InputLoss(SOURCE, "file-truncated", from_ms, to_ms, records)


def states_loss(center: Center, edge: str, through_ms: int, loss: InputLoss, now_ms: int = 0) -> list[Emission]:
    return center.reports(replace(center.fact(edge, through_ms), losses=(loss,)), now_ms=now_ms)


def test_a_window_that_may_lack_lost_input_is_answered_but_not_complete() -> None:
    center = Center("a", "b", lateness="10m")
    center.says("b", 2 * MINUTE, close(0, 5), close(MINUTE, 5))
    loss = lost(30_000, 40_000, 7)
    states_loss(center, "a", 0, loss)
    first, second = center.says("a", 2 * MINUTE, close(0, 3), close(MINUTE, 3))
    assert (first.phase, second.phase) == (Phase.EARLY, Phase.COMPLETE)
    assert (missing(first), missing(second)) == (("a",), ())
    stated = quality_of(first)
    assert stated["completeness"]["losses"] == [
        {"edge": "a", "source": SOURCE, "reason": "file-truncated", "from_ms": 30_000, "to_ms": 40_000, "records": 7}
    ]
    assert stated["records"]["expected"] is None and set(stated["error"]["missing"].values()) == {None}
    assert not stated["contract"]["met"]
    assert "edge a: 7 records of source" in {v.code: v.message for v in violations(first)}["input-lost"]
    assert "losses" not in quality_of(second)["completeness"]


def test_a_complete_answer_is_revised_by_a_loss_and_the_final_one_states_it() -> None:
    center = Center("a", lateness="1m")
    (complete,) = center.says("a", MINUTE, close(0, 3))
    assert (complete.phase, complete.facts.is_complete) == (Phase.COMPLETE, True)
    (revised,) = states_loss(center, "a", MINUTE, lost(None, 50_000))
    assert (revised.revision, missing(revised)) == (2, ("a",)), "no phase moves back, but nothing is claimed"
    assert not quality_of(revised)["contract"]["met"]
    (final, other) = center.says("a", 2 * MINUTE, close(MINUTE, 3))
    assert (final.phase, missing(final), missing(other)) == (Phase.FINAL, ("a",), ())


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_loss_is_stated_after_its_edge_was_retired(is_answered: bool) -> None:
    center = Center("a", "b", lateness="1m")
    states_loss(center, "a", 0, lost(30_000, 40_000, 7))
    center.says("a", 2 * MINUTE, close(0, 3), close(MINUTE, 3))
    if is_answered:
        center.says("b", MINUTE, close(0, 5))
    center.retires("a")
    final, other = center.says("b", 2 * MINUTE, close(0, 5), close(MINUTE, 5))
    stated = quality_of(final)
    assert (final.phase, final.facts.expected, stated["completeness"]["left"]) == (Phase.FINAL, 1, ["a"])
    assert stated["completeness"]["losses"][0]["records"] == 7
    assert {"input-lost", "left"} == {violation.code for violation in violations(final)}
    assert other.facts.by_cause(Cause.INPUT_LOST) == (), "only windows with the lost input lack it"


def test_a_window_without_a_record_is_not_known_to_be_empty_if_input_was_lost() -> None:
    center = Center("a", lateness="1m")
    center.says("a", MINUTE, close(0, 3))
    states_loss(center, "a", MINUTE, lost(MINUTE, 3 * MINUTE), now_ms=3 * MINUTE)
    emissions = center.says("a", 5 * MINUTE, close(3 * MINUTE, 1), now_ms=5 * MINUTE)
    answered = {e.window_start_ms: (e.phase, missing(e)) for e in emissions}
    assert answered[MINUTE] == answered[2 * MINUTE] == (Phase.FINAL, ("a",))
    assert answered[3 * MINUTE] == (Phase.FINAL, ())
    assert 4 * MINUTE not in answered, "this one is known to be empty"


def test_unbounded_losses_are_stated_for_every_later_window() -> None:
    center = Center("a")
    states_loss(center, "a", 0, lost(None, None))
    (answer,) = center.says("a", MINUTE, close(0, 3))
    assert missing(answer) == ("a",)
    assert quality_of(answer)["completeness"]["losses"][0]["to_ms"] is None


@pytest.mark.parametrize("query", [{}, {"window": {"session": "30s"}}, {"budget": {"staleness": "2s"}}], ids=str)
def test_losses_survive_a_restart_of_the_center(query: dict[str, object]) -> None:
    center = Center("a", lateness="10m", **query)
    states_loss(center, "a", 0, lost(0, 40_000))
    center.ledger.restore(REF, snapshot(center.ledger, REF))
    emissions = center.says("a", 3 * MINUTE, replace(close(0, 3), first_ms=10_000, last_ms=20_000))
    assert [missing(e) for e in emissions if e.window_start_ms < MINUTE] == [("a",)]


def test_losses_are_bounded_and_forgotten_once_no_window_can_lack_them() -> None:
    center = Center("a")
    for n in range(3 * MAX_LOSSES):
        states_loss(center, "a", 0, lost(n * MINUTE, (n + 1) * MINUTE))
    state = center.ledger.book(REF).state
    assert len(state.losses["a"]) == MAX_LOSSES
    emissions = center.says("a", 200 * MINUTE, *(close(n * MINUTE, 1) for n in range(200)))
    assert [e.window_start_ms for e in emissions if missing(e)] == [n * MINUTE for n in range(3 * MAX_LOSSES)]
    assert not center.ledger.book(REF).state.losses


@pytest.mark.parametrize("is_retired", [False, True])
def test_the_delivery_of_an_edge_that_does_not_count_exactly_once_is_stated(is_retired: bool) -> None:
    center = Center("a", "b")
    both = (Delivery.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE)
    streams = (StreamRecord("events", center.edges["b"].streams[0].columns, LIVE, both),)
    center.edges["b"] = replace(center.edges["b"], streams=streams)
    center.ledger.handle(EdgesChanged(tuple(center.edges.values())))
    center.ledger.restore(REF, snapshot(center.ledger, REF))
    center.says("b", 9 * MINUTE, close(0, 3))
    if is_retired:
        center.retires("b")
    answer, *_, after = center.says("a", 9 * MINUTE, close(0, 3), close(8 * MINUTE, 3))
    assert ("delivery" in quality_of(after)["completeness"]) is not is_retired
    assert quality_of(answer)["completeness"]["delivery"] == {"b": ["at-least-once", "at-most-once"]}
    assert answer.facts.is_complete, "no loss is known"


@pytest.mark.slow
def test_statements_of_losses_cost_little_however_many_there_are() -> None:
    center, now_ms = Center("a", "b"), 1_700_000_000_000
    spans = [(now_ms - (n + 1) * 1000 * MINUTE, now_ms - n * 1000 * MINUTE) for n in range(4_096)]
    for part in (spans[:2_048], spans[2_048:]):
        fact = replace(center.fact("a", 0), losses=tuple(lost(*span) for span in part))
        center.reports(fact, fact, now_ms=now_ms)
    query = center.ledger.book(REF)
    assert len(query.state.losses["a"]) == MAX_LOSSES
    assert 1_000 <= len(query.windows) <= MAX_UNANSWERED + MAX_LACKING


def test_what_a_frame_states_of_losses_costs_and_repeats_a_bounded_amount() -> None:
    center = Center("a", lateness="10m")
    many = tuple(InputLoss("s" * 100_000, "r" * 100_000, n, n + 1, 1) for n in range(3 * MAX_LOSSES))
    center.reports(replace(center.fact("a", 0), losses=many))
    (answer,) = center.says("a", MINUTE, close(0, 3))
    stated = answer.facts.by_cause(Cause.INPUT_LOST)
    assert len(stated) <= MAX_LOSSES and sum(loss.lacks.most or 0 for loss in stated) == len(many)
    assert {(len(loss.source), len(loss.reason)) for loss in stated} == {(MAX_LOSS_TEXT, MAX_LOSS_TEXT)}


def test_windows_of_a_loss_that_is_no_longer_stated_are_not_known_to_be_empty() -> None:
    """The loss concerns more windows than are opened, and is forgotten when they are final."""
    center = Center("a")
    center.says("a", MINUTE, close(0, 3))
    end = (3 * MAX_LACKING) * MINUTE
    states_loss(center, "a", MINUTE, lost(MINUTE, end), now_ms=end)
    center.says("a", end + 2 * MINUTE, close(end, 1), now_ms=end + 2 * MINUTE)
    book = center.ledger.book(REF)
    while book.has_backlog:
        assert book.state.empty_from_ms >= end
        center.ledger.handle(TimeAdvanced(end + 2 * MINUTE))
    state = book.state
    assert not state.losses and state.empty_from_ms >= end and state.empty_through_ms == end + 2 * MINUTE
