"""True answers of a trace, and the measured outcome of a simulated policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgewater.query import QuerySpec
from edgewater.synopses import FloatArray
from sim.budgets.baselines import accumulate
from sim.budgets.trace import Trace


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy achieved, per window of the trace.

    Attributes:
        staleness: in windows: from the window's end until the center had all that it was to get of it.
        error: the largest error of any group's value at the center, in the measure's unit.
        largest: the largest value of any group, which is the largest possible error.
        stated: the largest error that the edges stated as withheld, summed over edges; 0 for other policies.
        updates: entries sent.
        bytes: over all edges and windows.
    """

    staleness: FloatArray
    error: FloatArray
    largest: FloatArray
    stated: FloatArray
    updates: int
    bytes: float

    @property
    def relative_error(self) -> FloatArray:
        """`error` as a share of the largest possible error of any window."""
        return np.asarray(self.error / max(float(self.largest.max(initial=0.0)), 1e-300))

    def staleness_p95(self, skip: int = 0) -> float:
        """The 95th percentile over windows, the first `skip` left out."""
        return float(np.percentile(self.staleness[skip:], 95))

    def error_p95(self, skip: int = 0) -> float:
        """The 95th percentile of `relative_error`, the first `skip` windows left out."""
        return float(np.percentile(self.relative_error[skip:], 95))


def measured_values(trace: Trace, query: QuerySpec, measure: str) -> FloatArray:
    """What the measure is computed of, per record; ones for a count."""
    bound = query.bind(trace.columns)
    argument = next(m.argument for m in bound.measures if m.measure.name == measure)
    if argument is None:
        return np.ones(len(trace))
    return np.asarray(argument.array(trace.batch).to_numpy(zero_copy_only=False), np.float64)


def truth_per_window(trace: Trace, query: QuerySpec, measure: str) -> dict[int, FloatArray]:
    """By window start, the value per group (by number; NaN: none), windows without records included."""
    function = next(m.function.name for m in query.measures if m.name == measure)
    values, times = measured_values(trace, query, measure), trace.times_ms
    groups = int(trace.codes.max(initial=-1)) + 1
    result = {}
    size = query.window.slice_ms
    for start in range(query.window.slice_start(int(times[0])), int(times[-1]) + 1, size):
        at, until = np.searchsorted(times, (start, start + size))
        result[start] = np.full(groups, np.nan)
        accumulate(result[start], trace.codes[at:until], values[at:until], function)
    return result
