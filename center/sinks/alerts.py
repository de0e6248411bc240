"""The sink `alerts`: rules about answers, and notices to webhooks, an Alertmanager or by email.

The state of all alerts, the notices that are not delivered yet and the position are stored together. So a restart
forgets no alert. A notice is delivered at least once; a repetition has the same id.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from center.ledger import Phase
from center.serving.computed import ComputedValue
from center.sinks.alert_rules import Alert, AlertBook, AlertRule, Condition, Transition
from center.sinks.alert_targets import DeliveryFailed, Target, TargetSection
from center.sinks.base import Position, SinkAnswer, SinkContext, SinkMemory, SinkQuery
from edgewater.model.errors import InvalidInput
from edgewater.model.syntax import parse_sql
from edgewater.model.timestamps import rfc3339
from edgewater.runtime.configuration import Duration, Section, refusal
from edgewater.wire import QueryRef

RESEND_MS = 60_000
FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 1_000, 60_000
MAX_WAITING = 1_000
"""Notices that wait for one target. Beyond it the oldest is dropped, and the status says so."""
MAX_ALERTS_IN_NOTICE = 500
NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,99}$"

SHOWN = "alerts"
"""Key of the state: the alerts as the API states them."""

log = logging.getLogger(__name__)


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
    """Further values for the condition: name and expression, such as `error_rate: errors / requests`."""
    contract: Literal["broken"] | None = None
    """Fires if an answer has not met its contract."""
    completeness_below: float | None = Field(default=None, gt=0, le=1)
    """Fires if the completeness of an answer is lower."""
    edge: Literal["missing"] | None = None
    """Fires for each edge that an answer lacks."""
    no_answer_for: Duration | None = Field(default=None, ge=1_000)
    """Fires if no answer to the query has come for so long."""
    for_: Duration = Field(default=0, alias="for")
    """Event time for which the condition must hold in all windows."""
    phase: Phase = Phase.COMPLETE
    """The earliest phase of answers that are evaluated."""
    labels: dict[str, str] = {}
    """Labels of each alert, such as `severity: page`."""
    summary: str = ""
    """A text for people."""
    targets: list[str] = []
    """Names of targets; none: all."""

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
        """Returns the rule. Raises InvalidQuery: the condition is no SQL."""
        text, condition = self.certainly or self.possibly, None
        if text is not None:
            certainty: Literal["certainly", "possibly"] = "certainly" if self.certainly is not None else "possibly"
            parse_sql(text, certainty)
            for name, expression in self.compute.items():
                ComputedValue.parse(f"{name}: {expression}")
            condition = Condition(text, certainty, self.compute)
        return AlertRule(
            self.alert, self.query, condition, self.contract is not None, self.completeness_below,
            self.edge is not None, self.no_answer_for, self.for_, self.phase, self.labels, self.summary,
            tuple(self.targets),
        )  # fmt: skip


class AlertsConfig(Section):
    """The keys of a sink of the kind `alerts`."""

    rules: list[RuleSection] = Field(min_length=1)
    """The rules."""
    targets: dict[str, TargetSection] = Field(min_length=1)
    """Where alerts go, by name."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [rule.alert for rule in self.rules]
        if len(set(names)) < len(names):
            raise refusal("rules of different names", f"the names are {', '.join(names)}")
        unknown = sorted({target for rule in self.rules for target in rule.targets} - set(self.targets))
        if unknown:
            raise refusal(f"rules with the targets {', '.join(self.targets)}", f"a rule names {unknown[0]}")
        return self


