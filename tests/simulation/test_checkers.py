"""Each checker finds the statement that it is there to find, and nothing in a true answer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from edgewater.model.query import QuerySpec
from tests.simulation.checkers import Outcome, RevisionWatch, check_query, false_confidences, time_ms
from tests.simulation.truth import Fate, QueryTruth, TrueRecord

COLUMNS = {"k": pa.string(), "x": pa.int64(), "f": pa.float64()}


def spec(**parts: object) -> QuerySpec:
    mapping = {"name": "q", "from": "s", "measures": {"n": "count()", "s": "sum(x)"}, "window": {"tumbling": "1s"}}
    return QuerySpec.from_mapping({**mapping, "group_by": ["k"], **parts})


def record(at_ms: int, k: str = "a", x: int | None = 1, f: float = 0.0, **parts: Any) -> TrueRecord:
    return TrueRecord("e1", at_ms, {"k": k, "x": x, "f": f}, **parts)


def exactly(value: float | None) -> dict[str, Any]:
    return {"estimate": value, "lower": value, "upper": value}


def answer(data: list[dict[str, Any]], *, phase: str = "final", observed: int = 3, **parts: Any) -> dict[str, Any]:
    whole = phase != "early"
    missing = [] if whole else ["e1"]
    return {
        "query": "q",
        "window": {"start": "1970-01-01T00:00:00Z", "end": "1970-01-01T00:00:01Z"},
        "phase": phase,
        "revision": 1,
        "data": copy.deepcopy(data),
        "confidence": 1.0,
        "quality": {
            "completeness": {"ratio": 1.0 if whole else 0.5, "expected": 2, "reported": 2, "missing": missing},
            "records": {"observed": observed, "expected": None, "late": 0, "after_final": 0, "rejected": 0},
            "staleness_ms": 10,
            "error": {"sketch": 0, "sampling": 0, "withheld": {}, "missing": 0},
        },
        "contract": {"requested": {"exact": True}, "met": whole, "violations": []},
        **parts,
    }


TRUE_ROWS = [
    {"group": {"k": "a"}, "n": exactly(2), "s": exactly(3)},
    {"group": {"k": "b"}, "n": exactly(1), "s": exactly(5)},
]
RECORDS = (record(0, x=1), record(10, x=2), record(999, "b", 5))


def kinds(
    given: dict[str, Any], records: tuple[TrueRecord, ...] = RECORDS, query: QuerySpec | None = None, counted: int = 0
) -> set[str]:
    truth = QueryTruth(query or spec(), records, COLUMNS)
    return {f.kind for f in check_query(truth, [given], at_rest=True, counted=counted, closed_through_ms=1000).false}


def test_true_answers_have_no_falsehood() -> None:
    assert kinds(answer(TRUE_ROWS)) == set()


def test_a_row_of_an_early_answer_may_lack_late_records_if_no_missing_edge_has_its_group() -> None:
    """Edge e2 is missing and has only group c. Edge e1 has closed the window, so the row of b is settled but for late
    records. The row of another group is not."""
    late = (record(0, x=1), record(10, x=2, late=True))
    rows = [{"group": {"k": "a"}, "n": exactly(1), "s": exactly(1)}]
    given = answer(rows, phase="early", observed=1)
    given["quality"]["completeness"] |= {"missing": ["e2"], "only": {"e2": {"k": "c"}}}
    settled = {**given, "revision": 2, "data": copy.deepcopy(TRUE_ROWS[:1])}
    settled["quality"] = {**given["quality"], "records": {**given["quality"]["records"], "observed": 2}}
    truth = QueryTruth(spec(), late, COLUMNS)

    def found(*answers: dict[str, Any]) -> set[str]:
        return {f.kind for f in check_query(truth, answers, at_rest=True).false}

    assert found(given, settled) == set()
    assert found(given) >= {"interval"}, "the last answer has the late records"
    given["quality"]["completeness"]["only"] = {"e2": {"k": "a"}}
    assert found(given, settled) == {"interval"}, "e2 may have the group"
    in_time = QueryTruth(spec(), (late[0], replace(late[1], late=False)), COLUMNS)
    given["quality"]["completeness"]["only"] = {"e2": {"k": "c"}}
    assert {f.kind for f in check_query(in_time, (given, settled), at_rest=True).false} == {"interval"}


@pytest.mark.parametrize(("allowed", "held"), [(1, False), (2, True)])
def test_an_allowance_for_late_records_is_compared_with_those_that_followed(allowed: int, held: bool) -> None:
    first, last = answer(TRUE_ROWS[1:], phase="complete", observed=1), answer(TRUE_ROWS) | {"revision": 2}
    first["quality"]["completeness"]["may_change"] = {"records": allowed, "confidence": 0.9}
    truth = QueryTruth(spec(), tuple(replace(each, late=True) for each in RECORDS), COLUMNS)
    outcomes = [o for o in check_query(truth, (first, last), at_rest=True).outcomes if o.kind.startswith("late")]
    assert [(o.confidence, o.held) for o in outcomes] == [(0.9, held)]


@pytest.mark.parametrize(("watermark_ms", "false"), [(999, {"completeness", "number"}), (1_000, set())])
def test_a_lost_record_concerns_the_windows_that_were_not_final_when_it_came(
    watermark_ms: int, false: set[str]
) -> None:
    lost = (*RECORDS[:2], record(20, x=4, fate=Fate.LOST, late=True, watermark_ms=watermark_ms))
    assert kinds(answer(TRUE_ROWS[:1], observed=2), lost) == false


def changed(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    result = copy.deepcopy(answer(TRUE_ROWS))
    change(result)
    return result


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("number", lambda a: a["data"][0]["s"].update(estimate=4)),
        ("number", lambda a: a["data"][0]["s"].update(lower=4, upper=5)),
        ("number", lambda a: a["data"].pop()),
        ("group", lambda a: a["data"].append({"group": {"k": "c"}, "n": exactly(0), "s": exactly(0)})),
        ("completeness", lambda a: a["quality"]["records"].update(observed=2)),
        ("observed", lambda a: a["quality"]["records"].update(observed=4)),
        ("late", lambda a: a["quality"]["records"].update(late=1)),
        ("expected", lambda a: a["quality"]["records"].update(expected=4)),
        ("expected", lambda a: a["quality"]["records"].update(expected=2)),
        ("confidence", lambda a: [row[m].update(lower=None, upper=None) for row in a["data"] for m in ("n", "s")]),
        ("met", lambda a: a.update(phase="early")),
        ("completeness", lambda a: a["quality"]["completeness"].update(missing=["e2"])),
    ],
)
def test_a_false_statement_is_found(kind: str, change: Callable[[dict[str, Any]], None]) -> None:
    assert kind in kinds(changed(change))


@pytest.mark.parametrize(
    ("total", "false"),
    [
        ({"n": exactly(3), "s": exactly(8)}, set()),
        ({"n": exactly(2), "s": exactly(8)}, {"number"}),
        ({"n": exactly(3), "s": {"estimate": 8, "lower": 9, "upper": 9}}, {"number"}),
        ({"n": exactly(3)}, {"total"}),
        ({"n": {"estimate": 3, "lower": None, "upper": None}, "s": exactly(8)}, {"total"}),
    ],
)
def test_a_false_total_is_found(total: dict[str, Any], false: set[str]) -> None:
    assert kinds(answer(TRUE_ROWS, total=total)) == false


def test_an_early_bound_that_excludes_what_is_missing() -> None:
    """A count's lower bound is true of an early answer; its upper bound is not known."""
    rows = [{"group": {"k": "a"}, "n": {"estimate": 1, "lower": 1, "upper": None}, "s": exactly(None)}]
    assert kinds(answer(rows, phase="early", observed=1)) == set()
    rows[0]["n"]["upper"] = 1
    assert kinds(answer(rows, phase="early", observed=1)) == {"interval"}


