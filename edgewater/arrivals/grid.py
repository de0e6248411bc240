"""The clockwork of the statistics: slots of time, sub-streams of slots, lags between slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgewater.errors import InvalidQuery
from edgewater.synopses.base import IntArray

MAX_LAGS = 4096


@dataclass(frozen=True, slots=True)
class Grid:
    """Event time and arrival time in slots of `slot_ms`; slot s is [s·slot_ms, (s + 1)·slot_ms).

    The *lag* of an event is (slot of arrival) - (slot of event time). The clock that delays and decisions
    are read from moves by whole slots, which is what makes the product-limit estimate exact: at the end of
    a slot, all lags of all earlier slots are either complete or not begun.

    Attributes:
        slot_ms: the resolution of delays, and of waiting.
        substream_slots: slots of a sub-stream (length f in the paper).
        lags: longer ones are counted in the last.
    """

    slot_ms: int = 20
    substream_slots: int = 30
    lags: int = 384

    def __post_init__(self) -> None:
        if self.slot_ms < 1 or self.substream_slots < 1:
            raise InvalidQuery("substream", self.slot_ms * self.substream_slots, "at least one slot of 1 ms")
        if not 2 <= self.lags <= MAX_LAGS:
            raise InvalidQuery("lags", self.lags, f"a whole number from 2 to {MAX_LAGS}")

    @classmethod
    def of(cls, window_ms: int, substream_ms: int, horizon_ms: int, *, slot_ms: int | None = None) -> Grid:
        """The grid for a window and a sub-stream; 30 slots a sub-stream unless told otherwise.

        Raises:
            InvalidQuery: the sub-stream does not divide the window, or slots do not divide the sub-stream.
        """
        if substream_ms < 1 or window_ms % substream_ms:
            raise InvalidQuery("substream", substream_ms, f"a divisor of the window, {window_ms} ms")
        slot = slot_ms or next(s for s in range(max(1, substream_ms // 30), 0, -1) if substream_ms % s == 0)
        if substream_ms % slot:
            raise InvalidQuery("slot", slot, f"a divisor of the sub-stream, {substream_ms} ms")
        return cls(
            slot, substream_ms // slot, min(MAX_LAGS, max(2 * (substream_ms // slot) + 64, -(-horizon_ms // slot)))
        )

    @property
    def substream_ms(self) -> int:
        return self.slot_ms * self.substream_slots


def lag_groups(lags: int) -> IntArray:
    """Group of each lag: single ones first, then about five per factor of four. int64, (lags,)."""
    edges = [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896]
    return np.searchsorted(edges, np.arange(lags), side="right") - 1
