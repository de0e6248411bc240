"""DDSketch: quantiles with a bounded relative error, for values of either sign.

Masson, Rim and Lee, "DDSketch" (VLDB 2019), with the uniform collapse of Epicoco et al., "UDDSketch" (IEEE Access
2020). When a sketch has too many bins, γ becomes γ² and two neighbouring bins become one bin. So the bound holds for
every quantile, not only for the high quantiles. (α, level) identifies the bins, never a float γ. Sketches of different
levels merge at the higher level. The level is the smallest level at which the bins fit. It depends on the values and
not on their order.

Bins are cells (`sparse_cells.py`) numbered by `SignedBins`, in the order of the values. NaN is counted separately and
has no rank; infinities have one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from edgewater.base.errors import InvalidRequest
from edgewater.synopses.array_stack import ArrayStack, group_mask, keep_better, register_stack
from edgewater.synopses.base import (
    CHUNK,
    Count,
    Estimates,
    FloatArray,
    IntArray,
    Maximum,
    Mean,
    Minimum,
    Properties,
    Quantile,
    Question,
    Questions,
    Rank,
    Sum,
)
from edgewater.synopses.checks import check_not_nan, check_quantile
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import MAX_COUNT, Layout, count, field
from edgewater.synopses.quantiles.log_bins import (
    MAX_ACCURACY,
    MIN_ACCURACY,
    OFFSET,
    ZERO,
    SignedBins,
    coarser,
    collapsed_accuracy,
    log_bins,
)
from edgewater.synopses.registry import Function, Parameter, register_function
from edgewater.synopses.shapes import Shape, default_shapes, nans
from edgewater.synopses.single import SingleSynopsis
from edgewater.synopses.sparse_cells import SparseCells, cell_fields, cell_keys, cells_of, groups_of
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

DEFAULT_ACCURACY = 0.01
MAX_BINS = 2048
"""Maximum number of bins in use per group; at 1 % they cover 17 orders of magnitude before the first collapse."""

_ACCURACY = Parameter.number(
    DEFAULT_ACCURACY,
    MIN_ACCURACY,
    MAX_ACCURACY,
    f"a relative accuracy from {MIN_ACCURACY} to {MAX_ACCURACY}, such as 0.01",
)
_MAX_LEVEL = 20  # at this level, two bins cover all values of one sign
_ROLES = codec.ArrayRoles(0)
CANCELLED = 1e-9  # limit: the rounding that an answer does not state
"""Rounding may change a sum of float64. If it may change more than this fraction of the sum, the bounds state it."""


class DDSketchStack(ArrayStack):
    """A DDSketch per group. `accuracy` is α at level 0; only stacks of equal accuracy merge."""

    kind: ClassVar[str] = "ddsketch"
    stacking: ClassVar[codec.ArrayRoles | None] = _ROLES
    properties: ClassVar[Properties] = Properties()
    questions: ClassVar[Questions] = (Quantile, Rank, Count, Sum, Mean, Minimum, Maximum)
    required: ClassVar[tuple[str, ...]] = ("accuracy",)
    arrays: ClassVar[dict[str, tuple[str, float]]] = {
        "level": ("<i8", 0),
        "nan": ("<i8", 0),
        "below": ("<i8", 0),  # -inf
        "above": ("<i8", 0),  # +inf
        "sum": ("<f8", 0.0),  # of finite values
        "min": ("<f8", np.inf),
        "max": ("<f8", -np.inf),
    }
    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout.of(
            field("level", least=0, most=_MAX_LEVEL),
            *(count(name) for name in ("nan", "below", "above")),
            *(field(name, "<f8") for name in ("sum", "min", "max")),
            *cell_fields("<i8", least=1, most=MAX_COUNT, counts=True),
        ),
    )

    def __init__(self, groups: int = 0, *, accuracy: float = DEFAULT_ACCURACY) -> None:
        try:
            _ACCURACY.read(accuracy)
        except ValueError as exc:
            raise InvalidRequest("accuracy", accuracy, _ACCURACY.accepted) from exc
        super().__init__(groups)
        self.accuracy = float(accuracy)
        self._bins = log_bins(self.accuracy)
        self._cells = SparseCells(np.add, np.int64)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._cells.nbytes

    def update(self, codes: IntArray, values: npt.NDArray[Any], *, times: IntArray | None = None) -> None:
        """Adds a batch of integers or floats; integers count as the nearest float64."""
        for at in range(0, len(values), CHUNK):
            self._add(codes[at : at + CHUNK], values[at : at + CHUNK].astype(np.float64, copy=False))

    def _add(self, codes: IntArray, values: FloatArray) -> None:
        least, greatest = values.min(), values.max()
        if not math.isfinite(least) or not math.isfinite(greatest):  # NaN propagates through min and max
            codes, values = self._count_nonfinite(codes, values)
            if not len(values):
                return None
            least, greatest = values.min(), values.max()
        with np.errstate(over="ignore", invalid="ignore"):  # a sum beyond float64 is infinite
            self._update_sum_and_extremes(codes, values, least, greatest)
        if least > 0:
            return self._count_bins(codes, self._bins.find(values) + np.int32(OFFSET))
        nonzero = values != 0
        signed = values[nonzero]
        bins = self._bins.find(np.abs(signed)) + np.int32(OFFSET)
        # The bins of values of usual sizes are thousands of cells away from the bin of zero. Without this gap the cells
        # of both are close enough to be counted by an array.
        gap = int(bins.min()) - 1 if len(bins) else 0
        bins -= np.int32(gap)
        cells = np.zeros(len(values), np.int32)
        cells[nonzero] = np.where(signed < 0, -bins, bins)
        return self._count_bins(codes, cells, gap)

    def _count_nonfinite(self, codes: IntArray, values: FloatArray) -> tuple[IntArray, FloatArray]:
        """Counts NaN and infinities, and returns the finite values."""
        above, below = values == np.inf, values == -np.inf
        for name, chosen in (("nan", values != values), ("above", above), ("below", below)):
            self._view(name)[:] += np.bincount(codes[chosen], minlength=len(self))
        self._view("max")[codes[above]] = np.inf
        self._view("min")[codes[below]] = -np.inf
        finite = np.isfinite(values)
        return codes[finite], values[finite]

    def _update_sum_and_extremes(self, codes: IntArray, values: FloatArray, least: float, greatest: float) -> None:
        """Adds finite values to the sums and extremes."""
        if len(self) == 1:
            self._view("sum")[0] += values.sum()
            self._view("min")[0] = min(self._view("min")[0], least)
            self._view("max")[0] = max(self._view("max")[0], greatest)
            return
        self._view("sum")[:] += np.bincount(codes, values, len(self))
        np.minimum.at(self._view("min"), codes, values)
        np.maximum.at(self._view("max"), codes, values)

    def _count_bins(self, codes: IntArray, cells: npt.NDArray[np.int32], gap: int = 0) -> None:
        """Adds one to each (group, cell). `cells` are relative to the cell of zero; the array is overwritten.

        Args:
            gap: how many cells were left out on each side of the cell of zero.
        """
        least = int(cells.min())
        span = int(cells.max()) - least + 1
        cells -= np.int32(least)
        keys = cells if len(self) == 1 else codes * span + cells
        if len(self) * span <= max(4 * len(cells), 1 << 16):
            found = np.bincount(keys)
            used = np.flatnonzero(found)
            counts = found[used]
        else:
            used, counts = np.unique(keys, return_counts=True)
        groups, within = np.divmod(used.astype(np.int64), span)
        found_cells = least + within
        self._add_cells(groups, ZERO + found_cells + gap * np.sign(found_cells), counts)

    def _add_cells(self, groups: IntArray, cells: IntArray, counts: IntArray) -> None:
        """Adds cells of level 0 to groups of any level."""
        level = self._view("level")
        if level.any():
            cells = SignedBins.of(cells).coarsened(level[groups])
        self._cells.add(cell_keys(groups, cells), counts)
        if self._cells.needs_consolidation:
            self.consolidate()

    def consolidate(self) -> tuple[IntArray, IntArray]:
        """Consolidates the cells, and collapses groups until each has at most `MAX_BINS`."""
        keys, counts = self._cells.consolidated()
        while len(keys) > MAX_BINS:
            crowded = self._cells.counts(len(self)) > MAX_BINS
            if not crowded.any():
                break
            self._raise_level(self._view("level") + crowded)
            keys, counts = self._cells.consolidated()
        return keys, counts

    def _raise_level(self, levels: IntArray) -> None:
        """Collapses each group to at least its level in `levels`."""
        steps = np.maximum(levels - self._view("level"), 0)
        if steps.any():
            keys, counts = self._cells.consolidated()
            groups = groups_of(keys)
            self._cells.replace(cell_keys(groups, SignedBins.of(cells_of(keys)).coarsened(steps[groups])), counts)
            self._view("level")[:] += steps

    def merge(self, other: Self, codes: IntArray) -> None:
        self._require_equal_parameters(other)
        keys, counts = other.consolidate()
        theirs = other._view("level").copy()  # `other` may be this stack
        levels = self._view("level").copy()
        np.maximum.at(levels, codes, theirs)
        self._raise_level(levels)
        groups = groups_of(keys)
        cells, steps = cells_of(keys), levels[codes] - theirs
        if steps.any():
            cells = SignedBins.of(cells).coarsened(steps[groups])
        self._cells.add(cell_keys(codes[groups], cells), counts)
        with np.errstate(over="ignore", invalid="ignore"):
            for name in ("nan", "below", "above", "sum"):
                np.add.at(self._view(name), codes, other._view(name))
        for name, better in (("min", np.minimum), ("max", np.maximum)):
            keep_better(better, self._view(name), codes, other._view(name))
        if self._cells.needs_consolidation:
            self.consolidate()

    def take(self, groups: IntArray) -> Self:
        self.consolidate()
        if len(self) == len(groups) == 1:
            result = self._copy_single()
            result._cells = self._cells.copy()
            return result
        result = super().take(groups)
        result._cells.replace(*self._cells.select(groups, len(self)))
        return result

    def reset(self, groups: IntArray) -> None:
        super().reset(groups)
        self._cells.drop(group_mask(groups, len(self)))

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the answer per group; the default question is the median. NaN where there are no values."""
        self.check(question)
        match question:
            case Rank(x):
                return self._ranks(check_not_nan("x", x))
            case None:
                return self._quantiles(0.5)
            case Quantile(q):
                return self._quantiles(check_quantile(q))
            case Minimum() | Maximum():
                name = "min" if isinstance(question, Minimum) else "max"
                return Estimates.exact(np.where(self._counts() > 0, self._view(name), np.nan))
        n = self._counts()
        if isinstance(question, Count):
            return Estimates.exact(n)
        total, error = self._total(), self._sum_error(n)
        if isinstance(question, Mean):
            total, error = total / np.maximum(n, 1), error / np.maximum(n, 1)
        exact = Estimates.exact_floats(total, n > 0)
        return replace(exact, lower=exact.value - error, upper=exact.value + error)

    def _sum_error(self, n: IntArray) -> FloatArray:
        """Returns by how much rounding may change sums, where values of both signs cancel; 0 for negligible
        rounding.
        """
        least, greatest = self._view("min"), self._view("max")
        with np.errstate(over="ignore", invalid="ignore"):
            error = 2.0**-53 * n * (n * np.maximum(-least, greatest))
            cancels = (least < 0) & (greatest > 0) & (error > CANCELLED * np.abs(self._view("sum")))
        return np.where(cancels & np.isfinite(error), error, 0.0)

    def shown(self, asked: Question | None = None) -> tuple[Shape, ...]:
        return (*default_shapes(self, asked), nans(self._view("nan")))

    def accuracies(self) -> FloatArray:
        """Returns the current relative accuracy of each group, after its collapses."""
        self.consolidate()
        each = np.array([collapsed_accuracy(self.accuracy, level) for level in range(_MAX_LEVEL + 1)])
        return np.asarray(each[self._view("level")])

    def _counts(self) -> IntArray:
        """Returns the number of values per group, including infinities but not NaN."""
        _, counts = self.consolidate()
        ends = np.concatenate([[0], np.cumsum(counts)])[self._cells.starts(len(self))]
        return np.asarray(np.diff(ends) + self._view("below") + self._view("above"))

    def _total(self) -> FloatArray:
        above, below = self._view("above") > 0, self._view("below") > 0
        infinite = np.select([above & below, above, below], [np.nan, np.inf, -np.inf], 0.0)
        with np.errstate(invalid="ignore"):  # a sum that overflowed
            return np.asarray(self._view("sum") + infinite)

    def _quantiles(self, q: float) -> Estimates:
        """Returns the value with rank ⌊q·(n - 1)⌋, from 0. The bounds are its bin's edges; extremes are exact."""
        keys, counts = self.consolidate()
        n = self._counts()
        running = np.cumsum(counts)
        before = np.concatenate([[0], running])[self._cells.starts(len(self))[:-1]]
        target = np.floor(q * np.maximum(n - 1, 0)).astype(np.int64)
        rank = target - self._view("below")
        inside = (n > 0) & (rank >= 0) & (rank < n - self._view("below") - self._view("above"))
        results = [np.full(len(self), np.nan) for _ in range(3)]
        at = np.searchsorted(running, (before + rank)[inside], side="right")
        found = SignedBins.of(cells_of(keys[at])).edges(self.accuracy, self._view("level")[inside])
        infinite = np.where(rank < 0, -np.inf, np.inf)
        least, greatest = self._view("min"), self._view("max")
        for result, edge in zip(results, found, strict=True):
            result[inside] = np.clip(edge, least[inside], greatest[inside])
            result[(n > 0) & ~inside] = infinite[(n > 0) & ~inside]
            for rank_of_extreme, extreme in ((0, least), (n - 1, greatest)):
                np.copyto(result, extreme, where=(n > 0) & (target == rank_of_extreme))
        lower, value, upper = results
        return Estimates(value, lower, upper, 1.0, self.kind)

    def _ranks(self, x: float) -> Estimates:
        """Returns the fraction of values that are at most `x`.

        The lower bound counts the bins below the bin of x, the upper bound also this bin.
        """
        keys, counts = self.consolidate()
        n, level = self._counts(), self._view("level")
        running = np.concatenate([[0], np.cumsum(counts)])
        sign = (x > 0) - (x < 0)
        magnitude = np.array([min(abs(x), float(np.finfo(np.float64).max))])
        number = int(self._bins.find(magnitude)[0]) if sign else 0
        bins = SignedBins(np.full(len(self), number), np.full(len(self), sign))
        cells = bins.coarsened(level)
        wanted = cell_keys(np.arange(len(self)), cells)
        starts = running[self._cells.starts(len(self))[:-1]]
        least, most = (running[np.searchsorted(keys, wanted, side)] - starts for side in ("left", "right"))
        low, _, high = SignedBins.of(cells).edges(self.accuracy, level)
        least, most = np.where(x >= high, most, least), np.where(x < low, least, most)
        with np.errstate(divide="ignore", invalid="ignore"):
            fraction = np.where(high > low, np.clip((x - low) / (high - low), 0, 1), 1.0)
            value, lower, upper = (
                np.select([x >= self._view("max"), x < self._view("min")], [n, 0], self._view("below") + counted) / n
                for counted in (least + (most - least) * fraction, least, most)
            )
        return Estimates(value, lower, upper, 1.0, self.kind)

    def to_message(self) -> SynopsisMessage:
        self.consolidate()
        message = super().to_message()
        message.arrays.extend(codec.encode(array) for array in self._cells.pack(len(self)))
        return message

    @classmethod
    def _decoded(cls, given: dict[str, Any], arrays: list[Any]) -> Self:
        result = super()._decoded(given, arrays)
        result._cells.unpack(*arrays[len(cls.arrays) :])
        result._check_state()
        return result

    def _check_state(self) -> None:
        """Raises ValueError unless decoded arrays are a valid state."""
        level = self._view("level")
        keys, counts = self._cells.consolidated()
        bins = SignedBins.of(cells_of(keys))
        groups = groups_of(keys)
        ends = [coarser(np.full(len(level), k), level)[groups] for k in (self._bins.lowest, self._bins.highest)]
        inside = (bins.number >= ends[0]) & (bins.number <= ends[1]) | (bins.sign == 0)
        extremes = self._view("min"), self._view("max")
        if not inside.all() or counts.sum(dtype=np.float64) > MAX_COUNT or any(np.isnan(e).any() for e in extremes):
            raise ValueError("bins, counts or extremes out of range")


