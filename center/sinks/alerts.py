"""The sink `alerts` evaluates rules on answers, and sends notices to webhooks or an Alertmanager.

The state of all alerts, the notices that are not delivered yet, and the position are stored together. So no alert is
lost in a restart. A notice is delivered at least once. If it is delivered again, it has the same id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from center.serving.computed import ComputedValue
from center.sinks.alert_conditions import Condition
from center.sinks.alert_delivery import Outbox
from center.sinks.alert_rules import Alert, AlertBook, AlertRule, Transition
from center.sinks.alert_states import RULES, SHOWN, TARGETS
from center.sinks.alert_targets import Target, TargetSection
from center.sinks.base import SinkAnswer, SinkContext, SinkMemory, SinkQuery
from edgewater.answers import Phase
from edgewater.model.errors import EdgewaterError, InvalidInput
from edgewater.model.syntax import parse_sql
from edgewater.model.timestamps import rfc3339
from edgewater.runtime.configuration import Duration, Section, refusal
from edgewater.wire import QueryRef

MAX_ALERTS_IN_NOTICE = 500
CLOSE_S = 1.0
NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,99}$"

LABEL = r"^[a-zA-Z_][a-zA-Z0-9_]{0,99}$"
ALERTNAME, QUERY = "alertname", "query"
"""Labels of each alert. If a group column has such a name, the label of the group begins with ``group_``."""


class RuleSection(Section):
    """A rule. It has exactly one of `certainly`, `possibly`, `contract`, `completeness_below`, `edge` and
    `no_answer_for`."""

    alert: str = Field(pattern=NAME)
    """Name of the rule, and the label `alertname` of its alerts."""
    query: str
    """Name of the query whose answers are evaluated."""
    certainly: str | None = None
    """SQL condition that must hold for all values within the intervals, such as `errors > 100`."""
    possibly: str | None = None
    """SQL condition that must hold for one value within the intervals."""
    compute: dict[str, str] = {}
    """Further values for the condition: expressions by name, such as `error_rate: errors / requests`."""
    contract: Literal["broken"] | None = None
    """The alert fires if an answer has not met its contract."""
    completeness_below: float | None = Field(default=None, gt=0, le=1)
    """The alert fires if the completeness of an answer is below this number."""
    edge: Literal["missing"] | None = None
    """An alert fires for each edge that is missing from an answer."""
    no_answer_for: Duration | None = Field(default=None, ge=1_000)
    """The alert fires if no answer to the query has arrived for this time."""
    for_: Duration = Field(default=0, alias="for")
    """Event time for which the condition must hold in all windows."""
    phase: Phase | None = None
    """Answers of earlier phases are not evaluated. Unset: `early` for `completeness_below`, `edge` and `no_answer_for`,
    otherwise `complete`."""
    labels: dict[Annotated[str, Field(pattern=LABEL)], str] = {}
    """Labels of each alert, such as `severity: page`."""
    summary: str = ""
    """A text about the alert, for people."""
    targets: list[str] = []
    """Names of targets. If empty, all targets."""

    @model_validator(mode="after")
    def _one_condition(self) -> Self:
        names = ("certainly", "possibly", "contract", "completeness_below", "edge", "no_answer_for")
        if sum(getattr(self, name) is not None for name in names) != 1:
            raise refusal(f"exactly one of {', '.join(names)}")
        try:
            self.rule()
        except InvalidInput as exc:
            raise refusal(exc.accepted, f"{exc.field}: {exc.reason}") from exc
        return self

    def rule(self) -> AlertRule:
        """Returns the rule.

        Raises:
            InvalidQuery: the condition is not valid SQL.
        """
        text, condition = self.certainly or self.possibly, None
        if text is not None:
            certainty: Literal["certainly", "possibly"] = "certainly" if self.certainly is not None else "possibly"
            parse_sql(text, certainty)
            for name, expression in self.compute.items():
                ComputedValue.parse(f"{name}: {expression}")
            condition = Condition(text, certainty, self.compute)
        is_about_edges = self.completeness_below is not None or self.edge is not None or self.no_answer_for is not None
        phase = self.phase or (Phase.EARLY if is_about_edges else Phase.COMPLETE)
        return AlertRule(
            self.alert, self.query, condition, self.contract is not None, self.completeness_below,
            self.edge is not None, self.no_answer_for, self.for_, phase, self.labels, self.summary,
            tuple(self.targets),
        )  # fmt: skip


class AlertsConfig(Section):
    """The keys of a sink of the kind `alerts`."""

    rules: list[RuleSection] = Field(min_length=1)
    """The rules."""
    targets: dict[str, TargetSection] = Field(min_length=1)
    """The targets to which alerts are sent, by name."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [rule.alert for rule in self.rules]
        if len(set(names)) < len(names):
            raise refusal("rules of different names", f"the names are {', '.join(names)}")
        unknown = sorted({target for rule in self.rules for target in rule.targets} - set(self.targets))
        if unknown:
            raise refusal(f"rules with the targets {', '.join(self.targets)}", f"a rule names {unknown[0]}")
        return self

    @property
    def reads(self) -> frozenset[str]:
        """The names of the queries whose answers the rules evaluate."""
        return frozenset(rule.query for rule in self.rules)


