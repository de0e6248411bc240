"""Exact aggregates per group: count, sum, min, max, mean, variance.

Integer sums are exact, beyond int64 too; float sums are float64. Means and variances merge by the pairwise
update of Chan, Golub and LeVeque (1979), which avoids the cancellation of sums of squares.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.synopses.array_stack import ArrayStack
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
from edgewater.synopses.encoding import codec
from edgewater.synopses.registry import Function, Parameters, register_function, register_kind
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

_LINEAR = Properties(invertible=True, linear=True)

_HALF = 32
_ROWS = 1 << 20  # rows whose lower halves add up to less than 2^53

WideSums = tuple[IntArray, IntArray]
"""Sums of int64 in 128 bits, as low word and carry per group: ``low + carry * 2^64``, low in [-2^63, 2^63)."""


def wide_sums(codes: IntArray, values: npt.NDArray[Any], groups: int) -> WideSums:
    """Returns the exact sum of the values of each group."""
    low, carry = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    for at in range(0, len(values), _ROWS):
        # bincount sums in float64, which is exact only below 2^53: the two 32-bit halves are summed apart.
        chunk, of = values[at : at + _ROWS], codes[at : at + _ROWS]
        lower = np.bincount(of, chunk & 0xFFFFFFFF, groups).astype(np.int64)
        upper = np.bincount(of, chunk >> _HALF, groups).astype(np.int64) + (lower >> _HALF)
        # The rest is 64-bit arithmetic: the upper half's own upper half, rounded, is carried.
        wraps = (upper + (1 << (_HALF - 1))) >> _HALF
        add_wide((low, carry), (((upper - (wraps << _HALF)) << _HALF) | (lower & 0xFFFFFFFF), wraps))
    return low, carry


def add_wide(sums: WideSums, more: WideSums, at: Any = slice(None)) -> None:
    """Adds `more` to `sums` in place, at distinct positions `at`."""
    (low, carry), (more_low, more_carry) = sums, more
    held = low[at]
    total = held + more_low  # arrays wrap around silently
    # The addition wrapped if both operands have one sign and the sum has the other: down by 2^64 if they are positive.
    wrapped = ((held ^ total) & (more_low ^ total)) < 0
    low[at] = total
    carry[at] += more_carry + np.where(wrapped, np.where(total < 0, 1, -1), 0)


def wide_as_float(sums: WideSums) -> FloatArray:
    """Returns float64: the nearest one where the carry is 0, otherwise within one unit in the last place."""
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

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        self._view("n")[:] += np.bincount(codes, minlength=self._length)

    def merge(self, other: Self, codes: IntArray) -> None:
        self._view("n")[codes] += other._view("n")

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        return Estimates.exact_integers(pa.array(self._view("n").copy()))

    def change(self, sent: FloatArray) -> FloatArray:
        return np.asarray(self._view("n"), np.float64)

    def advance(self, sent: FloatArray) -> FloatArray:
        return np.asarray(sent + self._view("n"))


class _CountAndSumStack(ArrayStack):
    """Count and sum per group; the sum is float64 unless a subclass overrides it."""

    properties = _LINEAR
    arrays = {"n": ("<i8", 0), "sum": ("<f8", 0.0)}

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        self._view("n")[:] += np.bincount(codes, minlength=self._length)
        self._add(codes, values)

    def _add(self, codes: IntArray, values: npt.NDArray[Any]) -> None:
        with np.errstate(invalid="ignore"):
            self._view("sum")[:] += np.bincount(codes, values, self._length)

    def merge(self, other: Self, codes: IntArray) -> None:
        self._view("n")[codes] += other._view("n")
        with np.errstate(invalid="ignore"):  # ∞ - ∞ is NaN, as it should be
            self._view("sum")[codes] += other._view("sum")


class SumStack(_CountAndSumStack):
    """Sum per group; NaN (no answer) where there is no value."""

    questions: ClassVar[Questions] = (Sum, Count)

    def _total(self) -> FloatArray:
        return np.asarray(self._view("sum"), np.float64)

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        if isinstance(question, Count):
            return Estimates.exact_integers(pa.array(self._view("n").copy()))
        return self._sums(self._view("n") > 0)

    def _sums(self, present: BoolArray) -> Estimates:
        return Estimates.exact_floats(self._total(), present)

    def change(self, sent: FloatArray) -> FloatArray:
        return self._total()

    def advance(self, sent: FloatArray) -> FloatArray:
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(sent + self._total())


class IntegerSumStack(SumStack):
    """Exact sums of int64, in 128 bits. The message has the array of carries only if a carry is not 0, which is
    rare."""

    kind = "integer_sum"
    arrays = {"n": ("<i8", 0), "sum": ("<i8", 0), "carry": ("<i8", 0)}

    def _add(self, codes: IntArray, values: npt.NDArray[Any]) -> None:
        add_wide(self._wide(), wide_sums(codes, values, self._length))

    def _wide(self) -> WideSums:
        return self._view("sum"), self._view("carry")

    def _total(self) -> FloatArray:
        return wide_as_float(self._wide())

    def _sums(self, present: BoolArray) -> Estimates:
        return Estimates.exact_integers(wide_as_integers(self._wide()), present)

    def merge(self, other: Self, codes: IntArray) -> None:
        self._view("n")[codes] += other._view("n")
        add_wide(self._wide(), other._wide(), codes)

    def to_message(self) -> SynopsisMessage:
        message = super().to_message()
        if not self._view("carry").any():
            del message.arrays[-1]
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        has_carries = len(message.arrays) == 3
        codec.open_message(message, cls.kind, cls.version, 3 if has_carries else 2)
        result = cls()
        carries = () if has_carries else (codec.encode(np.zeros_like(codec.decode(message.arrays[1]))),)
        result._load(SynopsisMessage(arrays=[*message.arrays, *carries]))
        return result


class FloatSumStack(SumStack):
    kind = "float_sum"


class ExtremumStack(ArrayStack):
    """The smallest or the largest value per group; NaN if any value is NaN.

    The empty value of ``best`` also stands for "nothing was sent" in `change` and `advance`.
    """

    properties = Properties(idempotent=True)
    better: ClassVar[np.ufunc]

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
            best[codes] = _one_nan(self.better(best[codes], other._view("best")))
        self._view("n")[codes] |= other._view("n")

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
        """Returns the change. Of a group of which nothing was sent it is infinite, since another edge may have sent any
        value; such a group is therefore always sent once. The exception is a maximum of 0 or more, which is its own
        change: what the edge reports as `largest_unsent` bounds the maximum of such a group at the center."""
        best, combined = self._view("best"), self.advance(sent)
        change = np.where(combined == sent, 0.0, _difference(combined, sent))
        return np.where((sent == self.unsent) & self._view("n"), self._first_change(best), change)

    @staticmethod
    def _first_change(best: npt.NDArray[Any]) -> FloatArray:
        raise NotImplementedError


def _one_zero(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return values + 0.0 if dtype.kind == "f" else values  # -0.0 + 0.0 is 0.0


def _one_nan(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Gives every NaN, in place, the same bits: those of NaN depend on the operation and the processor."""
    if values.dtype.kind == "f":
        values[np.isnan(values)] = np.nan
    return values


