"""Exact aggregates per group: count, sum, min, max, mean, variance.

Sums of integers are exact, even beyond int64. Sums of floats are exact until an answer rounds them. Variances merge by
the pairwise update of Chan, Golub and LeVeque (1979), which avoids the cancellation of sums of squares.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.synopses.array_stack import ArrayStack, keep_better
from edgewater.synopses.base import (
    ITEM_TYPES,
    BoolArray,
    Count,
    Estimates,
    FloatArray,
    IntArray,
    Maximum,
    Mean,
    Minimum,
    Properties,
    Question,
    Questions,
    Sum,
    Variance,
)
from edgewater.synopses.encoding.codec import ArrayRoles
from edgewater.synopses.encoding.layout import Layout, count, field
from edgewater.synopses.exact import float_sums
from edgewater.synopses.exact.float_sums import FloatSums, touched, two_sum, weighted_counts
from edgewater.synopses.registry import Function, Parameters, register_function, register_kind
from edgewater.synopses.shapes import Shape, ShownInterval
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

_LINEAR = Properties(linear=True)
_PER_GROUP = ArrayRoles(0)

S = TypeVar("S", bound=ArrayStack)
_MAX_QUANTUM = 2.0**62  # format: of int64
_LARGEST_CUT = 2.0**900  # derived: multiples below it do not overflow
_HALF = 32  # format: half of int64
FEW = 16  # measured: bench.synopses
"""A batch with fewer than one record per this many groups is summed over its own groups only."""
_ROWS = 1 << 20  # derived: the lower halves of so many rows add up to less than 2^53

WideSums = tuple[IntArray, IntArray]
"""Sums of int64 in 128 bits, as low word and carry per group: ``low + carry * 2^64``, low in [-2^63, 2^63)."""


def wide_sums(codes: IntArray, values: npt.NDArray[Any], groups: int) -> WideSums:
    """Returns the exact sum of the values of each group."""
    low, carry = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    for at in range(0, len(values), _ROWS):
        # bincount sums in float64, which is exact only below 2^53. So the two 32-bit halves are summed separately.
        chunk, of = values[at : at + _ROWS], codes[at : at + _ROWS]
        lower = np.bincount(of, chunk & 0xFFFFFFFF, groups).astype(np.int64)
        upper = np.bincount(of, chunk >> _HALF, groups).astype(np.int64) + (lower >> _HALF)
        # The remaining additions use 64 bits. The upper half of `upper`, rounded, is the carry.
        wraps = (upper + (1 << (_HALF - 1))) >> _HALF
        add_wide((low, carry), (((upper - (wraps << _HALF)) << _HALF) | (lower & 0xFFFFFFFF), wraps))
    return low, carry


def add_wide(sums: WideSums, more: WideSums, at: Any = slice(None)) -> None:
    """Adds `more` to `sums` in place, at distinct positions `at`."""
    (low, carry), (more_low, more_carry) = sums, more
    low_before = low[at]
    total = low_before + more_low  # arrays wrap around silently
    # The addition wrapped if both operands have one sign and the sum has the other: down by 2^64 if they are positive.
    wrapped = ((low_before ^ total) & (more_low ^ total)) < 0
    low[at] = total
    carry[at] += more_carry + np.where(wrapped, np.where(total < 0, 1, -1), 0)


def wide_as_float(sums: WideSums) -> FloatArray:
    """Returns float64: the nearest number if the carry is 0, otherwise within one unit in the last place."""
    low, carry = sums
    return np.asarray(low + carry * 2.0**64, np.float64)


def wide_as_integers(sums: WideSums) -> pa.Array:
    """Returns the sums as int64, or as decimal128(38, 0) if one exceeds int64."""
    low, carry = sums
    if not carry.any():
        return pa.array(low.copy())
    exact = [(high << 64) + rest for high, rest in zip(carry.tolist(), low.tolist(), strict=True)]
    return pa.array([Decimal(total) for total in exact], pa.decimal128(38, 0))


class CountStack(ArrayStack):
    """Records, or non-null values, per group."""

    kind = "count"
    properties = _LINEAR
    questions: ClassVar[Questions] = (Count,)
    arrays = {"n": ("<i8", 0)}
    layouts = (Layout.of(count("n")),)
    stacking = _PER_GROUP

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        self._view("n")[:] += np.bincount(codes, minlength=self._length)

    def merge(self, other: Self, codes: IntArray) -> None:
        np.add.at(self._view("n"), codes, other._view("n"))

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        return Estimates.exact_integers(pa.array(self._view("n").copy()))

    def shown(self, asked: Question | None = None) -> tuple[Shape, ...]:
        return (ShownInterval(question=asked, whole=True),)

    def change(self, sent: FloatArray) -> FloatArray:
        return np.asarray(self._view("n"), np.float64)

    def advance(self, sent: FloatArray) -> FloatArray:
        return np.asarray(sent + self._view("n"))

    def cut(self, quantum: float) -> Self:
        return _cut(self, "n", quantum)


class SumStack(ArrayStack):
    """Sum per group; no answer where there is no value."""

    properties = _LINEAR
    questions: ClassVar[Questions] = (Sum, Count)
    arrays = {"n": ("<i8", 0)}

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        counts = np.bincount(codes, minlength=self._length)
        self._view("n")[:] += counts
        self._add(codes, values, counts)

    def _add(self, codes: IntArray, values: npt.NDArray[Any], counts: IntArray) -> None:
        raise NotImplementedError

    def _total(self) -> FloatArray:
        """Returns the nearest float64 of each sum."""
        raise NotImplementedError

    def _sums(self, present: BoolArray) -> Estimates:
        raise NotImplementedError

    def merge(self, other: Self, codes: IntArray) -> None:
        raise NotImplementedError

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        if isinstance(question, Count):
            return Estimates.exact_integers(pa.array(self._view("n").copy()))
        return self._sums(self._view("n") > 0)

    def change(self, sent: FloatArray) -> FloatArray:
        return self._total()

    def advance(self, sent: FloatArray) -> FloatArray:
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(sent + self._total())


class IntegerSumStack(SumStack):
    """Exact sums of int64, in 128 bits.

    The message has the array of carries only if a carry is not 0, which is rare.
    """

    kind = "integer_sum"
    arrays = {"n": ("<i8", 0), "sum": ("<i8", 0), "carry": ("<i8", 0)}
    layouts = (Layout.of(count("n"), field("sum")), Layout.of(count("n"), field("sum"), field("carry")))
    stacking = _PER_GROUP

    def shown(self, asked: Question | None = None) -> tuple[Shape, ...]:
        return (ShownInterval(question=asked, whole=True),)

    def _add(self, codes: IntArray, values: npt.NDArray[Any], counts: IntArray) -> None:
        if FEW * len(codes) > self._length:
            add_wide(self.wide(), wide_sums(codes, values, self._length))
            return
        at, codes = np.unique(codes, return_inverse=True)
        add_wide(self.wide(), wide_sums(codes, values, len(at)), at)

    def wide(self) -> WideSums:
        return self._view("sum"), self._view("carry")

    def _total(self) -> FloatArray:
        return wide_as_float(self.wide())

    def cut(self, quantum: float) -> Self:
        return _cut(self, "sum", quantum)

    def _sums(self, present: BoolArray) -> Estimates:
        return Estimates.exact_integers(wide_as_integers(self.wide()), present)

    def merge(self, other: Self, codes: IntArray) -> None:
        np.add.at(self._view("n"), codes, other._view("n"))
        low, carry = other.wide()
        add_wide(self.wide(), wide_sums(codes, low, self._length))
        if carry.any():
            np.add.at(self._view("carry"), codes, carry)

    def to_message(self) -> SynopsisMessage:
        message = super().to_message()
        if not self._view("carry").any():
            del message.arrays[-1]
        return message

    @classmethod
    def _decoded(cls, given: dict[str, Any], arrays: list[Any]) -> Self:
        return super()._decoded(given, [*arrays, np.zeros_like(arrays[1])][:3])


def _cut(stack: S, name: str, quantum: float) -> S:
    """`DivisibleSum.cut` of an array of integers.

    In two's complement the low bits are the remainder of negative numbers too.
    """
    rest = stack.take(np.zeros(0, np.int64))
    rest.grow(len(stack))
    mask = int(min(max(quantum, 1.0), _MAX_QUANTUM)) - 1
    rest._view(name)[:] = stack._view(name) & mask
    stack._view(name)[:] -= rest._view(name)
    return rest


class _FloatSumsStack(ArrayStack):
    """A stack with an exact sum of float64 per group besides its arrays."""

    def __init__(self, groups: int = 0) -> None:
        super().__init__(groups)
        self._totals = FloatSums(groups)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._totals.nbytes

    def grow(self, groups: int) -> None:
        super().grow(groups)
        self._totals.grow(groups)

    def take(self, groups: IntArray) -> Self:
        result = super().take(groups)
        result._totals = self._totals.take(groups)
        return result

    def reset(self, groups: IntArray) -> None:
        super().reset(groups)
        self._totals.reset(groups)

    def to_message(self) -> SynopsisMessage:
        message = super().to_message()
        message.arrays.extend(self._totals.to_arrays(self._length))
        return message

    @classmethod
    def _decoded(cls, given: dict[str, Any], arrays: list[Any]) -> Self:
        result = super()._decoded(given, arrays)
        result._totals = FloatSums.from_arrays(arrays[len(cls.arrays) :], cls.kind)
        return result

    def _add(self, codes: IntArray, values: npt.NDArray[Any], counts: IntArray) -> None:
        if values.dtype.kind == "f":
            self._totals.add_values(codes, values, counts)
        elif len(values):
            at = touched(counts)
            self._totals.add(at, [term[at] for term in integer_terms(codes, values, counts)])


def integer_terms(codes: IntArray, values: npt.NDArray[Any], counts: IntArray) -> list[FloatArray]:
    """Returns float64 arrays that add up to the exact sum of each group's int64 values."""
    largest = max(int(values.max()), -int(values.min()))
    if largest * int(counts.max()) < 1 << 53:
        return [weighted_counts(codes, values, len(counts))]
    low, carry = wide_sums(codes, values, len(counts))
    return [np.ldexp(carry, 64), np.ldexp(low >> _HALF, _HALF), (low & 0xFFFFFFFF).astype(np.float64)]


