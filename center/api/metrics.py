"""Prometheus metrics of the API: its own requests, and the center's state as read from the stores."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator
from http import HTTPMethod

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Scope

from center.api.edge_progress import SharedProgress, edge_state
from center.api.responses import OnStart, ResponseMiddleware
from center.catalog import COMPONENTS, ComponentRegistry, component_status
from center.results import UNREADABLE, ResultStore
from edgewater.base.errors import StorageError
from edgewater.base.streams import MAX_TIME_MS
from edgewater.wire import GUESSES, REJECTIONS

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # format: buckets of a histogram


METHODS = frozenset(HTTPMethod)


class ApiMetrics:
    """The metrics of one API process, on their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "edgewater_api_requests", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "edgewater_api_request_seconds",
            "Time until the response starts.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.refused = Counter(
            "edgewater_api_refused",
            "Requests refused, and connections closed, because of a limit.",
            ["reason"],
            registry=self.registry,
        )
        self.audit_failures = Counter(
            "edgewater_api_audit_failures", "Lines of the audit log that could not be written.", registry=self.registry
        )
        self.credentials_stale = Gauge(
            "edgewater_api_credentials_stale", "1 while a changed tokens' file cannot be used.", registry=self.registry
        )
        self.live_clients = Gauge("edgewater_api_live_clients", "Open live streams.", registry=self.registry)
        self.renderings = Counter(
            "edgewater_api_renderings",
            "Answers given, by whether they were rendered already.",
            ["cached"],
            registry=self.registry,
        )

    def on_refused(self, reason: str) -> None:
        self.refused.labels(reason).inc()

    def on_lookup(self, hit: bool) -> None:
        self.renderings.labels("yes" if hit else "no").inc()


class CenterCollector(Collector):
    """The center's state, read from the stores on each scrape. Metrics of an unreachable store are omitted."""

    def __init__(
        self, components: ComponentRegistry, results: ResultStore, progress: SharedProgress, now_ms: Callable[[], int]
    ) -> None:
        self._components = components
        self._results = results
        self._progress = progress
        self._now_ms = now_ms

    def collect(self) -> Iterator[Metric]:
        for family in (self._component_families, self._edge_families, self._answer_families):
            try:
                yield from family()
            except StorageError:
                continue

    def _component_families(self) -> list[Metric]:
        up = GaugeMetricFamily("edgewater_component_ready", "1 if the component is ready.", labels=["component"])
        heartbeats = self._components.heartbeats()
        for component in COMPONENTS:
            up.add_metric([component], float(component_status(component, heartbeats, self._now_ms()).ready))
        return [up]

    def _edge_families(self) -> list[Metric]:
        now_ms, view = self._now_ms(), self._progress.view()
        edges = GaugeMetricFamily("edgewater_edges", "Edges by state.", labels=["state"])
        states = [edge_state(e, now_ms) for e in view.edges]
        for state in ("up", "unreachable", "retired"):
            edges.add_metric([state], states.count(state))
        lag = GaugeMetricFamily(
            "edgewater_edge_watermark_lag_seconds",
            "How far a stream's watermark is behind its clock; absent once the stream has ended.",
            labels=["edge", "stream"],
        )
        for edge in view.edges:
            for stream in edge.streams:
                watermark = edge.watermarks.get(stream.name)
                if watermark is not None and watermark < MAX_TIME_MS and not edge.retired:
                    behind_ms = now_ms - stream.clock.to_wall_ms(watermark)
                    lag.add_metric([edge.edge, stream.name], behind_ms / 1000)
        of_release = "Edges by release of their software, without retired ones."
        releases = GaugeMetricFamily("edgewater_edge_releases", of_release, labels=["release"])
        for release, number in collections.Counter(e.release or "unknown" for e in view.edges if not e.retired).items():
            releases.add_metric([release], number)
        queries = GaugeMetricFamily("edgewater_queries", "Live queries.", value=len(view.queries))
        return [edges, releases, lag, queries]

    def _answer_families(self) -> list[Metric]:
        given = self._results.last_answer_id()
        late = CounterMetricFamily(
            "edgewater_after_final_records",
            "Accepted records that came for final windows, and are in no answer to them.",
            labels=["query", "edge", "reason"],
        )
        rejected = CounterMetricFamily(
            "edgewater_rejected_records",
            "Records that sources rejected, and that windows of the query lack or may lack.",
            labels=["query", "edge", "reason"],
        )
        guessed = CounterMetricFamily(
            "edgewater_guessed_records",
            "Records that edges counted or left out on a guess.",
            labels=["query", "edge", "reason"],
        )
        live = {query.ref for query in self._progress.view().queries}
        counts: dict[tuple[str, str, str], int] = {}
        for (ref, edge, reason), records in self._results.late_records().items():
            if ref in live:
                key = ref.name, edge, reason
                counts[key] = counts.get(key, 0) + records  # of all versions
        for (name, edge, reason), records in counts.items():
            family = rejected if reason in REJECTIONS else guessed if reason in GUESSES else late
            family.add_metric([name, edge, reason], records)
        newest = GaugeMetricFamily("edgewater_last_answer_id", "The id of the newest answer.", value=given)
        return [newest, late, rejected, guessed, *UNREADABLE.collect()]


class MetricsMiddleware(ResponseMiddleware):
    """Middleware: counts and times requests by route template, which bounds the number of labels."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics, monotonic: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(app)
        self._metrics = metrics
        self._monotonic = monotonic

    def begin(self, scope: Scope) -> OnStart:
        """Implements `ResponseMiddleware.begin`."""
        began = self._monotonic()

        async def measure(start: Message) -> None:
            route = getattr(scope.get("route"), "path", "(none)")
            method = scope["method"] if scope["method"] in METHODS else "other"  # clients may send any text
            self._metrics.requests.labels(method, route, start["status"]).inc()
            self._metrics.seconds.labels(route).observe(self._monotonic() - began)

        return measure
