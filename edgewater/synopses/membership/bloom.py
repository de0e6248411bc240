"""Bloom filter: whether a value was added. "No" is certain; "yes" is wrong at a known rate.

Bloom (1970). A filter must be sized for the values of *all* edges together: merging is a bitwise or, and a filter sized
for one edge answers yes to everything after a hundred merges. The false positive rate is therefore computed from the
bits that are set, (set/bits)^hashes, after any merge. The basis of every answer states if more than half of the bits
are set (`overfull`).

The number of distinct values follows from the same bits: -(bits/hashes)·ln(1 - set/bits). So do the sizes of unions and
intersections. The bitwise *and* of two filters is not the filter of the intersection.

Bits are spread over the whole filter. Blocks of a cache line are faster, but neither formula holds for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from edgewater.base.errors import InvalidRequest
from edgewater.synopses.array_stack import halvings, register_stack
from edgewater.synopses.base import (
    BoolArray,
    Distinct,
    Estimates,
    FloatArray,
    IntArray,
    Properties,
    Question,
    Questions,
)
from edgewater.synopses.checks import check_confidence, check_fraction, check_whole
from edgewater.synopses.encoding.layout import Layout, field
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray
from edgewater.synopses.items import CHUNK, ItemStack, membership_confidence, row_hashes
from edgewater.synopses.questions import Contains, FalsePositiveRate, IntersectionSize, UnionSize
from edgewater.synopses.registry import Parameter
from edgewater.synopses.row_stack import RowStack, row_fields
from edgewater.synopses.shapes import Shape, ShownNumber, default_shapes
from edgewater.synopses.single import SingleSynopsis

Bits = npt.NDArray[np.uint8]

MIN_BITS, MAX_BITS = 64, 1 << 31  # limit: memory of a filter
MAX_HASHES = 32  # limit: CPU of a value
DEFAULT_BITS, DEFAULT_HASHES = 1 << 20, 7
OVERFULL = 0.5  # derived: the fill at the capacity
"""The fraction of set bits when a filter has the number of values that it was sized for."""


class BloomStack(RowStack, ItemStack):
    """A Bloom filter per group.

    Args:
        bits: a multiple of 64; only stacks of equal bits and hashes merge.
        hashes: bits set per value.
        level: how many times release 0.3.0 has folded it. Only stacks of equal levels merge.
    """

    kind: ClassVar[str] = "bloom"
    properties: ClassVar[Properties] = Properties(idempotent=True)
    questions: ClassVar[Questions] = (Distinct, Contains, UnionSize, IntersectionSize, FalsePositiveRate)
    required: ClassVar[tuple[str, ...]] = ("bits", "hashes")
    carried: ClassVar[tuple[str, ...]] = ("level", "seed", "item_type")
    arrays: ClassVar[dict[str, tuple[str, float]]] = {}
    layouts: ClassVar[tuple[Layout, ...]] = (Layout.of(field("level", "<i8", 1), *row_fields("|u1")),)

    def __init__(
        self,
        groups: int = 0,
        *,
        bits: int,
        hashes: int,
        level: int = 0,
        seed: int = DEFAULT_SEED,
        item_type: str | None = None,
    ) -> None:
        self.bits = check_whole("bits", bits, MIN_BITS, MAX_BITS)
        if bits % 64:
            raise InvalidRequest("bits", bits, f"a multiple of 64 from {MIN_BITS} to {MAX_BITS}")
        self.hashes = check_whole("hashes", hashes, 1, MAX_HASHES)
        self.level = check_whole("level", level, 0, halvings(bits // 64))
        super().__init__(groups, seed=seed, item_type=item_type)
        self._set_row((self.positions // 8,), np.uint8)

    @staticmethod
    def state_bytes(parameters: Mapping[str, Any]) -> int:
        """Returns the memory of one group."""
        return int(parameters["bits"] // 8)

    @property
    def positions(self) -> int:
        """The current number of bits per group: halved per level."""
        return self.bits >> self.level

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        """Adds a batch: Arrow strings, or a NumPy array of bool, integers or floats."""
        self._check_item_type(values)
        flat = self._rows.reshape(-1)
        for at in range(0, len(values), CHUNK):
            words = self._hash(values[at : at + CHUNK])
            base = 0 if len(self) == 1 else codes[at : at + CHUNK] * self.positions
            for row in range(self.hashes):
                _set(flat, self._position(words, row) + base)

    def _position(self, words: WordArray, row: int) -> IntArray:
        """Returns the bit that each word sets for one hash: ⌊hash · positions / 2^64⌋."""
        hashes, size = row_hashes(words, row), np.uint64(self.positions)
        low = ((hashes & np.uint64(0xFFFFFFFF)) * size) >> np.uint64(32)
        return (((hashes >> np.uint64(32)) * size + low) >> np.uint64(32)).view(np.int64)

    def merge(self, other: Self, codes: IntArray) -> None:
        self._require_mergeable(other)
        self._rows[codes] |= other.table()

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the answer per group; the default question is the number of distinct values."""
        self.check(question)
        match question:
            case Contains(item):
                return self._contains(item)
            case FalsePositiveRate():
                return Estimates.exact(self._false_positives(self.fill()))
            case UnionSize(other, confidence):
                union = self.table() | self._other_stack(other).table()
                return self._distinct(union, check_confidence(confidence))
            case IntersectionSize(other, confidence):
                return self._intersection(other, check_confidence(confidence))
        confidence = question.confidence if isinstance(question, Distinct) else Distinct().confidence
        return self._distinct(self.table(), check_confidence(confidence))

    def shown(self, asked: Question | None = None) -> tuple[Shape, ...]:
        return (*default_shapes(self, asked), ShownNumber("fill", self.fill()))

    def fill(self) -> FloatArray:
        """Returns the fraction of bits that are set, per group."""
        return _set_bits(self.table()) / self.positions

    def overfull(self) -> BoolArray:
        """Returns which groups have more values than they were sized for.

        Their false positive rate is above the target.
        """
        return self.fill() > OVERFULL

    def _false_positives(self, fill: FloatArray) -> FloatArray:
        return np.asarray(fill**self.hashes)

    def _basis(self, fill: FloatArray) -> str:
        most = float(fill.max(initial=0))
        return self.kind if most <= OVERFULL else f"{self.kind}, overfull: {most:.0%} of the bits are set"

    def _contains(self, item: Any) -> Estimates:
        """Answers `Contains`.

        The confidence of a yes is 1 less the highest false positive rate of the groups that answer yes.
        """
        word = self._hash_item(item)
        if word is None:
            return Estimates.exact(np.zeros(len(self)))
        at = np.array([int(self._position(word, row)[0]) for row in range(self.hashes)])
        found = (self.table()[:, at >> 3] & _mask(at) != 0).all(axis=1)
        fill = self.fill()
        value = found.astype(np.float64)
        return Estimates(
            value, value, value, membership_confidence(self._false_positives(fill)[found]), self._basis(fill)
        )

    def _distinct(self, rows: Bits, confidence: float) -> Estimates:
        """Estimates distinct values per group from the number of set bits, X.

        The bounds are the numbers n for which X is z standard deviations from its mean. The number of bits that
        hashes·n random assignments do not set is nearly normal, with variance m·(p - (1 + c)·p²), where p = e^-c is
        their fraction (Johnson and Kotz). X/hashes is a certain lower bound.
        """
        m = rows.shape[1] * 8
        bits_set = _set_bits(rows)
        unset = 1 - bits_set / m
        with np.errstate(divide="ignore", invalid="ignore"):
            load = -np.log(unset)
            deviation = np.sqrt(np.maximum(m * (unset - (1 + load) * unset * unset), 0.0))
            deviation = np.where(unset > 0, deviation, 0.0) * NormalDist().inv_cdf((1 + confidence) / 2)
            lower, value, upper = (
                -m / self.hashes * np.log(np.clip(unset - shift / m, 0, 1)) for shift in (-deviation, 0.0, deviation)
            )
        least = np.ceil(bits_set / self.hashes)
        # `+ 0.0`: the logarithm of 1 is -0.0 here.
        value = np.maximum(value, least) + 0.0
        lower = np.minimum(np.maximum(np.floor(lower), least), value)
        return Estimates(value, lower, np.maximum(np.ceil(upper), value), confidence, self._basis(bits_set / m))

    def _intersection(self, other: Any, confidence: float) -> Estimates:
        """Returns |A| + |B| - |A ∪ B|; a union bound makes the three intervals hold together at the confidence."""
        mine, theirs = self.table(), self._other_stack(other).table()
        each = 1 - (1 - confidence) / 3
        a, b, both = (self._distinct(rows, each) for rows in (mine, theirs, mine | theirs))
        most = np.minimum(a.upper, b.upper)
        with np.errstate(invalid="ignore"):  # ∞ - ∞: a full filter bounds nothing
            least = np.minimum(a.value, b.value)
            value = np.clip(np.nan_to_num(a.value + b.value - both.value, nan=np.inf, posinf=np.inf), 0, least)
            lower = np.nan_to_num(a.lower + b.lower - both.upper, nan=0.0, neginf=0.0)
            upper = np.nan_to_num(a.upper + b.upper - both.lower, nan=np.inf, posinf=np.inf)
        lower, upper = np.clip(lower, 0, value), np.maximum(np.minimum(upper, most), value)
        return Estimates(value, lower, upper, confidence, both.basis)


