"""Cuckoo filters: is a value among those added, with fewer bits than Bloom below a rate of 3 %, and deletes.

Two kinds, because their algebra differs. `CuckooFilter` holds a set: a value from two edges is one, so
merging is idempotent, and nothing can be taken out, because nobody knows whether another edge has
added it too. `CountingCuckooFilter` holds a multiset: copies add up and can be taken out again.

The state is a multiset of cells (`cuckoo_table.py`); where a cell stands in the table, or that it
found no place and stands in the stash, makes no difference to any answer, and the bytes are the
sorted cells. So merging commutes to the bit although tables do not, and nothing is ever dropped: a
filter that is given more than it was made for becomes slow and less accurate, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from statistics import NormalDist
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from edgewater.errors import CorruptSynopsis, InvalidRequest
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
    arrow_values,
)
from edgewater.synopses.encoding import codec
from edgewater.synopses.hashing import DEFAULT_SEED
from edgewater.synopses.items import ItemStack, check_share, check_whole, confidence_of, read_item_type
from edgewater.synopses.membership.cuckoo_stash import CuckooStash
from edgewater.synopses.membership.cuckoo_table import FINGERPRINTS, SLOTS, CuckooTable
from edgewater.synopses.questions import Contains, FalsePositiveRate, Frequency
from edgewater.synopses.registry import (
    ITEM_TYPES,
    Function,
    Parameter,
    Parameters,
    item_type,
    register_function,
    register_kind,
)
from edgewater.synopses.single import SingleSynopsis
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

MAX_BUCKETS = 1 << 24
DEFAULT_BUCKETS = 1 << 15
MAX_LOAD = 0.95
"""The share of slots up to which inserting finds a place in few rounds."""


class CuckooStack(ItemStack):
    """A cuckoo filter per group, of a set.

    Args:
        buckets: of four fingerprints each, a power of two; two stacks merge only if they have the same.
    """

    kind: ClassVar[str] = "cuckoo"
    properties: ClassVar[Properties] = Properties(idempotent=True)
    questions: ClassVar[Questions] = (Distinct, Contains, FalsePositiveRate)
    arrays: ClassVar[dict[str, tuple[str, float]]] = {}
    counts_copies: ClassVar[bool] = False

    def __init__(
        self, groups: int = 0, *, buckets: int, seed: int = DEFAULT_SEED, item_type: str | None = None
    ) -> None:
        self.buckets = check_whole("buckets", buckets, 1, MAX_BUCKETS)
        if buckets & (buckets - 1):
            raise InvalidRequest("buckets", buckets, f"a power of two up to {MAX_BUCKETS}")
        super().__init__(groups, seed=seed, item_type=item_type)
        self._table = CuckooTable(groups, buckets)
        self._stash = CuckooStash()

    @property
    def parameters(self) -> dict[str, Any]:
        return {"buckets": self.buckets}

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._table.nbytes + self._stash.nbytes

    @property
    def _span(self) -> int:
        """Keys per group."""
        return self.buckets << 16

    def _empty(self) -> Self:
        return type(self)(buckets=self.buckets, seed=self.seed, item_type=self.item_type)

    def grow(self, groups: int) -> None:
        super().grow(groups)
        self._table.grow(groups)

    # Updating

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        """Adds a batch: Arrow strings, or a NumPy array of bool, integers or floats."""
        self._learn(values)
        self._add(*np.unique(self._table.keys(codes, self._hash(values)), return_counts=True))

    def _add(self, keys: IntArray, copies: IntArray) -> None:
        """Adds distinct cells, ascending."""
        known = self._table.holds(keys) | (self._stash.holds(keys) > 0)
        if self.counts_copies:
            more = copies - ~known
            self._stash.add(keys[more > 0], more[more > 0])
        homeless = self._table.insert(keys[~known])
        self._stash.add(homeless, np.ones(len(homeless), np.int64))

    def _contents(self) -> tuple[IntArray, IntArray]:
        """All cells, ascending and distinct, and their copies."""
        held = self._table.contents()
        return self._stash.joined(held, np.ones(len(held), np.int64))

    # Merging

    def merge(self, other: Self, codes: IntArray) -> None:
        self._require_mergeable(other)
        self._add(*self._translated(other, codes))

    def _translated(self, other: Self, codes: IntArray) -> tuple[IntArray, IntArray]:
        """The other's cells under the groups here, ascending."""
        keys, copies = other._contents()
        keys = codes[keys // self._span] * self._span + keys % self._span
        order = np.argsort(keys)
        return keys[order], copies[order]

    def take(self, groups: IntArray) -> Self:
        result = super().take(groups)
        result._table = self._table.take(groups)
        result._stash = self._stash.take(groups, self._span)
        return result

    def reset(self, groups: IntArray) -> None:
        self._table.reset(groups)
        self._stash.reset(groups, self._span)

    # Asking

    def query(self, question: Question | None = None) -> Estimates:
        """Without a question, the number of different values per group (of a multiset: of all)."""
        self.check(question)
        match question:
            case Contains(item):
                copies = self._copies(item)
                return self._likely((copies > 0).astype(np.float64), copies > 0)
            case Frequency(item):
                copies = self._copies(item)
                return self._likely(copies.astype(np.float64), copies > 0)
            case FalsePositiveRate():
                return Estimates.exact(self._false_positives(self._distinct()))
            case Count():
                return Estimates.exact(self._count())
            case None if self.counts_copies:
                return Estimates.exact(self._count())
        confidence = question.confidence if isinstance(question, Distinct) else Distinct().confidence
        return self._sizes(check_share("confidence", confidence))

    def overfull(self) -> BoolArray:
        """The groups that hold more than fits well: inserting is slow, the stash grows."""
        return self._distinct() > MAX_LOAD * SLOTS * self.buckets

    def _copies(self, item: Any) -> IntArray:
        word = self._word(item)
        if word is None:
            return np.zeros(len(self), np.int64)
        keys = self._table.keys(np.arange(len(self)), word)
        return np.asarray(self._table.holds(keys) + self._stash.holds(keys))

    def _distinct(self) -> IntArray:
        """Different cells per group."""
        homeless = self._stash.keys[~self._table.holds(self._stash.keys)]
        return self._table.sizes()[: len(self)] + np.bincount(homeless // self._span, minlength=len(self))

    def _count(self) -> IntArray:
        keys, copies = self._contents()
        result = np.zeros(len(self), np.int64)
        np.add.at(result, keys // self._span, copies)
        return result

    def _likely(self, value: FloatArray, found: BoolArray) -> Estimates:
        """A no is certain; a yes, or a number of copies, is right unless another value has the same cell."""
        distinct = self._distinct()
        confidence = confidence_of(self._false_positives(distinct)[found])
        return Estimates(value, value, value, confidence, self._basis(distinct))

    def _false_positives(self, distinct: IntArray) -> FloatArray:
        """A value meets 2/buckets of the cells, and each has its fingerprint with probability 1/65535."""
        return np.asarray(-np.expm1(2 * distinct / self.buckets * math.log1p(-1 / FINGERPRINTS)))

    def _basis(self, distinct: IntArray) -> str:
        load = float(distinct.max(initial=0)) / (SLOTS * self.buckets)
        return self.kind if load <= MAX_LOAD else f"{self.kind}, overfull: {load:.0%} of the slots"

    def _sizes(self, confidence: float) -> Estimates:
        """Different values: at least as many as cells; pairs of values in one cell are Poisson distributed."""
        distinct = self._distinct()
        pairs = distinct.astype(np.float64) ** 2 / (self.buckets * FINGERPRINTS)
        z = NormalDist().inv_cdf(confidence)
        upper = np.where(distinct > 1, distinct + np.ceil((np.sqrt(pairs) + z / 2 + 0.5) ** 2), distinct)
        lower = distinct.astype(np.float64)
        return Estimates(np.minimum(distinct + pairs, upper), lower, upper, confidence, self._basis(distinct))

    # Bytes

    def to_message(self) -> SynopsisMessage:
        message = codec.header(self.kind, self.version, self._header_parameters, seed=self.seed)
        keys, copies = self._contents()
        sizes = np.bincount(keys // self._span, minlength=len(self))
        buckets = (keys >> 16) % self.buckets
        steps = np.diff(buckets, prepend=0)
        begins = (np.cumsum(sizes) - sizes)[sizes > 0]
        steps[begins] = buckets[begins]
        # Of a set each cell is there once.
        arrays = (sizes, steps, keys & FINGERPRINTS, copies if self.counts_copies else copies[:0])
        message.arrays.extend(codec.encode(array) for array in arrays)
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        parameters = codec.open_message(message, cls.kind, cls.version, 4)
        item_type = read_item_type(parameters, cls.kind)
        sizes, steps, fingerprints, copies = (codec.decode(a) for a in message.arrays)
        try:
            result = cls(len(sizes), buckets=parameters["buckets"], seed=message.seed, item_type=item_type)
            if (sizes < 0).any() or not len(steps) == len(fingerprints) == sizes.sum():
                raise ValueError(f"{len(steps)} buckets and {len(fingerprints)} fingerprints")
            running = np.cumsum(steps)
            begins = (np.cumsum(sizes) - sizes)[sizes > 0]
            before = np.repeat((running - steps)[begins], sizes[sizes > 0])
            buckets = running - before + np.repeat(np.arange(len(sizes)), sizes) * result.buckets
            keys = buckets << 16 | fingerprints
            if not cls.counts_copies and not len(copies):
                copies = np.ones(len(keys), np.int64)
            result._check_cells(keys, copies, sizes)
        except (KeyError, IndexError, TypeError, ValueError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and arrays do not fit: {exc}") from exc
        result._add(keys, copies)
        return result

    def _check_cells(self, keys: IntArray, copies: IntArray, sizes: IntArray) -> None:
        """Raises ValueError unless decoded cells are the state of this stack."""
        whole = keys.dtype == copies.dtype == sizes.dtype == np.int64 and keys.shape == copies.shape
        groups = np.repeat(np.arange(len(sizes)), sizes)
        sound = (
            whole
            and self._table.is_key(keys).all()
            and (keys // self._span == groups).all()
            and (keys[1:] > keys[:-1]).all()
            and (copies > 0).all()
        )
        if not sound:
            raise ValueError("cells out of range or out of order")


class CountingCuckooStack(CuckooStack):
    """A cuckoo filter per group, of a multiset: values can be taken out that were really added."""

    kind: ClassVar[str] = "counting_cuckoo"
    properties: ClassVar[Properties] = Properties(invertible=True, linear=True)
    questions: ClassVar[Questions] = (Count, Distinct, Contains, Frequency, FalsePositiveRate)
    counts_copies: ClassVar[bool] = True

    def decrement(self, codes: IntArray, values: Any) -> None:
        """Takes out values that were added.

        Raises:
            InvalidRequest: some are not in it; then all stays as it was. (A value that was never added but
                shares a cell with one that was goes unnoticed, and takes that one out.)
        """
        self._learn(values)
        self._remove(*np.unique(self._table.keys(codes, self._hash(values)), return_counts=True))

    def invert(self, other: Self, codes: IntArray) -> None:
        """Takes out what `merge` with the same arguments put in. Raises InvalidRequest as `decrement` does."""
        self._require_mergeable(other)
        self._remove(*self._translated(other, codes))

    def _remove(self, keys: IntArray, copies: IntArray) -> None:
        in_table, in_stash = self._table.holds(keys), self._stash.holds(keys)
        missing = int(np.maximum(copies - in_stash - in_table, 0).sum())
        if missing:
            raise InvalidRequest("values", f"{missing} values", "values that were added before", "they are not in it")
        from_stash = np.minimum(copies, in_stash)
        self._stash.add(keys[from_stash > 0], -from_stash[from_stash > 0])
        self._table.remove(keys[copies > from_stash])


class _SingleCuckoo(SingleSynopsis[Any]):
    types: ClassVar[tuple[str, ...]] = ("string", "int64", "float64", "bool")
    _stack: CuckooStack

    def __init__(self, buckets: int = DEFAULT_BUCKETS, *, seed: int = DEFAULT_SEED) -> None:
        super().__init__(self.stack_type(1, buckets=buckets, seed=seed))

    @classmethod
    def for_capacity(cls, capacity: int, *, seed: int = DEFAULT_SEED) -> Self:
        """The smallest filter in which so many different values find a place.

        Args:
            capacity: different values of all filters that will be merged, not of one edge's.
        """
        check_whole("capacity", capacity, 1, int(MAX_LOAD * SLOTS * MAX_BUCKETS))
        return cls(1 << (math.ceil(capacity / (MAX_LOAD * SLOTS)) - 1).bit_length(), seed=seed)

    @property
    def overfull(self) -> bool:
        """Whether more is in it than fits well: it is slow, and its stash grows."""
        return bool(self._stack.overfull()[0])


class CuckooFilter(_SingleCuckoo):
    """Whether a value is among those added: a set, which can be merged as often as one likes.

    Args:
        buckets: of four 16-bit fingerprints, a power of two; see `for_capacity`.
        seed: of the hash. Only filters of equal buckets and seed merge.
    """

    stack_type = CuckooStack


class CountingCuckooFilter(_SingleCuckoo):
    """Whether a value is among those added and not taken out since: a multiset.

    Args:
        buckets: of four 16-bit fingerprints, a power of two; see `for_capacity`.
        seed: of the hash. Only filters of equal buckets and seed merge.
    """

    stack_type = CountingCuckooStack
    _stack: CountingCuckooStack

    def decrement(self, values: Any) -> None:
        """Takes out values that were added. Raises InvalidRequest if some were not; then all stays as it was."""
        columnar = self._columnar(arrow_values(values))
        if len(columnar):
            self._stack.decrement(np.zeros(len(columnar), np.int64), columnar)
            self.records = max(self.records - len(columnar), 0)

    def invert(self, other: Self) -> Self:
        """This one without `other`, which was merged into it, as a new one.

        Raises:
            IncompatibleSynopses: unequal parameters.
            InvalidRequest: `other` holds what is not in here.
        """
        codec.require_equal("synopses", self.kind, getattr(other, "kind", type(other).__name__))
        result = self.merge_many([])
        result._stack.invert(other._stack, np.zeros(1, np.int64))
        result.records = max(result.records - other.records, 0)
        return result


def _make(stack_type: type[CuckooStack], parameters: Parameters, data_type: pa.DataType | None) -> CuckooStack:
    return stack_type(**dict(parameters), item_type=item_type(data_type))


def _size_for(goals: Mapping[str, Any]) -> Mapping[str, Any]:
    return CuckooFilter.for_capacity(goals["capacity"])._stack.parameters


for _stack_type in (CuckooStack, CountingCuckooStack):
    register_kind(_stack_type)
    register_function(
        Function(
            _stack_type.kind,
            partial(_make, _stack_type),
            types=ITEM_TYPES,
            parameters={"buckets": Parameter.power_of_two(DEFAULT_BUCKETS, 1, MAX_BUCKETS)},
            goals={"capacity": Parameter.whole(None, 1, int(MAX_LOAD * SLOTS * MAX_BUCKETS))},
            size_for=_size_for,
        )
    )
