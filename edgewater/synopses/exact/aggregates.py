"""Exact aggregates of many groups: count, sum, min, max, mean, variance.

Integer sums are exact, also beyond int64; float sums are float64. Means and variances merge by the pairwise
update of Chan, Golub and LeVeque (1979), which does not cancel as sums of squares do.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.errors import CorruptSynopsis, InvalidRequest
from edgewater.synopses.base import (
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
from edgewater.synopses.exact import wide_sums
from edgewater.synopses.registry import Function, Parameters, register_function, register_kind
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

_LINEAR = Properties(invertible=True, linear=True)


class ArrayStack:
    """A stack whose whole state is a few arrays of shape (groups,), each with a value for "empty".

    Subclasses state `arrays` (name -> dtype, empty value) and implement `update` and `merge`.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    properties: ClassVar[Properties]
    questions: ClassVar[Questions]
    arrays: ClassVar[dict[str, tuple[str, float]]]

    def __init__(self, groups: int = 0) -> None:
        self._length = groups
        self._state: dict[str, npt.NDArray[Any]] = {
            name: np.full(max(groups, 1), empty, dtype) for name, (dtype, empty) in self.arrays.items()
        }

    def __len__(self) -> int:
        return self._length

    def _view(self, name: str) -> npt.NDArray[Any]:
        return self._state[name][: self._length]

    @property
    def parameters(self) -> dict[str, Any]:
        return {}

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._state.values())

    def grow(self, groups: int) -> None:
        if groups <= self._length:
            return
        for name, (_, empty) in self.arrays.items():
            held = self._state[name]
            if groups > len(held):
                # Doubling keeps growth amortised O(1) per group.
                wider = np.full(max(groups, 2 * len(held)), empty, held.dtype)
                wider[: self._length] = held[: self._length]
                self._state[name] = wider
        self._length = groups

    def take(self, groups: IntArray) -> Self:
        result = self._empty()
        result._length = len(groups)
        result._state = {name: self._view(name)[groups] for name in self.arrays}
        return result

    def _copied(self) -> Self:
        """A copy of the one group that there is: `take` without its checks. Arrays that are not in `arrays`, and all
        else that changes, are shared, and for the caller to copy."""
        result = copy(self)
        result._state = {name: held.copy() for name, held in self._state.items()}
        return result

    def _empty(self) -> Self:
        return type(self)()

    def reset(self, groups: IntArray) -> None:
        for name, (_, empty) in self.arrays.items():
            self._state[name][groups] = empty

    def check(self, question: Question | None) -> None:
        if question is not None and not isinstance(question, self.questions):
            able = ", ".join(q.__name__ for q in self.questions)
            raise InvalidRequest("question", question, f"one of {able}", f"{self.kind} cannot answer it")

    def to_message(self) -> SynopsisMessage:
        message = codec.header(self.kind, self.version, self.parameters)
        message.arrays.extend(codec.encode(self._view(name)) for name in self.arrays)
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        codec.open_message(message, cls.kind, cls.version, len(cls.arrays))
        result = cls()
        result._load(message)
        return result

    def _load(self, message: SynopsisMessage) -> None:
        decoded = [codec.decode(a) for a in message.arrays]
        for (name, (dtype, _)), values in zip(self.arrays.items(), decoded, strict=True):
            if values.ndim != 1 or values.dtype != np.dtype(dtype) or len(values) != len(decoded[0]):
                raise CorruptSynopsis(f"{self.kind}: array {name} is {values.dtype}{values.shape}")
            self._state[name] = values
        self._length = len(decoded[0])


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
        return Estimates.exact(self._view("n"))

    def change(self, sent: FloatArray) -> FloatArray:
        return np.asarray(self._view("n"), np.float64)

    def advance(self, sent: FloatArray) -> FloatArray:
        return np.asarray(sent + self._view("n"))


