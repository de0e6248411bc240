"""Metrics of Prometheus: of a process (`Metrics`), and families that a collector makes from a state at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

T = TypeVar("T")
Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


class Metrics:
    """The metrics of one process, in their own registry. Their names have a prefix, such as ``edgewater_job_``."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self.registry = prefix, CollectorRegistry()

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(self._prefix + name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(self._prefix + name, text, labels, registry=self.registry)

    def histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float] = Histogram.DEFAULT_BUCKETS
    ) -> Histogram:
        return Histogram(self._prefix + name, text, labels, registry=self.registry, buckets=buckets)


def family(kind: Kind, name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    """Returns a metric with its samples.

    Args:
        values: by the value of the only label, or by a tuple of the labels' values.
    """
    found = kind(name, text, labels=labels)
    for at, value in values.items():
        found.add_metric([at] if isinstance(at, str) else list(at), value)
    return found


def family_of(
    kind: Kind, name: str, text: str, labels: Sequence[str], each: Mapping[Any, T], value: Callable[[T], float | None]
) -> Metric:
    """Returns a metric with a sample for each object whose value is known."""
    found = {at: known for at, of in each.items() if (known := value(of)) is not None}
    return family(kind, name, text, labels, found)
