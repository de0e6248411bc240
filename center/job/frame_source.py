"""The frame log as a Spark stream: `spark.readStream.format("edgewater_frames")`.

An offset is, per query key, the last position of the catalog's index that was read. A stream begins at the result
store's consumed positions. So Spark's checkpoint decides nothing, and consumed frames are not read again, whatever
Spark requests.

One reader runs in a Python process beside the driver and plans (`initialOffset`, `latestOffset`, `partitions`,
`commit`) from the catalog and the result store. Pickled copies of another reader run on the executors, which need only
the frame log. There this module must not import SQLAlchemy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from center.job.admission import AdmissionPolicy, BatchLimits, LeastSlack, PendingFrame
from center.job.coalescing import MANY_FRAMES, MANY_QUERIES, BatchCoalescer
from center.job.frame_retention import FrameRetention
from center.job.merge import merge_rows
from center.job.rows import (
    ROW_DDL,
    FrameRow,
    RowKind,
    row_of_damage,
    row_of_partial,
    rows_of_positions,
    to_batch,
)
from center.spark.workers import settle
from center.storage.frame_log import FrameEntry, FrameLocation, FrameLog, decode_fetched
from center.storage.query_partition import ALL_QUERIES, QueryPartition
from edgewater.guard.frame_work import BYTES_PER_UNIT
from edgewater.model.errors import StorageError
from edgewater.model.windows import window_ends
from edgewater.runtime.clock import now_ms

if TYPE_CHECKING:
    from center.catalog import Catalog, LastPositions
    from center.results import ResultStore

FORMAT = "edgewater_frames"
MIN_PARTITION_BYTES = 2 << 20
"""A smaller partition costs more as a task than it saves."""
COALESCING_POLL_S = 0.005
"""Interval of polling the catalog while a batch is delayed."""
PARKED_POLL_S = 0.03
"""Interval at which the reader of a standby checks whether its driver leads."""
WARM_UP, WARM_UP_BATCHES = "", 2
"""No query has this key. Its position counts batches without frames. A standby runs them, so that its first batch with
frames is not Spark's first batch."""

Offset = dict[str, int]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The reader's configuration; passed as Spark options, which are text.

    Attributes:
        parallelism: number of tasks of a large micro-batch.
        keep_frames_ms: how long applied frames stay in index and log.
        retention_every_ms: how often older frames are dropped.
        leads: file that names the partition of the queries that this driver leads. Without the file the stream is
            parked: it runs, and reads nothing. Empty: the stream always reads the frames of all queries.
        plans_ahead: whether a micro-batch is planned while the previous one is read (`BatchPipeline`).
    """

    catalog_url: str
    results_url: str
    log_dir: str
    limits: BatchLimits = field(default_factory=BatchLimits)
    parallelism: int = 2
    keep_frames_ms: int = 0
    retention_every_ms: int = 10_000
    leads: str = ""
    plans_ahead: bool = False

    def to_options(self) -> dict[str, str]:
        # Spark redacts options whose name contains "url" in printed plans. The URLs may contain a password.
        return {
            "catalog_url": self.catalog_url,
            "results_url": self.results_url,
            "log_dir": self.log_dir,
            "leads": self.leads,
            "parallelism": str(self.parallelism),
            "plans_ahead": str(int(self.plans_ahead)),
            "keep_frames_ms": str(self.keep_frames_ms),
            "retention_every_ms": str(self.retention_every_ms),
            "frames_per_query": str(self.limits.frames_per_query),
            "bytes_per_query": str(self.limits.bytes_per_query),
            "frames": str(self.limits.frames),
            "bytes": str(self.limits.bytes),
        }

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> SourceOptions:
        limits = BatchLimits(
            int(options["frames_per_query"]),
            int(options["bytes_per_query"]),
            int(options["frames"]),
            int(options["bytes"]),
        )
        return cls(
            options["catalog_url"],
            options["results_url"],
            options["log_dir"],
            limits,
            int(options["parallelism"]),
            int(options["keep_frames_ms"]),
            int(options["retention_every_ms"]),
            options["leads"],
            options["plans_ahead"] == "1",
        )


class FramePartition(InputPartition):  # type: ignore[misc]
    """The frames that one task reads, each with its query's key.

    Attributes:
        quarantined: by key and position, why frames were set aside; the task does not read these frames.
    """

    def __init__(
        self,
        frames: tuple[tuple[str, FrameEntry], ...],
        quarantined: Mapping[tuple[str, int], str] = MappingProxyType({}),
    ) -> None:
        super().__init__(None)
        self.frames = frames
        self.quarantined = {at: quarantined[at] for key, e in frames if (at := (key, e.position)) in quarantined}


class FrameSource(DataSource):  # type: ignore[misc]
    """The data source named `FORMAT`; rows have the schema `center.job.rows.ROW_SCHEMA`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return ROW_DDL

    def streamReader(self, schema: Any) -> FrameReader:  # noqa: N802
        return FrameReader(SourceOptions.from_options(self.options))


class FrameReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Plans micro-batches and reads them. A copy for an executor has the options and no connections."""

    def __init__(self, options: SourceOptions, admission: AdmissionPolicy | None = None) -> None:
        self._options = options
        self._admission = admission or LeastSlack(self._step_ms, time.monotonic, plans_ahead=options.plans_ahead)
        self._steps: dict[str, tuple[int, int] | None] = {}
        self._coalescer = BatchCoalescer()
        self._read: dict[str, list[FrameEntry]] = {}
        self._target: Offset | None = None
        self._known: LastPositions | None = None
        self._last: Offset = {}
        self._nothing: tuple[Offset, Offset] | None = None
        self._failures = 0
        self._partition: QueryPartition | None = None if options.leads else ALL_QUERIES
        self._warm_ups = 0

    def __reduce__(self) -> tuple[type[FrameReader], tuple[SourceOptions]]:
        return type(self), (self._options,)

    @cached_property
    def _catalog(self) -> Catalog:
        from center.catalog import Catalog

        return Catalog(self._options.catalog_url)

    @cached_property
    def _store(self) -> ResultStore:
        from center.results import ResultStore

        return ResultStore(self._options.results_url)

    @cached_property
    def _retention(self) -> FrameRetention:
        log = FrameLog(self._options.log_dir)
        keep_ms, every_ms = self._options.keep_frames_ms, self._options.retention_every_ms
        return FrameRetention(self._catalog, self._store, log, keep_ms=keep_ms, every_ms=every_ms)

    def initialOffset(self) -> Offset:  # noqa: N802
        return _sorted(self._store.consumed())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxBytes(self._options.limits.bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._catalog.frames.last_positions()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Returns the end of the next micro-batch.

        Never raises: an error would end the stream, but the catalog may recover.
        """
        partition = self._led_partition()
        if partition is None:
            return self._parked_offset(start)
        try:
            if partition != self._partition:
                # Other drivers have led since the stream began. The frames that they have applied may be gone.
                start = {**start, **{key: max(at, start.get(key, 0)) for key, at in self._store.consumed().items()}}
            last = self._last_positions(partition)
            if self._nothing is not None and last is self._nothing[0] and start == self._nothing[1]:
                self._failures = 0
                return start
            self._read = {}
            if isinstance(limit, ReadAllAvailable):
                ends = last
            else:
                limits = _narrowed(self._options.limits, limit)
                last = self._gathered(start, last, partition)
                self._read_ahead(start, last, limits)
                ends = self._admission.admit(start, last, self._pending, limits)
        except Exception as exc:
            self._failed("latestOffset", exc)
            return start
        self._failures, self._partition = 0, partition
        self._nothing = None if ends else (last, start)
        # Keys are sorted: Spark treats the same offset in another order as a new offset, and would run empty batches
        # forever. Positions never decrease: otherwise Spark would read frames again.
        return _sorted({**start, **{key: max(end, start.get(key, 0)) for key, end in ends.items()}})

    def _led_partition(self) -> QueryPartition | None:
        """Returns the partition that this driver leads; None: the driver does not lead."""
        if not self._options.leads:
            return ALL_QUERIES
        try:
            return QueryPartition.parse(Path(self._options.leads).read_text(encoding="ascii"))
        except FileNotFoundError:
            return None

    def _last_positions(self, partition: QueryPartition) -> Offset:
        """The last positions of the partition's queries; the same object as long as nothing has changed."""
        if self._target is not None:
            return {key: last for key, last in self._target.items() if key in partition}
        positions = self._catalog.frames.last_positions_since(self._known)
        if positions is not self._known or partition != self._partition:
            self._known, self._last = (
                positions,
                {key: last for key, last in positions.by_key.items() if key in partition},
            )
        return self._last

    def _parked_offset(self, start: Offset) -> Offset:
        self._partition = None
        if self._warm_ups < WARM_UP_BATCHES:
            self._warm_ups += 1
            return _sorted({**start, WARM_UP: start.get(WARM_UP, 0) + 1})
        time.sleep(PARKED_POLL_S)
        return start

    def _gathered(self, start: Offset, last: Offset, partition: QueryPartition) -> Offset:
        """Returns the last positions, after waiting for edges that send at the same moment (`BatchCoalescer`)."""
        if self._target is not None:
            return last
        self._coalescer.keep(last)
        while True:
            pending = {key: end for key, end in last.items() if end > start.get(key, 0)}
            frames, limits = sum(end - start.get(key, 0) for key, end in pending.items()), self._options.limits
            if len(pending) >= MANY_QUERIES and frames < limits.frames:
                waits = self._coalescer.should_wait_for_queries(pending, time.monotonic())
            elif frames > MANY_FRAMES:
                return last
            else:
                self._read_ahead(start, last, limits)
                edges = {
                    key: {str(entry.edge) for entry in self._frames(key, start.get(key, 0), end)}
                    for key, end in pending.items()
                }
                waits = self._coalescer.should_wait(edges, time.monotonic())
            if not waits:
                return last
            time.sleep(COALESCING_POLL_S)
            last = self._last_positions(partition)

    def _pending(self, key: str, after: int, through: int) -> Sequence[PendingFrame]:
        return [
            PendingFrame(e.position, _size(e), e.received_at_ms, e.edge, e.through_ms)
            for e in self._frames(key, after, through)
        ]

    def _read_ahead(self, start: Offset, last: Offset, limits: BatchLimits) -> None:
        """Reads the entries of pending frames, as many as a batch may contain, by one statement for all keys."""
        pending = {key: end for key, end in last.items() if end > start.get(key, 0)}
        share = max(1, limits.frames // max(1, len(pending)))
        missing = {}
        for key, end in pending.items():
            read = self._read.setdefault(key, [])
            after = read[-1].position if read else start.get(key, 0)
            if after < min(end, start.get(key, 0) + share):
                missing[key] = (after, min(end, start.get(key, 0) + share))
        if missing:
            for key, entries in self._catalog.frames.entries_in(missing).items():
                self._read[key] += entries

    def _frames(self, key: str, after: int, through: int) -> Sequence[FrameEntry]:
        """Returns a query's frames, from the entries that `_read_ahead` has read if they are complete."""
        read = self._read.get(key, [])
        if read and read[0].position <= after + 1 and through <= read[-1].position:
            return [entry for entry in read if after < entry.position <= through]
        return self._catalog.frames.entries(key, after, through)

    def _step_ms(self, key: str) -> tuple[int, int] | None:
        """Returns distance and offset of a query's window ends; for session windows, of their slices."""
        if key not in self._steps:
            from edgewater.model.registered_query import query_key

            self._steps = {
                query_key(q.ref): window_ends(q.spec.window) for q in self._catalog.queries.all(deleted=True)
            }
            self._steps.setdefault(key, None)  # the package of its function is not installed here
        return self._steps[key]

    def partitions(self, start: Offset, end: Offset) -> list[FramePartition]:
        if end.get(WARM_UP, 0) > start.get(WARM_UP, 0):
            return [FramePartition(())]
        # A checkpoint may be older than the store. After a merge with new frames, applied frames could not be told
        # apart.
        consumed = self._store.consumed()
        after = {key: max(start.get(key, 0), consumed.get(key, 0)) for key in end}
        frames = [
            (key, entry)
            for key, through in end.items()
            if through > after[key] and key != WARM_UP
            for entry in self._frames(key, after[key], through)
        ]
        quarantined = self._catalog.quarantine.frame_reasons()
        return [FramePartition(part, quarantined) for part in divide(frames, self._options.parallelism)]

    def read(self, partition: FramePartition) -> Iterator[pa.RecordBatch]:
        """Yields one batch: the merged partials of the frames (`merge_rows`), and the positions that were read."""
        settle()
        log, log_dir = FrameLog(self._options.log_dir), Path(self._options.log_dir)
        merged = merge_rows(read_frames(log, log_dir, partition.frames, partition.quarantined))
        if merged:
            yield to_batch(merged)

    def commit(self, end: Offset) -> None:
        """Runs retention, by the result store's consumed positions instead of `end`. Never raises."""
        try:
            self._retention.run(now_ms(), self._partition or ALL_QUERIES)
        except Exception as exc:
            self._failed("retention", exc)

    def _failed(self, what: str, exc: Exception) -> None:
        self._failures += 1
        # Called fifty times a second while the catalog is down. It is logged each time the count doubles.
        if self._failures & (self._failures - 1) == 0:
            log.warning("%s failed, %d times in a row: %s", what, self._failures, exc)


def _size(entry: FrameEntry) -> int:
    """Returns the size of a frame for admission and division: its bytes before compression.

    If its work in bytes is more, that number is returned.
    """
    return max(entry.length, entry.plain_bytes, entry.work * BYTES_PER_UNIT)


def divide(frames: Sequence[tuple[str, FrameEntry]], parallelism: int) -> list[tuple[tuple[str, FrameEntry], ...]]:
    """Divides frames, ordered by query, into at most `parallelism` runs of about equal size (`_size`).

    A run is contiguous. So few queries are in two runs, and most keys are merged where they are read.
    """
    total_bytes = sum(_size(entry) for _, entry in frames)
    count = max(1, min(parallelism, total_bytes // MIN_PARTITION_BYTES))
    runs: list[list[tuple[str, FrameEntry]]] = [[] for _ in range(count)]
    before_bytes = 0
    for key, entry in frames:
        runs[min(before_bytes * count // max(total_bytes, 1), count - 1)].append((key, entry))
        before_bytes += _size(entry)
    return [tuple(run) for run in runs if run]


def read_frames(
    log: FrameLog,
    log_dir: Path,
    frames: Sequence[tuple[str, FrameEntry]],
    quarantined: Mapping[tuple[str, int], str] = MappingProxyType({}),
) -> Iterator[FrameRow]:
    """Yields the rows of frames: the positions that were read, a row per partial, and a DAMAGED row per damaged frame.

    Args:
        frames: each with its query's key, ordered by position within a query.
        quarantined: why frames were set aside, by key and position: they are not read, and have one QUARANTINED row.

    Raises:
        StorageError: the storage failed, not a frame: retry, because skipping frames would lose them.
    """
    read = [(key, entry) for key, entry in frames if (key, entry.position) not in quarantined]
    locations = [FrameLocation(entry.segment, entry.offset, entry.length) for _, entry in read]
    fetched = iter(log.fetch(locations))
    yield from rows_of_positions((key, entry.position) for key, entry in frames)
    for key, entry in frames:
        if (key, entry.position) in quarantined:
            yield row_of_damage(key, entry.position, quarantined[key, entry.position], RowKind.QUARANTINED)
        else:
            yield from _rows(log_dir, key, entry, next(fetched))


def _rows(log_dir: Path, key: str, entry: FrameEntry, record: bytes | OSError) -> list[FrameRow]:
    """Returns the rows of one frame's partials, or one row if it is damaged."""
    position = entry.position
    try:
        stored = decode_fetched(FrameLocation(entry.segment, entry.offset, entry.length), record)
        identity = (stored.query, stored.edge, stored.incarnation, stored.seq)
        if identity != (entry.query, entry.edge, entry.incarnation, entry.seq):
            raise StorageError(f"the log holds frame {identity}, the index says {entry}")
    except StorageError as exc:
        if isinstance(exc.__cause__, OSError) and not _is_lost(exc.__cause__, log_dir):
            raise
        return [row_of_damage(key, position, str(exc))]
    return [row_of_partial(key, position, p.slice_start_ms, p.synopsis) for p in stored.partials]


def _is_lost(error: OSError, log_dir: Path) -> bool:
    """Returns whether a missing file is lost: the log has other files.

    If the log is empty, a volume is probably not mounted.
    """
    return isinstance(error, FileNotFoundError) and log_dir.is_dir() and any(log_dir.iterdir())


def _narrowed(limits: BatchLimits, limit: ReadLimit) -> BatchLimits:
    """Returns the limits with Spark's limit applied.

    A minimum is ignored, because waiting for it would delay answers.
    """
    if isinstance(limit, ReadMaxBytes):
        return replace(limits, bytes=limit.max_bytes)
    if isinstance(limit, ReadMaxRows):
        return replace(limits, frames=max(1, limit.max_rows))
    if isinstance(limit, ReadMaxFiles):
        return replace(limits, frames=max(1, limit.max_files))
    return limits


def _sorted(offset: Mapping[str, int]) -> Offset:
    return dict(sorted(offset.items()))
