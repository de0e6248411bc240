"""What the slices of a query take of the link: means for the forecasts of the center. Not part of the core's state."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edge.cache.error_target import NEWEST_WEIGHT
from edgewater.wire import SliceClose


class SliceLoad:
    """The bytes of a query's slices, before compression.

    Attributes:
        sent_bytes: the mean of what was sent of a slice, with its closes; None: no slice has closed in this process.
        omitted_bytes: the mean of what was omitted because there were not enough bytes.
    """

    def __init__(self) -> None:
        self.sent_bytes: float | None = None
        self.omitted_bytes = 0.0
        self._bytes = 0.0

    def add(self, size: int, closes: Sequence[SliceClose], closed: Collection[int], omitted_entry_bytes: float) -> None:
        """Counts a frame.

        Args:
            closed: the starts of the slices that have now been sent completely.
            omitted_entry_bytes: the size of an entry that is withheld for lack of bytes; 0: none is.
        """
        self._bytes += size
        if not closed:
            return
        groups = sum(max((w.groups for w in c.withheld), default=0) for c in closes if c.slice_start_ms in closed)
        sent, omitted = self._bytes / len(closed), groups * omitted_entry_bytes / len(closed)
        weight = 1.0 if self.sent_bytes is None else 1.0 - (1.0 - NEWEST_WEIGHT) ** len(closed)
        self.sent_bytes = (self.sent_bytes or 0.0) + weight * (sent - (self.sent_bytes or 0.0))
        self.omitted_bytes += weight * (omitted - self.omitted_bytes)
        self._bytes = 0.0
