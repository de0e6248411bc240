"""Alert rules: what fires follows from intervals, and from nothing else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from center.ledger import Phase
from center.sinks.alert_rules import AlertBook, AlertRule, Condition, Transition
from center.sinks.base import SinkAnswer
from edgewater.wire import QueryRef
from tests.examples import examples

MINUTE = 60_000
Interval = tuple[float, float | None, float | None]


def answer(minute: int, groups: dict[str, Interval], revision: int = 1, **changes: Any) -> SinkAnswer:
    columns = list(zip(*groups.values(), strict=True)) or [(), (), ()]
    rows = pa.table(
        {"carrier": pa.array(list(groups), pa.string())}
        | {name: pa.array(c, pa.float64()) for name, c in zip(("x", "x_lower", "x_upper"), columns, strict=True)}
    )
    completeness = {"ratio": changes.pop("ratio", 1.0), "missing": changes.pop("missing", [])}
    met = changes.pop("met", True)
    contract = {"met": met, "violations": [] if met else [{"code": "c", "message": "m"}]}
    start = minute * MINUTE
    return SinkAnswer(
        QueryRef("q", 1), start, start + MINUTE, revision, changes.pop("phase", Phase.COMPLETE), 0, minute, rows,
        {"quality": {"completeness": completeness}, "contract": contract}, ("carrier",),
    )  # fmt: skip


def rule(text: str = "x > 100", certainty: Any = "certainly", **parts: Any) -> AlertRule:
    return AlertRule("high", "q", Condition(text, certainty, parts.pop("compute", {})), **parts)


def changed(transitions: list[Transition]) -> list[tuple[str, str]]:
    return [(t.status, dict(t.alert.labels).get("carrier", "")) for t in transitions]


@pytest.mark.parametrize(
    ("interval", "certainly", "possibly"),
    [
        ((150, 101, 200), True, True),
        ((150, 100, 200), False, True),
        ((50, 20, 101), False, True),
        ((50, 20, 100), False, False),
        ((150, None, 200), False, True),
        ((150, 101, None), True, True),
        ((50, None, None), False, True),
        ((float("nan"), None, None), False, False),
    ],
)
def test_a_threshold_is_crossed_by_the_whole_interval_or_by_a_part(
    interval: Interval, certainly: bool, possibly: bool
) -> None:
    for certainty, fires in (("certainly", certainly), ("possibly", possibly)):
        book = AlertBook([rule(certainty=certainty)])
        assert changed(book.answer(answer(0, {"UA": interval}), (), 0)) == ([("firing", "UA")] if fires else [])


CONDITIONS = (
    "x > {c}",
    "x <= {c}",
    "NOT x < {c}",
    "x > {c} OR x < -{c}",
    "2 * x - 1 > {c} AND x < 900",
    "x = {c}",
    "x <> {c}",
)


@given(st.sampled_from(CONDITIONS), st.integers(0, 50), st.integers(-60, 60), st.integers(0, 40), st.floats(0, 1))
@examples(2_000)
def test_certainty_and_possibility_agree_with_every_value_of_the_interval(
    text: str, c: int, low: int, width: int, at: float
) -> None:
    text, high = text.format(c=c), low + width
    inside = min(float(low + round(width * at)), float(high))
    one = answer(0, {"UA": (inside, float(low), float(high))})
    python = (
        text.replace("NOT", "not").replace("OR", "or").replace("AND", "and").replace("<>", "!=").replace(" = ", " == ")
    )
    holds = [bool(eval(python, {}, {"x": float(x)})) for x in range(low, high + 1)]
    (certainly,), _ = Condition(text, "certainly", {}).matching(one.rows, ())
    (possibly,), _ = Condition(text, "possibly", {}).matching(one.rows, ())
    assert not certainly or all(holds)
    assert possibly or not any(holds)
    if not low < high:
        assert certainly == possibly == holds[0]


def test_computed_values_and_groups_are_part_of_a_condition() -> None:
    book = AlertBook([rule("double > 100 AND carrier <> 'AA'", compute={"double": "x * 2"})])
    given_rows = {"UA": (60.0, 55.0, 70.0), "AA": (90.0, 90.0, 90.0), "DL": (60.0, 40.0, 70.0)}
    (fired,) = book.answer(answer(0, given_rows), (), 7)
    assert fired.alert.labels == (("carrier", "UA"),) and fired.alert.fired_at_ms == 7
    assert fired.alert.details["double"] == {"value": 120.0, "lower": pytest.approx(110), "upper": pytest.approx(140)}


def test_an_alert_waits_for_its_duration_and_resolves_when_the_condition_or_its_group_is_gone() -> None:
    book = AlertBook([rule(for_ms=3 * MINUTE)])
    high, low = (200.0, 200.0, 200.0), (1.0, 1.0, 1.0)
    assert changed(book.answer(answer(0, {"UA": high, "AA": high}), (), 0)) == []
    assert changed(book.answer(answer(1, {"UA": high, "AA": low}), (), 0)) == []
    assert changed(book.answer(answer(2, {"UA": high, "AA": high}), (), 0)) == [("firing", "UA")]
    assert changed(book.answer(answer(3, {"UA": high}), (), 0)) == []
    assert changed(book.answer(answer(4, {"AA": high}), (), 0)) == [("resolved", "UA")]


def test_a_revision_is_evaluated_again_and_an_older_window_is_not() -> None:
    book = AlertBook([rule()])
    assert changed(book.answer(answer(5, {"UA": (200.0, 50.0, 300.0)}), (), 0)) == []
    assert changed(book.answer(answer(5, {"UA": (200.0, 150.0, 250.0)}, revision=2), (), 0)) == [("firing", "UA")]
    assert changed(book.answer(answer(4, {"UA": (1.0, 1.0, 1.0)}), (), 0)) == []
    assert changed(book.answer(answer(5, {"UA": (1.0, 1.0, 1.0)}, revision=3), (), 0)) == [("resolved", "UA")]


def test_answers_of_an_earlier_phase_are_not_evaluated() -> None:
    book = AlertBook([rule(min_phase=Phase.FINAL)])
    assert book.answer(answer(0, {"UA": (200.0, 200.0, 200.0)}), (), 0) == []
    assert changed(book.answer(answer(0, {"UA": (200.0, 200.0, 200.0)}, phase=Phase.FINAL), (), 0)) == [
        ("firing", "UA")
    ]


def test_contracts_completeness_edges_and_silence_have_rules() -> None:
    rules = [
        AlertRule("contract", "q", is_contract=True), AlertRule("completeness", "q", completeness_below=0.9),
        AlertRule("edge", "q", is_edge=True), AlertRule("silence", "q", no_answer_ms=10_000),
    ]  # fmt: skip
    book = AlertBook(rules)
    assert book.tick(0) == []
    fired = book.answer(answer(0, {}, met=False, ratio=0.5, missing=["jfk", "lga"]), (), 1_000)
    assert [(t.alert.rule, t.alert.labels) for t in fired] == [
        ("contract", ()), ("completeness", ()), ("edge", (("edge", "jfk"),)), ("edge", (("edge", "lga"),)),
    ]  # fmt: skip
    assert book.tick(10_999) == []
    assert [(t.alert.rule, t.status) for t in book.tick(11_000)] == [("silence", "firing")]
    gone = book.answer(answer(1, {}, missing=["lga"]), (), 12_000)
    assert [(t.alert.rule, t.status) for t in gone] == [
        ("contract", "resolved"), ("completeness", "resolved"), ("edge", "resolved"),
    ]  # fmt: skip
    assert [(t.alert.rule, t.status) for t in book.tick(12_001)] == [("silence", "resolved")]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 200), st.booleans()), max_size=12))
@examples(200)
def test_a_book_that_is_stored_after_each_answer_says_the_same(steps: list[tuple[int, int, bool]]) -> None:
    rules = [rule(for_ms=2 * MINUTE), AlertRule("silence", "q", no_answer_ms=2_000)]
    steady, stored = AlertBook(rules), AlertBook(rules)
    for now, (minute, value, ticks) in enumerate(steps):
        given_answer = answer(minute, {"UA": (float(value), float(value), float(value))}, revision=now + 1)
        for book in (steady, stored):
            book_transitions = book.tick(now * 1_000) if ticks else book.answer(given_answer, (), now * 1_000)
            if book is steady:
                expected = book_transitions
        assert book_transitions == expected
        stored = AlertBook(rules, json.loads(json.dumps(stored.to_json())))
    assert stored.alerts == steady.alerts


def test_a_condition_on_an_unknown_column_costs_only_its_rule() -> None:
    book = AlertBook([rule("y > 1"), AlertRule("contract", "q", is_contract=True)])
    assert [t.alert.rule for t in book.answer(answer(0, {"UA": (1.0, 1.0, 1.0)}, met=False), (), 0)] == ["contract"]
    assert "y" in book.problems["high"]
    assert np.array(book.alerts, object).shape == (1,)
