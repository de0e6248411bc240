"""The sink `postgres` writes a typed table per query and version, with intervals and quality, to a PostgreSQL database.

- ``edgewater_windows`` has a row per window of each query, with the newest answer's statement as JSON.
- ``flights_v3`` has a row per window and group of version 3 of the query `flights`.
- The view ``flights`` has the rows of all versions of the query.

``edgewater_marks`` has a row per query: the last answer, and the center and the sink that have written it.

One transaction replaces the rows of windows and stores the positions. So a reader sees each answer as a whole.

A transaction depends on nothing that an earlier one left in the session: it has its own settings, full names and no
prepared statements. So a pooler may give each transaction another session, which other clients have used.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from psycopg import sql

from center.sinks.base import SinkAnswer, SinkContext, SinkQuery
from center.sinks.kinds import PostgresConfig
from edgewater.base.errors import InvalidConfig, StorageError
from edgewater.base.timestamps import rfc3339
from edgewater.model.json_types import Document
from edgewater.model.own_columns import own_names
from edgewater.model.table_texts import list_texts, to_json
from edgewater.wire import QueryRef

MAX_NAME_BYTES = 63
"""The longest name in bytes. PostgreSQL truncates longer names."""
TAKEN_COLUMNS = ("tableoid", "xmin", "cmin", "xmax", "cmax", "ctid")
"""Names that columns cannot have: PostgreSQL's own columns."""
CONNECTION = {
    "connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3,
    "tcp_user_timeout": 30_000, "application_name": "edgewater sink",
}  # fmt: skip
"""Parameters of libpq, if the URL does not set them. With libpq's own defaults, a call blocks for hours if the server
cannot be reached."""
SETTINGS = """
    SELECT set_config('statement_timeout', '60s', true), set_config('timezone', 'UTC', true),
        set_config('synchronous_commit', 'on', true)
"""
"""The settings of each transaction. They end with it."""
OWN = "edgewater_"
"""Prefix of the sink's own tables."""
MARKS, WINDOWS = f"{OWN}marks", f"{OWN}windows"
POSITIONS = f"{OWN}positions"
"""The table of positions of release 0.3."""
_WINDOW_COLUMNS = {
    "query": "text", "version": "bigint", "window_start": "timestamptz", "window_end": "timestamptz",
    "revision": "bigint", "phase": "text", "completeness": "double precision", "given_at": "timestamptz",
    "contract": "text", "statement": "jsonb",
}  # fmt: skip
KEY = 3  # format: of the tables
"""The number of columns of the primary key of windows, which come first."""
_NUMBERS = ("bigint", "double precision", "numeric")
"""Types of numbers. All values of the others fit into the last type."""
_LIKE_OWN = re.compile(rf"(q_)*{OWN}")
_LIKE_VERSION = re.compile(r"_v\d+_*$")
_LIKE_NUL = '\0|^".*\\\\u0000'
"""A text with NUL, or a text that could be mistaken for the quoted form of one."""
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


