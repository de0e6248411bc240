"""What a window comes to, as far as can be said before all of it has come. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

NAMED = 3
"""Groups that a reason names."""
NOTHING_PROMISED = "of no group enough records have come to say how far its answer may be off"
WORTH_SAYING = 0.25
"""The part of its interval by which an answer must change to be given again."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the records of one group, or all where there are no groups, come to.

    Attributes:
        key: `edgewater.accuracy.group_key`; empty without groups.
        promised: enough is known to state an interval; else the bounds are NaN, and so is the estimate if all
            that has come was processed, for then the data say it.
        missing: of the edges that cannot be heard; `Prediction` has the others.
        reason: why it is not met, or not promised.
    """

    key: str
    promised: bool
    met: bool
    estimate: float
    lower: float
    upper: float
    sampling: float
    straggler: float
    missing: float
    arrived: float
    expected: float
    sampled: float
    reason: str = ""

    @property
    def half_width(self) -> float:
        return math.sqrt(self.sampling**2 + self.straggler**2 + self.missing**2)


_OUTLOOK = attrgetter(*(f.name for f in fields(Outlook)))


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a window comes to, as far as can be said now.

    With groups, the interval is that of the group where it is widest, relative to the estimate; records are of all.

    Attributes:
        lower, upper: hold the truth with the confidence asked for.
        sampling, straggler, missing: half-widths; `missing` is of the edges that cannot be heard.
        met: the interval keeps the contract; if not, `reason` says why the answer is given all the same.
        arrived, expected, sampled: records.
        silent: edges that cannot be heard.
        waited_slots: since the window's end.
        groups: of a query with groups, each of which records have come or are expected; else None.
        widening: how many times as wide as the model says the interval is (`interval_record`).
        bounded: False where input was unread, or nothing has ever come of an edge: no interval holds what that may be.
    """

    estimate: float
    lower: float
    upper: float
    sampling: float
    straggler: float
    missing: float
    met: bool
    reason: str
    arrived: float
    expected: float
    sampled: float
    silent: tuple[str, ...]
    waited_slots: int
    groups: tuple[Outlook, ...] | None = None
    widening: float = 1.0
    bounded: bool = True

    @property
    def half_width(self) -> float:
        return math.sqrt(self.sampling**2 + self.straggler**2 + self.missing**2)

    @property
    def straggler_share(self) -> float:
        return 1 - self.arrived / self.expected if self.expected > 0 else 0.0

    @property
    def outlooks(self) -> tuple[Outlook, ...]:
        """Of each group; without groups, of all records."""
        if self.groups is not None:
            return self.groups
        return (
            Outlook("", True, self.met, self.estimate, self.lower, self.upper, self.sampling, self.straggler,
                    self.missing, self.arrived, self.expected, self.sampled, self.reason),
        )  # fmt: skip

    def differs(self, other: Prediction) -> bool:
        """Whether it is worth a revision of `other`."""
        before = {o.key: o for o in other.outlooks if o.promised}
        return self.met != other.met or any(_differs(o, before.get(o.key)) for o in self.outlooks if o.promised)

    def to_list(self) -> list[Any]:
        """JSON, for `read`. `dataclasses.astuple` would copy each number of each group by itself."""
        groups = None if self.groups is None else [_OUTLOOK(o) for o in self.groups]
        return [groups if f.name == "groups" else getattr(self, f.name) for f in fields(self)]

    @classmethod
    def read(cls, values: Sequence[Any]) -> Prediction:
        """From `to_list`, by way of JSON. A release without groups wrote none."""
        given = dict(zip((f.name for f in fields(cls)), values, strict=False))
        groups = given.get("groups")
        given["groups"] = None if groups is None else tuple(Outlook(*o) for o in groups)
        return cls(**{**given, "silent": tuple(given["silent"])})


def _differs(now: Outlook, before: Outlook | None) -> bool:
    if before is None:
        return True
    return not abs(now.estimate - before.estimate) <= WORTH_SAYING * max(before.half_width, 0.0)


def assembled(
    outlooks: Sequence[Outlook],
    grouped: bool,
    unheard: Sequence[str],
    silent: tuple[str, ...],
    waited_slots: int,
    unread: Sequence[str] = (),
    widening: float = 1.0,
) -> Prediction:
    """The window, from its groups.

    Args:
        unheard: edges of which nothing has ever come: no contract is met without them.
        unread: edges that had not read all that had come to them: what they told bounds nothing.
    """
    promised = [o for o in outlooks if o.promised]
    nothing = Outlook("", False, False, math.nan, *(math.inf,) * 5, 0.0, 0.0, 0.0, NOTHING_PROMISED)
    worst = max(promised, key=_relative_width, default=nothing)
    unmet = [o for o in promised if not o.met]
    met = bool(promised) and not unmet and not unheard and not unread
    reason = ""
    if unheard:
        reason = f"nothing has ever come from {', '.join(unheard)}"
    elif unread:
        reason = f"{', '.join(unread)} cannot keep up: there may be input that has not been read"
    elif not promised:
        reason = NOTHING_PROMISED
    elif unmet:
        reason = _why(unmet, len(promised)) if grouped else unmet[0].reason
    arrived, expected, sampled = (sum(getattr(o, n) for o in outlooks) for n in ("arrived", "expected", "sampled"))
    return Prediction(
        worst.estimate, worst.lower, worst.upper, worst.sampling, worst.straggler, worst.missing, met, reason, arrived,
        expected, sampled, silent, waited_slots, tuple(outlooks) if grouped else None, widening,
        not unheard and not unread,
    )  # fmt: skip


def _relative_width(outlook: Outlook) -> float:
    return outlook.half_width / abs(outlook.estimate) if outlook.estimate else math.inf


def _why(unmet: Sequence[Outlook], promised: int) -> str:
    named = "; ".join(f"{o.key}: {o.reason}" for o in unmet[:NAMED])
    more = f"; and {len(unmet) - NAMED} more" if len(unmet) > NAMED else ""
    return f"{len(unmet)} of {promised} groups are not within the error: {named}{more}"
