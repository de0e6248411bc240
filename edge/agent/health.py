"""`AgentHealth`: the endpoints of an agent for its operator: /livez, /readyz, /metrics and /v1/sources."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edge import metrics
from edge.agent.agent import Agent
from edge.process import now_ms as wall_clock
from edge.source_status import SourceStatus
from edgewater.runtime.health import health_routes


class AgentHealth:
    """The operator's view of an agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def routes(self) -> list[Route]:
        """Returns the HTTP routes."""
        registry = CollectorRegistry()
        registry.register(self.collector())
        registry.register(metrics.LookupCollector(self._agent.lookups.values()))
        registry.register(self._agent.tasks.failures)
        return [*health_routes(registry, self._agent.missing), Route("/v1/sources", self._sources)]

    def collector(self) -> metrics.EdgeCollector:
        """Returns the collector of all metrics except the metrics of lookups."""
        agent = self._agent
        refused_frames, costs = agent.outbox.refused_frames, agent.costs.record_s
        return metrics.EdgeCollector(
            agent.durable, self.gauges, self.source_statuses, refused_frames, agent.refused, costs, agent.skipped
        )

    async def _sources(self, _: Request) -> Response:
        return JSONResponse({"sources": [status.to_json() for status in self.source_statuses()]})

    def source_statuses(self) -> list[SourceStatus]:
        """Returns the status of each entry of ``sources``."""
        agent, streams = self._agent, self._agent.durable.core.streams
        return agent.states.statuses(
            agent.reading.failures(),
            agent.durable.state.positions,
            lambda source: streams[source.stream].is_open(source.name),
        )

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Returns the help text and the value of each gauge, by name."""
        return {**self._link_gauges(), **self._core_gauges()}

    def _link_gauges(self) -> dict[str, tuple[str, float]]:
        agent, link = self._agent, self._agent.outbox.forecast()
        return {
            "connected": ("1 while the agent is connected to the center.", float(agent.uplink.connected)),
            "bandwidth_bytes_per_second": (
                "Measured bandwidth to the center; NaN until it is known.",
                link.stated_bytes_s or math.nan,
            ),
            "rtt_seconds": ("Measured round-trip time.", link.rtt_ms / 1000),
            "retired": ("1 once the center has retired this edge.", float(agent.uplink.retired.is_set())),
        }

    def _core_gauges(self) -> dict[str, tuple[str, float]]:
        agent, core = self._agent, self._agent.durable.core
        return {
            "backlog_bytes": ("Bytes of frames the center has not acknowledged.", core.unacked_bytes),
            "pending_bytes": ("Memory held for groups and frames.", core.pending_bytes),
            "journal_bytes": ("Size of the current journal.", agent.durable.journal_bytes),
            "queries": ("Number of queries.", len(core.queries)),
            "limited_queries": (
                "Queries whose open windows take no more records, for lack of memory.",
                sum(bool(p.store.full) for p in core.queries.values()),
            ),
            "cumulative_series": (
                "Cumulative series whose last point is remembered.",
                sum(map(len, agent.durable.state.series.values())),
            ),
            "backfill_records": (
                "Records that backfills of queries have not read again yet.",
                sum(p.backfill.unread_records for p in core.queries.values() if p.backfill is not None),
            ),
            "clock_step_seconds": ("Step of the system's clock that the agent does not follow yet.", wall_clock.step_s),
            "failing_sources": (
                "Sources that cannot be read at the moment; /readyz says why.",
                len(agent.reading.failures()),
            ),
            "configuration_failed": (
                "1 while the newest content of the configuration file cannot be used: the previous one is in use.",
                float(bool(agent.configuration_failure())),
            ),
            "busy_share": ("Fraction of time the busiest source is busy.", agent.meter.recent_busy_share),
        }
