"""The values that edges withhold of a slice or of a window: the counters and bounds of closes, and their union.

`docs/explanation/budgets.md` derives the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from center.ledger.violations import WITHHELD, Violation
from edgewater.model.caching import format_fraction
from edgewater.model.query import ErrorBudget, QuerySpec
from edgewater.synopses.missing_records import has_bounds
from edgewater.synopses.rests import union_of_rests
from edgewater.wire import Rest, Signs, SliceClose, Withheld

_ROUNDING = 1e-9
"""Relative tolerance of comparisons, because in floating point n shares of E/n do not always add up to E."""
_SIGNS = {
    Signs.NOT_NEGATIVE: frozenset({1}),
    Signs.NEGATIVE: frozenset({-1}),
    Signs.BOTH: frozenset({1, -1}),
}


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

    def to_mapping(self) -> dict[str, float | None]:
        """Returns JSON. An unknown amount is null, and an unknown share is absent."""
        result = {"above": finite(self.above), "below": finite(self.below)}
        if self.unsent is not None:
            result["unsent"] = finite(self.unsent)
        shares = {"above_share": self.above_share, "below_share": self.below_share}
        return {**result, **{name: share for name, share in shares.items() if math.isfinite(share)}}

    @classmethod
    def from_mapping(cls, value: Mapping[str, float | None]) -> Self:
        """Returns the bound from the result of `to_mapping`."""
        read = {name: math.inf if amount is None else amount for name, amount in value.items()}
        return cls(read.get("above", 0.0), read.get("below", 0.0), read.get("unsent"),
                   read.get("above_share", math.inf), read.get("below_share", math.inf))  # fmt: skip

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
class Totals:
    """Union of all edges' closes of a slice, or of all slices of a window.

    Attributes:
        observed: number of records.
        late: number of records that arrived after their slice's close.
        withheld: by measure, the withheld amounts, if an edge withholds anything.
        signs: for each sum of a query with a relative limit, the signs of the values over all edges and slices, as a
            set of +1 and -1.
        rests: per measure with a rest, the rests of all closes; None for an unknown rest.
    """

    observed: int = 0
    late: int = 0
    withheld: Mapping[str, WithheldBound] | None = None
    signs: Mapping[str, frozenset[int]] | None = None
    rests: Mapping[str, tuple[Rest | None, ...]] | None = None

    @classmethod
    def of_closes(cls, closes: Iterable[SliceClose], spec: QuerySpec) -> Totals:
        """Returns the totals of one slice. `closes` has one close per edge and incarnation."""
        return cls.union((cls._of_close(c, spec) for c in closes), spec)

    @classmethod
    def _of_close(cls, close: SliceClose, spec: QuerySpec) -> Totals:
        bounds = {w.measure: WithheldBound.of(w) for w in close.withheld if w.groups or w.largest_unsent is not None}
        has_shares = spec.error_budget is not None and bool(spec.error_budget.relative)
        sums = [m.name for m in spec.measures if m.function.error == "sum"] if has_shares else []
        signs: dict[str, frozenset[int]] = {}
        if sums and close.observed:
            stated = {w.measure: Signs(w.signs) for w in close.withheld}
            signs = {name: _SIGNS[stated.get(name, Signs.NOT_NEGATIVE)] for name in sums}
        return cls(close.observed, close.late, bounds, signs, {w.measure: (w.rest,) for w in close.withheld})

    @classmethod
    def union(cls, parts: Iterable[Totals], spec: QuerySpec) -> Totals:
        """Adds counters, unites the bounds of each measure (`WithheldBound.union`), and lists the rests."""
        observed = late = 0
        rests: dict[str, list[Rest | None]] = {}
        bounds: dict[str, list[WithheldBound]] = {}
        signs: dict[str, frozenset[int]] = {}
        for part in parts:
            observed += part.observed
            late += part.late
            for measure, each in (part.rests or {}).items():
                rests.setdefault(measure, []).extend(each)
            for measure, some in (part.signs or {}).items():
                signs[measure] = signs.get(measure, frozenset()) | some
            for measure, bound in (part.withheld or {}).items():
                bounds.setdefault(measure, []).append(bound)
        listed = {measure: tuple(each) for measure, each in rests.items()}
        if not bounds:
            return cls(observed, late, {}, signs, listed)
        extrema = frozenset(m.name for m in spec.measures if m.function.error == "extremum")
        withheld: dict[str, Any] = {}
        for measure, several in bounds.items():
            bound = several[0] if len(several) == 1 else WithheldBound.union(several, of_extremum=measure in extrema)
            has_both_signs = len(signs.get(measure, ())) > 1
            withheld[measure] = bound.without_shares() if has_both_signs else bound
        return cls(observed, late, withheld, signs, listed)

    def united_rests(self, spec: QuerySpec) -> dict[str, Rest | None]:
        """Returns, for each measure with a rest, the union of the rests; None if it is unknown."""
        functions, rests = {m.name: m.function.name for m in spec.measures}, self.rests or {}
        return {name: union_of_rests(functions[name], each) for name, each in sorted(rests.items())}


def over_budget(
    withheld: Mapping[str, WithheldBound], budget: ErrorBudget, signs: Mapping[str, frozenset[int]]
) -> list[Violation]:
    """Returns a violation for each measure whose withheld amount exceeds its limit.

    A relative limit is compared with the largest withheld share of any group. Without an error budget, all measures
    must be exact. With an error budget, a measure that the budget does not name has no limit.

    Args:
        signs: the signs in `Totals`. Values of both signs may cancel. A sum may then be smaller than its values, so a
            share of the values is not a share of the sum.
    """
    limits, relative = dict(budget.limits), dict(budget.relative)
    violations = []
    for measure, bound in withheld.items():
        # The comparisons treat NaN as beyond the limit.
        worst, limit = float(np.maximum(bound.above, bound.below)), limits.get(measure)
        if measure in relative:
            if len(signs.get(measure, ())) > 1:
                message = f"{measure}: edges withhold a percentage of values of both signs, which may cancel"
                violations.append(Violation("both-signs", message, measure))
                continue
            share, most = float(np.maximum(bound.above_share, bound.below_share)), relative[measure]
            if not share <= most * (1 + _ROUNDING):
                stated = f"up to {100 * share:.4g}%" if math.isfinite(share) else "an unknown share"
                message = f"{measure}: edges withhold {stated} of a group; the budget is {format_fraction(most)}"
                violations.append(Violation("error-budget", message, measure))
        elif limit is None and not worst <= 0 and not (limits or relative):
            violations.append(Violation(WITHHELD, f"{measure}: edges withhold up to {worst:g} per group", measure))
        elif limit is not None and not worst <= limit * (1 + _ROUNDING):
            message = f"{measure}: edges withhold up to {worst:g} per group; the budget is {limit:g}"
            violations.append(Violation("error-budget", message, measure))
    return violations


def without_bounds(spec: QuerySpec, withheld: Mapping[str, WithheldBound]) -> list[Violation]:
    """Returns a violation for each measure with withheld records whose effect on the measure's value has no bound.

    If the budget limits the number of withheld records of a measure, there is no violation for this measure. The
    validity of other bounds depends on the values of the answer (`center.serving.withheld`).
    """
    budget = spec.error_budget
    if budget is None:
        return []
    without = [m for m in spec.measures if m.name in withheld and m.name not in budget.measures]
    return [
        Violation(WITHHELD, f"{m.name}: edges withhold records, and nothing bounds their effect on a value", m.name)
        for m in without
        if not has_bounds(m.function.name, m.parameters)
    ]


def finite(value: float) -> float | None:
    """Returns the value, or None (JSON null, "unknown") if it is not finite, because JSON has no infinity."""
    return value if math.isfinite(value) else None
