"""Arrival counts and sums of sampled values, per sub-stream and edge, from the reports of the edges."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from edgewater.arrivals import NO_VALUES, ReportSchedule, lag_groups
from edgewater.arrivals.targets import COUNTS, MeasureKind, check_relative
from edgewater.arrivals.window_model import WindowSample
from edgewater.base.errors import InvalidQuery
from edgewater.synopses import FloatArray
from edgewater.synopses.encoding.state import State


class ArrivalCounts:
    """Stores the sums of one group per sub-stream and edge. The sums of a window are the sums over the window's
    sub-streams.

    A row of sums is a float64 array with these columns, in order:

    - the number of arrived events
    - the number, Σv and Σv² of the sampled events, each by lag group
    - the least and the greatest value of the arrived events; NaN if some values are not known
    """

    def __init__(self, kind: MeasureKind, schedule: ReportSchedule) -> None:
        self.kind, self._schedule = kind, schedule
        self.lag_groups = int(lag_groups(schedule.grid.lags)[-1]) + 1
        self._zeros = np.concatenate([np.zeros(1 + 3 * self.lag_groups), NO_VALUES[:, 0]])
        self._sums: dict[int, dict[str, FloatArray]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._sums

    @property
    def is_sampled(self) -> bool:
        """Whether the edges counted an event without processing the event.

        Edges add up the values of a slice. So the events of a slice are compared, not of a sub-stream.
        """
        if self.kind in COUNTS:
            return False
        unprocessed: Counter[tuple[int, str]] = Counter()
        for index, by_edge in self._sums.items():
            for edge, sums in by_edge.items():
                slice_of = index // self._schedule.slice_substreams, edge
                unprocessed[slice_of] += sums[0] - sums[1 : 1 + self.lag_groups].sum()
        return any(each > 0 for each in unprocessed.values())

    def add(self, edge: str, substream: int, sums: FloatArray) -> None:
        by_edge = self._sums.setdefault(substream, {})
        by_edge[edge] = _combined(np.stack([by_edge[edge], sums])) if edge in by_edge else sums

    def snapshot(self) -> dict[int, dict[str, FloatArray]]:
        """Returns a copy of the sums, for `rollback`. The row arrays are shared: adding replaces a row and never
        changes one.
        """
        return {index: dict(by_edge) for index, by_edge in self._sums.items()}

    def rollback(self, snapshot: dict[int, dict[str, FloatArray]]) -> None:
        self._sums = snapshot

    def forget_before(self, start_ms: int) -> None:
        first = self._substream_at(start_ms)
        for index in [i for i in self._sums if i < first]:
            del self._sums[index]

    def zero_mean_reason(self, sample: WindowSample, measure: str) -> str:
        """Returns why a relative error is undefined if the mean of the values may be zero; otherwise an empty
        string.
        """
        count = float(sample.count.sum())
        if self.kind in COUNTS or count < 2:
            return ""
        mean = float(sample.total.sum()) / count
        deviation = math.sqrt(max(float(sample.squares.sum()) / count - mean**2, 0.0))
        try:
            check_relative(mean, deviation, count, f"accuracy of {measure}")
        except InvalidQuery as exc:
            return exc.message
        return ""

    def substreams(self, start_ms: int) -> range:
        """Returns the sub-streams of the window that starts at `start_ms`."""
        first = self._substream_at(start_ms)
        return range(first, first + self._schedule.window_slots // self._schedule.grid.substream_slots)

    def edges(self, start_ms: int) -> set[str]:
        """Returns the edges that have reported events of the window that starts at `start_ms`."""
        return {edge for index in self.substreams(start_ms) for edge in self._sums.get(index, ())}

    def sums(self, substream: int, edges: Sequence[str]) -> list[FloatArray]:
        """Returns one row of sums of a sub-stream for each edge, in the order of `edges`."""
        by_edge = self._sums.get(substream)
        return [self._zeros] * len(edges) if by_edge is None else [by_edge.get(e, self._zeros) for e in edges]

    def to_state(self) -> State:
        rows = [row for by_edge in self._sums.values() for row in by_edge.values()]
        index = [[substream, list(by_edge)] for substream, by_edge in self._sums.items()]
        return State(index, {"sums": np.array(rows).reshape(-1, len(self._zeros))})

    def restore(self, state: State) -> None:
        """Sets the sums from the result of `to_state`."""
        rows = iter(state.arrays["sums"].copy())
        self._sums = {index: {edge: next(rows) for edge in edges} for index, edges in state.numbers}

    def _substream_at(self, start_ms: int) -> int:
        return self._schedule.slot_at(start_ms) // self._schedule.grid.substream_slots


def _combined(rows: FloatArray) -> FloatArray:
    """Adds rows of sums, [n, ..., sums], along the first axis. The least and the greatest value stay NaN if one row has
    NaN.
    """
    result = rows.sum(axis=0)
    result[..., -2] = rows[..., -2].min(axis=0)
    result[..., -1] = rows[..., -1].max(axis=0)
    return np.asarray(result)


def window_sums(
    counts: Sequence[ArrivalCounts], start_ms: int, edges: Sequence[str]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns the sums of a window for each group of a query.

    Returns:
        Three arrays: the number of arrived events, [group, edge]; the number, Σv and Σv² of the sampled events, [group,
        edge, 3, lag group]; the least and the greatest value of the arrived events, [group, edge, 2].
    """
    shape = (len(counts), len(edges), 3 + 3 * counts[0].lag_groups)
    rows = [[s for c in counts for s in c.sums(index, edges)] for index in counts[0].substreams(start_ms)]
    shaped = _combined(np.array(rows).reshape(-1, *shape))
    return shaped[:, :, 0], shaped[:, :, 1:-2].reshape(*shape[:2], 3, -1), shaped[:, :, -2:]


def window_sample(counts: Sequence[ArrivalCounts], start_ms: int, edges: Sequence[str]) -> WindowSample:
    """Returns the window's sample for a `TriggerBatch`, with a column per group."""
    arrived, by_lag, ranges = window_sums(counts, start_ms, edges)
    arrived, (least, greatest) = arrived.T, ranges.transpose(2, 1, 0)
    sampled_by_lag = by_lag[:, :, 0].reshape(arrived.size, -1)
    if counts[0].kind in COUNTS:
        return WindowSample(arrived, arrived, arrived, arrived, sampled_by_lag, least, greatest)
    count, total, squares = by_lag.sum(axis=3).transpose(2, 1, 0)
    return WindowSample(arrived, count, total, squares, sampled_by_lag, least, greatest)


def true_values(counts: Sequence[ArrivalCounts], start_ms: int, edges: Sequence[str]) -> list[float | None]:
    """Returns the value of the window per group, from all reports.

    The value is None if an event of the group was not processed, or if a mean has no events.
    """
    if not counts:
        return []
    sample = window_sample(counts, start_ms, edges)
    known = np.logical_not((sample.count < sample.arrived).any(axis=0))
    events, total = sample.arrived.sum(axis=0), sample.total.sum(axis=0)
    if counts[0].kind == "mean":
        known &= events > 0
        total = total / np.maximum(events, 1.0)
    if (extremes := sample.extremes(counts[0].kind)) is not None:
        total, known = extremes, np.isfinite(extremes)
    values = events if extremes is None and counts[0].kind in COUNTS else total
    return [value if is_known else None for value, is_known in zip(values.tolist(), known.tolist(), strict=True)]