class FloatSumStack(_FloatSumsStack, SumStack):
    """Sums of float64, exact until they are rounded in an answer."""

    kind = "float_sum"
    layouts = float_sums.layouts(count("n"))
    stacking = _PER_GROUP

    def _total(self) -> FloatArray:
        return self._totals.rounded(self._length)

    def _sums(self, present: BoolArray) -> Estimates:
        value, rounding = self._totals.rounded_with_error(self._length)
        return Estimates.exact_floats(value, present, rounding)

    def merge(self, other: Self, codes: IntArray) -> None:
        np.add.at(self._view("n"), codes, other._view("n"))
        self._totals.merge(other._totals, codes)

    def cut(self, quantum: float) -> Self:
        total = self._total()
        with np.errstate(over="ignore", invalid="ignore"):
            steps = np.floor(total / quantum)
            multiples = steps * quantum + 0.0
        whole = np.flatnonzero(~((np.abs(steps) < 2.0**53) & (np.abs(total) < _LARGEST_CUT)))
        divided = np.setdiff1d(np.arange(len(self)), whole)
        rest = self.take(np.arange(len(self)))
        rest._view("n")[:] = 0
        rest._totals.reset(whole)
        rest._totals.add(divided, [0.0 - multiples[divided]])
        self._totals.reset(divided)
        self._totals.add(divided, [multiples[divided]])
        return rest


