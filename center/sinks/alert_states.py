"""Reads the states that sinks of the kind `alerts` have saved. The API and metrics of every center process use them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from center.sinks.store import SinkStore
from edgewater.model.errors import EdgewaterError

SHOWN, RULES, TARGETS = "alerts", "rules", "targets"
"""Keys of a state: `SHOWN` has alerts and `RULES` has rules, both in the form of the API. `TARGETS` has outboxes by
target."""

log = logging.getLogger(__name__)


def saved_states(store: SinkStore) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the state of each sink of the kind `alerts` that has run.

    Raises:
        StorageError: the states cannot be read.
    """
    for name, text in sorted(store.memories().items()):
        state = json.loads(text) if text.startswith("{") else {}
        if isinstance(state, dict) and RULES in state and TARGETS in state:
            yield name, state


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
                for stated in state[RULES]:
                    labels = [sink, stated["rule"]]
                    number.add_metric([*labels, "firing"], stated["firing"])
                    number.add_metric([*labels, "pending"], stated["pending"])
                    is_read.add_metric(labels, float(not stated["problem"]))
                for name, box in state[TARGETS].items():
                    takes.add_metric([sink, name], float(not box["problem"]))
                    waiting.add_metric([sink, name], len(box["waiting"]) + len(box.get("ends", ())))
                    for result in ("delivered", "refused", "dropped"):
                        notices.add_metric([sink, name, result], box[result])
        except EdgewaterError as exc:
            log.warning("the states of alerts cannot be read: %s", exc.message)
        return families
