"""Every kind of sink keeps the contract of `center.sinks.testing`, on its real system."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import confluent_kafka
import duckdb
import polars
import psycopg
import pyarrow as pa
import pyarrow.dataset
import pytest
from sqlalchemy.engine import make_url

from center.sinks import SinkContext
from center.sinks.base import Sink
from center.sinks.kafka import KIND as KAFKA
from center.sinks.kafka import KafkaSinkConfig
from center.sinks.lake import DELTA, ICEBERG, PARQUET, DeltaConfig, IcebergConfig, ParquetConfig
from center.sinks.postgresql import KIND as POSTGRES
from center.sinks.postgresql import PostgresConfig
from center.sinks.testing import CASES, Contents, Subject
from edgewater.model.timestamps import parse_time
from sim.demo.brokers import KafkaBroker
from tests.center.postgres import PostgresServer

NUMBERS = itertools.count(1)


def contents_of(rows: Any) -> Contents:
    found: dict[int, dict[str | None, int]] = {}
    for start_ms, key, n in rows:
        window = found.setdefault(int(start_ms), {})
        assert key not in window, "a double"
        window[key] = n
    return found


class Postgres:
    only_final = False

    def __init__(self, server: PostgresServer) -> None:
        self.url = make_url(server.new_database()).set(drivername="postgresql", query={}).render_as_string(False)
        self.schema = f"kit_{make_url(server.new_database()).query['options'].rpartition('_')[2]}"  # type: ignore[union-attr]

    def sink(self, context: SinkContext) -> Sink:
        return POSTGRES.sink(PostgresConfig.model_validate({"url": self.url, "schema": self.schema}), context)

    def contents(self) -> Contents:
        with psycopg.connect(self.url) as connection:
            text = f"SELECT extract(epoch FROM window_start) * 1000, k, n FROM {self.schema}.kit"
            return contents_of(connection.execute(text).fetchall())


class Parquet:
    only_final = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def sink(self, context: SinkContext) -> Sink:
        return PARQUET.sink(ParquetConfig(path=self.path), context)

    def contents(self) -> Contents:
        """As DuckDB reads them."""
        if not list(self.path.rglob("*.parquet")):
            return {}
        files = f"read_parquet('{self.path}/kit_v3/*/*.parquet', hive_partitioning=true)"
        return contents_of(duckdb.sql(f"SELECT epoch_ms(window_start), k, n FROM {files}").fetchall())


class Delta:
    only_final = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def sink(self, context: SinkContext) -> Sink:
        return DELTA.sink(DeltaConfig(path=str(self.path)), context)

    def contents(self) -> Contents:
        """As polars reads it."""
        frame = polars.read_delta(str(self.path / "kit_v3")).select(polars.col("window_start").dt.epoch("ms"), "k", "n")
        return contents_of(frame.iter_rows())


class Iceberg:
    only_final = True

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.properties = {"type": "sql", "uri": f"sqlite:///{path}/catalog.db", "warehouse": f"file://{path}"}

    def sink(self, context: SinkContext) -> Sink:
        return ICEBERG.sink(IcebergConfig.model_validate({"catalog": self.properties}), context)

    def contents(self) -> Contents:
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("edgewater", **self.properties)
        rows = catalog.load_table("edgewater.kit_v3").scan().to_arrow()
        starts = rows.column("window_start").cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
        return contents_of(
            zip(starts.to_pylist(), rows.column("k").to_pylist(), rows.column("n").to_pylist(), strict=True)
        )


class Kafka:
    only_final = False

    def __init__(self, broker: KafkaBroker) -> None:
        self.broker, self.topic = broker, f"answers-{next(NUMBERS)}"

    def sink(self, context: SinkContext) -> Sink:
        options = {"brokers": [self.broker.address], "topic": self.topic}
        return KAFKA.sink(KafkaSinkConfig.model_validate(options), context)

    def contents(self) -> Contents:
        """As a consumer sees a topic that is compacted: the last value of each key."""
        newest: dict[str, Any] = {}
        groups = {"group.id": "reader", "enable.partition.eof": True, "isolation.level": "read_committed"}
        consumer = confluent_kafka.Consumer({"bootstrap.servers": self.broker.address, **groups})
        consumer.assign([confluent_kafka.TopicPartition(self.topic, 0, confluent_kafka.OFFSET_BEGINNING)])
        while (message := consumer.poll(10)) is not None and message.error() is None:
            newest[message.key().decode()] = message.value()
        consumer.close()
        rows = [json.loads(value) for value in newest.values() if value is not None]
        return contents_of((parse_time(r["window_start"]), r["k"], r["n"]) for r in rows if "k" in r)


SUBJECTS: Mapping[str, Callable[[pytest.FixtureRequest, Path], Subject]] = {
    "postgres": lambda request, _: Postgres(request.getfixturevalue("postgres")),
    "kafka": lambda request, _: Kafka(request.getfixturevalue("broker")),
    "parquet": lambda _, path: Parquet(path / "answers"),
    "delta": lambda _, path: Delta(path / "answers"),
    "iceberg": lambda _, path: Iceberg(path / "answers"),
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    made = KafkaBroker(tmp_path_factory.mktemp("kafka"))
    made.start()
    yield made
    made.kill()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:pyiceberg.*", "ignore::UserWarning:pyiceberg.*")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", SUBJECTS)
def test_the_sink_keeps_the_contract(
    kind: str, case: Callable[[Subject], None], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case(SUBJECTS[kind](request, tmp_path))
