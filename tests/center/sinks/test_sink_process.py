"""The process of the sinks: threads that start and end with definitions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from center.sinks.process import SinkProcess
from tests.center.api.conftest import T0, Desk
from tests.center.postgres import PostgresServer
from tests.center.sinks.test_postgres_sink import Warehouse
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def warehouse(desk: Desk, tmp_path: Path, postgres: PostgresServer) -> Warehouse:
    return Warehouse(desk, tmp_path, postgres)


@pytest.fixture
def process(desk: Desk, warehouse: Warehouse, tmp_path: Path) -> Iterator[SinkProcess]:
    desk.now = time.time_ns() // 1_000_000
    made = SinkProcess(
        [],
        desk.catalog,
        desk.results,
        warehouse.store,
        owner="host:1",
        now_ms=lambda: time.time_ns() // 1_000_000,
        listed=[str(tmp_path / "url"), "NOT_SET_ANYWHERE"],
    )
    stop = threading.Event()
    thread = threading.Thread(target=made.run, args=[stop])
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join(90)
        assert not thread.is_alive()


def test_a_sink_that_hangs_delays_no_other_one(
    desk: Desk, warehouse: Warehouse, process: SinkProcess, tmp_path: Path
) -> None:
    secret = tmp_path / "url"
    secret.write_text(warehouse.url)
    document = {"kind": "postgres", "url": {"file": str(secret)}, "schema": f"{warehouse.schema}_a"}
    query = desk.register(lateness="9h")
    warehouse.store.define("first", document)
    until(lambda: warehouse.store.status("first").owner and not warehouse.store.status("first").problem)
    positions = f"{warehouse.schema}_a.edgewater_marks"
    until(lambda: warehouse.ask("SELECT to_regclass(%s)", positions) != [(None,)])
    with psycopg.connect(warehouse.url) as connection:
        connection.execute(f"LOCK TABLE {positions}")  # type: ignore[arg-type]
        desk.report(query, "jfk", T0, {"UA": 3})
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = %s::regclass"
        until(lambda: connection.execute(waiting, [positions]).fetchone() == (1,))
        warehouse.store.define("first", {**document, "queries": ["flights"]})
        warehouse.store.define("second", {**document, "schema": f"{warehouse.schema}_b"})
        until(lambda: warehouse.store.status("second").answer_id == 1)
        assert warehouse.store.status("first").answer_id <= 0
    until(lambda: warehouse.store.status("first").answer_id == 1)
    assert process.problems() == []
