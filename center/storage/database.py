"""Opens databases: SQLite by default, PostgreSQL by its URL. No other module depends on which database it is.

The stores rely on these properties:

- A read transaction sees one state of the database (`read_transaction`). On SQLite this state is a WAL snapshot. On
  PostgreSQL the isolation level is REPEATABLE READ, because with the default level each statement sees another state.
- A write transaction reads everything that was committed before it took its locks (`write_transaction`). On SQLite the
  transaction is the lock, from the start of the transaction. On PostgreSQL the locks are rows (``FOR UPDATE``). With
  READ COMMITTED, statements after the lock see the commits of its former owner. With REPEATABLE READ, these statements
  would fail.
- A commit that returned survives a power cut, because acknowledgements depend on it.
- If a server cannot be reached or a lock is never released, `StorageError` is raised within half a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import (
    CTE,
    URL,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    MetaData,
    Select,
    String,
    Table,
    Text,
    case,
    create_engine,
    event,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.schema import CreateColumn
from sqlalchemy.types import TypeDecorator, TypeEngine
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random

from edgewater.base.errors import InvalidConfig, StorageError, installation
from edgewater.runtime.state_release import RELEASE, require_format

BUSY_TIMEOUT_MS = 30_000  # limit: the wait for a lock
"""Milliseconds that a transaction waits for a lock."""
_ACCEPTED = "sqlite:////path/to/file.db or postgresql+psycopg://user:password@host/database"
_UTF8_DATABASE = "a database in UTF8, such as CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
_DDL_LOCK = 0x45574341  # format: any number that no other program takes
"""PostgreSQL's advisory lock under which tables are created."""

_CONNECT_ARGS: dict[str, str | int] = {
    "application_name": "edgewater",
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": BUSY_TIMEOUT_MS,
}
"""libpq's parameters, for which the URL has no values. With libpq's defaults, a client waits two hours for a lost
machine."""

_SETTINGS = f"""
    SELECT set_config(name, required, true)
    FROM (VALUES
        ('synchronous_commit', 'off', 'on'),
        ('lock_timeout', '0', '{BUSY_TIMEOUT_MS}ms'),
        ('idle_in_transaction_session_timeout', '0', '60s')
    ) AS settings (name, unsafe, required)
    WHERE current_setting(name) = unsafe
"""  # nosec B608: of constants only
"""Replaces settings that would break the properties in the module's docstring, until the transaction ends. All other
values of the operator stay. The last setting releases the row locks of a client whose machine was lost during a
transaction."""


class Identifier(TypeDecorator[str]):
    """Column type of an identifier with at most `length` characters.

    Identifiers are compared and ordered by code point, as in Python and SQLite. PostgreSQL's default is the collation
    of the database. With such a collation, an index also breaks when the operating system's collation rules change.
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
    """Column type of text of any length that is not used as a key."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return _without_nul(value)


def table_in(metadata: MetaData) -> Callable[..., Table]:
    """Returns a function that declares a table by its name and columns."""
    return lambda name, *columns: Table(name, metadata, *columns)


def key(kind: type[TypeEngine[Any]] | TypeEngine[Any], *names: str) -> list[Column[Any]]:
    """Returns the columns of a primary key that have one type."""
    return [Column(name, kind, primary_key=True) for name in names]


def required(kind: type[TypeEngine[Any]] | TypeEngine[Any], *names: str, **options: Any) -> list[Column[Any]]:
    """Returns columns of one type, and with the same options, that are never null."""
    return [Column(name, kind, nullable=False, **options) for name in names]


_releases = Table(
    "releases",
    MetaData(),
    Column("store", Identifier(64), primary_key=True),
    Column("format", BigInteger, nullable=False),
    Column("release", Identifier(64), nullable=False),
)
"""The format of each store in the database, and the last release that opened it."""


def _without_nul(value: str | None) -> str | None:
    # PostgreSQL's text cannot contain NUL. A lookup of a name with NUL must return nothing, and must not fail.
    return None if value is None else value.replace("\0", "\ufffd")


