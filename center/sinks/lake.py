"""The sinks `parquet`, `delta` and `iceberg` append final answers to a table per query and version.

A final answer has no later revision, so rows are only added. Each append stores the id of its last answer, in the name
of the file or in the commit. So if an append is repeated after a kill, it changes nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from center.serving.cells import list_texts
from center.sinks.base import Position, SinkAnswer, SinkContext, SinkMemory, SinkQuery
from edgewater.model.errors import StorageError
from edgewater.model.float_bounds import side_of
from edgewater.model.key_texts import OWN_COLUMNS, own_name
from edgewater.model.number_columns import float_column
from edgewater.wire import QueryRef

DAY = "day"
"""The column with the UTC day on which a window begins. Tables are partitioned by this column. If a group or a measure
has the same name, this column has another name (`_named`)."""
_ADDED = 2
"""Columns before the columns of answers: `DAY` and the id of the answer."""
BEYOND = "beyond-int64"
"""The code in the column ``contract`` of a row in which a number is null because the table's type is too narrow."""
_FILE = re.compile(r"answers-(\d+)-(\d+)\.parquet")


class LakeTable(Protocol):
    """One table of a sink."""

    def last_answer(self) -> int:
        """Returns the id of the last answer in the table, or 0 if the table has no answer."""

    def append(self, rows: pa.Table, first: int, last: int) -> None:
        """Appends rows atomically, with the ids of their first and last answers."""


class LakeSink:
    """Appends final answers. Implements `center.sinks.base.Sink`.

    Args:
        table: a function that opens or creates the table of a query.
    """

    def __init__(self, table: Any, context: SinkContext) -> None:
        self._open_table, self._context = table, context
        self._queries: dict[QueryRef, SinkQuery] = {}
        self._tables: dict[QueryRef, LakeTable] = {}

    def open(self, queries: Sequence[SinkQuery]) -> Position | None:
        """Implements `Sink.open`."""
        self._queries = {query.ref: query for query in queries}
        self._tables = {}
        stored = self._memory.load()
        return None if stored is None else stored[0]

    def write(self, answers: Sequence[SinkAnswer], position: Position) -> None:
        """Implements `Sink.write`. An answer that is already in the table is ignored."""
        by_query: dict[QueryRef, list[SinkAnswer]] = {}
        for answer in answers:
            if answer.rows.num_rows:
                by_query.setdefault(answer.query, []).append(answer)
        for ref, group in by_query.items():
            schema = self._queries[ref].schema
            if ref not in self._tables:
                self._tables[ref] = self._open_table(self._queries[ref], _named(_typed(schema)))
            table = self._tables[ref]
            last = table.last_answer()
            new = [answer for answer in group if answer.answer_id > last]
            if new:
                table.append(_rows(new, schema), new[0].answer_id, new[-1].answer_id)
        self._memory.save(position, "{}")

    def close(self) -> None:
        """Implements `Sink.close`."""
        self._tables = {}

    @property
    def _memory(self) -> SinkMemory:
        assert self._context.memory is not None, "a process gives one"
        return self._context.memory


def _typed(schema: pa.Schema) -> pa.Schema:
    """Returns the columns of a table: `DAY`, `answer_id` and the columns of the answers. Times are UTC in µs; lists are
    JSON.
    """
    fields = [pa.field(DAY, pa.string()), pa.field("answer_id", pa.int64())]
    return pa.schema([*fields, *(pa.field(f.name, _kind(f.type)) for f in schema)])


