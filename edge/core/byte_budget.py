"""The bytes of a query in an hour or a day (`budget.bytes`): what was used, and the price of what is sent.

`ByteCount` is part of the state that frames change, so a replay counts the same. It holds the budget, whatever the
prices say. `BytePrices` is what the policy remembers: how many groups had which errors, by the part of the period. The
price is the error above which groups are sent: the lowest one with which the slices to come, as in the period before,
can have it too. Equal bytes for each slice would send small errors at night, and omit large ones at noon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edge.cache.error_target import NEWEST_WEIGHT
from edge.core.link_plan import LEVELS, bytes_above
from edge.core.slices import FEW_ENTRIES
from edgewater.model.byte_budget import AHEAD_SHARE, close_bytes
from edgewater.model.query import QuerySpec
from edgewater.synopses import FloatArray
from edgewater.synopses.encoding.state import State
from edgewater.wire import Frame, link_bytes

PARTS = 24  # derived: the hours of a day
"""The parts of a period, each with its own distribution of errors."""
INITIAL_ENTRY_BYTES = 16.0  # measured: bench.constants; with 48, errors are twice as large
"""The estimated bytes of an entry on the link until a frame has been sent."""
RESERVE = 1.02  # limit: the bytes of entries beyond their estimate
"""The bytes of an entry are an estimate, so the price is for this many times as many."""


@dataclass(frozen=True, slots=True)
class ByteRoom:
    """What a query may use.

    Attributes:
        at_ms: time since the period began.
        now_bytes: now.
        rest_bytes: until the period ends.
        period: its number.
    """

    at_ms: int
    now_bytes: float
    rest_bytes: int
    period: int


class ByteCount:
    """The bytes that a query has used in the period.

    In a new state, all bytes until now count as used, and so they do in an earlier period after the clock was set back.
    What is used there counts in the newest period, too, so no period has its bytes twice.

    Args:
        now_ms: wall time.

    Attributes:
        used: the used bytes, by the number of the period: of the newest one, and of the one to which the clock was set
            back.
    """

    def __init__(self, spec: QuerySpec, now_ms: int) -> None:
        assert spec.byte_budget is not None
        self._amount, self._period_ms = spec.byte_budget.of_edge(spec.edges), spec.byte_budget.period_ms
        self.used = {now_ms // self._period_ms: self._available(now_ms)}

    def _available(self, now_ms: int) -> int:
        return int(self._amount * (AHEAD_SHARE + (1.0 - AHEAD_SHARE) * (now_ms % self._period_ms) / self._period_ms))

    def _period(self, now_ms: int) -> int:
        """Returns the period at a time; begins an earlier one if the clock was set back."""
        period, newest = now_ms // self._period_ms, max(self.used)
        if period < newest and period not in self.used:
            self.used = {newest: self.used[newest], period: self._available(now_ms)}
        return period

    def room(self, now_ms: int) -> ByteRoom:
        """Returns what may be used."""
        period = self._period(now_ms)
        used = self.used.get(period, 0)
        return ByteRoom(now_ms % self._period_ms, self._available(now_ms) - used, self._amount - used, period)

    def due_ms(self, now_ms: int, size: int) -> int:
        """Returns the wall time from which so many bytes may be used; at the earliest now, at the latest in the next
        period.
        """
        room = self.room(now_ms)
        missing = size - room.now_bytes
        if missing <= 0:
            return now_ms
        wait_ms = math.ceil((missing + 1.0) * self._period_ms / (self._amount * (1.0 - AHEAD_SHARE)))
        return now_ms + min(wait_ms, self._period_ms - room.at_ms)

    def add(self, now_ms: int, frame: Frame) -> None:
        """Counts a frame."""
        period, size = self._period(now_ms), link_bytes(frame.wire_bytes)
        self.used = {p: used + size for p, used in ({period: 0} | self.used).items() if p >= period}


class BytePrices:
    """The price of what a query sends."""

    def __init__(self, spec: QuerySpec) -> None:
        assert spec.byte_budget is not None
        self._period_ms = spec.byte_budget.period_ms
        self._slices = self._period_ms / PARTS / spec.window.slice_ms
        self._close_bytes = close_bytes(spec.name, [m.name for m in spec.measures])
        self._entry_bytes, self._part = INITIAL_ENTRY_BYTES, -1
        # Groups with at least each error, by part; and of the present part so far. NaN: no such part has passed.
        self._counts = np.full((PARTS, len(LEVELS)), np.nan)
        self._now, self._learned = np.zeros(len(LEVELS)), 0

    def learn(self, errors: FloatArray, room: ByteRoom) -> None:
        """Adds the errors of a slice that has closed, before any of its entries are sent; descending."""
        part = room.period * PARTS + room.at_ms * PARTS // self._period_ms
        if part != self._part:
            if self._learned and part > self._part:
                self._counts[self._part % PARTS] = self._now
                self._counts[np.arange(self._part + 1, min(part, self._part + PARTS)) % PARTS] = 0.0
            self._part, self._now, self._learned = part, np.zeros(len(LEVELS)), 0
        self._now += bytes_above(errors, 1.0)
        self._learned += 1

    def affordable(self, errors: FloatArray, room: ByteRoom) -> int:
        """Returns how many groups of a slice are worth their bytes.

        Args:
            errors: of the groups that have not been sent, descending.
        """
        part, within = divmod(room.at_ms * PARTS / self._period_ms, 1.0)
        ahead = np.append([1.0 - within], np.ones(PARTS - 1 - int(part)))
        counts = np.roll(self._counts, -int(part), axis=0)[: len(ahead)]
        # Before the first period has passed, a part is expected to be like the mean of all parts so far.
        usual = self._now / max(self._learned, 1) * self._slices
        known = self._counts[~np.isnan(self._counts[:, 0])]
        usual = np.mean(known, axis=0) if len(known) else usual
        later = ahead @ np.where(np.isnan(counts), usual, counts)
        own = bytes_above(errors, 1.0)
        need = RESERVE * self._entry_bytes * (own + later) + self._close_bytes * (1.0 + self._slices * ahead.sum())
        fitting = int(np.searchsorted(need, room.rest_bytes, side="right"))
        if fitting == len(LEVELS):
            return len(errors)
        below = need[fitting - 1] if fitting else 0.0
        step = max(room.rest_bytes - below, 0.0) / max(need[fitting] - below, 1.0)
        before = own[fitting - 1] if fitting else 0.0
        return int(before + step * (own[fitting] - before))

    def sent(self, frame: Frame, groups: int) -> None:
        """Learns the bytes of an entry on the link from a frame with so many groups."""
        if groups:
            size = max(link_bytes(frame.wire_bytes) - self._close_bytes, 1) / groups
            weight = NEWEST_WEIGHT * groups / (groups + FEW_ENTRIES)
            self._entry_bytes += weight * (size - self._entry_bytes)

    def to_state(self) -> State:
        arrays = {"counts": self._counts.ravel(), "now": self._now}
        return State([self._entry_bytes, self._part, self._learned], arrays)

    def restore(self, state: State) -> None:
        """Restores what `to_state` returned."""
        self._entry_bytes, self._part, self._learned = state.numbers
        self._counts = state.arrays["counts"].reshape(PARTS, len(LEVELS)).copy()
        self._now = state.arrays["now"].copy()
