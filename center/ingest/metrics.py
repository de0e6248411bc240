"""The metrics of a gateway."""

from __future__ import annotations

from edgewater.runtime.metrics import Metrics


class GatewayMetrics(Metrics):
    """The metrics of one gateway process."""

    def __init__(self) -> None:
        super().__init__("edgewater_gateway_")
        self.sessions = self.gauge("sessions", "Connected edges.")
        self.ended = self.counter("sessions_ended", "Ended sessions, by error code or 'done'.", "code")
        self.frames = self.counter("frames", "Frames, by outcome.", "outcome")
        self.limited = self.counter("limited", "Sessions refused or ended by a limit, by limit.", "limit")
        self.refused = self.counter("refused_frames", "Frames refused in whole or in part, by reason.", "reason")
        text = "Seconds for which frames waited for their edge's share of the center's work."
        self.delayed_seconds = self.counter("delayed_seconds", text)
        self.bytes = self.counter("wire_bytes", "Bytes of frames received, compressed.")
        self.decompression = self.gauge(
            "decompression_bytes", "Memory reserved for the compressed streams of sessions."
        )
        self.pending = self.gauge("pending_bytes", "Bytes of frames not yet committed.")
        self.commits = self.counter("commits", "Group commits.")
        self.commit_seconds = self.histogram("commit_seconds", "Time of log write, fsync and index transaction.")
        self.commit_failures = self.counter("commit_failures", "Commit attempts that the disk or the catalog refused.")
        self.stalled = self.gauge("stalled", "1 while no frame can be made durable.")
        self.credential_reloads = self.counter(
            "credential_reloads", "Times that changed files of credentials were read."
        )
        self.credentials_stale = self.gauge("credentials_stale", "1 while changed files of credentials cannot be used.")
        self.alarms = self.counter("alarms", "Alarms, by kind.", "kind")
