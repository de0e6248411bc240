"""Synopses that can be answered before all records have arrived, and how the error of an accuracy divides for them.

A record that is out moves a rank by at most one record. It raises the frequency of an item, and a number of distinct
values, by at most 1. So a bound of the number of records that are out widens the interval of a synopsis
(`edgewater.synopses.missing_records`), whatever the values of these records are.

The parts of the error add up: the synopsis' own error, the records that edges withhold, and the records that are out.
The first two are known at the registration, so the rest remains for the records that are out. The probabilities of
failure add up, too: of the bound of the number of records, and of the synopsis.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from edgewater.synopses.base import Quantile
from edgewater.synopses.distinct.hyperloglog import STANDARD_ERROR
from edgewater.synopses.intervals import dominated_quantile, normal_quantile
from edgewater.synopses.quantiles.kll import WORST_ERROR_TIMES_K

if TYPE_CHECKING:
    from edgewater.model.measure import Measure

RANKS = ("quantile", "quantiles", "kll")
EARLY_SYNOPSES = (*RANKS, "distinct", "top_k")
DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99)
"""The quantiles in the cell of a measure of `quantiles` or `kll`."""
_ROUNDING = 1e-12
"""Shares up to this are the rounding of their computation."""
_RANK_MARGIN = 0.95
"""Part of min(q, 1 - q) that may be out, so that the quantile q of what has arrived has both bounds."""


def split_confidence(measure: Measure, confidence: float) -> tuple[float, float]:
    """Returns the confidences of the number of records and of the synopsis' own interval. Their failures add up to
    those of `confidence`."""
    if measure.function.name not in ("distinct", "kll"):
        return confidence, 1.0  # the bounds of the synopsis are certain
    each = 1 - (1 - confidence) / 2
    return each, each


def own_error(measure: Measure, confidence: float) -> float:
    """Returns the synopsis' own error with this confidence, as a fraction of the number of records, or of distinct
    values."""
    parameters = dict(measure.parameters)
    match measure.function.name:
        case "distinct":
            deviation = normal_quantile(confidence) * STANDARD_ERROR / math.sqrt(1 << parameters["precision"])
            return float(math.expm1(deviation))
        case "kll":
            scale = dominated_quantile(confidence) / dominated_quantile(0.95)
            return float(WORST_ERROR_TIMES_K / parameters["k"] * scale)
        case "top_k":
            return float(1 / (parameters["capacity"] or 10 * parameters["k"]))
    return 0.0  # the error of a quantile's value is relative to the value, and no error of its rank


def straggler_share(measure: Measure, error: float, confidence: float, withheld: float = 0.0) -> float:
    """Returns the fraction of the records that may be out of an answer within `error`; not positive: none may be.

    Args:
        withheld: the fraction of a group's records that edges may withhold.
    """
    share = error - own_error(measure, split_confidence(measure, confidence)[1]) - withheld
    if measure.function.name in RANKS:
        asked = measure.question
        ranks = (asked.q,) if isinstance(asked, Quantile) else DEFAULT_QUANTILES
        share = min(share, *(_RANK_MARGIN * min(q, 1 - q) - withheld for q in ranks))
    return share if share > _ROUNDING else min(share, 0.0)
