"""`WithheldBound`: how far the values that edges withhold, or that came late, may move a value.

`docs/explanation/budgets.md` derives the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

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


@dataclass(frozen=True, slots=True)
class LateRecords:
    """Some late records.

    Attributes:
        amounts: by measure, by how much they move a value together. An absent measure is unknown.
    """

    records: int = 0
    amounts: Mapping[str, WithheldBound] = field(default_factory=dict)

    @classmethod
    def by(cls, records: int, stated: Iterable[Withheld]) -> Self:
        """Returns late records as an edge states them."""
        return cls(records, {w.measure: WithheldBound.of(w) for w in stated})

    def of(self, measures: Collection[str]) -> LateRecords:
        """Returns the records with the amounts of some measures only."""
        return replace(self, amounts={name: each for name, each in self.amounts.items() if name in measures})

    def plus(self, other: LateRecords) -> LateRecords:
        if not self.records or not other.records:
            return self if self.records else other
        names = self.amounts.keys() & other.amounts.keys()
        united = {n: WithheldBound.union([self.amounts[n], other.amounts[n]]) for n in sorted(names)}
        return LateRecords(self.records + other.records, united)

    def to_state(self) -> list[Any]:
        """Returns JSON, in which infinity is a text."""
        stated = [(n, str(a.above), str(a.below), a.unsent) for n, a in sorted(self.amounts.items())]
        return [self.records, [[*each, None if unsent is None else str(unsent)] for *each, unsent in stated]]

    @classmethod
    def from_state(cls, value: Sequence[Any]) -> Self:
        records, amounts = value
        bounds = (
            (n, float(above), float(below), None if unsent is None else float(unsent))
            for n, above, below, unsent in amounts
        )
        return cls(records, {n: WithheldBound(above, below, unsent) for n, above, below, unsent in bounds})


NO_LATE = LateRecords()


def finite(value: float) -> float | None:
    """Returns the value, or None (JSON null, "unknown") if it is not finite, because JSON has no infinity."""
    return value if math.isfinite(value) else None
