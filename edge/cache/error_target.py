"""The error that a staleness budget aims at, learnt from slice to slice and guarded within each.

The policy `target` sends what exceeds an error T, and T is right when the entries above it just fill the sends between
a slice's end and its deadline. The number N above T as a slice closes falls about as a power of T, and hardly varies
from slice to slice; so T follows from the N of the slices before.

Too low a target costs far more than a little too high a one: what finds no slot then are heavy groups, which
wait for the end because they never settle, and have piled up a lot by then. Two things keep it from that. T is set
so that a part of the room stays free (`SPARE`). And by how much the entries above T become fewer until the end is
nearly the same in every slice: so from its middle on a slice is seen to end with too many, and T is raised for the
rest of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgewater.synopses import FloatArray

SPARE = 3.5
"""Of the sends after a slice's end so many times their square root are to stay free of entries above the target: one
and three quarters of what N was seen to vary by. At least half of them are to be filled."""
DAMPING = 0.35
"""The part of a step that is taken once T has settled; as long as it has not, or is too low, all of it."""
POINTS: FloatArray = np.array([0.01, 0.02, 0.03, 0.045, 0.06, 0.09, 0.125, 0.18, 0.25, 0.35, 0.5])
"""The parts of a slice left at which it is noted how many entries exceed the target."""
LEARNING_RATE = 0.3
FIRST = 0.5
"""Of what the first slice reached, as a target for the second: it had no history to rank by."""
SLOPE = 2.0
"""N is taken to fall with this power of T until it has been seen how it does; see `SLOPES` for the bounds."""
SLOPES = (1.0, 5.0)
TELLING = 0.1
"""A smaller change of ln T says nothing of the slope."""
STEPS = (0.6, 2.0)
NEAR_REACHED = 0.1
"""T is never less than this part of what was reached, so that it is back soon when the load jumps."""
LEAST = 1e-9


def nth_largest(values: FloatArray, count: float) -> float:
    """The largest value that is not among the first `count` in descending order; 0 if there is none."""
    n = max(0, int(min(count, len(values))))
    if n >= len(values):
        return 0.0
    return float(np.partition(values, len(values) - 1 - n)[len(values) - 1 - n])


def _room(slots: float) -> float:
    """The part of the sends that entries above the target are to fill."""
    return max(1.0 - SPARE / math.sqrt(max(slots, 0.0) + 1.0), 0.5)


def _unknown() -> FloatArray:
    return np.full(len(POINTS), np.nan)


@dataclass(slots=True)
class Aim:
    """What is aimed at, in units of the largest value.

    Attributes:
        target: T of the next slice; None before the first has closed.
        slope: the power of T with which N falls.
        slices: how many were learnt from.
        before: T of the newest slice, and which part of the sends its N filled.
        shed: per point of `POINTS`, by how much the entries above the target were to become fewer; NaN: not known.
        seen: of the slice that is open, how many there were at each point; NaN: not yet.
        guarded: of the slice that is open, the level as it was ranked last.
    """

    target: float | None = None
    slope: float = SLOPE
    slices: int = 0
    before: tuple[float, float] | None = None
    shed: FloatArray = field(default_factory=_unknown)
    seen: FloatArray = field(default_factory=_unknown)
    guarded: float = 0.0

    def level(self, errors: FloatArray, left: float, slots: float, slots_at_end: float) -> float:
        """The error above which an entry is in the primary cache. Called after the first slice.

        Args:
            errors: those now pending.
            left: the part of the slice that is left.
            slots, slots_at_end: sends until the deadline, from now and from the slice's end on.
        """
        assert self.target is not None
        level = max(self.target, nth_largest(errors, slots))  # below that nothing can be sent in time
        known = np.isfinite(self.shed)
        if left <= POINTS[-1] and known.any() and math.isfinite(slots_at_end):
            ahead = float(np.interp(left, POINTS[known], self.shed[known]))
            level = max(level, nth_largest(errors, max((1.0 + _room(slots_at_end)) / 2.0 * slots_at_end + ahead, 0.0)))
        self._note(left, int(np.count_nonzero(errors > level)))
        self.guarded = level
        return level

    def _note(self, left: float, above: int) -> None:
        """The first ranking at or after a point stands for it; one that was jumped over stays unknown."""
        at = int(np.searchsorted(POINTS, left))
        if at < len(POINTS) and np.isnan(self.seen[: at + 1]).all():
            self.seen[at] = above

    def learn(self, errors: FloatArray, slots: float) -> None:
        """Takes in what is pending as a slice closes, with so many sends left until the deadline."""
        (seen, self.seen), guarded = (self.seen, _unknown()), self.guarded
        if slots < 1.0 or not math.isfinite(slots):
            return  # it had no chance to be in time, or there is no telling
        reached = nth_largest(errors, slots)
        if self.target is None:
            self.target = max(FIRST * reached, LEAST)
            return
        above = int(np.count_nonzero(errors > self.target))
        # By the level that was in force: a guard that stepped in for nothing sees by it that it did.
        if self.slices or above <= slots:  # the first T may have been far too low
            self._learn_shed(seen - np.count_nonzero(errors > guarded))
        filled = (above + 1.0) / (slots + 1.0)
        self._learn_slope(filled)
        self.slices += 1
        part = 1.0 if filled >= 1.0 else max(1.0 / self.slices, DAMPING)
        step = (filled / _room(slots)) ** (part / self.slope)
        self.before = self.target, filled
        self.target = max(self.target * min(max(step, STEPS[0]), STEPS[1]), NEAR_REACHED * reached, LEAST)

    def _learn_shed(self, shed: FloatArray) -> None:
        told = np.isfinite(shed)
        weight = np.where(np.isnan(self.shed), 1.0, LEARNING_RATE)
        self.shed = np.where(told, weight * shed + (1.0 - weight) * np.nan_to_num(self.shed), self.shed)

    def _learn_slope(self, filled: float) -> None:
        if self.before is None or self.target is None:
            return
        change = math.log(self.target / self.before[0])
        if abs(change) >= TELLING:
            slope = math.log(self.before[1] / filled) / change
            self.slope = (self.slope + min(max(slope, SLOPES[0]), SLOPES[1])) / 2.0

    def snapshot(self) -> dict[str, Any]:
        """A JSON document that `restore` reads back."""
        return {
            "target": self.target, "slope": self.slope, "slices": self.slices, "before": self.before,
            "shed": [_number(v) for v in self.shed], "seen": [_number(v) for v in self.seen], "guarded": self.guarded,
        }  # fmt: skip

    @classmethod
    def restore(cls, document: Mapping[str, Any]) -> Aim:
        before = document["before"]
        shed, seen = (np.array([np.nan if v is None else v for v in document[n]]) for n in ("shed", "seen"))
        return cls(
            document["target"], document["slope"], document["slices"], tuple(before) if before else None,
            shed, seen, document["guarded"],
        )  # fmt: skip


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else float(value)
