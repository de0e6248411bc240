"""The gateway: receives frames from edges over gRPC, makes them durable, acknowledges them, and assigns queries.

Started by `center.ops`. It never merges frames or answers queries: the job reads what the gateway has committed.
Nothing is imported here, so that what reads credential files need not load gRPC. Use full module paths, such as
`center.ingest.gateway`.
"""