class PostgresSink:
    """Writes answers to one schema of a database. Implements `center.sinks.base.Sink`.

    Args:
        context: has the center, the name and the epoch, which are stored with the positions.

    Raises:
        InvalidConfig: libpq does not accept the URL.
    """

    def __init__(self, options: PostgresConfig, context: SinkContext) -> None:
        self._server, self._schema, self._context = _server(options), options.db_schema, context
        names = {"marks": MARKS, "positions": POSITIONS, "windows": WINDOWS}
        self._own = {key: sql.Identifier(self._schema, name) for key, name in names.items()}
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._tables: dict[QueryRef, _Table] = {}

    def open(self, queries: Sequence[SinkQuery]) -> Mapping[QueryRef, int]:
        """Implements `Sink.open`. Raises StorageError."""
        with _stated():
            if self._connection is None or self._connection.closed:
                given: dict[str, Any] = {**CONNECTION, **self._server, "client_encoding": "utf8"}
                # A raw cursor, because the others read a `%` in a name as a placeholder.
                self._connection = psycopg.connect(**given, prepare_threshold=None, cursor_factory=psycopg.RawCursor)
        with self._transaction() as cursor:
            self._prepare(cursor)
            found = self._stored_positions(cursor, [query.ref for query in queries])
            typed = [query for query in queries if query.is_typed]
            views = {name: _View(name, self._schema) for name in sorted({query.ref.name for query in typed})}
            tables = {query.ref: _Table(query, self._schema, views[query.ref.name]) for query in typed}
            for table in tables.values():
                table.create(cursor)
            for view in views.values():
                view.create(cursor)
        self._tables |= tables
        return found

    def write(self, answers: Sequence[SinkAnswer], positions: Mapping[QueryRef, int]) -> None:
        """Implements `Sink.write`. Raises StorageError."""
        with self._transaction() as cursor:
            self._store_positions(cursor, positions)
            if not answers:
                return
            newer = self._write_windows(cursor, answers)
            by_query: dict[QueryRef, list[SinkAnswer]] = {}
            for answer in answers:
                if (answer.query, answer.window_start_ms) in newer:
                    by_query.setdefault(answer.query, []).append(answer)
            for ref, group in by_query.items():
                self._tables[ref].replace_windows(cursor, group)

    def close(self) -> None:
        """Implements `Sink.close`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[psycopg.Cursor[Any]]:
        assert self._connection is not None, "open comes first"
        with _stated(), self._connection.transaction(), self._connection.cursor() as cursor:
            cursor.execute(SETTINGS)
            yield cursor

    def _prepare(self, cursor: psycopg.Cursor[Any]) -> None:
        # Two processes that create the same table at the same time would fail.
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext($1))", [f"edgewater sink {self._schema}"])
        if cursor.execute("SELECT 1 FROM pg_namespace WHERE nspname = $1", [self._schema]).fetchone() is None:
            cursor.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self._schema)))
        windows = ", ".join(f"{name} {kind}" for name, kind in _WINDOW_COLUMNS.items())
        tables = {
            "marks": "query text, version bigint, answer_id bigint NOT NULL, center bigint NOT NULL,"
            " sink text NOT NULL, epoch bigint NOT NULL, written_at timestamptz NOT NULL, PRIMARY KEY (query, version)",
            "windows": f"{windows}, PRIMARY KEY (query, version, window_start)",
        }
        for table, columns in tables.items():
            cursor.execute(sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(self._own[table], sql.SQL(columns)))

    def _stored_positions(self, cursor: psycopg.Cursor[Any], refs: Sequence[QueryRef]) -> dict[QueryRef, int]:
        """Returns the positions of these queries, and takes over those of a sink that has this one's name now.

        Raises:
            StorageError: another center, or another sink, writes the answers to a query.
        """
        context, where = self._context, f"the schema {self._schema} of the database"
        keys = [ref.name for ref in refs], [ref.version for ref in refs]
        of_keys = sql.SQL("(query, version) IN (SELECT * FROM unnest($1::text[], $2::bigint[]))")
        marks = sql.SQL("SELECT query, version, answer_id, center, sink FROM {marks} WHERE {of_keys}")
        found: dict[QueryRef, int] = {}
        for name, version, answer_id, center, sink in cursor.execute(
            marks.format(of_keys=of_keys, **self._own), keys
        ).fetchall():
            ref = QueryRef(name, version)
            context.require_own(where, ref, center, sink)
            found[ref] = answer_id
        taken = sql.SQL("UPDATE {marks} SET sink = $3, epoch = $4 WHERE {of_keys} AND sink <> $3")
        cursor.execute(taken.format(of_keys=of_keys, **self._own), [*keys, context.name, context.epoch])
        missing = [ref for ref in refs if ref not in found]
        place = [self._own["positions"].as_string(cursor)]
        if missing and cursor.execute("SELECT to_regclass($1)", place).fetchone() != (None,):
            # Release 0.3 has written a position per sink, for all queries.
            earlier = sql.SQL("SELECT sink, answer_id FROM {positions}").format(**self._own)
            for sink, answer_id in cursor.execute(earlier).fetchall():
                context.require_own(where, missing[0], None, sink)
                found |= dict.fromkeys(missing, answer_id) if sink == context.name else {}
        return found

    def _store_positions(self, cursor: psycopg.Cursor[Any], positions: Mapping[QueryRef, int]) -> None:
        """Stores positions. They are locked until the transaction ends.

        Raises:
            StorageError: another process writes the sink.
        """
        rows = sorted((ref.name, ref.version, answer_id) for ref, answer_id in positions.items())
        columns = [[row[n] for row in rows] for n in range(3)]
        statement = sql.SQL(
            "INSERT INTO {marks} AS m SELECT *, $4::bigint, $5::text, $6::bigint, now()"
            " FROM unnest($1::text[], $2::bigint[], $3::bigint[]) ON CONFLICT (query, version) DO UPDATE SET"
            " answer_id = excluded.answer_id, epoch = excluded.epoch, written_at = excluded.written_at"
            " WHERE (m.center, m.sink) = (excluded.center, excluded.sink) AND m.epoch <= excluded.epoch"
        )
        context = self._context
        cursor.execute(statement.format(**self._own), [*columns, context.center, context.name, context.epoch])
        if cursor.rowcount < len(rows):
            raise StorageError(f"another process, sink or center writes these answers to the schema {self._schema}")

    def _write_windows(self, cursor: psycopg.Cursor[Any], answers: Sequence[SinkAnswer]) -> set[tuple[QueryRef, int]]:
        """Writes the rows of windows. Returns the windows for which the database has no newer revision."""
        rows = [
            (
                a.query.name, a.query.version, rfc3339(a.window_start_ms), rfc3339(a.window_end_ms), a.revision,
                a.phase.value, a.completeness, rfc3339(a.answered_at_ms),
                a.contract, _jsonb(a.statement),
            )
            for a in answers
        ]  # fmt: skip
        columns = [list(column) for column in zip(*rows, strict=True)]
        arrays = [f"${i}::{kind}[]" for i, kind in enumerate(_WINDOW_COLUMNS.values(), start=1)]
        changed = sql.SQL(", ").join(
            sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in list(_WINDOW_COLUMNS)[KEY:]
        )
        statement = sql.SQL(
            "INSERT INTO {windows} AS w SELECT * FROM unnest({arrays}) ON CONFLICT (query, version, window_start)"
            " DO UPDATE SET {changed} WHERE excluded.revision >= w.revision"
            " RETURNING query, version, (extract(epoch FROM window_start) * 1000)::bigint"
        ).format(arrays=sql.SQL(", ".join(arrays)), changed=changed, **self._own)
        written = cursor.execute(statement, columns).fetchall()
        # A session that was merged into another session no longer has an answer.
        if any(a.window_end_ms <= a.window_start_ms for a in answers):
            statement = sql.SQL(
                "DELETE FROM {windows} WHERE window_end <= window_start"
                " AND (query, version, window_start) IN (SELECT * FROM unnest({arrays}))"
            ).format(arrays=sql.SQL(", ".join(arrays[:KEY])), **self._own)
            cursor.execute(statement, columns[:KEY])
        return {(QueryRef(name, version), start) for name, version, start in written}


def _server(options: PostgresConfig) -> dict[str, str | int | None]:
    accepted = "postgresql://user:password@host/database"
    # libpq's messages quote the text that libpq cannot read. This text may be a part of the password.
    try:
        parts = psycopg.conninfo.conninfo_to_dict(options.url.get_secret_value())
    except psycopg.ProgrammingError:
        raise InvalidConfig("url", "…", accepted, "libpq cannot read it") from None
    if "@" in str(parts.get("host")) or not re.fullmatch(r"[\d,]*", str(parts.get("port") or "")):
        raise InvalidConfig("url", "…", f"{accepted}, with %40 for @ and %2F for / in the password")
    return parts


class _View:
    """The view of all versions of a query, including versions that are no longer registered."""

    def __init__(self, query: str, schema: str) -> None:
        self._query, self._schema, self._name = query, schema, _table_name(query)
        self._view = sql.Identifier(schema, self._name)
        self._grants: list[tuple[str, str, bool]] = []

    def create(self, cursor: psycopg.Cursor[Any]) -> None:
        """Creates the view, or replaces it if the tables have changed.

        New columns come last, so PostgreSQL can replace a view that other views read. The view's grants stay.

        Raises:
            StorageError: a table has the name of the view.
        """
        union = self._union(self._columns(cursor))
        cursor.execute(
            "SELECT relkind::text, obj_description(oid, 'pg_class') FROM pg_class WHERE oid = to_regclass($1)",
            [self._view.as_string(cursor)],
        )
        kind, description = cursor.fetchone() or ("", "")
        if kind not in ("", "v"):
            raise StorageError(
                f"the sink creates a view {self._name}, but the database has a table of this name: rename the table"
            )
        mark = f"Answers of all versions of the query {self._query}. {zlib.crc32(union.as_string(cursor).encode()):08x}"
        if description == mark:
            return
        statement = sql.SQL("CREATE OR REPLACE VIEW {} AS {}").format(self._view, union)
        try:
            with cursor.connection.transaction():
                cursor.execute(statement)
        except psycopg.errors.InvalidTableDefinition:  # a column has another type, or another place
            self.drop(cursor)
            cursor.execute(statement)
        cursor.execute(sql.SQL("COMMENT ON VIEW {} IS {}").format(self._view, sql.Literal(mark)))
        for privileges, role, may_grant in self._grants:
            option = sql.SQL(" WITH GRANT OPTION" if may_grant else "")
            grant = sql.SQL("GRANT {} ON {} TO {}{}")
            cursor.execute(grant.format(sql.SQL(privileges), self._view, sql.SQL(role), option))
        self._grants = []

    def drop(self, cursor: psycopg.Cursor[Any]) -> None:
        """Drops the view. `create` restores its grants."""
        cursor.execute(
            "SELECT string_agg(privilege_type, ', '), CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text"
            " END, is_grantable FROM pg_class, aclexplode(relacl) WHERE oid = to_regclass($1) AND grantee <> relowner"
            " GROUP BY grantee, is_grantable",
            [self._view.as_string(cursor)],
        )
        self._grants += cursor.fetchall()
        cursor.execute(sql.SQL("DROP VIEW IF EXISTS {}").format(self._view))

    def _columns(self, cursor: psycopg.Cursor[Any]) -> dict[str, dict[str, str]]:
        """Returns by table the types of its columns. Tables are sorted by version."""
        cursor.execute(
            "SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_class c JOIN pg_namespace n"
            " ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid"
            " JOIN pg_description d ON d.objoid = c.oid AND d.objsubid = 0 AND starts_with(d.description, $1)"
            " WHERE n.nspname = $2 AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
            [_comment(self._query, ""), self._schema],
        )
        tables: dict[str, dict[str, str]] = {}
        for table, column, kind in cursor.fetchall():
            tables.setdefault(table, {})[column] = kind
        return dict(sorted(tables.items(), key=lambda item: _version(item[0])))

    def _union(self, tables: Mapping[str, Mapping[str, str]]) -> sql.Composed:
        columns: dict[str, str] = {}
        for each in tables.values():
            for column, kind in each.items():
                columns[column] = _common(columns.get(column, kind), kind)
        parts = [
            sql.SQL("SELECT {version}::bigint AS {name}, {columns} FROM {table}").format(
                version=sql.Literal(_version(table)),
                name=sql.Identifier(own_names(columns)["version"]),
                columns=sql.SQL(", ").join(
                    sql.SQL("{}::{} AS {}").format(
                        sql.Identifier(name) if name in stored else sql.NULL,
                        sql.SQL(kind if stored.get(name, kind) == kind else f"text::{kind}"),
                        sql.Identifier(name),
                    )
                    for name, kind in columns.items()
                ),
                table=sql.Identifier(self._schema, table),
            )
            for table, stored in tables.items()
        ]
        return sql.SQL(" UNION ALL ").join(parts)


class _Table:
    """The table of one version of a query."""

    def __init__(self, query: SinkQuery, schema: str, view: _View) -> None:
        self.name = _table_name(query.ref.name, f"_v{query.ref.version}")
        self._table = sql.Identifier(schema, self.name)
        self._ref, self._schema, self._view = query.ref, query.schema, view
        self._names: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        self._looked_at: set[str] = set()

    def create(self, cursor: psycopg.Cursor[Any]) -> None:
        """Creates the table, or adds columns that the table lacks.

        It does not change the type of a column, because the types of a query are guesses before an edge is known.

        Raises:
            StorageError: a view has the name of the table.
        """
        place = self._table.as_string(cursor)
        cursor.execute("SELECT relkind::text FROM pg_class WHERE oid = to_regclass($1)", [place])
        (found,) = cursor.fetchone() or ("",)
        if found not in ("", "r", "p"):
            raise StorageError(f"the sink creates a table {self.name}, but the database has a view of this name")
        cursor.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            " WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped",
            [place],
        )
        self._kinds = {name: _short(kind) for name, kind in cursor.fetchall()}
        if found:
            self._fit(cursor, self._schema, only_add=True)
            return
        self._kinds = {self._name(f.name): _sql_type(f.type) for f in self._schema}
        columns = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in self._kinds.items()
        )
        cursor.execute(sql.SQL("CREATE TABLE {} ({})").format(self._table, columns))
        cursor.execute(sql.SQL("CREATE INDEX ON {} ({})").format(self._table, self._start))
        comment = sql.Literal(_comment(self._ref.name, self._ref.version))
        cursor.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(self._table, comment))

    def replace_windows(self, cursor: psycopg.Cursor[Any], answers: Sequence[SinkAnswer]) -> None:
        """Replaces all rows of these windows."""
        cursor.execute(
            sql.SQL("DELETE FROM {} WHERE {} = ANY($1::timestamptz[])").format(self._table, self._start),
            [[rfc3339(answer.window_start_ms) for answer in answers]],
        )
        tables = [answer.rows for answer in answers if answer.rows.num_rows]
        for schema in {_filled(rows): None for rows in tables}:
            self._fit(cursor, schema)
        if tables:
            rows = pa.concat_tables(map(_texts, tables), promote_options="default")
            _copy(cursor, self._table, rows.rename_columns([self._name(name) for name in rows.column_names]))

    @property
    def _start(self) -> sql.Identifier:
        # The column is found by its index, because a group or a measure of the user may have the same name.
        return sql.Identifier(self._name(self._schema.field(0).name))

    def _name(self, field: str) -> str:
        if field not in self._names:
            self._names[field] = _column_name(field, self._names.values())
        return self._names[field]

    def _fit(self, cursor: psycopg.Cursor[Any], schema: pa.Schema, *, only_add: bool = False) -> None:
        """Adds and changes columns, so that the table accepts rows of the schema.

        Args:
            only_add: whether to only add columns. Columns of other types then do not change.

        Raises:
            StorageError: a column of another type has values, so its type cannot change.
        """
        changed = False
        for field in schema:
            name, kind = self._name(field.name), _sql_type(field.type)
            stored = self._kinds.get(name)
            if stored is not None and (only_add or stored == kind or pa.types.is_null(field.type)):
                continue
            if stored is None:
                self._alter(cursor, "ADD COLUMN {column} {kind}", name, kind)
            elif self._is_unused(cursor, name):
                self._view.drop(cursor)
                self._alter(cursor, "ALTER COLUMN {column} TYPE {kind} USING NULL", name, kind)
            elif (wider := _common(stored, kind)) == "text":
                raise StorageError(
                    f"table {self.name}: the column {name} is of type {stored}, the sink writes {kind}:"
                    " rename the column, or the table, and the sink creates another one"
                )
            elif wider == stored:
                continue
            else:  # a cast from double precision to numeric keeps 15 digits only, a text all
                self._view.drop(cursor)
                self._alter(cursor, "ALTER COLUMN {column} TYPE {kind} USING {column}::text::{kind}", name, wider)
            changed = True
        if changed and not only_add:
            self._view.create(cursor)

    def _alter(self, cursor: psycopg.Cursor[Any], change: str, name: str, kind: str) -> None:
        parts = {"column": sql.Identifier(name), "kind": sql.SQL(kind)}
        statement = sql.SQL("ALTER TABLE {} ").format(self._table)
        cursor.execute(statement + sql.SQL(change).format(**parts))
        self._kinds[name] = kind

    def _is_unused(self, cursor: psycopg.Cursor[Any], name: str) -> bool:
        """Returns whether a column that existed before `create` has no value yet. The database is asked once per
        column.
        """
        if name in self._looked_at:
            return False
        self._looked_at.add(name)
        used = sql.SQL("SELECT EXISTS (SELECT 1 FROM {} WHERE {} IS NOT NULL)")
        cursor.execute(used.format(self._table, sql.Identifier(name)))
        return cursor.fetchone() == (False,)


def _copy(cursor: psycopg.Cursor[Any], table: sql.Composable, rows: pa.Table) -> None:
    columns = sql.SQL(", ").join(map(sql.Identifier, rows.column_names))
    buffer = io.BytesIO()
    options = pyarrow.csv.WriteOptions(include_header=False)
    # The table must have one chunk, because pyarrow writes garbage if the first chunk of a table is empty.
    pyarrow.csv.write_csv(rows.combine_chunks(), buffer, options)
    with cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(table, columns)) as copy:
        copy.write(buffer.getvalue())


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a column as it is written to CSV. PostgreSQL does not store NUL. So a text with NUL is quoted as in JSON,
    and NUL is replaced in lists.
    """
    if pa.types.is_list(column.type):
        texts = list_texts(column)
        if pc.any(pc.match_substring(texts, "\\u0000")).as_py():  # rare, so a loop over the rows is fast enough
            texts = pa.array([None if text is None else _without_nul(text) for text in texts.to_pylist()], pa.string())
        return pa.chunked_array([texts], pa.string())
    if pa.types.is_string(column.type) and pc.any(odd := pc.match_substring_regex(column, _LIKE_NUL)).as_py():
        pairs = zip(column.to_pylist(), odd.to_pylist(), strict=True)
        return pa.chunked_array([[json.dumps(t, ensure_ascii=False) if is_odd else t for t, is_odd in pairs]])
    return column.cast(pa.string())


