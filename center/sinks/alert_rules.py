"""Decides which alerts fire, from answers and the time. No I/O, no clock.

The newest window of a query decides whether an alert fires or is resolved. A window may neither support nor exclude the
condition, for example because an edge is missing. Such a window does not change the alert. An alert also ends if no
answer will decide about it any more: its query, its rule or its edge is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue

from center.serving.render import denoted_values
from center.sinks.alert_conditions import Condition, Verdicts
from center.sinks.base import SinkAnswer, SinkQuery
from edgewater.answers import Cause, Facts, Phase
from edgewater.base.errors import InvalidQuery, InvalidRequest
from edgewater.base.timestamps import rfc3339
from edgewater.model.key_texts import key_text
from edgewater.model.measure import Measure
from edgewater.model.syntax import column_names
from edgewater.synopses import BoolArray, Estimates
from edgewater.wire import QueryRef

Details: TypeAlias = Mapping[str, JsonValue]
"""What the answer says about an alert, for notices and for the API."""
Labels = tuple[tuple[str, str], ...]
"""Names and values that distinguish the alerts of one rule: the groups, or the edge."""
OnMissing = Literal["hold", "evaluate-others", "fire"]
"""What a condition does while edges are missing from an answer. `hold`: an alert stays as it is if records of these
edges could decide about it. `evaluate-others`: the records of the other edges decide. `fire`: the alert fires if
records of these edges could decide about it."""
MAX_ALERTS = 10_000
"""The most alerts of one rule at a time. If there are more groups, the problem of the rule states their number."""


class Outcome(StrEnum):
    """The result of evaluating an answer for an alert. The `details` of an alert and of a notice have it as
    ``condition``.
    """

    HOLDS = "holds"
    FAILS = "fails"
    NO_VALUE = "no-value"
    """No edge is missing from the answer, and the group has no value in it."""
    UNKNOWN = "unknown"
    """The interval contains values that satisfy the condition and values that do not, or an edge is missing."""
    ENDED = "ended"
    """No answer decides about the alert any more."""


WHY = {Outcome.FAILS: "the condition does not hold any more", Outcome.NO_VALUE: "the group has no value any more"}
"""Why an answer ends an alert."""
MAX_NAMED = 20
"""The most missing edges that the details of an alert name."""


@dataclass(frozen=True, slots=True)
class AlertRule:
    """A rule. Exactly one of `condition`, `is_contract`, `completeness_below`, `is_edge` and `no_answer_ms` is set.

    Attributes:
        for_ms: event time in ms for which the condition must hold without interruption.
        min_phase: answers of earlier phases are not evaluated.
        labels: labels that are added to the labels of each alert.
        targets: names of targets; empty if the rule has all targets.
        on_missing: of a rule with a condition.
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
    on_missing: OnMissing = "hold"

    @property
    def text(self) -> str:
        """The condition as text for people."""
        if self.condition is not None:
            return f"{self.condition.certainty}: {self.condition.text}"
        if self.completeness_below is not None:
            return f"completeness below {self.completeness_below}"
        if self.no_answer_ms is not None:
            return f"no answer for {self.no_answer_ms / 1000:g} s"
        return "contract broken" if self.is_contract else "edge missing"


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert that is pending or fires.

    Attributes:
        since_ms: start of the first window of the time in which the condition has held without interruption. For
            `no_answer_for`, the wall time at which the last answer has arrived.
        through_ms: end of the last window in which the condition held.
        fired_at_ms: wall time at which the alert began to fire; None if the alert is pending.
        details: details of the last answer: ``condition``, values with bounds, ``window``, ``revision``, …
    """

    rule: str
    labels: Labels
    since_ms: int
    through_ms: int
    fired_at_ms: int | None
    details: Details


@dataclass(frozen=True, slots=True)
class Transition:
    """The event that an alert begins to fire or stops firing.

    Attributes:
        rule: the rule as it was when the alert began to fire.
    """

    alert: Alert
    status: Literal["firing", "resolved"]
    at_ms: int
    rule: AlertRule


class RuleWindow(NamedTuple):
    """The newest window of a rule. Windows are ordered by version and start."""

    version: int
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class BookState:
    """The part of an `AlertBook` that must outlive the process. Its sink stores it as JSON.

    Attributes:
        windows: see `AlertBook.windows`.
        heard_ms, heard_ids: by rule, the wall time and the id of the last answer that was no repetition.
    """

    rules: Mapping[str, AlertRule] = field(default_factory=dict)
    alerts: Sequence[Alert] = ()
    windows: Mapping[str, RuleWindow] = field(default_factory=dict)
    heard_ms: Mapping[str, int] = field(default_factory=dict)
    heard_ids: Mapping[str, int] = field(default_factory=dict)


class AlertBook:
    """The alerts of a set of rules.

    Args:
        rules: rules with unique names.
        state: the `state` of an earlier book.
        now_ms: wall time.

    Attributes:
        rules: by name.
        by_rule: the alerts of each rule, pending and firing, by their labels.
        windows: by name of a rule, the newest window on which the rule was evaluated. A rule that was not evaluated yet
            has no entry.
        problems: by name of a rule, why the rule is not evaluated or is only partly evaluated.
        dropped: transitions of alerts in `state` that fired, but whose rules have changed or were removed.
    """

    def __init__(self, rules: Sequence[AlertRule], state: BookState = BookState(), now_ms: int = 0) -> None:
        self.rules = {rule.name: rule for rule in rules}
        self.by_rule: dict[str, dict[Labels, Alert]] = {name: {} for name in self.rules}
        self.problems: dict[str, str] = {}
        self.dropped: list[Transition] = []
        kept = {name for name, rule in state.rules.items() if self.rules.get(name) == rule}
        for alert in state.alerts:
            if alert.rule in kept:
                self.by_rule[alert.rule][alert.labels] = alert
            elif alert.fired_at_ms is not None:
                why = "the rule was changed" if alert.rule in self.rules else "the rule was removed"
                why = why if self.rules else "the sink was deleted"
                self.dropped.append(ended(alert, state.rules[alert.rule], why, now_ms))
        self.windows = {name: window for name, window in state.windows.items() if name in kept}
        self._heard_ms = {name: at_ms for name, at_ms in state.heard_ms.items() if name in kept}
        self._heard_ids = {name: number for name, number in state.heard_ids.items() if name in kept}
        self._over: set[str] = set()

    @property
    def alerts(self) -> list[Alert]:
        """All alerts, pending and firing, by rule and labels."""
        return [alerts[labels] for _, alerts in sorted(self.by_rule.items()) for labels in sorted(alerts)]

    @property
    def state(self) -> BookState:
        return BookState(self.rules, self.alerts, self.windows, self._heard_ms, self._heard_ids)

    def check(self, queries: Iterable[SinkQuery]) -> None:
        """Sets `problems` of the rules whose conditions do not fit the columns of their query."""
        by_name = {query.ref.name: query for query in sorted(queries, key=lambda q: q.ref.version)}
        self.problems = {}
        for rule in self.rules.values():
            query = by_name.get(rule.query)
            if query is None:
                self.problems[rule.name] = f"query {rule.query} is not registered"
            elif rule.condition is not None and query.is_typed:
                try:
                    rule.condition.verdicts(query.schema.empty_table(), query.spec.measures)
                except (InvalidQuery, InvalidRequest) as exc:
                    self.problems[rule.name] = exc.message

    def end_gone(self, registered: Mapping[QueryRef, bool], retired: Collection[str], now_ms: int) -> list[Transition]:
        """Ends the alerts whose query or edge is gone, and returns the transitions.

        Called only after `answer` was called for all stored answers.

        Args:
            registered: the queries that are not deleted, and whether they get further answers.
            retired: the edges that are retired.
        """
        transitions, names, running = list[Transition](), set[str](), set[str]()
        for ref, is_running in registered.items():
            names.add(ref.name)
            running |= {ref.name} if is_running else set()
        self._over = {rule.name for rule in self.rules.values() if rule.query not in running}
        for rule in self.rules.values():
            window = self.windows.get(rule.name)
            if rule.query not in names or (window and QueryRef(rule.query, window.version) not in registered):
                transitions += self._end(rule, "the query was deleted", now_ms)
                self.windows.pop(rule.name, None)
            elif rule.name in self._over:
                transitions += self._end(rule, "the query has ended", now_ms)
            elif rule.is_edge:
                transitions += self._end(rule, "the edge was retired", now_ms, retired)
            if rule.name in self._over:
                self._heard_ms.pop(rule.name, None)
        return transitions

    def clock_stepped(self, step_ms: int) -> None:
        """Moves the times at which answers have arrived, because the wall clock was set by `step_ms`."""
        self._heard_ms = {name: at_ms + step_ms for name, at_ms in self._heard_ms.items()}

    def _end(self, rule: AlertRule, why: str, now_ms: int, edges: Collection[str] | None = None) -> list[Transition]:
        """Removes alerts of a rule: all of them, or the alerts about some edges. Returns the transitions."""
        alerts = self.by_rule[rule.name]
        gone = [alert for labels, alert in alerts.items() if edges is None or labels[0][1] in edges]
        for alert in gone:
            del alerts[alert.labels]
        return [ended(alert, rule, why, now_ms) for alert in gone if alert.fired_at_ms is not None]

    def answer(self, answer: SinkAnswer, measures: Sequence[Measure], now_ms: int) -> list[Transition]:
        """Evaluates the newest revision of a window, and returns the transitions.

        A window that is not the newest window raises no new alert. It may prolong or interrupt the time for which the
        condition of an alert holds.

        Args:
            now_ms: wall time at which the answer has arrived. Other machines have set the times in the answer.
        """
        if answer.window_end_ms <= answer.window_start_ms:
            return []
        transitions: list[Transition] = []
        for rule in self.rules.values():
            if rule.query != answer.query.name or answer.phase.rank < rule.min_phase.rank:
                continue
            is_new = answer.answer_id > self._heard_ids.get(rule.name, 0)  # otherwise the answer comes again
            if is_new and not answer.repeats:  # records that come late are no sign of new answers
                self._heard_ids[rule.name], self._heard_ms[rule.name] = answer.answer_id, now_ms
            if rule.no_answer_ms is not None:
                continue
            window = RuleWindow(answer.query.version, answer.window_start_ms, answer.window_end_ms)
            newest = self.windows.get(rule.name, window)
            is_newest = window[:2] >= newest[:2]
            if not is_newest and not self.by_rule[rule.name]:
                continue
            self.windows[rule.name] = window if is_newest else newest
            self.problems.pop(rule.name, None)
            try:
                for labels, outcome, details in self._outcomes(rule, answer, measures, raises=is_newest):
                    transitions += self._apply(rule, labels, outcome, details, answer, now_ms)
            except (InvalidQuery, InvalidRequest) as exc:  # the other rules are evaluated
                self.problems[rule.name] = exc.message
                if is_newest:
                    transitions += self._end(rule, f"the rule does not fit the query: {exc.message}", now_ms)
        return transitions

    def tick(self, now_ms: int) -> list[Transition]:
        """Evaluates the rules with `no_answer_for`, and returns the transitions.

        Called only after `answer` was called for all stored answers.
        """
        transitions: list[Transition] = []
        for rule in self.rules.values():
            if rule.no_answer_ms is None or rule.name in self._over:
                continue
            # The clock may have been set back while no process ran the sink.
            heard_ms = self._heard_ms[rule.name] = min(now_ms, self._heard_ms.get(rule.name, now_ms))
            alerts = self.by_rule[rule.name]
            silence_ms, alert = now_ms - heard_ms, alerts.get(())
            if silence_ms >= rule.no_answer_ms and alert is None:
                details: Details = {
                    "condition": Outcome.HOLDS,
                    "last_answer": rfc3339(heard_ms),
                    "silence_ms": silence_ms,
                }
                alerts[()] = Alert(rule.name, (), heard_ms, now_ms, now_ms, details)
                transitions.append(Transition(alerts[()], "firing", now_ms, rule))
            elif silence_ms < rule.no_answer_ms and alert is not None:
                del alerts[()]
                transitions.append(ended(alert, rule, "an answer has arrived", now_ms, Outcome.FAILS))
        return transitions

    def _outcomes(
        self, rule: AlertRule, answer: SinkAnswer, measures: Sequence[Measure], *, raises: bool
    ) -> Iterator[tuple[Labels, Outcome, Details]]:
        """Yields the outcome of an answer for each alert of a rule. With `raises`, also yields the outcomes for new
        alerts.
        """
        known = list(self.by_rule[rule.name])
        if rule.condition is None:
            active = _stated(rule, answer)
            yield from ((labels, Outcome.FAILS, {}) for labels in known if labels not in active)
            yield from ((labels, Outcome.HOLDS, details) for labels, details in active.items())
            return
        verdicts = _verdicts(rule.condition, rule.on_missing, answer, measures)
        read = [n for n in column_names(rule.condition.parsed()) if n in verdicts.intervals]
        shown = {name: verdicts.intervals[name] for name in read}
        rows = _rows_of(known, answer)
        for labels in known:
            row = rows.get(labels)
            details = {} if row is None else _values(shown, row)
            yield labels, _outcome(rule, verdicts, shown, row, _facts_of(answer, labels)), details
        if raises:
            yield from self._begun(rule, verdicts.holds, rows, shown, answer)

    def _begun(
        self,
        rule: AlertRule,
        holds: BoolArray,
        known: Mapping[Labels, int],
        shown: Mapping[str, Estimates],
        answer: SinkAnswer,
    ) -> Iterator[tuple[Labels, Outcome, Details]]:
        new = np.setdiff1d(np.flatnonzero(holds), list(known.values()))
        room = max(0, MAX_ALERTS - len(known))
        if len(new) > room:
            total = len(new) + len(known)
            self.problems[rule.name] = f"the rule has {total} alerts; only {MAX_ALERTS} are kept"
        for row, labels in zip(new[:room].tolist(), _labels(answer, new[:room]), strict=True):
            yield labels, Outcome.HOLDS, _values(shown, row)

    def _apply(
        self, rule: AlertRule, labels: Labels, outcome: Outcome, details: Details, answer: SinkAnswer, now_ms: int
    ) -> list[Transition]:
        """Changes one alert, and returns the transitions to notify about."""
        alerts, newest = self.by_rule[rule.name], self.windows[rule.name]
        start_ms, end_ms = answer.window_start_ms, answer.window_end_ms
        is_newest = (answer.query.version, start_ms) == newest[:2]
        before = alerts.get(labels)
        if before is None:
            if not is_newest:
                return []
            before = Alert(rule.name, labels, start_ms, start_ms, None, {})
        after = _held(before, outcome, start_ms, end_ms) if is_newest else _mended(before, outcome, answer, newest)
        if is_newest:
            window: JsonValue = {"start": rfc3339(start_ms), "end": rfc3339(end_ms)}
            stated: Details = {"window": window, "phase": answer.phase.value, "revision": answer.revision}
            if rule.condition is not None and (missing := answer.stated.facts.lacking[:MAX_NAMED]):
                stated = {**stated, "missing": [*missing]}
            after = replace(after, details={"condition": outcome, **details, **stated})
        held_ms = after.through_ms - after.since_ms
        fires = before.fired_at_ms is not None
        if is_newest and outcome in (Outcome.FAILS, Outcome.NO_VALUE):
            alerts.pop(labels, None)
            return [ended(after, rule, WHY[outcome], now_ms, outcome)] if fires else []
        if fires and held_ms < rule.for_ms and after.since_ms != before.since_ms and not is_newest:
            alerts[labels] = replace(after, fired_at_ms=None)
            return [ended(after, rule, "a new answer to an earlier window interrupts it", now_ms, outcome)]
        if not fires and held_ms <= 0:
            alerts.pop(labels, None)
            return []
        if not fires and held_ms >= rule.for_ms and after.through_ms >= newest.end_ms:
            alerts[labels] = replace(after, fired_at_ms=now_ms)
            return [Transition(alerts[labels], "firing", now_ms, rule)]
        alerts[labels] = after
        return []


def ended(alert: Alert, rule: AlertRule, why: str, now_ms: int, outcome: Outcome = Outcome.ENDED) -> Transition:
    """Returns the transition of an alert that stops firing. Its details say why."""
    details: Details = {**alert.details, "condition": outcome, "ended": why}
    return Transition(replace(alert, details=details), "resolved", now_ms, rule)


def _held(alert: Alert, outcome: Outcome, start_ms: int, end_ms: int) -> Alert:
    """Returns the alert after an answer to the newest window. The time for which its condition holds is updated."""
    if outcome is Outcome.HOLDS:
        since_ms = alert.since_ms if alert.since_ms <= start_ms <= alert.through_ms else start_ms
        return replace(alert, since_ms=since_ms, through_ms=end_ms)
    if alert.through_ms < start_ms and alert.fired_at_ms is None:  # no answer in a whole window
        return replace(alert, through_ms=alert.since_ms)
    return replace(alert, through_ms=max(alert.since_ms, min(alert.through_ms, start_ms)))


def _mended(alert: Alert, outcome: Outcome, answer: SinkAnswer, newest: RuleWindow) -> Alert:
    """Returns the alert after an answer to an earlier window. The time for which its condition holds is updated."""
    start_ms, end_ms = answer.window_start_ms, answer.window_end_ms
    if outcome is Outcome.HOLDS:
        return replace(alert, since_ms=start_ms) if start_ms < alert.since_ms <= end_ms else alert
    is_inside = alert.since_ms <= start_ms < alert.through_ms
    if not is_inside or (outcome is Outcome.UNKNOWN and alert.fired_at_ms is not None):
        return alert
    since_ms = min(end_ms, newest.start_ms)
    return replace(alert, since_ms=since_ms, through_ms=max(since_ms, alert.through_ms))


def _verdicts(condition: Condition, on_missing: OnMissing, answer: SinkAnswer, measures: Sequence[Measure]) -> Verdicts:
    verdicts = condition.verdicts(answer.rows, measures)
    if on_missing == "hold" or answer.of_others is None:
        return verdicts
    others = condition.verdicts(answer.of_others(), measures)
    if on_missing == "evaluate-others":
        return others
    moved, unknown, closed = (np.zeros(answer.rows.num_rows, bool) for _ in range(3))
    for name, now in verdicts.intervals.items():
        then = others.intervals[name]
        unknown |= np.isnan(now.value)
        closed |= (now.lower == then.lower) & (now.upper == then.upper)
        for bound, of_others in ((now.lower, then.lower), (now.upper, then.upper)):
            moved |= (bound != of_others) & ~(np.isnan(bound) & np.isnan(of_others))
    # Records of the missing edges would move the bounds of each measure of their group.
    open_rows = moved | (unknown & ~closed)
    return verdicts._replace(holds=verdicts.holds | (open_rows & ~verdicts.fails))


def _facts_of(answer: SinkAnswer, labels: Labels) -> Facts:
    """Returns the facts about a group: without the edges whose constants say that they have no records of it.

    Late records that may follow do not count. Otherwise no alert of a group that is gone would end.
    """
    facts, group = answer.stated.facts.without(Cause.MAY_CHANGE), dict(labels)
    concerns = (d for d in facts.deviations if all(group.get(n, key_text(v)) == key_text(v) for n, v in d.only.items()))
    return replace(facts, deviations=tuple(concerns))


def _outcome(
    rule: AlertRule, verdicts: Verdicts, read: Mapping[str, Estimates], row: int | None, facts: Facts
) -> Outcome:
    if row is not None and verdicts.holds[row]:
        return Outcome.HOLDS
    if row is not None and verdicts.fails[row]:
        return Outcome.FAILS
    has_value = row is not None and bool(read) and not any(np.isnan(e.value[row]) for e in read.values())
    if rule.on_missing == "evaluate-others" and len(facts.lacking) < facts.expected:
        facts = facts.without(Cause.MISSING, Cause.LEFT)
    if not has_value and not facts.lacks_records:
        return Outcome.NO_VALUE
    return Outcome.HOLDS if rule.on_missing == "fire" and facts.lacking else Outcome.UNKNOWN


def _stated(rule: AlertRule, answer: SinkAnswer) -> dict[Labels, Details]:
    """Returns the alerts of a rule about the whole answer, with details, if the rule's condition holds."""
    facts, contract = answer.stated.facts, answer.stated.contract
    if rule.is_contract:
        codes: list[JsonValue] = [*sorted({violation.code for violation in contract.violations})]
        messages: list[JsonValue] = [violation.message for violation in contract.violations[:5]]
        return {} if contract.met else {(): {"codes": codes, "messages": messages}}
    if rule.completeness_below is not None:
        ratio = facts.ratio
        return {(): {"value": ratio}} if ratio < rule.completeness_below else {}
    return {(("edge", edge),): {} for edge in facts.edges_by(Cause.MISSING)[:MAX_ALERTS]}


