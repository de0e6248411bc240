"""`Cause` says why an answer may lack records, or have too many. `RULES` has the meaning of each, for the documents."""

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
    lacks: str = "unknown"
    extra: str = "none"
    predicted: bool = False
    ends: str = "never for this window"
    alarm: str = ""


def _rule(cause: Cause) -> Rule:
    match cause:
        case Cause.MISSING:
            what = "an expected edge has not closed the window, or closed it without all its records"
            return Rule(what, predicted=True, ends="the edge has closed the window")
        case Cause.LEFT:
            what = (
                "an edge was retired, or stopped serving the stream, before it had closed the window, or closed it"
                " without all its records"
            )
            return Rule(what, predicted=True)
        case Cause.LOST_STATE:
            what = "an edge lost its state while the window was open"
            return Rule(what, extra="unknown", predicted=True, alarm="state-lost")
        case Cause.INPUT_LOST:
            what = "an edge has lost, or may have lost, input of the window"
            return Rule(what, "unknown, or the number that the edge states", predicted=True, alarm="input-lost")
        case Cause.AFTER_FINAL:
            return Rule("records came when the window was final", "their exact number", alarm="records-after-final")
        case Cause.REJECTED:
            what = "sources rejected records of the window, or records that may belong to it"
            lacks = "unknown: a rejected element may have been several records"
            return Rule(what, lacks, alarm="records-rejected")
        case Cause.GUESSED:
            what = "an edge left records out on a guess, or counted them on a guess"
            return Rule(what, "unknown, if they were left out", "unknown, if they were counted")
        case Cause.MAY_CHANGE:
            what = "recent windows of the query had late records, so this one may get some"
            lacks = (
                "at most the largest part that one of the last 100 windows had, with a stated confidence; of sessions,"
                " unknown"
            )
            ends = "an answer is final, unless final answers to recent windows lack late records"
            return Rule(what, lacks, predicted=True, ends=ends)
        case Cause.UNANSWERED:
            return Rule("a window of the interval has no answer", ends="the window has an answer")
        case Cause.UNREADABLE:
            return Rule("the merged data of the window cannot be evaluated", ends="the data can be evaluated")
        case _:
            assert_never(cause)


RULES = {cause: _rule(cause) for cause in Cause}
