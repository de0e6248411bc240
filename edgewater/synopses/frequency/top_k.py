"""The most frequent items, from a bounded number of counters per group.

Metwally et al., "SpaceSaving" (2005), in the form of Misra and Gries (1982), which is the same summary
less its smallest counter (Agarwal et al., "Mergeable summaries", PODS 2012, lemma 1): whenever there are
more than `capacity` counters, the (capacity + 1)-th largest is subtracted from all, and those that
reach 0 are gone. What was subtracted in all, `error`, bounds what any item has lost, and each
subtraction took capacity + 1 times as much from the total, so whatever the order of merges

    counter ≤ frequency ≤ counter + error,  error ≤ (N - Σ counters)/(capacity + 1) ≤ N/(capacity + 1).

Both ends are certain, and while no group has had more than `capacity` different items all is exact. A
batch's distinct items are counted exactly before they meet the counters. Which items survive depends
on the order of merges, so answers agree within their intervals only: it is not called commutative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from edgewater.errors import CorruptSynopsis, InvalidRequest
from edgewater.streams import COLUMN_TYPES
from edgewater.synopses.base import Count, Estimate, Estimates, IntArray, Properties, Question, Questions
from edgewater.synopses.encoding import codec
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray
from edgewater.synopses.items import ItemStack, check_share, check_whole, read_item_type
from edgewater.synopses.questions import Frequency, RankedItems, TopItems
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

DEFAULT_K, COUNTERS_PER_ITEM = 100, 10
MIN_CAPACITY, MAX_CAPACITY = 1, 1 << 20
_MIN_PENDING = 1 << 14


@dataclass(slots=True)
class _Counters:
    """Counters, one per row, sorted by group and then by the item's hash. Not to be written to."""

    groups: IntArray
    words: WordArray
    counts: IntArray
    items: pa.Array | None  # None: no items yet, so no type

    def __len__(self) -> int:
        return len(self.groups)

    def rows(self, at: IntArray) -> _Counters:
        items = None if self.items is None else self.items.take(pa.array(at))
        return _Counters(self.groups[at], self.words[at], self.counts[at], items)


def _none() -> _Counters:
    return _Counters(np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.int64), None)