class AlertSink:
    """Evaluates rules and delivers notices. Implements `center.sinks.base.Sink`."""

    def __init__(self, rules: Sequence[AlertRule], targets: Mapping[str, Target], context: SinkContext) -> None:
        self._rules, self._targets, self._context = rules, targets, context
        self._book: AlertBook | None = None
        self._outboxes: dict[str, Outbox] = {}
        self._queries: dict[QueryRef, SinkQuery] = {}

    @property
    def problem(self) -> str:
        """Which rules cannot be evaluated, and which targets do not accept notices. Empty if there is no
        such problem.
        """
        rules = [f"rule {name}: {reason}" for name, reason in sorted(self._opened.problems.items())]
        failing = [(n, box) for n, box in sorted(self._outboxes.items()) if box.problem]
        targets = [f"target {n}: {box.problem}; notices that wait: {len(box.waiting)}" for n, box in failing]
        return "; ".join([*rules, *targets])

    def open(self, queries: Sequence[SinkQuery]) -> Mapping[QueryRef, int]:
        """Implements `Sink.open`."""
        self._queries |= {query.ref: query for query in queries}
        stored, now_ms = self._memory.load([query.ref for query in queries]), self._context.now_ms()
        if self._book is None:
            state: dict[str, Any] = {} if stored is None else json.loads(stored[1])
            self._book = AlertBook(self._rules, state.get("book"), now_ms)
            outboxes = state.get(TARGETS, {})
            for name, target in self._targets.items():
                self._outboxes[name] = Outbox.restored(f"{self._context.name}.{name}", target, outboxes.get(name, {}))
            self._notify(self._book.dropped, now_ms)
            self._save({})
        return {} if stored is None else stored[0]

    def follow(self, queries: Sequence[SinkQuery]) -> None:
        """Is called with all queries after `open`, and when the queries change."""
        self._opened.check(queries)
        self._save({})

    def write(self, answers: Sequence[SinkAnswer], positions: Mapping[QueryRef, int]) -> None:
        """Implements `Sink.write`."""
        now_ms, transitions = self._context.now_ms(), list[Transition]()
        # A later revision of a window comes after the next windows, and a book takes windows in their order.
        for answer in sorted(answers, key=lambda each: (each.query.version, each.window_start_ms)):
            transitions += self._opened.answer(answer, self._queries[answer.query].spec.measures, now_ms)
        self._notify(transitions, now_ms)
        self._save(positions)

    def tick(self, is_current: bool) -> None:
        """Delivers waiting notices. If all answers were written, also evaluates the rules with `no_answer_for`."""
        now_ms = self._context.now_ms()
        transitions = self._opened.tick(now_ms) if is_current else []
        self._notify(transitions, now_ms)
        if transitions:
            self._save({})  # before the delivery, so that a repetition has the same id
        changed = [box.step(now_ms, partial(self._firing, name)) for name, box in self._outboxes.items()]
        if any(changed):
            self._save({})

    def close(self) -> None:
        """Implements `Sink.close`. Waits shortly for deliveries, because an unconfirmed delivery is repeated."""
        now_ms = self._context.now_ms()
        finished = [box.finish(now_ms, CLOSE_S / len(self._outboxes)) for box in self._outboxes.values()]
        if any(finished):
            # If the state cannot be stored, the deliveries are repeated later.
            with suppress(EdgewaterError):
                self._save({})

    @property
    def _opened(self) -> AlertBook:
        assert self._book is not None, "open is called first"
        return self._book

    @property
    def _memory(self) -> SinkMemory:
        assert self._context.memory is not None, "a process gives one"
        return self._context.memory

    def _save(self, positions: Mapping[QueryRef, int]) -> None:
        book = self._opened
        rules = book.rules
        state = {
            "book": book.to_json(),
            TARGETS: {name: box.to_json() for name, box in self._outboxes.items()},
            SHOWN: [stated(rules[a.rule], a, "pending" if a.fired_at_ms is None else "firing") for a in book.alerts],
            RULES: [_stated_rule(rule, book) for rule in rules.values()],
        }
        self._memory.save(positions, json.dumps(state, separators=(",", ":")))

    def _firing(self, target: str) -> list[dict[str, Any]]:
        rules = self._opened.rules
        firing = [alert for alert in self._opened.alerts if alert.fired_at_ms is not None]
        return [stated(rules[a.rule], a, "firing") for a in firing if self._goes_to(rules[a.rule], target)]

    def _goes_to(self, rule: AlertRule, target: str) -> bool:
        """Returns whether a target gets the notices of a rule. If none of the rule's targets exists, all targets get
        them.
        """
        return target in rule.targets or not any(name in self._outboxes for name in rule.targets)

    def _notify(self, transitions: Sequence[Transition], now_ms: int) -> None:
        """Adds notices to the outboxes of the targets: per rule, one notice for at most
        `MAX_ALERTS_IN_NOTICE` alerts.
        """
        by_rule: dict[str, list[Transition]] = {}
        for transition in transitions:
            by_rule.setdefault(transition.rule.name, []).append(transition)
        for each in by_rule.values():
            for at in range(0, len(each), MAX_ALERTS_IN_NOTICE):
                notice = self._notice(each[0].rule, each[at : at + MAX_ALERTS_IN_NOTICE], now_ms)
                for name, box in self._outboxes.items():
                    if self._goes_to(each[0].rule, name):
                        box.add(notice)

    def _notice(self, rule: AlertRule, transitions: Sequence[Transition], now_ms: int) -> dict[str, Any]:
        alerts = [stated(rule, t.alert, t.status, t.at_ms if t.status == "resolved" else None) for t in transitions]
        firing = sum(alert["status"] == "firing" for alert in alerts)
        identity = json.dumps([self._context.name, rule.name, now_ms, alerts], sort_keys=True)
        title = f"{rule.name}: {firing} firing, {len(alerts) - firing} resolved"
        return {
            "id": hashlib.sha256(identity.encode()).hexdigest()[:32],
            "sink": self._context.name,
            "rule": rule.name,
            "query": rule.query,
            "title": title + (f" ({rule.summary})" if rule.summary else ""),
            "at": rfc3339(now_ms),
            "alerts": alerts,
        }


