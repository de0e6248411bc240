"""The prediction of a window before all of its records have arrived: an estimate with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

MAX_NAMED_GROUPS = 3
"""The most groups that a reason names."""
NO_INTERVAL = "no group has enough records for an error bound"
TOO_WIDE = "the interval is wider than the error"
REVISION_THRESHOLD = 0.25
"""Share of the published half-width by which an estimate must change to be published again."""


@dataclass(frozen=True, slots=True)
class GroupPrediction:
    """The estimate of one group, or of all records of a query without groups.

    Attributes:
        key: `edgewater.model.accuracy.group_key`; empty for a query without groups.
        eligible: whether the observations suffice for an interval. If not, the bounds are NaN. The estimate is then
            NaN, too, unless the records were sampled: without a sample the answer's data are the estimate.
        met: whether the interval is within the error. If it is not, or if there is no interval, `reason` says why.
        sampling, straggler, missing: half-widths due to sampling, to stragglers of reporting edges, and to silent
            edges.
        arrived, expected, sampled: numbers of records: arrived records, estimated records of the whole window, and
            sampled records.
    """

    key: str
    eligible: bool
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


_GROUP_VALUES = attrgetter(*(f.name for f in fields(GroupPrediction)))


@dataclass(frozen=True, slots=True)
class Prediction:
    """The estimate of a window.

    For a query with groups, estimate and interval are of the group whose interval is widest relative to its estimate.
    Numbers of records are sums over all groups.

    Attributes:
        lower, upper: bounds that contain the true value with the requested confidence.
        sampling, straggler, missing: half-widths due to sampling, to stragglers of reporting edges, and to silent
            edges.
        met: whether the interval is within the error. If not, `reason` says why the window is answered.
        arrived, expected, sampled: numbers of records: arrived records, estimated records of the whole window, and
            sampled records.
        silent: edges that have stopped reporting.
        waited_slots: slots since the window's end.
        groups: groups with arrived or expected records; None for a query without groups.
        widening: factor by which the model's interval was widened (`ConformalRecord`).
        bounded: whether the interval bounds the true value. It does not if an edge has unread input or has never
            reported, or if the observations do not suffice for an interval.
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
    groups: tuple[GroupPrediction, ...] | None = None
    widening: float = 1.0
    bounded: bool = True

    @property
    def half_width(self) -> float:
        return math.sqrt(self.sampling**2 + self.straggler**2 + self.missing**2)

    @property
    def straggler_share(self) -> float:
        return 1 - self.arrived / self.expected if self.expected > 0 else 0.0

    @property
    def by_group(self) -> tuple[GroupPrediction, ...]:
        """One prediction per group. For a query without groups, one prediction of all records."""
        if self.groups is not None:
            return self.groups
        return (
            GroupPrediction(
                "", self.bounded, self.met, self.estimate, self.lower, self.upper, self.sampling, self.straggler,
                self.missing, self.arrived, self.expected, self.sampled, self.reason,
            ),
        )  # fmt: skip

    def differs_from(self, published: Prediction) -> bool:
        """Returns whether the prediction should be published as a revision of `published`."""
        before = {g.key: g for g in published.by_group if g.eligible}
        changed = (_differs(g, before.get(g.key)) for g in self.by_group if g.eligible)
        stated = (self.met, self.bounded) != (published.met, published.bounded)
        return stated or any(changed)

    def without_bounds(self, reason: str) -> Prediction:
        """Returns the prediction without bounds, for a window that may lack an unknown number of records."""
        unknown: dict[str, Any] = {
            "lower": math.nan,
            "upper": math.nan,
            "missing": math.inf,
            "met": False,
            "reason": reason,
        }
        groups = None if self.groups is None else tuple(replace(g, **unknown) for g in self.groups)
        return replace(self, **unknown, groups=groups, bounded=False)

    def to_list(self) -> list[Any]:
        """Returns JSON for `from_list`. (`dataclasses.astuple` would copy each number of each group.)"""
        groups = None if self.groups is None else [_GROUP_VALUES(g) for g in self.groups]
        return [groups if f.name == "groups" else getattr(self, f.name) for f in fields(self)]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Prediction:
        """Returns the prediction from the result of `to_list`. The values may have been written to JSON and
        read again.
        """
        named = dict(zip((f.name for f in fields(cls)), values, strict=True))
        if named["groups"] is not None:
            named["groups"] = tuple(GroupPrediction(*group) for group in named["groups"])
        return cls(**{**named, "silent": tuple(named["silent"])})


def _differs(now: GroupPrediction, before: GroupPrediction | None) -> bool:
    if before is None:
        return True
    return not abs(now.estimate - before.estimate) <= REVISION_THRESHOLD * max(before.half_width, 0.0)


def combine_groups(
    groups: Sequence[GroupPrediction],
    is_grouped: bool,
    never_reported: Sequence[str],
    silent: tuple[str, ...],
    waited_slots: int,
    unread: Sequence[str] = (),
    widening: float = 1.0,
) -> Prediction:
    """Returns the prediction of a window from the predictions of its groups.

    Args:
        never_reported: edges without any report. If there are such edges, the accuracy is not met.
        unread: edges that have not read all of their input. If there are such edges, the interval is not bounded.
    """
    eligible = [g for g in groups if g.eligible]
    nothing = GroupPrediction("", False, False, math.nan, *(math.inf,) * 5, 0.0, 0.0, 0.0, NO_INTERVAL)
    widest = max(eligible, key=_relative_width, default=nothing if is_grouped or not groups else groups[0])
    unmet = [g for g in eligible if not g.met]
    reason = ""
    if never_reported:
        reason = f"no report has arrived from {', '.join(never_reported)}"
    elif unread:
        reason = f"{', '.join(unread)} cannot keep up and may have unread input"
    elif not eligible:
        reason = NO_INTERVAL if is_grouped else widest.reason
    elif unmet:
        reason = _unmet_reason(unmet, len(eligible)) if is_grouped else unmet[0].reason
    arrived, expected, sampled = (sum(getattr(g, n) for g in groups) for n in ("arrived", "expected", "sampled"))
    return Prediction(
        widest.estimate, widest.lower, widest.upper, widest.sampling, widest.straggler, widest.missing, not reason,
        reason, arrived, expected, sampled, silent, waited_slots, tuple(groups) if is_grouped else None, widening,
        not never_reported and not unread and bool(eligible),
    )  # fmt: skip


def _relative_width(group: GroupPrediction) -> float:
    return group.half_width / abs(group.estimate) if group.estimate else math.inf


def _unmet_reason(unmet: Sequence[GroupPrediction], eligible: int) -> str:
    named = "; ".join(f"{g.key}: {g.reason}" for g in unmet[:MAX_NAMED_GROUPS])
    more = f"; and {len(unmet) - MAX_NAMED_GROUPS} more" if len(unmet) > MAX_NAMED_GROUPS else ""
    return f"{len(unmet)} of {eligible} groups are not within the error: {named}{more}"
