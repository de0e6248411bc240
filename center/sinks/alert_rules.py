"""Decides which alerts fire, from answers and the time. Pure: no I/O, no clock.

A condition is about intervals. ``certainly: errors > 100`` holds if every value within the interval of `errors` is over
100. ``possibly: errors > 100`` holds if one is. An unknown bound supports no certainty, and excludes no possibility.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from center.ledger import Phase
from center.serving.computed import ComputedValue
from center.sinks.base import SinkAnswer, SinkQuery
from edgewater.model.errors import InvalidQuery, InvalidRequest
from edgewater.model.expressions import bind_condition
from edgewater.model.measure import Measure
from edgewater.model.syntax import column_names, parse_sql
from edgewater.model.timestamps import rfc3339
from edgewater.synopses import BoolArray, Estimates

Labels = tuple[tuple[str, str], ...]
"""Names and values that distinguish the alerts of one rule: the groups, or the edge."""
MAX_ALERTS = 10_000
"""Alerts of one rule at a time. Further groups are counted in the problem of the rule."""
COMPARISONS = (exp.GT, exp.GTE, exp.LT, exp.LTE, exp.EQ, exp.NEQ)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the rows of an answer.

    Attributes:
        text: SQL over the columns of the answer's table and of `compute`.
        certainty: whether all values within the intervals, or one, must satisfy it.
        compute: further values: name -> expression.
    """

    text: str
    certainty: Literal["certainly", "possibly"]
    compute: Mapping[str, str]

    def matching(self, rows: pa.Table, measures: Sequence[Measure]) -> tuple[BoolArray, Mapping[str, Estimates]]:
        """Returns the rows that satisfy the condition, and the intervals of all numbers.

        Raises:
            InvalidRequest, InvalidQuery: the condition names an unknown column, or has no type that fits.
        """
        intervals = _intervals(rows)
        for name, text in self.compute.items():
            intervals[name] = ComputedValue(name, text).estimates(intervals, measures)
        tree = parse_sql(self.text, self.certainty)
        return _holds(tree, rows, intervals, measures, self.certainty == "certainly"), intervals


