"""Durable storage: databases (SQLite, PostgreSQL) and the segment files of the frame log.

Called by the stores, the gateway and the job's executors. This package contains nothing about queries and answers. This
file imports nothing, because executors read the frame log and must not load SQLAlchemy. Import
`center.storage.database` or `center.storage.frame_log`.
"""