def _mask(at: IntArray) -> Bits:
    return np.left_shift(np.uint8(1), (at & 7).astype(np.uint8))


def _set(flat: Bits, at: IntArray) -> None:
    """Sets bits. An assignment sets one of several bits in a byte, so it repeats until all bits are set."""
    byte, mask = at >> 3, _mask(at)
    while len(byte):
        missing = np.flatnonzero(flat[byte] & mask == 0)
        byte, mask = byte[missing], mask[missing]
        flat[byte] |= mask


def _set_bits(rows: Bits) -> IntArray:
    return np.asarray(np.bitwise_count(rows).sum(axis=1, dtype=np.int64))


class BloomFilter(SingleSynopsis[BloomStack]):
    """Whether a value was added.

    Args:
        bits: a multiple of 64; `for_capacity` computes bits and hashes.
        hashes: bits set per value, 1 to 32.
        seed: seed of the hash. Only filters of equal bits, hashes and seed merge.

    >>> from edgewater.synopses import Contains
    >>> seen = BloomFilter.for_capacity(1_000_000, 0.01)
    >>> seen.update(["10.0.0.7"])
    >>> seen.query(Contains("10.0.0.7")).value, seen.query(Contains("10.0.0.8")).value
    (1.0, 0.0)
    """

    stack_type = BloomStack

    def __init__(self, bits: int = DEFAULT_BITS, hashes: int = DEFAULT_HASHES, *, seed: int = DEFAULT_SEED) -> None:
        super().__init__(BloomStack(1, bits=bits, hashes=hashes, seed=seed))

    @classmethod
    def for_capacity(cls, capacity: int, fpr: float = 0.01, *, seed: int = DEFAULT_SEED) -> Self:
        """Returns a filter with a false positive rate of `fpr` when it contains `capacity` distinct values.

        Args:
            capacity: distinct values of all filters that will be merged, not of one edge.
        """
        bits, hashes = size_for(capacity, fpr)
        return cls(bits, hashes, seed=seed)

    @property
    def fill(self) -> float:
        """The fraction of bits that are set."""
        return float(self.stack.fill()[0])

    @property
    def overfull(self) -> bool:
        """Whether it contains more values than it was sized for."""
        return bool(self.stack.overfull()[0])