@dataclass(frozen=True, slots=True)
class AlertRule:
    """A rule. Exactly one of `condition`, `is_contract`, `completeness_below`, `is_edge` and `no_answer_ms` is set.

    Attributes:
        for_ms: event time that the condition must hold without interruption.
        min_phase: answers of earlier phases are not evaluated.
        labels: added to the labels of each alert.
        targets: names of targets; empty: all.
    """

    name: str
    query: str
    condition: Condition | None = None
    is_contract: bool = False
    completeness_below: float | None = None
    is_edge: bool = False
    no_answer_ms: int | None = None
    for_ms: int = 0
    min_phase: Phase = Phase.COMPLETE
    labels: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert that is pending or fires.

    Attributes:
        since_ms: start of the first window, without interruption, in which the condition held. For `no_answer_for` the
            wall time of the last answer.
        fired_at_ms: wall time at which it began to fire; None: it is pending.
        details: what the last answer says: ``value``, ``lower``, ``upper``, ``window``, ``revision``, …
    """

    rule: str
    labels: Labels
    since_ms: int
    fired_at_ms: int | None
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Transition:
    """An alert that begins to fire, or no longer fires."""

    alert: Alert
    status: Literal["firing", "resolved"]
    at_ms: int


class AlertBook:
    """The alerts of a set of rules.

    Args:
        rules: their names are unique.
        state: what `to_json` has returned; rules that are gone lose their alerts without a transition.
    """

    def __init__(self, rules: Sequence[AlertRule], state: Mapping[str, Any] | None = None) -> None:
        self._rules = {rule.name: rule for rule in rules}
        self._alerts: dict[tuple[str, Labels], Alert] = {}
        self._windows: dict[str, int] = {}
        self._heard_ms: dict[str, int] = {}
        self.problems: dict[str, str] = {}
        given = state or {}
        for entry in given.get("alerts", ()):
            alert = Alert(**{**entry, "labels": tuple((n, v) for n, v in entry["labels"])})
            if alert.rule in self._rules:
                self._alerts[alert.rule, alert.labels] = alert
        self._windows = {name: start for name, start in given.get("windows", {}).items() if name in self._rules}
        self._heard_ms = dict(given.get("heard_ms", {}))

    @property
    def rules(self) -> Mapping[str, AlertRule]:
        return self._rules

    @property
    def alerts(self) -> list[Alert]:
        """All alerts, pending and firing, by rule and labels."""
        return [self._alerts[key] for key in sorted(self._alerts)]

    def to_json(self) -> dict[str, Any]:
        """Returns the state, for the constructor."""
        return {
            "alerts": [asdict(alert) for alert in self.alerts],
            "windows": self._windows,
            "heard_ms": self._heard_ms,
        }

    def check(self, queries: Iterable[SinkQuery]) -> None:
        """Sets `problems` of the rules whose conditions do not fit the columns of their query."""
        by_name = {query.ref.name: query for query in sorted(queries, key=lambda q: q.ref.version)}
        self.problems = {}
        for rule in self._rules.values():
            query = by_name.get(rule.query)
            if query is None:
                self.problems[rule.name] = f"query {rule.query} is not registered"
            elif rule.condition is not None:
                try:
                    rule.condition.matching(query.schema.empty_table(), query.spec.measures)
                except (InvalidQuery, InvalidRequest) as exc:
                    self.problems[rule.name] = exc.message

    def answer(self, answer: SinkAnswer, measures: Sequence[Measure], now_ms: int) -> list[Transition]:
        """Evaluates the newest revision of a window. Windows before the last evaluated one change nothing."""
        self._heard_ms[answer.query.name] = max(now_ms, self._heard_ms.get(answer.query.name, now_ms))
        if answer.window_end_ms <= answer.window_start_ms:
            return []
        transitions: list[Transition] = []
        for rule in self._rules.values():
            if rule.query != answer.query.name or answer.phase.rank < rule.min_phase.rank:
                continue
            if rule.no_answer_ms is not None or answer.window_start_ms < self._windows.get(rule.name, -(1 << 63)):
                continue
            self._windows[rule.name] = answer.window_start_ms
            try:
                active = self._active(rule, answer, measures)
            except (InvalidQuery, InvalidRequest) as exc:  # it costs only this rule
                self.problems[rule.name] = exc.message
                continue
            transitions += self._apply(rule, active, answer, now_ms)
        return transitions

    def tick(self, now_ms: int) -> list[Transition]:
        """Evaluates rules about answers that do not come."""
        transitions: list[Transition] = []
        for rule in self._rules.values():
            if rule.no_answer_ms is None:
                continue
            heard_ms = self._heard_ms.setdefault(rule.query, now_ms)
            silence_ms, key = now_ms - heard_ms, (rule.name, ())
            if silence_ms >= rule.no_answer_ms:
                if key not in self._alerts:
                    details = {"last_answer": rfc3339(heard_ms), "silence_ms": silence_ms}
                    self._alerts[key] = Alert(rule.name, (), heard_ms, now_ms, details)
                    transitions.append(Transition(self._alerts[key], "firing", now_ms))
            elif (alert := self._alerts.pop(key, None)) is not None:
                transitions.append(Transition(alert, "resolved", now_ms))
        return transitions

    def _active(self, rule: AlertRule, answer: SinkAnswer, measures: Sequence[Measure]) -> dict[Labels, dict[str, Any]]:
        """Returns the labels of alerts whose condition holds, with details."""
        quality, contract = answer.statement["quality"], answer.statement["contract"]
        if rule.is_contract:
            codes = sorted({violation["code"] for violation in contract["violations"]})
            messages = [violation["message"] for violation in contract["violations"]]
            return {} if contract["met"] else {(): {"codes": codes, "messages": messages[:5]}}
        if rule.completeness_below is not None:
            ratio = quality["completeness"]["ratio"]
            return {(): {"value": ratio}} if ratio < rule.completeness_below else {}
        if rule.is_edge:
            return {(("edge", edge),): {} for edge in quality["completeness"]["missing"][:MAX_ALERTS]}
        assert rule.condition is not None
        matching, intervals = rule.condition.matching(answer.rows, measures)
        names = [n for n in column_names(parse_sql(rule.condition.text, "")) if n in intervals]
        shown = {name: intervals[name] for name in dict.fromkeys(names)}
        rows = np.flatnonzero(matching)
        if len(rows) > MAX_ALERTS:
            self.problems[rule.name] = f"the condition holds for {len(rows)} groups; alerts are about {MAX_ALERTS}"
            rows = rows[:MAX_ALERTS]
        groups = {name: answer.rows.column(name) for name in _groups(answer)}
        result = {}
        for row in rows.tolist():
            labels = tuple((name, _label(column[row].as_py())) for name, column in groups.items())
            result[labels] = {name: _shown(estimates, row) for name, estimates in shown.items()}
        return result

    def _apply(
        self, rule: AlertRule, active: Mapping[Labels, dict[str, Any]], answer: SinkAnswer, now_ms: int
    ) -> list[Transition]:
        transitions: list[Transition] = []
        window = {"start": rfc3339(answer.window_start_ms), "end": rfc3339(answer.window_end_ms)}
        stated = {"window": window, "phase": answer.phase.value, "revision": answer.revision}
        for labels, values in active.items():
            before = self._alerts.get((rule.name, labels))
            alert = before or Alert(rule.name, labels, answer.window_start_ms, None, {})
            alert = replace(alert, details={**values, **stated})
            if alert.fired_at_ms is None and answer.window_end_ms - alert.since_ms >= rule.for_ms:
                alert = replace(alert, fired_at_ms=now_ms)
                transitions.append(Transition(alert, "firing", now_ms))
            self._alerts[rule.name, labels] = alert
        for key in [key for key in self._alerts if key[0] == rule.name and key[1] not in active]:
            alert = self._alerts.pop(key)
            if alert.fired_at_ms is not None:
                transitions.append(Transition(replace(alert, details={**alert.details, **stated}), "resolved", now_ms))
        return transitions


def _intervals(rows: pa.Table) -> dict[str, Estimates]:
    """Returns the numbers that have bounds, by the name of their column."""
    names = set(rows.column_names)
    result = {}
    for name in rows.column_names:
        if f"{name}_lower" in names and f"{name}_upper" in names:
            value, lower, upper = (_numbers(rows.column(n)) for n in (name, f"{name}_lower", f"{name}_upper"))
            result[name] = Estimates(value, lower, upper)
    return result


def _numbers(column: pa.ChunkedArray) -> Any:
    floats = pc.cast(column, pa.float64(), safe=False)
    return pc.fill_null(floats, float("nan")).to_numpy()


def _holds(
    tree: exp.Expression,
    rows: pa.Table,
    intervals: Mapping[str, Estimates],
    measures: Sequence[Measure],
    certainly: bool,
) -> BoolArray:
    """Returns which rows satisfy a condition, for all values within the intervals, or for one."""
    if isinstance(tree, exp.Paren):
        return _holds(tree.this, rows, intervals, measures, certainly)
    if isinstance(tree, exp.Not):  # what is not possible is certainly not so
        return ~_holds(tree.this, rows, intervals, measures, not certainly)
    if isinstance(tree, exp.And | exp.Or):
        left, right = (_holds(side, rows, intervals, measures, certainly) for side in (tree.left, tree.right))
        return left & right if isinstance(tree, exp.And) else left | right
    read = column_names(tree)
    if isinstance(tree, COMPARISONS) and (direct := _from_number(tree, intervals)) is not None:
        return _compares(tree, direct, certainly)
    if isinstance(tree, COMPARISONS) and any(name in intervals for name in read):
        difference = f"({tree.left.sql()}) - ({tree.right.sql()})"
        return _compares(tree, ComputedValue("condition", difference).estimates(intervals, measures), certainly)
    columns = {name: rows.column(name).combine_chunks() for name in rows.column_names}
    condition = bind_condition(tree, {name: column.type for name, column in columns.items()}, "condition")
    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    plain: BoolArray = pc.fill_null(condition.array(batch), False).to_numpy(zero_copy_only=False)
    return plain


def _from_number(tree: exp.Expression, intervals: Mapping[str, Estimates]) -> Estimates | None:
    """Returns the difference of a column and a number, whose sign is exact; None: it is another comparison."""
    column, number = tree.left.unnest(), tree.right.unnest()
    literal = number.this if isinstance(number, exp.Neg) else number
    if not (isinstance(column, exp.Column) and isinstance(literal, exp.Literal) and not literal.is_string):
        return None
    estimates = intervals.get(column.name)
    if estimates is None:
        return None
    constant = -float(literal.name) if isinstance(number, exp.Neg) else float(literal.name)
    return Estimates(estimates.value - constant, estimates.lower - constant, estimates.upper - constant)


def _compares(tree: exp.Expression, difference: Estimates, certainly: bool) -> BoolArray:
    """Compares a difference with 0. A row without a value satisfies nothing."""
    is_known = ~np.isnan(difference.value)
    lower = np.where(np.isnan(difference.lower), -np.inf, difference.lower)
    upper = np.where(np.isnan(difference.upper), np.inf, difference.upper)
    if isinstance(tree, exp.LT | exp.LTE):
        lower, upper = -upper, -lower
    if isinstance(tree, exp.GT | exp.LT):
        result = lower > 0 if certainly else upper > 0
    elif isinstance(tree, exp.GTE | exp.LTE):
        result = lower >= 0 if certainly else upper >= 0
    else:
        is_equal = (lower == 0) & (upper == 0) if certainly == isinstance(tree, exp.EQ) else (lower <= 0) & (upper >= 0)
        result = is_equal if isinstance(tree, exp.EQ) else ~is_equal
    return np.asarray(result & is_known, bool)


def _groups(answer: SinkAnswer) -> list[str]:
    return [name for name in answer.group_columns if name in answer.rows.column_names]


def _label(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _shown(estimates: Estimates, row: int) -> dict[str, float | None]:
    each = {"value": estimates.value[row], "lower": estimates.lower[row], "upper": estimates.upper[row]}
    return {name: float(number) if np.isfinite(number) else None for name, number in each.items()}
