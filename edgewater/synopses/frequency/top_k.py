"""The most frequent items, from a bounded number of counters per group.

Metwally et al., "SpaceSaving" (2005), in the form of Misra and Gries (1982), which is the same summary without its
smallest counter (Agarwal et al., "Mergeable summaries", PODS 2012, lemma 1). Whenever there are more than `capacity`
counters, the (capacity + 1)-th largest counter is subtracted from all, and counters that reach 0 are dropped. The sum
of the subtracted amounts, `error`, bounds the loss of any item. Each subtraction removes at least capacity + 1 times
its amount from the total. For any order of merges therefore

    counter ≤ frequency ≤ counter + error,  error ≤ (N - Σ counters)/(capacity + 1) ≤ N/(capacity + 1).

Both bounds are deterministic, and counts are exact as long as a group has had at most `capacity` distinct items. The
distinct items of a batch are counted exactly before they are added to the counters. Which items have a counter depends
on the order of merges, so answers agree only within their intervals: the stack is not commutative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from edgewater.base.errors import InvalidRequest
from edgewater.base.streams import COLUMN_TYPES
from edgewater.synopses.array_stack import register_stack
from edgewater.synopses.base import (
    MIN_PENDING,
    Count,
    Estimate,
    Estimates,
    IntArray,
    Properties,
    Question,
    Questions,
    run_indices,
)
from edgewater.synopses.checks import check_fraction, check_whole
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import KEYS, MAX_COUNT, Field, Layout, count, field, totals
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray
from edgewater.synopses.items import ItemStack
from edgewater.synopses.questions import Frequency, RankedItems, TopItems
from edgewater.synopses.registry import Parameter
from edgewater.synopses.single import SingleSynopsis
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

DEFAULT_K, COUNTERS_PER_ITEM = 100, 10
MIN_CAPACITY, MAX_CAPACITY = 1, 1 << 20  # limit: memory of a synopsis


@dataclass(slots=True)
class _Counters:
    """Counters, one per row, sorted by group and then by the item's hash. Read-only."""

    groups: IntArray
    words: WordArray
    counts: IntArray
    items: pa.Array | None  # None: there are no items, and their type is not known yet

    def __len__(self) -> int:
        return len(self.groups)

    def rows(self, at: IntArray) -> _Counters:
        items = None if self.items is None else self.items.take(pa.array(at))
        return _Counters(self.groups[at], self.words[at], self.counts[at], items)


def _no_counters() -> _Counters:
    return _Counters(np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.int64), None)