def test_records_in_doubt_may_be_in_an_answer_or_not() -> None:
    doubtful = (*RECORDS, record(20, x=10, fate=Fate.UNCERTAIN))
    assert kinds(answer(TRUE_ROWS), doubtful) == set()
    rows = copy.deepcopy(TRUE_ROWS)
    rows[0] |= {"n": exactly(3), "s": exactly(13)}
    assert kinds(answer(rows, observed=4), doubtful) == set()
    rows[0] |= {"s": exactly(14)}
    assert kinds(answer(rows, observed=4), doubtful) == {"number"}


def test_the_records_of_an_edge_are_in_an_answer_that_lacks_another_edge() -> None:
    said = answer(TRUE_ROWS)
    said["quality"]["completeness"] |= {"ratio": 0.5, "missing": ["e2"]}
    said["contract"]["met"], said["confidence"] = False, None
    for row in said["data"]:
        row |= {name: row[name] | {"lower": None, "upper": None} for name in ("n", "s")}
    assert kinds(said) == set()
    said["data"][0]["s"]["estimate"] = 2
    assert kinds(said) == {"number"}


def test_lost_records_are_said_to_be_lost() -> None:
    lost = (*RECORDS, record(20, x=10, fate=Fate.LOST))
    assert {"completeness", "number"} <= kinds(answer(TRUE_ROWS), lost)
    said = answer(TRUE_ROWS)
    said["quality"]["completeness"] |= {"ratio": 0.5, "missing": ["e1"]}
    said["contract"]["met"] = False
    for row in said["data"]:
        row |= {"n": {"estimate": 1, "lower": 1, "upper": None}, "s": exactly(None)}
    assert kinds(said, lost) == set()


def test_records_that_come_after_final_are_counted() -> None:
    after = (*RECORDS, record(20, x=10, fate=Fate.EITHER))
    assert {"conservation", "completeness"} <= kinds(answer(TRUE_ROWS), after)
    stated = answer(TRUE_ROWS)
    stated["quality"]["completeness"]["ratio"] = 0.75
    stated["quality"]["records"]["after_final"] = 1
    stated["contract"]["met"] = False
    assert kinds(stated, after) == set()


