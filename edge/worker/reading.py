"""Decides when sources may read, and how long records wait so that they are processed together (`ReadPace`)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable

from edge.records import COALESCE_S
from edge.worker.tuning import Tuning
from edgewater.scheduling import QueryProfile


class ReadPace:
    """The pace of the sources of one edge.

    Args:
        limit_bytes: memory of the queues above which sources have to wait.

    Attributes:
        has_room: set while the queues need less memory than the limit.
        may_read: set while sources may read. It is cleared while `is_full`, and for a short time after a small batch
            was read while batches are queued.
        is_full: whether the queues are above their limit, or too much work is queued.
    """

    def __init__(self, limit_bytes: int, tuning: Tuning) -> None:
        self._limit_bytes, self._tuning = limit_bytes, tuning
        # By stream. The wait is adapted so that batches have about `most_waiting` records.
        self._longest_wait_s: dict[str, float] = {}
        self._read_ms, self._read_little = 0, False
        self.is_full = False
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.may_read = asyncio.Event()
        self.may_read.set()

    def count(self, stream: str, rows: int) -> None:
        """Adapts the wait of a stream to the size of its last batch."""
        tuning, longest_s = self._tuning, self._longest_wait_s.get(stream, COALESCE_S)
        factor = 0.5 if rows > tuning.most_waiting else 2.0 if 2 * rows < tuning.most_waiting else 1.0
        self._longest_wait_s[stream] = min(max(factor * longest_s, COALESCE_S), tuning.longest_wait_s)

    def wait_s(self, stream: str, profiles: Iterable[QueryProfile], watermark_ms: float) -> float:
        """Returns how long the next records of a source may wait, in seconds.

        Args:
            watermark_ms: the wall time of the source's watermark; infinite if the source has none.
        """
        longest_s = self._longest_wait_s.get(stream, COALESCE_S)
        for profile in profiles:
            is_finite = math.isfinite(watermark_ms)
            left_ms = profile.next_end_ms(watermark_ms) - watermark_ms if is_finite else math.inf
            longest_s = min(longest_s, self._tuning.wait_share * profile.period_ms / 1000, left_ms / 1000)
        return max(longest_s, COALESCE_S)

    def read(self, work_ms: float, now_ms: int) -> None:
        """Remembers that a batch was read while batches are queued, and whether the batch had little work.

        Args:
            work_ms: the expected time of processing the batch.
        """
        self._read_ms, self._read_little = now_ms, work_ms < self._tuning.read_every_ms

    def update(self, used_bytes: int, queued_ms: float, now_ms: int, *, is_queued: bool) -> None:
        """Updates `has_room`, `may_read` and `is_full`.

        Args:
            used_bytes: memory of the queues.
            queued_ms: the expected time of all queued work.
            is_queued: whether any query has a queue.
        """
        if used_bytes <= self._limit_bytes:
            self.has_room.set()
        else:
            self.has_room.clear()
        self.is_full = used_bytes > self._limit_bytes or queued_ms > self._tuning.read_ahead_ms
        waits = self._read_little and 0 <= now_ms - self._read_ms < self._tuning.read_every_ms
        if self.is_full or (is_queued and waits):
            self.may_read.clear()
        else:
            self.may_read.set()
