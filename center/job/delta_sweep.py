"""Deletes the segments of results that were never applied, or are no longer needed."""

from __future__ import annotations

from collections.abc import Callable

from center.job.job_parts import JobParts
from edgewater.base.errors import StorageError

MAX_UNAPPLIED_BYTES = 2 << 30
"""The most bytes of segments that no row names. With more, no frames are planned until results are applied, or until
the segments can be deleted."""
SWEEP_EVERY_MS = 10_000  # limit: lists of a directory


class DeltaSweep:
    """Sweeps the segments of the partition that this driver leads. The thread of the loop calls `run`.

    A segment is deleted if no row names it, and no row can name it later: its plan is not in flight, or its epoch is
    older. Tasks of an earlier leader may write after a sweep, so the sweep is repeated. Because a row that once named a
    segment is removed by a committed transaction, the deletion comes after the commit. Segments of partitions that an
    earlier number of drivers had are swept, too.
    """

    def __init__(
        self, shared: JobParts, *, every_ms: int = SWEEP_EVERY_MS, most_bytes: int = MAX_UNAPPLIED_BYTES
    ) -> None:
        self._shared, self._every_ms, self._most_bytes = shared, every_ms, most_bytes
        self._ran_at_ms: int | None = None
        self._unapplied_bytes = 0

    def run(self, now_ms: int, in_flight: Callable[[int], bool]) -> None:
        """Deletes segments, at intervals. Raises StorageError; it may be called again.

        Args:
            in_flight: returns whether a plan of this driver is neither applied nor dropped.
        """
        if self._ran_at_ms is not None and abs(now_ms - self._ran_at_ms) < self._every_ms and not self.is_full:
            return
        self._ran_at_ms, store = now_ms, self._shared.store
        files = store.segments.files()  # before the rows: what is named later is in flight now
        if not files and not self._unapplied_bytes:
            return
        named, partitions = store.named_segments()
        own, epoch = store.partition.directory, store.epoch
        unnamed = [f for f in files if f.name not in named and (f.partition == own or f.partition not in partitions)]
        # Segments of a plan in flight, or of a driver that has taken over: rows may name them later.
        kept = {
            f for f in unnamed if f.partition == own and (f.epoch > epoch or (f.epoch == epoch and in_flight(f.plan)))
        }
        self._note(sum(f.size for f in unnamed))
        store.segments.remove([f for f in unnamed if f not in kept])
        self._note(sum(f.size for f in kept))

    def _note(self, unapplied_bytes: int) -> None:
        self._unapplied_bytes = unapplied_bytes
        self._shared.metrics.unapplied_bytes.set(unapplied_bytes)

    @property
    def is_full(self) -> bool:
        """Whether there are too many bytes of results that are not applied."""
        return self._unapplied_bytes > self._most_bytes

    def require_room(self) -> None:
        """Raises StorageError if the directory is full."""
        if self.is_full:
            has, most = (f"{size >> 20} MiB" for size in (self._unapplied_bytes, self._most_bytes))
            raise StorageError(
                f"{self._shared.store.segments.root}: results of {has} are not applied; expected at most {most}"
            )
