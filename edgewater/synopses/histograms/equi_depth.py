"""Histograms of equally full buckets, as a view of a DDSketch: boundary i of B is the quantile i/B.

The sketch is the state; buckets are made when they are asked for, so merging is that of the sketch. A
boundary is within the sketch's relative accuracy, and a bucket is as full as it should be up to the
mass of the bins that hold its boundaries. Counts in a range come from the sketch's own bins and not
from the buckets: certain between the bins that are inside the range and those that it touches.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.errors import CorruptSynopsis, InvalidRequest
from edgewater.synopses.base import Estimate, Estimates, FloatArray, IntArray, Quantile, Question, Questions
from edgewater.synopses.cells import cells_of, groups_of
from edgewater.synopses.encoding import codec
from edgewater.synopses.items import check_whole
from edgewater.synopses.quantiles.ddsketch import DEFAULT_ACCURACY, DDSketchStack
from edgewater.synopses.quantiles.log_bins import MAX_ACCURACY, MIN_ACCURACY, SignedBins
from edgewater.synopses.questions import Range
from edgewater.synopses.registry import Function, Parameter, Parameters, register_function, register_kind
from edgewater.synopses.single import SingleSynopsis
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

DEFAULT_BUCKETS = 32
MAX_BUCKETS = 1 << 16


class EquiDepthStack(DDSketchStack):
    """A DDSketch per group that also answers `Range` and gives the boundaries of `buckets` buckets."""

    kind: ClassVar[str] = "equi_depth"
    questions: ClassVar[Questions] = (*DDSketchStack.questions, Range)

    def __init__(self, groups: int = 0, *, buckets: int = DEFAULT_BUCKETS, accuracy: float = DEFAULT_ACCURACY) -> None:
        self.buckets = check_whole("buckets", buckets, 1, MAX_BUCKETS)
        super().__init__(groups, accuracy=accuracy)

    @property
    def parameters(self) -> dict[str, Any]:
        return {**super().parameters, "buckets": self.buckets}

    def _empty(self) -> Self:
        return type(self)(buckets=self.buckets, accuracy=self.accuracy)

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        if isinstance(question, Range):
            return self._range(question.lo, question.hi)
        return super().query(question)

    def boundaries(self) -> list[Estimates]:
        """The `buckets` + 1 boundaries, from the least value to the greatest."""
        return [self.query(Quantile(i / self.buckets)) for i in range(self.buckets + 1)]

    def _range(self, low: float, high: float) -> Estimates:
        """Values in [low, high]. Bins of positive values hold their upper edge, of negative ones their lower."""
        if low != low or high != high:
            raise InvalidRequest("lo" if low != low else "hi", math.nan, "a number")
        keys, counts = self._settle()
        groups = groups_of(keys)
        bins = SignedBins.of(cells_of(keys))
        lowest, _, highest = bins.edges(self.accuracy, self._view("level")[groups])
        least, greatest = self._view("min")[groups], self._view("max")[groups]
        # An extreme that lies inside a bin is its edge, and a value: closed.
        open_low = (bins.sign > 0) & (lowest >= least)
        open_high = (bins.sign < 0) & (highest <= greatest)
        lowest, highest = np.maximum(lowest, least), np.minimum(highest, greatest)
        inside = (low <= lowest) & (high >= highest)
        touched = np.where(open_low, high > lowest, high >= lowest) & np.where(open_high, low < highest, low <= highest)
        touched &= low <= high
        inside &= touched
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            part = (np.minimum(high, highest) / 2 - np.maximum(low, lowest) / 2) / (highest / 2 - lowest / 2)
        part = np.where(inside, 1.0, np.where(touched, np.clip(np.where(np.isnan(part), 1.0, part), 0, 1), 0.0))
        infinite = self._view("below") * (low == -math.inf) + self._view("above") * (high == math.inf)
        value, lower, upper = (self._counted(groups, counts * share) + infinite for share in (part, inside, touched))
        return Estimates(value, lower, upper, 1.0, self.kind)

    def _counted(self, groups: IntArray, weights: npt.NDArray[Any]) -> FloatArray:
        return np.asarray(np.bincount(groups, weights, len(self)), np.float64)

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        parameters = codec.open_message(message, cls.kind, cls.version, len(message.arrays))
        result = super().from_message(message)
        try:
            result.buckets = check_whole("buckets", parameters["buckets"], 1, MAX_BUCKETS)
        except (KeyError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters {message.parameters!r} lack a number of buckets") from exc
        return result


class EquiDepthHistogram(SingleSynopsis[EquiDepthStack]):
    """`buckets` buckets that hold equally many values each, with boundaries within a relative `accuracy`.

    For boundaries within a rank, and not within a value, use `Kll`.
    """

    stack_type = EquiDepthStack
    types: ClassVar[tuple[str, ...]] = ("int64", "float64")

    def __init__(self, buckets: int = DEFAULT_BUCKETS, *, accuracy: float = DEFAULT_ACCURACY) -> None:
        super().__init__(EquiDepthStack(1, buckets=buckets, accuracy=accuracy))

    def boundaries(self) -> list[Estimate]:
        """The `buckets` + 1 boundaries, from the least value to the greatest."""
        return [estimates[0] for estimates in self._stack.boundaries()]


_MOST_BUCKETS = 1000  # of a query's measure: a boundary costs a quantile each time it is asked for


def _make(parameters: Parameters, _: pa.DataType | None) -> EquiDepthStack:
    return EquiDepthStack(**dict(parameters))


register_kind(EquiDepthStack)
register_function(
    Function(
        "equi_depth",
        _make,
        parameters={
            "buckets": Parameter.whole(DEFAULT_BUCKETS, 1, _MOST_BUCKETS),
            "accuracy": Parameter.number(DEFAULT_ACCURACY, MIN_ACCURACY, MAX_ACCURACY),
        },
    )
)
