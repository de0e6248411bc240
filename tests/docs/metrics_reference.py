"""Writes `docs/reference/metrics.md`: every metric that the code exports. `python -m tests.docs.metrics_reference`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from center.api.edge_progress import SharedProgress
from center.api.metrics import ApiMetrics, CenterCollector
from center.catalog import Catalog, ComponentRegistry
from center.ingest.metrics import GatewayMetrics
from center.job.metrics import JobMetrics
from center.results import ResultStore
from center.sinks import SinkStore
from center.sinks.alert_states import AlertCollector
from center.sinks.process import SinkCollector
from edge.agent import AgentHealth, open_agent
from edge.config import parse_config
from edgewater.runtime.tasks import Tasks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"
STREAM = {"columns": {"n": "int64"}, "time": {"column": "at", "unit": "ms"}, "sources": [{"http": {}}]}
HEAD = """\
# Reference: metrics

In Prometheus' text format, at `/metrics` of each process. Histograms have `_bucket`, `_sum` and `_count`.
Answers themselves are series at `/prometheus`: see [Grafana](../how-to/grafana.md). `deploy/mixin` has a dashboard and
alerts. This page is `python -m tests.docs.metrics_reference`; a test compares it with the code.
"""


@dataclass(frozen=True)
class Exported:
    """A metric: name as it is exported, type, labels, help."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def of_registry(registry: CollectorRegistry) -> list[Exported]:
    """The metrics that are registered as such, with or without samples."""
    each = [metric for metric in registry._collector_to_names if hasattr(metric, "_type")]
    return [_exported(m._name, m._type, m._labelnames, m._documentation) for m in each]


def of_families(families: Iterable[Metric]) -> list[Exported]:
    return [_exported(f.name, f.type, getattr(f, "_labelnames", ()), f.documentation) for f in families]


def _exported(name: str, kind: str, labels: Iterable[str], text: str) -> Exported:
    return Exported(f"{name}_total" if kind == "counter" else name, kind, tuple(labels), text)


def exported() -> dict[str, list[Exported]]:
    """The metrics by process, sorted by name."""
    with tempfile.TemporaryDirectory() as directory:
        url = f"sqlite:///{directory}/center.db"
        catalog, components, results = Catalog(url), ComponentRegistry(url), ResultStore(url)
        center = CenterCollector(components, results, SharedProgress(catalog, lambda: 0), lambda: 0)
        edge = {
            "edge": "jfk", "center": {"address": "127.0.0.1:1"}, "state_dir": f"{directory}/edge",
            "streams": {"flights": STREAM},
        }  # fmt: skip
        agent = open_agent(parse_config(edge))
        registry = CollectorRegistry()
        registry.register(Tasks().failures)
        found = {
            "the API": of_registry(ApiMetrics().registry) + of_families(center.collect()),
            "the gateway": of_registry(GatewayMetrics().registry),
            "the job": of_registry(JobMetrics().registry),
            "the sinks": of_families(SinkCollector(SinkStore(results.engine), results, lambda: 0).collect())
            + of_families(AlertCollector(SinkStore(results.engine)).collect()),
            "the edge": of_families(AgentHealth(agent).collector().collect()),
        }
        for metrics in found.values():
            metrics += of_registry(registry)
        agent.durable.close()
        for store in (catalog, components, results):
            store.close()
    return {process: sorted(metrics, key=lambda m: m.name) for process, metrics in found.items()}


def render() -> str:
    parts = [HEAD]
    for process, metrics in exported().items():
        rows = [f"| `{m.name}` | {m.kind} | {', '.join(m.labels)} | {m.text} |" for m in metrics]
        parts.append(
            "\n".join([f"## Of {process}", "", "| metric | type | labels | |", "|---|---|---|---|", *rows, ""])
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
