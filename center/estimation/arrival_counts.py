"""Of each sub-stream and edge, how much has arrived and what it was worth: sums of what edges told. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from center.early_trigger.estimate import Sampled
from edgewater.accuracy import MeasureKind, check_relative
from edgewater.arrivals import GroupedSubstream, ReportSchedule, SubstreamStatistics, lag_groups
from edgewater.errors import InvalidQuery
from edgewater.synopses import FloatArray

ByLag = tuple[FloatArray, FloatArray, FloatArray]
"""Count, Σv and Σv² of the processed records, each [edge, lag group]."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one frame of an edge tells, of arrivals up to a point. `unread`: more may have come."""

    point: int
    substreams: list[SubstreamStatistics | GroupedSubstream]
    unread: bool = False


class Tallies:
    """Sums by sub-stream; of a window they are those of its sub-streams. Edges are asked for by name."""

    def __init__(self, kind: MeasureKind, schedule: ReportSchedule) -> None:
        self.kind, self._schedule = kind, schedule
        self.width = int(lag_groups(schedule.grid.lags)[-1]) + 1
        self._nothing = np.zeros(1 + 3 * self.width)
        # By edge: records that arrived; behind it the three rows of `ByLag`.
        self._sums: dict[int, dict[str, FloatArray]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._sums

    @property
    def lacks_values(self) -> bool:
        """Whether some record was counted and not processed."""
        if self.kind == "count":
            return False
        rows = (sums for by_edge in self._sums.values() for sums in by_edge.values())
        return any(bool(sums[1 : 1 + self.width].sum() < sums[0]) for sums in rows)

    def add(self, edge: str, statistics: SubstreamStatistics) -> None:
        late = statistics.value_sums.reshape(-1) if statistics.value_sums.size else np.zeros(3 * self.width)
        self.add_sums(edge, statistics.index, np.concatenate([[statistics.events], late]))

    def add_sums(self, edge: str, index: int, sums: FloatArray) -> None:
        """Of a sub-stream: events, and behind it the three rows of `ByLag`, flat."""
        by_edge = self._sums.setdefault(index, {})
        by_edge[edge] = by_edge[edge] + sums if edge in by_edge else sums

    def saved(self) -> dict[int, dict[str, FloatArray]]:
        """The sums now, for `put_back`. (Adding replaces arrays and changes none.)"""
        return {index: dict(by_edge) for index, by_edge in self._sums.items()}

    def put_back(self, saved: dict[int, dict[str, FloatArray]]) -> None:
        self._sums = saved

    def forget_before(self, start_ms: int) -> None:
        first = self._index(start_ms)
        for index in [i for i in self._sums if i < first]:
            del self._sums[index]

    def may_be_zero(self, sampled: Sampled, measure: str) -> str:
        """Why a relative error cannot be kept, where the values' mean may be zero; else empty."""
        count = float(sampled.count.sum())
        if self.kind == "count" or count < 2:
            return ""
        mean = float(sampled.total.sum()) / count
        deviation = math.sqrt(max(float(sampled.squares.sum()) / count - mean**2, 0.0))
        try:
            check_relative(mean, deviation, count, f"accuracy of {measure}")
        except InvalidQuery as exc:
            return exc.message
        return ""

    def _index(self, start_ms: int) -> int:
        return self._schedule.slot_at(start_ms) // self._schedule.grid.substream_slots

    def substreams(self, start_ms: int) -> range:
        """Those of the window that starts there."""
        first = self._index(start_ms)
        return range(first, first + self._schedule.window_slots // self._schedule.grid.substream_slots)

    def edges(self, start_ms: int) -> set[str]:
        """Those that have told of records of the window that starts there."""
        return {edge for index in self.substreams(start_ms) for edge in self._sums.get(index, ())}

    def sums(self, index: int, edges: Sequence[str]) -> list[FloatArray]:
        """Of a sub-stream, by edge, what `add_sums` was given."""
        by_edge = self._sums.get(index)
        return [self._nothing] * len(edges) if by_edge is None else [by_edge.get(e, self._nothing) for e in edges]

    def to_state(self) -> list[Any]:
        """JSON."""
        return [[i, {e: t.tolist() for e, t in by.items()}] for i, by in self._sums.items()]

    def restore(self, state: Iterable[Any]) -> None:
        self._sums = {i: {e: np.array(t) for e, t in by.items()} for i, by in state}


def windows(tallies: Sequence[Tallies], start_ms: int, edges: Sequence[str]) -> tuple[FloatArray, FloatArray]:
    """Of the window that starts there, of each of a query's tallies.

    Returns:
        Records that arrived, [tally, edge], and the three rows of `ByLag`, [tally, edge, 3, lag group].
    """
    result = np.zeros((len(tallies) * len(edges), 1 + 3 * tallies[0].width))
    for index in tallies[0].substreams(start_ms):
        result += np.array([sums for t in tallies for sums in t.sums(index, edges)]).reshape(result.shape)
    shaped = result.reshape(len(tallies), len(edges), -1)
    return shaped[:, :, 0], shaped[:, :, 1:].reshape(len(tallies), len(edges), 3, -1)


def sampled_by(tallies: Sequence[Tallies], start_ms: int, edges: Sequence[str]) -> Sampled:
    """The window as `together.py` wants it: each of a query's tallies is a group."""
    arrived, by_lag = windows(tallies, start_ms, edges)
    arrived = arrived.T
    if tallies[0].kind == "count":
        return Sampled(arrived, arrived, arrived, arrived, by_lag[:, :, 0].reshape(arrived.size, -1))
    count, total, square = by_lag.sum(axis=3).transpose(2, 1, 0)
    return Sampled(arrived, count, total, square, by_lag[:, :, 0].reshape(arrived.size, -1))


def truths(tallies: Sequence[Tallies], start_ms: int, edges: Sequence[str]) -> list[float | None]:
    """The window's values by all that was told; None: not all of it was processed, or it is a mean of nothing."""
    if not tallies:
        return []
    sampled = sampled_by(tallies, start_ms, edges)
    whole = np.logical_not((sampled.count < sampled.arrived).any(axis=0))
    events, total = sampled.arrived.sum(axis=0), sampled.total.sum(axis=0)
    if tallies[0].kind == "mean":
        whole &= events > 0
        total = total / np.maximum(events, 1.0)
    found = events if tallies[0].kind == "count" else total
    return [value if known else None for value, known in zip(found.tolist(), whole.tolist(), strict=True)]
