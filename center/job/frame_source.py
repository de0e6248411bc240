"""The frame log as a Spark stream: `spark.readStream.format("edgewater_frames")`.

An offset says, per query key, up to which position of the catalog's index frames have been read. The
result store's consumed positions are where a stream begins, so Spark's checkpoint is never the truth, and what
has been consumed is not read again, whatever Spark asks for.

One reader lives in a Python process of its own beside the driver and plans (`initialOffset`,
`latestOffset`, `partitions`, `commit`); copies of another, pickled, read on the executors. What the
planner knows it reads from the catalog and the result store, and executors need the log only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

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

from center.catalog import Catalog
from center.job.admission import Admission, BatchLimits, RoundRobin
from center.job.coalescing import MANY_FRAMES, BatchCoalescer
from center.job.frame_retention import FrameRetention
from center.job.merge import merge_rows
from center.job.rows import ROW_DDL, FrameRow, row_of_damage, rows_of_frame, to_batch
from center.results import ResultStore
from center.spark.workers import settle
from center.storage.frame_log import FrameEntry, FrameLog
from edgewater.errors import CorruptFrame, StorageError

FORMAT = "edgewater_frames"
MIN_PARTITION_BYTES = 1 << 20
"""Below this a task of its own costs more than it saves."""
LOOK_AGAIN_S = 0.005
"""While a batch is held back."""

Offset = dict[str, int]

logger = logging.getLogger(__name__)


def now_ms() -> int:
    """The reader runs in a process of its own, so its clock cannot be handed to it."""
    return int(time.time() * 1000)  # noqa: TID251


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What the reader has to know; travels as Spark options, which are text.

    Attributes:
        parallelism: into how many tasks a large micro-batch is cut.
        keep_frames_ms: how long frames that have been applied stay in index and log all the same.
        retention_every_ms: how often older ones are dropped.
    """

    catalog_url: str
    results_url: str
    log_dir: str
    limits: BatchLimits = field(default_factory=BatchLimits)
    parallelism: int = 2
    keep_frames_ms: int = 0
    retention_every_ms: int = 10_000

    def to_options(self) -> dict[str, str]:
        # Spark blacks out options whose name holds "url" wherever it prints a plan: these may hold a password.
        return {
            "catalog_url": self.catalog_url,
            "results_url": self.results_url,
            "log_dir": self.log_dir,
            "parallelism": str(self.parallelism),
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
        )


class FramePartition(InputPartition):  # type: ignore[misc]
    """The frames that one task reads, each with its query's key."""

    def __init__(self, frames: tuple[tuple[str, FrameEntry], ...]) -> None:
        super().__init__(None)
        self.frames = frames


class FrameSource(DataSource):  # type: ignore[misc]
    """Registers under `FORMAT`; rows as `center.job.rows.ROW_SCHEMA`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return ROW_DDL

    def streamReader(self, schema: Any) -> FrameReader:  # noqa: N802
        return FrameReader(SourceOptions.from_options(self.options))


class FrameReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Plans micro-batches and reads them. A copy for an executor takes the options along and no connection."""

    def __init__(self, options: SourceOptions, admission: Admission | None = None) -> None:
        self._options = options
        self._admission = admission or RoundRobin()
        self._coalescer = BatchCoalescer()
        self._target: Offset | None = None
        self._failures = 0

    def __reduce__(self) -> tuple[type[FrameReader], tuple[SourceOptions, Admission]]:
        return type(self), (self._options, self._admission)

    @cached_property
    def _catalog(self) -> Catalog:
        return Catalog(self._options.catalog_url)

    @cached_property
    def _store(self) -> ResultStore:
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
        self._target = self._catalog.last_positions()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """How far the next micro-batch reaches. Never raises: that would end the stream, and a
        catalog that does not answer now may answer in a second."""
        try:
            last = self._catalog.last_positions() if self._target is None else self._target
            if isinstance(limit, ReadAllAvailable):
                ends = last
            else:
                last = self._gathered(start, last)
                ends = self._admission.admit(start, last, self._sizes, _narrowed(self._options.limits, limit))
        except Exception as exc:
            self._failed("latestOffset", exc)
            return start
        self._failures = 0
        # Keys in one order, or Spark takes the same offset for a new one and runs empty batches for
        # ever. Positions never go back, or it would read again.
        return _sorted({**start, **{key: max(end, start.get(key, 0)) for key, end in ends.items()}})

    def _gathered(self, start: Offset, last: Offset) -> Offset:
        """The last positions, once the edges that speak at the same moments have all spoken (`BatchCoalescer`)."""
        if self._target is not None:
            return last
        self._coalescer.keep(last)
        while True:
            waiting = {key: end for key, end in last.items() if end > start.get(key, 0)}
            if sum(end - start.get(key, 0) for key, end in waiting.items()) > MANY_FRAMES:
                return last
            edges = {
                key: {str(entry.edge) for entry in self._catalog.frames(key, start.get(key, 0), end)}
                for key, end in waiting.items()
            }
            if not self._coalescer.holds(edges, time.monotonic()):
                return last
            time.sleep(LOOK_AGAIN_S)
            last = self._catalog.last_positions()

    def _sizes(self, key: str, after: int, through: int) -> Sequence[tuple[int, int]]:
        return [(entry.position, entry.wire_bytes) for entry in self._catalog.frames(key, after, through)]

    def partitions(self, start: Offset, end: Offset) -> list[FramePartition]:
        # A checkpoint may be older than the store. Merged with what is new, what has been applied could not be told
        # apart from it any more.
        consumed = self._store.consumed()
        after = {key: max(start.get(key, 0), consumed.get(key, 0)) for key in end}
        frames = [
            (key, entry)
            for key, through in end.items()
            if through > after[key]
            for entry in self._catalog.frames(key, after[key], through)
        ]
        return [FramePartition(part) for part in divide(frames, self._options.parallelism)]

    def read(self, partition: FramePartition) -> Iterator[pa.RecordBatch]:
        """One batch: the rows of the frames, their partials merged (`merge_rows`)."""
        settle()
        log, log_dir = FrameLog(self._options.log_dir), Path(self._options.log_dir)
        merged = merge_rows(row for key, entry in partition.frames for row in read_frame(log, log_dir, key, entry))
        if merged:
            yield to_batch(merged)

    def commit(self, end: Offset) -> None:
        """FrameRetention. That Spark is through with `end` is not asked: the result store knows. Never raises."""
        try:
            self._retention.run(now_ms())
        except Exception as exc:
            self._failed("retention", exc)

    def _failed(self, what: str, exc: Exception) -> None:
        self._failures += 1
        # Asked fifty times a second, a catalog that is down would fill the log: each doubling is told.
        if self._failures & (self._failures - 1) == 0:
            logger.warning("%s failed, %d times in a row: %s", what, self._failures, exc)


