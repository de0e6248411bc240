"""The metrics of a gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

Metric = TypeVar("Metric", bound=MetricWrapperBase)


class GatewayMetrics:
    """The metrics of one gateway process, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        add = self._add
        self.sessions = add(Gauge, "sessions", "Connected edges.")
        self.ended = add(Counter, "sessions_ended", "Ended sessions, by error code or 'done'.", ["code"])
        self.frames = add(Counter, "frames", "Frames, by outcome.", ["outcome"])
        self.limited = add(Counter, "limited", "Sessions refused or ended by a limit, by limit.", ["limit"])
        self.refused = add(Counter, "refused_frames", "Frames refused in whole or in part, by reason.", ["reason"])
        self.delayed_seconds = add(
            Counter, "delayed_seconds", "Seconds for which frames waited for their edge's share of the center's work."
        )
        self.bytes = add(Counter, "wire_bytes", "Bytes of frames received, compressed.")
        self.decompression = add(
            Gauge, "decompression_bytes", "Memory reserved for the compressed streams of sessions."
        )
        self.pending = add(Gauge, "pending_bytes", "Bytes of frames not yet committed.")
        self.commits = add(Counter, "commits", "Group commits.")
        self.commit_seconds = add(Histogram, "commit_seconds", "Time of log write, fsync and index transaction.")
        self.commit_failures = add(Counter, "commit_failures", "Commit attempts that the disk or the catalog refused.")
        self.stalled = add(Gauge, "stalled", "1 while no frame can be made durable.")
        self.credential_reloads = add(
            Counter, "credential_reloads", "Times that changed files of credentials were read."
        )
        self.credentials_stale = add(Gauge, "credentials_stale", "1 while changed files of credentials cannot be used.")
        self.alarms = add(Counter, "alarms", "Alarms, by kind.", ["kind"])

    def _add(self, kind: type[Metric], name: str, text: str, labels: Sequence[str] = ()) -> Metric:
        """Creates a metric of the gateway, and registers it."""
        return kind(f"edgewater_gateway_{name}", text, labels, registry=self.registry)
