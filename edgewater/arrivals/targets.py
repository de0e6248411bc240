"""The targets of early answers: kinds of measures, and relative errors with a confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgewater.base.errors import InvalidInput, InvalidQuery

MeasureKind = Literal["mean", "sum", "count", "min", "max", "records"]
"""The kind of value that is estimated before all records have arrived.

``records``: the measure is a synopsis. The number of missing records then widens its intervals
(`edgewater.model.early_synopses`).
"""
GroupScope = Literal["each", "all"]

EXTREMES: tuple[MeasureKind, ...] = ("min", "max")
"""The kinds that keep their value with probability 1 - Q/N, if Q of N records are out."""
MEASURES: tuple[MeasureKind, ...] = ("mean", "sum", "count")
NOT_PREDICTED: tuple[MeasureKind, ...] = ("records", *EXTREMES)
"""The kinds that expected stragglers do not correct: each record that is out counts towards the error."""
COUNTS: tuple[MeasureKind, ...] = ("count", *NOT_PREDICTED)
"""The kinds whose decision depends only on the number of records."""
SCOPES: tuple[GroupScope, ...] = ("each", "all")

ZERO_MEAN_STANDARD_ERRORS = 4.0


def check_measure(
    name: str, field: str = "measure", error: type[InvalidInput] = InvalidQuery, also: Sequence[str] = ()
) -> MeasureKind:
    """Returns the name of a measure, if its value can be estimated before its stragglers have arrived.

    For variances and functions, the needed sample sizes are known (`center.early`). But there is no bound for how much
    the missing records would change the value.

    Args:
        also: other measures that the caller accepts.

    Raises:
        error: the measure cannot be answered early. The message lists the alternatives.
    """
    for known in (*MEASURES, *EXTREMES):
        if name == known:
            return known
    raise error(
        field, name,
        f"{', '.join((*MEASURES, *EXTREMES, *also))}; for a proportion, the mean of an expression that is 0 or 1; "
        "for other measures a staleness budget, which answers on time from the records that have arrived",
        "there is no bound for how much stragglers would change its value",
    )  # fmt: skip


def check_confidence(confidence: object, field: str, error: type[InvalidInput] = InvalidQuery) -> float:
    """Returns a probability strictly between 0 and 1. Raises `error` for anything else.

    The probability is 1 - δ. (The Aion paper's evaluation uses δ = 0.95 in z(δ/2), which requires almost no samples.)
    """
    if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 < confidence < 1:
        raise error(field, confidence, "a probability between 0 and 1, both excluded, such as 0.95")
    return float(confidence)


def check_error(value: object, field: str, error: type[InvalidInput] = InvalidQuery) -> float:
    """Returns a relative error strictly between 0 and 1. Raises `error` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise error(field, value, "a relative error between 0 and 1, both excluded, such as 0.05")
    return float(value)


def check_relative(mean: float, deviation: float, count: float, field: str) -> None:
    """Refuses a relative error for a measure whose mean may be zero.

    A relative error is undefined if the true value can be 0. Eq. 4 of the Aion paper then requires all records.

    Args:
        mean, deviation, count: mean, standard deviation and number of the values observed so far.

    Raises:
        InvalidQuery: the values vary and their mean is not significantly different from zero.
    """
    if count < 2 or deviation == 0:
        return
    standard_error = deviation / math.sqrt(count)
    if not abs(mean) > ZERO_MEAN_STANDARD_ERRORS * standard_error:
        raise InvalidQuery(
            field,
            mean,
            "an absolute error (budget: {error: {...}}), or the mean or sum of an expression that keeps one sign, such "
            "as abs(x); the relative error of a count is always defined",
            f"a relative error is undefined where the mean may be zero (standard error {standard_error:.3g})",
        )


@dataclass(frozen=True, slots=True)
class AccuracyTarget:
    """P(|estimate - truth| ≤ error·|truth|) ≥ confidence, per window.

    Attributes:
        groups: number of groups; 1 for a query without groups.
        scope: "each" if the target holds for every single group, "all" if it holds for all groups simultaneously. (A
            target for the total would guarantee nothing about the groups.)
    """

    error: float = 0.05
    confidence: float = 0.95
    groups: int = 1
    scope: GroupScope = "each"

    def __post_init__(self) -> None:
        check_error(self.error, "accuracy.error")
        check_confidence(self.confidence, "accuracy.confidence")
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1:
            raise InvalidQuery("accuracy.groups", self.groups, "a whole number of groups, at least 1")
        if self.scope not in SCOPES:
            raise InvalidQuery("accuracy.scope", self.scope, f"one of {', '.join(SCOPES)}")

    @property
    def group_confidence(self) -> float:
        """The confidence that each group needs. For the scope "all" it includes Bonferroni's correction."""
        if self.scope == "all":
            return 1 - (1 - self.confidence) / self.groups
        return self.confidence