class AlertSink:
    """Evaluates rules and delivers notices. See `center.sinks.base.Sink`."""

    def __init__(self, rules: Sequence[AlertRule], targets: Mapping[str, Target], context: SinkContext) -> None:
        self._rules, self._targets, self._context = rules, targets, context
        self._book = AlertBook(rules)
        self._measures: dict[QueryRef, Any] = {}
        self._waiting: dict[str, list[dict[str, Any]]] = {}
        self._position = Position()
        self._failures: dict[str, str] = {}
        self._tries: dict[str, int] = {}
        self._next_ms: dict[str, int] = {}
        self._resent_ms = 0

    @property
    def problem(self) -> str:
        """Which rules cannot be evaluated, and which targets accept nothing."""
        rules = [f"rule {name}: {reason}" for name, reason in sorted(self._book.problems.items())]
        return "; ".join([*rules, *(f"target {n}: {reason}" for n, reason in sorted(self._failures.items()))])

    def open(self, queries: Sequence[SinkQuery]) -> Position | None:
        """See `Sink`."""
        stored = self._memory.load()
        state: dict[str, Any] = {} if stored is None else json.loads(stored[1])
        self._book = AlertBook(self._rules, state.get("book"))
        self._book.check(queries)
        self._measures = {query.ref: query.spec.measures for query in queries}
        self._waiting = {
            name: list(notices) for name, notices in state.get("waiting", {}).items() if name in self._targets
        }
        self._position = Position() if stored is None else stored[0]
        return None if stored is None else stored[0]

    def write(self, answers: Sequence[SinkAnswer], position: Position) -> None:
        """See `Sink`."""
        now_ms, transitions = self._context.now_ms(), list[Transition]()
        for answer in answers:
            transitions += self._book.answer(answer, self._measures[answer.query], now_ms)
        self._notify(transitions, now_ms)
        self._position = position
        self._save()

    def tick(self) -> None:
        """Evaluates rules about silence, and delivers what waits."""
        now_ms = self._context.now_ms()
        if transitions := self._book.tick(now_ms):
            self._notify(transitions, now_ms)
            self._save()
        resends = now_ms - self._resent_ms >= RESEND_MS
        if resends:
            self._resent_ms = now_ms
        for name, target in self._targets.items():
            if now_ms >= self._next_ms.get(name, 0):
                self._deliver(name, target, now_ms, resends)

    def close(self) -> None:
        """See `Sink`."""

    @property
    def _memory(self) -> SinkMemory:
        assert self._context.memory is not None, "a process gives one"
        return self._context.memory

    def _save(self) -> None:
        shown = [self._stated(a, "pending" if a.fired_at_ms is None else "firing", None) for a in self._book.alerts]
        state = {"book": self._book.to_json(), "waiting": self._waiting, SHOWN: shown}
        self._memory.save(self._position, json.dumps(state, separators=(",", ":")))

    def _deliver(self, name: str, target: Target, now_ms: int, resends: bool) -> None:
        waiting = self._waiting.get(name, [])
        try:
            while waiting:
                target.deliver(waiting[0], now_ms)
                waiting.pop(0)
                self._save()
            if resends and target.repeats and (firing := self._firing(name)):
                target.resend(firing, now_ms)
        except DeliveryFailed as exc:
            if name not in self._failures:
                log.warning("sink %s, target %s: %s", self._context.name, name, exc.message)
            self._tries[name] = tries = self._tries.get(name, 0) + 1
            self._failures[name] = f"{exc.message}; notices that wait: {len(waiting)}"
            self._next_ms[name] = now_ms + min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS << min(tries - 1, 10))
        else:
            self._failures.pop(name, None)
            self._tries.pop(name, None)

    def _firing(self, target: str) -> list[dict[str, Any]]:
        alerts = [a for a in self._book.alerts if a.fired_at_ms is not None and self._goes_to(a.rule, target)]
        return [self._stated(alert, "firing", None) for alert in alerts]

    def _goes_to(self, rule: str, target: str) -> bool:
        targets = self._book.rules[rule].targets
        return not targets or target in targets

    def _notify(self, transitions: Sequence[Transition], now_ms: int) -> None:
        """Adds a notice per rule to what waits for its targets."""
        by_rule: dict[str, list[Transition]] = {}
        for transition in transitions:
            by_rule.setdefault(transition.alert.rule, []).append(transition)
        for rule, each in by_rule.items():
            for at in range(0, len(each), MAX_ALERTS_IN_NOTICE):
                notice = self._notice(rule, each[at : at + MAX_ALERTS_IN_NOTICE], now_ms)
                for target in self._targets:
                    if self._goes_to(rule, target):
                        waiting = self._waiting.setdefault(target, [])
                        waiting.append(notice)
                        if len(waiting) > MAX_WAITING:
                            log.warning("sink %s, target %s: a notice is dropped", self._context.name, target)
                            del waiting[0]

    def _notice(self, rule: str, transitions: Sequence[Transition], now_ms: int) -> dict[str, Any]:
        alerts = [self._stated(t.alert, t.status, t.at_ms if t.status == "resolved" else None) for t in transitions]
        firing = sum(alert["status"] == "firing" for alert in alerts)
        identity = json.dumps([self._context.name, rule, now_ms, alerts], sort_keys=True)
        summary = self._book.rules[rule].summary
        return {
            "id": hashlib.sha256(identity.encode()).hexdigest()[:32],
            "sink": self._context.name,
            "rule": rule,
            "query": self._book.rules[rule].query,
            "title": f"{rule}: {firing} firing, {len(alerts) - firing} resolved" + (f" ({summary})" if summary else ""),
            "at": rfc3339(now_ms),
            "alerts": alerts,
        }

    def _stated(self, alert: Alert, status: str, ended_at_ms: int | None) -> dict[str, Any]:
        return stated(self._book.rules[alert.rule], alert, status, ended_at_ms)


def stated(rule: AlertRule, alert: Alert, status: str, ended_at_ms: int | None) -> dict[str, Any]:
    """Returns an alert as notices and the API state it."""
    annotations = {"summary": rule.summary} if rule.summary else {}
    annotations |= {name: v if isinstance(v, str) else json.dumps(v) for name, v in alert.details.items()}
    return {
        "status": status,
        "labels": {"alertname": rule.name, "query": rule.query, **dict(alert.labels), **rule.labels},
        "annotations": annotations,
        "since": rfc3339(alert.since_ms),
        "starts_at": None if alert.fired_at_ms is None else rfc3339(alert.fired_at_ms),
        "ends_at": None if ended_at_ms is None else rfc3339(ended_at_ms),
        "details": dict(alert.details),
    }


class AlertsKind:
    """The kind `alerts`."""

    name = "alerts"
    config = AlertsConfig
    begin = "now"

    def sink(self, options: AlertsConfig, context: SinkContext) -> AlertSink:
        """See `center.sinks.base.SinkKind`."""
        rules = [section.rule() for section in options.rules]
        return AlertSink(rules, {name: t.make() for name, t in options.targets.items()}, context)


KIND = AlertsKind()