def _rows_of(known: Collection[Labels], answer: SinkAnswer) -> dict[Labels, int]:
    """Returns, for each existing alert with a row in the answer, the index of this row."""
    if not known:
        return {}
    is_candidate: BoolArray = np.ones(answer.rows.num_rows, bool)
    for at, name in enumerate(_groups(answer)):
        column = answer.rows.column(name)
        texts = {labels[at][1] for labels in known if len(labels) > at}
        is_candidate &= pc.is_in(column, value_set=denoted_values(texts, column.type)).to_numpy()
    rows = np.flatnonzero(is_candidate)
    found = dict(zip(_labels(answer, rows), rows.tolist(), strict=True))
    return {labels: found[labels] for labels in known if labels in found}


def _labels(answer: SinkAnswer, rows: Any) -> list[Labels]:
    """Returns the labels of the groups of these rows."""
    names = _groups(answer)
    columns = [map(key_text, answer.rows.column(name).take(pa.array(rows, pa.int64())).to_pylist()) for name in names]
    return [tuple(zip(names, values, strict=True)) for values in zip(*columns, strict=True)] or [()] * len(rows)


def _groups(answer: SinkAnswer) -> list[str]:
    return [name for name in answer.group_columns if name in answer.rows.column_names]


def _values(shown: Mapping[str, Estimates], row: int) -> Details:
    result = dict[str, JsonValue]()
    for name, estimates in shown.items():
        each = {"value": estimates.value[row], "lower": estimates.lower[row], "upper": estimates.upper[row]}
        result[name] = {part: float(number) if np.isfinite(number) else None for part, number in each.items()}
    return result
