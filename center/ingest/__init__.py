"""The gateway: receives frames from edges over gRPC, makes them durable, acknowledges them, and assigns queries.

`center.ops` starts it. It never merges frames and never answers queries: the job reads the frames that the gateway has
committed. This module imports nothing, so that code that reads credential files need not load gRPC. Use full module
paths, such as `center.ingest.gateway`.
"""
