"""The gateway: receives frames from edges over gRPC, makes them durable, acknowledges them, and assigns queries.

Started by `center.ops`. It never merges frames or answers queries: the job reads what the gateway has committed.
"""

from center.ingest.gateway import Gateway, GatewayConfig

__all__ = ["Gateway", "GatewayConfig"]
