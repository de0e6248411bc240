"""`Violation` is a part of the contract that an answer does not keep, with a code and a message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgewater.model.streams import EdgeId
from edgewater.wire import InputLoss

MAX_NAMED_EDGES = 3
"""The most edges that a message names."""

STALENESS = "staleness-budget"
"""Violation code: the answer came later than its staleness budget."""

MISSING_EDGES = "missing-edges"
"""Violation code: an expected edge has not closed the window, or closed it without all its records."""

LOST_STATE = "lost-state"
"""Violation code: an edge lost its state while the window was open. So the edge may lack records or count records
twice."""

INPUT_LOST = "input-lost"
"""Violation code: an edge has lost, or may have lost, input of the window."""

LEFT = "left"
"""Violation code: an edge was retired, or stopped serving the stream, before it had closed the window."""

NOTHING_ARRIVED = "nothing-arrived"
"""Violation code: no record of the window has arrived, and edges that may have records have not closed the window."""

AFTER_FINAL = "after-final"
"""Violation code: records of the window are not in the answer, because they came when the window was final."""

REJECTED = "rejected"
"""Violation code: sources have rejected records of the window, or records that may belong to the window because their
event time cannot be read."""

GUESSED = "guessed"
"""Violation code: an edge counted records of the window, or left them out, on a guess."""

ACCURACY = "accuracy"
"""Violation code: the answer's interval is wider than the requested error."""

WITHHELD = "withheld"
"""Violation code: edges withhold more than the budget allows, or withhold records whose effect on a value has no
bound."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A part of the contract that the answer does not keep. `code` never changes between releases.

    Attributes:
        measure: the measure whose withheld values exceed the budget; None for other violations.
    """

    code: str
    message: str
    measure: str | None = field(default=None, compare=False)


def with_violations(contract: Mapping[str, Any], added: Iterable[Violation]) -> dict[str, Any]:
    """Adds violations to the contract of `Quality.to_mapping()`. A contract with a violation is not met."""
    violations = [*contract["violations"], *({"code": v.code, "message": v.message} for v in added)]
    return {**contract, "met": not violations, "violations": violations}


def too_stale(first_staleness_ms: int, budget_ms: int, of: str) -> list[Violation]:
    """Returns a violation if an answer came later than its budget.

    Args:
        of: describes the answer to which the budget applies.
    """
    if first_staleness_ms <= budget_ms:
        return []
    message = f"the {of} came {first_staleness_ms} ms after the window's end; the budget is {budget_ms} ms"
    return [Violation(STALENESS, message)]


def missing_edges(expected: int, missing: tuple[str, ...]) -> list[Violation]:
    """Returns a violation if edges are missing, or if no edge is expected.

    Args:
        expected: number of expected edges.
    """
    if expected > 0 and not missing:
        return []
    reported = expected - len(missing)
    return [
        Violation(
            MISSING_EDGES, f"{reported} of {expected} expected edges have closed the window with all their records"
        )
    ]


def state_lost(edges: tuple[str, ...]) -> list[Violation]:
    """Returns a violation if edges lost their state while the window was open."""
    if not edges:
        return []
    message = f"{', '.join(edges)} lost its state while the window was open: records may be missing or counted twice"
    return [Violation(LOST_STATE, message)]


def edges_left(edges: tuple[EdgeId, ...]) -> list[Violation]:
    """Returns a violation if edges left before they had closed the window."""
    if not edges:
        return []
    message = f"{', '.join(edges)} was retired, or stopped serving the stream, before it had closed the window"
    return [Violation(LEFT, message)]


def input_lost(losses: Iterable[tuple[EdgeId, InputLoss]]) -> list[Violation]:
    """Returns one violation per edge, source and reason."""
    counts: dict[tuple[str, str, str], int | None] = {}
    for edge, loss in losses:
        key = edge, loss.source, loss.reason
        count = counts.get(key, 0)
        counts[key] = None if count is None or loss.records is None else count + loss.records
    return [
        Violation(
            INPUT_LOST,
            f"edge {edge}: {'an unknown number of' if records is None else records} records of source {source} are"
            f" lost or may be ({reason})",
        )
        for (edge, source, reason), records in counts.items()
    ]


def nothing_arrived(expected: int, missing: tuple[str, ...]) -> list[Violation]:
    """Returns a violation if no record has arrived and an edge that may have records has not closed the window."""
    if expected > 0 and not missing:
        return []
    silent = ", ".join(missing[:MAX_NAMED_EDGES]) + (", …" if len(missing) > MAX_NAMED_EDGES else "")
    whom = f" from {silent}" if missing else ""
    return [
        Violation(
            NOTHING_ARRIVED,
            f"no record of the window has arrived{whom}; it is not known that the window has no records",
        )
    ]
