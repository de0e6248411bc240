"""The sink `postgres`: a typed table per query and version, with intervals and quality, in a PostgreSQL database.

- ``edgewater_windows`` has a row per window of each query, with the newest answer's statement as JSON.
- ``flights_v3`` has a row per window and group of version 3 of the query `flights`.
- The view ``flights`` has the rows of all versions of the query.

One transaction replaces the rows of windows and stores the position. So a reader sees each answer as a whole.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from psycopg import sql

from center.serving.answer_tables import to_json
from center.serving.cells import list_texts
from center.sinks.base import Position, SinkAnswer, SinkContext, SinkQuery
from edgewater.model.errors import StorageError
from edgewater.model.timestamps import rfc3339
from edgewater.wire import QueryRef

MAX_NAME_BYTES = 63
"""PostgreSQL cuts longer names."""
SYSTEM_COLUMNS = ("tableoid", "xmin", "cmin", "xmax", "cmax", "ctid")
CONNECT_TIMEOUT_S = 10
STATEMENT_TIMEOUT_MS = 60_000
OWN = "edgewater_"
"""Prefix of the sink's own tables. A query of such a name gets another table name."""
POSITIONS, WINDOWS = f"{OWN}positions", f"{OWN}windows"
_WINDOW_COLUMNS = {
    "query": "text", "version": "bigint", "window_start": "timestamptz", "window_end": "timestamptz",
    "revision": "bigint", "phase": "text", "completeness": "double precision", "given_at": "timestamptz",
    "contract": "text", "statement": "jsonb",
}  # fmt: skip
_WIDER = {
    ("bigint", "numeric"), ("bigint", "double precision"), ("numeric", "double precision"), ("text", "jsonb"),
}  # fmt: skip


