"""The entries of one slice: per group the pending value V, the sent value F, and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.query import BoundQuery
from edgewater.synopses import (
    BoolArray,
    BoundedError,
    FloatArray,
    GroupedAggregate,
    IntArray,
    MaxStack,
    RowSampleStack,
    SumStack,
    hash_values,
)
from edgewater.synopses.encoding.state import State
from edgewater.wire import Withheld

_COUNTERS = {"last_batch": "<i8", "arrivals": "<i4", "unsent": "<i4", "sends": "<i4", "first": "<f4"}
_NULL: dict[pa.DataType, Any] = {pa.string(): "", pa.int64(): 0, pa.float64(): 0.0, pa.bool_(): False}
"""Replaces null in a group's hash. A collision makes a forecast worse and changes no answer."""


@dataclass(slots=True)
class RecallCache:
    """The averages of a `GroupHistory` for the first groups of a slice, looked up once.

    Attributes:
        slices: `GroupHistory.slices` at the lookup; -1: nothing is cached.
        values: float32 [average, group].
    """

    slices: int = -1
    values: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))


class SliceEntries:
    """Parallel arrays over the groups of one slice.

    Args:
        pending: an empty aggregate for V, the value of records that have arrived and were not sent.
        bounded: the measures for which F, the value sent so far, is kept: those of the budget.

    Attributes:
        newest_batch: the number of the newest batch that updated any group.
    """

    def __init__(self, pending: GroupedAggregate, bounded: Sequence[str] = ()) -> None:
        self.pending = pending
        self._arrays: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(0, dtype) for name, dtype in (*_COUNTERS.items(), *_per_measure(pending, bounded))
        }
        self._bounded = tuple(bounded)
        self._hashes: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._with_error = frozenset(n for n in bounded if isinstance(pending.measures[n], BoundedError))
        self.recall_cache = RecallCache()
        self.newest_batch = 0

    @classmethod
    def for_query(cls, bound: BoundQuery, source: int, bounded: Sequence[str]) -> SliceEntries:
        """Returns the empty entries of a query's slice.

        Args:
            source: identifies the source of the records (`GroupedAggregate.set_source`).
        """
        keys = dict(zip(bound.spec.group_by, bound.group_types, strict=True))
        stacks = {
            m.measure.name: m.measure.function.make(m.measure.parameters, m.argument.type if m.argument else None)
            for m in bound.measures
        }
        aggregate = GroupedAggregate(keys, stacks)
        aggregate.set_source(source)
        return cls(aggregate, bounded)

    def __len__(self) -> int:
        return len(self.pending)

    @property
    def nbytes(self) -> int:
        return self.pending.nbytes + self._hashes.nbytes + sum(a.nbytes for a in self._arrays.values())

    @property
    def bounded(self) -> tuple[str, ...]:
        """The measures of the budget."""
        return self._bounded

    def set_sampling_rate(self, rate: float) -> None:
        """Sets the rate at which the next records were sampled, for measures that are row samples."""
        for stack in self.pending.measures.values():
            if isinstance(stack, RowSampleStack):
                stack.reduce_rate(rate)

    def _column(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name][: len(self)]

    @property
    def has_pending(self) -> BoolArray:
        """Per group: whether there is a value that was not sent."""
        return self._column("unsent") > 0

    @property
    def last_batch(self) -> IntArray:
        """Per group: the number of the batch that last updated it."""
        return self._column("last_batch")

    @property
    def pending_records(self) -> npt.NDArray[np.int32]:
        """Per group: records that were not sent."""
        return self._column("unsent")

    @property
    def arrivals(self) -> npt.NDArray[np.int32]:
        """Per group: records so far, sent or not."""
        return self._column("arrivals")

    @property
    def first_seen(self) -> npt.NDArray[np.float32]:
        """Per group: the elapsed fraction of the slice at its first batch, 0 to 1."""
        return self._column("first")

    @property
    def sends(self) -> npt.NDArray[np.int32]:
        """Per group: how often it was sent."""
        return self._column("sends")

    def squares(self, measure: str) -> FloatArray:
        """Per group: the sum of the squares of the measure's argument over all arrivals."""
        kept = self._arrays.get(f"squares:{measure}")
        return self._column("arrivals").astype(np.float64) if kept is None else kept[: len(self)].astype(np.float64)

    def update(
        self,
        keys: Sequence[pa.Array],
        values: Mapping[str, pa.Array | None],
        rows: int,
        times: IntArray,
        batch_number: int,
        ids: IntArray | None = None,
        elapsed: float = 0.0,
    ) -> None:
        """Adds records.

        Args:
            keys: an Arrow array per key column.
            values: an Arrow array per measure; None: the measure has no argument.
            rows: number of records.
            times: int64 ms, event times.
            batch_number: number of the batch, ascending.
            ids: int64, numbers of the records in their stream, for samples.
            elapsed: the elapsed fraction of the slice, 0 to 1.
        """
        self.newest_batch = max(self.newest_batch, batch_number)
        known = len(self)
        codes = self.pending.update(keys, values, rows, times=times, ids=ids)
        groups = len(self)
        self._grow()
        counts = np.bincount(codes, minlength=groups)
        self._column("arrivals")[:] += counts.astype(np.int32)
        self._column("unsent")[:] += counts.astype(np.int32)
        self._column("last_batch")[codes] = batch_number
        self._column("first")[known:] = elapsed
        for name in self._bounded:
            kept = self._arrays.get(f"squares:{name}")
            argument = values[name]
            if kept is not None and argument is not None:
                numbers = np.nan_to_num(argument.to_numpy(zero_copy_only=False).astype(np.float64))
                kept[:groups] += np.bincount(codes, numbers * numbers, groups).astype(np.float32)

    def add_groups(self, keys: Sequence[pa.Array], rows: int, batch_number: int, elapsed: float) -> None:
        """Adds the groups of records that may all be sampled out; each group then has a value to send."""
        self.newest_batch = max(self.newest_batch, batch_number)
        known = len(self)
        codes = self.pending.encode(keys, rows)
        self._grow()
        unsent = self._column("unsent")
        unsent[codes] = np.maximum(unsent[codes], 1)
        self._column("last_batch")[codes] = batch_number
        self._column("first")[known:] = elapsed

    def _grow(self) -> None:
        groups = len(self.pending)
        if groups > len(self._arrays["last_batch"]):
            capacity = max(groups, 2 * len(self._arrays["last_batch"]))
            self._arrays = {name: _grown(array, capacity) for name, array in self._arrays.items()}

    def accumulated_error(self, measure: str, groups: IntArray | None = None) -> FloatArray:
        """Returns the signed error(F, F ⊕ V) = F ⊕ V − F per group (None: all). For a measure without an error function
        it is the record mass: the number of records that were not sent."""
        if measure in self._with_error:
            pending, sent = self._pending_and_sent(measure, groups)
            change = pending.change(sent)
            if isinstance(pending, MaxStack) and self._has_negative(measure):
                never = (sent == 0.0) & (change > 0.0)
                change = np.where(never, np.inf, change)
            return change
        unsent = self._column("unsent")
        return (unsent if groups is None else unsent[groups]).astype(np.float64)

    def _has_negative(self, measure: str) -> bool:
        """Returns whether the maximum of any group is below 0. Another edge may then send a negative maximum of a
        group, so for a group that this edge has never sent, 0 is no bound of the withheld value."""
        pending, sent = self._pending_and_sent(measure, None)
        return bool((sent < 0.0).any() or (pending.advance(sent) < 0.0).any())

    def has_both_signs(self, measure: str) -> bool:
        """Returns whether there are groups above 0 and groups below 0. The values that several edges have for one group
        may then cancel."""
        total = self.total(measure)
        return bool(total.min(initial=0.0) < 0.0 < total.max(initial=0.0))

    def total(self, measure: str, groups: IntArray | None = None) -> FloatArray:
        """Returns F ⊕ V per group (None: all), the value so far; without an error function, the number of records."""
        if measure in self._with_error:
            pending, sent = self._pending_and_sent(measure, groups)
            return pending.advance(sent)
        arrivals = self._column("arrivals")
        return (arrivals if groups is None else arrivals[groups]).astype(np.float64)

    def _pending_and_sent(self, measure: str, groups: IntArray | None) -> tuple[BoundedError, FloatArray]:
        stack, sent = self.pending.measures[measure], self._column(f"sent:{measure}")
        if groups is not None:
            stack, sent = stack.take(groups), sent[groups]
        return cast(BoundedError, stack), sent

    def hashes(self) -> npt.NDArray[np.uint64]:
        """Returns a 64-bit hash of each group's key, which identifies the group across slices."""
        known = len(self._hashes)
        if known < len(self):
            columns = self.pending.rows(np.arange(known, len(self)))
            fresh = np.zeros(len(self) - known, np.uint64)
            for i, column in enumerate(columns):
                fresh = fresh * np.uint64(0x9E3779B97F4A7C15) + hash_values(column.fill_null(_NULL[column.type]), i)
            self._hashes = np.concatenate([self._hashes, fresh])
        return self._hashes

    def codes(self, keys: Sequence[pa.Array], rows: int) -> IntArray:
        """Returns the numbers of the groups with these keys; adds new groups, with nothing pending."""
        codes = self.pending.encode(keys, rows)
        self._grow()
        return codes

    def send(self, groups: IntArray, recorded: GroupedAggregate | None = None) -> GroupedAggregate:
        """Returns the pending values of these groups; V becomes empty, F becomes F ⊕ V.

        Args:
            recorded: in a replay, the values that were sent for these groups, in their order: F becomes F ⊕ recorded.
        """
        taken = self.pending.take(groups)
        added = taken if recorded is None else recorded
        for name in self._with_error:
            sent = self._column(f"sent:{name}")
            sent[groups] = cast(BoundedError, added.measures[name]).advance(sent[groups])
        self.pending.reset(groups)
        self._column("unsent")[groups] = 0
        self._column("sends")[groups] += 1
        return taken

    def withheld(self) -> tuple[Withheld, ...]:
        """Summarises the pending values over all groups, per measure: the error that a closed slice withholds."""
        result = []
        for name in self._bounded:
            error = np.where(self.has_pending, self.accumulated_error(name), 0.0)
            above, below = np.maximum(error, 0.0), np.maximum(-error, 0.0)
            groups = int(np.count_nonzero(error))
            if groups:
                result.append(
                    Withheld(
                        name,
                        float(above.max()),
                        float(below.max()),
                        float(above.sum()),
                        float(below.sum()),
                        groups,
                    )
                )
        return tuple(result)

    def to_state(self) -> State:
        arrays = {name: self._column(name) for name in self._arrays}
        return State(None, {"pending": self.pending.to_bytes(), **arrays})

    @classmethod
    def from_state(cls, state: State, bounded: Sequence[str]) -> SliceEntries:
        result = cls(GroupedAggregate.from_bytes(state.arrays["pending"]), bounded)
        result._arrays = {name: state.arrays[name] for name in result._arrays}
        result.newest_batch = int(result.last_batch.max(initial=0))
        return result


def _per_measure(pending: GroupedAggregate, bounded: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the arrays (name, dtype) for F, and for sums of squares, from which the spread of sums is forecast."""
    kept: list[tuple[str, str]] = []
    for name in bounded:
        stack = pending.measures[name]
        kept += [(f"sent:{name}", "<f8")] if isinstance(stack, BoundedError) else []
        kept += [(f"squares:{name}", "<f4")] if isinstance(stack, SumStack) else []
    return kept


def _grown(array: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    grown = np.zeros(capacity, array.dtype)
    grown[: len(array)] = array
    return grown
