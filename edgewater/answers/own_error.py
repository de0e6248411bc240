"""`OwnError`: the error that the synopsis of one measure makes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgewater.synopses import Estimates


@dataclass(slots=True)
class OwnError:
    """The error that the synopsis of one measure makes. It does not depend on missing records.

    Attributes:
        is_sample: the synopsis is a sample of the records.
        half_width: the largest distance of a bound from its estimate; infinite: unknown.
        rounding: the largest rounding of a value; None: the values have errors besides rounding.
        has_odd: a value is NaN or infinite.
    """

    is_sample: bool = False
    half_width: float = 0.0
    rounding: float | None = None
    has_odd: bool = False

    def note(self, estimates: Estimates) -> None:
        """Adds values as the synopsis states them. Called before they are widened."""
        known = np.isfinite(estimates.value)
        self.has_odd |= bool(estimates.odd.any())
        if known.any():
            value, lower, upper = (getattr(estimates, name)[known] for name in ("value", "lower", "upper"))
            gap = float(np.maximum(upper - value, value - lower).max())
            self.half_width = max(self.half_width, math.inf if math.isnan(gap) else gap)
        if estimates.integers is not None or estimates.rounding is not None:
            present = ~np.isnan(estimates.value) if estimates.present is None else estimates.present
            rounding = 0.0 if estimates.rounding is None else float(estimates.rounding[present].max(initial=0.0))
            self.rounding = max(self.rounding or 0.0, rounding)