def open_engine(url: str) -> Engine:
    """Creates an engine for `read_transaction` and `write_transaction`. The function does not connect to the database.

    Raises:
        InvalidConfig: the URL is not the URL of a supported database.
        StorageError: the directory of SQLite's file cannot be created, or PostgreSQL's driver is missing.
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
    # The rest of the URL may contain a password.
    raise InvalidConfig("database URL", f"{url.partition(':')[0][:32]}:…", _ACCEPTED)


def shown_url(url: URL) -> str:
    """Returns a URL for messages: without the password, and without parameters, which may be one."""
    return url.set(query={}).render_as_string()


def _sqlite(url: URL) -> Engine:
    """Opens SQLite with WAL, ``synchronous=FULL`` and BEGIN IMMEDIATE.

    With WAL, readers never wait. FULL is needed because acknowledgements depend on commits; with NORMAL, a power cut
    may undo the last commits. BEGIN IMMEDIATE is used for every transaction that may write. A transaction that begins
    as a reader and then writes fails at once if another transaction has written since its beginning, whatever the busy
    timeout.
    """
    engine = create_engine(url)
    if url.database:
        try:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StorageError(f"database {shown_url(url)}: {exc.strerror}") from exc

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # `on_begin` emits BEGIN, not the driver.
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        # Enabling WAL ignores the busy timeout when several processes open a new file at once.
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
    """Opens PostgreSQL with READ COMMITTED, whatever the server's default is (see the docstring of the module).

    If the encoding of the database is not UTF8, the first use raises InvalidConfig. With SQL_ASCII, the driver returns
    bytes for text. Other encodings lack characters.

    A connection is tested before it is used (`pool_pre_ping`), so that a restarted server does not count as
    unreachable.

    Settings are of a transaction, and no statement is prepared: a pooler may give each transaction another session.
    """
    # A role or a database may set another client encoding, which may not have all characters.
    connect_args: dict[str, Any] = {k: v for k, v in _CONNECT_ARGS.items() if k not in url.query}
    try:
        engine = create_engine(
            url.set(drivername="postgresql+psycopg"),
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            connect_args=connect_args | {"client_encoding": "utf8", "prepare_threshold": None},
        )
    except ImportError as exc:
        raise StorageError(f"PostgreSQL's driver is missing ({exc}): {installation('postgres')}") from exc

    @event.listens_for(engine, "do_connect")
    def on_do_connect(dialect: Dialect, _record: object, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        connection = dialect.connect(*arguments, **options)
        encoding = connection.info.parameter_status("server_encoding")
        if encoding not in ("UTF8", None):
            connection.close()
            accepted = f"{_UTF8_DATABASE}; see docs/how-to/use-postgresql.md"
            raise InvalidConfig("database URL", shown_url(url), accepted, f"the encoding is {encoding}")
        return connection

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(_SETTINGS)

    return engine


_READ_OPTIONS: dict[str, dict[str, Any]] = {
    "sqlite": {"reads": True},
    "postgresql": {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True},
}


@contextmanager
def write_transaction(engine: Engine) -> Iterator[Connection]:
    """Begins a transaction that may write.

    Raises:
        StorageError: the database raised an error.
    """
    with _as_storage_error(engine), engine.begin() as connection:
        yield connection


@contextmanager
def read_transaction(engine: Engine) -> Iterator[Connection]:
    """Begins a transaction that only reads. All its statements see the same state of the database.

    Raises:
        StorageError: the database raised an error.
    """
    options = _READ_OPTIONS[engine.dialect.name]
    with _as_storage_error(engine), engine.connect() as connection, connection.execution_options(**options).begin():
        yield connection


@contextmanager
def schema_transaction(engine: Engine, tables: MetaData) -> Iterator[Connection]:
    """Begins the first transaction of a store.

    It takes a lock, and creates the store's missing tables and the missing columns that have a default. If it fails,
    the engine's connections are closed.
    """
    try:
        with write_transaction(engine) as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_DDL_LOCK)))
            found = inspect(connection)
            present = set(found.get_table_names()).intersection(tables.tables)
            tables.create_all(connection, [t for t in tables.sorted_tables if t.name not in present], checkfirst=False)
            for name in present:
                _add_columns(connection, tables.tables[name], {column["name"] for column in found.get_columns(name)})
            yield connection
    except BaseException:
        engine.dispose()
        raise


MAX_ADDED = 1 << 53
"""The largest value of a count in the stores. A larger count is stored as this value. An edge may report any count, and
counts add up over edges."""


def require_store_format(
    connection: Connection, store: str, reads: int, *, is_new: bool, oldest: int | None = None
) -> int:
    """Records this release in a store, or refuses the store. Called in the store's `schema_transaction`.

    Args:
        store: name of the store, such as ``catalog``. Two stores may share a database.
        reads: the store format that this release reads and writes.
        is_new: whether the store has no contents yet.
        oldest: the oldest format that the caller migrates; None: `reads`.

    Returns:
        The format of the store's contents. The caller migrates them to `reads`.

    Raises:
        IncompatibleState: another release wrote the store in another format.
    """
    _releases.create(connection, checkfirst=True)
    row = connection.execute(select(_releases.c.format, _releases.c.release).where(_releases.c.store == store)).first()
    if row is None and is_new:
        connection.execute(insert(_releases).values(store=store, format=reads, release=RELEASE))
        return reads
    remedy = "start with an empty database and an empty log_dir, and register the queries again"
    where = f"{store} {shown_url(connection.engine.url)}"
    if row is None or not (reads if oldest is None else oldest) <= row.format < reads:
        require_format(where, None if row is None else (row.format, row.release), reads, remedy)
    assert row is not None, "a store without a format is refused"
    if (row.format, row.release) != (reads, RELEASE):
        connection.execute(update(_releases).where(_releases.c.store == store).values(format=reads, release=RELEASE))
    return int(row.format)


def upsert(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], *, added: Collection[str] = ()
) -> None:
    """Inserts rows, or updates the existing rows with the same primary key. The driver repeats one statement for each
    row.

    Args:
        rows: rows with equal columns. They are written in the order of their keys, so that two writers do not deadlock.
        added: columns whose values, from 0 to `MAX_ADDED`, are added to the values of an existing row, up to
            `MAX_ADDED`. The values of other columns replace the values of the row.
    """
    if not rows:
        return
    keys = [column.name for column in table.primary_key]
    make = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = make(table)
    new = {name: statement.excluded[name] for name in rows[0] if name not in keys}
    changed = {
        name: case((table.c[name] > MAX_ADDED - value, MAX_ADDED), else_=table.c[name] + value)
        if name in added
        else value
        for name, value in new.items()
    }
    ordered = sorted(rows, key=lambda row: [row[key] for key in keys])
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed), ordered)


MAX_AMONG = 500  # limit: bound parameters of a statement
"""The most values of one statement of `rows_among`: no database accepts any number of bound parameters."""
MAX_GIVEN = 128
"""The most rows of one `given` table."""


def given(columns: Mapping[str, Any], count: int) -> CTE:
    """Returns a table of rows that are parameters of the statement (`given_rows`). A statement joins with it instead of
    running once per row.

    SQLAlchemy's own VALUES puts the rows into the statement. Such a statement is compiled each time, which takes 0.4 ms
    per row.

    Args:
        columns: column types by name.
        count: the result of `given_count`.
    """
    rows = (", ".join(f":{name}_{i} AS {name}" for name in columns) for i in range(count))
    typed = [sqlalchemy.column(name, kind) for name, kind in columns.items()]
    return text(" UNION ALL ".join(f"SELECT {row}" for row in rows)).columns(*typed).cte("given")


def rows_among(
    connection: Connection, statement: Select[Any], column: ColumnElement[Any], values: Sequence[Any]
) -> Iterator[Any]:
    """Yields the rows of a statement whose column is one of the values. Reads the rows of some values at a time."""
    for at in range(0, len(values), MAX_AMONG):
        yield from connection.execute(statement.where(column.in_(values[at : at + MAX_AMONG])))


def given_count(rows: int) -> int:
    """Returns the number of rows of the `given` table for `rows` rows: the next power of 2, so that there are few
    statements.
    """
    return 1 << (rows - 1).bit_length()


def given_rows(
    columns: Iterable[str], rows: Sequence[Sequence[str | int]], padding: Sequence[str | int]
) -> dict[str, str | int]:
    """Returns the parameters of the `given` table. Missing rows are replaced with `padding`, a row that joins with no
    other row.
    """
    padded = [*rows, *[padding] * (given_count(len(rows)) - len(rows))]
    names = list(columns)
    return {f"{name}_{i}": value for i, row in enumerate(padded) for name, value in zip(names, row, strict=True)}


def _add_columns(connection: Connection, table: Table, known: AbstractSet[str]) -> None:
    """Adds the columns that an existing table lacks, if the columns have a default, and their indexes. A newer release
    may have added such columns.
    """
    added = [column for column in table.columns if column.name not in known and column.server_default is not None]
    for column in added:
        definition = CreateColumn(column).compile(dialect=connection.dialect)
        connection.execute(text(f'ALTER TABLE "{table.name}" ADD COLUMN {definition}'))
    for index in table.indexes:
        if not set(added).isdisjoint(index.columns):
            index.create(connection, checkfirst=True)


def drop_column(connection: Connection, table: Table, name: str) -> None:
    """Drops a column that a table of an earlier release has. Called in the store's `schema_transaction`."""
    if any(column["name"] == name for column in inspect(connection).get_columns(table.name)):
        connection.execute(text(f'ALTER TABLE "{table.name}" DROP COLUMN "{name}"'))


@contextmanager
def _as_storage_error(engine: Engine) -> Iterator[None]:
    # SQLAlchemy does not wrap the driver's errors everywhere.
    try:
        yield
    except (SQLAlchemyError, engine.dialect.loaded_dbapi.Error) as exc:
        # The message has neither the statement nor its parameters, because they must not reach logs and clients.
        raise StorageError(f"database {shown_url(engine.url)}: {getattr(exc, 'orig', None) or exc}") from exc
