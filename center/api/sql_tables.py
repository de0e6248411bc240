"""Tables of answers for SQL: the tables that `SELECT … FROM query` reads, and the replies that are tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from center.api.services import Services
from center.api.versions import clipped
from center.serving.answer_tables import empty_table, stated_answer, with_types, with_version
from edgewater.answers import Phase
from edgewater.base.errors import InvalidQuery
from edgewater.base.number_columns import concatenated
from edgewater.base.timestamps import rfc3339
from edgewater.model.registered_query import RegisteredQuery

CHUNK = 100  # limit: memory of a read
"""Windows that are read at a time."""
CHUNK_BYTES = 4 << 20  # limit: memory of a read


def query_table(
    center: Services, versions: Sequence[RegisteredQuery], start_ms: int | None, end_ms: int | None
) -> pa.Table:
    """Returns the newest answers of a query as a table: a row per window and group; blocks.

    Args:
        versions: ascending. Columns that a version lacks are null in its rows.
        start_ms, end_ms: only windows that start in [start_ms, end_ms).

    Raises:
        InvalidQuery: a column has different types in the versions.
    """
    tables: list[pa.Table] = []
    for query in reversed(versions):
        start, end = clipped(query, start_ms, end_ms)
        if start is None or start != end or not tables:
            tables.append(_version_table(center, query, start, end))
    try:
        table = concatenated(tables[::-1])
        return with_types(table.select(_in_order(tables)), tables[0].schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as exc:
        newest = versions[-1]
        accepted = f"windows of one version, such as WHERE window_start >= '{rfc3339(newest.windows.from_ms)}'"
        reason = f"its versions have columns of other types: {exc}"
        raise InvalidQuery("sql", newest.ref.name, accepted, reason) from exc


def _in_order(tables: Sequence[pa.Table]) -> list[str]:
    """Returns the names of all columns, the columns of the first table first."""
    return list(dict.fromkeys(name for table in tables for name in table.column_names))


def _version_table(center: Services, query: RegisteredQuery, start_ms: int | None, end_ms: int | None) -> pa.Table:
    tables, cursor = [with_version(empty_table(center.catalog, query.spec), query.ref.version)], None
    while True:
        chunk, cursor = center.results.windows(query.ref, start_ms, end_ms, CHUNK, cursor, Phase.EARLY, CHUNK_BYTES)
        answers = (stated_answer(record, query.spec, tables[0].schema)[0] for record in chunk)
        tables += [with_version(answer, query.ref.version) for answer in answers]
        if cursor is None:
            return concatenated(tables)


def rows_table(columns: Mapping[str, pa.DataType], rows: Iterable[Sequence[object]]) -> pa.Table:
    """Returns rows as a table."""
    values = list(zip(*rows, strict=True)) or [()] * len(columns)
    return pa.table({n: pa.array(v, t) for (n, t), v in zip(columns.items(), values, strict=True)})
