"""The offline optima of TR 16-003, section 4, for one edge and consecutive windows.

An update occupies the link for `service_ms`, whatever its content; a link that is still busy with one window delays the
next one. Times are in ms. `tests/sim/budgets/test_optimal.py` compares the optima with brute force.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgewater.synopses import BoolArray, FloatArray, IntArray

Aggregate = Literal["sum", "count", "max", "min"]
ROUNDING = 1e-9  # derived: rounding of sums
"""Relative tolerance: the aggregate of all records may differ from the total in the last bits."""


@dataclass(frozen=True, slots=True)
class WindowTrace:
    """The records of one window [start, end) in order of time; group numbers are contiguous from 0."""

    start_ms: float
    end_ms: float
    times_ms: FloatArray
    groups: IntArray
    values: FloatArray
    aggregate: Aggregate = "sum"

    @property
    def count(self) -> int:
        """The number of groups."""
        return int(self.groups.max()) + 1 if len(self.groups) else 0

    def prefixes(self) -> tuple[IntArray, FloatArray, FloatArray]:
        """Returns, for records ordered by group and time: positions, prefix aggregates, and totals of their groups."""
        order = np.argsort(self.groups, kind="stable")
        groups = self.groups[order]
        values = np.ones(len(order)) if self.aggregate == "count" else self.values[order]
        first = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]]) if len(order) else np.zeros(0, np.int64)
        sizes = np.diff(np.r_[first, len(order)])
        if self.aggregate in ("sum", "count"):
            running = np.cumsum(values)
            prefix = running - np.repeat(running[first] - values[first], sizes)
        else:
            prefix = _running_extreme(values, sizes, self.aggregate)
        return order, prefix, np.repeat(prefix[first + sizes - 1], sizes)

    def errors(self) -> tuple[IntArray, FloatArray, FloatArray]:
        """Returns, in the order of `prefixes`: positions, prefix errors e_i, and initial prefix errors e_i(T)."""
        order, prefix, total = self.prefixes()
        error = np.abs(total - prefix)
        error[error <= ROUNDING * np.abs(total)] = 0.0
        return order, error, np.abs(total)

    def must_be_sent(self, initial: FloatArray, budget: float) -> BoolArray:
        """Returns the groups that an error budget requires to be sent at least once.

        These are the groups whose initial error exceeds the budget, and all groups of minima, whose value at the
        center is unbounded before the first update (`ExtremumStack.change`).
        """
        unbounded = np.ones(len(initial), bool) if self.aggregate == "min" else np.zeros(len(initial), bool)
        return unbounded | (initial > budget * (1 + ROUNDING))


def _running_extreme(values: FloatArray, sizes: IntArray, aggregate: str) -> FloatArray:
    """Returns running maxima (minima) within each group."""
    sign = 1.0 if aggregate == "max" else -1.0
    ascending = np.sort(sign * values)
    # Ranks instead of values: the ranks of each group are above those of the groups before it.
    above = np.repeat(np.arange(len(sizes)), sizes) * len(values)
    ranks = np.maximum.accumulate(above + np.searchsorted(ascending, sign * values)) - above
    return np.asarray(sign * ascending[ranks])


def releases(window: WindowTrace, budget: float) -> tuple[IntArray, FloatArray]:
    """Returns the groups that must be sent, and the release time of each by EPE (Theorem 1).

    The release time is the first time at which the group's prefix error is within the budget.
    """
    order, error, initial = window.errors()
    groups = window.groups[order]
    if not len(order):
        return np.zeros(0, np.int64), np.zeros(0)
    within = (error <= budget * (1 + ROUNDING)) & window.must_be_sent(initial, budget)
    release = np.full(window.count, np.inf)
    np.minimum.at(release, groups[within], window.times_ms[order][within])
    chosen = np.flatnonzero(np.isfinite(release))
    return chosen, release[chosen]


def finish(release_ms: FloatArray, service_ms: float, free_ms: float) -> float:
    """Returns when a work-conserving link that is free from `free_ms` has sent all releases."""
    if not len(release_ms):
        return free_ms
    ahead = np.arange(len(release_ms)) * service_ms
    return float(max(np.max(np.sort(release_ms) - ahead), free_ms) + len(release_ms) * service_ms)


@dataclass(frozen=True, slots=True)
class WindowSchedule:
    """The outcome of one window: staleness, error, number of updates, and when the link is free again."""

    staleness_ms: float
    error: float
    updates: int
    free_ms: float


def epe(window: WindowTrace, budget: float, service_ms: float, free_ms: float) -> WindowSchedule:
    """Returns the schedule of least staleness with an error of at most `budget`."""
    chosen, release = releases(window, budget)
    free = finish(release, service_ms, free_ms)
    stale = max(free - window.end_ms, 0.0) if len(chosen) else 0.0
    return WindowSchedule(stale, _largest_left(window, chosen, release), len(chosen), free)


def _largest_left(window: WindowTrace, chosen: IntArray, release: FloatArray) -> float:
    order, error, initial = window.errors()
    if not len(order):
        return 0.0
    groups = window.groups[order]
    left = np.zeros(window.count)
    np.maximum.at(left, groups, initial)
    left[chosen] = 0.0
    at = np.full(window.count, np.nan)
    at[chosen] = release
    sent = window.times_ms[order] == at[groups]
    # Of several records at the release time, the last one is within the budget.
    residual = np.full(window.count, np.inf)
    np.minimum.at(residual, groups[sent], error[sent])
    left[chosen] = residual[chosen]
    return float(left.max(initial=0.0))


def least_error(window: WindowTrace, budget_ms: float, service_ms: float, free_ms: float) -> WindowSchedule:
    """Returns the schedule of least error with a staleness of at most `budget_ms`.

    `epe` returns the schedule with the least staleness among those with an error of at most E. So the least possible
    error is the least E for which this schedule meets the deadline. Only the prefix errors, a finite set, can be this
    E, so the search is exact. The schedule frees the link for the next window as early as possible.
    """
    _, error, initial = window.errors()
    candidates = np.unique(np.concatenate([[0.0], error, initial]))
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if epe(window, float(candidates[middle]), service_ms, free_ms).staleness_ms <= budget_ms * (1 + ROUNDING):
            high = middle
        else:
            low = middle + 1
    result = epe(window, float(candidates[low]), service_ms, free_ms)
    return WindowSchedule(result.staleness_ms, float(candidates[low]), result.updates, result.free_ms)
