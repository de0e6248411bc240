"""How far what edges withhold may move the values of an answer, and whether the answer then keeps its error budget.

`docs/explanation/budgets.md` derives the bounds. An answer keeps its budget only if the intervals that it states are
within it: an edge's statement of its own amounts is not enough, since the values of several edges are merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa

from edgewater.answers import EdgeStatements, WithheldBound
from edgewater.answers.uniting import union_of_bounds
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.synopses import Estimates, FloatArray, GroupedAggregate, IntArray, Question, Stack
from edgewater.synopses.missing_records import with_missing_records

_ROUNDING = 1e-9  # derived: above the rounding of shares
"""Relative tolerance: shares of a budget need not add up to it in floating point."""
_OUTWARDS = 2.0**-48  # derived: above the rounding of bounds by shares
"""Bounds by shares are moved outwards by this fraction, which exceeds the rounding of their computation."""
NOTHING = WithheldBound(0.0, 0.0, None, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class EdgesWithheld:
    """What some edges withhold of a group.

    Attributes:
        bounds: per measure of which anything is withheld.
        records: the most records of a group that are withheld; infinite: unknown.
        records_share: the same, as a fraction of the group's records.
    """

    bounds: Mapping[str, WithheldBound]
    records: float
    records_share: float

    @classmethod
    def of(cls, spec: QuerySpec, bounds: Mapping[str, WithheldBound]) -> Self:
        """Args: bounds: per measure of which anything is withheld."""
        # Each of these measures states a bound if a record is withheld. A sum does not: withheld zeros do not change
        # it.
        stating = [bounds.get(m.name, NOTHING) for m in spec.measures if m.function.error is None or m.is_record_count]
        unknown = math.inf if bounds or spec.may_withhold else 0.0
        records = max((bound.above for bound in stating), default=unknown)
        return cls(bounds, records, max((bound.above_share for bound in stating), default=unknown))


@dataclass(slots=True)
class GroupsWithheld:
    """What edges withhold of each group in the rows of an answer.

    Attributes:
        edges: all edges together.
        classes: by class of rows, the edges that may have records of them.
        row_classes: int64 per row, its class; None: all are of the only class.
        sent: float64 per row, the records of the group that are in the answer; None: unknown.
        excess: per measure with a limit, the widest interval beyond it: its width to one side, and the limit there.
        without_bound: measures of which a value has lost a bound, because records are withheld.
        exact: measures whose values have what edges withhold of them.
    """

    spec: QuerySpec
    edges: EdgesWithheld
    classes: Sequence[EdgesWithheld]
    row_classes: IntArray | None = None
    sent: FloatArray | None = None
    excess: dict[str, tuple[float, float]] = field(default_factory=dict)
    without_bound: set[str] = field(default_factory=set)
    exact: frozenset[str] = frozenset()

    @classmethod
    def of(cls, spec: QuerySpec, bounds: Mapping[str, WithheldBound]) -> GroupsWithheld:
        """Args: bounds: per measure of which anything is withheld."""
        edges = EdgesWithheld.of(spec, bounds)
        return cls(spec, edges, (edges,))

    @classmethod
    def of_records(cls, spec: QuerySpec, records: float) -> GroupsWithheld:
        """Args: records: the most records that the only row lacks."""
        edges = EdgesWithheld({}, records, math.inf)
        return cls(spec, edges, (edges,))

    def of_rows(
        self, aggregate: GroupedAggregate, rows: IntArray, groups: Mapping[str, pa.Array], stated: EdgeStatements
    ) -> GroupsWithheld:
        """Takes account of these rows of the merged data: of their numbers of records, and of which edges have some.

        Args:
            groups: the rows' key columns.
            stated: what each edge withholds.
        """
        if not self.edges.bounds:
            return self
        count = record_count(self.spec)
        sent = None if count is None else aggregate.measures[count.name].query().value[rows]
        return replace(self, sent=sent).of_edges(groups, stated)

    def of_edges(self, groups: Mapping[str, pa.Array], stated: EdgeStatements) -> GroupsWithheld:
        """Returns bounds that count, for each row, only the edges that may have records of the row."""
        classes, row_classes = self._classes(groups, stated)
        return replace(self, classes=classes, row_classes=row_classes)

    def _classes(
        self, groups: Mapping[str, pa.Array], stated: EdgeStatements
    ) -> tuple[Sequence[EdgesWithheld], IntArray | None]:
        """Returns the classes of rows by the edges' constants. One class, if the constants have different columns."""
        only, withheld = stated.only, stated.withheld or {}
        columns = next((sorted(values) for values in only.values()), [])
        if not columns or any(sorted(values) != columns or set(values) - set(groups) for values in only.values()):
            return self.classes, None
        by_values: dict[tuple[Any, ...], list[Mapping[str, WithheldBound]]] = {}
        for edge, values in only.items():
            key = tuple(values[name] for name in columns)
            by_values.setdefault(key, []).append(withheld.get(edge, {}))
        everywhere: list[Mapping[str, WithheldBound]] = [
            bounds for edge, bounds in withheld.items() if edge not in only
        ]
        classes = [everywhere, *([*everywhere, *each] for each in by_values.values())]
        number = {key: at for at, key in enumerate(by_values, 1)}
        keys = zip(*(groups[name].to_pylist() for name in columns), strict=True)
        row_classes = np.array([number.get(key, 0) for key in keys], np.int64)
        return [EdgesWithheld.of(self.spec, self._union(each)) for each in classes], row_classes

    def _union(self, edges: Sequence[Mapping[str, WithheldBound]]) -> dict[str, WithheldBound]:
        """Returns the bounds of some of the edges. The shares of a sum hold only if the values of all edges have one
        sign."""
        result = union_of_bounds(self.spec, edges)
        is_known = {name: math.isfinite(bound.above_share) for name, bound in self.edges.bounds.items()}
        return {name: b if is_known.get(name) else b.without_shares() for name, b in result.items()}

    def _class_of_rows(self) -> Iterator[tuple[EdgesWithheld, IntArray | slice]]:
        """Yields the edges of each class, with its rows."""
        if self.row_classes is None:
            yield self.classes[0], slice(None)
            return
        for at in np.unique(self.row_classes).tolist():
            yield self.classes[at], np.flatnonzero(self.row_classes == at)

    def beside(self, other: GroupsWithheld) -> GroupsWithheld:
        """Returns what is withheld for a question about two synopses; `other` is about the second one."""
        edges = EdgesWithheld({}, max(self.edges.records, other.edges.records), math.inf)
        return replace(self, edges=edges, classes=(edges,), sent=None)

    def edges_of(self, row: int) -> EdgesWithheld:
        """Returns the edges that may have records of a row."""
        return self.classes[0 if self.row_classes is None else int(self.row_classes[row])]

    def missing_records(self, rows: int) -> FloatArray:
        """Returns the most records that each row may lack."""
        missing = np.zeros(rows)
        for edges, chosen in self._class_of_rows():
            missing[chosen] = edges.records
            if self.sent is not None and edges.records_share < 1.0:
                by_share = self.sent[chosen] * (edges.records_share / (1.0 - edges.records_share)) * (1.0 + _ROUNDING)
                missing[chosen] = np.minimum(missing[chosen], by_share)
        return missing

    def widen(
        self,
        measure: Measure,
        stack: Stack,
        estimates: Estimates,
        question: Question | None,
        missing: FloatArray,
        *,
        own: bool = True,
        groups: IntArray | None = None,
    ) -> Estimates:
        """Widens the answer to a question, and notes what this means for the contract.

        Args:
            missing: float64 per row, the most records that the row lacks.
            own: it is the measure's own value, to which its error function applies.
            groups: the row of each estimate; None: there is one per row.
        """
        if measure.name in self.exact:
            return estimates
        if measure.function.error is not None and own:
            widened = self._with_amounts(measure.name, estimates)
            if measure.name in self.edges.bounds:
                self._note_excess(measure.name, widened)
        else:
            lacking = missing if groups is None else missing[groups]
            widened = with_missing_records(stack, question, estimates, lacking)
        if self.edges.bounds:
            self._note_lost_bound(measure.name, estimates, widened)
        return widened

    def note_late(self, measure: Measure, estimates: Estimates, widened: Estimates) -> None:
        """Notes what it means for the contract that values are widened by late records, which may still come.

        Args:
            estimates, widened: the values without late and withheld records, and with them.
        """
        self._note_lost_bound(measure.name, estimates, widened)
        if measure.function.error is not None:
            self._note_excess(measure.name, widened)

    def _note_lost_bound(self, name: str, estimates: Estimates, widened: Estimates) -> None:
        for before, after in ((estimates.lower, widened.lower), (estimates.upper, widened.upper)):
            if before is not after and (np.isfinite(before) & ~np.isfinite(after)).any():
                self.without_bound.add(name)

    def _with_amounts(self, name: str, estimates: Estimates) -> Estimates:
        if name not in self.edges.bounds:
            return estimates
        lower, upper = estimates.lower.copy(), estimates.upper.copy()
        for edges, rows in self._class_of_rows():
            bound = edges.bounds.get(name)
            if bound is not None:
                lower[rows], upper[rows] = with_withheld_amounts(
                    estimates.lower[rows], estimates.upper[rows], bound, whole=estimates.integers is not None
                )
        return replace(estimates, lower=lower, upper=upper)

    def _note_excess(self, name: str, widened: Estimates) -> None:
        budget = self.spec.error_budget
        if budget is None:
            return
        limits, relative = dict(budget.limits), dict(budget.relative)
        if name not in budget.measures:
            return
        known = ~np.isnan(widened.value)
        value = widened.value[known]
        for bound in (widened.lower[known], widened.upper[known]):
            # If the bound were the true value, its distance would be the error, and a relative limit would apply to the
            # bound.
            bound = np.where(np.isnan(bound), np.inf, bound)
            limit = np.full(len(bound), limits[name]) if name in limits else relative[name] * _at_least_1(bound)
            width = np.abs(np.subtract(bound, value, out=np.zeros(len(value)), where=bound != value))
            over = np.flatnonzero((bound != value) & (np.isinf(bound) | (width > limit * (1 + _ROUNDING))))
            if len(over):
                at = over[np.argmax(width[over])]
                self.excess[name] = max(self.excess.get(name, (0.0, 0.0)), (float(width[at]), float(limit[at])))


