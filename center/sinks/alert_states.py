"""The states that sinks of the kind `alerts` save. The API and metrics of every center process read them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import JsonValue, TypeAdapter, with_config
from typing_extensions import TypedDict

from center.sinks.alert_delivery import OutboxState
from center.sinks.alert_rules import BookState
from center.sinks.alert_targets import AlertState
from center.sinks.store import SinkStore
from edgewater.base.errors import EdgewaterError

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
        rule, target = ["sink", "rule"], ["sink", "target"]
        number = GaugeMetricFamily("edgewater_alerts", "Alerts, by `firing` and `pending`.", labels=[*rule, "state"])
        is_read = GaugeMetricFamily("edgewater_alerts_rule_up", "1 if the rule can be evaluated.", labels=rule)
        takes = GaugeMetricFamily(
            "edgewater_alerts_target_up", "1 if the target has accepted the last notice.", labels=target
        )
        waiting = GaugeMetricFamily("edgewater_alerts_notices_waiting", "Notices that wait.", labels=target)
        notices = CounterMetricFamily(
            "edgewater_alerts_notices",
            "Notices that the target has accepted (`delivered`) or refused permanently (`refused`), or that did not fit"
            " (`dropped`).",
            labels=[*target, "result"],
        )
        families = [number, is_read, takes, waiting, notices]
        try:
            for sink, state in saved_states(self._store):
                for stated in state.rules:
                    labels = [sink, stated["rule"]]
                    number.add_metric([*labels, "firing"], stated["firing"])
                    number.add_metric([*labels, "pending"], stated["pending"])
                    is_read.add_metric(labels, float(not stated["problem"]))
                for name, box in state.targets.items():
                    takes.add_metric([sink, name], float(not box["problem"]))
                    waiting.add_metric([sink, name], len(box["waiting"]) + len(box.get("ends", ())))
                    notices.add_metric([sink, name, "delivered"], box["delivered"])
                    notices.add_metric([sink, name, "refused"], box["refused"])
                    notices.add_metric([sink, name, "dropped"], box["dropped"])
        except EdgewaterError as exc:
            log.warning("the states of alerts cannot be read: %s", exc.message)
        return families
