"""`FloatSums`: exact sums of float64 per group, so that neither order nor cancellation changes a result.

A sum is stored as an expansion: a few float64 numbers, the *parts*, which add up to the sum exactly. Their size
decreases: each is at most half a unit in the last place of the previous part. So the first part is the sum rounded to
float64. The expansion of a number is unique, so that equal sums have equal bytes. Two parts suffice for most data; the
array has as many parts as any group needs.

Sums of a batch are exact without a loop over records. Values are split at a power of two that is so large that the
upper parts of all of a group's values add up exactly in float64. Then the lower parts are split again (Rump, Ogita and
Oishi, "Accurate floating-point summation", SIAM J. Sci. Comput. 2008, algorithm 3.2). Expansions are added as in
Shewchuk, "Adaptive precision floating-point arithmetic" (1997).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from edgewater.base.errors import CorruptSynopsis
from edgewater.synopses.array_stack import rounds
from edgewater.synopses.base import CHUNK, BoolArray, FloatArray, IntArray
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import AtMost, Field, Layout, field
from edgewater.wire.synopsis_pb2 import Array as ArrayMessage

"""Records per chunk, whose temporaries stay in the processor's cache."""
_MAX_CHUNK = 1 << 20  # derived: sums of so many numbers are exact
_HUGE = 2.0**960  # derived: larger sums may overflow
_SCALE = 2.0**-128  # derived: it brings huge numbers below _HUGE
"""Values beyond `_HUGE` have their own sum, scaled by this factor, so that it does not overflow."""
_MAX_PASSES = 100
"""Two passes are usual."""
_SPLIT = 134217729.0  # 2^27 + 1; derived: 2^27 + 1 splits float64 into halves (Dekker)

MAX_PARTS = 64
"""Parts of a sum: float64 has 2,098 bits between its largest and smallest number, and a part has 53 of them."""

_FEW_PARTS = 4  # measured: bench.synopses
_MAX_SUM = _HUGE * 2.0**55
"""The limit of a sum of 2^53 values. A few of such sums do not overflow."""

At = IntArray | slice


def layouts(*fields: Field) -> tuple[Layout, ...]:
    """Returns the layouts of a message with these fields and the arrays of `FloatSums.to_arrays`."""
    shapes = ("groups",), (AtMost(MAX_PARTS), "groups")
    sums, huge = (Field(name, ("<f8",), shapes, -_MAX_SUM, _MAX_SUM) for name in ("sums", "huge sums"))
    return Layout.of(*fields, sums), Layout.of(*fields, sums, huge, field("odd sums", "<f8"))


