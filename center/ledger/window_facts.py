"""Makes the facts of an answer (`edgewater.answers.Facts`) from what the ledger knows about its window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from center.ledger.state import QueryState, SliceState
from center.ledger.withheld import CloseTotals
from edgewater.answers import MAX_LISTED_EDGES, Cause, Deviation, EdgeStatements, Facts, SessionFacts
from edgewater.answers.statement import STALENESS, violations_of_facts
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS, Delivery, EdgeId
from edgewater.model.query import QuerySpec

_NO_DELIVERIES: Mapping[str, tuple[Delivery, ...]] = {}
_NO_STATEMENTS = EdgeStatements()


def window_facts(
    spec: QuerySpec,
    totals: CloseTotals,
    *,
    expected: int,
    staleness_ms: int,
    first_staleness_ms: int,
    deviations: tuple[Deviation, ...] = (),
    deliveries: Mapping[str, tuple[Delivery, ...]] = _NO_DELIVERIES,
    has_data: bool = True,
    edges: EdgeStatements = _NO_STATEMENTS,
    session: SessionFacts | None = None,
) -> Facts:
    """Returns the facts of an answer.

    Args:
        deviations: what the window lacks (`Losses.deviations`). It has one for each missing edge and for each that
            left, and the shares of the edges are computed from these.
        first_staleness_ms: staleness of the window's first answer. Under a combined budget, staleness of the first
            answer that kept the error budget. A staleness budget applies only to this answer.
    """
    causes = [each.cause for each in deviations]
    reported = expected - causes.count(Cause.MISSING)
    return Facts(
        expected,
        reported,
        reported / (expected + causes.count(Cause.LEFT)) if expected else 0.0,
        totals.observed,
        totals.late,
        staleness_ms,
        first_staleness_ms,
        deviations,
        dict(sorted((totals.withheld or {}).items())),
        tuple(sorted(name for name, signs in (totals.signs or {}).items() if len(signs) > 1)),
        totals.united_rests(spec),
        has_data,
        dict(deliveries),
        edges,
        session,
    )


def edge_statements(state: QueryState, missing: Sequence[EdgeId], slices: Sequence[SliceState]) -> EdgeStatements:
    """Returns what each edge has stated about a window; see `EdgeStatements`.

    Args:
        missing: edges whose records are missing in the window.
        slices: the window's slices.
    """
    by_edge: dict[str, list[CloseTotals]] = {}
    for each in slices:
        for edge, part in each.by_edge.items():
            by_edge.setdefault(edge, []).append(part)
    through, absent, spec = state.through_ms, frozenset(missing), state.query.spec
    closed = tuple(edge for edge in state.expected if edge not in absent)
    until: dict[str, int] = {e: through[e] for e in missing if MIN_TIME_MS < through.get(e, MIN_TIME_MS) < MAX_TIME_MS}
    totals = {
        e: parts[0] if len(parts) == 1 else CloseTotals.union(parts, spec) for e, parts in sorted(by_edge.items())
    }
    withheld = {edge: dict(sorted(t.withheld.items())) for edge, t in totals.items() if t.withheld}
    late = {edge: t.late for edge, t in totals.items() if t.late}
    few = MAX_LISTED_EDGES
    return EdgeStatements(
        closed if len(closed) <= few else None,
        until if len(until) <= few else None,
        late if len(late) <= few else None,
        withheld if len(withheld) <= few else None,
        {e: state.constants[e] for e in withheld if e in state.constants} if len(withheld) <= few else {},
    )


def keeps_error(facts: Facts, spec: QuerySpec) -> bool:
    """Returns whether an answer certainly violates nothing except its staleness budget, whatever its values are.

    Late records that may follow do not count: to wait for them would break the budget. It is also false if a maximum is
    unsent, because the error of the maximum depends on the values.
    """
    if any(bound.unsent is not None for bound in facts.withheld.values()):
        return False
    return all(v.code in (STALENESS, Cause.MAY_CHANGE) for v in violations_of_facts(facts, spec))
