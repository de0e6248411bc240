"""`CloseTotals`: the counters and bounds of closes, and their union over slices and edges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgewater.answers import WithheldBound
from edgewater.model.query import QuerySpec
from edgewater.synopses.rests import union_of_rests
from edgewater.wire import Rest, Signs, SliceClose

_SIGNS = {Signs.NOT_NEGATIVE: frozenset({1}), Signs.NEGATIVE: frozenset({-1}), Signs.BOTH: frozenset({1, -1})}


@dataclass(frozen=True, slots=True)
class CloseTotals:
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
    def of_closes(cls, closes: Iterable[SliceClose], spec: QuerySpec) -> CloseTotals:
        """Returns the totals of one slice. `closes` has one close per edge and incarnation."""
        return cls.union((cls._of_close(c, spec) for c in closes), spec)

    @classmethod
    def _of_close(cls, close: SliceClose, spec: QuerySpec) -> CloseTotals:
        bounds = {w.measure: WithheldBound.of(w) for w in close.withheld if w.groups or w.largest_unsent is not None}
        has_shares = spec.error_budget is not None and bool(spec.error_budget.relative)
        sums = [m.name for m in spec.measures if m.function.error == "sum"] if has_shares else []
        signs: dict[str, frozenset[int]] = {}
        if sums and close.observed:
            stated = {w.measure: Signs(w.signs) for w in close.withheld}
            signs = {name: _SIGNS[stated.get(name, Signs.NOT_NEGATIVE)] for name in sums}
        return cls(close.observed, close.late, bounds, signs, {w.measure: (w.rest,) for w in close.withheld})

    @classmethod
    def union(cls, parts: Iterable[CloseTotals], spec: QuerySpec) -> CloseTotals:
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
        withheld: dict[str, WithheldBound] = {}
        for measure, several in bounds.items():
            bound = several[0] if len(several) == 1 else WithheldBound.union(several, of_extremum=measure in extrema)
            has_both_signs = len(signs.get(measure, ())) > 1
            withheld[measure] = bound.without_shares() if has_both_signs else bound
        return cls(observed, late, withheld, signs, listed)

    def united_rests(self, spec: QuerySpec) -> dict[str, Rest | None]:
        """Returns, for each measure with a rest, the union of the rests; None if it is unknown."""
        functions, rests = {m.name: m.function.name for m in spec.measures}, self.rests or {}
        return {name: union_of_rests(functions[name], each) for name, each in sorted(rests.items())}