def two_sum(a: FloatArray, b: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns the rounded sum, and its error (Knuth)."""
    total = a + b
    rest = total - a
    return total, (a - (total - rest)) + (b - rest)


def two_product(a: FloatArray, b: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns the rounded product, and its error (Dekker); NaN as the error beyond about 1e299."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(a: FloatArray) -> tuple[FloatArray, FloatArray]:
    scaled = _SPLIT * a
    high = scaled - (scaled - a)
    return high, a - high


def weighted_counts(codes: IntArray, values: npt.NDArray[Any], groups: int) -> FloatArray:
    """Returns the sum of the values of each group, added in float64 in their order."""
    return np.asarray(np.bincount(codes, values, groups), np.float64)


def batch_terms(codes: IntArray, values: FloatArray, groups: int, most: int) -> list[FloatArray]:
    """Returns arrays, one value per group, that add up to the exact sum of each group's values.

    Args:
        values: at most `_HUGE`, no NaN.
        most: the largest number of values of a group.
    """
    terms: list[FloatArray] = []
    count_bits = math.ceil(math.log2(most + 2))
    rest = values
    while True:
        largest = max(float(rest.max(initial=0.0)), -float(rest.min(initial=0.0)))
        if largest == 0.0:
            return terms
        # Upper parts are multiples of unit·2^-53 and at most 2^-count_bits·unit: `most` of them add up exactly.
        unit = math.ldexp(1.0, math.frexp(largest)[1] + count_bits)
        upper = rest + unit
        upper -= unit
        terms.append(weighted_counts(codes, upper, groups))
        rest = rest - upper


class FloatSums:
    """Exact sums, one per group.

    Attributes:
        parts: float64 [part, group], the expansions; columns of groups that do not exist yet are 0.
        huge: sums of the values beyond `_HUGE`, times `_SCALE`; None: there are none.
        odd: float64 per group, the sum of its NaN and infinities; 0 if the group has none. None: no group has any.
    """

    __slots__ = ("huge", "odd", "parts")

    def __init__(self, groups: int = 0) -> None:
        self.parts: FloatArray = np.zeros((1, max(groups, 1)))
        self.huge: FloatSums | None = None
        self.odd: FloatArray | None = None

    @property
    def nbytes(self) -> int:
        return self.parts.nbytes + (self.huge.nbytes if self.huge else 0) + (0 if self.odd is None else self.odd.nbytes)

    def _all(self) -> list[FloatSums]:
        return [self] if self.huge is None else [self, self.huge]

    def grow(self, groups: int) -> None:
        for sums in self._all():
            old = sums.parts
            if groups > old.shape[1]:
                sums.parts = np.zeros((len(old), max(groups, 2 * old.shape[1])))
                sums.parts[:, : old.shape[1]] = old
        if self.odd is not None and len(self.odd) < self.parts.shape[1]:
            self.odd = np.concatenate([self.odd, np.zeros(self.parts.shape[1] - len(self.odd))])

    def take(self, groups: IntArray) -> FloatSums:
        result = FloatSums()
        result.parts = _trimmed(self.parts[:, groups])
        result.huge = None if self.huge is None else self.huge.take(groups)
        result.odd = None if self.odd is None else self.odd[groups]
        return result

    def reset(self, groups: IntArray) -> None:
        for sums in self._all():
            sums.parts[:, groups] = 0.0
        if self.odd is not None:
            self.odd[groups] = 0.0

    def add_values(self, codes: IntArray, values: FloatArray, counts: IntArray) -> None:
        """Adds ``values[i]`` to group ``codes[i]``; `counts`: the number of values of each group."""
        groups, at = len(counts), touched(counts)
        step = min(max(CHUNK, 4 * groups), _MAX_CHUNK)
        for begin in range(0, len(values), step):
            some, of = values[begin : begin + step], codes[begin : begin + step]
            if not (some.max() <= _HUGE and some.min() >= -_HUGE):  # false if there is a NaN
                of, some = self._add_unusual(of, some, groups)
            terms = batch_terms(of, some, groups, min(int(counts.max()), step))
            if terms:
                self.add(at, [term[at] for term in terms])

    def _add_unusual(self, codes: IntArray, values: FloatArray, groups: int) -> tuple[IntArray, FloatArray]:
        """Adds huge values, NaN and infinities; returns the other values."""
        odd = ~np.isfinite(values)
        if odd.any():
            if self.odd is None:
                self.odd = np.zeros(self.parts.shape[1])
            with np.errstate(invalid="ignore"):  # ∞ - ∞ is NaN, as it should be
                self.odd[:groups] += np.bincount(codes[odd], values[odd], groups)
            _one_nan(self.odd)
        huge = ~odd & (np.abs(values) > _HUGE)
        if huge.any():
            counts = np.bincount(codes[huge], minlength=groups)
            self._huge().add_values(codes[huge], values[huge] * _SCALE, counts)
        usual = ~(odd | huge)
        return codes[usual], values[usual]

    def _huge(self) -> FloatSums:
        if self.huge is None:
            self.huge = FloatSums(self.parts.shape[1])
        return self.huge

    def merge(self, other: FloatSums, codes: IntArray) -> None:
        """Adds `other`'s i-th sum to group ``codes[i]``."""
        counts = np.bincount(codes)
        if counts.max(initial=0) > 1:
            parts = other.parts[:, : len(codes)]
            usual = other.huge is None and other.odd is None
            if usual and np.abs(parts).max() <= _HUGE:
                # The parts of a sum are values with the same exact sum, and a sum has one normal form.
                for part in parts:
                    self.add_values(codes, part, counts)
            else:
                for at in rounds(codes):
                    self.merge(other.take(at), codes[at])
            return
        self.add(codes, list(other.parts[:, : len(codes)]))
        if other.huge is not None:
            self._huge().add(codes, list(other.huge.parts[:, : len(codes)]))
        if other.odd is not None:
            if self.odd is None:
                self.odd = np.zeros(self.parts.shape[1])
            with np.errstate(invalid="ignore"):
                self.odd[codes] += other.odd[: len(codes)]
            _one_nan(self.odd)

    def add(self, at: At, terms: Sequence[FloatArray]) -> None:
        """Adds at least one term to the groups `at`, which are distinct; exactly."""
        parts = list(self.parts[:, at])
        if len(parts) == 1 and not parts[0].any():  # the usual first batch
            parts, terms = [terms[0]], terms[1:]
        for term in terms:
            rest = term
            for i in reversed(range(len(parts))):
                rest, parts[i] = two_sum(parts[i], rest)
            parts.insert(0, rest)
        parts = _normal(parts)
        if len(parts) > len(self.parts):
            self.parts = np.concatenate([self.parts, np.zeros((len(parts) - len(self.parts), self.parts.shape[1]))])
        for i, held in enumerate(self.parts):
            held[at] = parts[i] if i < len(parts) else 0.0

    def rounded(self, groups: int) -> FloatArray:
        """Returns the nearest float64 of each of the first `groups` sums."""
        if self.huge is None and self.odd is None:
            return self.parts[0, :groups]
        return self.rounded_with_error(groups)[0]

    def rounded_with_error(self, groups: int) -> tuple[FloatArray, FloatArray]:
        """Returns the nearest float64 of each sum, and a bound of its distance to the sum.

        The bound is infinite if a finite sum exceeds float64.
        """
        parts = self.parts[:, :groups]
        value, error = parts[0].copy(), np.abs(parts[1:]).sum(axis=0) * (1 + 2.0**-50)
        if self.huge is not None:
            both, few = FloatSums(groups), self.huge.parts[0, :groups] == 0.0
            both.add(slice(0, groups), [*self.huge.parts[:, :groups], *(parts * _SCALE)])
            with np.errstate(over="ignore", invalid="ignore"):
                value = np.where(few, value, both.parts[0, :groups] / _SCALE)
                error = np.where(few, error, np.spacing(np.abs(value)))
        if self.odd is not None:
            odd = self.odd[:groups]
            value = np.where(odd != 0.0, odd, value)
        return value, np.where(np.isfinite(value), error, np.where(self.are_odd(groups), 0.0, np.inf))

    def means(self, counts: npt.NDArray[Any], at: At) -> tuple[FloatArray, FloatArray]:
        """Returns the mean of the groups `at` as an unevaluated sum of two float64: about 104 bits, or 53 of huge sums.

        Args:
            counts: the numbers of values of these groups.
        """
        parts, n = self.parts[:, at], np.maximum(counts, 1).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.huge is not None or self.odd is not None:
                parts = self.rounded(self.parts.shape[1])[None, at]
            high = parts[0] / n
            product, error = two_product(high, n)
            low = (((parts[0] - product) - error) + (parts[1] if len(parts) > 1 else 0.0)) / n
        return high, np.where(np.isfinite(low), low, 0.0)

    def are_odd(self, groups: int) -> BoolArray:
        """Returns which of the first `groups` sums are NaN or infinite because a value is."""
        return np.zeros(groups, bool) if self.odd is None else self.odd[:groups] != 0.0

    def are_rounded(self, groups: int) -> BoolArray:
        """Returns which of the first `groups` sums may differ from their nearest float64."""
        more = self.parts[1:, :groups].any(axis=0)
        return np.asarray(more if self.huge is None else more | (self.huge.parts[0, :groups] != 0.0))

    def to_arrays(self, groups: int) -> list[ArrayMessage]:
        """Returns one array, of shape (groups,), or (parts, groups) if a sum needs several parts.

        The arrays of `huge` and `odd` follow if any group has them.
        """
        huge = None if self.huge is None else _trimmed(self.huge.parts[:, :groups])
        odd = None if self.odd is None else self.odd[:groups]
        result = [_encoded(_trimmed(self.parts[:, :groups]))]
        if (huge is not None and huge.any()) or (odd is not None and (odd != 0.0).any()):
            result.append(_encoded(np.zeros((1, groups)) if huge is None else huge))
            result.append(codec.encode(np.zeros(groups) if odd is None else odd))
        return result

    @classmethod
    def from_arrays(cls, arrays: Sequence[FloatArray], kind: str) -> Self:
        """Reads the arrays of `layouts`. Raises CorruptSynopsis."""
        result = cls()
        # No sum of a batch is -0.0. For a -0.0 in a partial, the sign would depend on the order of the partials.
        result.parts = np.atleast_2d(arrays[0]) + 0.0
        if len(arrays) == 3:
            result.huge = FloatSums()
            result.huge.parts = np.atleast_2d(arrays[1]) + 0.0
            result.odd = _one_nan(arrays[2] + 0.0)
            if (np.isfinite(result.odd) & (result.odd != 0.0)).any():
                raise CorruptSynopsis(f"{kind}: a sum of infinities and NaN is finite")
        for parts in (sums.parts for sums in result._all()):
            # Overlapping parts need many passes, which take no time if there are few parts.
            if len(parts) > _FEW_PARTS and (np.abs(parts[1:]) > np.spacing(np.abs(parts[:-1]))).any():
                raise CorruptSynopsis(f"{kind}: {len(parts)} parts of a sum overlap")
        return result


def touched(counts: IntArray) -> At:
    """Returns the groups with at least one value."""
    found = np.flatnonzero(counts)
    return slice(0, len(counts)) if len(found) == len(counts) else found


def _normal(parts: list[FloatArray]) -> list[FloatArray]:
    """Returns the expansions in their unique form, without parts that are 0 in all groups."""
    parts = _distilled(parts)
    at = 0
    while at < len(parts) - 2:
        high, half, rest = parts[at : at + 3]
        # Exactly half a unit in the last place: the third part decides the direction of rounding.
        tie = ((high + 2 * half) - high == 2 * half) & (np.sign(half) * np.sign(rest) > 0.0)
        if tie.any():
            parts[at] = np.where(tie, high + 2 * half, high)
            parts[at + 1 :] = _distilled([np.where(tie, -half, half), *parts[at + 2 :]])
        at += 1
    return parts


def _distilled(parts: list[FloatArray]) -> list[FloatArray]:
    """Returns the expansions such that each part is the rounded sum of itself and the next part."""
    for _ in range(_MAX_PASSES):
        changed = False
        rest = parts[-1]
        for i in reversed(range(len(parts) - 1)):
            total, error = two_sum(parts[i], rest)
            changed |= not np.array_equal(error, parts[i + 1])
            rest, parts[i + 1] = total, error
        changed |= not np.array_equal(rest, parts[0])
        parts[0] = rest
        while len(parts) > 1 and not parts[-1].any():
            parts.pop()
        if not changed:
            break
    return parts


def _trimmed(parts: FloatArray) -> FloatArray:
    count = len(parts)
    while count > 1 and not parts[count - 1].any():
        count -= 1
    return parts[:count]


def _encoded(parts: FloatArray) -> ArrayMessage:
    return codec.encode(parts[0] if len(parts) == 1 else parts)


def _one_nan(values: FloatArray) -> FloatArray:
    """Gives every NaN, in place, the same bits. NaN of different operations and processors have different bits."""
    values[np.isnan(values)] = np.nan
    return values