def size_for(capacity: int, fpr: float) -> tuple[int, int]:
    """Returns bits m = -n·ln(fpr)/ln²2 and hashes k = (m/n)·ln 2. Raises InvalidRequest."""
    check_whole("capacity", capacity, 1, 1 << 40)
    check_fraction("fpr", fpr)
    needed = -capacity * math.log(fpr) / math.log(2) ** 2
    if needed > MAX_BITS:
        raise InvalidRequest("capacity", capacity, f"at most {MAX_BITS} bits", f"{needed:.3g} are needed")
    # Rounded up to a multiple of about 1/16 of its size, so that it can be folded; adds at most a twentieth.
    step = max(64, 1 << max(math.ceil(needed).bit_length() - 4, 0))
    bits = min(-(-math.ceil(needed) // step) * step, MAX_BITS)
    return bits, min(max(round(bits / capacity * math.log(2)), 1), MAX_HASHES)


def _read_bits(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value % 64 or not MIN_BITS <= value <= MAX_BITS:
        raise ValueError(f"{value} bits")
    return value


def _size_for(goals: Mapping[str, Any]) -> Mapping[str, Any]:
    return dict(zip(("bits", "hashes"), size_for(goals["capacity"], goals["fpr"]), strict=True))


register_stack(
    BloomStack,
    parameters={
        "bits": Parameter(DEFAULT_BITS, _read_bits, f"a multiple of 64 from {MIN_BITS} to {MAX_BITS}"),
        "hashes": Parameter.whole(DEFAULT_HASHES, 1, MAX_HASHES),
    },
    goals={"capacity": Parameter.whole(None, 1, 1 << 40), "fpr": Parameter.fraction(0.01)},
    size_for=_size_for,
)
