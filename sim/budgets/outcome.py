"""True answers of a trace, and the measured outcome of a simulated policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgewater.model.query import QuerySpec
from edgewater.synopses import FloatArray
from sim.budgets.baselines import accumulate
from sim.budgets.trace import Trace


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """The outcome of a policy. Arrays have one value per window of the trace, float64.

    Attributes:
        staleness: from the window's end until the last update of the window arrived, in window lengths.
        error: the largest error of a group's value at the center, in the measure's unit.
        largest: the largest value of a group, which is the largest possible error.
        stated: the largest error that edges stated as withheld, summed over edges; 0 for computed policies.
        updates: number of entries sent.
        bytes: bytes sent, over all edges and windows.
    """

    staleness: FloatArray
    error: FloatArray
    largest: FloatArray
    stated: FloatArray
    updates: int
    bytes: float

    @property
    def relative_error(self) -> FloatArray:
        """`error` as a fraction of the largest possible error of all windows."""
        return np.asarray(self.error / max(float(self.largest.max(initial=0.0)), 1e-300))

    def staleness_p95(self, skip: int = 0) -> float:
        """Returns the 95th percentile of `staleness`, without the first `skip` windows."""
        return float(np.percentile(self.staleness[skip:], 95))

    def error_p95(self, skip: int = 0) -> float:
        """Returns the 95th percentile of `relative_error`, without the first `skip` windows."""
        return float(np.percentile(self.relative_error[skip:], 95))


def measured_values(trace: Trace, query: QuerySpec) -> FloatArray:
    """Returns the value of the first measure's argument per record; ones for a count."""
    argument = query.bind(trace.columns).measures[0].argument
    if argument is None:
        return np.ones(len(trace))
    return np.asarray(argument.array(trace.batch).to_numpy(zero_copy_only=False), np.float64)


def truth_per_window(trace: Trace, query: QuerySpec) -> dict[int, FloatArray]:
    """Returns the true value of the first measure per group number, for each window start, including windows without
    records.

    NaN marks groups without records.
    """
    function = query.measures[0].function.name
    values, times = measured_values(trace, query), trace.times_ms
    groups = int(trace.codes.max(initial=-1)) + 1
    result = {}
    size = query.window.slice_ms
    for start in range(query.window.slice_start(int(times[0])), int(times[-1]) + 1, size):
        at, until = np.searchsorted(times, (start, start + size))
        result[start] = np.full(groups, np.nan)
        accumulate(result[start], trace.codes[at:until], values[at:until], function)
    return result
