"""Questions about synopses and rows of answers widen intervals by the same rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from center.results import AnswerRecord
from center.serving.evaluator import AnsweredWindows, Evaluator
from center.serving.measures import NO_QUESTIONS
from center.serving.question_lines import read_question
from center.serving.synopsis_cache import SynopsisCache
from center.serving.totals import answer_totals
from center.serving.widening import Lacking, Widening
from center.serving.withheld import GroupsWithheld
from edgewater.answers import UNKNOWN, Amount, Cause, Deviation, EdgeStatements, Facts, Phase, Predicted, WithheldBound
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.synopses.rests import NOTHING
from edgewater.wire import QueryRef

SPEC = QuerySpec.from_mapping(
    {
        "name": "q", "from": "s", "measures": {"total": "sum(x)", "n": "count()", "users": "distinct(x)"},
        "window": {"tumbling": "3s"}, "group_by": ["k"], "accuracy": {"error": "5%", "measure": "total"},
    }
)  # fmt: skip
GROUPS = {"k": pa.array(["a", "b"])}
PREDICTED = Predicted(
    "total", confidence=0.95, groups={'["a"]': (10.0, 8.0, 12.0), '["b"]': (20.0, 18.0, 22.0)}
)  # fmt: skip
MISSING = Deviation(Cause.MISSING, "e", lacks=UNKNOWN, only={"k": "b"})
NOTHING_WITHHELD = GroupsWithheld.of(SPEC, {})


def aggregate() -> GroupedAggregate:
    made = GroupedAggregate({"k": pa.string()}, {m.name: m.stack(pa.float64()) for m in SPEC.measures})
    codes = made.encode([pa.array(["a", "b", "b"])], 3)
    for stack in made.measures.values():
        stack.update(codes, np.array([6.0, 7.0, 8.0]))
    return made


def window(start_ms: int, predicted: Predicted | None, *deviations: Deviation) -> AnswerRecord:
    rests = dict.fromkeys((m.name for m in SPEC.measures), None)
    facts = Facts(1, 1, 1.0, deviations=deviations, rests=rests, predicted=predicted)
    return AnswerRecord(0, QueryRef("q", 1), start_ms, start_ms + 3000, 1, Phase.EARLY, 0, 0, facts, None)


def widening(facts: Facts) -> Widening:
    """Returns the widening of the rows of an answer."""
    return Widening(GROUPS, NOTHING_WITHHELD, Lacking.of(facts, GROUPS, 2), facts.predicted, None)


@dataclass(frozen=True)
class Windows:
    """Answered windows with the data of `aggregate`."""

    answers: Sequence[AnswerRecord]
    spec: QuerySpec = SPEC

    def latest(self, count: int) -> Sequence[AnswerRecord]:
        return self.answers[-count:]

    def at(self, time_ms: int) -> Sequence[AnswerRecord]:
        return [w for w in self.answers if w.window_start_ms <= time_ms < w.window_end_ms]

    def starting(self, start_ms: int) -> AnswerRecord | None:
        return next((w for w in self.answers if w.window_start_ms == start_ms), None)

    def aggregate(self, window: AnswerRecord) -> GroupedAggregate:
        return aggregate()

    def empty(self, windows: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        return set()

    def for_query(self, query: str) -> AnsweredWindows:
        return self


def bounds(*answers: AnswerRecord, **line: Any) -> list[tuple[float | None, float | None]]:
    """Returns lower and upper of each group in the answer to one question line."""
    question = read_question({"latest": len(answers), **line})
    (said,) = Evaluator(Windows(answers), SynopsisCache(1 << 20)).answer(question)
    return [(cell["lower"], cell["upper"]) for cell in said.get("data", [said])]


UNBOUNDED = (None, None)


def test_a_question_states_the_predictions_of_an_early_answer() -> None:
    assert bounds(window(0, PREDICTED), measure="total") == [(8, 12), (18, 22)]
    assert bounds(window(0, PREDICTED), measure="total", group={"k": "b"}) == [(18, 22)]


@pytest.mark.parametrize(
    "deviation",
    [
        Deviation(Cause.REJECTED, lacks=Amount(0, 1)),
        Deviation(Cause.AFTER_FINAL, lacks=Amount(1, 1)),
        Deviation(Cause.GUESSED, reason="assumed-copy", lacks=Amount(0, 1)),
        Deviation(Cause.LOST_STATE, "edge", lacks=UNKNOWN, extra=UNKNOWN),
    ],
    ids=lambda deviation: deviation.cause,
)
def test_a_prediction_has_no_bounds_if_it_cannot_include_all_records(deviation: Deviation) -> None:
    early = window(0, PREDICTED, deviation)
    assert bounds(early, measure="total") == [UNBOUNDED, UNBOUNDED]
    (total, *_), stack = SPEC.measures, aggregate().measures["total"]
    widened = widening(early.facts).widen(total, stack, stack.query(), None)
    assert np.isnan(widened.lower).all() and np.isnan(widened.upper).all()
    assert widened.value.tolist() == [10, 20]


def test_predictions_of_groups_and_windows_are_not_added() -> None:
    assert bounds(window(0, PREDICTED), measure="total", **{"global": True}) == [UNBOUNDED]
    both = (window(0, PREDICTED), window(3000, PREDICTED))
    assert bounds(*both, measure="total", merge=True) == [UNBOUNDED, UNBOUNDED]
    assert bounds(window(0, None), window(3000, PREDICTED), measure="total", merge=True) == [UNBOUNDED, UNBOUNDED]


def test_a_measure_without_a_prediction_has_no_bounds_while_records_are_out() -> None:
    assert bounds(window(0, PREDICTED), measure="n") == [UNBOUNDED, UNBOUNDED]
    assert bounds(window(0, None), measure="n") == [(1, 1), (2, 2)]


@pytest.mark.parametrize(("confidence", "is_bounded"), [(0.0, False), (0.5, True), (1.0, True)])
def test_bounds_of_which_nothing_is_promised_are_unknown(confidence: float, is_bounded: bool) -> None:
    late = Deviation(Cause.MAY_CHANGE, lacks=Amount(0, 2), confidence=confidence)
    complete = replace(window(0, None, late), phase=Phase.COMPLETE)
    assert bounds(complete, measure="n") == ([(1.0, 3.0), (2.0, 4.0)] if is_bounded else [(None, None)] * 2)
    whole = replace(complete, facts=replace(complete.facts, rests=dict.fromkeys(complete.facts.rests, NOTHING)))
    total = answer_totals(whole, SPEC, NO_QUESTIONS, aggregate()).total["n"]
    assert (total["lower"], total["upper"]) == ((3, 5) if is_bounded else (None, None))
    assert total.get("confidence", 1.0) == (confidence if is_bounded else 1.0)


def test_a_missing_edge_removes_the_bounds_of_its_groups_only() -> None:
    lacking = window(0, None, MISSING)
    assert bounds(lacking, measure="total") == [(6, 6), UNBOUNDED]
    assert bounds(lacking, measure="n") == [(1, 1), (2, None)]
    assert bounds(lacking, measure="n", **{"global": True}) == [(3, None)]


def test_only_a_measures_own_value_has_a_bound_beside_a_missing_edge() -> None:
    """Further records can only raise a count. How they move the answer to another question is not known."""
    stack, users = aggregate().measures["users"], SPEC.measures[2]
    widened = widening(window(0, None, MISSING).facts).widen(users, stack, stack.query(), None, own=False)
    assert np.isfinite([widened.lower[0], widened.upper[0]]).all()
    assert np.isnan([widened.lower[1], widened.upper[1]]).all()


def test_what_an_edge_withholds_widens_the_groups_that_the_edge_may_have_records_of() -> None:
    own = {"n": WithheldBound(3.0, 0.0)}

    def holding(start_ms: int, only: dict[str, str]) -> AnswerRecord:
        plain, constants = window(start_ms, None), {"e": only} if only else {}
        edges = EdgeStatements(withheld={"e": own}, only=constants)
        return replace(plain, facts=replace(plain.facts, withheld=own, edges=edges))

    one, other = holding(0, {"k": "b"}), holding(3000, {"k": "b"})
    assert bounds(one, measure="n") == [(1, 1), (2, 5)]
    assert bounds(one, measure="n", group={"k": "a"}) == [(1, 1)]
    assert bounds(one, other, measure="n", merge=True) == [(2, 2), (4, 10)]
    assert bounds(one, holding(3000, {}), measure="n", merge=True) == [(2, 8), (4, 10)]
