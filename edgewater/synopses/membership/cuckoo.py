"""Cuckoo filters: membership with fewer bits than Bloom below a false positive rate of 3 %, and copies of values.

There are two kinds, because their algebra differs. `CuckooFilter` is a set: equal values of two edges are one element,
so merging is idempotent. `CountingCuckooFilter` is a multiset: copies add up.

The state is a multiset of cells (`cuckoo_table.py`). No answer depends on where a cell is in the table, or on whether
it is in the stash, and the bytes are the sorted cells. So merging commutes exactly, although tables do not. Nothing is
dropped: a filter above its capacity becomes slow and less accurate, and the basis of its answers states it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, ClassVar, Self

import numpy as np

from edgewater.synopses.array_stack import register_stack
from edgewater.synopses.base import (
    BoolArray,
    Count,
    Distinct,
    Estimates,
    FloatArray,
    IntArray,
    Properties,
    Question,
    Questions,
)
from edgewater.synopses.checks import check_confidence, check_dense, check_power_of_two, check_whole
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import MAX_COUNT, Field, Layout, field, totals
from edgewater.synopses.hashing import DEFAULT_SEED
from edgewater.synopses.items import ItemStack, membership_confidence
from edgewater.synopses.membership.cuckoo_table import BUCKET_BYTES, FINGERPRINTS, SLOTS, CuckooStash, CuckooTable
from edgewater.synopses.questions import Contains, FalsePositiveRate, Frequency
from edgewater.synopses.registry import Parameter
from edgewater.synopses.shapes import Shape, ShownInterval, default_shapes
from edgewater.synopses.single import SingleSynopsis
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

MAX_BUCKETS = 1 << 24  # limit: memory of a filter
DEFAULT_BUCKETS = 1 << 15
MAX_LOAD = 0.95
"""The fraction of used slots up to which insertion takes few rounds."""


class CuckooStack(ItemStack):
    """A cuckoo filter per group, of a set.

    Args:
        buckets: number of buckets of four fingerprints, a power of two; only stacks of equal buckets merge.
    """

    kind: ClassVar[str] = "cuckoo"
    properties: ClassVar[Properties] = Properties(idempotent=True)
    questions: ClassVar[Questions] = (Distinct, Contains, FalsePositiveRate)
    required: ClassVar[tuple[str, ...]] = ("buckets",)
    arrays: ClassVar[dict[str, tuple[str, float]]] = {}
    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout.of(
            totals("cells per group", "cells"),
            field("buckets", "<i8", "cells", least=0, most=MAX_BUCKETS),
            field("fingerprints", "<i8", "cells", least=1, most=FINGERPRINTS),
            Field("copies", ("<i8",), (("cells",), (0,)), least=1, most=MAX_COUNT, counts=True),
        ),
    )
    counts_copies: ClassVar[bool] = False

    def __init__(
        self, groups: int = 0, *, buckets: int, seed: int = DEFAULT_SEED, item_type: str | None = None
    ) -> None:
        self.buckets = check_power_of_two("buckets", buckets, 1, MAX_BUCKETS)
        super().__init__(groups, seed=seed, item_type=item_type)
        self.table = CuckooTable(groups, buckets)
        self._stash = CuckooStash()

    @staticmethod
    def state_bytes(parameters: Mapping[str, Any]) -> int:
        """Returns the memory of one group."""
        return int(parameters["buckets"] * BUCKET_BYTES)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.table.nbytes + self._stash.nbytes

    @property
    def _span(self) -> int:
        """The number of keys per group."""
        return self.buckets << 16

    def grow(self, groups: int) -> None:
        super().grow(groups)
        self.table.grow(groups)

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        """Adds a batch: Arrow strings, or a NumPy array of bool, integers or floats."""
        self._check_item_type(values)
        self._add(*np.unique(self.table.keys(codes, self._hash(values)), return_counts=True))

    def _add(self, keys: IntArray, copies: IntArray) -> None:
        """Adds distinct cells, ascending."""
        known = self.table.holds(keys) | (self._stash.holds(keys) > 0)
        if self.counts_copies:
            more = copies - ~known
            self._stash.add(keys[more > 0], more[more > 0])
        unplaced = self.table.insert(keys[~known])
        self._stash.add(unplaced, np.ones(len(unplaced), np.int64))

    def _contents(self) -> tuple[IntArray, IntArray]:
        """Returns all cells, ascending and distinct, and their copies."""
        held = self.table.contents()
        return self._stash.joined(held, np.ones(len(held), np.int64))

    def merge(self, other: Self, codes: IntArray) -> None:
        self._require_mergeable(other)
        self._add(*self._translated(other, codes))

    def _translated(self, other: Self, codes: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the cells of `other` with the group numbers of this stack, ascending."""
        keys, copies = other._contents()
        keys = codes[keys // self._span] * self._span + keys % self._span
        order = np.argsort(keys)
        return keys[order], copies[order]

    def take(self, groups: IntArray) -> Self:
        result = super().take(groups)
        result.table = self.table.take(groups)
        result._stash = self._stash.take(groups, self._span)
        return result

    def reset(self, groups: IntArray) -> None:
        self.table.reset(groups)
        self._stash.reset(groups, self._span)

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the answer per group; the default question is the number of distinct values, or of all values of a
        multiset.
        """
        self.check(question)
        match question:
            case Contains(item):
                copies = self._copies(item)
                return self._membership((copies > 0).astype(np.float64), copies > 0)
            case Frequency(item):
                copies = self._copies(item)
                return self._membership(copies.astype(np.float64), copies > 0)
            case FalsePositiveRate():
                return Estimates.exact(self._false_positives(self._cells()))
            case Count():
                return Estimates.exact(self._count())
            case None if self.counts_copies:
                return Estimates.exact(self._count())
        confidence = question.confidence if isinstance(question, Distinct) else Distinct().confidence
        return self._distinct(check_confidence(confidence))

    def overfull(self) -> BoolArray:
        """Returns which groups are above their capacity: insertion is slow and the stash grows."""
        return self._cells() > MAX_LOAD * SLOTS * self.buckets

    def _copies(self, item: Any) -> IntArray:
        word = self._hash_item(item)
        if word is None:
            return np.zeros(len(self), np.int64)
        keys = self.table.keys(np.arange(len(self)), word)
        return np.asarray(self.table.holds(keys) + self._stash.holds(keys))

    def _cells(self) -> IntArray:
        """Returns the number of distinct cells per group."""
        unplaced = self._stash.keys[~self.table.holds(self._stash.keys)]
        return self.table.sizes()[: len(self)] + np.bincount(unplaced // self._span, minlength=len(self))

    def _count(self) -> IntArray:
        keys, copies = self._contents()
        result = np.zeros(len(self), np.int64)
        np.add.at(result, keys // self._span, copies)
        return result

    def _membership(self, value: FloatArray, found: BoolArray) -> Estimates:
        """Returns the estimates.

        A no is certain. A yes, or a number of copies, is right unless another value has the same cell.
        """
        cells = self._cells()
        confidence = membership_confidence(self._false_positives(cells)[found])
        return Estimates(value, value, value, confidence, self._basis(cells))

    def _false_positives(self, cells: IntArray) -> FloatArray:
        """Returns the false positive rate per group.

        A value is compared with 2/buckets of the cells, and each of these cells has its fingerprint with probability
        1/65535.
        """
        return np.asarray(-np.expm1(2 * cells / self.buckets * math.log1p(-1 / FINGERPRINTS)))

    def _basis(self, cells: IntArray) -> str:
        load = float(cells.max(initial=0)) / (SLOTS * self.buckets)
        return self.kind if load <= MAX_LOAD else f"{self.kind}, overfull: {load:.0%} of the slots"

    def _distinct(self, confidence: float) -> Estimates:
        """Estimates distinct values per group, at least the number of cells.

        The number of pairs of values that share a cell has a Poisson distribution.
        """
        cells = self._cells()
        pairs = cells.astype(np.float64) ** 2 / (self.buckets * FINGERPRINTS)
        z = NormalDist().inv_cdf(confidence)
        upper = np.where(cells > 1, cells + np.ceil((np.sqrt(pairs) + z / 2 + 0.5) ** 2), cells)
        lower = cells.astype(np.float64)
        return Estimates(np.minimum(cells + pairs, upper), lower, upper, confidence, self._basis(cells))

    def to_message(self) -> SynopsisMessage:
        message = self._header()
        keys, copies = self._contents()
        sizes = np.bincount(keys // self._span, minlength=len(self))
        buckets = (keys >> 16) % self.buckets
        steps = np.diff(buckets, prepend=0)
        begins = (np.cumsum(sizes) - sizes)[sizes > 0]
        steps[begins] = buckets[begins]
        # A set has each cell once, so the array of copies is empty.
        arrays = (sizes, steps, keys & FINGERPRINTS, copies if self.counts_copies else copies[:0])
        message.arrays.extend(codec.encode(array) for array in arrays)
        return message

    @classmethod
    def _decoded(cls, given: dict[str, Any], arrays: list[Any]) -> Self:
        sizes, steps, fingerprints, copies = arrays
        check_dense(len(sizes), cls(**given).buckets * BUCKET_BYTES)
        result = cls(len(sizes), **given)
        running = np.cumsum(steps)
        begins = (np.cumsum(sizes) - sizes)[sizes > 0]
        before = np.repeat((running - steps)[begins], sizes[sizes > 0])
        buckets = running - before + np.repeat(np.arange(len(sizes)), sizes) * result.buckets
        keys = buckets << 16 | fingerprints
        if not cls.counts_copies and not len(copies):
            copies = np.ones(len(keys), np.int64)
        result._check_cells(keys, copies, sizes)
        result._add(keys, copies)
        return result

    def _check_cells(self, keys: IntArray, copies: IntArray, sizes: IntArray) -> None:
        """Raises ValueError unless decoded cells are a valid state."""
        groups = np.repeat(np.arange(len(sizes)), sizes)
        valid = (
            keys.shape == copies.shape
            and self.table.is_key(keys).all()
            and (keys // self._span == groups).all()
            and (keys[1:] > keys[:-1]).all()
            and copies.sum(dtype=np.float64) <= MAX_COUNT
        )
        if not valid:
            raise ValueError("cells out of range or out of order")


class CountingCuckooStack(CuckooStack):
    """A cuckoo filter per group, of a multiset: equal values add up."""

    kind: ClassVar[str] = "counting_cuckoo"
    properties: ClassVar[Properties] = Properties(linear=True)
    questions: ClassVar[Questions] = (Count, Distinct, Contains, Frequency, FalsePositiveRate)
    counts_copies: ClassVar[bool] = True

    def shown(self, asked: Question | None = None) -> tuple[Shape, ...]:
        first, *others = default_shapes(self, asked)
        return (first, ShownInterval("count", Count(), whole=True), *others)


class _SingleCuckoo(SingleSynopsis[Any]):
    stack: CuckooStack

    def __init__(self, buckets: int = DEFAULT_BUCKETS, *, seed: int = DEFAULT_SEED) -> None:
        super().__init__(self.stack_type(1, buckets=buckets, seed=seed))

    @classmethod
    def for_capacity(cls, capacity: int, *, seed: int = DEFAULT_SEED) -> Self:
        """Returns the smallest filter for this number of distinct values.

        Args:
            capacity: distinct values of all filters that will be merged, not of one edge.
        """
        check_whole("capacity", capacity, 1, int(MAX_LOAD * SLOTS * MAX_BUCKETS))
        return cls(1 << (math.ceil(capacity / (MAX_LOAD * SLOTS)) - 1).bit_length(), seed=seed)

    @property
    def overfull(self) -> bool:
        """Whether it is above its capacity: insertion is slow and the stash grows."""
        return bool(self.stack.overfull()[0])


class CuckooFilter(_SingleCuckoo):
    """Whether a value was added: a set, whose merges are idempotent.

    Args:
        buckets: number of buckets of four 16-bit fingerprints, a power of two; see `for_capacity`.
        seed: seed of the hash. Only filters of equal buckets and seed merge.

    >>> from edgewater.synopses import Contains
    >>> seen = CuckooFilter.for_capacity(1_000)
    >>> seen.update(["10.0.0.7"])
    >>> seen.query(Contains("10.0.0.7")).value
    1.0
    """

    stack_type = CuckooStack


class CountingCuckooFilter(_SingleCuckoo):
    """How often a value was added: a multiset.

    Args:
        buckets: number of buckets of four 16-bit fingerprints, a power of two; see `for_capacity`.
        seed: seed of the hash. Only filters of equal buckets and seed merge.

    >>> from edgewater.synopses import Frequency
    >>> logins = CountingCuckooFilter.for_capacity(1_000)
    >>> logins.update(["ann", "bob", "ann"])
    >>> logins.query(Frequency("ann")).value, logins.query(Frequency("eve")).value
    (2.0, 0.0)
    """

    stack_type = CountingCuckooStack


def _size_for(goals: Mapping[str, Any]) -> Mapping[str, Any]:
    return CuckooFilter.for_capacity(goals["capacity"]).stack.parameters


for _stack_type in (CuckooStack, CountingCuckooStack):
    register_stack(
        _stack_type,
        parameters={"buckets": Parameter.power_of_two(DEFAULT_BUCKETS, 1, MAX_BUCKETS)},
        goals={"capacity": Parameter.whole(None, 1, int(MAX_LOAD * SLOTS * MAX_BUCKETS))},
        size_for=_size_for,
    )
