"""The merge phase merges partials into one synopsis per window and stratum.

Partials arrive sorted by stratum, block of windows, slice and part. The partials of one slice are merged first. Sliding
windows are then merged from slices with two stacks, with three merges per window for any overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import pyarrow as pa

from center.batch.compute_phase import BatchJob
from center.batch.layout import timestamp
from center.batch.pattern import merged
from center.batch.slice_states import record_batches
from center.batch.windows import Family
from center.spark.workers import settle
from edgewater.model.windows import SessionWindow, SlidingWindow, sessions_of
from edgewater.synopses import from_bytes

KeyedPartial = tuple[tuple[Any, ...], dict[str, Any], "SliceSynopsis"]
"""A row of the compute phase: its stratum, its columns by name, and its partial."""

_NAN = float("nan")
_NUMBERS = ("slice_start", "first_ms", "last_ms", "records", "nulls")

FAN_IN = 64  # limit: memory of a merge
"""Partials that are decoded at the same time, because a merge needs all its inputs in memory."""


@dataclass(frozen=True, slots=True)
class SliceSynopsis:
    """A synopsis of some records, with the first and last event time of the records, and counts.

    Attributes:
        start: start of the first slice.
        first_ms, last_ms: event times of the first and the last record, ms.
        records, nulls: number of values in the synopsis, and number of null values.
        data: bytes of the synopsis; None if only `held` is set.
        held: decoded synopsis; None if only `data` is set.
        cut: whether the partial is a session that was cut at its maximum length.
    """

    start: int
    first_ms: int
    last_ms: int
    records: int
    nulls: int
    data: bytes | None = None
    held: Any = None
    cut: bool = False

    def synopsis(self) -> Any:
        return from_bytes(self.data) if self.held is None and self.data is not None else self.held

    def decoded(self) -> SliceSynopsis:
        """Returns the same partial with a decoded synopsis. Called before several merges, to decode only once."""
        return replace(self, held=self.synopsis())

    def to_bytes(self) -> bytes:
        if self.data is None:
            return bytes(self.held.to_bytes())
        from_bytes(self.data)  # raises for corrupt bytes, as a merge would
        return self.data


def union(pieces: Iterable[SliceSynopsis]) -> SliceSynopsis:
    """Merges partials into one partial. There must be at least one partial."""
    first, *others = pieces
    while others:
        parts, others = others[:FAN_IN], others[FAN_IN:]
        first = SliceSynopsis(
            first.start,
            min(p.first_ms for p in (first, *parts)),
            max(p.last_ms for p in (first, *parts)),
            sum(p.records for p in (first, *parts)),
            sum(p.nulls for p in (first, *parts)),
            held=merged(first.synopsis(), [p.synopsis() for p in parts]),
        )
    return first


class TwoStacks:
    """A queue of slices whose union costs O(1) merges, amortised, per slice added or removed.

    The front has, for each of its slices, the union of this slice and all later slices in the front. The back has one
    union of all its slices, into which a new slice is merged. When the front is empty, the back becomes the front.
    (Tangwongsan et al., "Low-Latency Sliding-Window Aggregation in Worst-Case Constant Time", DEBS 2017, describe this
    algorithm as folklore.)
    """

    def __init__(self) -> None:
        self._front: list[SliceSynopsis] = []
        self._back: list[SliceSynopsis] = []
        self._added: SliceSynopsis | None = None

    def __bool__(self) -> bool:
        return bool(self._front or self._back)

    def push(self, piece: SliceSynopsis) -> None:
        self._back.append(piece)
        self._added = piece if self._added is None else union([self._added, piece])

    def drop_before(self, start: int) -> None:
        while self:
            if not self._front:
                self._flip()
            if self._front[-1].start >= start:
                return
            self._front.pop()

    def _flip(self) -> None:
        suffix: SliceSynopsis | None = None
        for piece in reversed(self._back):
            suffix = piece if suffix is None else union([piece, suffix])
            self._front.append(suffix)
        self._back, self._added = [], None

    def union(self) -> SliceSynopsis:
        parts = [p for p in (self._front[-1] if self._front else None, self._added) if p is not None]
        return union(parts)


def sliding_windows(
    slices: Iterable[SliceSynopsis], window: SlidingWindow, first: int, end: int
) -> Iterator[tuple[int, SliceSynopsis]]:
    """Yields the windows that start in [first, end) and contain a slice, ascending, each with the union of its slices.

    Args:
        slices: ascending by start, one per slice.
    """
    queue = TwoStacks()
    at: int | None = None
    for piece in slices:
        while at is not None and queue and at + window.size_ms <= piece.start and at < end:
            queue.drop_before(at)
            if queue:
                yield at, queue.union()
                at += window.every_ms
        if at is None or not queue:
            at = max(window.windows_of_slice(piece.start)[0], first)
        queue.push(piece.decoded())
    while at is not None and at < end:
        queue.drop_before(at)
        if not queue:
            return
        yield at, queue.union()
        at += window.every_ms


def session_windows(slices: Iterable[SliceSynopsis], window: SessionWindow) -> Iterator[SliceSynopsis]:
    """Yields the sessions of one stratum, ascending.

    Args:
        slices: ascending, one per slice of the window's grid.
    """
    for session, cut in sessions_of(slices, window, lambda piece: (piece.first_ms, piece.last_ms)):
        yield replace(union(session), cut=cut)


class MergePhase:
    """The merge phase as a function for `DataFrame.mapInArrow`. Sorted partials become windows, as in `build`'s result.

    For one synopsis over all records, Spark need not sort the partials, because this phase sorts them.
    """

    def __init__(self, job: BatchJob) -> None:
        self._job = job

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle()
        strata = len(self._job.layout.strata)
        yield from record_batches(self._job.layout.result_schema, strata, self._merged(_rows(batches, strata)))

    def _merged(self, parts: Iterator[KeyedPartial]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yields (stratum, columns) for each output row."""
        if self._job.family is Family.GLOBAL and not self._job.layout.strata:
            parts = iter(sorted(parts, key=lambda r: r[1]["part"]))
        for (key, block), same in groupby(parts, lambda r: (r[0], r[1]["block"])):
            pieces = (piece for _, _, piece in same)
            slices = (union(alike) for _, alike in groupby(pieces, lambda p: p.start))
            for start, end, piece in self._windows(block, slices):
                yield key, result_row(start, end, piece)

    def _windows(
        self, block: int, slices: Iterator[SliceSynopsis]
    ) -> Iterator[tuple[int | None, int | None, SliceSynopsis]]:
        job, window = self._job, self._job.window
        if isinstance(window, SessionWindow):
            for piece in session_windows(slices, window):
                yield *bounds_of(job, piece), piece
        elif job.slides:
            first = job.grid.offset_ms + block * job.block_ms
            for start, piece in sliding_windows(slices, job.grid, first, first + job.block_ms):
                if isinstance(window, SlidingWindow):
                    yield start, start + window.size_ms, piece
                elif start >= 0:  # count windows begin at the first record
                    yield *bounds_of(job, piece), piece
        else:
            for piece in slices:
                yield *bounds_of(job, piece), piece