def _filled(rows: pa.Table) -> pa.Schema:
    """Returns the schema of rows. A column without a value has the type null, because its type is a guess."""
    columns = zip(rows.schema, rows.columns, strict=True)
    return pa.schema([f.with_type(pa.null()) if c.null_count == len(c) else f for f, c in columns])


def _texts(rows: pa.Table) -> pa.Table:
    return pa.table([_text(column) for column in rows.columns], rows.column_names)


def _jsonb(statement: Document) -> str:
    return _without_nul(to_json(statement).decode())


def _without_nul(text: str) -> str:
    """Replaces NUL in JSON, because PostgreSQL does not store it. ``u0000`` after an escaped backslash is not NUL."""
    return _NUL.sub(r"\1\\ufffd", text) if "\\u0000" in text else text


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_timestamp(kind):
        return "timestamptz"
    if pa.types.is_integer(kind):
        return "bigint"
    if pa.types.is_floating(kind):
        return "double precision"
    if pa.types.is_boolean(kind):
        return "boolean"
    return "jsonb" if pa.types.is_list(kind) else "text"


def _table_name(query: str, suffix: str = "") -> str:
    """Returns the name of a query's view. With a suffix, returns the name of one of the query's tables.

    The name is unique among all queries. If the name of a query looks like a table of the sink, or like a table of
    another query's version, it is changed.
    """
    stem = f"q_{query}" if _LIKE_OWN.match(query) else query
    stem = f"{stem}_" if _LIKE_VERSION.search(stem) else stem
    return _shortened(stem, MAX_NAME_BYTES - len(suffix)) + suffix