class SumStack(ArrayStack):
    """Sum per group; NaN (no answer) where no value was seen."""

    properties = _LINEAR
    questions: ClassVar[Questions] = (Sum, Count)

    def _add(self, codes: IntArray, values: npt.NDArray[Any]) -> None:
        raise NotImplementedError

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        self._view("n")[:] += np.bincount(codes, minlength=self._length)
        self._add(codes, values)

    def merge(self, other: Self, codes: IntArray) -> None:
        self._view("n")[codes] += other._view("n")
        with np.errstate(invalid="ignore"):  # ∞ - ∞ is NaN, as it should be
            self._view("sum")[codes] += other._view("sum")

    def _total(self) -> FloatArray:
        return np.asarray(self._view("sum"), np.float64)

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        if isinstance(question, Count):
            return Estimates.exact(self._view("n"))
        return Estimates.exact(np.where(self._view("n") > 0, self._total(), np.nan))

    def change(self, sent: FloatArray) -> FloatArray:
        return self._total()

    def advance(self, sent: FloatArray) -> FloatArray:
        return np.asarray(sent + self._total())


class IntegerSumStack(SumStack):
    """Exact sums of int64, in 128 bits.

    Sums beyond int64 are rare: only a stack that has one writes version 2, which has the carries behind the sums.
    """

    kind = "integer_sum"
    version = 2
    arrays = {"n": ("<i8", 0), "sum": ("<i8", 0), "carry": ("<i8", 0)}

    def _add(self, codes: IntArray, values: npt.NDArray[Any]) -> None:
        wide_sums.add(*self._wide(), *wide_sums.summed(codes, values, self._length))

    def _wide(self) -> wide_sums.Wide:
        return self._view("sum"), self._view("carry")

    def _total(self) -> FloatArray:
        return wide_sums.as_float(*self._wide())

    def merge(self, other: Self, codes: IntArray) -> None:
        self._view("n")[codes] += other._view("n")
        wide_sums.add(*self._wide(), *other._wide(), codes)

    def to_message(self) -> SynopsisMessage:
        message = super().to_message()
        if not self._view("carry").any():
            message.version = 1
            del message.arrays[-1]
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        codec.open_message(message, cls.kind, cls.version, 3 if message.version == 2 else 2)
        result = cls()
        carries = () if message.version == 2 else (codec.encode(np.zeros_like(codec.decode(message.arrays[1]))),)
        result._load(SynopsisMessage(arrays=[*message.arrays, *carries]))
        return result


class FloatSumStack(SumStack):
    kind = "float_sum"
    arrays = {"n": ("<i8", 0), "sum": ("<f8", 0.0)}

    def _add(self, codes: IntArray, values: npt.NDArray[Any]) -> None:
        with np.errstate(invalid="ignore"):
            self._view("sum")[:] += np.bincount(codes, values, self._length)


class ExtremumStack(ArrayStack):
    """The least or the greatest value per group. NaN values are passed over."""

    properties = Properties(idempotent=True)
    better: ClassVar[np.ufunc]

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        real = values == values
        if not real.all():
            codes, values = codes[real], values[real]
        self.better.at(self._view("best"), codes, values.astype(np.float64))
        self._view("n")[:] += np.bincount(codes, minlength=self._length) > 0

    def merge(self, other: Self, codes: IntArray) -> None:
        best = self._view("best")
        best[codes] = self.better(best[codes], other._view("best"))
        self._view("n")[codes] |= other._view("n")

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        return Estimates.exact(np.where(self._view("n"), self._view("best"), np.nan))

    def advance(self, sent: FloatArray) -> FloatArray:
        # The logical zero: a group of which nothing was sent counts as 0 at the center.
        pending = self._view("best")
        combined = np.where(sent == 0.0, pending, self.better(sent, pending))
        return np.where(self._view("n"), combined, sent)

    def change(self, sent: FloatArray) -> FloatArray:
        """Infinite where nothing was sent and another edge may have sent what is no bound for it: any least
        value, and a greatest one below 0. So these are always sent once. A greatest value from 0 up is
        bounded by itself, as long as no edge's greatest value of the group is below 0."""
        change = self.advance(sent) - sent
        unbounded = (sent == 0.0) & self._view("n") & self._unbounded(self._view("best"))
        return np.where(unbounded, math.copysign(np.inf, -self.arrays["best"][1]), change)

    @staticmethod
    def _unbounded(best: FloatArray) -> BoolArray:
        raise NotImplementedError


