"""Receives the protocol of OpenTelemetry: logs, metrics and spans from SDKs and collectors.

`kind` has the options and the receiver. `messages` reads requests. `columns` and `metrics` convert requests to columns.
"""

from edge.sources.otlp.kind import KIND, OtlpConfig, OtlpReceiver
