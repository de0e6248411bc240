"""The states that sinks of the kind `alerts` save. The API and metrics of every center process read them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from pydantic import JsonValue, TypeAdapter, with_config
from typing_extensions import TypedDict

from center.sinks.alert_delivery import OutboxState
from center.sinks.alert_rules import BookState
from center.sinks.alert_targets import AlertState
from center.sinks.store import SinkStore
from edgewater.base.errors import EdgewaterError
from edgewater.runtime.metrics import family, family_of

log = logging.getLogger(__name__)


@with_config(use_attribute_docstrings=True)
class RuleState(TypedDict):
    """A rule as the API shows it."""

    rule: str
    query: str
    condition: str
    for_ms: int
    """Event time for which the condition must hold."""
    phase: str
    """The earliest phase of answers that are evaluated."""
    state: Literal["ok", "pending", "firing", "failing"]
    """`failing`: it cannot be evaluated."""
    problem: str | None
    firing: int
    pending: int
    window: dict[str, str] | None
    """The newest window that was evaluated."""
    targets: list[str]
    """Names of targets; none: all."""


class TargetState(OutboxState, total=False):
    """The outbox of a target.

    Attributes:
        document: the section of the target; None: it has a secret.
        leaves: the target is removed.
    """

    document: JsonValue
    leaves: bool


@dataclass(frozen=True, slots=True)
class AlertsState:
    """The state of a sink of the kind `alerts`.

    Attributes:
        targets: by name.
        alerts: the alerts that fire or are pending.
    """

    book: BookState = field(default_factory=BookState)
    targets: dict[str, TargetState] = field(default_factory=dict)
    alerts: list[AlertState] = field(default_factory=list)
    rules: list[RuleState] = field(default_factory=list)


STATE = TypeAdapter(AlertsState)


def saved_states(store: SinkStore) -> Iterator[tuple[str, AlertsState]]:
    """Yields the name and the state of each sink of the kind `alerts` that has run.

    Raises:
        StorageError: the states cannot be read.
    """
    for name, text in sorted(store.memories().items()):
        state = json.loads(text) if text.startswith("{") else {}
        if isinstance(state, dict) and {"rules", "targets"} <= state.keys():
            yield name, STATE.validate_python(state)


class AlertCollector(Collector):
    """Metrics of all rules and targets. They come from the stored states, so any process can run the sinks."""

    def __init__(self, store: SinkStore) -> None:
        self._store = store

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics. Prometheus' client calls it for each scrape."""
        try:
            states = dict(saved_states(self._store))
        except EdgewaterError as exc:
            log.warning("the states of alerts cannot be read: %s", exc.message)
            states = {}
        rules = {(sink, rule["rule"]): rule for sink, state in states.items() for rule in state.rules}
        boxes = {(sink, name): box for sink, state in states.items() for name, box in state.targets.items()}
        of_rule, of_target = ["sink", "rule"], ["sink", "target"]
        numbers = {(*at, kind): rule[kind] for at, rule in rules.items() for kind in ("firing", "pending")}
        yield family(Gauge, "edgewater_alerts", "Alerts, by `firing` and `pending`.", [*of_rule, "state"], numbers)
        text = "1 if the rule can be evaluated."
        yield family_of(Gauge, "edgewater_alerts_rule_up", text, of_rule, rules, lambda r: float(not r["problem"]))
        text = "1 if the target has accepted the last notice."
        yield family_of(Gauge, "edgewater_alerts_target_up", text, of_target, boxes, lambda b: float(not b["problem"]))
        waiting = {at: len(box["waiting"]) + len(box.get("ends", ())) for at, box in boxes.items()}
        yield family(Gauge, "edgewater_alerts_notices_waiting", "Notices that wait.", of_target, waiting)
        text = (
            "Notices that the target has accepted (`delivered`) or refused permanently (`refused`), or that did not fit"
            " (`dropped`)."
        )
        results = {(*at, k): box[k] for at, box in boxes.items() for k in ("delivered", "refused", "dropped")}
        yield family(Counter, "edgewater_alerts_notices", text, [*of_target, "result"], results)
