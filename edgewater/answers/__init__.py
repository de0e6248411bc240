"""Answers: what is stored about them (`Facts`), and what follows from it. The edge never imports this package."""

from edgewater.answers.causes import RULES, Cause, Rule
from edgewater.answers.facts import (
    MAX_LISTED_EDGES,
    NONE,
    NOT_LISTED,
    UNKNOWN,
    AccuracyFacts,
    Amount,
    Bounds,
    Constants,
    Deviation,
    EdgeStatements,
    Facts,
    GroupCounts,
    Phase,
    Predicted,
    SessionFacts,
    joint_confidence,
)
from edgewater.answers.withheld_bounds import NO_LATE, LateRecords, WithheldBound, finite

__all__ = [
    "MAX_LISTED_EDGES",
    "NONE",
    "NOT_LISTED",
    "NO_LATE",
    "RULES",
    "UNKNOWN",
    "AccuracyFacts",
    "Amount",
    "Bounds",
    "Cause",
    "Constants",
    "Deviation",
    "EdgeStatements",
    "Facts",
    "GroupCounts",
    "LateRecords",
    "Phase",
    "Predicted",
    "Rule",
    "SessionFacts",
    "WithheldBound",
    "finite",
    "joint_confidence",
]
