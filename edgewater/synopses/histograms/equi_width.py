"""Histograms of equal bins over a fixed range, one row of counters per group.

Bin i holds [edge i, edge i+1), the last one its upper edge too. What lies outside the range, and NaN, is
counted apart and never dropped. Bins are found by arithmetic and then checked against the edges, so
that a value is in the very bin whose edges it lies between: the bounds of every answer are certain.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRecord, InvalidRequest
from edgewater.synopses.base import (
    Count,
    Estimates,
    FloatArray,
    IntArray,
    Properties,
    Quantile,
    Question,
    Questions,
    Rank,
    arrow_values,
)
from edgewater.synopses.encoding import codec, packed_rows
from edgewater.synopses.exact.aggregates import ArrayStack
from edgewater.synopses.items import check_whole
from edgewater.synopses.questions import Range
from edgewater.synopses.registry import REQUIRED, Function, Parameter, Parameters, register_function, register_kind
from edgewater.synopses.single import SingleSynopsis
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

DEFAULT_BINS = 64
MAX_BINS = 1 << 20
_CHUNK = 1 << 15


class EquiWidthStack(ArrayStack):
    """A histogram of `bins` bins over [low, high] per group.

    Counters of a group: below the range, the bins, above the range, NaN.
    """

    kind: ClassVar[str] = "equi_width"
    properties: ClassVar[Properties] = Properties(invertible=True, linear=True, foldable=True)
    questions: ClassVar[Questions] = (Count, Range, Rank, Quantile)
    arrays: ClassVar[dict[str, tuple[str, float]]] = {}

    def __init__(self, groups: int = 0, *, low: float, high: float, bins: int = DEFAULT_BINS, level: int = 0) -> None:
        for name, end in (("low", low), ("high", high)):
            if isinstance(end, bool) or not isinstance(end, int | float) or not math.isfinite(end):
                raise InvalidRequest(name, end, "a finite number")
        self.bins = check_whole("bins", bins, 1, MAX_BINS)
        self.low, self.high = float(low), float(high)
        sound = low < high and math.isfinite(self.high - self.low)
        self._finest = np.linspace(self.low, self.high, self.bins + 1) if sound else np.zeros(2)
        if not (np.diff(self._finest) > 0).all():
            accepted = f"a number so far above low={low} that {bins} bins have a width, which is finite"
            raise InvalidRequest("high", high, accepted)
        super().__init__(groups)
        self.level = check_whole("level", level, 0, _halvings(bins))
        self._counts: IntArray = np.zeros((groups, self.columns + 3), np.int64)

    @property
    def columns(self) -> int:
        """Bins now: halved per level."""
        return self.bins >> self.level

    @property
    def edges(self) -> FloatArray:
        """The edges of the bins, shape (columns + 1,)."""
        return self._finest[:: 1 << self.level]

    @property
    def counts(self) -> IntArray:
        """Counters per group, shape (groups, columns + 3); a view."""
        return self._counts[: len(self)]

    @property
    def parameters(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high, "bins": self.bins}

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._counts.nbytes

    def _empty(self) -> Self:
        return type(self)(low=self.low, high=self.high, bins=self.bins, level=self.level)

    def grow(self, groups: int) -> None:
        super().grow(groups)
        held = len(self._counts)
        if groups > held:
            wider = np.zeros((max(groups, held * 3 // 2), self.columns + 3), np.int64)
            wider[:held] = self._counts
            self._counts = wider

    # Updating

    def update(
        self,
        codes: IntArray,
        values: npt.NDArray[Any],
        *,
        times: IntArray | None = None,
        weights: IntArray | None = None,
    ) -> None:
        """Adds a batch of integers or floats; integers count as the nearest float64.

        Args:
            weights: int64, how often each value came (default 1); negative: how often it is taken out.
        """
        width = self.columns + 3
        for at in range(0, len(values), _CHUNK):
            part = slice(at, at + _CHUNK)
            cells = codes[part] * width + self._find(values[part].astype(np.float64, copy=False))
            if weights is not None:
                np.add.at(self._counts.reshape(-1), cells, weights[part])
            elif self.counts.size <= 4 * _CHUNK:
                self.counts[:] += np.bincount(cells, minlength=self.counts.size).reshape(self.counts.shape)
            else:
                np.add.at(self._counts.reshape(-1), cells, 1)

    def decrement(self, codes: IntArray, values: npt.NDArray[Any]) -> None:
        """Takes out values that were added before. Raises IncompatibleSynopses if some were not."""
        before = self._counts.copy()
        self.update(codes, values, weights=np.full(len(values), -1))
        self._require_counts(before)

    def _find(self, values: FloatArray) -> IntArray:
        """The counter of each value: 0 below, 1 … columns for bins, then above, then NaN."""
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

    # Merging

    def merge(self, other: Self, codes: IntArray) -> None:
        self._combine(other, codes, 1)

    def invert(self, other: Self, codes: IntArray) -> None:
        """Takes out what `merge` with the same arguments put in. Raises IncompatibleSynopses if it is not in there."""
        before = self._counts.copy(), self.level
        self._combine(other, codes, -1)
        self._require_counts(*before)

    def _combine(self, other: Self, codes: IntArray, sign: int) -> None:
        codec.require_equal(self.kind, self.parameters, other.parameters)
        if other.level < self.level:
            other = other.fold(self.level - other.level)
        elif other.level > self.level:
            folded = self.fold(other.level - self.level)
            self.level, self._counts = folded.level, folded._counts
        self.counts[codes] += sign * other.counts

    def _require_counts(self, before: IntArray, level: int | None = None) -> None:
        """Undoes a subtraction that took out what was not there: negative counts would void all bounds."""
        if (self._counts < 0).any():
            self._counts = before
            self.level = self.level if level is None else level
            raise IncompatibleSynopses(f"{self.kind}: what is to be taken out was not all put in")

    def fold(self, levels: int = 1) -> Self:
        """A copy with 2^levels times fewer bins: what would stand there had it been built so."""
        most = _halvings(self.columns)
        if not 0 <= levels <= most:
            raise InvalidRequest("level", levels, f"0 to {most}", f"{self.kind} with {self.columns} bins left")
        result = self.take(np.arange(len(self)))
        inner = result._counts[:, 1:-2].reshape(len(self), self.columns >> levels, 1 << levels).sum(axis=2)
        result._counts = np.hstack([result._counts[:, :1], inner, result._counts[:, -2:]])
        result.level += levels
        return result

    def take(self, groups: IntArray) -> Self:
        result = super().take(groups)
        result._counts = self.counts[groups]
        return result

    def reset(self, groups: IntArray) -> None:
        super().reset(groups)
        self._counts[groups] = 0

    # Asking

    def query(self, question: Question | None = None) -> Estimates:
        """The answer per group, NaN values apart; without a question, how many values there are."""
        self.check(question)
        n = self.counts[:, :-1].sum(axis=1)
        match question:
            case Range(low, high):
                return self._range(low, high)
            case Quantile(q):
                return self._quantiles(q, n)
            case Rank(x):
                counted = self._range(-math.inf, x)
                with np.errstate(invalid="ignore"):
                    value, lower, upper = (e / n for e in (counted.value, counted.lower, counted.upper))
                return Estimates(value, lower, upper, 1.0, self.kind)
        return Estimates.exact(n)

    def _cells(self) -> tuple[FloatArray, FloatArray]:
        """The lower and upper ends of all counters but NaN's."""
        ends = np.concatenate([[-np.inf], self.edges, [np.inf]])
        return ends[:-1], ends[1:]

    def _range(self, low: float, high: float) -> Estimates:
        """Full bins are certain to be in, bins that the range touches may be; spread evenly in between."""
        if low != low or high != high:
            raise InvalidRequest("lo" if low != low else "hi", math.nan, "a number")
        lowest, highest = self._cells()
        closed = np.arange(len(lowest)) >= self.columns  # the last bin's upper edge is in it; so is infinity
        inside = (low <= lowest) & (high >= highest)
        touched = (high >= lowest) & np.where(closed, low <= highest, low < highest)
        touched[-1] = high > self.high  # above the range means above its end
        touched &= low <= high
        inside &= touched
        with np.errstate(invalid="ignore"):
            part = (np.clip(high, lowest, highest) - np.clip(low, lowest, highest)) / (highest - lowest)
        part = np.where(inside, 1.0, np.where(touched & np.isfinite(highest - lowest), np.clip(part, 0, 1), 0.0))
        counts = self.counts[:, :-1]
        value, lower, upper = (
            np.asarray(counts @ share.astype(np.float64), np.float64) for share in (part, inside, touched)
        )
        return Estimates(value, lower, upper, 1.0, self.kind)

    def _quantiles(self, q: float, n: IntArray) -> Estimates:
        """The value with rank ⌊q·(n - 1)⌋, between the edges of its bin."""
        if not 0 <= q <= 1:
            raise InvalidRequest("q", q, "a number from 0 to 1, such as 0.99")
        counts = self.counts[:, :-1]
        running = np.cumsum(counts, axis=1)
        rank = np.floor(q * np.maximum(n - 1, 0)).astype(np.int64)
        found = np.minimum((running <= rank[:, None]).sum(axis=1), counts.shape[1] - 1)
        lowest, highest = self._cells()
        rows = np.arange(len(self))
        within = rank - (running[rows, found] - counts[rows, found])
        part = (within + 0.5) / np.maximum(counts[rows, found], 1)
        lower, upper = lowest[found], highest[found]
        with np.errstate(invalid="ignore"):
            spread = lower * (1 - part) + upper * part
        between = np.where(found == 0, self.low, np.where(np.isinf(upper), self.high, spread))
        some = n > 0
        value, lower, upper = (np.where(some, e, np.nan) for e in (between, lower, upper))
        return Estimates(value, lower, upper, 1.0, self.kind)

    # Bytes

    def to_message(self) -> SynopsisMessage:
        message = codec.header(self.kind, self.version, self.parameters)
        message.arrays.append(codec.encode(np.array([self.level])))
        message.arrays.extend(packed_rows.pack_rows(self.counts))
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        parameters = codec.open_message(message, cls.kind, cls.version, 1 + packed_rows.ARRAYS)
        level = codec.decode(message.arrays[0])
        try:
            result = cls(**{k: parameters[k] for k in ("low", "high", "bins")}, level=int(level[0]))
            counts = packed_rows.unpack_rows(message.arrays[1:], result.columns + 3, np.dtype("<i8"))
            if (counts < 0).any():
                raise ValueError("negative counts")
        except (KeyError, IndexError, TypeError, ValueError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and arrays do not fit: {exc}") from exc
        result._counts, result._length = counts, len(counts)
        return result


def _halvings(bins: int) -> int:
    return (bins & -bins).bit_length() - 1


class EquiWidthHistogram(SingleSynopsis[EquiWidthStack]):
    """Counts in `bins` bins of equal width over [low, high], and of what lies outside it.

    Args:
        low, high: the range. It is fixed: only histograms of equal range and bins merge.
        bins: divisible by 2 as often as it shall be folded.
    """

    stack_type = EquiWidthStack
    types: ClassVar[tuple[str, ...]] = ("int64", "float64")

    def __init__(self, low: float, high: float, bins: int = DEFAULT_BINS) -> None:
        super().__init__(EquiWidthStack(1, low=low, high=high, bins=bins))

    @property
    def edges(self) -> FloatArray:
        """The edges of the bins, one more than bins."""
        return self._stack.edges.copy()

    @property
    def counts(self) -> IntArray:
        """Values per bin."""
        return self._stack.counts[0, 1:-2].copy()

    @property
    def outside(self) -> dict[str, int]:
        """How many values were ``below`` and ``above`` the range, and how many ``nan``."""
        below, above, nan = self._stack.counts[0, [0, -2, -1]].tolist()
        return {"below": below, "above": above, "nan": nan}

    def update(self, values: Any, *, times: Any = None, weights: Any = None) -> None:
        """Adds a batch. Nulls are passed over; `times` makes no difference.

        Args:
            weights: whole numbers, how often each value came.

        Raises:
            InvalidRecord: values of another type, or weights that are no whole numbers from 0 or not as many.
        """
        if weights is None:
            super().update(values)
            return
        amounts = np.asarray(weights)
        array = arrow_values(values)
        if amounts.dtype.kind not in "iu" or amounts.shape != (len(array),) or (amounts < 0).any():
            accepted = f"{len(array)} whole numbers from 0, one per value (and no null values)"
            raise InvalidRecord("weights", f"{amounts.dtype}{amounts.shape}", accepted)
        amounts = amounts.astype(np.int64)
        self._stack.update(np.zeros(len(array), np.int64), self._columnar(array), weights=amounts)
        self.records += int(amounts.sum())

    def decrement(self, values: Any) -> None:
        """Takes out values that were added before. Raises IncompatibleSynopses if some were not."""
        columnar = self._columnar(arrow_values(values))
        self._stack.decrement(np.zeros(len(columnar), np.int64), columnar)
        self.records -= len(columnar)

    def invert(self, other: Self) -> Self:
        """This one without `other`, which was merged into it, as a new one. Raises IncompatibleSynopses."""
        codec.require_equal("synopses", self.kind, getattr(other, "kind", type(other).__name__))
        result = self.merge_many([])
        result._stack.invert(other._stack, np.zeros(1, np.int64))
        result.records -= other.records
        return result


def _make(parameters: Parameters, _: pa.DataType | None) -> EquiWidthStack:
    given = dict(parameters)
    try:
        return EquiWidthStack(low=given["lo"], high=given["hi"], bins=given["buckets"])
    except InvalidRequest as exc:
        names = {"low": "lo", "high": "hi", "bins": "buckets"}
        accepted = exc.accepted.replace("low=", "lo=").replace("bins", "buckets")
        raise InvalidRequest(names.get(exc.field, exc.field), exc.value, accepted, exc.reason) from exc


register_kind(EquiWidthStack)
register_function(
    Function(
        "equi_width",
        _make,
        parameters={
            "lo": Parameter.number(REQUIRED),
            "hi": Parameter.number(REQUIRED),
            "buckets": Parameter.whole(DEFAULT_BINS, 1, MAX_BINS),
        },
    ),
    "histogram",
)
