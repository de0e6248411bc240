"""A user's data file as a trace: rows that count, in complete windows, each at its edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.errors import InvalidConfig
from edgewater.quantities import duration_ms, format_duration
from edgewater.query import QuerySpec
from edgewater.streams import COLUMN_TYPES, TIME_COLUMN
from edgewater.synopses import BoolArray, IntArray
from edgewater.windows import TumblingWindow
from sim.budgets.outcome import measured_values
from sim.budgets.trace import Trace
from sim.plan.query import chosen_window

Note = Callable[[str], None]
BORDER = 0.05
MEAN_GAPS = 10
FEW_WINDOWS = 20


@dataclass(frozen=True, slots=True)
class PlacedTrace(Trace):
    """A trace whose records have their edges.

    Attributes:
        home: per record the number of its edge, from 0.
    """

    home: IntArray = field(repr=False)

    def rows(self, chosen: IntArray) -> Self:
        batch = self.batch.take(pa.array(chosen))
        return replace(self, batch=batch, codes=self.codes[chosen], home=self.home[chosen])

    def split(self, edges: int, seed: int = 0) -> list[Trace]:
        """One trace per edge; `seed` has been used when the records were placed."""
        parts = [np.flatnonzero(self.home == edge) for edge in range(edges)]
        return [Trace(self.batch.take(pa.array(at)), self.keys, self.codes[at]) for at in parts]


@dataclass(frozen=True, slots=True)
class Placement:
    """How records come to their edges.

    Attributes:
        edges: how many; None: one for each value of `column`.
        column: records of one value of it are at one edge.
        by_key: without a column: records of one group are at one edge, not spread over all.
    """

    edges: int | None = None
    column: str | None = None
    by_key: bool = False
    seed: int = 0


MAX_EDGES = 10_000


def place(table: pa.Table, codes: IntArray, how: Placement, note: Note) -> tuple[IntArray, int]:
    """Per record the number of its edge; and how many edges there are.

    Raises:
        InvalidConfig: more edges than can be simulated.
    """
    if how.column is not None:
        encoded = pc.dictionary_encode(table.column(how.column).combine_chunks(), null_encoding="encode")
        encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
        values = len(encoded.dictionary)
        edges = how.edges or values
        if edges > MAX_EDGES:
            raise InvalidConfig("--edge-column", how.column, f"--edges N as well, at most {MAX_EDGES}",
                                f"it has {values:,} values, each an edge")  # fmt: skip
        ids = np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)
        if edges >= values:
            note(f"edges: {edges}, records placed by the column {how.column} ({values} values)")
            return ids, edges
        texts = [str(v) for v in encoded.dictionary.to_pylist()]
        homes = np.array([google_crc32c.value(t.encode()) % edges for t in texts], np.int64)
        note(f"edges: {edges}, the {values:,} values of {how.column} placed on them by their hash")
        return homes[ids], edges
    edges = how.edges or 1
    rng = np.random.default_rng(how.seed)
    if how.by_key:
        homes = rng.integers(0, edges, int(codes.max(initial=-1)) + 1)
        note(f"edges: {edges}, each group at one of them, drawn with the seed {how.seed}")
        return np.asarray(homes[codes], np.int64), edges
    if edges > 1:
        note(f"edges: {edges}, each record at one of them, drawn with the seed {how.seed}; groups are everywhere")
    return rng.integers(0, edges, len(codes)), edges


def build_trace(
    table: pa.Table, times: IntArray, query: QuerySpec, how: Placement, windows: int, note: Note
) -> tuple[PlacedTrace, QuerySpec, int]:
    """The trace, the query without its condition (which has been applied), and the number of edges.

    Args:
        times: per row of the table, in ms.
        windows: at most the first so many complete ones.

    Raises:
        InvalidConfig: nothing is left, or no window is complete.
        InvalidQuery: a column's type does not fit the query.
    """
    keep = _counted(table, times, query, note)
    table, times = table.filter(pa.array(keep)), times[keep]
    query = replace(query, where=None)
    if not len(times):
        raise InvalidConfig("TRACE", 0, "at least one record that the query counts", "no record is left")
    if query.window.longest_ms == 1:
        window = chosen_window(int(times.max() - times.min()) + 1)
        query = replace(query, window=TumblingWindow(duration_ms(window, "--window")))
        note(f"window: {window}, as none is asked for (--window)")
    first, last = complete_windows(times, query)
    size = query.window.longest_ms
    count = (last - first) // size
    note(f"windows: {min(count, windows)} of {count} complete ones of {format_duration(size)}")
    inside = (times >= first) & (times < first + min(count, windows) * size)
    table, times = table.filter(pa.array(inside)), times[inside]
    if min(count, windows) < FEW_WINDOWS:
        note(f"fewer than {FEW_WINDOWS} windows: the 95th percentile is almost the worst of them, often the first,"
             " when edges have no history yet")  # fmt: skip
    columns = {
        name: _stream_type(table.column(name), name in query.group_by) for name in query.columns if name != TIME_COLUMN
    }
    keys = {name: columns.pop(name) for name in query.group_by}
    trace = Trace.from_columns(times, keys, columns)
    order = np.argsort(times, kind="stable")
    home, edges = place(table.take(pa.array(order)), trace.codes, how, note)
    return PlacedTrace(trace.batch, trace.keys, trace.codes, home), query, edges


def _stream_type(column: pa.ChunkedArray, is_key: bool) -> pa.ChunkedArray:
    """Dates and the like are keys as their text."""
    return column if column.type in COLUMN_TYPES.values() or not is_key else column.cast(pa.string())


def _counted(table: pa.Table, times: IntArray, query: QuerySpec, note: Note) -> BoolArray:
    """Which records the query counts: those of its condition that have a value."""
    names = [n for n in query.columns if n != TIME_COLUMN]
    columns = {n: _stream_type(table.column(n), n in query.group_by) for n in names}
    whole = pa.concat_batches(pa.table({**columns, TIME_COLUMN: pa.array(times)}).to_batches())
    trace = Trace(whole, (), np.zeros(len(times), np.int64))
    condition = query.bind(trace.columns).where
    keep = np.ones(len(times), bool)
    if condition is not None:
        keep = np.asarray(pc.fill_null(condition.array(whole), False).to_numpy(zero_copy_only=False), bool)
        note(f"where: {int(keep.sum()):,} of {len(times):,} records")
    values = measured_values(trace, query, query.measures[0].name)
    judged = query.measures[0].to_text()
    missing = keep & ~np.isfinite(values)
    if missing.any():
        note(f"{int(missing.sum()):,} records are left out: no finite value for {judged} (null, NaN or infinite)")
    negative = int(np.count_nonzero(values[keep & ~missing] < 0))
    if negative and query.measures[0].function.name == "sum":
        note(f"{negative:,} records have a negative value for {judged}: errors may grow again after a record")
    return keep & ~missing


def complete_windows(times: IntArray, query: QuerySpec) -> tuple[int, int]:
    """From the start of the first window that the records cover to the end of the last one.

    A window at a border of the trace counts as covered if records reach to within a twentieth of a window of its
    own border, or within ten mean gaps: more than that is missing by chance once in e^10 traces.

    Raises:
        InvalidConfig: there is none.
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
        raise InvalidConfig(
            "window", format_duration(size), "a shorter window, or a longer trace",
            f"no window is complete: the trace covers {format_duration(latest - earliest)}",
        )  # fmt: skip
    return first, last
