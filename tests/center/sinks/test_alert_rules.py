"""Alert rules: what fires follows from intervals, and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from center.sinks.alert_conditions import Condition
from center.sinks.alert_rules import WHY, AlertBook, AlertRule, BookState, OnMissing, Transition
from center.sinks.base import SinkAnswer
from edgewater.answers import UNKNOWN, Cause, Deviation, Facts, Phase
from edgewater.answers.statement import Contract, Statement, Violation
from edgewater.base.errors import InvalidQuery, InvalidRequest
from edgewater.model.expressions import bind_condition
from edgewater.model.syntax import parse_sql
from edgewater.wire import QueryRef
from tests.examples import examples

MINUTE = 60_000
HIGH, LOW, WIDE = (200.0, 200.0, 200.0), (1.0, 1.0, 1.0), (200.0, None, None)
"""Intervals of a group about ``x > 100``: it holds, it fails, it is unknown."""
Interval = tuple[float, float | None, float | None]


def answer(minute: int, groups: Mapping[str, Interval], revision: int = 1, **changes: Any) -> SinkAnswer:
    columns = list(zip(*groups.values(), strict=True)) or [(), (), ()]
    rows = pa.table(
        {"carrier": pa.array(list(groups), pa.string())}
        | {name: pa.array(c, pa.float64()) for name, c in zip(("x", "x_lower", "x_upper"), columns, strict=True)}
    )
    missing = tuple(Deviation(Cause.MISSING, edge, lacks=UNKNOWN) for edge in changes.pop("missing", []))
    facts = Facts(3, 3 - len(missing), changes.pop("ratio", 1.0), deviations=missing)
    contract = Contract({}, () if changes.pop("met", True) else (Violation("c", "m"),))
    start, version = minute * MINUTE, changes.pop("version", 1)
    answered_at_ms = changes.pop("answered_at_ms", 0)
    return SinkAnswer(
        QueryRef("q", version), start, start + MINUTE, revision, changes.pop("phase", Phase.COMPLETE), answered_at_ms,
        changes.pop("answer_id", minute + 1), rows, {}, ("carrier",), stated=Statement(facts, {}, contract), **changes,
    )  # fmt: skip


def rule(text: str = "x > 100", certainty: Any = "certainly", **parts: Any) -> AlertRule:
    return AlertRule("high", "q", Condition(text, certainty, parts.pop("compute", {})), **parts)


def stored_and_read(book: AlertBook) -> BookState:
    stored = TypeAdapter(BookState)
    return stored.validate_json(stored.dump_json(book.state))


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
    "NOT (x > {c} OR x < -{c})",
    "2 * x - 1 > {c} AND x < 900",
    "x = {c}",
    "x <> {c}",
    "x BETWEEN {c} AND 30",
    "NOT x BETWEEN -{c} AND {c}",
    "x IN ({c}, 7)",
    "x NOT IN ({c}, 7)",
    "NOT (NOT (x >= {c}))",
)


def holds(text: str, rows: pa.Table, certainty: Any = "certainly") -> tuple[bool, bool]:
    """Whether the condition holds in the only row, and whether it fails."""
    verdicts = Condition(text, certainty, {}).verdicts(rows, ())
    return bool(verdicts.holds[0]), bool(verdicts.fails[0])


@given(st.sampled_from(CONDITIONS), st.integers(0, 50), st.integers(-60, 60), st.integers(0, 40), st.floats(0, 1))
@examples(2_000)
def test_certainty_and_possibility_agree_with_every_value_of_the_interval(
    text: str, c: int, low: int, width: int, at: float
) -> None:
    text, high = text.format(c=c), low + width
    inside = min(float(low + round(width * at)), float(high))
    rows = answer(0, {"UA": (inside, float(low), float(high))}).rows
    truth = pc_condition(text, pa.table({"x": pa.array(range(low, high + 1), pa.float64())}))
    certainly, fails = holds(text, rows)
    possibly, fails_possible = holds(text, rows, "possibly")
    assert not certainly or all(truth)
    assert possibly or not any(truth)
    assert not fails or not any(truth)
    assert fails == fails_possible and not (certainly and fails)
    if not low < high:
        assert certainly == possibly == truth[0] == (not fails)


def pc_condition(text: str, rows: pa.Table) -> list[bool]:
    """What SQL says of exact values."""
    condition = bind_condition(parse_sql(text, "c"), {n: rows.schema.field(n).type for n in rows.column_names}, "c")
    return [bool(value) for value in condition.array(rows.to_batches()[0]).to_pylist()]


@pytest.mark.parametrize("text", ["x > 100", "NOT x > 100", "NOT (x > 1 AND x < 5)", "x NOT IN (1)", "x <> 3"])
@pytest.mark.parametrize("certainty", ["certainly", "possibly"])
def test_a_group_without_a_value_satisfies_neither_a_condition_nor_its_negation(text: str, certainty: str) -> None:
    assert holds(text, answer(0, {"UA": (float("nan"), None, None)}).rows, certainty) == (False, False)


@pytest.mark.parametrize("text", ["CASE WHEN x > 4 THEN true ELSE false END", "(x > 4) = true", "abs(x) > 3"])
def test_a_condition_that_would_ignore_an_interval_is_refused(text: str) -> None:
    with pytest.raises((InvalidQuery, InvalidRequest)):
        holds(text, answer(0, {"UA": (5.0, 0.0, 9.0)}).rows)


def test_a_whole_number_that_a_float_cannot_hold_is_no_certainty() -> None:
    limit = 2**53
    rows = pa.table({name: pa.array([limit + 1], pa.int64()) for name in ("x", "x_lower", "x_upper")})
    assert holds(f"x > {limit}", rows) == (False, False)
    assert holds(f"x > {limit - 10}", rows) == (True, False)


def test_a_long_condition_is_evaluated() -> None:
    rows = answer(0, {"UA": HIGH}).rows
    assert holds(" OR ".join(f"x = {n}" for n in range(150, 220)), rows) == (True, False)
    assert holds(f"x IN ({', '.join(map(str, range(900)))})", rows) == (True, False)


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


def test_an_alert_that_fires_is_resolved_only_by_an_answer_that_excludes_its_condition() -> None:
    book = AlertBook([rule()])
    assert changed(book.answer(answer(0, {"UA": HIGH, "AA": HIGH}), (), 0)) == [("firing", "UA"), ("firing", "AA")]
    assert changed(book.answer(answer(1, {"UA": WIDE}, missing=["jfk"]), (), 0)) == []
    assert [alert.details["condition"] for alert in book.alerts] == ["unknown", "unknown"]
    assert book.alerts[1].details["x"] == {"value": 200.0, "lower": None, "upper": None}
    ended = book.answer(answer(2, {"UA": LOW}), (), 0)
    assert sorted((t.status, t.alert.labels[0][1], t.alert.details["condition"]) for t in ended) == [
        ("resolved", "AA", "no-value"), ("resolved", "UA", "fails"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("on_missing", "cut", "conditions"),
    [
        ("hold", [], ["unknown", "unknown"]),
        ("evaluate-others", [("resolved", "UA", "fails"), ("resolved", "AA", "no-value")], []),
        ("fire", [("firing", "DL", "holds")], ["holds", "holds", "holds"]),
    ],
)
def test_a_rule_says_what_it_does_while_an_edge_is_missing(
    on_missing: OnMissing, cut: list[tuple[str, str, str]], conditions: list[str]
) -> None:
    book = AlertBook([rule(on_missing=on_missing)])
    assert len(book.answer(answer(0, {"UA": HIGH, "AA": HIGH, "DL": LOW}), (), 0)) == 2
    others = answer(1, {"UA": LOW, "DL": LOW, "WN": LOW}).rows
    # The missing edge may have records of UA and DL, and has none of WN.
    open_ = {"UA": (1.0, 1.0, None), "DL": (1.0, 1.0, None), "WN": LOW}
    changes = book.answer(answer(1, open_, missing=["lga"], of_others=lambda: others), (), 0)
    assert [(t.status, dict(t.alert.labels)["carrier"], t.alert.details["condition"]) for t in changes] == cut
    assert all(t.alert.details["missing"] == ["lga"] for t in changes)
    assert [alert.details["condition"] for alert in book.alerts] == conditions
    ended = book.answer(answer(2, {"UA": LOW, "DL": LOW}), (), 0)
    assert {t.alert.details["ended"] for t in ended} <= set(WHY.values()) and not book.alerts


@pytest.mark.parametrize("on_missing", ["hold", "fire"])
def test_groups_in_which_the_missing_edge_has_no_records_fire_and_end_as_usual(on_missing: OnMissing) -> None:
    book = AlertBook([rule("x > 100 OR y > 100", on_missing=on_missing)])
    columns = ["carrier", *(name + end for name in "xy" for end in ("", "_lower", "_upper"))]
    given, cut = (
        replace(each, rows=pa.table([*each.rows.columns, *[pa.nulls(2, pa.float64())] * 3], columns))
        for each in (
            answer(0, {"UA": HIGH, "AA": HIGH}),
            answer(1, {"WN": LOW, "DL": (1.0, 1.0, None)}, missing=["lga"]),
        )
    )  # y is the mean of no value
    assert len(book.answer(given, (), 0)) == 2
    others = cut.rows.set_column(3, "x_upper", pa.array([1.0, 1.0]))
    only = tuple(replace(each, only={"carrier": "UA"}) for each in cut.stated.facts.deviations)
    stated = replace(cut.stated, facts=replace(cut.stated.facts, deviations=only))
    changes = book.answer(replace(cut, of_others=lambda: others, stated=stated), (), 0)
    begun = [("firing", "DL")] if on_missing == "fire" else []
    assert sorted(changed(changes)) == [*begun, ("resolved", "AA")]
    assert {dict(alert.labels)["carrier"] for alert in book.alerts} == {"UA", *(name for _, name in begun)}


def test_a_window_counts_for_a_duration_as_soon_as_a_revision_supports_the_condition() -> None:
    book = AlertBook([rule(for_ms=2 * MINUTE)])
    said = []
    for minute in (0, 1, 2):
        for revision, interval in ((1, WIDE), (2, HIGH)):
            said += changed(book.answer(answer(minute, {"UA": interval}, revision), (), 0))
    assert said == [("firing", "UA")]


def test_an_earlier_window_prolongs_or_interrupts_a_duration() -> None:
    book = AlertBook([rule(for_ms=2 * MINUTE)])
    assert changed(book.answer(answer(0, {"UA": HIGH}), (), 0)) == []
    assert changed(book.answer(answer(2, {"UA": HIGH}), (), 0)) == []
    assert changed(book.answer(answer(1, {"UA": HIGH}), (), 0)) == [("firing", "UA")]
    assert changed(book.answer(answer(1, {"UA": WIDE}, revision=2), (), 0)) == []
    assert changed(book.answer(answer(1, {"UA": LOW}, revision=3), (), 0)) == [("resolved", "UA")]
    assert changed(book.answer(answer(3, {"UA": HIGH}), (), 0)) == [("firing", "UA")]


@pytest.mark.nightly
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([HIGH, LOW, WIDE])), max_size=14), st.integers(0, 3))
@examples(1_000)
def test_nothing_fires_or_is_resolved_that_the_newest_revisions_do_not_support(
    steps: list[tuple[int, Interval]], length: int
) -> None:
    book, newest = AlertBook([rule(for_ms=length * MINUTE)]), dict[int, Interval]()
    fires = False
    for revision, (minute, interval) in enumerate(steps, 1):
        newest[minute] = interval
        last = max(newest)
        run = [newest.get(m) for m in range(last - max(length, 1) + 1, last + 1)]
        for transition in book.answer(answer(minute, {"UA": interval}, revision), (), revision):
            if transition.status == "firing":
                assert not fires and all(found is HIGH for found in run)
            else:
                assert fires and (newest[last] is LOW or interval is LOW)
            fires = transition.status == "firing"
        if newest[last] is LOW:
            assert not fires and not book.alerts


@pytest.mark.nightly
@given(st.lists(st.sampled_from([HIGH, LOW, WIDE]), max_size=12), st.integers(0, 3))
@examples(500)
def test_windows_in_order_fire_exactly_when_the_last_ones_hold(intervals: list[Interval], length: int) -> None:
    book, fires = AlertBook([rule(for_ms=length * MINUTE)]), False
    for minute, interval in enumerate(intervals):
        book.answer(answer(minute, {"UA": interval}), (), minute)
        needed = max(length, 1)
        holds_now = minute + 1 >= needed and all(i is HIGH for i in intervals[minute + 1 - needed : minute + 1])
        fires = interval is not LOW and (fires or holds_now)
        assert any(alert.fired_at_ms is not None for alert in book.alerts) == fires


def test_a_late_answer_fires_nothing_that_the_newest_window_does_not_support() -> None:
    book = AlertBook([rule(for_ms=3 * MINUTE)])
    for minute, interval in ((1, HIGH), (2, HIGH), (3, WIDE), (0, HIGH)):
        assert book.answer(answer(minute, {"UA": interval}), (), 0) == []
    assert changed(book.answer(answer(3, {"UA": HIGH}, 2), (), 0)) == [("firing", "UA")]


def test_a_new_version_of_the_query_may_begin_at_an_earlier_time() -> None:
    book = AlertBook([rule()])
    assert changed(book.answer(answer(5, {"UA": HIGH}), (), 0)) == [("firing", "UA")]
    assert changed(book.answer(answer(1, {"UA": LOW}, version=2), (), 0)) == [("resolved", "UA")]
    assert changed(book.answer(answer(9, {"UA": HIGH}), (), 0)) == []


@pytest.mark.parametrize("changes", [{"for_ms": 1}, {"labels": {"severity": "page"}}, {"query": "other"}])
def test_a_rule_that_changes_resolves_its_alerts_as_they_were_and_begins_anew(changes: dict[str, Any]) -> None:
    before = AlertRule("high", "q", Condition("x > 100", "certainly", {}), labels={"team": "a"})
    book = AlertBook([before])
    book.answer(answer(0, {"UA": HIGH}), (), 3)
    state = stored_and_read(book)
    assert AlertBook([before], state, 9).dropped == []
    for rules in ([replace(before, **changes)], []):
        changed_book = AlertBook(rules, state, 9)
        (ended,) = changed_book.dropped
        assert (ended.status, ended.at_ms, ended.rule) == ("resolved", 9, before)
        why = "the rule was changed" if rules else "the sink was deleted"
        assert (ended.alert.details["condition"], ended.alert.details["ended"]) == ("ended", why)
        assert changed_book.alerts == []


def test_alerts_beyond_the_bound_are_counted_and_those_that_fire_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    book, most = AlertBook([rule()]), 20
    monkeypatch.setattr("center.sinks.alert_rules.MAX_ALERTS", most)
    assert len(book.answer(answer(0, {f"z{n}": HIGH for n in range(most)}), (), 0)) == most
    assert book.answer(answer(1, {f"{'az'[n % 2]}{n // 2}": HIGH for n in range(2 * most)}), (), 0) == []
    assert len(book.alerts) == most and str(2 * most) in book.problems["high"]
    assert len(book.answer(answer(2, {"z0": HIGH}), (), 0)) == most - 1
    assert book.problems == {}


@pytest.mark.parametrize(
    ("keys", "label"),
    [
        (pa.array([None, "b"], pa.string()), "null"),
        (pa.array([7, 8], pa.int64()), "7"),
        (pa.array([True, False]), "true"),
        (pa.array([0.5, 1.5]), "0.5"),
    ],
)
def test_groups_of_all_types_are_found_again(keys: pa.Array, label: str) -> None:
    book = AlertBook([rule()])
    high = answer(0, {"a": HIGH, "b": LOW})
    low = answer(1, {"a": LOW, "b": LOW})
    one, two = (replace(a, rows=a.rows.set_column(0, "carrier", keys)) for a in (high, low))
    assert changed(book.answer(one, (), 0)) == [("firing", label)]
    assert changed(book.answer(two, (), 0)) == [("resolved", label)]


def test_silence_counts_from_the_last_answer_of_the_phase() -> None:
    final = AlertRule("final", "q", no_answer_ms=10_000, min_phase=Phase.FINAL)
    book = AlertBook([final, AlertRule("any", "q", no_answer_ms=10_000, min_phase=Phase.EARLY)])
    assert book.tick(1_000) == []
    book.answer(answer(0, {}, phase=Phase.FINAL), (), 2_000)
    book.answer(answer(1, {}, phase=Phase.EARLY), (), 45_000)
    assert [(t.rule.name, t.alert.details["silence_ms"]) for t in book.tick(50_000)] == [("final", 48_000)]


@pytest.mark.parametrize("ahead_ms", [-3_600_000, 3_600_000])
def test_silence_does_not_depend_on_the_clock_that_dates_answers(ahead_ms: int) -> None:
    book = AlertBook([AlertRule("any", "q", no_answer_ms=10_000, min_phase=Phase.EARLY)])
    at_ms = 5_000_000
    for number in range(5):
        at_ms += 9_000
        assert book.answer(answer(number, {}, answered_at_ms=at_ms + ahead_ms), (), at_ms) == book.tick(at_ms) == []
    book.answer(answer(4, {}, answered_at_ms=at_ms + ahead_ms), (), at_ms + 9_999)  # a repetition is no arrival
    assert changed(book.tick(at_ms + 10_000)) == [("firing", "")]


def test_a_correction_of_an_answer_that_has_arrived_ends_no_silence() -> None:
    book = AlertBook([AlertRule("any", "q", no_answer_ms=10_000, min_phase=Phase.FINAL)])
    book.answer(answer(0, {}, phase=Phase.FINAL), (), 0)
    book.answer(answer(0, {}, 2, phase=Phase.FINAL, answer_id=7, data_id=1, repeats=True), (), 9_000)
    assert changed(book.tick(10_000)) == [("firing", "")]
    book.answer(answer(1, {}, 2, phase=Phase.FINAL, answer_id=9, data_id=8), (), 11_000)
    assert changed(book.tick(11_000)) == [("resolved", "")], "its values are new to the sink"


@pytest.mark.parametrize("bounds", [HIGH, WIDE])
@pytest.mark.parametrize("minute", [0, 1])
def test_a_correction_with_the_same_values_changes_no_alert_that_fires(minute: int, bounds: Interval) -> None:
    book = AlertBook([rule()])
    fired = [book.answer(answer(at, {"UA": HIGH}, phase=Phase.FINAL), (), at) for at in range(2)]
    assert [changed(each) for each in fired] == [[("firing", "UA")], []]
    correction = answer(minute, {"UA": bounds}, 2, phase=Phase.FINAL, answer_id=7, data_id=minute + 1, repeats=True)
    assert book.answer(correction, (), 5) == []
    assert book.answer(answer(2, {"UA": HIGH}, phase=Phase.FINAL, answer_id=8), (), 6) == []
    assert changed(book.answer(answer(3, {"UA": LOW}, answer_id=9), (), 7)) == [("resolved", "UA")]


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000])
def test_silence_goes_on_when_the_clock_is_set(step_ms: int) -> None:
    book, at_ms = AlertBook([AlertRule("any", "q", no_answer_ms=10_000, min_phase=Phase.EARLY)]), 5_000_000
    book.answer(answer(0, {}), (), at_ms)
    assert book.tick(at_ms + 9_000) == []
    book.clock_stepped(step_ms)
    assert book.tick(at_ms + 9_999 + step_ms) == []
    assert changed(book.tick(at_ms + 10_000 + step_ms)) == [("firing", "")]


@pytest.mark.parametrize(
    ("registered", "why"),
    [
        ({}, "the query was deleted"),
        ({QueryRef("other", 1): True}, "the query was deleted"),
        ({QueryRef("q", 2): True}, "the query was deleted"),
        ({QueryRef("q", 1): False}, "the query has ended"),
    ],
)
def test_alerts_end_once_when_no_answer_to_their_query_will_come(registered: dict[QueryRef, bool], why: str) -> None:
    rules = [rule(), AlertRule("silence", "q", no_answer_ms=10_000), rule(for_ms=5 * MINUTE)]
    book = AlertBook([rules[0], rules[1], replace(rules[2], name="pending")])
    book.answer(answer(0, {"UA": HIGH}), (), 0)
    assert book.end_gone({QueryRef("q", 1): True}, (), 1) == []
    assert changed(book.tick(11_000)) == [("firing", "")]
    over = "silence" if QueryRef("q", 2) not in registered else ""
    ended = book.end_gone(registered, (), 12_000)
    assert {t.alert.rule for t in ended} == {"high", over} - {""}
    assert {(t.status, t.alert.details["ended"]) for t in ended} == {("resolved", why)}
    assert book.end_gone(registered, (), 13_000) == []
    assert [a.rule for a in book.alerts] == ([] if over else ["silence"])
    if over:
        assert book.tick(99_000) == [], "it is not silent, it is over"
        assert book.end_gone({QueryRef("q", 3): True}, (), 100_000) == book.tick(100_000) == []
        assert changed(book.tick(110_000)) == [("firing", "")]


def test_an_alert_about_a_missing_edge_ends_when_the_edge_is_retired() -> None:
    book = AlertBook([AlertRule("edge", "q", is_edge=True)])
    book.answer(answer(0, {}, missing=["jfk", "lga"]), (), 0)
    (ended,) = book.end_gone({QueryRef("q", 1): True}, {"jfk", "ewr"}, 1)
    assert (dict(ended.alert.labels), ended.alert.details["ended"]) == ({"edge": "jfk"}, "the edge was retired")


def test_alerts_end_when_their_query_changes_so_that_the_rule_cannot_read_it() -> None:
    book = AlertBook([rule()])
    book.answer(answer(0, {"UA": HIGH}), (), 0)
    other = answer(1, {"UA": HIGH}, version=2)
    (ended,) = book.answer(replace(other, rows=other.rows.select(["carrier"])), (), 1)
    assert ended.status == "resolved" and "x" in ended.alert.details["ended"] and book.problems


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
    fired = book.answer(answer(0, {}, met=False, ratio=0.5, missing=["jfk", "lga"], answered_at_ms=1_000), (), 1_500)
    assert [(t.alert.rule, t.alert.labels) for t in fired] == [
        ("contract", ()), ("completeness", ()), ("edge", (("edge", "jfk"),)), ("edge", (("edge", "lga"),)),
    ]  # fmt: skip
    assert book.tick(11_499) == []
    assert [(t.alert.rule, t.status) for t in book.tick(11_500)] == [("silence", "firing")]
    gone = book.answer(answer(1, {}, missing=["lga"], answered_at_ms=12_000), (), 12_000)
    assert [(t.alert.rule, t.status) for t in gone] == [
        ("contract", "resolved"), ("completeness", "resolved"), ("edge", "resolved"),
    ]  # fmt: skip
    assert [(t.alert.rule, t.status) for t in book.tick(12_001)] == [("silence", "resolved")]


@pytest.mark.nightly
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
        stored = AlertBook(rules, stored_and_read(stored))
    assert stored.alerts == steady.alerts


def test_a_stored_book_knows_when_the_last_answer_has_arrived() -> None:
    rules = [AlertRule("silence", "q", no_answer_ms=10_000)]
    book = AlertBook(rules)
    book.answer(answer(0, {}), (), 2_000)
    again = AlertBook(rules, stored_and_read(book), 9_000)
    assert again.tick(9_000) == []
    assert [t.alert.details["silence_ms"] for t in again.tick(12_000)] == [10_000]


def test_a_condition_on_an_unknown_column_costs_only_its_rule() -> None:
    book = AlertBook([rule("y > 1"), AlertRule("contract", "q", is_contract=True)])
    assert [t.alert.rule for t in book.answer(answer(0, {"UA": (1.0, 1.0, 1.0)}, met=False), (), 0)] == ["contract"]
    assert "y" in book.problems["high"] and len(book.alerts) == 1
