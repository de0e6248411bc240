"""What is asked of PostgreSQL alone: row locks that meet, a server that dies, sessions and their settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, event
from sqlalchemy.engine import make_url

from center.catalog import Catalog, ComponentHeartbeat, ComponentRegistry, IndexOutcome
from center.storage.database import open_engine, read_transaction, write_transaction
from edgewater.base.errors import StorageError
from edgewater.model.registered_query import query_key
from edgewater.wire import QueryRef
from tests.center.catalog_world import frame, hello, spec
from tests.center.postgres import PostgresServer
from tests.center.results_world import MINUTE, REF, Job, total
from tests.center.snapshots import snapshot
from tests.insides import engine_of

OpenCatalog = Callable[[], Catalog]


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture
def ref(catalog: Catalog) -> QueryRef:
    """A live query of which one frame is indexed."""
    ref = catalog.queries.register(spec(), 1)[0].ref
    hello(catalog)
    assert catalog.frames.index([frame(ref, 0)]) == [IndexOutcome.NEW]
    return ref


def before(engine: Engine, fragment: str, action: Callable[[], object]) -> None:
    """Once, before a statement that contains the fragment, something else happens."""
    waiting = [action]

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if fragment in statement and waiting:
            waiting.pop()()

    event.listen(engine, "before_cursor_execute", look)


def setting(engine: Engine, name: str) -> str:
    with write_transaction(engine) as connection:
        return str(connection.exec_driver_sql(f"SHOW {name}").scalar_one())


@pytest.mark.slow
def test_of_two_that_drop_frames_of_one_segment_one_returns_it(
    catalog: Catalog, open_catalog: OpenCatalog, ref: QueryRef
) -> None:
    hours = catalog.queries.register(spec("hours"), 1)[0].ref
    assert catalog.frames.index([frame(hours, 1)]) == [IndexOutcome.NEW]
    other, dropped = open_catalog(), list[str]()
    with ThreadPoolExecutor() as pool:
        waiting: list[Future[list[str]]] = []

        def meanwhile() -> None:
            waiting.append(pool.submit(other.frames.drop, {query_key(hours): 1}))

        before(engine_of(catalog), "DELETE FROM frames", meanwhile)
        dropped += catalog.frames.drop({"miles@1": 1})
        dropped += waiting[0].result()
    assert dropped == ["miles@1/w-1.frames"]


@pytest.mark.slow
def test_a_frame_that_meets_its_querys_deletion_is_discarded(
    catalog: Catalog, open_catalog: OpenCatalog, ref: QueryRef
) -> None:
    other = open_catalog()
    before(engine_of(catalog), "FROM queries", lambda: other.queries.delete("miles", 2))
    assert catalog.frames.index([frame(ref, 1)]) == [IndexOutcome.DISCARDED]
    assert catalog.frames.last_positions() == {"miles@1": 1}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["INSERT INTO frames", "UPDATE incarnations"])
def test_a_server_killed_in_mid_transaction_costs_time_and_nothing_else(
    postgres: PostgresServer, catalog: Catalog, open_catalog: OpenCatalog, ref: QueryRef, moment: str
) -> None:
    bystander, sleeper = open_catalog(), open_catalog()
    version = sleeper.version()  # Its connection lies in its pool while the server dies and comes back.
    before(engine_of(catalog), moment, postgres.kill)
    try:
        for attempt in range(2):
            with pytest.raises(StorageError, match="closed" if attempt == 0 else "refused|closed") as caught:
                catalog.frames.index([frame(ref, 1)])
            assert "***" in caught.value.message, "the URL is told, its password is not"
        for ask in (bystander.version, bystander.frames.last_positions, lambda: bystander.queries.delete("miles", 1)):
            with pytest.raises(StorageError):
                ask()
        with pytest.raises(StorageError):
            open_catalog()
    finally:
        postgres.start()
    assert sleeper.version() == version
    assert bystander.frames.last_positions() == {"miles@1": 1}
    assert catalog.frames.index([frame(ref, 0), frame(ref, 1)]) == [IndexOutcome.DUPLICATE, IndexOutcome.NEW]
    assert [e.seq for e in bystander.frames.entries("miles@1", 0, 9)] == [0, 1]


@pytest.mark.parametrize("moment", ["INSERT INTO deltas", "INSERT INTO answers", "INSERT INTO consumed"])
@pytest.mark.slow
def test_a_batch_whose_server_dies_is_applied_once_when_it_is_back(
    postgres: PostgresServer, open_job: Callable[..., Job], moment: str
) -> None:
    job = open_job("a", "b", lateness="10m")
    frames = [job.frame("a", MINUTE, m0=1), job.frame("b", MINUTE, m0=2)]
    state = snapshot(job.ledger, REF)
    before(engine_of(job.store), moment, postgres.kill)
    try:
        for _ in range(2):
            with pytest.raises(StorageError):
                job.batch(*frames)
    finally:
        postgres.start()
    assert job.store.tick(job.ledger, [], 0) == [], "the ledger is loaded again before anything else happens"
    assert snapshot(job.ledger, REF) == state
    (emission,) = job.batch(*frames)
    assert (emission.revision, total(job.store.answer(REF, 0, 1).synopsis)) == (1, 3)
    assert job.batch(*frames) == []


def test_heartbeats_resume_when_the_server_is_back(postgres: PostgresServer, url: str) -> None:
    registry, beat = ComponentRegistry(url), ComponentHeartbeat("job", "host:1", "", 0, 5)
    postgres.kill()
    try:
        with pytest.raises(StorageError):
            registry.record(beat)
    finally:
        postgres.start()
    registry.record(beat)
    assert registry.heartbeats() == [beat]
    registry.close()


def test_a_lock_that_nobody_gives_back_is_a_storage_error(url: str, catalog: Catalog, ref: QueryRef) -> None:
    impatient = Catalog(f"{url}%20-c%20lock_timeout=50ms")
    with write_transaction(engine_of(catalog)) as connection:
        connection.exec_driver_sql("SELECT 1 FROM queries FOR UPDATE")
        with pytest.raises(StorageError, match="lock timeout"):
            impatient.frames.index([frame(ref, 1)])
    assert impatient.frames.index([frame(ref, 1)]) == [IndexOutcome.NEW]
    impatient.close()


@pytest.mark.slow
def test_a_commit_is_durable_whatever_the_server_is_set_to(postgres: PostgresServer, url: str) -> None:
    engine = open_engine(url)
    with write_transaction(engine) as connection:
        theirs = "SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit'"
        assert connection.exec_driver_sql(theirs).scalar_one() == "off"
    assert setting(engine, "synchronous_commit") == "on"
    engine.dispose()


def test_transactions_have_the_isolation_they_rest_on_whatever_the_server_is_set_to(url: str) -> None:
    engine = open_engine(url)
    for _ in range(2):  # The second time on a connection that has served the other kind.
        assert setting(engine, "transaction_isolation") == "read committed"
        with read_transaction(engine) as connection:
            assert connection.exec_driver_sql("SHOW transaction_isolation").scalar_one() == "repeatable read"
            assert connection.exec_driver_sql("SHOW transaction_read_only").scalar_one() == "on"
    engine.dispose()


def test_settings_that_the_url_has_stay_and_those_that_wait_for_ever_do_not(url: str) -> None:
    engine = open_engine(f"{url}%20-c%20lock_timeout=5s%20-c%20synchronous_commit=remote_apply&application_name=mine")
    names = ("lock_timeout", "synchronous_commit", "application_name", "idle_in_transaction_session_timeout")
    assert [setting(engine, name) for name in names] == ["5s", "remote_apply", "mine", "1min"]
    engine.dispose()


@pytest.mark.slow
def test_stores_behind_a_pooler_of_transactions_commit_durably_whatever_other_clients_set(
    postgres: PostgresServer, pgbouncer: str
) -> None:
    with postgres.pooled(pgbouncer) as address, psycopg.connect(address, autocommit=True) as other:
        catalog, registry = Catalog(address), ComponentRegistry(address)
        other.execute("SET synchronous_commit = off")
        other.execute("SET lock_timeout = 0")
        with write_transaction(engine_of(catalog)) as connection:
            names = ("synchronous_commit", "lock_timeout", "idle_in_transaction_session_timeout")
            found = [connection.exec_driver_sql(f"SHOW {name}").scalar_one() for name in names]
        assert found == ["on", "30s", "1min"]
        for i in range(8):  # psycopg prepares a statement when it comes for the sixth time
            ref = catalog.queries.register(spec(f"pooled{i}"), 1)[0].ref
            if i == 0:
                hello(catalog)
            assert catalog.frames.index([frame(ref, i)]) == [IndexOutcome.NEW]
            registry.record(ComponentHeartbeat("job", "host:1", "", i, 5))
        assert len(catalog.frames.last_positions()) == 8
        registry.close()
        catalog.close()


def test_any_postgresql_url_is_opened_with_the_driver_that_comes_along(url: str) -> None:
    Catalog(url.replace("postgresql+psycopg://", "postgresql://")).close()


def test_a_missing_driver_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StorageError, match=r"pip install '\.\[postgres\]'"):
        open_engine("postgresql://localhost/edgewater")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("component", "store", "encoding"),
    [("gateway", "CATALOG_URL", "SQL_ASCII"), ("api", "RESULTS_URL", "SQL_ASCII"), ("job", "CATALOG_URL", "LATIN1")],
)
def test_a_component_refuses_a_database_that_is_not_in_utf8(
    postgres: PostgresServer, tmp_path: Path, component: str, store: str, encoding: str
) -> None:
    url = postgres.new_database_in(encoding)
    given = {f"EDGEWATER_CENTER__{store}": url, "EDGEWATER_CENTER__DATA_DIR": str(tmp_path)}
    listen = [f"--set={part}.listen=127.0.0.1:0" for part in ("gateway", "api")]
    command = [sys.executable, "-m", "edgewater", "center", component, *listen]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | given, check=False)

    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("edgewater: ")]
    assert encoding in line and "UTF8" in line
    assert make_url(url).password not in done.stderr


def test_text_is_utf8_whatever_encoding_the_role_has_for_its_clients(postgres: PostgresServer) -> None:
    engine = open_engine(f"{postgres.new_database()}%20-c%20client_encoding%3DSQL_ASCII")
    assert setting(engine, "client_encoding") == "UTF8"
    engine.dispose()
