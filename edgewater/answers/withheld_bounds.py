"""`WithheldBound`: how far the values that edges withhold may move a value.

`docs/explanation/budgets.md` derives the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from edgewater.wire import Withheld


@dataclass(frozen=True, slots=True)
class WithheldBound:
    """Bounds of how far any group's true value is above and below the group's estimate. No member is negative.

    The amounts and the shares are both valid bounds, so for each group the tighter bound counts. Infinite means
    unknown.

    Attributes:
        above, below: amounts in the unit of the measure. For a measure without an error function, numbers of records.
        unsent: the largest maximum of a group for which an edge sent nothing. Any group's true maximum is at most the
            larger one of `unsent` and the group's estimate plus `above`. None if every edge sent a value for each of
            its groups.
        above_share, below_share: the same bounds as fractions of the group's own true value.
    """

    above: float
    below: float
    unsent: float | None = None
    above_share: float = math.inf
    below_share: float = math.inf

    @classmethod
    def of(cls, stated: Withheld) -> Self:
        """Returns the bound that one edge states. A value that is not a valid amount or share becomes infinite."""
        amounts = (stated.largest_above, stated.largest_below, stated.above_share, stated.below_share)
        above, below, *shares = (math.inf if v is None or not v >= 0 else v for v in amounts)
        unsent = stated.largest_unsent
        return cls(above, below, math.inf if unsent is not None and math.isnan(unsent) else unsent, *shares)

    def to_json(self) -> dict[str, float | None]:
        """Returns the bound as answers show it. An unknown amount is null, and an unknown share is absent."""
        result = {"above": finite(self.above), "below": finite(self.below)}
        if self.unsent is not None:
            result["unsent"] = finite(self.unsent)
        shares = {"above_share": self.above_share, "below_share": self.below_share}
        return {**result, **{name: share for name, share in shares.items() if math.isfinite(share)}}

    @classmethod
    def union(cls, bounds: Iterable[WithheldBound], *, of_extremum: bool = False) -> Self:
        """Returns the bound for a value that is merged over edges and slices.

        The amounts of sums and counts add up, because the same group may have the largest amount at every edge and in
        every slice. The error of an extremum is at most the largest single amount, because max(aᵢ + wᵢ) ≤ max(aᵢ) +
        max(wᵢ). The largest share is a bound for the merged value. For sums, this is true only if all values have one
        sign, and the caller must check this.
        """
        above = below = above_share = below_share = 0.0
        unsent = None
        for bound in bounds:
            if of_extremum:
                above, below = max(above, bound.above), max(below, bound.below)
            else:
                above += bound.above
                below += bound.below
            above_share, below_share = max(above_share, bound.above_share), max(below_share, bound.below_share)
            if bound.unsent is not None:
                unsent = bound.unsent if unsent is None else max(unsent, bound.unsent)
        return cls(above, below, unsent, above_share, below_share)

    def without_shares(self) -> WithheldBound:
        """Returns the bound without its shares, for sums whose values have both signs."""
        return WithheldBound(self.above, self.below, self.unsent)


def finite(value: float) -> float | None:
    """Returns the value, or None (JSON null, "unknown") if it is not finite, because JSON has no infinity."""
    return value if math.isfinite(value) else None
