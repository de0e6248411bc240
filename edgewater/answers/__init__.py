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
