"""Equi-width histograms over a fixed range, one row of counters per group.

Bin i is [edge i, edge i+1); the last bin includes its upper edge. Values outside the range, and NaN, have counters of
their own and are never dropped. Bins are computed by arithmetic and then corrected by comparison with the edges. So a
value is always in the bin whose edges enclose it, and the bounds of every answer are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.base.errors import InvalidRequest
from edgewater.synopses.array_stack import halvings, register_stack
from edgewater.synopses.base import (
    CHUNK,
    Count,
    Estimates,
    FloatArray,
    IntArray,
    Properties,
    Quantile,
    Question,
    Questions,
    Rank,
)
from edgewater.synopses.checks import check_not_nan, check_quantile, check_whole
from edgewater.synopses.encoding.layout import MAX_COUNT, Layout, field
from edgewater.synopses.questions import Range
from edgewater.synopses.registry import REQUIRED, Parameter, Parameters
from edgewater.synopses.row_stack import RowStack, row_fields
from edgewater.synopses.shapes import Shape, ShownInterval, ShownList, ShownNumber
from edgewater.synopses.single import SingleSynopsis

DEFAULT_BINS = 64
MAX_BINS = 1 << 20  # limit: memory of a histogram


class EquiWidthStack(RowStack):
    """A histogram of `bins` bins over [low, high] per group.

    The counters of a group are: below the range, the bins, above the range, NaN.
    """

    kind: ClassVar[str] = "equi_width"
    properties: ClassVar[Properties] = Properties(linear=True)
    questions: ClassVar[Questions] = (Count, Range, Rank, Quantile)
    required: ClassVar[tuple[str, ...]] = ("low", "high", "bins")
    carried: ClassVar[tuple[str, ...]] = ("level",)
    arrays: ClassVar[dict[str, tuple[str, float]]] = {}
    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout.of(field("level", "<i8", 1), *row_fields("<i8", least=0, most=MAX_COUNT, counts=True)),
    )

    def __init__(self, groups: int = 0, *, low: float, high: float, bins: int = DEFAULT_BINS, level: int = 0) -> None:
        for name, end in (("low", low), ("high", high)):
            if isinstance(end, bool) or not isinstance(end, int | float) or not math.isfinite(end):
                raise InvalidRequest(name, end, "a finite number")
        self.bins = check_whole("bins", bins, 1, MAX_BINS)
        self.low, self.high = float(low), float(high)
        valid = low < high and math.isfinite(self.high - self.low)
        self._finest = np.linspace(self.low, self.high, self.bins + 1) if valid else np.zeros(2)
        # The number of bins per unit finds the bin of a value. It overflows if the range is below about 1e-306.
        per_unit = self.bins / (self.high - self.low) if valid else math.inf
        if not math.isfinite(per_unit) or not (np.diff(self._finest) > 0).all():
            accepted = f"a number above low={low}, so that {bins} bins have a finite width above 0"
            raise InvalidRequest("high", high, accepted)
        super().__init__(groups)
        self.level = check_whole("level", level, 0, halvings(bins))
        self._set_row((self.columns + 3,), np.int64)

    @staticmethod
    def state_bytes(parameters: Mapping[str, Any]) -> int:
        """Returns the memory of one group."""
        return int(parameters["bins"] * 8)

    @property
    def columns(self) -> int:
        """The current number of bins: halved per level."""
        return self.bins >> self.level

    @property
    def edges(self) -> FloatArray:
        """The edges of the bins, shape (columns + 1,)."""
        return self._finest[:: 1 << self.level]

    @property
    def counts(self) -> IntArray:
        """A view of the counters, shape (groups, columns + 3)."""
        return self.table()

    def update(self, codes: IntArray, values: npt.NDArray[Any], *, times: IntArray | None = None) -> None:
        """Adds a batch of integers or floats; integers count as the nearest float64."""
        width = self.columns + 3
        for at in range(0, len(values), CHUNK):
            chunk = slice(at, at + CHUNK)
            cells = codes[chunk] * width + self._find(values[chunk].astype(np.float64, copy=False))
            if self.counts.size <= 4 * CHUNK:
                self.counts[:] += np.bincount(cells, minlength=self.counts.size).reshape(self.counts.shape)
            else:
                np.add.at(self._rows.reshape(-1), cells, 1)

    def _find(self, values: FloatArray) -> IntArray:
        """Returns the counter of each value: 0 below, 1 … columns for bins, then above, then NaN."""
        edges, columns = self.edges, self.columns
        with np.errstate(over="ignore", invalid="ignore"):
            guess = np.floor((values - self.low) * (columns / (self.high - self.low)))
            found = np.clip(np.where(np.isnan(guess), 0, guess), 0, columns - 1).astype(np.int64)
        found -= (values < edges[found]) & (found > 0)
        found += (values >= edges[found + 1]) & (found < columns - 1)
        found += 1
        found[values < self.low] = 0
        found[values > self.high] = columns + 1
        found[values != values] = columns + 2
        return found

    def merge(self, other: Self, codes: IntArray) -> None:
        self._require_equal_parameters(other)
        self.counts[codes] += other.counts

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the answer per group, without NaN values; the default question is the number of values."""
        self.check(question)
        n = self.counts[:, :-1].sum(axis=1)
        match question:
            case Range(low, high):
                return self._range(check_not_nan("lo", low), check_not_nan("hi", high))
            case Quantile(q):
                return self._quantiles(check_quantile(q), n)
            case Rank(x):
                counted = self._range(-math.inf, check_not_nan("x", x))
                with np.errstate(invalid="ignore"):
                    value, lower, upper = (e / n for e in (counted.value, counted.lower, counted.upper))
                return Estimates(value, lower, upper, 1.0, self.kind)
        return Estimates.exact(n)

    def shown(self, asked: Question | None = None) -> tuple[Shape, ...]:
        rows, counts = len(self), self.counts
        ends = {"from": self.edges[:-1], "to": self.edges[1:]}
        buckets = ShownList(
            "buckets",
            np.repeat(np.arange(rows), self.columns),
            {name: pa.array(np.tile(values, rows)) for name, values in ends.items()},
            Estimates.exact(counts[:, 1:-2].reshape(-1)),
            Range(-math.inf, math.inf),
            True,
        )
        outside = (("below", 0), ("above", -2), ("nan", -1))
        numbers = (ShownNumber(name, counts[:, at].astype(np.float64), True) for name, at in outside)
        return (ShownInterval("count", Count(), whole=True), buckets, *numbers)

    def _cells(self) -> tuple[FloatArray, FloatArray]:
        """Returns the lower and upper ends of all counters except the counter of NaN."""
        ends = np.concatenate([[-np.inf], self.edges, [np.inf]])
        return ends[:-1], ends[1:]

    def _range(self, low: float, high: float) -> Estimates:
        """Returns the number of values in [low, high].

        The lower bound counts full bins, the upper bound touched bins. The estimate assumes a uniform distribution
        within a bin.
        """
        lowest, highest = self._cells()
        # the last bin includes its upper edge, and so does the counter above
        closed = np.arange(len(lowest)) >= self.columns
        inside = (low <= lowest) & (high >= highest)
        touched = (high >= lowest) & np.where(closed, low <= highest, low < highest)
        touched[-1] = high > self.high  # values above the range are above its upper end
        touched &= low <= high
        inside &= touched
        with np.errstate(invalid="ignore"):
            fraction = (np.clip(high, lowest, highest) - np.clip(low, lowest, highest)) / (highest - lowest)
        partly = touched & np.isfinite(highest - lowest)
        fraction = np.where(inside, 1.0, np.where(partly, np.clip(fraction, 0, 1), 0.0))
        counts = self.counts[:, :-1]
        value, lower, upper = (
            np.asarray(counts @ weight.astype(np.float64), np.float64) for weight in (fraction, inside, touched)
        )
        return Estimates(value, lower, upper, 1.0, self.kind)

    def _quantiles(self, q: float, n: IntArray) -> Estimates:
        """Returns the value with rank ⌊q·(n - 1)⌋, between the edges of its bin."""
        counts = self.counts[:, :-1]
        running = np.cumsum(counts, axis=1)
        rank = np.floor(q * np.maximum(n - 1, 0)).astype(np.int64)
        found = np.minimum((running <= rank[:, None]).sum(axis=1), counts.shape[1] - 1)
        lowest, highest = self._cells()
        rows = np.arange(len(self))
        within = rank - (running[rows, found] - counts[rows, found])
        fraction = (within + 0.5) / np.maximum(counts[rows, found], 1)
        lower, upper = lowest[found], highest[found]
        with np.errstate(invalid="ignore"):
            interpolated = lower * (1 - fraction) + upper * fraction
        inner = np.where(found == 0, self.low, np.where(np.isinf(upper), self.high, interpolated))
        value, lower, upper = (np.where(n > 0, e, np.nan) for e in (inner, lower, upper))
        return Estimates(value, lower, upper, 1.0, self.kind)

    def _check_rows(self) -> None:
        if self.counts.sum(dtype=np.float64) > MAX_COUNT:
            raise ValueError("counts out of range")


