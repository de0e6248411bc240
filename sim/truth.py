"""The true answers of a trace, computed directly."""

from __future__ import annotations

import numpy as np

from edgewater.query import QuerySpec
from edgewater.synopses.base import FloatArray
from sim.baselines import accumulate
from sim.trace import Trace


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
