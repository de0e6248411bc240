"""The accuracy a user asks for: P(relative error ≤ error) ≥ confidence, and when it cannot be meant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from edgewater.errors import InvalidInput, InvalidQuery

MeasureKind = Literal["mean", "sum", "count"]
GroupScope = Literal["each", "all"]

MEASURES: tuple[MeasureKind, ...] = ("mean", "sum", "count")
SCOPES: tuple[GroupScope, ...] = ("each", "all")


def check_measure(name: str, field: str = "measure", error: type[InvalidInput] = InvalidQuery) -> MeasureKind:
    """A measure whose answer can be given before its stragglers have come. Raises `error`, and says what there is.

    For quantiles, variance, extremes and functions there are sample sizes (`sample_size.py`, `bootstrap.py`), but no
    bound on what events that are still out would change, and so no early answer with a guarantee.
    """
    for known in MEASURES:
        if name == known:
            return known
    raise error(
        field, name,
        "mean, sum or count; for a proportion, the mean of an expression that is 0 or 1; for a quantile, "
        "exact_quantile, a function of a sample; for others a budget of staleness, which answers in time with what "
        "there is",
        "nothing bounds what stragglers would change in it",
    )  # fmt: skip


def check_confidence(confidence: object, field: str, error: type[InvalidInput] = InvalidQuery) -> float:
    """A probability strictly between 0 and 1. Raises `error`.

    1 - δ, not δ: the paper's evaluation puts δ = 0.95 into z(δ/2), which asks for next to nothing
    (corrections.md, Aion 2).
    """
    if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 < confidence < 1:
        raise error(field, confidence, "a probability between 0 and 1, both excluded, such as 0.95")
    return float(confidence)


def check_error(value: object, field: str, error: type[InvalidInput] = InvalidQuery) -> float:
    """A relative error above 0 and below 1. Raises `error`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise error(field, value, "a relative error between 0 and 1, both excluded, such as 0.05")
    return float(value)


@dataclass(frozen=True, slots=True)
class Target:
    """P(|estimate - truth| ≤ error·|truth|) ≥ confidence, per window.

    Attributes:
        groups: how many groups the promise is about; 1: one global answer.
        scope: "each": the promise holds for every single group. "all": for all of them at once. One
            about the total says nothing about groups (corrections.md, Aion 9).
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
        """The confidence that each group needs: Bonferroni's when the promise is about all at once."""
        if self.scope == "all":
            return 1 - (1 - self.confidence) / self.groups
        return self.confidence


ZERO_MEAN_STANDARD_ERRORS = 4.0


def check_relative(mean: float, deviation: float, count: float, field: str) -> None:
    """Refuses a relative error on a measure whose mean may be zero.

    A relative error has no meaning where the truth can be 0, and Eq. 4 asks for everything. `mean`,
    `deviation` and `count` are those of the values seen so far.

    Raises:
        InvalidQuery: the mean is not known to differ from zero, although the values vary.
    """
    if count < 2 or deviation == 0:
        return
    standard_error = deviation / math.sqrt(count)
    if not abs(mean) > ZERO_MEAN_STANDARD_ERRORS * standard_error:
        raise InvalidQuery(
            field,
            mean,
            "an absolute error (budget: {error: {...}}), or the mean or sum of a measure that keeps one sign, such as "
            "abs(x); a count's relative error is always defined",
            f"a relative error is undefined where the mean may be zero (standard error {standard_error:.3g})",
        )
