"""Makes the facts of an answer (`edgewater.answers.Facts`) from what the ledger knows about its window."""

from __future__ import annotations

from collections.abc import Mapping

from center.ledger.withheld import CloseTotals
from edgewater.answers import (
    MAX_LISTED_EDGES,
    UNKNOWN,
    Amount,
    Cause,
    Constants,
    Deviation,
    EdgeStatements,
    Facts,
    SessionFacts,
)
from edgewater.answers.statement import STALENESS, violations_of_facts
from edgewater.base.streams import Delivery, EdgeId
from edgewater.model.query import QuerySpec
from edgewater.wire import InputLoss

_NO_CONSTANTS: Mapping[str, Constants] = {}
_NO_DELIVERIES: Mapping[str, tuple[Delivery, ...]] = {}
_NO_STATEMENTS = EdgeStatements()


def window_facts(
    spec: QuerySpec,
    totals: CloseTotals,
    *,
    expected: int,
    missing: tuple[str, ...],
    staleness_ms: int,
    first_staleness_ms: int,
    lost_state: tuple[str, ...] = (),
    losses: tuple[tuple[EdgeId, InputLoss], ...] = (),
    constants: Mapping[str, Constants] = _NO_CONSTANTS,
    deliveries: Mapping[str, tuple[Delivery, ...]] = _NO_DELIVERIES,
    left: tuple[EdgeId, ...] = (),
    has_data: bool = True,
    edges: EdgeStatements = _NO_STATEMENTS,
    session: SessionFacts | None = None,
) -> Facts:
    """Returns the facts of an answer.

    Args:
        missing: expected edges, sorted, that have not closed the window, or closed it without all its records because
            they joined too late, lost their state or have lost input.
        constants: the constants of each edge.
        first_staleness_ms: staleness of the window's first answer. Under a combined budget, staleness of the first
            answer that kept the error budget. A staleness budget applies only to this answer.
    """
    deviations = [Deviation(Cause.MISSING, e, lacks=UNKNOWN, only=constants.get(e, {})) for e in missing]
    deviations += [Deviation(Cause.LEFT, e, lacks=UNKNOWN, only=constants.get(e, {})) for e in left]
    deviations += [
        Deviation(Cause.LOST_STATE, e, lacks=UNKNOWN, extra=UNKNOWN, only=constants.get(e, {})) for e in lost_state
    ]
    deviations += [
        Deviation(
            Cause.INPUT_LOST,
            edge,
            loss.source,
            loss.reason,
            lacks=Amount(0, loss.records),
            from_ms=loss.from_ms,
            to_ms=loss.to_ms,
            only=constants.get(edge, {}),
        )
        for edge, loss in losses
    ]
    reported = expected - len(missing)
    return Facts(
        expected,
        reported,
        reported / (expected + len(left)) if expected else 0.0,
        totals.observed,
        totals.late,
        staleness_ms,
        first_staleness_ms,
        tuple(deviations),
        dict(sorted((totals.withheld or {}).items())),
        tuple(sorted(name for name, signs in (totals.signs or {}).items() if len(signs) > 1)),
        totals.united_rests(spec),
        has_data,
        dict(deliveries),
        edges,
        session,
    )


def edge_statements(
    closed: tuple[str, ...],
    closed_until_ms: Mapping[str, int],
    totals: Mapping[str, CloseTotals],
    constants: Mapping[str, Constants],
) -> EdgeStatements:
    """Returns what each edge has stated about a window; see `EdgeStatements`.

    Args:
        totals: totals by edge, sorted, of the edges whose closes state late or withheld records.
        constants: constants of the edges in `totals`.
    """
    withheld = {edge: dict(sorted(t.withheld.items())) for edge, t in totals.items() if t.withheld}
    late = {edge: t.late for edge, t in totals.items() if t.late}
    few = MAX_LISTED_EDGES
    return EdgeStatements(
        closed if len(closed) <= few else None,
        closed_until_ms if len(closed_until_ms) <= few else None,
        late if len(late) <= few else None,
        withheld if len(withheld) <= few else None,
        {edge: constants[edge] for edge in withheld if edge in constants} if len(withheld) <= few else {},
    )


def keeps_error(facts: Facts, spec: QuerySpec) -> bool:
    """Returns whether an answer certainly violates nothing except its staleness budget, whatever its values are.

    Late records that may follow do not count: to wait for them would break the budget. It is also false if a maximum is
    unsent, because the error of the maximum depends on the values.
    """
    if any(bound.unsent is not None for bound in facts.withheld.values()):
        return False
    return all(v.code in (STALENESS, Cause.MAY_CHANGE) for v in violations_of_facts(facts, spec))
