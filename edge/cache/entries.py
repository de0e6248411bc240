"""The entries of one slice: per group the pending value V, the sent value F, and the last touch."""

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
from edgewater.synopses.encoding import codec
from edgewater.wire.frames import Withheld
from edgewater.wire.synopsis_pb2 import Array as ArrayMessage

_COUNTERS = {"touched": "<i8", "arrivals": "<i4", "unsent": "<i4", "sends": "<i4", "first": "<f4"}
_NULL: dict[pa.DataType, Any] = {pa.string(): "", pa.int64(): 0, pa.float64(): 0.0, pa.bool_(): False}
"""What stands for null in a group's hash; a group it is confused with costs a forecast, no answer."""


@dataclass(slots=True)
class Remembered:
    """What a history of so many slices knows of the first groups (a row per number that it keeps of a group)."""

    slices: int = -1
    values: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))


class SliceEntries:
    """Parallel arrays over the groups of one slice.

    Args:
        pending: an empty aggregate; it holds V, what has arrived and was not sent.
        bounded: the measures for which F, the value sent so far, is kept. Only budgets need it.

    Attributes:
        newest: the number of the newest batch that updated any group.
    """

    def __init__(self, pending: GroupedAggregate, bounded: Sequence[str] = ()) -> None:
        self.pending = pending
        self._arrays: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(0, dtype) for name, dtype in (*_COUNTERS.items(), *_per_measure(pending, bounded))
        }
        self._bounded = tuple(bounded)
        self._hashes: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._with_error = frozenset(n for n in bounded if isinstance(pending.measures[n], BoundedError))
        self.remembered = Remembered()
        self.newest = 0

    @classmethod
    def of(cls, bound: BoundQuery, source: int, bounded: Sequence[str]) -> SliceEntries:
        """Of a query. `source`: who numbers its records (`GroupedAggregate.set_source`)."""
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
        """The measures that the budget is about."""
        return self._bounded

    def offer(self, rate: float) -> None:
        """Records come that were drawn with this probability, to measures that are rows of a sample."""
        for stack in self.pending.measures.values():
            if isinstance(stack, RowSampleStack):
                stack.reduce_rate(rate)

    def _of(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name][: len(self)]

    @property
    def has_pending(self) -> BoolArray:
        """Per group: is there anything that was not sent?"""
        return self._of("unsent") > 0

    @property
    def touched(self) -> IntArray:
        """Per group: the number of the batch that last updated it."""
        return self._of("touched")

    @property
    def pending_records(self) -> npt.NDArray[np.int32]:
        """Per group: records that were not sent."""
        return self._of("unsent")

    @property
    def arrivals(self) -> npt.NDArray[np.int32]:
        """Per group: records so far, sent or not."""
        return self._of("arrivals")

    @property
    def first_seen(self) -> npt.NDArray[np.float32]:
        """Per group: the part of the slice that had passed at its first batch, 0 to 1."""
        return self._of("first")

    @property
    def sends(self) -> npt.NDArray[np.int32]:
        """Per group: how often it has left."""
        return self._of("sends")

    def squares(self, measure: str) -> FloatArray:
        """Per group: the sum of the squares of the measure's argument over all arrivals."""
        kept = self._arrays.get(f"squares:{measure}")
        return self._of("arrivals").astype(np.float64) if kept is None else kept[: len(self)].astype(np.float64)

    def update(
        self,
        keys: Sequence[pa.Array],
        values: Mapping[str, pa.Array | None],
        rows: int,
        times: IntArray,
        touch: int,
        ids: IntArray | None = None,
        elapsed: float = 0.0,
    ) -> None:
        """Adds `rows` records; `touch` numbers the batch, `ids` the records (for samples).

        Args:
            elapsed: the part of the slice that has passed, 0 to 1.
        """
        self.newest = max(self.newest, touch)
        known = len(self)
        codes = self.pending.update(keys, values, rows, times=times, ids=ids)
        groups = len(self)
        self._grow()
        counts = np.bincount(codes, minlength=groups)
        self._of("arrivals")[:] += counts.astype(np.int32)
        self._of("unsent")[:] += counts.astype(np.int32)
        self._of("touched")[codes] = touch
        self._of("first")[known:] = elapsed
        for name in self._bounded:
            kept = self._arrays.get(f"squares:{name}")
            argument = values[name]
            if kept is not None and argument is not None:
                numbers = np.nan_to_num(argument.to_numpy(zero_copy_only=False).astype(np.float64))
                kept[:groups] += np.bincount(codes, numbers * numbers, groups).astype(np.float32)

    def announce(self, keys: Sequence[pa.Array], rows: int, touch: int, elapsed: float) -> None:
        """Makes the groups of these records known, of which perhaps none is processed: each has something to send."""
        self.newest = max(self.newest, touch)
        known = len(self)
        codes = self.pending.encode(keys, rows)
        self._grow()
        unsent = self._of("unsent")
        unsent[codes] = np.maximum(unsent[codes], 1)
        self._of("touched")[codes] = touch
        self._of("first")[known:] = elapsed

    def _grow(self) -> None:
        groups = len(self.pending)
        if groups > len(self._arrays["touched"]):
            capacity = max(groups, 2 * len(self._arrays["touched"]))
            self._arrays = {name: _grown(array, capacity) for name, array in self._arrays.items()}

    def accumulated_error(self, measure: str, groups: IntArray | None = None) -> FloatArray:
        """error(F, F ⊕ V) per group (None: all), signed: F ⊕ V − F; for a measure without an error function
        of its own its record mass, the records that were not sent."""
        if measure in self._with_error:
            pending, sent = self._pending_and_sent(measure, groups)
            change = pending.change(sent)
            if isinstance(pending, MaxStack) and self._has_negative(measure):
                never = (sent == 0.0) & (change > 0.0)
                change = np.where(never, np.inf, change)
            return change
        unsent = self._of("unsent")
        return (unsent if groups is None else unsent[groups]).astype(np.float64)

    def _has_negative(self, measure: str) -> bool:
        """Is the greatest value of any group below 0? Then of the same group it may be so at another edge, which
        sends it; and that is no bound for what this one keeps back of a group it has never sent."""
        pending, sent = self._pending_and_sent(measure, None)
        return bool((sent < 0.0).any() or (pending.advance(sent) < 0.0).any())

    def has_both_signs(self, measure: str) -> bool:
        """Are there groups above 0 and groups below? Then of one group its parts at several edges may cancel."""
        total = self.total(measure)
        return bool(total.min(initial=0.0) < 0.0 < total.max(initial=0.0))

    def total(self, measure: str, groups: IntArray | None = None) -> FloatArray:
        """F ⊕ V per group (None: all): the value so far; of a measure by record mass, its records so far."""
        if measure in self._with_error:
            pending, sent = self._pending_and_sent(measure, groups)
            return pending.advance(sent)
        arrivals = self._of("arrivals")
        return (arrivals if groups is None else arrivals[groups]).astype(np.float64)

    def _pending_and_sent(self, measure: str, groups: IntArray | None) -> tuple[BoundedError, FloatArray]:
        stack, sent = self.pending.measures[measure], self._of(f"sent:{measure}")
        if groups is not None:
            stack, sent = stack.take(groups), sent[groups]
        return cast(BoundedError, stack), sent

    def hashes(self) -> npt.NDArray[np.uint64]:
        """A 64-bit hash of each group's key: what a group is known by from slice to slice."""
        known = len(self._hashes)
        if known < len(self):
            columns = self.pending.rows(np.arange(known, len(self)))
            fresh = np.zeros(len(self) - known, np.uint64)
            for i, column in enumerate(columns):
                fresh = fresh * np.uint64(0x9E3779B97F4A7C15) + hash_values(column.fill_null(_NULL[column.type]), i)
            self._hashes = np.concatenate([self._hashes, fresh])
        return self._hashes

    def codes(self, keys: Sequence[pa.Array], rows: int) -> IntArray:
        """The numbers of the groups with these keys; a group that is not there yet is added, with nothing pending."""
        codes = self.pending.encode(keys, rows)
        self._grow()
        return codes

    def send(self, groups: IntArray, told: GroupedAggregate | None = None) -> GroupedAggregate:
        """Takes the pending values of these groups out: V becomes empty, F becomes F ⊕ V.

        Args:
            told: of a replay, what has left for these groups, in their order: F becomes F ⊕ that.
        """
        taken = self.pending.take(groups)
        left = taken if told is None else told
        for name in self._with_error:
            sent = self._of(f"sent:{name}")
            sent[groups] = cast(BoundedError, left.measures[name]).advance(sent[groups])
        self.pending.reset(groups)
        self._of("unsent")[groups] = 0
        self._of("sends")[groups] += 1
        return taken

    def withheld(self) -> tuple[Withheld, ...]:
        """What is pending, per measure, over all groups: what a closed slice keeps back."""
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

    def snapshot(self) -> list[bytes]:
        """The whole state as blobs, read back by `restore`."""
        arrays = [self._of(name) for name in self._arrays]
        return [self.pending.to_bytes(), *(codec.encode(a).SerializeToString(deterministic=True) for a in arrays)]

    @classmethod
    def restore(cls, blobs: Sequence[bytes], bounded: Sequence[str]) -> SliceEntries:
        result = cls(GroupedAggregate.from_bytes(blobs[0]), bounded)
        arrays = [codec.decode(ArrayMessage.FromString(blob)) for blob in blobs[1:]]
        result._arrays = dict(zip(result._arrays, arrays, strict=True))
        result.newest = int(result.touched.max(initial=0))
        return result


def _per_measure(pending: GroupedAggregate, bounded: Sequence[str]) -> list[tuple[str, str]]:
    """F of what has an error function; and squares of what is summed, to forecast how it spreads."""
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
