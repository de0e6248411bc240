"""How a database is opened: SQLite by default, PostgreSQL by its URL. Nothing else knows which it is.

What the stores rest on, and what makes it so:

- A transaction that reads sees one state of the database: `read_transaction`. On SQLite that is WAL's; on
  PostgreSQL REPEATABLE READ, because its default shows each statement another state.
- A transaction that writes reads what was committed before it took its locks: `write_transaction`. On SQLite the
  transaction is the lock, from its first moment. On PostgreSQL the locks are rows (``FOR UPDATE``), and
  READ COMMITTED lets the statements that follow see what the former owner of the lock has committed;
  under REPEATABLE READ they would fail instead.
- A commit that returned survives a power cut, since acknowledgements rest on it.
- A server that is away, or a lock that nobody gives back, is a `StorageError` within half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Dialect, Engine, MetaData, String, Text, create_engine, event, func, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.types import TypeDecorator, TypeEngine
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random

from edgewater.errors import InvalidConfig, StorageError

BUSY_TIMEOUT_MS = 30_000
"""How long a transaction waits for another's lock."""
_ACCEPTED = "sqlite:////path/to/file.db or postgresql+psycopg://user:password@host/database"
_TABLES_LOCK = 0x45574341
"""PostgreSQL's advisory lock under which tables are made."""

_LINK: dict[str, str | int] = {
    "application_name": "edgewater",
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": BUSY_TIMEOUT_MS,
}
"""libpq's parameters, unless the URL has them. Its own defaults wait two hours for a machine that is gone."""

_SESSION = f"""
    SELECT set_config(name, ours, false)
    FROM (VALUES
        ('synchronous_commit', 'off', 'on'),
        ('lock_timeout', '0', '{BUSY_TIMEOUT_MS}ms'),
        ('idle_in_transaction_session_timeout', '0', '60s')
    ) AS settings (name, theirs, ours)
    WHERE current_setting(name) = theirs
"""
"""Settings of a session that would break a promise are replaced; what somebody chose on purpose stays.
The last one takes the row locks from a client whose machine has gone away in mid-transaction."""


class Identifier(TypeDecorator[str]):
    """Text that identifies something, at most `length` characters.

    Compared and ordered by code point, as Python and SQLite do: PostgreSQL would go by its database's
    language, under which an index also breaks when the operating system's rules change.
    """

    impl = String
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        collation = "C" if dialect.name == "postgresql" else None
        return dialect.type_descriptor(String(self.length, collation=collation))

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return _without_nul(value)


class FreeText(TypeDecorator[str]):
    """Text of any length, for people or for programs, by which nothing is looked up."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return _without_nul(value)


def _without_nul(value: str | None) -> str | None:
    # PostgreSQL's text holds no NUL. Whoever looks for a name with one is to find nothing, not an error.
    return None if value is None else value.replace("\0", "\ufffd")


def open_engine(url: str) -> Engine:
    """An engine for `read_transaction` and `write_transaction`. Does not connect yet.

    Raises:
        InvalidConfig: not a URL of a database that Edgewater runs on.
        StorageError: the directory for SQLite's file cannot be made, or PostgreSQL's driver is missing.
    """
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
    except ArgumentError:
        backend = ""
    if backend == "sqlite":
        return _sqlite(parsed)
    if backend == "postgresql":
        return _postgresql(parsed)
    # The rest of it may carry a password.
    raise InvalidConfig("database URL", f"{url.partition(':')[0][:32]}:…", _ACCEPTED)


def _sqlite(url: URL) -> Engine:
    """WAL, so that readers never wait; ``synchronous=FULL``, because an acknowledgement rests on the
    commit and NORMAL may lose the last ones with the power; and BEGIN IMMEDIATE for every transaction
    that may write, because one that begins as a reader and then writes fails at once if somebody else
    has written in between, whatever the busy timeout.
    """
    engine = create_engine(url)
    if url.database:
        try:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StorageError(f"database {url.render_as_string()}: {exc.strerror}") from exc

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # SQLAlchemy's own BEGIN below, not the driver's.
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        # Turning WAL on does not honour the timeout when several processes open a new file at once.
        locked = retry_if_exception_type(connection.OperationalError)
        for attempt in Retrying(retry=locked, wait=wait_random(0, 0.05), stop=stop_after_delay(10), reraise=True):
            with attempt:
                connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        reads = connection.get_execution_options().get("reads", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _postgresql(url: URL) -> Engine:
    """READ COMMITTED whatever the server's default is; see above. A connection is tried before it is
    used (`pool_pre_ping`), so that a server that came back is not taken for one that is away."""
    link = {name: value for name, value in _LINK.items() if name not in url.query}
    try:
        engine = create_engine(
            url.set(drivername="postgresql+psycopg"),
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            connect_args=link,
        )
    except ImportError as exc:
        raise StorageError(f"PostgreSQL's driver is missing ({exc}): pip install 'edgewater[postgres]'") from exc

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(_SESSION)
        connection.commit()  # A setting that is rolled back is forgotten.

    return engine


_READS: dict[str, dict[str, Any]] = {
    "sqlite": {"reads": True},
    "postgresql": {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True},
}


@contextmanager
def write_transaction(engine: Engine) -> Iterator[Connection]:
    """A transaction that may write. Raises StorageError for whatever the database refuses."""
    with _refusals(engine), engine.begin() as connection:
        yield connection


@contextmanager
def read_transaction(engine: Engine) -> Iterator[Connection]:
    """A transaction that only reads, from one state of the database. Raises StorageError."""
    options = _READS[engine.dialect.name]
    with _refusals(engine), engine.connect() as connection, connection.execution_options(**options).begin():
        yield connection


@contextmanager
def schema_transaction(engine: Engine, tables: MetaData) -> Iterator[Connection]:
    """A store's first transaction, in which those tables are made that are not there yet.

    Nobody else makes any meanwhile. If it fails, no connection is left behind.
    """
    try:
        with write_transaction(engine) as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_TABLES_LOCK)))
            tables.create_all(connection)
            yield connection
    except BaseException:
        engine.dispose()
        raise


@contextmanager
def _refusals(engine: Engine) -> Iterator[None]:
    # The driver's own errors come through unwrapped where SQLAlchemy only hands a connection on.
    try:
        yield
    except (SQLAlchemyError, engine.dialect.loaded_dbapi.Error) as exc:
        # Without the statement and its parameters: the message reaches logs and clients, those must not.
        told = " ".join(str(getattr(exc, "orig", None) or exc).split())
        raise StorageError(f"database {engine.url.render_as_string()}: {told}") from exc
