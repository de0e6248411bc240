"""Of each sub-stream and edge, how much has arrived and what it was worth: sums of what edges told. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgewater.accuracy import Clockwork
from edgewater.errors import InvalidQuery
from edgewater.synopses.base import FloatArray
from edgewater.watermarks.estimate import Sampled
from edgewater.watermarks.grouped import GroupedSubstream
from edgewater.watermarks.late_values import lag_groups
from edgewater.watermarks.monitor import SubstreamStatistics
from edgewater.watermarks.target import MeasureKind, check_relative

ByLag = tuple[FloatArray, FloatArray, FloatArray]
"""Count, Σv and Σv² of the processed records, each [edge, lag group]."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one frame of an edge tells, of arrivals up to a point."""

    point: int
    substreams: list[SubstreamStatistics | GroupedSubstream]


class Tallies:
    """Sums by sub-stream; of a window they are those of its sub-streams. Edges are asked for by name."""

    def __init__(self, kind: MeasureKind, clockwork: Clockwork) -> None:
        self._kind, self._clockwork = kind, clockwork
        self._width = int(lag_groups(clockwork.grid.lags)[-1]) + 1
        # By edge: records that arrived; behind it the three rows of `ByLag`.
        self._sums: dict[int, dict[str, FloatArray]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._sums

    @property
    def lacks_values(self) -> bool:
        """Whether some record was counted and not processed."""
        if self._kind == "count":
            return False
        rows = (sums for by_edge in self._sums.values() for sums in by_edge.values())
        return any(bool(sums[1 : 1 + self._width].sum() < sums[0]) for sums in rows)

    def add(self, edge: str, statistics: SubstreamStatistics) -> None:
        late = statistics.late.reshape(-1) if statistics.late.size else np.zeros(3 * self._width)
        self.add_sums(edge, statistics.index, np.concatenate([[statistics.events], late]))

    def add_sums(self, edge: str, index: int, sums: FloatArray) -> None:
        """Of a sub-stream: events, and behind it the three rows of `ByLag`, flat."""
        by_edge = self._sums.setdefault(index, {})
        by_edge[edge] = by_edge[edge] + sums if edge in by_edge else sums

    def forget_before(self, start_ms: int) -> None:
        first = self._index(start_ms)
        for index in [i for i in self._sums if i < first]:
            del self._sums[index]

    def by_lag(self, start_ms: int, edges: Sequence[str]) -> ByLag:
        """Of the window that starts there."""
        sums = self._window(start_ms, edges)[:, 1:].reshape(len(edges), 3, self._width)
        return sums[:, 0], sums[:, 1], sums[:, 2]

    def sampled(self, start_ms: int, edges: Sequence[str]) -> Sampled:
        """The window as the watermark wants it."""
        arrived = self._window(start_ms, edges)[:, :1]
        if self._kind == "count":
            return Sampled(arrived, arrived, arrived, arrived, np.zeros((len(edges), self._width)))
        counts, totals, squares = self.by_lag(start_ms, edges)
        count, total, square = (x.sum(axis=1, keepdims=True) for x in (counts, totals, squares))
        return Sampled(arrived, count, total, square, counts)

    def truth(self, start_ms: int, edges: Sequence[str]) -> float | None:
        """The window's value by all that was told; None: not all of it was processed, or it is a mean of nothing."""
        sampled = self.sampled(start_ms, edges)
        if (sampled.count < sampled.arrived).any():
            return None
        events, total = float(sampled.arrived.sum()), float(sampled.total.sum())
        if self._kind == "mean":
            return total / events if events else None
        return events if self._kind == "count" else total

    def may_be_zero(self, sampled: Sampled, measure: str) -> str:
        """Why a relative error cannot be kept, where the values' mean may be zero; else empty."""
        count = float(sampled.count.sum())
        if self._kind == "count" or count < 2:
            return ""
        mean = float(sampled.total.sum()) / count
        deviation = math.sqrt(max(float(sampled.squares.sum()) / count - mean**2, 0.0))
        try:
            check_relative(mean, deviation, count, f"accuracy of {measure}")
        except InvalidQuery as exc:
            return exc.message
        return ""

    def _index(self, start_ms: int) -> int:
        return self._clockwork.slot_at(start_ms) // self._clockwork.grid.substream_slots

    def _window(self, start_ms: int, edges: Sequence[str]) -> FloatArray:
        first = self._index(start_ms)
        result = np.zeros((len(edges), 1 + 3 * self._width))
        rows = {e: i for i, e in enumerate(edges)}
        for index in range(first, first + self._clockwork.window_slots // self._clockwork.grid.substream_slots):
            for edge, tally in self._sums.get(index, {}).items():
                if edge in rows:
                    result[rows[edge]] += tally
        return result

    def to_state(self) -> list[Any]:
        """JSON."""
        return [[i, {e: t.tolist() for e, t in by.items()}] for i, by in self._sums.items()]

    def restore(self, state: Iterable[Any]) -> None:
        self._sums = {i: {e: np.array(t) for e, t in by.items()} for i, by in state}