class MinStack(ExtremumStack):
    kind = "min"
    better = np.minimum
    questions: ClassVar[Questions] = (Minimum,)
    arrays = {"n": ("|b1", False), "best": ("<f8", np.inf)}

    @staticmethod
    def _unbounded(best: FloatArray) -> BoolArray:
        return np.ones(len(best), bool)


class MaxStack(ExtremumStack):
    kind = "max"
    better = np.maximum
    questions: ClassVar[Questions] = (Maximum,)
    arrays = {"n": ("|b1", False), "best": ("<f8", -np.inf)}

    @staticmethod
    def _unbounded(best: FloatArray) -> BoolArray:
        return best < 0.0


class MomentsStack(ArrayStack):
    """Count, mean and sum of squared deviations (M2) per group."""

    properties = Properties()
    arrays = {"n": ("<i8", 0), "mean": ("<f8", 0.0), "m2": ("<f8", 0.0)}

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        values = values.astype(np.float64)
        n = np.bincount(codes, minlength=self._length)
        with np.errstate(over="ignore", invalid="ignore"):  # squares beyond float64 are infinite, of infinities NaN
            mean: FloatArray = np.bincount(codes, values, self._length) / np.maximum(n, 1)
            m2 = np.asarray(np.bincount(codes, (values - mean[codes]) ** 2, self._length), np.float64)
        self._combine(slice(None), n, mean, m2)

    def merge(self, other: Self, codes: IntArray) -> None:
        self._combine(codes, other._view("n"), other._view("mean"), other._view("m2"))

    def _combine(self, at: Any, n: npt.NDArray[Any], mean: FloatArray, m2: FloatArray) -> None:
        held_n, held_mean, held_m2 = (self._view(k)[at] for k in ("n", "mean", "m2"))
        total = held_n + n
        share = n / np.maximum(total, 1)
        with np.errstate(over="ignore", invalid="ignore"):
            delta = mean - held_mean
            moved = np.where((held_n > 0) & (n > 0), delta * delta * (held_n * share), 0.0)
            # The usual form keeps the mean of equal values exact; the other one holds for infinite means.
            both = np.where(np.isfinite(delta), held_mean + delta * share, held_mean * (1 - share) + mean * share)
            self._view("mean")[at] = np.where(n > 0, both, held_mean)
            self._view("m2")[at] = held_m2 + m2 + moved
        self._view("n")[at] = total


class VarianceStack(MomentsStack):
    kind = "variance"
    questions: ClassVar[Questions] = (Variance, Mean, Count)

    def query(self, question: Question | None = None) -> Estimates:
        self.check(question)
        n = self._view("n")
        if isinstance(question, Count):
            return Estimates.exact(n)
        if isinstance(question, Mean):
            return Estimates.exact(np.where(n > 0, self._view("mean"), np.nan))
        return Estimates.exact(np.where(n > 1, self._view("m2") / np.maximum(n - 1, 1), np.nan))


class MeanStack(ArrayStack):
    """Mean per group, from a count and a sum: linear, and exact for integers below 2^53."""

    kind = "mean"
    properties = _LINEAR
    questions: ClassVar[Questions] = (Mean, Sum, Count)
    arrays = {"n": ("<i8", 0), "sum": ("<f8", 0.0)}

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        self._view("n")[:] += np.bincount(codes, minlength=self._length)
        with np.errstate(invalid="ignore"):
            self._view("sum")[:] += np.bincount(codes, values, self._length)

    def merge(self, other: Self, codes: IntArray) -> None:
        self._view("n")[codes] += other._view("n")
        with np.errstate(invalid="ignore"):
            self._view("sum")[codes] += other._view("sum")

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


for _stack in (CountStack, IntegerSumStack, FloatSumStack, MinStack, MaxStack, MeanStack, VarianceStack):
    register_kind(_stack)
register_function(
    Function("count", lambda *_: CountStack(), "optional", ("int64", "float64", "string", "bool"), error="sum")
)
register_function(Function("sum", _sum, error="sum"))
register_function(Function("min", lambda *_: MinStack(), error="extremum"), "minimum")
register_function(Function("max", lambda *_: MaxStack(), error="extremum"), "maximum")
register_function(Function("mean", lambda *_: MeanStack()), "avg", "average")
register_function(Function("var", lambda *_: VarianceStack()), "variance", "var_samp")
