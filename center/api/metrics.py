"""Prometheus metrics of the API: its own requests, and the center's state as read from the stores."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from http import HTTPMethod

from prometheus_client.core import CounterMetricFamily as CounterFamily
from prometheus_client.core import GaugeMetricFamily as GaugeFamily
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Scope

from center.api.edge_progress import SharedProgress, edge_state
from center.api.responses import OnStart, ResponseMiddleware
from center.catalog import COMPONENTS, ComponentRegistry, component_status
from center.results import UNREADABLE, ResultStore
from edgewater.base.errors import StorageError
from edgewater.base.streams import MAX_TIME_MS
from edgewater.runtime.metrics import Metrics, family
from edgewater.wire import GUESSES, REJECTIONS

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # format: buckets of a histogram
METHODS = frozenset(HTTPMethod)
Labels = tuple[str, str, str]


class ApiMetrics(Metrics):
    """The metrics of one API process."""

    def __init__(self) -> None:
        super().__init__("edgewater_api_")
        self.requests = self.counter("requests", "Requests answered.", "method", "route", "status")
        text = "Time until the response starts."
        self.seconds = self.histogram("request_seconds", text, "route", buckets=SECONDS)
        text = "Requests refused, and connections closed, because of a limit."
        self.refused = self.counter("refused", text, "reason")
        text = "Lines of the audit log that could not be written."
        self.audit_failures = self.counter("audit_failures", text)
        text = "1 while a changed tokens' file cannot be used."
        self.credentials_stale = self.gauge("credentials_stale", text)
        self.live_clients = self.gauge("live_clients", "Open live streams.")
        text = "Answers given, by whether they were rendered already."
        self.renderings = self.counter("renderings", text, "cached")

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
        for families in (self._component_families, self._edge_families, self._answer_families):
            try:
                yield from families()
            except StorageError:
                continue

    def _component_families(self) -> Iterator[Metric]:
        heartbeats, now_ms = self._components.heartbeats(), self._now_ms()
        ready = {each: float(component_status(each, heartbeats, now_ms).ready) for each in COMPONENTS}
        yield family(GaugeFamily, "edgewater_component_ready", "1 if the component is ready.", ["component"], ready)

    def _edge_families(self) -> Iterator[Metric]:
        now_ms, view = self._now_ms(), self._progress.view()
        states = [edge_state(e, now_ms) for e in view.edges]
        numbers = {state: states.count(state) for state in ("up", "unreachable", "retired")}
        yield family(GaugeFamily, "edgewater_edges", "Edges by state.", ["state"], numbers)
        active = [edge for edge in view.edges if not edge.retired]
        releases = Counter(edge.release or "unknown" for edge in active)
        text = "Edges by release of their software, without retired ones."
        yield family(GaugeFamily, "edgewater_edge_releases", text, ["release"], releases)
        lags = {
            (edge.edge, stream.name): (now_ms - stream.clock.to_wall_ms(watermark)) / 1000
            for edge in active
            for stream in edge.streams
            if (watermark := edge.watermarks.get(stream.name)) is not None and watermark < MAX_TIME_MS
        }
        text = "How far a stream's watermark is behind its clock; absent once the stream has ended."
        yield family(GaugeFamily, "edgewater_edge_watermark_lag_seconds", text, ["edge", "stream"], lags)
        yield GaugeFamily("edgewater_queries", "Live queries.", value=len(view.queries))

    def _answer_families(self) -> Iterator[Metric]:
        text = "The id of the newest answer."
        yield GaugeFamily("edgewater_last_answer_id", text, value=self._results.last_answer_id())
        live = {query.ref for query in self._progress.view().queries}
        late, rejected, guessed = Counter[Labels](), Counter[Labels](), Counter[Labels]()
        for (ref, edge, reason), records in self._results.late_records().items():
            if ref in live:  # a query has the sum over all versions
                counts = rejected if reason in REJECTIONS else guessed if reason in GUESSES else late
                counts[ref.name, edge, reason] += records
        labels = ["query", "edge", "reason"]
        text = "Accepted records that came for final windows, and are in no answer to them."
        yield family(CounterFamily, "edgewater_after_final_records", text, labels, late)
        text = "Records that sources rejected, and that windows of the query lack or may lack."
        yield family(CounterFamily, "edgewater_rejected_records", text, labels, rejected)
        text = "Records that edges counted or left out on a guess."
        yield family(CounterFamily, "edgewater_guessed_records", text, labels, guessed)
        yield from UNREADABLE.collect()


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
