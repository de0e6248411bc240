"""`AgentHealth`: the endpoints of an agent for its operator: /livez, /readyz, /metrics and /v1/sources."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

from prometheus_client import CollectorRegistry, Counter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edge import metrics
from edge.agent.source_reading import SourceReading
from edge.durability import DurableCore
from edge.process import now_ms as wall_clock
from edge.source_status import SourceStates, SourceStatus
from edge.sources.lookups import StreamLookups
from edge.uplink import Uplink, UplinkOutbox
from edge.utilization import BusyMeter, QueryCosts
from edgewater.runtime.health import health_routes


@dataclass(frozen=True, slots=True)
class AgentHealth:
    """The operator's view of an agent.

    Attributes:
        refused: numbers of refused requests and closed connections of clients that push, by reason.
        skipped: numbers of valid values that are not records, by (stream, reason).
        missing: returns the reasons why the edge is not ready.
        configuration_failure: returns why the newest content of the configuration file is not in use; empty: it is in
            use.
        failures: counts failures of the agent's tasks.
    """

    durable: DurableCore
    outbox: UplinkOutbox
    uplink: Uplink
    costs: QueryCosts
    meter: BusyMeter
    states: SourceStates
    reading: SourceReading
    _: KW_ONLY
    refused: Mapping[str, int]
    skipped: Mapping[tuple[str, str], int]
    lookups: Mapping[str, StreamLookups]
    missing: Callable[[], list[str]]
    configuration_failure: Callable[[], str]
    failures: Counter

    def routes(self) -> list[Route]:
        """Returns the HTTP routes."""
        registry = CollectorRegistry()
        registry.register(self.collector())
        registry.register(metrics.LookupCollector(self.lookups.values()))
        registry.register(self.failures)
        return [*health_routes(registry, self.missing), Route("/v1/sources", self._sources)]

    def collector(self) -> metrics.EdgeCollector:
        """Returns the collector of all metrics except the metrics of lookups."""
        return metrics.EdgeCollector(
            self.durable,
            self.gauges,
            self.source_statuses,
            self.outbox.refused_frames,
            self.refused,
            self.costs.record_s,
            self.skipped,
        )

    async def _sources(self, _: Request) -> Response:
        return JSONResponse({"sources": [status.to_json() for status in self.source_statuses()]})

    def source_statuses(self) -> list[SourceStatus]:
        """Returns the status of each entry of ``sources``."""
        streams = self.durable.core.streams
        return self.states.statuses(
            self.reading.failures(),
            self.durable.state.positions,
            lambda source: streams[source.stream].is_open(source.name),
        )

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Returns the help text and the value of each gauge, by name."""
        return {**self._link_gauges(), **self._core_gauges()}

    def _link_gauges(self) -> dict[str, tuple[str, float]]:
        link = self.outbox.forecast()
        return {
            "connected": ("1 while the agent is connected to the center.", float(self.uplink.connected)),
            "bandwidth_bytes_per_second": (
                "Measured bandwidth to the center; NaN until it is known.",
                link.stated_bytes_s or math.nan,
            ),
            "rtt_seconds": ("Measured round-trip time.", link.rtt_ms / 1000),
            "retired": ("1 once the center has retired this edge.", float(self.uplink.retired.is_set())),
        }

    def _core_gauges(self) -> dict[str, tuple[str, float]]:
        core = self.durable.core
        return {
            "backlog_bytes": ("Bytes of frames the center has not acknowledged.", core.unacked_bytes),
            "pending_bytes": ("Memory held for groups and frames.", core.pending_bytes),
            "journal_bytes": ("Size of the current journal.", self.durable.journal_bytes),
            "queries": ("Number of queries.", len(core.queries)),
            "limited_queries": (
                "Queries whose open windows take no more records, for lack of memory.",
                sum(bool(p.store.full) for p in core.queries.values()),
            ),
            "cumulative_series": (
                "Cumulative series whose last point is remembered.",
                sum(map(len, self.durable.state.series.values())),
            ),
            "backfill_records": (
                "Records that backfills of queries have not read again yet.",
                sum(p.backfill.unread_records for p in core.queries.values() if p.backfill is not None),
            ),
            "clock_step_seconds": ("Step of the system's clock that the agent does not follow yet.", wall_clock.step_s),
            "failing_sources": (
                "Sources that cannot be read at the moment; /readyz says why.",
                len(self.reading.failures()),
            ),
            "configuration_failed": (
                "1 while the newest content of the configuration file cannot be used: the previous one is in use.",
                float(bool(self.configuration_failure())),
            ),
            "busy_share": ("Fraction of time the busiest source is busy.", self.meter.recent_busy_share),
        }