def stated(rule: AlertRule, alert: Alert, status: str, ended_at_ms: int | None = None) -> dict[str, Any]:
    """Returns an alert in the form of notices and of the API."""
    annotations = {"summary": rule.summary} if rule.summary else {}
    annotations |= {name: v if isinstance(v, str) else json.dumps(v) for name, v in alert.details.items()}
    own = {ALERTNAME: rule.name, QUERY: rule.query}
    taken = own.keys() | dict(alert.labels).keys()
    groups = {_free(name, taken) if name in own else name: value for name, value in alert.labels}
    return {
        "status": status,
        "rule": rule.name,
        "query": rule.query,
        "labels": {**rule.labels, **groups, **own},
        "annotations": annotations,
        "since": rfc3339(alert.since_ms),
        "starts_at": None if alert.fired_at_ms is None else rfc3339(alert.fired_at_ms),
        "ends_at": None if ended_at_ms is None else rfc3339(ended_at_ms),
        "details": dict(alert.details),
    }


def _free(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name = f"group_{name}"
    return name


def _stated_rule(rule: AlertRule, book: AlertBook) -> dict[str, Any]:
    """Returns a rule in the form of the API."""
    alerts, window = book.alerts_of(rule.name), book.windows.get(rule.name)
    firing, problem = sum(alert.fired_at_ms is not None for alert in alerts), book.problems.get(rule.name)
    return {
        "rule": rule.name,
        "query": rule.query,
        "condition": rule.text,
        "for_ms": rule.for_ms,
        "phase": rule.min_phase.value,
        "state": "failing" if problem else "firing" if firing else "pending" if alerts else "ok",
        "problem": problem,
        "firing": firing,
        "pending": len(alerts) - firing,
        "window": None if window is None else {"start": rfc3339(window.start_ms), "end": rfc3339(window.end_ms)},
        "targets": list(rule.targets),
    }


class AlertsKind:
    """The sink kind `alerts`."""

    name = "alerts"
    config = AlertsConfig
    begin = "now"

    def sink(self, options: AlertsConfig, context: SinkContext) -> AlertSink:
        """Implements `SinkKind.sink`."""
        rules = [section.rule() for section in options.rules]
        return AlertSink(rules, {name: t.make() for name, t in options.targets.items()}, context)


KIND = AlertsKind()
