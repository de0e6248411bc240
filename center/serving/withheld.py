"""How far what edges withhold may move the values of an answer, and whether the answer then keeps its error budget.

`docs/explanation/budgets.md` derives the bounds. An answer keeps its budget only if the intervals that it states are
within it: an edge's statement of its own amounts is not enough, since the values of several edges are merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from center.ledger import Violation, WithheldBound, with_violations
from edgewater.measure import Measure
from edgewater.query import ErrorBudget, QuerySpec
from edgewater.synopses import Estimates, FloatArray, GroupedAggregate, IntArray, Question, Stack
from edgewater.synopses.missing_records import with_missing_records

_ROUNDING = 1e-9
"""Relative tolerance: shares of a budget need not add up to it in floating point."""
_OUTWARDS = 2.0**-48
"""Bounds by shares are moved outwards by this fraction, which exceeds the rounding of their computation."""
NOTHING = WithheldBound(0.0, 0.0, None, 0.0, 0.0)


@dataclass(slots=True)
class GroupsWithheld:
    """What edges withhold of each group in the rows of an answer.

    Attributes:
        bounds: per measure of which anything is withheld.
        records: the most records of a group that are withheld; infinite: unknown.
        records_share: the same, as a fraction of the group's records.
        sent: float64 per row, the records of the group that are in the answer; None: unknown.
        excess: per measure with a limit, the widest interval beyond it: its width to one side, and the limit there.
        without_bound: measures that a value with bounds has lost them, because records are withheld.
    """

    spec: QuerySpec
    bounds: Mapping[str, WithheldBound]
    records: float
    records_share: float
    sent: FloatArray | None = None
    excess: dict[str, tuple[float, float]] = field(default_factory=dict)
    without_bound: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, spec: QuerySpec, bounds: Mapping[str, WithheldBound]) -> GroupsWithheld:
        """Args: bounds: per measure of which anything is withheld."""
        # Each of these states a bound where a record is withheld. Withheld zeros leave the bound of a sum empty.
        stating = [bounds.get(m.name, NOTHING) for m in spec.measures if m.function.error is None or _counts(m)]
        unknown = math.inf if bounds or (spec.budget is not None and spec.accuracy is None) else 0.0
        records = max((bound.above for bound in stating), default=unknown)
        return cls(spec, bounds, records, max((bound.above_share for bound in stating), default=unknown))

    def of_rows(self, aggregate: GroupedAggregate, rows: IntArray) -> GroupsWithheld:
        """Takes account of the numbers of records in these rows of the merged data."""
        count = record_count(self.spec)
        if count is None or not self.bounds:
            return self
        return replace(self, sent=aggregate.measures[count.name].query().value[rows])

    def missing_records(self, rows: int) -> FloatArray:
        """Returns the most records that each row may lack."""
        missing = np.full(rows, self.records)
        if self.sent is not None and self.records_share < 1.0:
            by_share = self.sent * (self.records_share / (1.0 - self.records_share)) * (1.0 + _ROUNDING)
            missing = np.minimum(missing, by_share)
        return missing

    def widen(
        self,
        measure: Measure,
        stack: Stack,
        estimates: Estimates,
        question: Question | None,
        *,
        own: bool = True,
        groups: IntArray | None = None,
    ) -> Estimates:
        """Widens the answer to a question, and notes what this means for the contract.

        Args:
            own: it is the measure's own value, to which its error function applies.
            groups: the row of each estimate; None: there is one per row.
        """
        if measure.function.error is not None and own:
            bound = self.bounds.get(measure.name)
            widened = estimates if bound is None else with_withheld_amounts(estimates, bound)
            self._note_excess(measure.name, widened)
        else:
            missing = self.missing_records(len(stack))
            if groups is not None:
                missing = missing[groups]
            widened = with_missing_records(stack, question, estimates, missing)
        for before, after in ((estimates.lower, widened.lower), (estimates.upper, widened.upper)):
            if (np.isfinite(before) & ~np.isfinite(after)).any():
                self.without_bound.add(measure.name)
        return widened

    def _note_excess(self, name: str, widened: Estimates) -> None:
        budget = self.spec.error_budget
        if budget is None or name not in self.bounds:
            return
        limits, relative = dict(budget.limits), dict(budget.relative)
        if name not in limits and name not in relative:
            return
        known = ~np.isnan(widened.value)
        value = widened.value[known]
        for bound in (widened.lower[known], widened.upper[known]):
            # If the bound were the true value, the error would be the distance, and a relative limit would be its own.
            bound = np.where(np.isnan(bound), np.inf, bound)
            limit = np.full(len(bound), limits[name]) if name in limits else relative[name] * _at_least_1(bound)
            width = np.abs(np.subtract(bound, value, out=np.zeros(len(value)), where=bound != value))
            over = np.flatnonzero((bound != value) & (np.isinf(bound) | (width > limit * (1 + _ROUNDING))))
            if len(over):
                at = over[np.argmax(width[over])]
                self.excess[name] = max(self.excess.get(name, (0.0, 0.0)), (float(width[at]), float(limit[at])))

    def violations(self) -> list[Violation]:
        """Returns what the widened values violate."""
        budget = self.spec.error_budget
        if budget is None:
            return []
        result = []
        for name, (width, limit) in sorted(self.excess.items()):
            stated = f"by up to {width:g}" if math.isfinite(width) else "by an unknown amount"
            allowed = f"; the budget there is {limit:g}" if math.isfinite(limit) else ""
            result.append(Violation("error-budget", f"{name}: a value may be off {stated}{allowed}"))
        named = _named(budget)
        for name in sorted(self.without_bound - named):
            message = f"{name}: edges withhold records, and nothing bounds their effect on a value"
            result.append(Violation("withheld", message))
        return result


def read_bounds(withheld: Mapping[str, Any]) -> dict[str, WithheldBound]:
    """Reads the bounds per measure in an answer's quality."""
    return {name: WithheldBound.from_mapping(bound) for name, bound in withheld.items()}