def _version(table: str) -> int:
    return int(table.rpartition("_v")[2])


def _short(kind: str) -> str:
    return kind.replace("timestamp with time zone", "timestamptz")


def _common(one: str, other: str) -> str:
    """Returns a type into which the values of both types fit."""
    return one if one == other else _NUMBERS[-1] if {one, other} <= set(_NUMBERS) else "text"


def _column_name(name: str, taken: Iterable[str]) -> str:
    """Returns a name that PostgreSQL accepts and that is not in `taken`."""
    name = name.replace("\0", "\ufffd") or "_"
    while name.rstrip("_") in TAKEN_COLUMNS and (name in TAKEN_COLUMNS or name in taken):
        name = f"{name}_"
    short = _shortened(name, MAX_NAME_BYTES)
    return short if short not in taken else _shortened(f"{name} {zlib.crc32(name.encode()):08x}", MAX_NAME_BYTES)


def _shortened(name: str, most: int) -> str:
    """Returns a name of at most `most` bytes. If the name is longer, a checksum replaces its last characters."""
    encoded = name.encode()
    if len(encoded) <= most:
        return name
    mark = f"_{zlib.crc32(encoded):08x}"
    return encoded[: most - len(mark)].decode(errors="ignore") + mark


def _comment(query: str, version: int | str) -> str:
    return f"Edgewater: answers of the query {query}@{version}"


@contextlib.contextmanager
def _stated() -> Iterator[None]:
    """Turns errors of the database into StorageError. The messages do not contain the password of a valid URL."""
    try:
        yield
    except psycopg.Error as exc:
        raise StorageError(f"PostgreSQL: {str(exc) or type(exc).__name__}") from exc
