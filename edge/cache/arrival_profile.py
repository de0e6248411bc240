"""When in a slice the records of a group arrive, and how many: learnt from earlier slices.

A slice has `PARTS` equal parts. A *shape* is the fraction of a group's records that is still to come after each part.
The shape of a group is estimated from the group's counts and a *base*. The base is a constant rate, or the counts of
all groups. The estimate is the mean of a Dirichlet posterior, (κ·base + counts) / (κ + Σ counts).

The number of records to come is the mean of a Gamma posterior. Its data are the records so far, and earlier slices,
which count as w slices. Optionally earlier slices are first *scaled*, for a rate that changes with the time of day. The
factor is the records of all groups so far, relative to their expected number.

No weight is fixed. Each combination of base, κ, w and scaling is an expert. When a slice closes, each expert is scored
by its forecasts at `CHECKPOINTS`: the Poisson log-likelihood of the records that then came, which is a proper score of
a mean (Gneiting and Raftery, JASA 102, 2007, section 3.3). The expert with the largest discounted sum of scores makes
the next slice's forecasts (prequential selection: Dawid, JRSS A 147, 1984). A group's mean value is estimated from its
own values and the mean value of all groups. The weight of the latter is selected in the same way, by the log-likelihood
of exponential values with these means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt

from edgewater.synopses import FloatArray, IntArray
from edgewater.synopses.encoding.state import State

PARTS = 16
CHECKPOINTS = np.array([8, 12, 14, 15])
"""Numbers of parts after which forecasts are scored. They are near the slice's end, where forecasts decide what is
sent."""
KAPPAS = (np.inf, 8.0, 1.0, 0.125)
"""Strengths of the base, in mean records per slice. Infinite: every group has the base."""
SHAPES = tuple(product((False, True), KAPPAS))
"""(whether the base is the counts of all groups, κ)"""
MIN_WEIGHT = 0.5
SLICE_WEIGHTS = ((MIN_WEIGHT, np.inf), (2.0, 8.0), (2.0, np.inf), (8.0, 8.0), (8.0, np.inf))
"""(w, the maximum records that w slices of a group count as; w is at least `MIN_WEIGHT`). Groups of many records often
change from slice to slice by more than a Poisson process does."""
EXPERTS = tuple(product((False, True), SLICE_WEIGHTS, SHAPES))
"""(whether earlier slices are scaled, w, shape). The first expert is a constant rate. It is used until scores exist."""
VALUE_WEIGHTS = (0.5, 4.0, 32.0, 256.0)
"""Weights of the mean value of all groups, in records."""
DISCOUNT = 0.8
LEARNING_RATE = 0.15
"""Weight of the newest slice in the counts. Shapes change more slowly than rates."""
SCORED_GROUPS = 1 << 10  # limit: time of a close
"""Experts are scored by so many groups of a slice. With four times as many, the same bytes are sent."""
SCALE_RECORDS = 10.0
"""Prior records of the scaling, so that the first records of a slice do not determine it."""
MIN_EXPECTED = 1e-3
"""Smaller expectations are scored as this value, since a group without records so far may always get one."""
MAX_COUNT = 6e4
"""The maximum of a count, which fits into float16. A group with so many records has its own shape either way."""


@dataclass(slots=True)
class ArrivalProfile:
    """The statistics of the arrivals of one query's groups, and the expert that forecasts them.

    Attributes:
        counts: float64 [part], the mean records per slice of all groups.
        expert: position in `EXPERTS`.
        value_weight: the element of `VALUE_WEIGHTS` in use.
        scores, value_scores: float64, discounted sums per expert and per value weight.
    """

    counts: FloatArray = field(default_factory=lambda: np.zeros(PARTS))
    expert: int = 0
    value_weight: float = VALUE_WEIGHTS[0]
    scores: FloatArray = field(default_factory=lambda: np.zeros(len(EXPERTS)))
    value_scores: FloatArray = field(default_factory=lambda: np.zeros(len(VALUE_WEIGHTS)))

    @property
    def scales(self) -> bool:
        """Whether the expert scales earlier slices by the records of all groups so far."""
        return EXPERTS[self.expert][0]

    def remaining(self, group_counts: npt.NDArray[np.floating]) -> FloatArray:
        """Returns the shape that the expert gives to groups, float64 [group, part + 1], from 1 to 0.

        Args:
            group_counts: [group, part], mean records per slice; zeros for new groups.
        """
        return self._shape(*EXPERTS[self.expert][2], group_counts)

    def _shape(self, pooled: bool, kappa: float, group_counts: npt.NDArray[np.floating]) -> FloatArray:
        base = np.full(PARTS, 1.0 / PARTS)
        if pooled:
            base = (self.counts + base) / (self.counts.sum() + 1.0)
        parts = np.broadcast_to(base, group_counts.shape)
        if np.isfinite(kappa):
            own = group_counts.astype(np.float64)
            parts = (kappa * base + own) / (kappa + own.sum(axis=1, keepdims=True))
        result = np.zeros((len(group_counts), PARTS + 1))
        result[:, :PARTS] = np.cumsum(parts[:, ::-1], axis=1)[:, ::-1]
        return result

    def expected(self, so_far: FloatArray, past: FloatArray, left: FloatArray, scale: float) -> FloatArray:
        """Returns the expected number of records to come, float64 per group.

        Args:
            so_far: records in this slice.
            past: mean records of earlier slices.
            left: the fraction of a slice's records that is to come.
            scale: `scale_of` all groups of the slice; not used unless the expert `scales`.
        """
        scaled, weight, _ = EXPERTS[self.expert]
        return _posterior_mean(so_far, past * scale if scaled else past, left, weight)

    def learn(self, counts: FloatArray, past: FloatArray, group_counts: npt.NDArray[np.floating]) -> None:
        """Updates the scores, the expert and the counts of all groups with a slice that has just closed.

        Args:
            counts: [group, part], records of the slice.
            past, group_counts: averages before the slice; [group], and [group, part].
        """
        # Every k-th group, in the order of their first records.
        chosen = slice(None, None, max(1, -(-len(counts) // SCORED_GROUPS)))
        came = np.cumsum(counts[chosen], axis=1)
        so_far = came[:, CHECKPOINTS - 1]
        later = came[:, -1:] - so_far
        before = past[chosen, np.newaxis]
        left = np.stack([self._shape(*shape, group_counts[chosen])[:, CHECKPOINTS] for shape in SHAPES])
        scales = (scale_of(so_far, before, left, axis=1)[:, np.newaxis], 1.0)
        scores = [
            (later * np.log(m) - m).sum(axis=(1, 2))
            for scaled, weight in product((False, True), SLICE_WEIGHTS)
            for m in [np.maximum(_posterior_mean(so_far, before * scales[not scaled], left, weight), MIN_EXPECTED)]
        ]
        self.scores = DISCOUNT * self.scores + np.concatenate(scores)
        self.expert = int(np.argmax(self.scores))
        self.learn_counts(counts, LEARNING_RATE)

    def learn_counts(self, counts: FloatArray, weight: float) -> None:
        self.counts = (1.0 - weight) * self.counts + weight * counts.sum(axis=0)

    def learn_values(self, records: FloatArray, total: FloatArray, past: FloatArray, past_total: FloatArray) -> None:
        """Updates the weight of the mean value of all groups with the sums of a slice that has just closed.

        Args:
            records, total: per group, of the slice.
            past, past_total: means of earlier slices.
        """
        mean = past_total.sum() / max(past.sum(), MIN_EXPECTED)
        if mean <= 0.0:
            return
        means = [(past_total + weight * mean) / (past + weight) for weight in VALUE_WEIGHTS]
        scores = [-(records * np.log(m) + total / m).sum() for m in (np.maximum(m, 1e-6 * mean) for m in means)]
        self.value_scores = DISCOUNT * self.value_scores + np.array(scores)
        self.value_weight = VALUE_WEIGHTS[int(np.argmax(self.value_scores))]

    def to_state(self) -> State:
        arrays = {"counts": self.counts, "scores": self.scores, "value_scores": self.value_scores}
        return State([self.expert, self.value_weight], arrays)

    @classmethod
    def from_state(cls, state: State) -> ArrivalProfile:
        expert, value_weight = state.numbers
        counts, scores, value_scores = (state.arrays[name] for name in ("counts", "scores", "value_scores"))
        return cls(counts, expert, value_weight, scores, value_scores)


def _posterior_mean(so_far: FloatArray, past: FloatArray, left: FloatArray, weight: tuple[float, float]) -> FloatArray:
    """Returns the expected number of records to come, float64 per group.

    It is the mean of the Gamma posterior of a Poisson rate (Gelman et al., "Bayesian Data Analysis", 3rd ed., section
    2.6), times the exposure to come.

    Args:
        weight: one of `SLICE_WEIGHTS`.
    """
    slices, most_records = weight
    counted: FloatArray | float = max(slices, MIN_WEIGHT)
    if most_records < np.inf:
        counted = np.maximum(np.minimum(slices, most_records / np.maximum(past, MIN_EXPECTED)), MIN_WEIGHT)
    return np.asarray((so_far + counted * past) / (1.0 - left + counted) * left)


def scale_of(so_far: FloatArray, past: FloatArray, left: FloatArray, axis: int = 0) -> FloatArray:
    """Returns the records of all groups so far, relative to their expected number.

    Args:
        axis: the axis of groups in `left`; 0 in `so_far`.
    """
    expected = (past * (1.0 - left)).sum(axis=axis)
    return np.asarray((so_far.sum(axis=0) + SCALE_RECORDS) / (expected + SCALE_RECORDS))


def parts_of(times: IntArray, start_ms: int, slice_ms: int) -> IntArray:
    """Returns the part of the slice of each event time, 0 to `PARTS` - 1."""
    return np.minimum(np.maximum((times - start_ms) * PARTS // slice_ms, 0), PARTS - 1)  # np.clip takes twice as long