class PostgresSink:
    """Writes answers to one schema of a database. See `center.sinks.base.Sink`.

    Args:
        url: of libpq.
        schema: the name of the schema.
        context: the name that the position is stored under, and the epoch.
    """

    def __init__(self, url: str, schema: str, context: SinkContext) -> None:
        self._url, self._schema, self._context = url, schema, context
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._tables: dict[QueryRef, _Table] = {}

    def open(self, queries: Sequence[SinkQuery]) -> Position | None:
        """See `Sink`. Raises StorageError."""
        with _stated():
            if self._connection is None or self._connection.closed:
                self._connection = psycopg.connect(
                    self._url,
                    connect_timeout=CONNECT_TIMEOUT_S,
                    application_name="edgewater sink",
                    client_encoding="utf8",
                    options=f"-c statement_timeout={STATEMENT_TIMEOUT_MS} -c timezone=UTC -c synchronous_commit=on",
                )
                path = _quoted(self._schema)
                self._connection.execute("SELECT set_config('search_path', %s, false)", [path])
                self._connection.commit()
            with self._connection.transaction(), self._connection.cursor() as cursor:
                self._prepare(cursor)
                self._tables = {query.ref: _Table(query) for query in queries if query.is_typed}
                for table in self._tables.values():
                    table.create(cursor, self._schema)
                for name in sorted({ref.name for ref in self._tables}):
                    self._create_view(cursor, name)
                cursor.execute(f"SELECT answer_id, late FROM {POSITIONS} WHERE sink = %s", [self._context.name])
                row = cursor.fetchone()
        return None if row is None else Position(*row)

    def write(self, answers: Sequence[SinkAnswer], position: Position) -> None:
        """See `Sink`. Raises StorageError."""
        assert self._connection is not None, "open comes first"
        with _stated(), self._connection.transaction(), self._connection.cursor() as cursor:
            self._store_position(cursor, position)
            if not answers:
                return
            newer = self._write_windows(cursor, answers)
            by_query: dict[QueryRef, list[SinkAnswer]] = {}
            for answer in answers:
                if (answer.query, answer.window_start_ms) in newer:
                    by_query.setdefault(answer.query, []).append(answer)
            for ref, group in by_query.items():
                if self._tables[ref].replace_windows(cursor, group):
                    self._create_view(cursor, ref.name)

    def close(self) -> None:
        """See `Sink`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _prepare(self, cursor: psycopg.Cursor[Any]) -> None:
        # Two processes that create the same table at the same time would fail.
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [f"edgewater sink {self._schema}"])
        cursor.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [self._schema])
        if cursor.fetchone() is None:
            cursor.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self._schema)))
        cursor.execute(
            f"CREATE TABLE IF NOT EXISTS {POSITIONS} (sink text PRIMARY KEY, answer_id bigint NOT NULL,"
            " late bigint NOT NULL, epoch bigint NOT NULL, written_at timestamptz NOT NULL)"
        )
        columns = ", ".join(f"{name} {kind}" for name, kind in _WINDOW_COLUMNS.items())
        cursor.execute(f"CREATE TABLE IF NOT EXISTS {WINDOWS} ({columns}, PRIMARY KEY (query, version, window_start))")
        cursor.execute(
            f"CREATE TEMPORARY TABLE IF NOT EXISTS stage (LIKE {WINDOWS} INCLUDING DEFAULTS) ON COMMIT DELETE ROWS"
        )

    def _store_position(self, cursor: psycopg.Cursor[Any], position: Position) -> None:
        """Stores the position, and locks it until the transaction ends. Raises StorageError: another process writes."""
        row = (self._context.name, *position, self._context.epoch)
        cursor.execute(
            f"INSERT INTO {POSITIONS} AS p VALUES (%s, %s, %s, %s, now()) ON CONFLICT (sink) DO UPDATE SET"
            " answer_id = excluded.answer_id, late = excluded.late, epoch = excluded.epoch,"
            " written_at = excluded.written_at WHERE p.epoch <= excluded.epoch",
            row,
        )
        if cursor.rowcount == 0:
            raise StorageError(f"another process writes the sink {self._context.name} to this database")

    def _write_windows(self, cursor: psycopg.Cursor[Any], answers: Sequence[SinkAnswer]) -> set[tuple[QueryRef, int]]:
        """Writes the rows of windows. Returns the windows of which the database has no newer revision."""
        rows = pa.table(
            {
                "query": [a.query.name for a in answers],
                "version": [a.query.version for a in answers],
                "window_start": [rfc3339(a.window_start_ms) for a in answers],
                "window_end": [rfc3339(a.window_end_ms) for a in answers],
                "revision": [a.revision for a in answers],
                "phase": [a.phase.value for a in answers],
                "completeness": [a.statement["quality"]["completeness"]["ratio"] for a in answers],
                "given_at": [rfc3339(a.answered_at_ms) for a in answers],
                "contract": [_contract(a) for a in answers],
                "statement": [_jsonb(a.statement) for a in answers],
            }
        )
        _copy(cursor, sql.SQL("pg_temp.stage"), rows)
        changed = sql.SQL(", ").join(
            sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name))
            for name in _WINDOW_COLUMNS
            if name not in ("query", "version", "window_start")
        )
        cursor.execute(
            sql.SQL(
                "INSERT INTO {windows} AS w SELECT * FROM pg_temp.stage ON CONFLICT (query, version, window_start)"
                " DO UPDATE SET {changed} WHERE excluded.revision >= w.revision"
                " RETURNING query, version, (extract(epoch FROM window_start) * 1000)::bigint"
            ).format(windows=sql.Identifier(WINDOWS), changed=changed)
        )
        newer = {(QueryRef(name, version), start) for name, version, start in cursor.fetchall()}
        cursor.execute("TRUNCATE pg_temp.stage")
        return newer

    def _create_view(self, cursor: psycopg.Cursor[Any], query: str) -> None:
        """Creates the view of all versions of a query, also of versions that are no longer registered."""
        stem = _table_name(query)
        cursor.execute(
            "SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_class c JOIN pg_namespace n"
            " ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid"
            " JOIN pg_description d ON d.objoid = c.oid AND d.objsubid = 0 AND starts_with(d.description, %s)"
            " WHERE n.nspname = %s AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
            [_comment(query, ""), self._schema],
        )
        tables: dict[str, dict[str, str]] = {}
        for table, column, kind in cursor.fetchall():
            tables.setdefault(table, {})[column] = kind
        columns: dict[str, str] = {}
        for each in tables.values():
            for column, kind in each.items():
                columns[column] = kind if columns.get(column, kind) == kind else "text"
        parts = [
            sql.SQL("SELECT {version}::bigint AS version, {columns} FROM {table}").format(
                version=sql.Literal(int(table.rpartition("_v")[2])),
                columns=sql.SQL(", ").join(
                    sql.SQL("{}::{} AS {}").format(
                        sql.Identifier(name) if name in tables[table] else sql.NULL, sql.SQL(kind), sql.Identifier(name)
                    )
                    for name, kind in columns.items()
                    if name != "version"
                ),
                table=sql.Identifier(table),
            )
            for table in sorted(tables)
        ]
        union = sql.SQL(" UNION ALL ").join(parts)
        view, place = sql.Identifier(stem), f"{_quoted(self._schema)}.{_quoted(stem)}"
        cursor.execute(
            "SELECT relkind::text, obj_description(oid, 'pg_class') FROM pg_class WHERE oid = to_regclass(%s)", [place]
        )
        kind, description = cursor.fetchone() or ("", "")
        if kind not in ("", "v"):
            raise StorageError(f"the sink creates a view {stem}, but the database has a table of this name: rename it")
        mark = f"Answers of all versions of the query {query}. {zlib.crc32(union.as_string(cursor).encode()):08x}"
        if description == mark:
            return
        cursor.execute(sql.SQL("DROP VIEW IF EXISTS {}").format(view))
        cursor.execute(sql.SQL("CREATE VIEW {} AS {}").format(view, union))
        cursor.execute(sql.SQL("COMMENT ON VIEW {} IS {}").format(view, sql.Literal(mark)))


class _Table:
    """The table of one version of a query."""

    def __init__(self, query: SinkQuery) -> None:
        self.name = _table_name(query.ref.name, f"_v{query.ref.version}")
        self._ref = query.ref
        self._columns: dict[str, tuple[str, str]] = {}
        self._add(query.schema)

    def _add(self, schema: pa.Schema) -> dict[str, str]:
        """Adds the columns that are not there yet, and returns the new ones, by name."""
        taken = {name for name, _ in self._columns.values()}
        new = {}
        for field in schema:
            if field.name not in self._columns:
                name = _column_name(field.name, taken)
                taken.add(name)
                self._columns[field.name] = name, _sql_type(field.type)
                new[name] = _sql_type(field.type)
        return new

    def create(self, cursor: psycopg.Cursor[Any], schema: str) -> None:
        """Creates the table, or adds what it lacks. Raises StorageError: a column has another type."""
        cursor.execute(
            "SELECT a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_attribute a"
            " WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped",
            [f"{_quoted(schema)}.{_quoted(self.name)}"],
        )
        stored: dict[str, str] = {
            name: kind.replace("timestamp with time zone", "timestamptz") for name, kind in cursor.fetchall()
        }
        table = sql.Identifier(self.name)
        if not stored:
            columns = sql.SQL(", ").join(
                sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in self._columns.values()
            )
            cursor.execute(sql.SQL("CREATE TABLE {} ({})").format(table, columns))
            start = self._columns["window_start"][0]
            cursor.execute(sql.SQL("CREATE INDEX ON {} ({})").format(table, sql.Identifier(start)))
            cursor.execute(
                sql.SQL("COMMENT ON TABLE {} IS {}").format(
                    table, sql.Literal(_comment(self._ref.name, self._ref.version))
                )
            )
            return
        self._alter(cursor, stored)

    def _alter(self, cursor: psycopg.Cursor[Any], stored: Mapping[str, str]) -> None:
        table = sql.Identifier(self.name)
        for field, (name, kind) in list(self._columns.items()):
            column = sql.Identifier(name)
            if name not in stored:
                self._drop_view(cursor)
                cursor.execute(sql.SQL("ALTER TABLE {} ADD COLUMN {} {}").format(table, column, sql.SQL(kind)))
            elif stored[name] != kind and (kind, stored[name]) in _WIDER:
                self._columns[field] = name, stored[name]
            elif stored[name] != kind and (stored[name], kind) in _WIDER:
                self._drop_view(cursor)
                cursor.execute(
                    sql.SQL("ALTER TABLE {0} ALTER COLUMN {1} TYPE {2} USING {1}::{2}").format(
                        table, column, sql.SQL(kind)
                    )
                )
            elif stored[name] != kind:
                raise StorageError(
                    f"table {self.name}: the column {name} is of type {stored[name]}, the sink writes {kind}:"
                    " rename the column, or the table, and the sink creates another one"
                )

    def _drop_view(self, cursor: psycopg.Cursor[Any]) -> None:
        # A view forbids changes of the columns that it reads. `open` creates it again.
        cursor.execute(sql.SQL("DROP VIEW IF EXISTS {}").format(sql.Identifier(_table_name(self._ref.name))))

    def replace_windows(self, cursor: psycopg.Cursor[Any], answers: Sequence[SinkAnswer]) -> bool:
        """Replaces all rows of these windows. Returns whether columns were added or changed."""
        table, start = sql.Identifier(self.name), sql.Identifier(self._columns["window_start"][0])
        cursor.execute(
            sql.SQL("DELETE FROM {} WHERE {} = ANY(%s::timestamptz[])").format(table, start),
            [[rfc3339(answer.window_start_ms) for answer in answers]],
        )
        rows = pa.concat_tables([answer.rows for answer in answers], promote_options="permissive")
        if not rows.num_rows:
            return False
        stored = dict(self._columns.values())
        changed = bool(self._add(rows.schema))
        for field in rows.schema:
            name, kind = self._columns[field.name]
            if (kind, _sql_type(field.type)) in _WIDER:
                self._columns[field.name], changed = (name, _sql_type(field.type)), True
        if changed:
            self._alter(cursor, stored)
        _copy(cursor, table, rows.rename_columns([self._columns[name][0] for name in rows.column_names]))
        return changed


def _copy(cursor: psycopg.Cursor[Any], table: sql.Composable, rows: pa.Table) -> None:
    columns = sql.SQL(", ").join(map(sql.Identifier, rows.column_names))
    buffer = io.BytesIO()
    options = pyarrow.csv.WriteOptions(include_header=False)
    # One chunk: pyarrow writes garbage for a table whose first chunk is empty.
    table_of_texts = pa.table([_text(column) for column in rows.columns], rows.column_names).combine_chunks()
    pyarrow.csv.write_csv(table_of_texts, buffer, options)
    with cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(table, columns)) as copy:
        copy.write(buffer.getvalue())


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a column as CSV can hold it. Texts lose NUL, which PostgreSQL does not store."""
    if pa.types.is_list(column.type):
        column = pa.chunked_array([list_texts(column)], pa.string())
    if pa.types.is_null(column.type):
        return column.cast(pa.string())
    if pa.types.is_string(column.type):
        return pc.replace_substring(column, "\0", "\ufffd")
    return column


