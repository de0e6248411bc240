"""Synopses that may be answered early, and how the error of an accuracy is divided among its causes.

A missing record changes a rank by at most one. It raises the frequency of an item, the count of a bucket, and the
number of distinct values, by at most 1. A sample lacks it. So a bound for the number of missing records widens the
interval of a synopsis (`edgewater.synopses.missing_records`). The values of these records do not matter.

Three parts of the error add up: the synopsis' own error, the records that edges withhold, and the missing records. The
first two are known at the registration, so the rest is left for the missing records. Two probabilities of failure also
add up: of the bound for the number of records, and of the synopsis.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from edgewater.arrivals.targets import EXTREMES
from edgewater.synopses.base import Quantile
from edgewater.synopses.distinct.hyperloglog import STANDARD_ERROR
from edgewater.synopses.intervals import dominated_quantile, normal_quantile
from edgewater.synopses.quantiles.kll import WORST_ERROR_TIMES_K
from edgewater.synopses.shapes import DEFAULT_QUANTILES

if TYPE_CHECKING:
    from edgewater.model.measure import Measure

RANKS = ("quantile", "quantiles", "kll")
SAMPLES = ("reservoir", "bernoulli")
EARLY_SYNOPSES = (*RANKS, "distinct", "top_k", "count_min", "equi_width", *SAMPLES)
_ROUNDING = 1e-12  # derived: rounding of a sum
"""Shares up to this are rounding errors of their computation."""
_RANK_MARGIN = 0.95  # limit: missing records
"""The part of min(q, 1 - q) by which records may be missing, so that the quantile q of the arrived records has both
bounds.
"""


def split_confidence(measure: Measure, confidence: float) -> tuple[float, float]:
    """Returns the confidence of the number of records, and the confidence of the synopsis' own interval.

    Their probabilities of failure add up to the probability of failure of `confidence`.
    """
    if measure.function.name not in ("distinct", "kll", *SAMPLES):
        return confidence, 1.0  # the bounds of the synopsis are certain
    each = 1 - (1 - confidence) / 2
    return each, each


def own_error(measure: Measure, confidence: float) -> float:
    """Returns the synopsis' own error with this confidence, as a fraction of the number of records or of distinct
    values.
    """
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
        case "count_min":
            return float(math.e / parameters["width"])
    # A quantile has an error of its value, but no error of its rank. A bucket is exact. Of a sample, the error is the
    # fraction of the records that it cannot have selected.
    return 0.0


def straggler_share(measure: Measure, error: float, confidence: float, withheld: float = 0.0) -> float:
    """Returns the fraction of the records that may be missing in an answer within `error`; 0 or less if none may be
    missing.

    Args:
        withheld: the fraction of a group's records that edges may withhold.
    """
    if measure.function.name in EXTREMES:  # the rest of the probability is for more missing records than expected
        return (1 - confidence) / 2
    share = error - own_error(measure, split_confidence(measure, confidence)[1]) - withheld
    if measure.function.name in RANKS:
        asked = measure.question
        ranks = (asked.q,) if isinstance(asked, Quantile) else DEFAULT_QUANTILES
        share = min(share, *(_RANK_MARGIN * min(q, 1 - q) - withheld for q in ranks))
    return share if share > _ROUNDING else min(share, 0.0)
