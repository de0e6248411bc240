"""OpenTelemetry's protocol: logs, metrics and spans that SDKs and collectors send.

`kind` has the options and the receiver, `messages` reads requests, `columns` and `metrics` make columns of them.
"""

from edge.sources.otlp.kind import KIND, OtlpConfig, OtlpReceiver

__all__ = ["KIND", "OtlpConfig", "OtlpReceiver"]
