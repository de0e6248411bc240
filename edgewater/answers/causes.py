"""`Cause` says why an answer may lack records, or have too many. `RULES` is the one place that says what each means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never


class Cause(StrEnum):
    """Why an answer deviates from the records of its window. The value is the code of the violation."""

    MISSING = "missing-edges"
    LEFT = "left"
    LOST_STATE = "lost-state"
    INPUT_LOST = "input-lost"
    AFTER_FINAL = "after-final"
    REJECTED = "rejected"
    GUESSED = "guessed"
    MAY_CHANGE = "may-change"
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


def _rule(cause: Cause) -> Rule:
    match cause:
        case Cause.MISSING:
            return Rule(
                "an expected edge has not closed the window, or closed it without all its records",
                _UNKNOWN, _NONE, True, "the edge has closed the window",
            )  # fmt: skip
        case Cause.LEFT:
            return Rule(
                "an edge was retired, or stopped serving the stream, before it had closed the window",
                _UNKNOWN, _NONE, True, "never for this window",
            )  # fmt: skip
        case Cause.LOST_STATE:
            return Rule(
                "an edge lost its state while the window was open", _UNKNOWN, _UNKNOWN, True, "never for this window",
                "state-lost",
            )  # fmt: skip
        case Cause.INPUT_LOST:
            return Rule(
                "an edge has lost, or may have lost, input of the window",
                "unknown, or the number that the edge states",
                _NONE, True, "never for this window", "input-lost",
            )  # fmt: skip
        case Cause.AFTER_FINAL:
            return Rule(
                "records came when the window was final", "their exact number", _NONE, False, "never for this window",
                "records-after-final",
            )  # fmt: skip
        case Cause.REJECTED:
            return Rule(
                "sources rejected records of the window, or records that may belong to it",
                "unknown: a rejected element may have been several records", _NONE, False, "never for this window",
                "records-rejected",
            )  # fmt: skip
        case Cause.GUESSED:
            return Rule(
                "an edge left records out on a guess, or counted them on a guess",
                "unknown, if they were left out", "unknown, if they were counted", False,
                "never for this window",
            )  # fmt: skip
        case Cause.MAY_CHANGE:
            return Rule(
                "recent windows of the query had late records, so this one may get some",
                "at most the largest part that one of the last 100 windows had, with a stated confidence; of sessions,"
                " unknown",
                _NONE, True,
                "an answer is final, unless final answers to recent windows lack late records",
            )  # fmt: skip
        case Cause.UNANSWERED:
            return Rule(
                "a window of the interval has no answer", _UNKNOWN, _NONE, False, "the window has an answer",
            )  # fmt: skip
        case Cause.UNREADABLE:
            return Rule(
                "the merged data of the window cannot be evaluated",
                _UNKNOWN, _NONE, False, "the data can be evaluated",
            )  # fmt: skip
        case _:
            assert_never(cause)


RULES = {cause: _rule(cause) for cause in Cause}