def bounds_of(job: BatchJob, piece: SliceSynopsis) -> tuple[int | None, int | None]:
    """Returns [start, end) of a window, in ms. Without a window, returns the extent of the records, or None without a
    time.
    """
    match job.window:
        case SlidingWindow(size_ms=size):
            return piece.start, piece.start + size
        case SessionWindow() as session:
            # A cut session ends where the next one begins, as at the center (`center.ledger.sessionize`).
            border = session.slice_start(piece.last_ms) + session.gap_ms
            return piece.first_ms, border if piece.cut else piece.last_ms + session.gap_ms
    return (None, None) if job.layout.time is None else (piece.first_ms, piece.last_ms + 1)


def result_row(start: int | None, end: int | None, piece: SliceSynopsis) -> dict[str, Any]:
    return {
        "window_start": timestamp(start),
        "window_end": timestamp(end),
        "synopsis": piece.to_bytes(),
        "records": piece.records,
        "nulls": piece.nulls,
    }


def _rows(batches: Iterator[pa.RecordBatch], strata: int) -> Iterator[KeyedPartial]:
    for batch in batches:
        columns = [c.to_pylist() for c in batch.columns]
        names = batch.schema.names[strata:]
        for row in zip(*columns, strict=True):
            held = dict(zip(names, row[strata:], strict=True))
            yield stratum_of(row[:strata]), held, piece_of(held)


def stratum_of(values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns a stratum as a key. Strata with NaN are equal keys, because Spark treats NaN as one group."""
    return tuple(_NAN if value != value else value for value in values)


def piece_of(row: dict[str, Any]) -> SliceSynopsis:
    start, first_ms, last_ms, records, nulls = (int(row[n]) for n in _NUMBERS)
    return SliceSynopsis(start, first_ms, last_ms, records, nulls, row["synopsis"])
