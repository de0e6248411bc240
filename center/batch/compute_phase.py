"""The compute phase reads a task's records and returns partial synopses per slice (or window) and stratum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from center.batch.layout import RecordLayout
from center.batch.pattern import SynopsisPattern
from center.batch.slice_states import Records, SliceStates, numbers, record_batches, zeros
from center.batch.windows import Family, SlidingCount, family_of, grid_of
from center.spark.workers import settle
from edgewater.base.errors import InvalidRecord
from edgewater.base.streams import COLUMN_TYPES
from edgewater.model.windows import SlidingWindow, Window
from edgewater.synopses import BoolArray, IntArray, KeyTable, finalised

CHUNK_ROWS = 1 << 17  # limit: memory of a task
"""Records per update of the states. Smaller batches are concatenated, because an update costs tens of µs per slice."""

MEMORY_BYTES = 256 << 20  # limit: memory of a task
"""Size of a task's states at which they are emitted. Later states of the same slices are merged with them
afterwards."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """The parameters of a job, which every task needs.

    Attributes:
        by_windows: whether a task has one state per window (bucketing). If false, one state per slice (slicing).
        whole: whether a task must emit each slice only once, because the synopsis does not merge.
        source: sample source of the pattern. Each task derives its own source from it.
    """

    pattern: SynopsisPattern
    layout: RecordLayout
    window: Window | None
    by_windows: bool = False
    whole: bool = False
    source: int = 0

    @property
    def family(self) -> Family:
        return family_of(self.window)

    @property
    def slides(self) -> bool:
        """Whether windows are merged from several slices."""
        return not self.by_windows and (self.family is Family.SLIDING or isinstance(self.window, SlidingCount))

    @property
    def grid(self) -> SlidingWindow:
        """The grid of sliding windows: in event time, or in numbers of records."""
        grid = grid_of(self.window)
        assert isinstance(grid, SlidingWindow)
        return grid

    @property
    def block_ms(self) -> int:
        """Width of a block in ms, or in records for count windows.

        One task merges all windows that start within a block. The slices of these windows extend by one window into the
        next block. So a block is several windows wide, to have few slices in two blocks.
        """
        grid = self.grid
        return grid.every_ms * max(64, 8 * -(-grid.size_ms // grid.every_ms))

    def blocks_of(self, start: int) -> Iterable[int]:
        """Returns the blocks of windows that a slice belongs to."""
        if self.family is Family.SESSION:
            return (0,)
        if not self.slides:
            return (start,)
        window_starts = self.grid.windows_of_slice(start)
        first, last = ((w - self.grid.offset_ms) // self.block_ms for w in (window_starts[0], window_starts[-1]))
        return range(first, last + 1)


class ComputePhase:
    """The compute phase as a function for `DataFrame.mapInArrow`."""

    def __init__(self, job: BatchJob) -> None:
        self._job = job

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle()
        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        batch_id = int((context and context.getLocalProperty("streaming.sql.batchId")) or 0)  # in foreachBatch
        return _Task(self._job, partition, batch_id).run(batches)


class _Task:
    """The compute phase of one task."""

    def __init__(self, job: BatchJob, partition: int, batch_id: int) -> None:
        self._job = job
        self._partition = partition
        self._grid = grid_of(job.window)
        types = job.layout.stratum_types
        source = int(finalised(np.array([job.source], np.uint64), (batch_id << 24) + partition + 1)[0])
        self._states = SliceStates(job.pattern, types, source=source)
        stack = None if job.pattern.is_grouped else job.pattern.stack()
        if stack is not None:
            stack.grow(1)
        self._state_bytes = 4096 if stack is None else max(stack.nbytes, 64)

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for chunk in _chunks(batches):
            yield from self._add(chunk)
        yield from self._drain()

    def _add(self, chunk: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        layout = self._job.layout
        columns = list(chunk.columns)
        numbered = numbers(columns.pop()) if layout.numbered else None
        times = zeros(len(chunk))
        if layout.time is not None:
            times = millis_of(with_times(columns.pop(), layout.time))
        strata = [_canonical(c, t) for c, (_, t) in zip(columns[: len(layout.strata)], layout.strata, strict=True)]
        values = [_canonical(c, t) for c, t in zip(columns[len(layout.strata) :], layout.values, strict=True)]
        records = Records(strata, values, times, self._states.number(len(times)))
        for starts, chosen in self._assign(times if numbered is None else numbered):
            if chosen is None:
                yield from self._update(starts, records)
            else:
                some = starts if isinstance(starts, int) else starts[chosen]
                yield from self._update(some, records.at(np.flatnonzero(chosen)))

    def _assign(self, places: IntArray) -> Iterator[tuple[IntArray | int, BoolArray | None]]:
        """Yields the slices that records belong to, as pairs (starts, mask).

        Starts are the start of each record's slice, by time or by number, or one number if all records are in one
        slice. For bucketing, there is one pair per window that a record may belong to. The mask selects the records in
        this window; None selects all records.
        """
        job, window = self._job, self._job.window
        if self._grid is None:
            yield 0, None
        elif job.family is not Family.SLIDING or not job.by_windows:
            yield self._grid.slice_starts(places), None
        else:
            assert isinstance(window, SlidingWindow)
            last = (places - window.offset_ms) // window.every_ms * window.every_ms + window.offset_ms
            for back in range(0, window.size_ms, window.every_ms):
                inside = last - back + window.size_ms > places
                yield last - back, None if inside.all() else inside

    def _update(self, starts: IntArray | int, records: Records) -> Iterator[pa.RecordBatch]:
        if not isinstance(starts, int) and len(starts) and (starts == starts[0]).all():
            starts = int(starts[0])
        for part in self._pieces(starts, records.strata, len(records.times)):
            if part is None:
                self._states.update(starts, records)
            else:
                self._states.update(starts if isinstance(starts, int) else starts[part], records.at(part))
            if self._states.nbytes > MEMORY_BYTES and not self._job.whole:
                yield from self._drain()

    def _pieces(self, starts: IntArray | int, strata: list[pa.Array], rows: int) -> Iterator[IntArray | None]:
        """Yields the positions of records, in chunks whose states fit into memory. None means all records at once."""
        most = max(MEMORY_BYTES // self._state_bytes, 1)
        if (isinstance(starts, int) and not strata) or rows <= most or self._job.whole:
            yield None
            return
        keys = strata if isinstance(starts, int) else [*strata, pa.array(starts)]
        codes = KeyTable(tuple(c.type for c in keys)).encode(keys, rows)
        if codes.max() < most:
            yield None
            return
        order = np.argsort(codes, kind="stable")
        yield from np.split(order, np.searchsorted(codes[order], np.arange(most, codes.max() + 1, most)))

    def _drain(self) -> Iterator[pa.RecordBatch]:
        """Emits all states, once for each block that a state belongs to."""
        layout = self._job.layout
        rows = (
            (key, {**row, "part": self._partition, "block": block})
            for key, row in self._states.drain()
            for block in self._job.blocks_of(row["slice_start"])
        )
        yield from record_batches(layout.partial_schema, len(layout.strata), rows)


def with_times(times: pa.Array, column: str) -> pa.Array:
    """Returns the event times of records.

    Raises:
        InvalidRecord: a record has none.
    """
    if times.null_count:
        accepted = "an event time in every record: filter the others out before"
        raise InvalidRecord(column, None, accepted, f"{times.null_count} of {len(times)} records have none")
    return times


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields chunks of `CHUNK_ROWS` records. The chunks, and so the results, do not depend on the sizes of
    the batches.
    """
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        while rows + len(batch) >= CHUNK_ROWS:
            yield _joined([*held, batch.slice(0, CHUNK_ROWS - rows)])
            batch, held, rows = batch.slice(CHUNK_ROWS - rows), [], 0
        held.append(batch)
        rows += len(batch)
    if rows:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def millis_of(times: pa.Array) -> IntArray:
    """Converts timestamps of any unit, or integers, to ms. A timestamp without a zone is read as UTC."""
    if pa.types.is_timestamp(times.type):
        micros: IntArray = np.asarray(times.cast(pa.timestamp("us")).cast(pa.int64()), np.int64)
        return micros // 1000
    return numbers(times)


def _canonical(column: pa.Array, name: str) -> pa.Array:
    wanted = COLUMN_TYPES[name]
    return column if column.type == wanted else column.cast(wanted)