def _jsonb(statement: Mapping[str, Any]) -> str:
    return to_json(statement).decode().replace("\\u0000", "\\ufffd")


def _contract(answer: SinkAnswer) -> str:
    codes = [violation["code"] for violation in answer.statement["contract"]["violations"]]
    return "; ".join(codes) or "met"


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_timestamp(kind):
        return "timestamptz"
    if pa.types.is_decimal(kind):
        return "numeric"
    if pa.types.is_integer(kind):
        return "bigint"
    if pa.types.is_floating(kind):
        return "double precision"
    if pa.types.is_boolean(kind):
        return "boolean"
    return "jsonb" if pa.types.is_list(kind) else "text"


def _table_name(query: str, suffix: str = "") -> str:
    stem = f"q_{query}" if query.startswith(OWN) else query
    return _shortened(stem, MAX_NAME_BYTES - len(suffix)) + suffix


def _column_name(name: str, taken: Iterable[str]) -> str:
    """Returns a name that PostgreSQL accepts and that no other column has."""
    name = name.replace("\0", "\ufffd") or "_"
    if name in SYSTEM_COLUMNS:
        name = f"{name}_"
    short = _shortened(name, MAX_NAME_BYTES)
    return short if short not in taken else _shortened(f"{name} {zlib.crc32(name.encode()):08x}", MAX_NAME_BYTES)


def _shortened(name: str, most: int) -> str:
    """Returns a name of at most `most` bytes; a longer one ends with its checksum instead of its last characters."""
    encoded = name.encode()
    if len(encoded) <= most:
        return name
    mark = f"_{zlib.crc32(encoded):08x}"
    return encoded[: most - len(mark)].decode(errors="ignore") + mark


def _comment(query: str, version: int | str) -> str:
    return f"Edgewater: answers of the query {query}@{version}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@contextlib.contextmanager
def _stated() -> Iterator[None]:
    """Turns errors of the database into StorageError. libpq's messages have no password."""
    try:
        yield
    except psycopg.Error as exc:
        reason = " ".join(str(exc).split()) or type(exc).__name__
        raise StorageError(f"PostgreSQL: {reason}") from exc
