"""The stored form of facts, and that of release 0.3.0."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgewater.answers import (
    NOT_LISTED,
    UNKNOWN,
    AccuracyFacts,
    Amount,
    Cause,
    Deviation,
    EdgeStatements,
    Facts,
    GroupCounts,
    Predicted,
    SessionFacts,
    WithheldBound,
)
from edgewater.answers.statement import judged
from edgewater.answers.stored import FORMAT, facts_from_json, facts_to_json
from edgewater.base.errors import StorageError, UnsupportedVersion
from edgewater.base.streams import Delivery
from edgewater.model.query import QuerySpec
from edgewater.wire import Rest
from tests.query_specs import query_spec

# What release 0.3.0 has stored, by kind: the JSON of its `Quality`, with late records where the kind says so.
OF_0_3_0: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "format_1.json").read_text())

INFINITE = WithheldBound(math.inf, 0.0, math.inf, math.inf, 0.25)
PLAIN = Facts(2, 2, 1.0)
FACTS = {
    "defaults": PLAIN,
    "deviations": replace(
        PLAIN,
        deviations=(
            Deviation(Cause.MISSING, "b", lacks=UNKNOWN, only={"k": "1", "n": -(1 << 63), "w": True, "t": ""}),
            Deviation(Cause.LOST_STATE, "b", lacks=UNKNOWN, extra=UNKNOWN),
            Deviation(Cause.INPUT_LOST, "b", "log", "torn", lacks=Amount(0, 7), from_ms=100),
            Deviation(Cause.AFTER_FINAL, reason="after-final", records=1 << 60, lacks=Amount(1 << 60, 1 << 60)),
            Deviation(Cause.UNANSWERED, lacks=UNKNOWN, windows=3),
        ),
    ),
    "bounds": replace(PLAIN, withheld={"s": INFINITE, "t": WithheldBound(1e-320, 1e308)}, both_signs=("s", "t")),
    "rests": replace(PLAIN, rests={"s": Rest(3, (1e300, -0.1, math.inf, -math.inf), 0.5), "n": Rest(4), "m": None}),
    "edges": replace(
        PLAIN,
        deliveries={"b": (Delivery.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE)},
        edges=EdgeStatements(("a",), {"b": -5}, {"a": 2}, {"a": {"s": INFINITE}}, {"a": {"k": False}}),
    ),
    "many edges": replace(PLAIN, edges=NOT_LISTED),
    "session": replace(PLAIN, has_data=False, session=SessionFacts(True, 4, -500)),
    "prediction": replace(
        PLAIN,
        accuracy=AccuracyFacts(
            "s", "sampled", 60, 0.9, True, True, None, ("b",), {"a": 2}, GroupCounts(2, 1, 0), False, True, "too few",
            None, 40, {"sampling": None, "straggler": 0.1, "missing": 0.0},
        ),
        predicted=Predicted("s", True, 0.95, groups={'["x"]': (0.1, None, 1e308), '["y"]': (None, None, None)}),
    ),
    "union": replace(PLAIN, windows=24, predicted=Predicted()),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_facts_are_read_as_they_were_written(name: str) -> None:
    text = facts_to_json(FACTS[name])
    json.loads(text, parse_constant=pytest.fail)  # databases and other readers accept no NaN and no infinity
    assert facts_from_json(text) == FACTS[name]


def test_a_rest_that_is_no_number_is_read_as_it_was_written() -> None:
    read = facts_from_json(facts_to_json(replace(PLAIN, rests={"s": Rest(1, (math.nan,), math.nan)})))
    rest = read.rests["s"]
    assert rest is not None and rest.values == 1 and math.isnan(rest.parts[0]) and math.isnan(rest.squares)


def test_constants_keep_their_types() -> None:
    only = {"flag": True, "number": 1, "text": "1", "name": "NaN"}
    read = facts_from_json(facts_to_json(replace(PLAIN, deviations=(Deviation(Cause.LEFT, "c", only=only),))))
    assert {name: (type(value), value) for name, value in read.deviations[0].only.items()} == {
        name: (type(value), value) for name, value in only.items()
    }


def test_a_newer_format_is_refused() -> None:
    text = facts_to_json(PLAIN).replace(f'"format":{FORMAT}', f'"format":{FORMAT + 1}')
    with pytest.raises(UnsupportedVersion):
        facts_from_json(text)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"format":2,"facts":{}}', '{"format":2,', '{"records": 1}'])
def test_what_is_no_answer_is_refused(text: str) -> None:
    with pytest.raises(StorageError):
        facts_from_json(text)


# Release 0.3.0


def spec_of(kind: str) -> QuerySpec:
    """The query of which the JSON tells."""
    asked = OF_0_3_0[kind]["contract"]["requested"]
    parts: dict[str, Any] = {}
    if "confidence" in asked:
        scope = {"scope": asked["scope"]} if "scope" in asked else {}
        accuracy = {"error": "5%", "confidence": "95%", "measure": "s", "substream": "500ms", **scope}
        parts = {"accuracy": accuracy, **({"group_by": ["k"]} if scope else {})}
        if "error_budget" in asked:
            parts["budget"] = {"error": asked["error_budget"]}
    elif "error" in asked:
        parts = {"budget": {"error": asked["error"]}}
    measures = {"n": "count()", "s": "sum(x)", "t": "sum(y)", "m": "max(x)"}
    return query_spec(parts, measures=measures)


@pytest.mark.parametrize("kind", OF_0_3_0)
def test_an_answer_of_0_3_0_states_the_same(kind: str) -> None:
    stored, spec = OF_0_3_0[kind], spec_of(kind)
    facts = facts_from_json(json.dumps(stored))
    now = judged(facts, (), spec)
    quality = now.quality()
    same = ("completeness", "records", "staleness_ms", "first_staleness_ms", "accuracy", "session")
    assert {name: quality.get(name) for name in same} == {name: stored.get(name) for name in same}
    assert quality["error"]["withheld"] == stored["error"]["withheld"]
    assert now.contract.to_json()["requested"] == stored["contract"]["requested"]
    codes = sorted(violation["code"] for violation in stored["contract"]["violations"])
    assert sorted(violation.code for violation in now.contract.violations) == codes
    assert now.contract.met is stored["contract"]["met"]
    assert facts_from_json(facts_to_json(facts)) == facts


def of_0_3_0(kind: str) -> Facts:
    return facts_from_json(json.dumps(OF_0_3_0[kind]))


def test_the_edges_of_0_3_0_keep_their_constants_and_losses() -> None:
    only = {"k": "x", "v": 3, "w": True}
    assert of_0_3_0("missing").deviations == (
        Deviation(Cause.MISSING, "b", lacks=UNKNOWN, only=only),
        Deviation(Cause.LOST_STATE, "b", lacks=UNKNOWN, extra=UNKNOWN, only=only),
    )
    assert of_0_3_0("missing").edges == EdgeStatements(("a",), {"b": 500}, {"a": 1})
    assert of_0_3_0("left").deviations == (Deviation(Cause.LEFT, "c", lacks=UNKNOWN, only={"k": "x"}),)
    lost = of_0_3_0("losses")
    assert lost.by_cause(Cause.INPUT_LOST) == (
        Deviation(
            Cause.INPUT_LOST, "a", "log", "file-truncated",
            lacks=Amount(0, 7), from_ms=100, to_ms=200, only={"k": "x"},
        ),
        Deviation(Cause.INPUT_LOST, "a", "log", "retention", lacks=UNKNOWN, only={"k": "x"}),
    )  # fmt: skip
    assert lost.deliveries == {"b": (Delivery.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE)}
    assert of_0_3_0("many-edges").edges == NOT_LISTED


def test_late_records_of_0_3_0_are_deviations() -> None:
    assert of_0_3_0("late").late_counts == (3, 3, 9)
    assert of_0_3_0("late").records_by(Cause.AFTER_FINAL) == {"after-final": 2, "too-late": 1}
    assert of_0_3_0("late").records_by(Cause.REJECTED) == {"malformed": 3}
    assert of_0_3_0("late").records_by(Cause.GUESSED) == {"assumed-copy": 4, "assumed-reset": 5}
    assert of_0_3_0("late").may_count_twice


def test_withheld_amounts_of_0_3_0_are_read_as_they_were() -> None:
    facts = of_0_3_0("withheld")
    assert facts.withheld == {
        "m": WithheldBound(math.inf, 0.0, math.inf),
        "n": WithheldBound(3.0, 0.0, None, 0.5, 0.0),
        "s": WithheldBound(4.0, 2.0),
        "t": WithheldBound(1.0, 0.0),
    }
    assert facts.edges.withheld == {"a": facts.withheld} and facts.edges.only == {"a": {"k": "x"}}
    assert facts.rests == {"s": Rest(3, (1e300, -2.5)), "n": Rest(3), "m": None}
    assert facts.both_signs == ("s", "t")


def test_sessions_and_predictions_of_0_3_0_are_read_as_they_were() -> None:
    assert of_0_3_0("session").session == SessionFacts(True, 4)
    assert of_0_3_0("merged").is_merged_session and not of_0_3_0("nothing").has_data
    assert of_0_3_0("prediction").predicted == Predicted("s", False, 0.95, (100.0, 90.0, 110.0))
    assert of_0_3_0("no-bounds").predicted == Predicted("s", False, None, (100.0, None, None))
    groups = {'["x"]': (50.0, 45.0, 55.0), '["y"]': (None, None, None)}
    assert of_0_3_0("groups").predicted == Predicted("s", False, 0.95, groups=groups)
    accuracy = of_0_3_0("groups").accuracy
    assert accuracy is not None and accuracy.groups == GroupCounts(1, 1, 1) and accuracy.stands_for_missing
    assert accuracy.error == {"sampling": 1.5, "straggler": 4.0, "missing": 2.0}
    assert of_0_3_0("unknown-sample").predicted == Predicted("s") and of_0_3_0("accuracy-final").predicted is None


@pytest.mark.parametrize("text", ["[" * 100_000, '{"completeness":[],"records":[],"error":[]}'])
def test_a_damaged_text_of_any_form_is_a_storage_error(text: str) -> None:
    with pytest.raises(StorageError):
        facts_from_json(text)