def divide(frames: Sequence[tuple[str, FrameEntry]], parallelism: int) -> list[tuple[tuple[str, FrameEntry], ...]]:
    """Cuts frames, which come ordered by query, into at most `parallelism` runs of about equal bytes.

    A run is contiguous, so few queries lie in two of them and most keys are merged where they are read.
    """
    total_bytes = sum(entry.length for _, entry in frames)
    count = max(1, min(parallelism, total_bytes // MIN_PARTITION_BYTES))
    runs: list[list[tuple[str, FrameEntry]]] = [[] for _ in range(count)]
    before_bytes = 0
    for key, entry in frames:
        runs[min(before_bytes * count // max(total_bytes, 1), count - 1)].append((key, entry))
        before_bytes += entry.length
    return [tuple(run) for run in runs if run]


def read_frame(log: FrameLog, log_dir: Path, key: str, entry: FrameEntry) -> list[FrameRow]:
    """The rows of one frame; of a damaged one the row that says so.

    Raises:
        StorageError: it is the storage that fails, not the frame: trying again is right, and passing
            over what may be there would lose it.
    """
    try:
        stored = log.read(entry.segment, entry.offset, entry.length)
        identity = (stored.edge, stored.incarnation, stored.frame.seq, stored.frame.crc32c)
        if identity != (entry.edge, entry.incarnation, entry.seq, entry.crc32c):
            raise StorageError(f"the log holds frame {identity}, the index says {entry}")
        return rows_of_frame(key, entry, stored.frame.unpack())
    except CorruptFrame as exc:
        return [row_of_damage(key, entry, str(exc))]
    except StorageError as exc:
        if isinstance(exc.__cause__, OSError) and not _is_lost(exc.__cause__, log_dir):
            raise
        return [row_of_damage(key, entry, str(exc))]


def _is_lost(error: OSError, log_dir: Path) -> bool:
    """A file missing from a log that has others is lost. From a log with none, a volume is not mounted."""
    return isinstance(error, FileNotFoundError) and log_dir.is_dir() and any(log_dir.iterdir())


def _narrowed(limits: BatchLimits, limit: ReadLimit) -> BatchLimits:
    """Our limits with the one that Spark asks for. A minimum is not waited for: an answer would be late."""
    if isinstance(limit, ReadMaxBytes):
        return replace(limits, bytes=limit.max_bytes)
    if isinstance(limit, ReadMaxRows):
        return replace(limits, frames=max(1, limit.max_rows))
    if isinstance(limit, ReadMaxFiles):
        return replace(limits, frames=max(1, limit.max_files))
    return limits


def _sorted(offset: Mapping[str, int]) -> Offset:
    return dict(sorted(offset.items()))
