"""`Violation`: a part of its contract that an answer does not keep, and the codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STALENESS = "staleness-budget"
"""Violation code: the answer came later than its staleness budget."""

MISSING_EDGES = "missing-edges"
"""Violation code: an expected edge has not closed the window, or closed it without all its records."""

LOST_STATE = "lost-state"
"""Violation code: an edge lost its state while the window was open, so it may lack records or count some twice."""

INPUT_LOST = "input-lost"
"""Violation code: an edge has lost, or may have lost, input of the window."""

LEFT = "left"
"""Violation code: an edge was retired, or stopped serving the stream, before it had closed the window."""

NOTHING_ARRIVED = "nothing-arrived"
"""Violation code: no record of the window has arrived, and edges that may have some have not closed it."""

AFTER_FINAL = "after-final"
"""Violation code: records of the window are not in the answer, as they came when the window was final."""

REJECTED = "rejected"
"""Violation code: sources have rejected records of the window, or records whose event time cannot be read and that may
be records of the window."""

ACCURACY = "accuracy"
"""Violation code: the answer's interval is wider than the requested error."""

WITHHELD = "withheld"
"""Violation code: edges withhold what no budget allows, or records whose effect on a value has no bound."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A part of the contract that the answer does not keep. `code` is stable."""

    code: str
    message: str


def with_violations(contract: Mapping[str, Any], added: Iterable[Violation]) -> dict[str, Any]:
    """Extends the contract of `Quality.to_mapping()` by violations; it is met only without any."""
    violations = [*contract["violations"], *({"code": v.code, "message": v.message} for v in added)]
    return {**contract, "met": not violations, "violations": violations}
