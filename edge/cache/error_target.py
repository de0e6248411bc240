"""The error target of a staleness budget: learned from slice to slice, and corrected within each slice.

The sizing `target` sends the entries whose error exceeds a threshold T. T is right when the entries above it just fill
the sends between a slice's end and its deadline. The number N of entries above T at a slice's close falls roughly as a
power of T, and varies little from slice to slice. So T is computed from the N of earlier slices.

A target that is too low costs far more than a target that is slightly too high. With a low target some entries cannot
be sent in time. These are heavy groups, which are sent last because their values never settle, and whose accumulated
error is then large. Two measures prevent it. T leaves a part of the slots free (`SPARE`). And T is raised in the second
half of a slice, if the slice would end with too many entries above T. This is predictable, because the number of
entries above T decreases in nearly the same way in every slice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from edgewater.synopses import FloatArray
from edgewater.synopses.encoding.state import State

SPARE = 3.5
"""Of n sends after a slice's end, SPARE·√n stay free. 1.75 times the observed variation of N. At least half of the
sends are used."""
DAMPING = 0.35  # measured: bench.constants; with 1, errors are up to 8 % larger
"""The fraction of a step that is applied when T has settled. Before that, or if T is too low, the whole step is
applied."""
REMAINING: FloatArray = np.array([0.01, 0.02, 0.03, 0.045, 0.06, 0.09, 0.125, 0.18, 0.25, 0.35, 0.5])
"""The remaining fractions of a slice at which the number of entries above the target is recorded."""
NEWEST_WEIGHT = 0.3
"""The weight of the newest value in running means: of slices, of frames and of reports."""
FIRST_FRACTION = 0.5
"""The second slice's target, as a fraction of the first slice's reached error. The first slice had no history."""
SLOPE = 2.0
"""The assumed power of T with which N falls. A slope that follows from earlier slices gave no smaller errors."""
STEP_RANGE = (0.6, 2.0)  # limit: the change of T from slice to slice
MIN_REACHED_FRACTION = 0.1
"""T is at least this fraction of the reached error, so that T recovers quickly when the load jumps."""
MIN_TARGET = 1e-9  # limit: T stays above 0


def nth_largest(values: FloatArray, count: float) -> float:
    """Returns the largest value that is not among the `count` largest; 0 if there is none."""
    n = max(0, int(min(count, len(values))))
    if n >= len(values):
        return 0.0
    return float(np.partition(values, len(values) - 1 - n)[len(values) - 1 - n])


def _used_fraction(slots: float) -> float:
    """Returns the fraction of the sends that entries above the target should fill."""
    return max(1.0 - SPARE / math.sqrt(max(slots, 0.0) + 1.0), 0.5)


def _unknown() -> FloatArray:
    return np.full(len(REMAINING), np.nan)


@dataclass(slots=True)
class ErrorTarget:
    """The error target of one query. Errors are in units of the largest value (`GroupHistory.scale`).

    Attributes:
        target: T of the next slice; None before the first slice has closed.
        slices: number of slices learned from.
        decrease: float64 per item of `REMAINING`: by how much the number of entries above the target decreases from
            then until the slice's end; NaN: unknown.
        counts: float64 per item of `REMAINING`: the number of entries above the level in the open slice; NaN: not
            recorded yet.
        last_level: the level at the last ranking of the open slice.
    """

    target: float | None = None
    slices: int = 0
    decrease: FloatArray = field(default_factory=_unknown)
    counts: FloatArray = field(default_factory=_unknown)
    last_level: float = 0.0

    def level(self, errors: FloatArray, left: float, slots: float, slots_at_end: float) -> float:
        """Returns the error above which an entry is in the primary cache. Called after the first slice.

        Args:
            errors: the errors of the pending entries.
            left: the remaining fraction of the slice.
            slots: sends from now until the deadline.
            slots_at_end: sends from the slice's end until the deadline.
        """
        assert self.target is not None
        level = max(self.target, nth_largest(errors, slots))  # smaller errors cannot be sent in time
        is_measured = np.isfinite(self.decrease)
        if left <= REMAINING[-1] and is_measured.any() and math.isfinite(slots_at_end):
            decrease = float(np.interp(left, REMAINING[is_measured], self.decrease[is_measured]))
            allowed = (1.0 + _used_fraction(slots_at_end)) / 2.0 * slots_at_end + decrease
            level = max(level, nth_largest(errors, max(allowed, 0.0)))
        self._record_count(left, int(np.count_nonzero(errors > level)))
        self.last_level = level
        return level

    def _record_count(self, left: float, above: int) -> None:
        """Records the first ranking at or after each item of `REMAINING`; skipped items stay unknown."""
        at = int(np.searchsorted(REMAINING, left))
        if at < len(REMAINING) and np.isnan(self.counts[: at + 1]).all():
            self.counts[at] = above

    def learn(self, errors: FloatArray, slots: float) -> None:
        """Updates the target with a slice that has just closed.

        Args:
            errors: the errors of the pending entries.
            slots: sends left until the deadline.
        """
        (counts, self.counts), last_level = (self.counts, _unknown()), self.last_level
        if slots < 1.0 or not math.isfinite(slots):
            return  # the slice could not meet its deadline, or the capacity is unknown
        reached = nth_largest(errors, slots)
        if self.target is None:
            self.target = max(FIRST_FRACTION * reached, MIN_TARGET)
            return
        above = int(np.count_nonzero(errors > self.target))
        # Relative to the level that was used, so that an unnecessary correction shows in the decrease.
        if self.slices or above <= slots:  # the first T may have been far too low
            self._learn_decrease(counts - np.count_nonzero(errors > last_level))
        filled = (above + 1.0) / (slots + 1.0)
        self.slices += 1
        part = 1.0 if filled >= 1.0 else max(1.0 / self.slices, DAMPING)
        step = (filled / _used_fraction(slots)) ** (part / SLOPE)
        step = min(max(step, STEP_RANGE[0]), STEP_RANGE[1])
        self.target = max(self.target * step, MIN_REACHED_FRACTION * reached, MIN_TARGET)

    def _learn_decrease(self, decrease: FloatArray) -> None:
        measured = np.isfinite(decrease)
        weight = np.where(np.isnan(self.decrease), 1.0, NEWEST_WEIGHT)
        mean = weight * decrease + (1.0 - weight) * np.nan_to_num(self.decrease)
        self.decrease = np.where(measured, mean, self.decrease)

    def to_state(self) -> State:
        numbers = [self.target, SLOPE, self.slices, None, self.last_level]  # as release 0.3 reads them
        return State(numbers, {"decrease": self.decrease, "counts": self.counts})

    @classmethod
    def from_state(cls, state: State) -> ErrorTarget:
        target, _, slices, _, last_level = state.numbers
        return cls(target, slices, state.arrays["decrease"], state.arrays["counts"], last_level)
