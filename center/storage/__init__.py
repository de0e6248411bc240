"""Durable storage: databases (SQLite, PostgreSQL) and the frame log's segment files.

Called by the stores, the gateway and the job's executors; it knows neither queries nor answers. Nothing is imported
here: executors read the frame log and must not load SQLAlchemy. Import `center.storage.database` or
`center.storage.frame_log`.
"""