class TopKStack(ItemStack):
    """The counters of many groups.

    Args:
        k: the default number of items of `top`.
        capacity: counters per group. Only stacks of equal k and capacity merge.
        level: how many times release 0.3.0 has halved the capacity. Only stacks of equal levels merge.
    """

    kind: ClassVar[str] = "top_k"
    properties: ClassVar[Properties] = Properties(commutative=False)
    questions: ClassVar[Questions] = (Count, Frequency)
    required: ClassVar[tuple[str, ...]] = ("k", "capacity")
    carried: ClassVar[tuple[str, ...]] = ("level", "seed", "item_type")
    arrays: ClassVar[dict[str, tuple[str, float]]] = {"n": ("<i8", 0), "error": ("<i8", 0)}
    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout.of(
            field("level and unpruned counters", "<i8", 2, least=0, most=1 << 62),
            count("n"),
            count("error"),
            totals("counters per group", "counters"),
            field("counters", "<i8", "counters", least=1, most=MAX_COUNT, counts=True),
            Field("items", (KEYS,), (("counters",),)),
        ),
    )

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
        self._held = _no_counters()
        self._runs: list[_Counters] = []
        self._unpruned = 0  # counters added since the last pruning, before duplicates were combined

    @property
    def counters(self) -> int:
        """The current number of counters per group: the capacity, halved per level."""
        return self.capacity >> self.level

    @property
    def nbytes(self) -> int:
        runs = [self._held, *self._runs]
        arrays = sum(r.groups.nbytes + r.words.nbytes + r.counts.nbytes for r in runs)
        items: int = sum(r.items.nbytes for r in runs if r.items is not None)
        return super().nbytes + arrays + items

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        """Adds a batch: Arrow strings, or a NumPy array of bool, integers or floats."""
        self._check_item_type(values)
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
        """Adds counters. Prunes when the added counters exceed the capacity of all groups."""
        if not len(run):
            return
        self._runs.append(run)
        self._unpruned += len(run)
        if self._unpruned > max(self.counters * len(self), MIN_PENDING):
            self.compact()

    def compact(self) -> None:
        """Prunes the counters before the state is shipped. Later states depend on when this happens."""
        self._held, lost = self._pruned()
        self._view("error")[:] += lost
        self._unpruned = 0

    def _combined(self) -> _Counters:
        """Returns all counters. Each item is there once per group."""
        if self._runs:
            runs = [run for run in (self._held, *self._runs) if len(run)]
            groups, words, counts = (
                np.concatenate([getattr(run, name) for run in runs]) for name in ("groups", "words", "counts")
            )
            order = np.lexsort((words, groups))
            groups, words = groups[order], words[order]
            differs = (groups[1:] != groups[:-1]) | (words[1:] != words[:-1])
            first = np.flatnonzero(np.concatenate([[True], differs]))
            items = pa.concat_arrays([run.items for run in runs]).take(pa.array(order[first]))
            self._held = _Counters(groups[first], words[first], np.add.reduceat(counts[order], first), items)
            self._runs = []
        return self._held

    def _pruned(self) -> tuple[_Counters, IntArray]:
        """Returns at most `counters` counters per group, and per group the amount that was subtracted from its
        counters.
        """
        held = self._combined()
        lost = np.zeros(len(self), np.int64)
        sizes = np.bincount(held.groups, minlength=len(self))
        crowded = np.flatnonzero(sizes > self.counters)
        if not len(crowded):
            return held, lost
        descending = np.lexsort((-held.counts, held.groups))
        begins = (np.cumsum(sizes) - sizes)[crowded]
        lost[crowded] = held.counts[descending[begins + self.counters]]
        left = held.counts - lost[held.groups]
        kept = np.flatnonzero(left > 0)
        result = held.rows(kept)
        result.counts = left[kept]
        return result, lost

    def merge(self, other: Self, codes: IntArray) -> None:
        self._require_mergeable(other)
        theirs, lost = other._pruned()
        n, error = other._view("n"), other._view("error") + lost
        self._view("n")[codes] += n
        self._view("error")[codes] += error
        self._append(_Counters(codes[theirs.groups], theirs.words, theirs.counts, theirs.items))

    def take(self, groups: IntArray) -> Self:
        """Returns a pruned copy of these groups, in this order."""
        result = super().take(groups)
        held, lost = self._pruned()
        result._view("error")[:] += lost[groups]
        starts, ends = (np.searchsorted(held.groups, groups, side) for side in ("left", "right"))
        counts = ends - starts
        result._held = held.rows(run_indices(starts, counts))
        result._held.groups = np.repeat(np.arange(len(groups)), counts)
        return result

    def reset(self, groups: IntArray) -> None:
        super().reset(groups)
        held = self._combined()
        self._held = held.rows(np.flatnonzero(~np.isin(held.groups, groups)))

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the number of values per group (the default question), or the frequency of an item."""
        self.check(question)
        if not isinstance(question, Frequency):
            return Estimates.exact(self._view("n"))
        lower = np.zeros(len(self), np.int64)
        held, lost = self._pruned()
        word = self._hash_item(question.item)
        if word is not None:
            at = np.flatnonzero(held.words == word[0])
            lower[held.groups[at]] = held.counts[at]
        return self._between(lower, self._view("error") + lost)

    def top(self, question: TopItems | None = None) -> RankedItems:
        """Returns the items with the largest counters per group; ties in the order of their hashes."""
        k = self.k if question is None else check_whole("k", question.k, 1, self.counters)
        held, lost = self._pruned()
        ranked = held.rows(np.lexsort((held.words, -held.counts, held.groups)))
        sizes = np.bincount(ranked.groups, minlength=len(self))
        rank = np.arange(len(ranked)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        best = ranked.rows(np.flatnonzero(rank < k))
        kind = pa.null() if self.item_type is None else COLUMN_TYPES[self.item_type]
        items = pa.nulls(0, kind) if best.items is None else best.items
        return RankedItems(best.groups, items, self._between(best.counts, (self._view("error") + lost)[best.groups]))

    def _between(self, lower: IntArray, error: IntArray) -> Estimates:
        """Returns SpaceSaving's estimates: the upper bound for an item with a counter, 0 for an item without a
        counter.
        """
        upper = lower + error
        value, low, high = (a.astype(np.float64) for a in (np.where(lower > 0, upper, 0), lower, upper))
        return Estimates(value, low, high, 1.0, "space_saving")

    def to_message(self) -> SynopsisMessage:
        """Returns the whole state.

        It contains the number of unpruned counters, which decides when the next pruning happens.
        """
        message = self._header()
        held = self._combined()
        sizes = np.bincount(held.groups, minlength=len(self))
        arrays = [np.array([self.level, self._unpruned]), self._view("n"), self._view("error"), sizes, held.counts]
        message.arrays.extend(codec.encode(array) for array in arrays)
        message.arrays.append(codec.encode_keys(held.items if len(held) else pa.array([], pa.int64())))
        return message

    @classmethod
    def _decoded(cls, given: dict[str, Any], arrays: list[Any]) -> Self:
        (level, unpruned), n, _, sizes, counts, items = arrays
        result = super()._decoded({**given, "level": int(level)}, arrays[1:])
        result._unpruned = int(unpruned)
        result._set_counters(np.repeat(np.arange(len(n)), sizes), counts, items)
        return result

    def _set_counters(self, groups: IntArray, counts: IntArray, items: pa.Array) -> None:
        """Sets decoded counters. Raises ValueError unless they are a valid state."""
        if (self._view("error") > self._view("n")).any():
            raise ValueError("an error above the number of values")
        if not len(items):
            return
        if self.item_type is None or items.type != COLUMN_TYPES[self.item_type] or items.null_count:
            raise ValueError(f"items of type {items.type} where {self.item_type} was expected")
        words = self._hash(items)
        same_group = groups[1:] == groups[:-1]
        totals = np.bincount(groups, counts, minlength=len(self)) + self._view("error")
        valid = (
            (words[1:] > words[:-1])[same_group].all()
            and (self._unpruned or np.bincount(groups).max() <= self.counters)
            and (totals <= self._view("n")).all()
        )
        if not valid:
            raise ValueError("counters out of range or out of order")
        self._held = _Counters(groups, words, counts, items)


def _arrow(values: Any) -> pa.Array:
    """Converts items to Arrow, with one zero and one NaN among floats, as the hash treats them."""
    if isinstance(values, pa.Array):
        return values
    if values.dtype.kind == "f":
        values = np.where(values != values, np.nan, values + 0.0)
    return pa.array(values)


class TopK(SingleSynopsis[TopKStack]):
    """The most frequent items, with deterministic bounds of their frequencies.

    Args:
        k: the default number of items of `top`.
        capacity: number of counters; None: ten times k. Every item with a frequency above N/(capacity + 1) has a
            counter. No frequency is off by more than N/(capacity + 1).
        seed: seed of the hash. Only synopses of equal k, capacity and seed merge.

    >>> errors = TopK(2)
    >>> errors.update(["timeout", "refused", "timeout", "reset", "timeout", "refused"])
    >>> [(item, int(found.value)) for item, found in errors.top()]
    [('timeout', 3), ('refused', 2)]
    """

    stack_type = TopKStack

    def __init__(self, k: int = DEFAULT_K, capacity: int | None = None, *, seed: int = DEFAULT_SEED) -> None:
        super().__init__(TopKStack(1, k=k, capacity=capacity, seed=seed))

    @classmethod
    def for_error(cls, epsilon: float, k: int = DEFAULT_K, *, seed: int = DEFAULT_SEED) -> Self:
        """Returns the smallest summary whose frequencies are off by at most epsilon·N. Raises InvalidRequest."""
        capacity = int(1 / check_fraction("epsilon", epsilon))
        if capacity > MAX_CAPACITY:
            raise InvalidRequest("epsilon", epsilon, f"at least {1 / MAX_CAPACITY:.2g}")
        return cls(k, max(capacity, k), seed=seed)

    @property
    def capacity(self) -> int:
        """The number of counters."""
        return self.stack.capacity

    def top(self, k: int | None = None) -> list[tuple[Any, Estimate]]:
        """Returns the most frequent items and their frequencies, by descending counter. Raises InvalidRequest."""
        ranked = self.stack.top(None if k is None else TopItems(k))
        return [(item, ranked.frequencies[i]) for i, item in enumerate(ranked.items.to_pylist())]


_QUERY_CAPACITY = 1 << 16  # limit: memory of a frame


def _size_for(goals: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"capacity": TopK.for_error(goals["epsilon"], goals.get("k", DEFAULT_K)).capacity}


register_stack(
    TopKStack,
    parameters={
        "k": Parameter.whole(DEFAULT_K, 1, _QUERY_CAPACITY // COUNTERS_PER_ITEM),
        "capacity": Parameter.whole(None, MIN_CAPACITY, _QUERY_CAPACITY),
    },
    goals={"epsilon": Parameter.fraction(None)},
    size_for=_size_for,
)