def union_of_windows(spec: QuerySpec, windows: Iterable[Mapping[str, WithheldBound]]) -> dict[str, WithheldBound]:
    """Returns the bounds of merged windows."""
    functions = {m.name: m.function for m in spec.measures}
    each: dict[str, list[WithheldBound]] = {}
    for bounds in windows:
        for name, bound in bounds.items():
            each.setdefault(name, []).append(bound)
    result = {}
    for name, several in each.items():
        bound = WithheldBound.union(several, of_extremum=functions[name].error == "extremum")
        # Sums of one window may have another sign than those of the next.
        is_sum = functions[name].error == "sum" and functions[name].name != "count"
        result[name] = bound.without_shares() if is_sum and len(several) > 1 else bound
    return result


def of_all_groups(spec: QuerySpec, bounds: Mapping[str, WithheldBound]) -> dict[str, WithheldBound]:
    """Returns the bounds of all groups merged. Their number is unknown, so only shares bound a sum of them."""
    extrema = {m.name for m in spec.measures if m.function.error == "extremum"}
    unknown = {"above": math.inf, "below": math.inf}
    return {name: b if name in extrema else replace(b, **unknown) for name, b in bounds.items()}


def with_withheld(contract: Mapping[str, Any], withheld: GroupsWithheld) -> dict[str, Any]:
    """Returns the contract with the violations of the widened values, unless the ledger has stated the same."""
    stated = {v["code"] for v in contract["violations"]}
    return with_violations(contract, (v for v in withheld.violations() if v.code not in stated))


def with_withheld_amounts(estimates: Estimates, bound: WithheldBound) -> Estimates:
    """Widens values of a measure with an error function. Of amounts and shares, the tighter one counts per group."""
    lower = np.maximum(_lowered(estimates, bound.below), _by_share(estimates, -1, bound.below_share))
    upper = np.minimum(_raised(estimates, bound.above), _by_share(estimates, 1, bound.above_share))
    if bound.unsent is not None:
        # Of its own maximum an edge sent nothing, so what other edges sent does not matter.
        upper = np.maximum(upper, bound.unsent)
    return replace(estimates, lower=lower, upper=upper)


def _by_share(estimates: Estimates, side: int, share: float) -> FloatArray:
    """Returns the bound on one side (1: upper, -1: lower) of values V whose estimates differ by at most share·|V|."""
    bound = estimates.upper if side > 0 else estimates.lower
    if share == 0.0:
        return bound
    if not share < 1.0:
        return np.where(np.isnan(bound), np.nan, side * np.inf)
    moved = bound / np.where(side * bound >= 0.0, 1.0 - share, 1.0 + share)
    moved = np.where(np.isfinite(moved), moved + side * np.abs(moved) * _OUTWARDS, moved)
    if estimates.integers is None:
        return moved
    # The value is an integer. Beyond 2^53 every float64 is one.
    return np.floor(moved) if side > 0 else np.ceil(moved)


def _lowered(estimates: Estimates, below: float) -> FloatArray:
    """The lower bounds less an amount. Large integers are rounded in float64, so their bounds are rounded outwards."""
    lower = estimates.lower - below
    if estimates.integers is None or not below:
        return lower
    return np.where(np.abs(lower) < 2.0**53, lower, np.nextafter(np.nextafter(lower, -np.inf), -np.inf))


def _raised(estimates: Estimates, above: float) -> FloatArray:
    upper = estimates.upper + above
    if estimates.integers is None or not above:
        return upper
    return np.where(np.abs(upper) < 2.0**53, upper, np.nextafter(np.nextafter(upper, np.inf), np.inf))


def _at_least_1(values: FloatArray) -> FloatArray:
    return np.maximum(np.abs(values), 1.0)


def record_count(spec: QuerySpec) -> Measure | None:
    """Returns the measure that counts all records of a group; None: the query has none."""
    return next((m for m in spec.measures if _counts(m)), None)


def _counts(measure: Measure) -> bool:
    """Whether it is the number of all records of a group."""
    return measure.function.name == "count" and measure.argument is None


def _named(budget: ErrorBudget) -> set[str]:
    return {name for name, _ in (*budget.limits, *budget.relative)}