class DDSketch(SingleSynopsis[DDSketchStack]):
    """Quantiles within a relative error of `accuracy` (0.001 to 0.5).

    Only synopses of equal accuracy merge. A sketch that would need more than `MAX_BINS` bins collapses, which about
    doubles its error: see `current_accuracy`.

    >>> import numpy as np
    >>> from edgewater.synopses import Quantile
    >>> latency_ms = DDSketch(accuracy=0.01)
    >>> latency_ms.update(np.arange(1.0, 1_001.0))
    >>> p99 = latency_ms.query(Quantile(0.99))
    >>> p99.lower <= 990 <= p99.upper, p99.upper - p99.lower < 2.1 * 0.01 * 990, p99.confidence
    (True, True, 1.0)
    """

    stack_type = DDSketchStack

    def __init__(self, accuracy: float = DEFAULT_ACCURACY) -> None:
        super().__init__(DDSketchStack(1, accuracy=accuracy))

    @property
    def current_accuracy(self) -> float:
        return float(self.stack.accuracies()[0])


register_stack(DDSketchStack, "quantiles", parameters={"accuracy": _ACCURACY})
register_function(
    Function(
        "quantile",
        lambda parameters, _: DDSketchStack(accuracy=dict(parameters)["accuracy"]),
        parameters={"q": Parameter.number(0.5, 0.0, 1.0, "a rank from 0 to 1, such as 0.99"), "accuracy": _ACCURACY},
        question=lambda parameters: Quantile(dict(parameters)["q"]),
    )
)
