"""The systems that sinks write to, as a reader of each sees them."""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import confluent_kafka
import duckdb
import polars
import psycopg
import pyarrow as pa
import pytest
from sqlalchemy.engine import make_url

from center.sinks import SinkContext, read_definition
from center.sinks.base import Sink
from center.sinks.testing import Contents
from edgewater.base.timestamps import parse_time
from tests.brokers import KafkaBroker
from tests.center.postgres import PostgresServer

NUMBERS = itertools.count(1)


class System(ABC):
    """A system of its own for a test.

    Attributes:
        document: the definition of a sink that writes to it.
    """

    only_final = True
    document: dict[str, Any]

    def sink(self, context: SinkContext) -> Sink:
        """Returns a sink of the center's kit."""
        return read_definition("kit", self.document).make(context)

    def contents(self) -> Contents:
        """Returns what a reader sees of the query of the kit."""
        return self.read("kit", 3, "k")

    def read(self, query: str, version: int, key: str) -> Contents:
        """Returns the value of `n` per window and group, in the newest revision of each window."""
        found: dict[int, dict[int, dict[str | None, int]]] = {}
        for start_ms, group, n, revision in self.rows(query, version, key):
            window = found.setdefault(int(start_ms), {}).setdefault(revision, {})
            assert group not in window, "a double"
            window[group] = n
        assert self.only_final or all(len(revisions) == 1 for revisions in found.values())
        return {start_ms: revisions[max(revisions)] for start_ms, revisions in found.items()}

    @abstractmethod
    def rows(self, query: str, version: int, key: str) -> Iterable[tuple[Any, ...]]:
        """Returns start in ms, group, `n` and revision of each row."""


class Postgres(System):
    only_final = False

    def __init__(self, server: PostgresServer) -> None:
        url = make_url(server.new_database())
        self.schema = f"sink{next(NUMBERS)}"
        self.url = url.set(drivername="postgresql", query={}).render_as_string(hide_password=False)
        self.document = {"kind": "postgres", "url": self.url, "schema": self.schema}

    def rows(self, query: str, version: int, key: str) -> Iterable[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            text = f"SELECT extract(epoch FROM window_start) * 1000, {key}, n, revision FROM {self.schema}.{query}"
            return connection.execute(text).fetchall()


class Parquet(System):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.document = {"kind": "parquet", "path": str(path), "batch": "0s"}

    def rows(self, query: str, version: int, key: str) -> Iterable[tuple[Any, ...]]:
        """As DuckDB reads them."""
        if not list(self.path.glob(f"{query}_v{version}/*/*.parquet")):
            return []
        files = f"read_parquet('{self.path}/{query}_v{version}/*/*.parquet', hive_partitioning=true)"
        return duckdb.sql(f"SELECT epoch_ms(window_start), {key}, n, revision FROM {files}").fetchall()


class Delta(System):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.document = {"kind": "delta", "path": str(path), "batch": "0s"}

    def rows(self, query: str, version: int, key: str) -> Iterable[tuple[Any, ...]]:
        """As polars reads it."""
        frame = polars.read_delta(str(self.path / f"{query}_v{version}"))
        return frame.select(polars.col("window_start").dt.epoch("ms"), key, "n", "revision").iter_rows()


class Iceberg(System):
    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.properties = {"type": "sql", "uri": f"sqlite:///{path}/catalog.db", "warehouse": f"file://{path}"}
        self.document = {"kind": "iceberg", "catalog": self.properties, "batch": "0s"}

    def rows(self, query: str, version: int, key: str) -> Iterable[tuple[Any, ...]]:
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("edgewater", **self.properties)
        rows = catalog.load_table(f"edgewater.{query}_v{version}").scan().to_arrow()
        starts = rows.column("window_start").cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
        columns = starts, rows.column(key), rows.column("n"), rows.column("revision")
        return zip(*(column.to_pylist() for column in columns), strict=True)


class Kafka(System):
    only_final = False

    def __init__(self, broker: KafkaBroker) -> None:
        self.broker, self.topic = broker, f"answers-{next(NUMBERS)}"
        self.document = {"kind": "kafka", "brokers": [broker.address], "topic": self.topic}

    def messages(self) -> list[tuple[str, bytes | None]]:
        found = []
        groups = {"group.id": "reader", "enable.partition.eof": True, "isolation.level": "read_committed"}
        with closing(confluent_kafka.Consumer({"bootstrap.servers": self.broker.address, **groups})) as consumer:
            consumer.assign([confluent_kafka.TopicPartition(self.topic, 0, confluent_kafka.OFFSET_BEGINNING)])
            while (message := consumer.poll(10)) is not None and message.error() is None:
                found.append(((message.key() or b"{}").decode(), message.value()))
        return found

    def newest(self) -> dict[str, dict[str, Any]]:
        """As a consumer sees a topic that is compacted: the last value of each key."""
        return {key: json.loads(value) for key, value in dict(self.messages()).items() if value is not None}

    def values(self, query: str, version: int) -> list[dict[str, Any]]:
        of = {"query": query, "version": version}.items()
        return [value for key, value in self.newest().items() if of <= json.loads(key).items()]

    def rows(self, query: str, version: int, key: str) -> Iterable[tuple[Any, ...]]:
        values = self.values(query, version)
        return [(parse_time(v["window_start"]), v[key], v["n"], v["revision"]) for v in values if key in v]


SYSTEMS: Mapping[str, Callable[[pytest.FixtureRequest, Path], System]] = {
    "postgres": lambda request, _: Postgres(request.getfixturevalue("postgres")),
    "kafka": lambda request, _: Kafka(request.getfixturevalue("broker")),
    "parquet": lambda _, path: Parquet(path / "answers"),
    "delta": lambda _, path: Delta(path / "answers"),
    "iceberg": lambda _, path: Iceberg(path / "answers"),
}
