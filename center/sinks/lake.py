"""The sinks `parquet`, `delta` and `iceberg` append final answers to two tables per query and version.

The table of the query has a row per group, and the table of its windows a row per answer. An answer without groups, and
the statement of an answer, are in the table of windows only.

Only corrections follow a final answer, so rows are only added. A correction has the values of the answer that it
corrects. So it gets a row in the table of windows only, and sums over the other table stay true.

A table names the center and the sink that write it. Each append stores the id of its last answer, in the name of the
file or in the commit. So if an append is repeated after a kill, it changes nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from center.sinks.base import SinkAnswer, SinkContext, SinkQuery
from center.sinks.kinds import DeltaConfig, IcebergConfig, ParquetConfig
from center.storage.segment_files import sync_directory
from edgewater.base.errors import StorageError
from edgewater.base.number_columns import fitted
from edgewater.model.own_columns import OWN_COLUMNS, own_names
from edgewater.model.table_texts import json_text, list_texts
from edgewater.wire import QueryRef

if TYPE_CHECKING:
    from deltalake import CommitProperties

DAY = "day"
"""The column with the UTC day on which a window begins. Tables are partitioned by this column. If a group or a measure
has the same name, this column has another name (`own_names`)."""
_ADDED = 2  # format: of the tables
"""Columns before the columns of answers: `DAY` and the id of the answer."""
MARK = "_edgewater.json"
"""The file that names the center and the sink. Readers of Parquet ignore names that begin with ``_``."""
CENTER, SINK, ANSWER = "edgewater.center", "edgewater.sink", "edgewater.answer"
"""Names of properties of tables, and of the transaction or property with the id of the last answer."""
_FILE = re.compile(r"answers-(\d+)-(\d+)\.parquet")


TIME = pa.timestamp("us", "UTC")
WINDOWS = pa.schema(
    [
        (DAY, pa.string()), ("answer_id", pa.int64()), ("window_start", TIME), ("window_end", TIME),
        ("revision", pa.int64()), ("phase", pa.string()), ("completeness", pa.float64()), ("given_at", TIME),
        ("contract", pa.string()), ("statement", pa.string()), ("data_of", pa.int64()),
    ]
)  # fmt: skip
"""The table of windows. ``statement`` is the answer's JSON without its rows, and ``data_of`` the revision
that a correction corrects."""


class LakeTable(Protocol):
    """The table of one query. It names the center and the sink that write it."""

    def last_answer(self) -> int | None:
        """Returns the id of the last answer in the table; None if there is no table.

        Raises:
            StorageError: another center, or another sink, writes the table.
        """

    def append(self, rows: pa.Table, last: int) -> None:
        """Appends rows atomically, with the id of their last answer. Creates the table if it is missing.

        Args:
            rows: without rows, the table is only created.
        """


class LakeSink:
    """Appends final answers. Implements `center.sinks.base.Sink`.

    Args:
        table: returns the table of this name of a query, without creating it.
    """

    def __init__(self, table: Callable[[QueryRef, str], LakeTable]) -> None:
        self._table_of = table
        self._queries: dict[QueryRef, SinkQuery] = {}
        self._tables: dict[QueryRef, tuple[LakeTable, LakeTable]] = {}

    def open(self, queries: Sequence[SinkQuery]) -> Mapping[QueryRef, int]:
        """Implements `Sink.open`."""
        found = {}
        for query in queries:
            self._queries[query.ref] = query
            name = table_name(query.ref)
            both = self._table_of(query.ref, name), self._table_of(query.ref, f"{name}_windows")
            rows, windows = (table.last_answer() for table in self._tables.setdefault(query.ref, both))
            if (last := rows if windows is None else windows) is not None:
                found[query.ref] = last  # an earlier release has written no table of windows
        return found

    def write(self, answers: Sequence[SinkAnswer], positions: Mapping[QueryRef, int]) -> None:
        """Implements `Sink.write`. An answer that is already in a table is ignored, so a table never has a lower
        position.

        The table of windows is written last, so its position is the position of the query. It is created first, because
        a table of rows alone is one of an earlier release.
        """
        by_query: dict[QueryRef, list[SinkAnswer]] = {}
        for answer in answers:
            by_query.setdefault(answer.query, []).append(answer)
        for ref, group in by_query.items():
            (rows, windows), schema = self._tables[ref], self._queries[ref].schema
            if windows.last_answer() is None and rows.last_answer() is None:
                windows.append(WINDOWS.empty_table(), 0)
            # By the ids of their data, because a correction may bring the data of an answer that the page skips.
            new = [replace(a, answer_id=a.data_id or a.answer_id) for a in group if a.rows.num_rows and not a.repeats]
            _append(rows, sorted(new, key=lambda a: a.answer_id), partial(lake_rows, schema=schema))
            _append(windows, group, _windows)

    def close(self) -> None:
        """Implements `Sink.close`."""
        self._tables = {}


def _append(table: LakeTable, answers: Sequence[SinkAnswer], make: Callable[[Sequence[SinkAnswer]], pa.Table]) -> None:
    """Appends the answers that a table lacks."""
    last = table.last_answer() or 0
    new = [answer for answer in answers if answer.answer_id > last]
    if new:
        table.append(make(new), new[-1].answer_id)


def _windows(answers: Sequence[SinkAnswer]) -> pa.Table:
    """Returns the rows of the table of windows."""
    starts = pa.array([a.window_start_ms for a in answers], pa.timestamp("ms", "UTC"))
    columns = [
        pc.strftime(starts, format="%Y-%m-%d"), [a.answer_id for a in answers], starts.cast(TIME),
        pa.array([a.window_end_ms for a in answers], starts.type).cast(TIME), [a.revision for a in answers],
        [a.phase.value for a in answers], [a.completeness for a in answers],
        pa.array([a.answered_at_ms for a in answers], starts.type).cast(TIME), [a.contract for a in answers],
        [json_text(a.statement) for a in answers], [a.data_of for a in answers],
    ]  # fmt: skip
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, WINDOWS, strict=True)], schema=WINDOWS)


def _typed(schema: pa.Schema) -> pa.Schema:
    """Returns the columns of a table: `DAY`, `answer_id` and the columns of the answers. Times are UTC in µs; lists are
    JSON.
    """
    fields = [pa.field(DAY, pa.string()), pa.field("answer_id", pa.int64())]
    return pa.schema([*fields, *(pa.field(f.name, _kind(f.type)) for f in schema)])


def _kind(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return TIME
    return pa.string() if pa.types.is_list(kind) else kind


def _named(schema: pa.Schema) -> pa.Schema:
    """Returns a schema whose names differ in more than their case, because readers ignore the case."""
    own, names = _ADDED + len(OWN_COLUMNS), dict[str, str]()  # by the name in lower case
    for column in schema.names[own:]:
        name = column
        while name.casefold() in names:
            name = f"{name}_"
        names[name.casefold()] = name
    added = own_names(schema.names[own:])
    renamed = [*(added[name] for name in schema.names[:_ADDED]), *schema.names[_ADDED:own], *names.values()]
    return pa.schema([f.with_name(name) for f, name in zip(schema, renamed, strict=True)])


def lake_rows(answers: Sequence[SinkAnswer], schema: pa.Schema) -> pa.Table:
    target = _typed(schema)
    tables = []
    for answer in answers:
        rows, columns = answer.rows.num_rows, list[Any]()
        for field in list(target)[_ADDED:]:
            if field.name not in answer.rows.column_names:
                columns.append(pa.nulls(rows, field.type))
                continue
            column = answer.rows.column(field.name)
            columns.append(list_texts(column) if pa.types.is_list(column.type) else fitted(column, field))
        day = pc.strftime(columns[list(OWN_COLUMNS).index("window_start")], format="%Y-%m-%d")
        answer_id = pa.repeat(pa.scalar(answer.answer_id, pa.int64()), rows)
        tables.append(pa.table([day, answer_id, *columns], schema=_named(target)))
    return pa.concat_tables(tables)


class ParquetFiles:
    """The Parquet files of one query. A file gets its name when it is complete. `MARK` names the writer."""

    def __init__(self, directory: Path, query: QueryRef, context: SinkContext) -> None:
        self._directory, self._query, self._context = directory, query, context
        self._mark = {"center": context.center, "sink": context.name}
        for scratch in directory.glob(f"*{DAY}=*/.answers-*.part"):  # of a process that was killed
            scratch.unlink(missing_ok=True)

    def last_answer(self) -> int | None:
        """Implements `LakeTable.last_answer`."""
        names = (_FILE.fullmatch(path.name) for path in self._directory.glob(f"*{DAY}=*/*.parquet"))
        last = max((int(name[2]) for name in names if name is not None), default=None)
        try:
            found = json.loads((self._directory / MARK).read_bytes())
        except FileNotFoundError:
            found = None if last is None else {"center": None, "sink": self._context.name}
        except (OSError, ValueError) as exc:
            raise StorageError(f"{self._directory / MARK}: {exc}") from exc
        if found is not None:
            self._context.require_own(str(self._directory), self._query, found["center"], found["sink"])
        if found != self._mark and last is not None:
            self._write_mark()
        return 0 if last is None and found is not None else last

    def append(self, rows: pa.Table, last: int) -> None:
        """Implements `LakeTable.append`. Adjacent rows of one day make a file, and files are written in order.

        So the greatest id in the names of files shows which answers are written, even if only a part of a page was
        written.
        """
        if not (self._directory / MARK).exists():
            self._write_mark()
        partition = rows.column_names[0]
        days = rows.column(0).to_numpy(zero_copy_only=False)
        borders = [0, *(np.flatnonzero(days[1:] != days[:-1]) + 1).tolist(), len(days)]
        for start, end in pairwise(borders) if len(days) else ():
            part = rows.slice(start, end - start)
            ids = part.column(1)
            name = f"answers-{ids[0].as_py()}-{ids[-1].as_py()}.parquet"
            content = part.drop_columns([partition])
            self._write(self._directory / f"{partition}={days[start]}", name, partial(pq.write_table, content))

    def _write_mark(self) -> None:
        content = json.dumps(self._mark).encode()
        self._write(self._directory, MARK, lambda file: file.write(content))

    def _write(self, directory: Path, name: str, write: Callable[[IO[bytes]], object]) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            scratch = directory / f".{name}.part"
            try:
                with scratch.open("wb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
                scratch.replace(directory / name)
            finally:
                scratch.unlink(missing_ok=True)
            sync_directory(directory)
        except OSError as exc:
            raise StorageError(f"{directory / name}: {exc.strerror}") from exc


class _MarkedTable:
    """A table whose properties name the center and the sink that write it."""

    def __init__(self, place: str, query: QueryRef, context: SinkContext) -> None:
        self._place, self._query, self._context = place, query, context
        self._mark = {CENTER: str(context.center), SINK: context.name}
        self._table: Any = None

    def _require_own(self, properties: Mapping[str, str], last: int | None) -> None:
        """Checks the properties. A table of release 0.3 has the last answer of a sink, but no properties."""
        center = int(properties[CENTER]) if CENTER in properties else None
        unnamed = "" if last is None else self._context.name
        sink = properties[SINK] if center is not None else unnamed
        self._context.require_own(self._place, self._query, center, sink)


class DeltaAnswers(_MarkedTable):
    """A table of Delta Lake. Its properties name the writer, and a transaction has the id of the last answer.

    A commit fails if another writer has committed since the table was read. So no answer is appended twice.
    """

    def __init__(self, uri: str, query: QueryRef, context: SinkContext, options: Mapping[str, str]) -> None:
        super().__init__(uri, query, context)
        self._options = dict(options) or None

    def last_answer(self) -> int | None:
        """Implements `LakeTable.last_answer`."""
        from deltalake import DeltaTable

        if self._table is not None:
            self._table.update_incremental()
        elif DeltaTable.is_deltatable(self._place, self._options):
            self._table = DeltaTable(self._place, storage_options=self._options)
        else:
            return None
        properties = self._table.metadata().configuration
        if CENTER in properties:
            last = self._table.transaction_version(ANSWER)
        else:
            last = self._table.transaction_version(f"edgewater sink {self._context.name}")
        if last is not None or self._table.version() or CENTER in properties:
            self._require_own(properties, last)
        if self._mark.items() - properties.items():
            commit = self._commit(last)
            self._table.alter.set_table_properties(self._mark, raise_if_not_exists=False, commit_properties=commit)
        return None if last is None else int(last)

    def append(self, rows: pa.Table, last: int) -> None:
        """Implements `LakeTable.append`."""
        from deltalake import DeltaTable, write_deltalake

        self._table = self._table or DeltaTable.create(
            self._place, rows.schema, partition_by=rows.schema.names[:1], storage_options=self._options,
            configuration=self._mark, raise_if_key_not_exists=False,
        )  # fmt: skip
        commit = self._commit(last)
        write_deltalake(self._table, rows, mode="append", schema_mode="merge", commit_properties=commit)

    def _commit(self, last: int | None) -> CommitProperties:
        from deltalake import CommitProperties, Transaction

        return CommitProperties(app_transactions=None if last is None else [Transaction(ANSWER, last)])


class IcebergAnswers(_MarkedTable):
    """A table of Iceberg. Its properties name the writer, and each snapshot has the id of its last answer."""

    def __init__(self, catalog: Any, name: tuple[str, str], query: QueryRef, context: SinkContext) -> None:
        super().__init__(".".join(name), query, context)
        self._catalog, self._name, self._is_prepared = catalog, name, False

    def last_answer(self) -> int | None:
        """Implements `LakeTable.last_answer`."""
        if self._table is not None:
            self._table.refresh()
        elif self._catalog.table_exists(self._name):
            self._table = self._catalog.load_table(self._name)
        else:
            return None
        properties = self._table.properties
        last = self._last_in_snapshots(ANSWER if CENTER in properties else f"edgewater.{self._context.name}")
        if last is None and ANSWER in properties:
            last = int(properties[ANSWER])  # the snapshots are expired
        if self._table.current_snapshot() is not None or CENTER in properties:
            self._require_own(properties, last)
        if self._mark.items() - properties.items():
            with self._table.transaction() as transaction:
                transaction.set_properties({**self._mark, **({} if last is None else {ANSWER: str(last)})})
        return last

    def append(self, rows: pa.Table, last: int) -> None:
        """Implements `LakeTable.append`."""
        if self._table is None:
            self._table = self._catalog.create_table(self._name, rows.schema, properties=self._mark)
        if not self._is_prepared:
            with self._table.update_schema() as update:
                update.union_by_name(rows.schema)
            if not self._table.spec().fields:
                with self._table.update_spec() as spec:
                    spec.add_identity(rows.schema.names[0])
            self._is_prepared = True
        with self._table.transaction() as transaction:
            transaction.append(rows, snapshot_properties={ANSWER: str(last)})
            transaction.set_properties({ANSWER: str(last)})

    def _last_in_snapshots(self, name: str) -> int | None:
        """Returns the last answer. Other writers, such as a compaction, may have written the newest snapshots."""
        snapshot = self._table.current_snapshot()
        while snapshot is not None:
            if snapshot.summary is not None and (last := snapshot.summary.get(name)) is not None:
                return int(last)
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
        return None


def parquet(options: ParquetConfig, context: SinkContext) -> LakeSink:
    """Returns the sink that writes files."""
    return LakeSink(lambda query, name: ParquetFiles(options.path / name, query, context))


def delta(options: DeltaConfig, context: SinkContext) -> LakeSink:
    """Returns the sink that writes tables of Delta Lake. Raises ImportError if its library is missing."""
    import deltalake  # noqa: F401  # the tables import it later

    storage = {name: value.get_secret_value() for name, value in options.options.items()}
    base = options.path.rstrip("/")
    return LakeSink(lambda query, name: DeltaAnswers(f"{base}/{name}", query, context, storage))


def iceberg(options: IcebergConfig, context: SinkContext) -> LakeSink:
    """Returns the sink that writes tables of Iceberg. Raises ImportError if its library is missing."""
    from pyiceberg.catalog import load_catalog

    @cache
    def catalog() -> Any:
        properties = {name: value.get_secret_value() for name, value in options.catalog.items()}
        loaded = load_catalog(options.name, **properties)
        loaded.create_namespace_if_not_exists(options.namespace)
        return loaded

    return LakeSink(lambda query, name: IcebergAnswers(catalog(), (options.namespace, name), query, context))


def table_name(ref: QueryRef) -> str:
    """Returns the name of the table, or directory, of a query."""
    return f"{ref.name}_v{ref.version}"