class ExtremumStack(ArrayStack):
    """The smallest or the largest value per group; NaN if any value is NaN.

    The empty value of ``best`` also stands for "nothing was sent" in `change` and `advance`.
    """

    properties = Properties(idempotent=True)
    better: ClassVar[np.ufunc]
    stacking = _PER_GROUP

    @property
    def unsent(self) -> float:
        """F of a group of which nothing was sent."""
        return self.arrays["best"][1]

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        best = self._view("best")
        with np.errstate(invalid="ignore"):  # NaN propagates
            self.better.at(best, codes, _one_zero(values, best.dtype))
        self._view("n")[:] |= np.bincount(codes, minlength=self._length) > 0
        _one_nan(best)

    def merge(self, other: Self, codes: IntArray) -> None:
        best = self._view("best")
        with np.errstate(invalid="ignore"):
            keep_better(self.better, best, codes, other._view("best"))
        _one_nan(best)
        self._view("n")[codes[other._view("n")]] = True

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        best, present = self._view("best"), self._view("n")
        if best.dtype.kind == "i":
            return Estimates.exact_integers(pa.array(best.copy()), present.copy())
        return Estimates.exact_floats(best, present.copy())

    def advance(self, sent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        with np.errstate(invalid="ignore"):
            return np.asarray(self.better(sent, self._view("best")))

    def change(self, sent: npt.NDArray[Any]) -> FloatArray:
        """Returns the change.

        It is infinite if nothing was sent of a group, since another edge may have sent any value. So such a group is
        always sent once. The exception is a maximum of 0 or more, which is its own change. The edge reports it as
        `largest_unsent`, which bounds the maximum of such a group at the center.
        """
        best, combined = self._view("best"), self.advance(sent)
        change = np.where(combined == sent, 0.0, _difference(combined, sent))
        return np.where((sent == self.unsent) & self._view("n"), self._first_change(best), change)

    @staticmethod
    def _first_change(best: npt.NDArray[Any]) -> FloatArray:
        raise NotImplementedError


def _one_zero(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return values + 0.0 if dtype.kind == "f" else values  # -0.0 + 0.0 is 0.0


def _one_nan(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Gives every NaN, in place, the same bits. NaN of different operations and processors have different bits."""
    if values.dtype.kind == "f":
        values[np.isnan(values)] = np.nan
    return values


def _difference(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> FloatArray:
    if left.dtype.kind == "f":
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(left - right, np.float64)
    # Differences of int64 need 65 bits: an unsigned number and the sign.
    larger, smaller = np.maximum(left, right), np.minimum(left, right)
    size: FloatArray = (larger.view(np.uint64) - smaller.view(np.uint64)).astype(np.float64)
    return np.where(left >= right, size, -size)


_FLOAT_EXTREMUM, _INTEGER_EXTREMUM = (Layout.of(field("n", "|b1"), field("best", of)) for of in ("<f8", "<i8"))


class MinStack(ExtremumStack):
    kind = "min"
    better = np.minimum
    questions: ClassVar[Questions] = (Minimum,)
    arrays = {"n": ("|b1", False), "best": ("<f8", np.inf)}
    layouts = (_FLOAT_EXTREMUM,)

    @staticmethod
    def _first_change(best: npt.NDArray[Any]) -> FloatArray:
        return np.full(len(best), -np.inf)


class MaxStack(ExtremumStack):
    kind = "max"
    better = np.maximum
    questions: ClassVar[Questions] = (Maximum,)
    arrays = {"n": ("|b1", False), "best": ("<f8", -np.inf)}
    layouts = (_FLOAT_EXTREMUM,)

    @staticmethod
    def _first_change(best: npt.NDArray[Any]) -> FloatArray:
        return np.where(best < 0, np.inf, best)


class IntegerMinStack(MinStack):
    """The smallest int64 per group, as int64."""

    kind = "integer_min"
    arrays = {"n": ("|b1", False), "best": ("<i8", (1 << 63) - 1)}
    layouts = (_INTEGER_EXTREMUM,)


class IntegerMaxStack(MaxStack):
    """The largest int64 per group, as int64."""

    kind = "integer_max"
    arrays = {"n": ("|b1", False), "best": ("<i8", -(1 << 63))}
    layouts = (_INTEGER_EXTREMUM,)


class VarianceStack(_FloatSumsStack):
    """Sample variance per group, from a count, the exact sum, and the sum of squared deviations from the mean (M2).

    All terms of M2 are positive, and means have 104 bits, so that nothing cancels: rounding adds an error of at most
    `_VARIANCE_ERROR` times the variance, per value.
    """

    kind = "variance"
    properties = Properties()
    questions: ClassVar[Questions] = (Variance, Mean, Count)
    arrays = {"n": ("<i8", 0), "m2": ("<f8", 0.0)}
    layouts = float_sums.layouts(count("n"), field("m2", "<f8"))

    @classmethod
    def _decoded(cls, given: dict[str, Any], arrays: list[Any]) -> Self:
        result = super()._decoded(given, arrays)
        if (result._view("m2") < 0.0).any():
            raise ValueError("a sum of squares is below 0")
        return result

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        counts = np.bincount(codes, minlength=self._length)
        batch = type(self)(self._length)
        batch._view("n")[:] = counts
        batch._add(codes, values, counts)
        high, low = batch._totals.means(counts, slice(0, self._length))
        with np.errstate(over="ignore", invalid="ignore"):  # squares overflow to infinity, infinities give NaN
            m2 = weighted_counts(codes, _deviations(values, high[codes], low[codes]) ** 2, self._length)
            # Deviations of equal values may result from rounding the mean. Deviations of different values are far
            # larger.
            batch._view("m2")[:] = np.where(m2 < counts * (_NO_DEVIATION * high) ** 2, 0.0, m2)
        at = np.flatnonzero(counts)
        self.merge(batch.take(at) if len(at) < self._length else batch, at)

    def merge(self, other: Self, codes: IntArray) -> None:
        n, theirs = self._view("n")[codes], other._view("n")
        total = n + theirs
        with np.errstate(over="ignore", invalid="ignore"):
            high, low = self._totals.means(n, codes)
            other_high, other_low = other._totals.means(theirs, slice(0, len(other)))
            delta = (other_high - high) + (other_low - low)
            delta = np.where(np.abs(delta) < _NO_DEVIATION * np.abs(high), 0.0, delta)
            both = (n > 0) & (theirs > 0)
            moved = np.where(both, delta * delta * (n * (theirs / np.maximum(total, 1))), 0.0)
            self._view("m2")[codes] += other._view("m2") + moved
        self._totals.merge(other._totals, codes)
        self._view("n")[codes] = total

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        n = self._view("n")
        if isinstance(question, Count):
            return Estimates.exact_integers(pa.array(n.copy()))
        if isinstance(question, Mean):
            return _means(self._totals, n)
        with np.errstate(invalid="ignore"):
            variance = self._view("m2") / np.maximum(n - 1, 1)
            rounding = variance * ((n + 4) * _VARIANCE_ERROR)
            mean, _ = self._totals.means(n, slice(0, len(n)))
            tiny = (variance < _TINY) & (np.abs(mean) < math.sqrt(_TINY))  # squares underflow
            rounding = np.where(tiny, rounding + (n + 4) * _LEAST_FLOAT, rounding)
            unknown = np.where(self._totals.are_odd(len(n)), 0.0, np.inf)
            rounding = np.where(np.isfinite(variance), rounding, unknown)
        return Estimates.exact_floats(variance, n > 1, rounding)


_TINY = 1e-260  # derived: squares of smaller numbers underflow
_LEAST_FLOAT = 5e-324  # format: of float64
_VARIANCE_ERROR = 2.0**-49  # derived: a few roundings of 2^-53
"""Bound of the relative rounding error of a variance, per value. Each value takes part in a few roundings of 2^-53."""
_NO_DEVIATION = 2.0**-80  # derived: the means have 104 bits
"""Different float64 values differ from their mean by more than this fraction of the mean."""


def _deviations(values: npt.NDArray[Any], high: FloatArray, low: FloatArray) -> FloatArray:
    """Returns each value's difference from the mean ``high + low``."""
    if values.dtype.kind == "f" or (values.min(initial=0) > -(1 << 53) and values.max(initial=0) < 1 << 53):
        return np.asarray((values - high) - low, np.float64)
    # float64 does not represent larger integers exactly, but both halves of each integer
    upper = (values >> _HALF) * 2.0**_HALF
    return np.asarray(((upper - high) + (values & 0xFFFFFFFF)) - low, np.float64)


def _means(totals: FloatSums, counts: IntArray) -> Estimates:
    high, low = totals.means(counts, slice(0, len(counts)))
    with np.errstate(invalid="ignore"):
        value, rest = two_sum(high, low)
        value = np.where(np.isfinite(high), value, high)
        exact = (low == 0.0) & ~totals.are_rounded(len(counts))
        bits = 2.0**-52 if totals.huge is not None else 2.0**-100
        rounding = np.where(exact, 0.0, np.abs(rest) + np.abs(high) * bits + _LEAST_FLOAT)
        tiny = (np.abs(high) < _TINY) & (totals.rounded(len(counts)) != 0.0)  # errors of products underflow
        rounding = np.where(tiny, np.abs(high) * 2.0**-52 + _LEAST_FLOAT, rounding)
    rounding = np.where(np.isfinite(value), rounding, np.where(totals.are_odd(len(counts)), 0.0, np.inf))
    return Estimates.exact_floats(value, counts > 0, rounding)


class MeanStack(_FloatSumsStack):
    """Mean per group, from a count and an exact sum."""

    kind = "mean"
    properties = _LINEAR
    questions: ClassVar[Questions] = (Mean, Sum, Count)
    arrays = {"n": ("<i8", 0)}
    layouts = float_sums.layouts(count("n"))
    stacking = _PER_GROUP

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        counts = np.bincount(codes, minlength=self._length)
        self._view("n")[:] += counts
        self._add(codes, values, counts)

    def merge(self, other: Self, codes: IntArray) -> None:
        np.add.at(self._view("n"), codes, other._view("n"))
        self._totals.merge(other._totals, codes)

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        n = self._view("n")
        if isinstance(question, Count):
            return Estimates.exact_integers(pa.array(n.copy()))
        if isinstance(question, Sum):
            value, rounding = self._totals.rounded_with_error(self._length)
            return Estimates.exact_floats(value, n > 0, rounding)
        return _means(self._totals, n)


def _sum(_: Parameters, argument: pa.DataType | None) -> SumStack:
    return IntegerSumStack() if argument is not None and pa.types.is_integer(argument) else FloatSumStack()


def _min(_: Parameters, argument: pa.DataType | None) -> MinStack:
    return IntegerMinStack() if argument is not None and pa.types.is_integer(argument) else MinStack()


def _max(_: Parameters, argument: pa.DataType | None) -> MaxStack:
    return IntegerMaxStack() if argument is not None and pa.types.is_integer(argument) else MaxStack()


for _stack in (
    CountStack,
    IntegerSumStack,
    FloatSumStack,
    MinStack,
    MaxStack,
    IntegerMinStack,
    IntegerMaxStack,
    MeanStack,
    VarianceStack,
):
    register_kind(_stack)
register_function(Function("count", lambda *_: CountStack(), "optional", ITEM_TYPES, error="sum", exact=True))
register_function(Function("sum", _sum, error="sum", exact=True))
register_function(Function("min", _min, error="extremum", exact=True), "minimum")
register_function(Function("max", _max, error="extremum", exact=True), "maximum")
register_function(Function("mean", lambda *_: MeanStack(), exact=True), "avg", "average")
register_function(Function("var", lambda *_: VarianceStack(), exact=True), "variance", "var_samp")
