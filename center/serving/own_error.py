"""The error of an answer by cause, for each measure, and whether the answer may be called exact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from center.ledger import ACCURACY, Violation, with_violations
from edgewater.model.query import QuerySpec
from edgewater.synopses import Estimates

ROUNDING = "rounding"
"""Violation code: a value exceeds float64, so that its rounding has no bound."""


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


def error_by_cause(
    stored: Mapping[str, Any], own: Mapping[str, OwnError], predicted: str | None
) -> dict[str, dict[str, Any]]:
    """Returns `quality.error`: cause -> measure -> amount; null: unknown.

    Args:
        stored: the record's `error`, whose numbers are about the measure of the accuracy.
        own: of all measures of the answer.
        predicted: the measure whose values a prediction replaces; the other measures then have no bounds. None: there
            is no prediction.
    """
    rounding = {name: _number(e.rounding) for name, e in own.items() if e.rounding is not None and name != predicted}
    sketch = {name: 0 if e.is_sample else _number(e.half_width) for name, e in own.items()}
    sampling = {name: _number(e.half_width) if e.is_sample else 0 for name, e in own.items()}
    missing = dict.fromkeys(own, stored["missing"])
    result = {"rounding": rounding, "sketch": sketch, "sampling": sampling, "withheld": stored["withheld"]}
    if predicted is not None:
        unknown: dict[str, Any] = dict.fromkeys(own)
        result["sampling"], straggler, missing = (
            {**unknown, **({predicted: stored[cause]} if predicted in own else {})}
            for cause in ("sampling", "straggler", "missing")
        )
        result["straggler"] = straggler
    return {**result, "missing": missing}


def with_own_errors(contract: Mapping[str, Any], spec: QuerySpec, own: Mapping[str, OwnError]) -> dict[str, Any]:
    """Returns the contract with the violations that odd values cause.

    These are: a value of an exact measure that exceeds float64; a value of a measure with an accuracy that is NaN or
    infinite, and so has no relative error.
    """
    violations = []
    for name, error in own.items():
        if spec.budget is None and spec.accuracy is None and error.rounding is not None and math.isinf(error.rounding):
            violations.append(Violation(ROUNDING, f"{name}: a value is beyond the range of float64"))
        if spec.accuracy is not None and spec.accuracy.measure == name and spec.accuracy.kind and error.has_odd:
            violations.append(Violation(ACCURACY, f"{name}: a value is NaN or infinite"))
    return with_violations(contract, violations)


def _number(amount: float) -> float | int | None:
    if not math.isfinite(amount):
        return None
    return int(amount) if amount == 0.0 else amount