class EquiWidthHistogram(SingleSynopsis[EquiWidthStack]):
    """Counts in `bins` bins of equal width over [low, high], and of values outside.

    Args:
        low, high: the range. Only histograms of equal range and bins merge.
        bins: the number of bins.

    >>> from edgewater.synopses import Range
    >>> scores = EquiWidthHistogram(0, 10, bins=5)
    >>> scores.update([1, 3, 3, 9])
    >>> scores.counts.tolist()
    [1, 2, 0, 0, 1]
    >>> found = scores.query(Range(3, 4))  # a part of a bin
    >>> found.value, found.lower, found.upper
    (1.0, 0.0, 2.0)
    """

    stack_type = EquiWidthStack

    def __init__(self, low: float, high: float, bins: int = DEFAULT_BINS) -> None:
        super().__init__(EquiWidthStack(1, low=low, high=high, bins=bins))

    @property
    def edges(self) -> FloatArray:
        """The edges of the bins, shape (bins + 1,)."""
        return self.stack.edges.copy()

    @property
    def counts(self) -> IntArray:
        """The number of values per bin."""
        return self.stack.counts[0, 1:-2].copy()

    @property
    def outside(self) -> dict[str, int]:
        """The numbers of values ``below`` the range, ``above`` it, and ``nan``."""
        below, above, nan = self.stack.counts[0, [0, -2, -1]].tolist()
        return {"below": below, "above": above, "nan": nan}


def _make(parameters: Parameters, _: pa.DataType | None) -> EquiWidthStack:
    values = dict(parameters)
    try:
        return EquiWidthStack(low=values["lo"], high=values["hi"], bins=values["buckets"])
    except InvalidRequest as exc:
        names = {"low": "lo", "high": "hi", "bins": "buckets"}
        accepted = exc.accepted.replace("low=", "lo=").replace("bins", "buckets")
        raise InvalidRequest(names.get(exc.field, exc.field), exc.value, accepted, exc.reason) from exc


register_stack(
    EquiWidthStack,
    "equi_width",
    "histogram",
    make=_make,
    parameters={
        "lo": Parameter.number(REQUIRED),
        "hi": Parameter.number(REQUIRED),
        "buckets": Parameter.whole(DEFAULT_BINS, 1, MAX_BINS),
    },
)
