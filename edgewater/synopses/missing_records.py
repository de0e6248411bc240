"""Bounds of a synopsis' answers if some records are missing from it.

An edge that withholds a group's records withholds them from all measures. Their number is known, and their values are
not. So a missing record may have any value. It raises a count of an item or of distinct values by at most 1, and it
shifts a rank by at most 1. Nothing bounds its effect on a mean, a variance or a sum.

`docs/explanation/budgets.md` derives the bounds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from edgewater.synopses.base import (
    Count,
    Distinct,
    Estimates,
    FloatArray,
    Maximum,
    Minimum,
    Quantile,
    Question,
    Rank,
    Stack,
)
from edgewater.synopses.histograms.equi_depth import EquiDepthStack
from edgewater.synopses.named_questions import default_question
from edgewater.synopses.questions import (
    Contains,
    Frequency,
    ItemRanking,
    Proportion,
    Range,
    SelfJoinSize,
    SubsetCount,
    TopItems,
)
from edgewater.synopses.registry import Parameters, function_named
from edgewater.synopses.sampling.biased_reservoir import BiasedReservoirStack
from edgewater.synopses.sampling.fifo import FifoStack
from edgewater.synopses.sampling.sample_stack import SampleStack

_RANK_CHUNKS = 64  # limit: CPU of bounds
"""Chunks of groups whose quantiles are evaluated at the same ranks."""
_OF_A_PART = (BiasedReservoirStack, FifoStack)
"""Samples of the newest records: a missing record may replace any record of them."""


@lru_cache(maxsize=1024)
def has_bounds(function: str, parameters: Parameters) -> bool:
    """Returns whether all values of a function's default answer keep their bounds while a few records are missing."""
    named = function_named(function)
    assert named is not None
    return named.error is not None or _has_bounds(named.make(parameters, None))


def _has_bounds(stack: Stack) -> bool:
    if isinstance(stack, SampleStack | EquiDepthStack):
        return False  # means, sums, and the least and the greatest boundary have no bounds
    if isinstance(stack, ItemRanking) or Quantile in stack.questions or Range in stack.questions:
        return True
    default = default_question(stack, None)
    return isinstance(default, Distinct | SelfJoinSize) or (default is None and Frequency in stack.questions)


def with_missing_records(
    stack: Stack, question: Question | None, estimates: Estimates, missing: FloatArray
) -> Estimates:
    """Widens the answer to a question by the records that may be missing.

    Args:
        question: None: the stack's own default, which has no bounds then.
        estimates: the stack's answer, one per entry of `missing`.
        missing: float64, how many records may be missing at most; infinite: unknown.
    """
    most = np.floor(missing)
    if not (most > 0).any():
        return estimates
    lower, upper = _bounds(stack, question, estimates, most)
    lacking = most > 0
    return replace(
        estimates, lower=np.where(lacking, lower, estimates.lower), upper=np.where(lacking, upper, estimates.upper)
    )


def _bounds(
    stack: Stack, question: Question | None, estimates: Estimates, most: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Returns the bounds if at most `most` records are missing, float64 per group; NaN: there is no bound."""
    lower, upper, unknown = estimates.lower, estimates.upper, np.full(len(estimates), np.nan)
    if isinstance(stack, _OF_A_PART) and not isinstance(question, Count):
        return unknown, unknown
    match question:
        case Count() | Distinct() | Frequency() | TopItems() | Range() | SubsetCount():
            return lower, np.where(np.isfinite(most), upper + most, np.nan)
        case Contains():
            return lower, np.maximum(upper, 1.0)
        case SelfJoinSize():
            # The frequencies are a vector whose length grows by at most the number of added records.
            return lower, (np.sqrt(np.maximum(upper, 0.0)) + most) ** 2
        case Minimum():
            return unknown, upper
        case Maximum():
            return lower, unknown
        case Rank() | Proportion() if Count in stack.questions:
            n = _known_counts(stack)
            with np.errstate(invalid="ignore"):
                return lower * n / (n + most), np.where(np.isfinite(most), (upper * n + most) / (n + most), 1.0)
        case Quantile() if Count in stack.questions:
            return _quantile_bounds(stack, question, estimates, most)
    return unknown, unknown


def _quantile_bounds(
    stack: Stack, question: Quantile, estimates: Estimates, most: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Returns the bounds of the value at rank ⌊q·(N - 1)⌋ of all N ≤ n + m values, n of which are in the synopsis.

    The value with index t among all N values has an index from t - m to t among the n values, if there are such values.
    """
    n = _known_counts(stack)
    with np.errstate(invalid="ignore"):
        last = np.floor(question.q * (n + most - 1))
        first = last - most
    lower, upper = np.full(len(stack), np.nan), np.full(len(stack), np.nan)
    confidence = (1 + question.confidence) / 2  # each side may fail, at another rank
    # The middle between two ranks is rounded down to the first rank, whatever the rounding of the division is.
    for bound, index, side in ((lower, first, "lower"), (upper, last, "upper")):
        groups = np.flatnonzero(np.isfinite(index) & (index >= 0) & (index <= n - 1) & (most > 0))
        ranks = np.clip((index[groups] + 0.5) / np.maximum(n[groups] - 1, 1), 0.0, 1.0)
        for part in np.array_split(np.argsort(ranks, kind="stable"), min(_RANK_CHUNKS, max(len(groups), 1))):
            if len(part):
                extreme = ranks[part].min() if side == "lower" else ranks[part].max()
                asked = Quantile(float(extreme), confidence)
                bound[groups[part]] = getattr(stack.take(groups[part]).query(asked), side)
    return np.minimum(lower, estimates.lower), np.maximum(upper, estimates.upper)


def _known_counts(stack: Stack) -> FloatArray:
    """Returns the number of values per group; NaN if the number is only an estimate."""
    counts = stack.query(Count())
    return np.where(counts.lower == counts.upper, counts.value, np.nan)