def _kind(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC")
    return pa.string() if pa.types.is_list(kind) else kind


def _named(schema: pa.Schema) -> pa.Schema:
    """Returns a schema whose names differ in more than their case, because readers ignore the case. The columns of the
    query take their names first, so the product's own columns are renamed.
    """
    own, names = _ADDED + len(OWN_COLUMNS), dict[str, str]()  # by the name in lower case
    for column in schema.names[own:]:
        name = column
        while name.casefold() in names:
            name = f"{name}_"
        names[name.casefold()] = name
    renamed = [*(own_name(name, names) for name in schema.names[:own]), *names.values()]
    return pa.schema([f.with_name(name) for f, name in zip(schema, renamed, strict=True)])


def _rows(answers: Sequence[SinkAnswer], schema: pa.Schema) -> pa.Table:
    target = _typed(schema)
    tables = []
    for answer in answers:
        rows, columns, lost = answer.rows.num_rows, list[Any](), np.zeros(answer.rows.num_rows, bool)
        for field in list(target)[_ADDED:]:
            if field.name not in answer.rows.column_names:
                columns.append(pa.nulls(rows, field.type))
                continue
            column = answer.rows.column(field.name)
            columns.append(_fitted(column, field))
            lost |= columns[-1].is_null().to_numpy(zero_copy_only=False) & column.is_valid().to_numpy()
        stated = OWN_COLUMNS.index("contract")
        columns[stated] = pc.if_else(pa.array(lost), _with_code(columns[stated]), columns[stated])
        day = pc.strftime(columns[OWN_COLUMNS.index("window_start")], format="%Y-%m-%d")
        answer_id = pa.repeat(pa.scalar(answer.answer_id, pa.int64()), rows)
        tables.append(pa.table([day, answer_id, *columns], schema=_named(target)))
    return pa.concat_tables(tables)


def _with_code(contract: pa.ChunkedArray) -> pa.ChunkedArray:
    joined = pc.binary_join_element_wise(contract, BEYOND, "; ")
    return pc.if_else(pc.equal(contract, "met"), BEYOND, joined)


def _fitted(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    """Returns a column in the type of the table. A bound is rounded outwards. A number that does not fit is null."""
    if pa.types.is_list(column.type):
        return list_texts(column)
    if column.null_count == len(column):
        return pa.nulls(len(column), field.type)
    if pa.types.is_floating(field.type):
        return pa.array(float_column(column, side_of(field.name)), field.type, mask=column.is_null().to_numpy())
    if pa.types.is_integer(field.type) and not pa.types.is_integer(column.type):
        if pa.types.is_floating(column.type):
            column = pc.round(column, round_mode={-1: "down", 0: "half_to_even", 1: "up"}[side_of(field.name)])
        least, end = (pa.scalar(Decimal(n)).cast(column.type) for n in (-(1 << 63), 1 << 63))
        column = pc.if_else(pc.and_(pc.greater_equal(column, least), pc.less(column, end)), column, None)
    return pc.cast(column, field.type)


class ParquetFiles:
    """The Parquet files of one query. A file gets its name when it is complete."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for scratch in directory.glob(f"*{DAY}=*/.answers-*.part"):  # of a process that was killed
            scratch.unlink(missing_ok=True)

    def last_answer(self) -> int:
        """Implements `LakeTable.last_answer`."""
        names = (_FILE.fullmatch(path.name) for path in self._directory.glob(f"*{DAY}=*/*.parquet"))
        return max((int(name[2]) for name in names if name is not None), default=0)

    def append(self, rows: pa.Table, first: int, last: int) -> None:
        """Implements `LakeTable.append`. Adjacent rows of one day make a file, and files are written in order.

        So the greatest id in the names of files shows which answers are written, even if only a part of a page was
        written.
        """
        partition = rows.column_names[0]
        days = rows.column(0).to_numpy(zero_copy_only=False)
        borders = [0, *(np.flatnonzero(days[1:] != days[:-1]) + 1).tolist(), len(days)]
        for start, end in pairwise(borders):
            part = rows.slice(start, end - start)
            ids = part.column(1)
            name = f"answers-{ids[0].as_py()}-{ids[-1].as_py()}.parquet"
            self._write(self._directory / f"{partition}={days[start]}", name, part.drop_columns([partition]))

    def _write(self, directory: Path, name: str, rows: pa.Table) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            scratch = directory / f".{name}.part"
            try:
                with scratch.open("wb") as file:
                    pq.write_table(rows, file)
                    file.flush()
                    os.fsync(file.fileno())
                scratch.replace(directory / name)
            finally:
                scratch.unlink(missing_ok=True)
            folder = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as exc:
            raise StorageError(f"{directory / name}: {exc.strerror}") from exc


class DeltaAnswers:
    """A table of Delta Lake. A transaction with the sink's name has the id of the last answer."""

    def __init__(self, uri: str, schema: pa.Schema, app: str, options: Mapping[str, str]) -> None:
        from deltalake import DeltaTable

        self._uri, self._app, self._options = uri, app, dict(options)
        self._table = DeltaTable.create(
            uri, schema, mode="ignore", partition_by=schema.names[:1], storage_options=self._options or None
        )

    def last_answer(self) -> int:
        """Implements `LakeTable.last_answer`."""
        self._table.update_incremental()
        return int(self._table.transaction_version(self._app) or 0)

    def append(self, rows: pa.Table, first: int, last: int) -> None:
        """Implements `LakeTable.append`."""
        from deltalake import CommitProperties, Transaction, write_deltalake

        commit = CommitProperties(app_transactions=[Transaction(self._app, last)])
        write_deltalake(self._table, rows, mode="append", schema_mode="merge", commit_properties=commit)


class IcebergAnswers:
    """A table of Iceberg. The summary of a snapshot has the id of the snapshot's last answer."""

    def __init__(self, catalog: Any, name: tuple[str, str], schema: pa.Schema, app: str) -> None:
        self._property = f"edgewater.{app}"
        self._table = catalog.create_table_if_not_exists(name, schema)
        with self._table.update_schema() as update:
            update.union_by_name(schema)
        if not self._table.spec().fields:
            with self._table.update_spec() as spec:
                spec.add_identity(schema.names[0])

    def last_answer(self) -> int:
        """Implements `LakeTable.last_answer`. Other writers, such as a compaction, may have written the newest
        snapshots.
        """
        self._table.refresh()
        snapshot = self._table.current_snapshot()
        while snapshot is not None:
            summary = snapshot.summary
            if summary is not None and (last := summary.get(self._property)) is not None:
                return int(last)
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
        return 0

    def append(self, rows: pa.Table, first: int, last: int) -> None:
        """Implements `LakeTable.append`."""
        self._table.append(rows, snapshot_properties={self._property: str(last)})


def table_name(ref: QueryRef) -> str:
    """Returns the name of the table, or directory, of a query."""
    return f"{ref.name}_v{ref.version}"
