"""Builds a trace from a data file: the records that a query counts, in complete windows, assigned to edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.base.errors import InvalidConfig
from edgewater.base.quantities import format_duration
from edgewater.base.streams import COLUMN_TYPES, TIME_COLUMN
from edgewater.model.query import QuerySpec
from edgewater.synopses import BoolArray, IntArray
from sim.budgets.outcome import measured_values
from sim.budgets.trace import Trace
from sim.plan.planned_query import free_name

Notify = Callable[[str], None]
BORDER = 0.05
MEAN_GAPS = 10  # derived: a Poisson process exceeds it with probability e^-10
FEW_WINDOWS = 20  # derived: one of twenty values is above the 95th percentile


@dataclass(frozen=True, slots=True)
class Placement:
    """The assignment of records to edges.

    Attributes:
        edges: number of edges; None: one per value of `column`.
        column: all records with the same value of this column are at one edge.
    """

    edges: int | None = None
    column: str | None = None
    seed: int = 0


MAX_EDGES = 10_000  # limit: memory of a simulation


def place(table: pa.Table, placement: Placement, notify: Notify) -> tuple[IntArray, int]:
    """Returns the edge number of each record, and the number of edges.

    Raises:
        InvalidConfig: more edges than can be simulated.
    """
    if placement.column is not None:
        encoded = pc.dictionary_encode(table.column(placement.column).combine_chunks(), null_encoding="encode")
        encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
        values = len(encoded.dictionary)
        edges = placement.edges or values
        if edges > MAX_EDGES:
            accepted = f"--edges N as well, at most {MAX_EDGES}"
            reason = f"it has {values:,} values, and each is an edge"
            raise InvalidConfig("--edge-column", placement.column, accepted, reason)
        ids = np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)
        if edges >= values:
            notify(f"edges: {edges}, assigned by the column {placement.column} ({values} values)")
            return ids, edges
        texts = [str(v) for v in encoded.dictionary.to_pylist()]
        homes = np.array([google_crc32c.value(t.encode()) % edges for t in texts], np.int64)
        notify(f"edges: {edges}, the {values:,} values of {placement.column} assigned by hash")
        return homes[ids], edges
    edges = placement.edges or 1
    rng = np.random.default_rng(placement.seed)
    if edges > 1:
        notify(f"edges: {edges}, each record at a random edge (seed {placement.seed}), so every edge has every group")
    return rng.integers(0, edges, len(table)), edges


def build_trace(
    table: pa.Table, times: IntArray, query: QuerySpec, placement: Placement, windows: int, notify: Notify
) -> tuple[Trace, QuerySpec, list[Trace]]:
    """Returns the trace, the query without its condition (which is applied), and the trace of each edge.

    Args:
        times: per row of the table, in ms.
        windows: maximum number of complete windows.

    Raises:
        InvalidConfig: no record remains, or no window is complete.
        InvalidQuery: a column's type does not fit the query.
    """
    keep = _counted(table, times, query, notify)
    table, times = table.filter(pa.array(keep)), times[keep]
    table, query = _with_keys(table, times, replace(query, where=None))
    if not len(times):
        raise InvalidConfig("TRACE", 0, "at least one record that the query counts", "no record is left")
    first, last = complete_windows(times, query)
    size = query.window.longest_ms
    count = (last - first) // size
    notify(f"windows: {min(count, windows)} of {count} complete windows of {format_duration(size)}")
    inside = (times >= first) & (times < first + min(count, windows) * size)
    table, times = table.filter(pa.array(inside)), times[inside]
    if min(count, windows) < FEW_WINDOWS:
        notify(
            f"fewer than {FEW_WINDOWS} windows: the 95th percentile is close to the maximum, often of the first "
            "window, when edges have no history"
        )
    columns = {
        name: _stream_type(table.column(name), name in query.group_by) for name in query.columns if name != TIME_COLUMN
    }
    keys = {name: columns.pop(name) for name in query.group_by}
    trace = Trace.from_columns(times, keys, columns)
    order = np.argsort(times, kind="stable")
    homes, edges = place(table.take(pa.array(order)), placement, notify)
    return trace, query, trace.split(homes, edges)


def _stream_type(column: pa.ChunkedArray, is_key: bool) -> pa.ChunkedArray:
    """Returns a column in a type of streams; keys of other types, such as dates, become text."""
    return column if column.type in COLUMN_TYPES.values() or not is_key else column.cast(pa.string())


def _with_keys(table: pa.Table, times: IntArray, query: QuerySpec) -> tuple[pa.Table, QuerySpec]:
    """Returns the table with a column per computed key, and the query that reads these columns."""
    if not query.computed:
        return table, query
    whole = _read_columns(table, times, query)
    arrays = dict(
        zip(query.group_by, query.bind({f.name: f.type for f in whole.schema}).key_arrays(whole), strict=True)
    )
    names = {name: free_name(name, table.column_names) for name, _ in query.computed}
    for name, column in names.items():
        table = table.append_column(column, arrays[name])
    group_by = tuple(names.get(name, name) for name in query.group_by)
    return table, replace(query, group_by=group_by, computed=())


def _read_columns(table: pa.Table, times: IntArray, query: QuerySpec) -> pa.RecordBatch:
    """Returns the columns that a query reads, as an edge has them."""
    names = [n for n in query.columns if n != TIME_COLUMN]
    columns = {n: _stream_type(table.column(n), n in query.plain_keys) for n in names}
    return pa.concat_batches(pa.table({**columns, TIME_COLUMN: pa.array(times)}).to_batches())


def _counted(table: pa.Table, times: IntArray, query: QuerySpec, notify: Notify) -> BoolArray:
    """Returns a mask of the records that the query counts: its condition is true and the measure has a value."""
    whole = _read_columns(table, times, query)
    trace = Trace(whole, (), np.zeros(len(times), np.int64))
    condition = query.bind(trace.columns).where
    keep = np.ones(len(times), bool)
    if condition is not None:
        keep = np.asarray(pc.fill_null(condition.array(whole), False).to_numpy(zero_copy_only=False), bool)
        notify(f"where: {int(keep.sum()):,} of {len(times):,} records")
    values = measured_values(trace, query)
    evaluated = query.measures[0].to_text()
    missing = keep & ~np.isfinite(values)
    if missing.any():
        notify(f"omitted {int(missing.sum()):,} records without a finite value of {evaluated}")
    negative = int(np.count_nonzero(values[keep & ~missing] < 0))
    if negative and query.measures[0].function.name == "sum":
        notify(f"{negative:,} records have a negative value of {evaluated}: errors may increase with a record")
    return keep & ~missing


def complete_windows(times: IntArray, query: QuerySpec) -> tuple[int, int]:
    """Returns the start of the first window that the records cover and the end of the last window.

    The first and the last window are complete if the records reach to within a twentieth of a window of its border, or
    to within ten mean gaps between records, which a Poisson process exceeds with probability e^-10.

    Raises:
        InvalidConfig: no window is complete.
    """
    size = query.window.longest_ms
    earliest, latest = int(times.min()), int(times.max())
    gap = max(BORDER * size, MEAN_GAPS * (latest - earliest) / max(len(times) - 1, 1))
    gap = min(gap, size - 1)
    first = query.window.slice_start(earliest)
    if earliest - first > gap:
        first += size
    last = query.window.slice_start(latest) + size
    if last - 1 - latest > gap:
        last -= size
    if last <= first:
        accepted = "a shorter window, or a longer trace"
        reason = f"no window is complete: the trace covers {format_duration(latest - earliest)}"
        raise InvalidConfig("window", format_duration(size), accepted, reason)
    return first, last
