"""What a simulated policy achieved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgewater.synopses.base import FloatArray


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
