"""Equi-depth histograms, as a view of a DDSketch: boundary i of B is the quantile i/B.

The sketch is the state. Buckets are computed on demand, so histograms merge like sketches. A boundary is within the
sketch's relative accuracy. A bucket has its share of the values, up to the mass of the bins that contain its
boundaries. Counts in a range use the sketch's bins, not the buckets. The lower bound counts the bins inside the range,
the upper bound the bins that it touches.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from edgewater.synopses.array_stack import register_stack
from edgewater.synopses.base import Count, Estimate, Estimates, Quantile, Question, Questions
from edgewater.synopses.checks import check_not_nan, check_whole
from edgewater.synopses.quantiles.ddsketch import DEFAULT_ACCURACY, DDSketchStack
from edgewater.synopses.quantiles.log_bins import MAX_ACCURACY, MIN_ACCURACY, SignedBins
from edgewater.synopses.questions import Range
from edgewater.synopses.registry import Parameter
from edgewater.synopses.shapes import Shape, ShownAnswers, ShownInterval, nans
from edgewater.synopses.single import SingleSynopsis
from edgewater.synopses.sparse_cells import cells_of, groups_of

DEFAULT_BUCKETS = 32
MAX_BUCKETS = 1 << 16  # limit: CPU of an answer


class EquiDepthStack(DDSketchStack):
    """A DDSketch per group that also answers `Range` and returns the boundaries of `buckets` buckets."""

    kind: ClassVar[str] = "equi_depth"
    questions: ClassVar[Questions] = (*DDSketchStack.questions, Range)
    required: ClassVar[tuple[str, ...]] = ("accuracy", "buckets")

    def __init__(self, groups: int = 0, *, buckets: int = DEFAULT_BUCKETS, accuracy: float = DEFAULT_ACCURACY) -> None:
        self.buckets = check_whole("buckets", buckets, 1, MAX_BUCKETS)
        super().__init__(groups, accuracy=accuracy)

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        if isinstance(question, Range):
            return self._range(check_not_nan("lo", question.lo), check_not_nan("hi", question.hi))
        return super().query(question)

    def shown(self, asked: Question | None = None) -> tuple[Shape, ...]:
        count = ShownInterval("count", Count(), whole=True)
        return (count, ShownAnswers("boundaries", self._boundaries()), nans(self._view("nan")))

    def boundaries(self) -> list[Estimates]:
        """Returns the `buckets` + 1 boundaries, from the smallest value to the largest."""
        return [self.query(boundary) for boundary in self._boundaries()]

    def _boundaries(self) -> list[Quantile]:
        return [Quantile(i / self.buckets) for i in range(self.buckets + 1)]

    def _range(self, low: float, high: float) -> Estimates:
        """Returns the number of values in [low, high]. Bins of positive values include their upper edge, bins of
        negative values their lower edge."""
        keys, counts = self.consolidate()
        groups = groups_of(keys)
        bins = SignedBins.of(cells_of(keys))
        lowest, _, highest = bins.edges(self.accuracy, self._view("level")[groups])
        least, greatest = self._view("min")[groups], self._view("max")[groups]
        # If an extreme value is inside a bin, it is the edge of the bin and one of its values. So the bin is closed
        # there.
        open_low = (bins.sign > 0) & (lowest >= least)
        open_high = (bins.sign < 0) & (highest <= greatest)
        lowest, highest = np.maximum(lowest, least), np.minimum(highest, greatest)
        inside = (low <= lowest) & (high >= highest)
        touched = np.where(open_low, high > lowest, high >= lowest) & np.where(open_high, low < highest, low <= highest)
        touched &= low <= high
        inside &= touched
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            fraction = (np.minimum(high, highest) / 2 - np.maximum(low, lowest) / 2) / (highest / 2 - lowest / 2)
        clipped = np.clip(np.where(np.isnan(fraction), 1.0, fraction), 0, 1)
        fraction = np.where(inside, 1.0, np.where(touched, clipped, 0.0))
        infinite = self._view("below") * (low == -math.inf) + self._view("above") * (high == math.inf)
        value, lower, upper = (
            np.bincount(groups, counts * weight, len(self)) + infinite for weight in (fraction, inside, touched)
        )
        return Estimates(value, lower, upper, 1.0, self.kind)


class EquiDepthHistogram(SingleSynopsis[EquiDepthStack]):
    """`buckets` buckets with equal numbers of values, and boundaries within a relative error of `accuracy`.

    For boundaries within an error of rank instead of a relative error of the value, use `Kll`.

    >>> import numpy as np
    >>> quarters = EquiDepthHistogram(4)
    >>> quarters.update(np.arange(1.0, 1_001.0))
    >>> [round(boundary.value) for boundary in quarters.boundaries()]
    [1, 252, 498, 743, 1000]
    """

    stack_type = EquiDepthStack

    def __init__(self, buckets: int = DEFAULT_BUCKETS, *, accuracy: float = DEFAULT_ACCURACY) -> None:
        super().__init__(EquiDepthStack(1, buckets=buckets, accuracy=accuracy))

    def boundaries(self) -> list[Estimate]:
        """Returns the `buckets` + 1 boundaries, from the smallest value to the largest."""
        return [estimates[0] for estimates in self.stack.boundaries()]


_QUERY_BUCKETS = 1000  # limit: CPU of an answer


register_stack(
    EquiDepthStack,
    parameters={
        "buckets": Parameter.whole(DEFAULT_BUCKETS, 1, _QUERY_BUCKETS),
        "accuracy": Parameter.number(DEFAULT_ACCURACY, MIN_ACCURACY, MAX_ACCURACY),
    },
)
