"""What the ledger's decisions state, whatever the values of the answer are."""

from __future__ import annotations

from typing import Any

from center.ledger import Emission
from edgewater.answers import Cause
from edgewater.answers.cells import CellColumn
from edgewater.answers.own_error import OwnError
from edgewater.answers.statement import Violation, judged, violations_of_facts


def missing(emission: Emission) -> tuple[str, ...]:
    """Returns the missing edges of an answer, sorted."""
    return tuple(emission.facts.edges_by(Cause.MISSING))


def violations(emission: Emission) -> list[Violation]:
    """Returns what the answer violates whatever its values are."""
    return violations_of_facts(emission.facts, emission.spec)


def quality_of(emission: Emission) -> dict[str, Any]:
    """Returns the members `quality` and `contract` of the answer's JSON, as one mapping; it has no values."""
    columns = [CellColumn(measure.name, (), OwnError()) for measure in emission.spec.measures]
    statement = judged(emission.facts, columns, emission.spec)
    return {**statement.quality(), "contract": statement.contract.to_json()}
