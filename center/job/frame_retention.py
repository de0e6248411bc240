"""Retention of frames: drops frames that the result store has applied, first from the index, then from disk."""

from __future__ import annotations

from bisect import bisect_right

from center.job.job_parts import JobParts
from center.results.store_pair import advance_mark
from center.storage.frame_log import FrameLog
from center.storage.query_partition import ALL_QUERIES, QueryPartition


class FrameRetention:
    """Drops frames that were applied and are older than `keep_ms`.

    Only the result store decides which frames were applied. A segment is removed with the last
    frame in it. A crash between index and disk leaves segments without index rows; a starting gateway removes them.

    Args:
        keep_ms: how long frames stay after their arrival even if they were applied.
        every_ms: least time between two runs.
    """

    def __init__(self, shared: JobParts, log: FrameLog, *, keep_ms: int = 0, every_ms: int = 10_000) -> None:
        self._shared = shared
        self._log = log
        self._keep_ms = keep_ms
        self._every_ms = every_ms
        self._ran_at_ms: int | None = None
        self._dropped: dict[str, int] = {}
        self._marked: dict[str, int] = {}

    def run(self, now_ms: int, partition: QueryPartition = ALL_QUERIES) -> list[str]:
        """Drops frames of the partition's queries; returns the segments that were removed.

        Raises StorageError; it may be called again.
        """
        if self._ran_at_ms is not None and abs(now_ms - self._ran_at_ms) < self._every_ms:
            return []
        self._ran_at_ms = now_ms
        consumed = {key: position for key, position in self._shared.store.consumed().items() if key in partition}
        if consumed != self._marked:
            advance_mark(self._shared.catalog, self._shared.store)
            self._marked = consumed
        through = {key: self._expired(key, position, now_ms) for key, position in consumed.items()}
        through = {key: position for key, position in through.items() if position > self._dropped.get(key, 0)}
        if not through:
            return []
        removed = self._shared.catalog.frames.drop(through)
        for segment in removed:
            self._log.remove(segment)
        self._shared.catalog.frames.forget_segments(removed)
        self._dropped |= through
        return removed

    def _expired(self, key: str, consumed: int, now_ms: int) -> int:
        """Returns the last consumed position whose frame is older than `keep_ms`."""
        if self._keep_ms == 0:
            return consumed
        positions = range(1, consumed + 1)
        return bisect_right(positions, now_ms - self._keep_ms, key=lambda position: self._arrival_ms(key, position))

    def _arrival_ms(self, key: str, position: int) -> int:
        entries = self._shared.catalog.frames.entries(key, position - 1, position)
        return entries[0].received_at_ms if entries else 0
