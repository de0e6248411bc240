"""A center that merges what edges ship, fast: the values of all groups of a window in one array.

Equal to `GroupedAggregate.merge_bytes` of the same frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgewater.measure import Measure
from edgewater.query import QuerySpec
from edgewater.synopses import FloatArray, GroupedAggregate, IntArray, KeyTable
from edgewater.wire.frames import FrameBody
from sim.budgets.outcome import Outcome
from sim.budgets.trace import Trace


class MergingCenter:
    """Merges frames as they arrive, and notes when each window was complete."""

    def __init__(
        self, trace: Trace, query: QuerySpec, measure: Measure, starts: list[int], edges: int, *, coded_keys: bool
    ) -> None:
        self._measure = measure.name
        self._extremum = {"max": np.fmax, "min": np.fmin}.get(measure.function.name)
        self._join_stated = max if measure.function.error == "extremum" else _add
        groups = int(trace.codes.max(initial=-1)) + 1
        self._values: dict[int, FloatArray] = {start: np.full(groups, np.nan) for start in starts}
        self._table: KeyTable | None = None
        if not coded_keys and query.group_by:
            first = np.unique(trace.codes, return_index=True)[1]
            columns = [trace.batch.column(name).take(first) for name in query.group_by]
            self._table = KeyTable(tuple(c.type for c in columns))
            self._table.encode(columns, len(first))
        self._grouped = bool(query.group_by)
        self._closed: dict[tuple[int, int], float] = {}
        self._stated: dict[tuple[int, int], float] = {}
        self._last: dict[int, int] = {}
        self._starts, self._edges, self._size = starts, edges, query.window.slice_ms

    def receive(
        self, edge: int, body: FrameBody, parts: Sequence[tuple[int, GroupedAggregate]], arrival_ms: float
    ) -> None:
        """Takes a frame that arrives at `arrival_ms`; frames of an edge come in order.

        Args:
            parts: (slice start, the aggregate) of each of the body's partials.
        """
        for start, part in parts:
            self._merge(start, part)
            if (edge, start) in self._closed:
                self._closed[edge, start] = arrival_ms
        for close in body.closes:
            self._closed[edge, close.slice_start_ms] = arrival_ms
            stated = [max(w.largest_above, w.largest_below) for w in close.withheld if w.measure == self._measure]
            self._stated[edge, close.slice_start_ms] = max(stated, default=0.0)
        self._last[edge] = body.through_ms

    def _merge(self, start: int, part: GroupedAggregate) -> None:
        codes = self._codes(part)
        fresh = part.query(self._measure).value
        held = self._values[start]
        if self._extremum is not None:
            held[codes] = self._extremum(held[codes], fresh)
        else:
            held[codes] = np.nan_to_num(held[codes]) + np.nan_to_num(fresh)

    def _codes(self, part: GroupedAggregate) -> IntArray:
        rows = part.rows()
        if not self._grouped:
            return np.zeros(len(part), np.int64)
        if self._table is None:
            return np.asarray(rows[0].to_numpy(zero_copy_only=False), np.int64)
        return self._table.encode(rows, len(part))

    def complete(self, edge: int) -> bool:
        """Has this edge told all of the last window?"""
        return bool(self._last.get(edge, -1) >= self._starts[-1] + self._size)

    def values(self, start: int) -> FloatArray:
        """Per group; NaN for those of which nothing came."""
        return self._values[start]

    def outcome(self, truth: Mapping[int, FloatArray], size_ms: int, updates: int, sent_bytes: float) -> Outcome:
        """Compared with the truth, which is over the same groups."""
        staleness, error, largest, stated = [], [], [], []
        for start in self._starts:
            ends = [self._closed.get((edge, start), 0.0) for edge in range(self._edges)]
            staleness.append(max(max(ends) - start - size_ms, 0.0) / size_ms)
            true = np.nan_to_num(truth[start])
            error.append(float(np.abs(true - np.nan_to_num(self._values[start])).max(initial=0.0)))
            largest.append(float(np.abs(true).max(initial=0.0)))
            total = 0.0
            for edge in range(self._edges):
                total = self._join_stated(total, self._stated.get((edge, start), 0.0))
            stated.append(total)
        return Outcome(np.array(staleness), np.array(error), np.array(largest), np.array(stated), updates, sent_bytes)


def _add(left: float, right: float) -> float:
    return left + right
