"""`Cause` says why an answer may lack records, or have too many. `RULES` is the one place that says what each means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why an answer deviates from the records of its window. The value is the code of the violation."""

    MISSING = "missing-edges"
    LEFT = "left"
    LOST_STATE = "lost-state"
    INPUT_LOST = "input-lost"
    AFTER_FINAL = "after-final"
    REJECTED = "rejected"
    GUESSED = "guessed"
    UNANSWERED = "unanswered-windows"
    UNREADABLE = "unreadable-data"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a cause means for an answer. The page `docs/reference/causes.md` shows the rules.

    Attributes:
        what: what has happened.
        lacks: how many records the answer lacks.
        extra: how many records the answer has too much.
        predicted: whether a prediction may stand for the records. Otherwise no answer will have them.
        ends: when an answer no longer states the cause.
        alarm: the kind of the center's alarm; empty if there is none.
    """

    what: str
    lacks: str
    extra: str
    predicted: bool
    ends: str
    alarm: str = ""


_UNKNOWN, _NONE = "unknown", "none"

RULES: dict[Cause, Rule] = {
    Cause.MISSING: Rule(
        "an expected edge has not closed the window, or closed it without all its records",
        _UNKNOWN, _NONE, True, "the edge has closed the window",
    ),
    Cause.LEFT: Rule(
        "an edge was retired, or stopped serving the stream, before it had closed the window",
        _UNKNOWN, _NONE, True, "never for this window",
    ),
    Cause.LOST_STATE: Rule(
        "an edge lost its state while the window was open", _UNKNOWN, _UNKNOWN, True, "never for this window",
        "state-lost",
    ),
    Cause.INPUT_LOST: Rule(
        "an edge has lost, or may have lost, input of the window", "unknown, or the number that the edge states",
        _NONE, True, "never for this window", "input-lost",
    ),
    Cause.AFTER_FINAL: Rule(
        "records came when the window was final", "their exact number", _NONE, False, "never for this window",
        "records-after-final",
    ),
    Cause.REJECTED: Rule(
        "sources rejected records of the window, or records that may belong to it",
        "unknown: a rejected element may have been several records", _NONE, False, "never for this window",
        "records-rejected",
    ),
    Cause.GUESSED: Rule(
        "an edge left records out on a guess, or counted them on a guess",
        "unknown, if they were left out", "unknown, if they were counted", False,
        "never for this window",
    ),
    Cause.UNANSWERED: Rule(
        "a window of the interval has no answer", _UNKNOWN, _NONE, False, "the window has an answer",
    ),
    Cause.UNREADABLE: Rule(
        "the merged data of the window cannot be evaluated", _UNKNOWN, _NONE, False, "the data can be evaluated",
    ),
}  # fmt: skip
