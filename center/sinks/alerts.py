"""The sink `alerts` evaluates rules on answers, and sends notices to webhooks or an Alertmanager.

The state of all alerts, the notices that are not delivered yet, and the position are stored together. So no alert is
lost in a restart. A notice is delivered at least once. If it is delivered again, it has the same id.

If a rule, a target or the sink is removed, the alerts that fire at a target are ended there. So the state has the
sections of the targets, and a target that is removed stays until it has accepted the ends, at most `LEAVES_MS`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from center.sinks.alert_conditions import Condition
from center.sinks.alert_delivery import Outbox, with_alerts
from center.sinks.alert_rules import Alert, AlertBook, AlertRule, OnMissing, Transition, ended
from center.sinks.alert_states import STATE, AlertsState, RuleState, TargetState
from center.sinks.alert_targets import Notice, StatedAlert, TargetSection
from center.sinks.base import SinkAnswer, SinkContext, SinkQuery
from center.sinks.definitions import SinkDefinition, has_secret
from center.sinks.kinds import BuiltInKind
from edgewater.answers import Phase
from edgewater.base.errors import EdgewaterError, InvalidConfig, InvalidInput
from edgewater.base.streams import EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.model.computed import ComputedValue
from edgewater.model.syntax import parse_sql
from edgewater.runtime.configuration import Duration, Section, refusal, validate
from edgewater.wire import QueryRef

MAX_ALERTS_IN_NOTICE = 500
"""A limit of the size of a notice, which receivers accept as one body."""
CLOSE_S = 1.0  # limit: time of a stop
"""A limit of the time for which `close` waits for all deliveries together, in seconds."""
LOOK_MS = 1_000  # limit: reads at rest
"""The time in ms between two looks for retired edges."""
LEAVES_MS = 600_000  # limit: work for a removed target
"""The longest time in ms for which a removed target is tried, in each process."""
LEAST_STEP_MS = 1_000
"""The wall clock was set if its difference from the monotonic clock has changed by this."""
NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,99}$"

LABEL = r"^[a-zA-Z_][a-zA-Z0-9_]{0,99}$"
ALERTNAME, QUERY = "alertname", "query"
"""Labels of each alert. If a group column has such a name, the label of the group begins with ``group_``."""
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
    """Further values for the condition: expressions by name, such as `error_rate: errors / requests`."""
    contract: Literal["broken"] | None = None
    """The alert fires if an answer has not met its contract."""
    completeness_below: float | None = Field(default=None, gt=0, le=1)
    """The alert fires if the completeness of an answer is below this number."""
    edge: Literal["missing"] | None = None
    """An alert fires for each edge that is missing from an answer."""
    no_answer_for: Duration | None = Field(default=None, ge=1_000)
    """The alert fires if no answer to the query has arrived for this time."""
    on_missing: OnMissing = "hold"
    """What `certainly` and `possibly` do while edges are missing from an answer, for groups that may have records of
    these edges. `hold`: an alert that fires goes on, and no other one begins, unless the condition is certain whatever
    the edges have. `evaluate-others`: the records of the other edges decide. `fire`: the alert fires."""
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
        if self.on_missing != "hold" and self.certainly is None and self.possibly is None:
            raise refusal("on_missing: hold, or one of certainly and possibly", "the rule has no condition on values")
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
            tuple(self.targets), self.on_missing,
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

    def __init__(self, options: AlertsConfig, context: SinkContext) -> None:
        self._rules, self._sections = [section.rule() for section in options.rules], options.targets
        self._context = context
        self._book: AlertBook | None = None
        self._outboxes: dict[str, Outbox] = {}
        self._leaving: dict[str, Outbox] = {}
        self._documents: dict[str, JsonValue] = {}
        self._leaves_at_ms = 0
        self._queries: dict[QueryRef, SinkQuery] = {}
        self._clocks_ms: tuple[int, int] | None = None
        self._looked_ms: int | None = None
        self._version = -1

    @property
    def problem(self) -> str:
        """Which rules cannot be evaluated, and which targets do not accept notices. Empty if there is no
        such problem.
        """
        rules = [f"rule {name}: {reason}" for name, reason in sorted(self._opened.problems.items())]
        failing = [(n, box) for n, box in sorted(self._boxes.items()) if box.problem]
        targets = [f"target {n}: {box.problem}; notices that wait: {box.left}" for n, box in failing]
        return "; ".join([*rules, *targets])

    def open(self, queries: Sequence[SinkQuery]) -> Mapping[QueryRef, int]:
        """Implements `Sink.open`."""
        self._queries |= {query.ref: query for query in queries}
        stored, now_ms = self._context.memory.load([query.ref for query in queries]), self._context.now_ms()
        if self._book is None:
            state = AlertsState() if stored is None else STATE.validate_json(stored[1])
            self._book = AlertBook(self._rules, state.book, now_ms)
            self._open_targets(state.targets, now_ms)
            self._save({})
        return {} if stored is None else stored[0]

    def follow(self, queries: Sequence[SinkQuery]) -> None:
        """Is called with all queries after `open`, and when the queries change."""
        self._opened.check(queries)
        self._save({})

    def write(self, answers: Sequence[SinkAnswer], positions: Mapping[QueryRef, int]) -> None:
        """Implements `Sink.write`."""
        now_ms, transitions = self._now_ms(), list[Transition]()
        # A later revision of a window comes after the next windows, and a book takes windows in their order.
        for answer in sorted(answers, key=lambda each: (each.query.version, each.window_start_ms)):
            transitions += self._opened.answer(answer, self._queries[answer.query].spec.measures, now_ms)
        self._notify(transitions, now_ms, self._outboxes)
        self._version = -1
        self._save(positions)

    def tick(self, is_current: bool) -> None:
        """Delivers waiting notices. If all answers were written, also ends the alerts whose query or edge is gone, and
        evaluates the rules with `no_answer_for`.
        """
        now_ms, elapsed_ms = self._now_ms(), self._elapsed_ms()
        transitions = [*self._end_gone(now_ms, elapsed_ms), *self._opened.tick(now_ms)] if is_current else []
        self._notify(transitions, now_ms, self._outboxes)
        if transitions:
            self._save({})  # before the delivery, so that a repetition has the same id
        changed = [box.step(elapsed_ms, partial(self._firing, name)) for name, box in self._outboxes.items()]
        changed += [box.step(elapsed_ms, tuple) for box in self._leaving.values()]
        for name, box in list(self._leaving.items()):
            if box.left and elapsed_ms >= self._leaves_at_ms:
                self._give_up(name, box.problem)
            elif box.left:
                continue
            del self._leaving[name]
            changed.append(True)
        if any(changed):
            self._save({})

    def close(self) -> None:
        """Implements `Sink.close`. Waits shortly for deliveries, because an unconfirmed delivery is repeated."""
        elapsed_ms, boxes = self._elapsed_ms(), self._boxes.values()
        finished = [box.finish(elapsed_ms, CLOSE_S / len(boxes)) for box in boxes]
        if any(finished):
            # If the state cannot be stored, the deliveries are repeated later.
            with suppress(EdgewaterError):
                self._save({})

    @property
    def _opened(self) -> AlertBook:
        assert self._book is not None, "open is called first"
        return self._book

    @property
    def _boxes(self) -> dict[str, Outbox]:
        """The outboxes of all targets, also of removed targets."""
        return self._outboxes | self._leaving

    def _elapsed_ms(self) -> int:
        return int(self._context.monotonic() * 1000)

    def _now_ms(self) -> int:
        """Returns the wall time. If the wall clock was set, the stored wall times follow."""
        now_ms, elapsed_ms = self._context.now_ms(), self._elapsed_ms()
        before_ms, self._clocks_ms = self._clocks_ms or (now_ms, elapsed_ms), (now_ms, elapsed_ms)
        step_ms = now_ms - before_ms[0] - (elapsed_ms - before_ms[1])
        if abs(step_ms) >= LEAST_STEP_MS:
            self._opened.clock_stepped(step_ms)
            self._save({})
        return now_ms

    def _save(self, positions: Mapping[QueryRef, int]) -> None:
        book = self._opened
        rules = book.rules
        state = AlertsState(
            book.state,
            {
                name: {**box.to_state(), "document": self._documents.get(name), "leaves": name in self._leaving}
                for name, box in self._boxes.items()
            },
            [stated(rules[a.rule], a, "pending" if a.fired_at_ms is None else "firing") for a in book.alerts],
            [_stated_rule(rule, book) for rule in rules.values()],
        )
        self._context.memory.save(positions, STATE.dump_json(state).decode())

    def _end_gone(self, now_ms: int, elapsed_ms: int) -> list[Transition]:
        catalog = self._context.catalog
        if catalog is None or (self._looked_ms is not None and elapsed_ms - self._looked_ms < LOOK_MS):
            return []
        self._looked_ms, version = elapsed_ms, catalog.version()
        if version == self._version:
            return []
        self._version = version
        retired = catalog.edges.retired() if any(rule.is_edge for rule in self._rules) else ()
        return self._opened.end_gone(catalog.queries.running(), retired, now_ms)

    def _open_targets(self, stored: Mapping[str, TargetState], now_ms: int) -> None:
        """Continues with the stored targets that the sink still has, and ends the alerts at the other stored targets.

        A target that is new gets the alerts that fire.
        """
        rules, dropped = self._opened.rules, self._opened.dropped
        firing = [alert for alert in self._opened.alerts if alert.fired_at_ms is not None]
        removed = [ended(alert, rules[alert.rule], "the target was removed", now_ms) for alert in firing]
        self._leaves_at_ms = self._elapsed_ms() + LEAVES_MS
        for name, section in self._sections.items():
            found = self._stored_name(name, section, stored)
            before = TargetState() if found is None else stored[found]
            stored = {n: state for n, state in stored.items() if n != found}
            self._documents[name] = None if has_secret(section.document, TargetSection) else section.document
            box = self._outboxes[name] = self._outbox(name, section, before)
            if found is not None and not before.get("leaves"):
                self._notify([*dropped, *(removed if found != name else ())], now_ms, {found: box})
            # A target that is back, or has another name, gets the ends first.
            for notice in () if found == name and not before.get("leaves") else self._firing(name):
                box.add(notice)
        for name, state in stored.items():
            ends = [] if state.get("leaves") else [t for t in [*dropped, *removed] if _goes_to(t.rule, name)]
            document = state.get("document")
            try:
                if document is None:
                    raise InvalidConfig("", None, "an address", "it is not stored, because it is a secret")
                box = self._outbox(name, validate(TargetSection, document), state)
            except InvalidConfig as exc:
                if ends or state.get("waiting"):
                    self._give_up(name, exc.message)
                continue
            self._notify(ends, now_ms, {name: box})
            key = name
            while key in self._boxes:
                key = f"{key}, before"
            self._leaving[key], self._documents[key] = box, document

    def _stored_name(self, name: str, section: TargetSection, stored: Mapping[str, TargetState]) -> str | None:
        """Returns the name of the stored target that is the same system; None if there is none."""
        state = stored.get(name)
        if state and not state.get("leaves") and _is_same(state.get("document"), section.document):
            return name
        for other, state in stored.items():
            is_free = state.get("leaves") or other not in self._sections
            if is_free and state.get("document") is not None and _is_same(state.get("document"), section.document):
                return other
        return None

    def _outbox(self, name: str, section: TargetSection, state: TargetState) -> Outbox:
        return Outbox.restored(f"{self._context.name}.{name}", section.make(self._context.now_ms), state)

    def _give_up(self, target: str, reason: str) -> None:
        """Raises an alarm, because alerts may fire at a removed target for ever."""
        text = f"sink {self._context.name}: alerts that fire at the removed target {target} are not ended: {reason}"
        log.warning("%s", text)
        if self._context.catalog is not None:
            # The log has it, too.
            with suppress(EdgewaterError):
                self._context.catalog.alarms.add("alerts-left", text, EdgeId(""), self._context.now_ms())

    def _firing(self, target: str) -> list[Notice]:
        """Returns notices with the alerts that fire at a target."""
        rules = self._opened.rules
        firing = [(rules[alert.rule], alert) for alert in self._opened.alerts if alert.fired_at_ms is not None]
        changes = [(rule, stated(rule, alert, "firing")) for rule, alert in firing if _goes_to(rule, target)]
        return [notice for _, notice in self._notices(changes, self._context.now_ms())]

    def _notify(self, transitions: Iterable[Transition], now_ms: int, boxes: Mapping[str, Outbox]) -> None:
        """Adds notices to outboxes, by the names of their targets."""
        changes = [
            (t.rule, stated(t.rule, t.alert, t.status, t.at_ms if t.status == "resolved" else None))
            for t in transitions
        ]
        for rule, notice in self._notices(changes, now_ms):
            for name, box in boxes.items():
                if _goes_to(rule, name):
                    box.add(notice)

    def _notices(
        self, changes: Iterable[tuple[AlertRule, StatedAlert]], now_ms: int
    ) -> Iterator[tuple[AlertRule, Notice]]:
        """Yields notices: per rule, one notice for at most `MAX_ALERTS_IN_NOTICE` alerts."""
        by_rule: dict[str, tuple[AlertRule, list[StatedAlert]]] = {}
        for rule, alert in changes:
            by_rule.setdefault(rule.name, (rule, []))[1].append(alert)
        for rule, each in by_rule.values():
            for at in range(0, len(each), MAX_ALERTS_IN_NOTICE):
                alerts = each[at : at + MAX_ALERTS_IN_NOTICE]
                identity = json.dumps([self._context.name, rule.name, now_ms, alerts], sort_keys=True)
                notice: Notice = {
                    "id": hashlib.sha256(identity.encode()).hexdigest()[:32],
                    "sink": self._context.name,
                    "rule": rule.name,
                    "query": rule.query,
                    "title": "",
                    "at": rfc3339(now_ms),
                    "alerts": [],
                }
                yield rule, with_alerts(notice, alerts)


def _goes_to(rule: AlertRule, target: str) -> bool:
    return not rule.targets or target in rule.targets


def _is_same(before: object, now: object) -> bool:
    """Returns whether two sections name the same system. If it is not stored, it is taken for the same."""

    def place(section: object) -> list[object]:
        assert isinstance(section, Mapping), "a valid section"
        return [[kind, keys["url"]] for kind, keys in sorted(section.items()) if keys]

    return before is None or place(before) == place(now)


def stated(
    rule: AlertRule, alert: Alert, status: Literal["firing", "pending", "resolved"], ended_at_ms: int | None = None
) -> StatedAlert:
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


def _stated_rule(rule: AlertRule, book: AlertBook) -> RuleState:
    """Returns a rule in the form of the API."""
    alerts, window = book.by_rule[rule.name].values(), book.windows.get(rule.name)
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


KIND = BuiltInKind("alerts", AlertsConfig, f"{__name__}:AlertSink", "center", begin="now")


def ending(name: str) -> SinkDefinition:
    """Returns the definition of a deleted sink. It has no rules and no targets, so its alerts end at all targets."""
    options = AlertsConfig.model_construct(rules=[], targets={})
    return SinkDefinition(name, KIND, options, frozenset(), Phase.EARLY, True, 0, {})
