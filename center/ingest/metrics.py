"""A gateway's metrics, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "edgewater_gateway"
        self.sessions = Gauge(f"{name}_sessions", "Edges connected.", registry=self.registry)
        self.ended = Counter(
            f"{name}_sessions_ended", "Sessions that ended, by error code or 'done'.", ["code"], registry=self.registry
        )
        self.frames = Counter(f"{name}_frames", "Frames by what became of them.", ["outcome"], registry=self.registry)
        self.bytes = Counter(f"{name}_wire_bytes", "Bytes of frames received.", registry=self.registry)
        self.waiting = Gauge(f"{name}_waiting_bytes", "Bytes that wait for their commit.", registry=self.registry)
        self.commits = Counter(f"{name}_commits", "Group commits.", registry=self.registry)
        self.commit_seconds = Histogram(
            f"{name}_commit_seconds", "Log write, fsync and index transaction.", registry=self.registry
        )
        self.commit_failures = Counter(
            f"{name}_commit_failures",
            "Attempts to commit that the disk or the catalog refused.",
            registry=self.registry,
        )
        self.stalled = Gauge(f"{name}_stalled", "1 while nothing can be made durable.", registry=self.registry)
        self.alarms = Counter(
            f"{name}_alarms", "Things that must not happen, by kind.", ["kind"], registry=self.registry
        )