def test_only_windows_closed_by_a_dead_edge_may_lack_what_it_never_read() -> None:
    unread = record(20, x=10, watermark_ms=1000, unread=True)
    assert kinds(answer(TRUE_ROWS), (*RECORDS, unread)) == set()
    assert "number" in kinds(answer(TRUE_ROWS), (*RECORDS, replace(unread, watermark_ms=999)))


def test_a_window_without_an_answer() -> None:
    truth = QueryTruth(spec(), RECORDS, COLUMNS)
    false = check_query(truth, [], at_rest=True, closed_through_ms=1000).false
    assert {f.kind for f in false} == {"no-answer", "conservation"}


def test_nan_is_not_dropped() -> None:
    query = spec(measures={"s": "sum(f)"}, group_by=[])
    records = (record(0, f=1.0), record(1, f=float("nan")))
    assert kinds(answer([{"group": {}, "s": exactly(1.0)}], observed=2), records, query) == {"not-a-number"}
    unknown = answer([{"group": {}, "s": exactly(None)}], observed=2, confidence=None)
    assert kinds(unknown, records, query) == set()


def test_budgets_hold_where_they_are_said_to_be_met() -> None:
    query = spec(measures={"s": "sum(x)"}, budget={"error": {"s": 2}})
    given = answer([{"group": {"k": "b"}, "s": {"estimate": 5, "lower": 2, "upper": 8}}])
    given["contract"] |= {"requested": {"error": {"s": 2.0}}}
    given["quality"]["error"]["withheld"] = {"s": {"above": 3.0, "below": 3.0}}
    assert kinds(given, query=query) == {"budget", "too-wide"}
    within = (record(0, x=2), record(1, x=0), record(2, "b", 5))
    assert kinds(given, within, query) == {"too-wide"}
    given["data"][0]["s"] |= {"lower": 3, "upper": 7}
    assert kinds(given, within, query) == set()
    given["data"][0]["s"]["upper"] = None
    assert kinds(given, within, query) == {"too-wide"}


def test_a_relative_budget_allows_an_interval_by_the_value_that_may_be_true() -> None:
    query = spec(measures={"s": "sum(x)"}, budget={"error": {"s": "50%"}})
    given = answer([{"group": {"k": "a"}, "s": {"estimate": 3, "lower": 2, "upper": 6}},
                    {"group": {"k": "b"}, "s": exactly(5)}])  # fmt: skip
    given["contract"] |= {"requested": {"error": {"s": "50%"}}}
    given["quality"]["error"]["withheld"] = {"s": {"above": 3.0, "below": 1.0, "above_share": 0.5, "below_share": 0.5}}
    assert kinds(given, query=query) == set()
    given["data"].pop()
    assert kinds(given, query=query) == {"number", "budget"}, "a group that was not sent has the value 0"
    given["data"][0]["s"]["upper"] = 7
    assert "too-wide" in kinds(given, query=query)


def test_sessions() -> None:
    query = spec(window={"session": "1s"}, group_by=[])
    given = answer([{"group": {}, "n": exactly(3), "s": exactly(8)}])
    given["window"] = {"start": "1970-01-01T00:00:00Z", "end": "1970-01-01T00:00:01.999Z"}
    assert kinds(given, query=query) == set()
    given["window"]["end"] = "1970-01-01T00:00:01Z"
    assert kinds(given, query=query) == {"session"}


def test_revisions_never_change() -> None:
    watch, given = RevisionWatch(), answer(TRUE_ROWS)
    assert watch.note(given) == watch.note(copy.deepcopy(given)) == []
    later = {**copy.deepcopy(given), "revision": 2, "data_of": 1}
    later["quality"]["records"]["after_final"] = 1
    assert watch.note(later) == []  # a correction states what has come since
    assert {f.kind for f in watch.note({**later, "revision": 1})} == {"revision-changed"}
    assert {f.kind for f in watch.note(answer(TRUE_ROWS[:1]))} == {"revision-changed"}
    assert {f.kind for f in watch.note({**given, "revision": 3, "phase": "complete"})} == {"phase-moved-back"}
    assert {f.kind for f in watch.note({**given, "revision": 4})} >= {"answer-after-final"}
    other = {**answer(TRUE_ROWS, observed=4), "data_of": 1, "revision": 5}
    assert "correction" in {f.kind for f in watch.note(other)}


def test_confidences_are_judged_over_many_statements() -> None:
    assert false_confidences([Outcome("k", 0.95, i % 20 > 0) for i in range(1000)]) == []
    assert [f.query for f in false_confidences([Outcome("k", 0.95, i % 5 > 0) for i in range(1000)])] == ["k"]


def test_times() -> None:
    assert time_ms("1970-01-01T00:00:01Z") == 1000
    assert time_ms("2026-11-22T06:00:00.123Z") % 1000 == 123
