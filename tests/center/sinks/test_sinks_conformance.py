"""Every kind of sink keeps the contract of `center.sinks.testing`, on its real system."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import duckdb
import polars
import psycopg
import pyarrow as pa
import pyarrow.dataset
import pytest
from sqlalchemy.engine import make_url

from center.sinks import SinkContext
from center.sinks.base import Sink
from center.sinks.lake import DELTA, ICEBERG, PARQUET, DeltaConfig, IcebergConfig, ParquetConfig
from center.sinks.postgresql import KIND as POSTGRES
from center.sinks.postgresql import PostgresConfig
from center.sinks.testing import CASES, Contents, Subject
from tests.center.postgres import PostgresServer


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


SUBJECTS: Mapping[str, Callable[[pytest.FixtureRequest, Path], Subject]] = {
    "postgres": lambda request, _: Postgres(request.getfixturevalue("postgres")),
    "parquet": lambda _, path: Parquet(path / "answers"),
    "delta": lambda _, path: Delta(path / "answers"),
    "iceberg": lambda _, path: Iceberg(path / "answers"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:pyiceberg.*", "ignore::UserWarning:pyiceberg.*")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", SUBJECTS)
def test_the_sink_keeps_the_contract(
    kind: str, case: Callable[[Subject], None], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case(SUBJECTS[kind](request, tmp_path))
