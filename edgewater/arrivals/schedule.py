"""Slots, sub-streams and lags of a query's arrival statistics, and the slots at which edges report them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgewater.base.errors import InvalidQuery
from edgewater.base.quantities import format_duration
from edgewater.synopses import IntArray

MAX_LAGS = 4096  # limit: memory of a report
SLOTS_PER_SUBSTREAM = 30
DEFAULT_SUBSTREAM_MS = 600
SUBSTREAMS_SHORT, SUBSTREAMS_LONG, SHORT_MS = 5, 20, 12_000
"""The default numbers of sub-streams per slice: for slices of up to `SHORT_MS`, and for longer slices."""
HORIZON_WINDOWS = 2.56
MAX_DEFAULT_LAGS = 512
REPORT_SLOTS_AFTER_END = (2, 5, 10, 20)
"""The numbers of slots after a window's end at which an edge also reports stragglers. It always reports at the ends of
sub-streams.
"""

_LAG_GROUP_BORDERS = (
    0,
    1,
    2,
    3,
    4,
    6,
    8,
    11,
    16,
    23,
    32,
    45,
    64,
    91,
    128,
    181,
    256,
    362,
    512,
    724,
    1024,
    1448,
    2048,
    2896,
)  # format: of reports; fmt: skip


class EvenWindows(Protocol):
    """Windows of one length and one step: a `SlidingWindow`."""

    @property
    def size_ms(self) -> int: ...
    @property
    def every_ms(self) -> int: ...
    @property
    def origin_ms(self) -> int: ...
    @property
    def slice_ms(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SlotGrid:
    """Event time and arrival time in slots of `slot_ms`. Slot s is [s·slot_ms, (s + 1)·slot_ms).

    The *lag* of an event is (slot of its arrival) - (slot of its event time). Time advances by whole slots. At the end
    of a slot, each lag of each earlier slot has been observed completely or not at all. This makes the product-limit
    estimate of the delay distribution exact.

    Attributes:
        slot_ms: the resolution of delays and of waiting times.
        substream_slots: slots per sub-stream (length f in the Aion paper).
        lags: number of lags. The last one counts all longer lags.
    """

    slot_ms: int = 20
    substream_slots: int = SLOTS_PER_SUBSTREAM
    lags: int = 384

    def __post_init__(self) -> None:
        if self.slot_ms < 1 or self.substream_slots < 1:
            raise InvalidQuery("substream", self.slot_ms * self.substream_slots, "at least one slot of 1 ms")
        if not 2 <= self.lags <= MAX_LAGS:
            raise InvalidQuery("lags", self.lags, f"a whole number from 2 to {MAX_LAGS}")

    @classmethod
    def of(cls, window_ms: int, substream_ms: int, horizon_ms: int, *, slot_ms: int | None = None) -> SlotGrid:
        """Returns the grid for a window and a sub-stream.

        Args:
            horizon_ms: the longest resolved lag. The grid resolves at least two sub-streams, and at most `MAX_LAGS`
                slots.
            slot_ms: the length of a slot; None for 1/`SLOTS_PER_SUBSTREAM` of the sub-stream, or the next shorter
                divisor.

        Raises:
            InvalidQuery: the sub-stream does not divide the window, or the slot does not divide the sub-stream.
        """
        if substream_ms < 1 or window_ms % substream_ms:
            raise InvalidQuery("substream", substream_ms, f"a divisor of the window, {window_ms} ms")
        longest = max(1, substream_ms // SLOTS_PER_SUBSTREAM)
        slot = slot_ms or next(s for s in range(longest, 0, -1) if substream_ms % s == 0)
        if substream_ms % slot:
            raise InvalidQuery("slot", slot, f"a divisor of the sub-stream, {substream_ms} ms")
        slots = substream_ms // slot
        return cls(slot, slots, min(MAX_LAGS, max(2 * slots + 64, -(-horizon_ms // slot))))

    @property
    def substream_ms(self) -> int:
        return self.slot_ms * self.substream_slots


def lag_groups(lags: int) -> IntArray:
    """Returns the group of each lag, int64, (lags,).

    Lags 0 to 4 are separate groups. Beyond them, about five groups cover each factor of four.
    """
    return np.searchsorted(_LAG_GROUP_BORDERS, np.arange(lags), side="right") - 1


@dataclass(frozen=True, slots=True)
class ReportSchedule:
    """The slots of a query's stream and its *report slots*, at which edges report arrivals.

    Edges and center derive the same schedule from the same spec. All edges report up to the same slots. So the reports
    are comparable, whenever each of them arrives.

    Attributes:
        origin_ms: event time at which slot 0 starts, a border of the query's slices.
        window_slots, every_slots: length and step of the windows, in slots.
    """

    grid: SlotGrid
    origin_ms: int
    window_slots: int
    every_slots: int

    @classmethod
    def of(cls, window: EvenWindows, substream_ms: int | None, lateness_ms: int) -> ReportSchedule:
        """Returns the schedule of a window.

        Args:
            substream_ms: length of a sub-stream; None for a default length.

        Raises:
            InvalidQuery: the sub-stream does not divide the window's slices.
        """
        slice_ms = window.slice_ms
        substream = substream_ms or _default_substream(slice_ms)
        if slice_ms % substream:
            raise InvalidQuery(
                "accuracy.substream",
                format_duration(substream),
                f"a divisor of {format_duration(slice_ms)}, the length of the window's slices",
            )
        longest = MAX_DEFAULT_LAGS * max(1, substream // SLOTS_PER_SUBSTREAM)
        horizon = min(max(int(HORIZON_WINDOWS * slice_ms), lateness_ms), longest)
        grid = SlotGrid.of(slice_ms, substream, horizon)
        every = window.every_ms // grid.slot_ms
        return cls(grid, window.origin_ms, window.size_ms // grid.slot_ms, every)

    @property
    def slice_substreams(self) -> int:
        """The number of sub-streams of a slice. All windows consist of whole slices."""
        return math.gcd(self.window_slots, self.every_slots) // self.grid.substream_slots

    def slot_at(self, event_ms: int) -> int:
        """Returns the slot that contains an event time."""
        return (event_ms - self.origin_ms) // self.grid.slot_ms

    def starts_at(self, slot: int) -> int:
        """Returns the event time at which a slot starts."""
        return slot * self.grid.slot_ms + self.origin_ms

    def last_report_slot(self, slot: int) -> int:
        """Returns the last report slot at or before a slot."""
        end = self.last_window_end(slot)
        after = [end + offset for offset in REPORT_SLOTS_AFTER_END if end + offset <= slot]
        return max([slot // self.grid.substream_slots * self.grid.substream_slots, end, *after])

    def next_report_slot(self, slot: int) -> int:
        """Returns the first report slot after a slot."""
        end = self.last_window_end(slot)
        after = [end + offset for offset in REPORT_SLOTS_AFTER_END if end + offset > slot]
        return min([(slot // self.grid.substream_slots + 1) * self.grid.substream_slots, *after])

    def last_window_end(self, slot: int) -> int:
        """Returns the last slot at or before a slot at which a window ends."""
        return (slot - self.window_slots) // self.every_slots * self.every_slots + self.window_slots


def _default_substream(slice_ms: int) -> int:
    """Returns the longest divisor of the slice that leaves enough sub-streams per slice for estimates."""
    longest = (
        min(DEFAULT_SUBSTREAM_MS, max(1, slice_ms // SUBSTREAMS_SHORT))
        if slice_ms <= SHORT_MS
        else slice_ms // SUBSTREAMS_LONG
    )
    return next(slice_ms // n for n in range(-(-slice_ms // longest), slice_ms + 1) if slice_ms % n == 0)