def _difference(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> FloatArray:
    if left.dtype.kind == "f":
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(left - right, np.float64)
    # Differences of int64 need 65 bits: an unsigned one and the sign.
    larger, smaller = np.maximum(left, right), np.minimum(left, right)
    size: FloatArray = (larger.view(np.uint64) - smaller.view(np.uint64)).astype(np.float64)
    return np.where(left >= right, size, -size)


class MinStack(ExtremumStack):
    kind = "min"
    better = np.minimum
    questions: ClassVar[Questions] = (Minimum,)
    arrays = {"n": ("|b1", False), "best": ("<f8", np.inf)}

    @staticmethod
    def _first_change(best: npt.NDArray[Any]) -> FloatArray:
        return np.full(len(best), -np.inf)


class MaxStack(ExtremumStack):
    kind = "max"
    better = np.maximum
    questions: ClassVar[Questions] = (Maximum,)
    arrays = {"n": ("|b1", False), "best": ("<f8", -np.inf)}

    @staticmethod
    def _first_change(best: npt.NDArray[Any]) -> FloatArray:
        return np.where(best < 0, np.inf, best)


class IntegerMinStack(MinStack):
    """The smallest int64 per group, as int64."""

    kind = "integer_min"
    arrays = {"n": ("|b1", False), "best": ("<i8", (1 << 63) - 1)}


class IntegerMaxStack(MaxStack):
    """The largest int64 per group, as int64."""

    kind = "integer_max"
    arrays = {"n": ("|b1", False), "best": ("<i8", -(1 << 63))}


class VarianceStack(ArrayStack):
    """Sample variance per group, from a count, a mean and a sum of squared deviations (M2)."""

    kind = "variance"
    properties = Properties()
    questions: ClassVar[Questions] = (Variance, Mean, Count)
    arrays = {"n": ("<i8", 0), "mean": ("<f8", 0.0), "m2": ("<f8", 0.0)}

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        values = values.astype(np.float64)
        n = np.bincount(codes, minlength=self._length)
        with np.errstate(over="ignore", invalid="ignore"):  # squares overflow to infinity, infinities give NaN
            mean: FloatArray = np.bincount(codes, values, self._length) / np.maximum(n, 1)
            m2 = np.asarray(np.bincount(codes, (values - mean[codes]) ** 2, self._length), np.float64)
        self._combine(slice(None), n, mean, m2)

    def merge(self, other: Self, codes: IntArray) -> None:
        self._combine(codes, other._view("n"), other._view("mean"), other._view("m2"))

    def _combine(self, at: Any, n: npt.NDArray[Any], mean: FloatArray, m2: FloatArray) -> None:
        held_n, held_mean, held_m2 = (self._view(k)[at] for k in ("n", "mean", "m2"))
        total = held_n + n
        weight = n / np.maximum(total, 1)
        with np.errstate(over="ignore", invalid="ignore"):
            delta = mean - held_mean
            moved = np.where((held_n > 0) & (n > 0), delta * delta * (held_n * weight), 0.0)
            # The first form keeps the mean of equal values exact; the second one handles infinite means.
            both = np.where(np.isfinite(delta), held_mean + delta * weight, held_mean * (1 - weight) + mean * weight)
            self._view("mean")[at] = np.where(n > 0, both, held_mean)
            self._view("m2")[at] = held_m2 + m2 + moved
        self._view("n")[at] = total

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        n = self._view("n")
        if isinstance(question, Count):
            return Estimates.exact(n)
        if isinstance(question, Mean):
            return Estimates.exact(np.where(n > 0, self._view("mean"), np.nan))
        return Estimates.exact(np.where(n > 1, self._view("m2") / np.maximum(n - 1, 1), np.nan))


class MeanStack(_CountAndSumStack):
    """Mean per group, from a count and a sum: linear, and exact for integers below 2^53."""

    kind = "mean"
    questions: ClassVar[Questions] = (Mean, Sum, Count)

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        n, total = self._view("n"), self._view("sum")
        if isinstance(question, Count):
            return Estimates.exact(n)
        if isinstance(question, Sum):
            return Estimates.exact(np.where(n > 0, total, np.nan))
        return Estimates.exact(np.where(n > 0, total / np.maximum(n, 1), np.nan))


def _sum(_: Parameters, argument: pa.DataType | None) -> SumStack:
    return IntegerSumStack() if argument is not None and pa.types.is_integer(argument) else FloatSumStack()


def _min(_: Parameters, argument: pa.DataType | None) -> MinStack:
    return IntegerMinStack() if argument is not None and pa.types.is_integer(argument) else MinStack()


def _max(_: Parameters, argument: pa.DataType | None) -> MaxStack:
    return IntegerMaxStack() if argument is not None and pa.types.is_integer(argument) else MaxStack()


for _stack in (
    CountStack, IntegerSumStack, FloatSumStack, MinStack, MaxStack, IntegerMinStack, IntegerMaxStack, MeanStack,
    VarianceStack,
):  # fmt: skip
    register_kind(_stack)
register_function(Function("count", lambda *_: CountStack(), "optional", ITEM_TYPES, error="sum"))
register_function(Function("sum", _sum, error="sum"))
register_function(Function("min", _min, error="extremum"), "minimum")
register_function(Function("max", _max, error="extremum"), "maximum")
register_function(Function("mean", lambda *_: MeanStack()), "avg", "average")
register_function(Function("var", lambda *_: VarianceStack()), "variance", "var_samp")