def of_all_groups(spec: QuerySpec, bounds: Mapping[str, WithheldBound]) -> dict[str, WithheldBound]:
    """Returns the bounds of all groups merged. Their number is unknown, so only shares bound a sum of them."""
    extrema = {m.name for m in spec.measures if m.function.error == "extremum"}
    unknown = {"above": math.inf, "below": math.inf}
    return {name: b if name in extrema else replace(b, **unknown) for name, b in bounds.items()}


def with_withheld_amounts(
    lower: FloatArray, upper: FloatArray, bound: WithheldBound, *, whole: bool
) -> tuple[FloatArray, FloatArray]:
    """Widens bounds of a measure with an error function. Of amounts and shares, the tighter one counts per group.

    Args:
        whole: the values are integers.
    """
    lower = np.maximum(_moved(lower, -bound.below, whole), _by_share(lower, -1, bound.below_share, whole))
    upper = np.minimum(_moved(upper, bound.above, whole), _by_share(upper, 1, bound.above_share, whole))
    # An edge has not sent its own maximum, so what other edges sent does not matter.
    return lower, upper if bound.unsent is None else np.maximum(upper, bound.unsent)


def _by_share(bound: FloatArray, side: int, share: float, whole: bool) -> FloatArray:
    """Returns the bound on one side (1: upper, -1: lower) of values V whose estimates differ by at most share·|V|."""
    if share == 0.0:
        return bound
    if not share < 1.0:
        return np.where(np.isnan(bound), np.nan, side * np.inf)
    moved = bound / np.where(side * bound >= 0.0, 1.0 - share, 1.0 + share)
    moved = np.where(np.isfinite(moved), moved + side * np.abs(moved) * _OUTWARDS, moved)
    if not whole:
        return moved
    # Beyond 2^53 every float64 is an integer.
    return np.floor(moved) if side > 0 else np.ceil(moved)


def _moved(bound: FloatArray, amount: float, whole: bool) -> FloatArray:
    """Returns the bounds moved by an amount.

    Large integers are rounded in float64, before and after the move. So their bounds move further, by the rounding of
    the larger number.
    """
    with np.errstate(invalid="ignore"):  # an infinite value and an unlimited amount: no bound is known
        moved = bound + amount
    if not whole or not amount:
        return moved
    size = np.maximum(np.abs(bound), np.abs(moved))
    is_rounded = (size >= 2.0**53) & np.isfinite(size)
    return moved + math.copysign(2.0, amount) * np.spacing(np.where(is_rounded, size, 0.0)) * is_rounded


def _at_least_1(values: FloatArray) -> FloatArray:
    return np.maximum(np.abs(values), 1.0)


def record_count(spec: QuerySpec) -> Measure | None:
    """Returns the measure that counts all records of a group; None: the query has none."""
    return next((m for m in spec.measures if m.is_record_count), None)