class TopKStack(ItemStack):
    """The counters of many groups.

    Args:
        k: how many items `top` gives if it is not told.
        capacity: counters per group. Only stacks of equal k and capacity merge.
        level: how often the capacity has been halved since. Stacks of different levels merge.
    """

    kind: ClassVar[str] = "top_k"
    version: ClassVar[int] = 2
    properties: ClassVar[Properties] = Properties(commutative=False, foldable=True)
    questions: ClassVar[Questions] = (Count, Frequency)
    arrays: ClassVar[dict[str, tuple[str, float]]] = {"n": ("<i8", 0), "error": ("<i8", 0)}

    def __init__(
        self,
        groups: int = 0,
        *,
        k: int = DEFAULT_K,
        capacity: int | None = None,
        level: int = 0,
        seed: int = DEFAULT_SEED,
        item_type: str | None = None,
    ) -> None:
        self.k = check_whole("k", k, 1, MAX_CAPACITY // COUNTERS_PER_ITEM)
        wanted = COUNTERS_PER_ITEM * k if capacity is None else capacity
        self.capacity = check_whole("capacity", wanted, k, MAX_CAPACITY)
        self.level = check_whole("level", level, 0, self.capacity.bit_length() - 1)
        super().__init__(groups, seed=seed, item_type=item_type)
        self._held = _none()
        self._runs: list[_Counters] = []
        self._unpruned = 0  # counters added since the last pruning, as they came: queries must not change it

    @property
    def counters(self) -> int:
        """Counters per group now: the capacity, halved per level."""
        return self.capacity >> self.level

    @property
    def parameters(self) -> dict[str, Any]:
        return {"k": self.k, "capacity": self.capacity}

    @property
    def nbytes(self) -> int:
        parts = [self._held, *self._runs]
        arrays = sum(p.groups.nbytes + p.words.nbytes + p.counts.nbytes for p in parts)
        items: int = sum(p.items.nbytes for p in parts if p.items is not None)
        return super().nbytes + arrays + items

    def _empty(self) -> Self:
        return type(self)(k=self.k, capacity=self.capacity, level=self.level, seed=self.seed, item_type=self.item_type)

    # Updating

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        """Adds a batch: Arrow strings, or a NumPy array of bool, integers or floats."""
        self._learn(values)
        if not len(values):
            return
        self._view("n")[:] += np.bincount(codes, minlength=len(self))
        encoded = _arrow(values).cast(COLUMN_TYPES[self.item_type or "string"]).dictionary_encode()
        size = len(encoded.dictionary)
        pairs = codes * size + np.asarray(encoded.indices, np.int64)
        if len(self) * size <= 4 * len(pairs):
            found = np.bincount(pairs)
            used = np.flatnonzero(found)
            counts = found[used]
        else:
            used, counts = np.unique(pairs, return_counts=True)
        groups, ids = np.divmod(used, size)
        items = encoded.dictionary.take(pa.array(ids))
        self._append(_Counters(groups, self._hash(encoded.dictionary)[ids], counts, items))

    def _append(self, run: _Counters) -> None:
        """Adds counters; prunes when as many have come as there may be in all."""
        if not len(run):
            return
        self._runs.append(run)
        self._unpruned += len(run)
        if self._unpruned > max(self.counters * len(self), _MIN_PENDING):
            self.condense()

    def condense(self) -> None:
        """Prunes. A step of the sequence of updates: what comes later depends on it."""
        self._held, lost = self._pruned()
        self._view("error")[:] += lost
        self._unpruned = 0

    def _combined(self) -> _Counters:
        """All counters, each item once per group."""
        if self._runs:
            parts = [p for p in (self._held, *self._runs) if len(p)]
            groups, words, counts = (
                np.concatenate([getattr(p, name) for p in parts]) for name in ("groups", "words", "counts")
            )
            order = np.lexsort((words, groups))
            groups, words = groups[order], words[order]
            differs = (groups[1:] != groups[:-1]) | (words[1:] != words[:-1])
            first = np.flatnonzero(np.concatenate([[True], differs]))
            items = pa.concat_arrays([p.items for p in parts]).take(pa.array(order[first]))
            self._held = _Counters(groups[first], words[first], np.add.reduceat(counts[order], first), items)
            self._runs = []
        return self._held

    def _pruned(self) -> tuple[_Counters, IntArray]:
        """At most `counters` counters per group, and what was subtracted from those of each group."""
        held = self._combined()
        lost = np.zeros(len(self), np.int64)
        sizes = np.bincount(held.groups, minlength=len(self))
        crowded = np.flatnonzero(sizes > self.counters)
        if not len(crowded):
            return held, lost
        falling = np.lexsort((-held.counts, held.groups))
        begins = (np.cumsum(sizes) - sizes)[crowded]
        lost[crowded] = held.counts[falling[begins + self.counters]]
        left = held.counts - lost[held.groups]
        kept = np.flatnonzero(left > 0)
        result = held.rows(kept)
        result.counts = left[kept]
        return result, lost

    # Merging

    def merge(self, other: Self, codes: IntArray) -> None:
        self._require_mergeable(other)
        if other.level < self.level:
            other = other.fold(self.level - other.level)
        elif other.level > self.level:
            self.level = other.level
            self.condense()
        theirs, lost = other._pruned()
        n, error = other._view("n"), other._view("error") + lost
        self._view("n")[codes] += n
        self._view("error")[codes] += error
        self._append(_Counters(codes[theirs.groups], theirs.words, theirs.counts, theirs.items))

    def fold(self, levels: int = 1) -> Self:
        """A copy with 2^levels times fewer counters."""
        most = self.counters.bit_length() - 1
        if not 0 <= levels <= most:
            raise InvalidRequest("level", levels, f"0 to {most}", f"{self.kind} with {self.counters} counters left")
        result = self.take(np.arange(len(self)))
        result.level += levels
        result.condense()
        return result

    def take(self, groups: IntArray) -> Self:
        """A copy of these groups, in this order, pruned."""
        result = super().take(groups)
        held, lost = self._pruned()
        result._view("error")[:] += lost[groups]
        starts, ends = (np.searchsorted(held.groups, groups, side) for side in ("left", "right"))
        counts = ends - starts
        before = np.cumsum(counts) - counts
        at = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
        result._held = held.rows(at)
        result._held.groups = np.repeat(np.arange(len(groups)), counts)
        return result

    def reset(self, groups: IntArray) -> None:
        super().reset(groups)
        held = self._combined()
        self._held = held.rows(np.flatnonzero(~np.isin(held.groups, groups)))

    # Asking

    def query(self, question: Question | None = None) -> Estimates:
        """The number of values per group (without a question), or how often an item came."""
        self.check(question)
        if not isinstance(question, Frequency):
            return Estimates.exact(self._view("n"))
        lower = np.zeros(len(self), np.int64)
        held, lost = self._pruned()
        word = self._word(question.item)
        if word is not None:
            at = np.flatnonzero(held.words == word[0])
            lower[held.groups[at]] = held.counts[at]
        return self._between(lower, self._view("error") + lost)

    def top(self, question: TopItems | None = None) -> RankedItems:
        """The items with the largest counters, per group; equal ones in the order of their hashes."""
        k = self.k if question is None else check_whole("k", question.k, 1, self.counters)
        held, lost = self._pruned()
        falling = held.rows(np.lexsort((held.words, -held.counts, held.groups)))
        sizes = np.bincount(falling.groups, minlength=len(self))
        rank = np.arange(len(falling)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        best = falling.rows(np.flatnonzero(rank < k))
        items = pa.nulls(0) if best.items is None else best.items
        return RankedItems(best.groups, items, self._between(best.counts, (self._view("error") + lost)[best.groups]))

    def _between(self, lower: IntArray, error: IntArray) -> Estimates:
        """The estimate is SpaceSaving's, the upper end, for an item with a counter, and 0 for one without."""
        upper = lower + error
        value, low, high = (a.astype(np.float64) for a in (np.where(lower > 0, upper, 0), lower, upper))
        return Estimates(value, low, high, 1.0, "space_saving")

    # Bytes

    def to_message(self) -> SynopsisMessage:
        """Version 1 is of a pruned stack; version 2 has what waits to be pruned, for it decides what comes later."""
        message = codec.header(self.kind, self.version, self._header_parameters, seed=self.seed)
        held = self._combined()
        sizes = np.bincount(held.groups, minlength=len(self))
        arrays = [np.array([self.level]), self._view("n"), self._view("error"), sizes, held.counts]
        message.arrays.extend(codec.encode(array) for array in arrays)
        message.arrays.append(codec.encode_keys(held.items if len(held) else pa.array([], pa.int64())))
        message.version = 1
        if self._unpruned:
            message.version = 2
            message.arrays.append(codec.encode(np.array([self._unpruned])))
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        parameters = codec.open_message(message, cls.kind, cls.version, 7 if message.version == 2 else 6)
        item_type = read_item_type(parameters, cls.kind)
        level, n, error, sizes, counts = (codec.decode(a) for a in message.arrays[:5])
        items = codec.decode_keys(message.arrays[5])
        try:
            result = cls(
                k=parameters["k"],
                capacity=parameters["capacity"],
                level=int(level[0]),
                seed=message.seed,
                item_type=item_type,
            )
            for name, array in (("n", n), ("error", error), ("sizes", sizes), ("counts", counts)):
                if array.ndim != 1 or array.dtype != np.int64 or (array < 0).any():
                    raise ValueError(f"{name} is {array.dtype}{array.shape}, or negative")
            if not len(n) == len(error) == len(sizes) or not len(items) == len(counts) == sizes.sum():
                raise ValueError(f"{len(counts)} counters and {len(items)} items for {len(n)} groups")
            result._state, result._length = {"n": n, "error": error}, len(n)
            if message.version == 2:
                (result._unpruned,) = _waiting(codec.decode(message.arrays[6])).tolist()
            result._set_counters(np.repeat(np.arange(len(n)), sizes), counts, items)
        except (KeyError, IndexError, TypeError, ValueError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and arrays do not fit: {exc}") from exc
        return result

    def _set_counters(self, groups: IntArray, counts: IntArray, items: pa.Array) -> None:
        """Takes over decoded counters. Raises ValueError unless they are the state of this stack."""
        if not len(items):
            return
        if self.item_type is None or items.type != COLUMN_TYPES[self.item_type] or items.null_count:
            raise ValueError(f"items of type {items.type} where {self.item_type} was expected")
        words = self._hash(items)
        same_group = groups[1:] == groups[:-1]
        totals = np.bincount(groups, counts, minlength=len(self)) + self._view("error")
        sound = (
            (counts > 0).all()
            and (words[1:] > words[:-1])[same_group].all()
            and (self._unpruned or np.bincount(groups).max() <= self.counters)
            and (totals <= self._view("n")).all()
        )
        if not sound:
            raise ValueError("counters out of range or out of order")
        self._held = _Counters(groups, words, counts, items)


def _waiting(unpruned: IntArray) -> IntArray:
    if unpruned.shape != (1,) or unpruned.dtype != np.int64 or unpruned[0] < 1:
        raise ValueError(f"{unpruned.tolist()[:5]} counters that wait to be pruned")
    return unpruned


def _arrow(values: Any) -> pa.Array:
    """Items in Arrow, with one zero and one NaN among floats, as the hash sees them."""
    if isinstance(values, pa.Array):
        return values
    if values.dtype.kind == "f":
        values = np.where(values != values, np.nan, values + 0.0)
    return pa.array(values)


class TopK(SingleSynopsis[TopKStack]):
    """The most frequent items, with certain bounds on how often each came.

    Args:
        k: how many items `top` gives if it is not told.
        capacity: counters, ten times k if None. An item that is more than 1/(capacity + 1) of all values is
            among them, and no frequency is further off than that.
        seed: of the hash. Only synopses of equal k, capacity and seed merge.
    """

    stack_type = TopKStack
    types: ClassVar[tuple[str, ...]] = ("string", "int64", "float64", "bool")

    def __init__(self, k: int = DEFAULT_K, capacity: int | None = None, *, seed: int = DEFAULT_SEED) -> None:
        super().__init__(TopKStack(1, k=k, capacity=capacity, seed=seed))

    @classmethod
    def for_error(cls, epsilon: float, k: int = DEFAULT_K, *, seed: int = DEFAULT_SEED) -> Self:
        """The smallest one whose frequencies are off by at most epsilon·N. Raises InvalidRequest."""
        capacity = int(1 / check_share("epsilon", epsilon))
        if capacity > MAX_CAPACITY:
            raise InvalidRequest("epsilon", epsilon, f"at least {1 / MAX_CAPACITY:.2g}")
        return cls(k, max(capacity, k), seed=seed)

    @property
    def capacity(self) -> int:
        """Counters it was made with."""
        return self._stack.capacity

    def top(self, k: int | None = None) -> list[tuple[Any, Estimate]]:
        """The most frequent items and how often each came, by falling counter. Raises InvalidRequest."""
        ranked = self._stack.top(None if k is None else TopItems(k))
        return [(item, ranked.frequencies[i]) for i, item in enumerate(ranked.items.to_pylist())]


_MOST_COUNTERS = 1 << 16  # of a query's measure: what a frame can carry


def _make(parameters: Parameters, data_type: pa.DataType | None) -> TopKStack:
    return TopKStack(**dict(parameters), item_type=item_type(data_type))


def _size_for(goals: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"capacity": TopK.for_error(goals["epsilon"], goals.get("k", DEFAULT_K)).capacity}


register_kind(TopKStack)
register_function(
    Function(
        "top_k",
        _make,
        types=ITEM_TYPES,
        parameters={
            "k": Parameter.whole(DEFAULT_K, 1, _MOST_COUNTERS // COUNTERS_PER_ITEM),
            "capacity": Parameter.whole(None, MIN_CAPACITY, _MOST_COUNTERS),
        },
        goals={"epsilon": Parameter.share(None)},
        size_for=_size_for,
    )
)
