"""The metrics of a gateway."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class GatewayMetrics:
    """The metrics of one gateway process, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "edgewater_gateway"
        self.sessions = Gauge(f"{name}_sessions", "Connected edges.", registry=self.registry)
        self.ended = Counter(
            f"{name}_sessions_ended", "Ended sessions, by error code or 'done'.", ["code"], registry=self.registry
        )
        self.frames = Counter(f"{name}_frames", "Frames, by outcome.", ["outcome"], registry=self.registry)
        self.limited = Counter(
            f"{name}_limited", "Sessions refused or ended by a limit, by limit.", ["limit"], registry=self.registry
        )
        self.refused = Counter(
            f"{name}_refused_frames",
            "Frames refused in whole or in part, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.delayed_seconds = Counter(
            f"{name}_delayed_seconds",
            "Seconds for which frames waited for their edge's share of the center's work.",
            registry=self.registry,
        )
        self.bytes = Counter(f"{name}_wire_bytes", "Bytes of frames received, compressed.", registry=self.registry)
        self.decompression = Gauge(
            f"{name}_decompression_bytes",
            "Memory reserved for the compressed streams of sessions.",
            registry=self.registry,
        )
        self.pending = Gauge(f"{name}_pending_bytes", "Bytes of frames not yet committed.", registry=self.registry)
        self.commits = Counter(f"{name}_commits", "Group commits.", registry=self.registry)
        self.commit_seconds = Histogram(
            f"{name}_commit_seconds", "Time of log write, fsync and index transaction.", registry=self.registry
        )
        self.commit_failures = Counter(
            f"{name}_commit_failures", "Commit attempts that the disk or the catalog refused.", registry=self.registry
        )
        self.stalled = Gauge(f"{name}_stalled", "1 while no frame can be made durable.", registry=self.registry)
        self.credential_reloads = Counter(
            f"{name}_credential_reloads", "Times that changed files of credentials were read.", registry=self.registry
        )
        self.credentials_stale = Gauge(
            f"{name}_credentials_stale", "1 while changed files of credentials cannot be used.", registry=self.registry
        )
        self.alarms = Counter(f"{name}_alarms", "Alarms, by kind.", ["kind"], registry=self.registry)
