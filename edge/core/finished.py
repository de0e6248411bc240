"""The counters of slices that were sent completely. Late records add to these counters until the slices are final."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.synopses import IntArray
from edgewater.synopses.encoding.state import State

Counters = tuple[int, int, int, int]
"""Records, late records, and the event times of the first and the last record."""
NO_COUNTERS: Counters = (0, 0, MAX_TIME_MS, MIN_TIME_MS)
MAX_RECENT = 1_024
"""Entries that are in a dictionary before they are sorted into the array, which copies the whole array."""
RECENT_BYTES, SORTED_BYTES = 400, 40  # derived: what an entry takes in the dictionary and the array
"""The memory of an entry in bytes: in the dictionary, and in the array."""


def _no_rows() -> IntArray:
    return np.empty((0, 5), np.int64)


@dataclass(slots=True)
class FinishedSlices:
    """The counters of finished slices, by start; there may be hundreds of thousands.

    Attributes:
        recent: the newest entries. They replace entries of the same slices in `rows`.
        rows: int64, (entries, 5): start and counters, ascending by start.
    """

    recent: dict[int, Counters] = field(default_factory=dict)
    rows: IntArray = field(default_factory=_no_rows)

    def __setitem__(self, start: int, counters: Counters) -> None:
        self.recent[start] = counters
        if len(self.recent) > MAX_RECENT:
            self._sort_in()

    def get(self, start: int) -> Counters | None:
        if start in self.recent:
            return self.recent[start]
        at = int(np.searchsorted(self.rows[:, 0], start))
        if at == len(self.rows) or self.rows[at, 0] != start:
            return None
        observed, late, first_ms, last_ms = self.rows[at, 1:].tolist()
        return observed, late, first_ms, last_ms

    def starts(self) -> IntArray:
        """Returns the starts of the slices, int64, ascending."""
        self._sort_in()
        return self.rows[:, 0]

    @property
    def nbytes(self) -> int:
        return RECENT_BYTES * len(self.recent) + SORTED_BYTES * len(self.rows)

    def forget_before(self, start: int) -> None:
        self.forget(lambda other: other < start)

    def forget(self, is_past: Callable[[int], bool]) -> None:
        """Forgets the slices that are past. If a slice is past, all earlier slices must be past too."""
        for start in [start for start in self.recent if is_past(start)]:
            del self.recent[start]
        if len(self.rows) and is_past(int(self.rows[0, 0])):
            past = _count_leading(self.rows[:, 0], is_past)
            self.rows = self.rows[past:].copy()  # a view would keep the whole array in memory

    def _sort_in(self) -> None:
        if not self.recent:
            return
        added = np.array([(start, *counters) for start, counters in self.recent.items()], np.int64)
        older = self.rows[~np.isin(self.rows[:, 0], added[:, 0])]
        rows = np.concatenate([older, added])
        self.rows, self.recent = rows[np.argsort(rows[:, 0], kind="stable")], {}

    def to_state(self) -> State:
        self._sort_in()
        return State(arrays={"rows": self.rows})

    @classmethod
    def from_state(cls, state: State) -> Self:
        return cls(rows=state.arrays["rows"])


def _count_leading(starts: IntArray, is_past: Callable[[int], bool]) -> int:
    """Returns the number of leading starts that are past, by bisection."""
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if is_past(int(starts[middle])) else (low, middle)
    return low
