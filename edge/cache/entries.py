"""The entries of one slice: per group the pending value V, the sent value F, and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edge.cache.arrival_profile import PARTS
from edge.cache.timetable import KeptTimes, Positions, RecordTimes
from edgewater.model.query import BoundQuery
from edgewater.synopses import (
    BoolArray,
    BoundedError,
    EncodedKeys,
    ExtremumStack,
    FloatArray,
    GroupedAggregate,
    Incremental,
    IntArray,
    MaxStack,
    RowSampleStack,
    Stack,
    SumStack,
    hash_values,
)
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.state import State
from edgewater.synopses.registry import stack_from_message
from edgewater.wire import Signs

_COUNTERS = {"last_batch": "<i8", "arrivals": "<i4", "unsent": "<i4", "sends": "<i4", "first": "<f4"}
_PARTS = np.dtype((np.uint16, (PARTS,)))  # a text would be parsed for each slice
_NULL: dict[pa.DataType, Any] = {pa.string(): "", pa.int64(): 0, pa.float64(): 0.0, pa.bool_(): False}
"""Replaces null in a group's hash. A collision makes a forecast worse and changes no answer."""
_MOST_BY_PART = np.iinfo(np.uint16).max
_NO_QUANTA: Mapping[str, float] = MappingProxyType({})
MAX_SIZE = 1e19
"""Larger values take no part in forecasts. The squares of smaller values fit into float32."""
SMALLEST_UNIT = 1e-300  # limit: ratios stay finite
MAX_RATIO = 1e150
"""The maximum of a rank, so that sums of ranks are finite."""


def ratio(values: FloatArray, units: FloatArray | float) -> FloatArray:
    """Returns values in units, for ranks; float64 per group, from 0 to `MAX_RATIO`, also if a unit is 0."""
    with np.errstate(over="ignore"):
        return np.minimum(values / np.maximum(units, SMALLEST_UNIT), MAX_RATIO)


@dataclass(slots=True)
class RecallCache:
    """The averages of a `GroupHistory` for the first groups of a slice. Each group is looked up once.

    Attributes:
        slices: `GroupHistory.slices` at the lookup; -1: nothing is cached.
        groups: number of groups that were looked up.
    """

    slices: int = -1
    groups: int = 0
    _numbers: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    _values: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    _remaining: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((PARTS + 1, 0), np.float32))

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """The averages, [average, group]."""
        return self._values[:, : self.groups]

    @property
    def remaining(self) -> npt.NDArray[np.float32]:
        """The fraction of the group's records that is to come after each part, [part + 1, group]."""
        return self._remaining[:, : self.groups]

    @property
    def numbers(self) -> npt.NDArray[np.int32]:
        """The number of each group in the timetable (`Timetable.numbers_of`)."""
        return self._numbers[: self.groups]

    def grow(self, averages: int, groups: int) -> None:
        """Adds groups, whose values the caller sets."""
        if groups > self._values.shape[1] or averages != len(self._values):
            capacity, known = max(groups, 2 * self.groups), self.groups
            values, remaining = np.empty((averages, capacity), np.float32), np.empty((PARTS + 1, capacity), np.float32)
            numbers = np.empty(capacity, np.int32)
            if known:
                values[:, :known], remaining[:, :known] = self.values, self.remaining
                numbers[:known] = self.numbers
            self._values, self._remaining, self._numbers = values, remaining, numbers
        self.groups = groups


@dataclass(frozen=True, slots=True)
class Shipment:
    """What a frame has of some groups of a slice.

    Attributes:
        groups: int64, the numbers of the groups, in the order of `values`.
        values: the values that are sent.
        rests: by measure, what rounding leaves pending (`DivisibleSum.cut`).
    """

    groups: IntArray
    values: GroupedAggregate
    rests: Mapping[str, Stack]


class SliceEntries:
    """Parallel arrays over the groups of one slice.

    Args:
        pending: an empty aggregate for V, the value of records that have arrived and were not sent.
        bounded: the measures of the budget. For each of them, the entries also store F, the value that was sent so far.

    Attributes:
        bounded: the measures of the budget.
        newest_batch: the number of the newest batch that updated any group.
    """

    def __init__(self, pending: GroupedAggregate, bounded: Sequence[str] = ()) -> None:
        self.pending = pending
        self._empty: dict[str, tuple[npt.DTypeLike, float]] = {
            **{name: (dtype, 0.0) for name, dtype in _COUNTERS.items()},
            "parts": (_PARTS, 0.0),
            **_per_measure(pending, bounded),
        }
        self._arrays: dict[str, npt.NDArray[Any]] = {n: np.zeros(0, dtype) for n, (dtype, _) in self._empty.items()}
        self.bounded = tuple(bounded)
        self._hashes: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._with_error = frozenset(n for n in bounded if _is(pending.measures[n], BoundedError))
        self.recall_cache = RecallCache()
        self.newest_batch = 0
        self._key_order: IntArray = np.zeros(0, np.int64)
        self._unchanged: IntArray | None = None  # None: not known since the last batch
        self._times = KeptTimes()
        self._known: dict[str, Any] = {
            n: s.take(np.zeros(0, np.int64)) for n, s in pending.measures.items() if _is(s, Incremental)
        }

    @classmethod
    def for_query(cls, bound: BoundQuery, source: int, bounded: Sequence[str]) -> SliceEntries:
        """Returns the empty entries of a query's slice.

        Args:
            source: identifies the source of the records (`GroupedAggregate.set_source`).
        """
        keys = dict(zip(bound.spec.group_by, bound.group_types, strict=True))
        stacks = {m.measure.name: m.measure.stack(m.argument.type if m.argument else None) for m in bound.measures}
        aggregate = GroupedAggregate(keys, stacks)
        aggregate.set_source(source)
        return cls(aggregate, bounded)

    def __len__(self) -> int:
        return len(self.pending)

    @property
    def nbytes(self) -> int:
        arrays = sum(a.nbytes for a in self._arrays.values())
        known: int = sum(stack.nbytes for stack in self._known.values())
        return self.pending.nbytes + self._hashes.nbytes + self._times.nbytes + arrays + known

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
    def arrivals_by_part(self) -> npt.NDArray[np.uint16]:
        """Per group and part of the slice: records so far, at most 65,535; [group, part]."""
        return self._column("parts")

    @property
    def first_seen(self) -> npt.NDArray[np.float32]:
        """Per group: the elapsed fraction of the slice at its first batch, 0 to 1."""
        return self._column("first")

    def in_key_order(self, groups: IntArray) -> IntArray:
        """Returns the groups in the order of their keys. Neighbours then have much in common, and compress well.

        Args:
            groups: each group at most once.
        """
        if len(groups) < 2:
            return groups
        if len(groups) < len(self):
            return np.asarray(groups[_order_of(self.pending.rows(groups))], np.int64)
        if len(self._key_order) < len(self):
            self._key_order = _order_of(self.pending.rows())
        return self._key_order

    @property
    def sends(self) -> npt.NDArray[np.int32]:
        """Per group: how often it was sent."""
        return self._column("sends")

    def squares(self, measure: str) -> FloatArray:
        """Per group: the sum of the squares of the measure's argument over all arrivals."""
        sums = self._arrays.get(f"squares:{measure}")
        return self._column("arrivals").astype(np.float64) if sums is None else sums[: len(self)].astype(np.float64)

    def update(
        self,
        keys: Sequence[pa.Array] | EncodedKeys,
        values: Mapping[str, pa.Array | None],
        rows: int,
        times: IntArray,
        batch_number: int,
        ids: IntArray | None = None,
        elapsed: float = 0.0,
        parts: IntArray | None = None,
        positions: Positions | None = None,
    ) -> None:
        """Adds records.

        Args:
            keys: an Arrow array per key column, or the encoded keys.
            values: an Arrow array per measure; None: the measure has no argument.
            rows: number of records.
            times: int64 ms, event times.
            batch_number: number of the batch, ascending.
            ids: int64, numbers of the records in their stream, for samples.
            elapsed: the elapsed fraction of the slice, 0 to 1.
            parts: int64, the part of the slice per record (`parts_of`), or the part of all records; None: unknown.
            positions: of each record in the slice; None: unknown.
        """
        self.newest_batch, self._unchanged = max(self.newest_batch, batch_number), None
        known = len(self)
        encoded = keys if isinstance(keys, EncodedKeys) else EncodedKeys.of(keys, rows)
        # Counters of groups are updated once per distinct key, not per record.
        changed, counts = self.pending.look_up(encoded), encoded.counts
        codes = changed[encoded.inverse]
        self.pending.update_groups(codes, values, times=times, ids=ids)
        groups = len(self)
        self._grow()
        arrays, added = self._arrays, counts.astype(np.int32)
        arrays["arrivals"][changed] += added
        arrays["unsent"][changed] += added
        if parts is not None and len(parts):
            self._count_parts(encoded.inverse, changed, counts, parts)
        self._times.keep(codes, positions, groups)
        arrays["last_batch"][changed] = batch_number
        arrays["first"][known:groups] = elapsed
        for name in self.bounded:
            kept = self._arrays.get(f"squares:{name}")
            argument = values[name]
            if kept is not None and argument is not None:
                numbers = argument.to_numpy(zero_copy_only=False).astype(np.float64)
                numbers = np.where(np.abs(numbers) <= MAX_SIZE, numbers, 0.0)
                squares = kept[:groups] + np.bincount(codes, numbers * numbers, groups)
                kept[:groups] = np.minimum(squares, MAX_SIZE**2).astype(np.float32)

    def _count_parts(self, inverse: IntArray, changed: IntArray, counts: IntArray, parts: IntArray) -> None:
        first, last = int(parts.min()), int(parts.max())
        by_part = self._arrays["parts"]
        if first == last:  # in nearly every batch
            by_part[changed, first] = np.minimum(by_part[changed, first] + counts, _MOST_BY_PART)
        else:
            here = np.bincount(inverse * PARTS + parts, minlength=PARTS * len(counts)).reshape(len(counts), PARTS)
            by_part[changed] = np.minimum(by_part[changed] + here, _MOST_BY_PART)

    @property
    def keeps_times(self) -> bool:
        """Whether the times of all records so far are stored."""
        return self._times.is_complete

    def take_times(self) -> tuple[npt.NDArray[np.int32], RecordTimes] | None:
        """Returns the groups and times of all records, once; None: they are not known, or too many."""
        times = self._times.take()
        return None if times is None else (times[0], RecordTimes(self.hashes()[times[0]], times[1]))

    def add_groups(self, keys: Sequence[pa.Array], rows: int, batch_number: int, elapsed: float) -> None:
        """Adds the groups of records whose values may all be sampled out. Each group then has a value to send."""
        self.newest_batch, self._unchanged = max(self.newest_batch, batch_number), None
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
            self._arrays = {name: _grown(a, capacity, self._empty[name][1]) for name, a in self._arrays.items()}
        for known in self._known.values():
            known.grow(groups)

    def accumulated_error(self, measure: str, groups: IntArray | None = None) -> FloatArray:
        """Returns the signed error(F, F ⊕ V) = F ⊕ V − F, float64 per group (None: all groups); infinite if unknown.

        For a measure without an error function it is the record mass: the number of records that were not sent.
        """
        error = self.error(measure, groups)
        return np.where(np.isnan(error), np.inf, error)

    def exceeds(self, measure: str, limit: float, groups: IntArray | None = None) -> BoolArray:
        """Returns which groups (None: all) have an `accumulated_error` beyond ±limit."""
        return ~(np.abs(self.error(measure, groups)) <= limit)  # true for NaN, too

    def error(self, measure: str, groups: IntArray | None = None) -> FloatArray:
        """Returns `accumulated_error`, but NaN if the value would become NaN, which counts as an error as well."""
        if measure not in self._with_error:
            unsent = self._column("unsent")
            return (unsent if groups is None else unsent[groups]).astype(np.float64)
        pending, sent = self._pending_and_sent(measure, groups)
        error = pending.change(sent)
        # Another edge may send a negative maximum of a group. So for a group that this edge has never sent, 0 does not
        # bound the withheld value.
        if isinstance(pending, MaxStack) and self.signs(measure) is not Signs.NOT_NEGATIVE:
            error = np.where(_never_sent(pending, sent), np.inf, error)
        # A value that is NaN at the center stays NaN there, whatever is sent.
        return np.where(np.isnan(sent), 0.0, error) if sent.dtype.kind == "f" else error

    def never_sent(self, measure: str) -> BoolArray:
        """Returns a mask of the groups that have a value of an extremum, if none of it was sent."""
        return _never_sent(*self._pending_and_sent(measure, None))

    def signs(self, measure: str) -> Signs:
        """Returns the signs of the groups' values.

        If both signs occur, values of one group at several edges may cancel.
        """
        total = self.total(measure)
        if not (total < 0.0).any():
            return Signs.NOT_NEGATIVE
        return Signs.BOTH if (total > 0.0).any() else Signs.NEGATIVE

    def total(self, measure: str, groups: IntArray | None = None) -> FloatArray:
        """Returns F ⊕ V, the value so far, float64 per group (None: all groups); 0 for a group without a value.

        For a measure without an error function it is the number of records.
        """
        if measure not in self._with_error:
            arrivals = self._column("arrivals")
            return (arrivals if groups is None else arrivals[groups]).astype(np.float64)
        pending, sent = self._pending_and_sent(measure, groups)
        total = pending.advance(sent)
        if isinstance(pending, ExtremumStack):
            return np.where(total == pending.unsent, 0.0, total.astype(np.float64))
        return total

    def size(self, measure: str, groups: IntArray | None = None) -> FloatArray:
        """Returns |F ⊕ V| per group (None: all) for forecasts and ranks: 0 where it is not finite."""
        total = np.abs(self.total(measure, groups))
        return np.where(total <= MAX_SIZE, total, 0.0)

    def _pending_and_sent(self, measure: str, groups: IntArray | None) -> tuple[BoundedError, npt.NDArray[Any]]:
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

    def shipment(self, groups: IntArray, quanta: Mapping[str, float] = _NO_QUANTA) -> Shipment:
        """Returns the values to send of these groups now. It changes nothing.

        Of `Incremental` values, the part that was sent before is left out.

        Args:
            quanta: rounding units by measure. Of such a measure only multiples are sent; the rest stays pending
                (`DivisibleSum.cut`).
        """
        values = self.pending.take(groups)
        rests = {name: cast(Any, values.measures[name]).cut(quantum) for name, quantum in quanta.items()}
        for name, known in self._known.items():
            values.replace(name, cast(Any, values.measures[name]).beyond(known.take(groups)))
        return Shipment(groups, values, rests)

    def send(self, shipment: Shipment) -> None:
        """Removes what was sent: V becomes the rests, F becomes F ⊕ the sent values."""
        groups, values = shipment.groups, shipment.values
        for name, known in self._known.items():
            known.merge(values.measures[name], groups)
        for name in self._with_error:
            sent = self._column(f"sent:{name}")
            sent[groups] = cast(BoundedError, values.measures[name]).advance(sent[groups])
        self.pending.reset(groups)
        if self._unchanged is not None and len(self._unchanged):
            self._unchanged = np.setdiff1d(self._unchanged, groups)
        self._column("unsent")[groups] = 0
        for name, rest in shipment.rests.items():
            self.pending.measures[name].merge(rest, groups)
            has_rest = cast(Any, rest).change(np.zeros(len(groups))) != 0.0
            self._column("unsent")[groups[has_rest]] = 1
        self._column("sends")[groups] += 1

    def unchanged(self) -> IntArray:
        """Returns the groups whose pending values change nothing at the center, such as clients that it has counted."""
        if self._unchanged is not None:
            return self._unchanged
        known_all = self._known and len(self._known) == len(self.pending.measures)
        groups = np.flatnonzero(self.has_pending & (self.sends > 0)) if known_all else np.zeros(0, np.int64)
        for name, known in self._known.items():
            pending = cast(Any, self.pending.measures[name].take(groups))
            groups = groups[~pending.beyond(known.take(groups)).holds_values]
        self._unchanged = groups
        return groups

    def forget(self, groups: IntArray) -> None:
        """Empties the pending values of groups that are `unchanged`."""
        self.pending.reset(groups)
        self._column("unsent")[groups] = 0
        self._unchanged = np.zeros(0, np.int64)

    def to_state(self) -> State:
        arrays = {name: self._column(name) for name in self._arrays}
        arrays |= self._times.to_arrays()
        known = {f"known:{name}": codec.seal(stack.to_message()) for name, stack in self._known.items() if len(stack)}
        return State(None, {"pending": self.pending.to_bytes(), **known, **arrays})

    @classmethod
    def from_state(cls, state: State, bounded: Sequence[str]) -> SliceEntries:
        result = cls(GroupedAggregate.from_bytes(state.arrays["pending"]), bounded)
        result._arrays = {name: state.arrays[name] for name in result._arrays if name in state.arrays}
        for name in (n for n in result._known if f"known:{n}" in state.arrays):
            result._known[name] = stack_from_message(codec.unseal(state.arrays[f"known:{name}"]))
        result._grow()
        result.newest_batch = int(result.last_batch.max(initial=0))
        if len(result) or "timed" in state.arrays:
            result._times = KeptTimes.from_arrays(state.arrays)
        return result


def largest_size(entries: SliceEntries, measure: str) -> float:
    """Returns the largest `SliceEntries.size` of any group, as a unit for ranks; 0 if there is none.

    If all values are beyond `MAX_SIZE`, it is the largest finite value.
    """
    largest = float(entries.size(measure).max(initial=0.0))
    if largest == 0.0:
        total = np.abs(entries.total(measure))
        largest = float(total[np.isfinite(total)].max(initial=0.0))
    return largest


def _never_sent(pending: BoundedError, sent: npt.NDArray[Any]) -> BoolArray:
    """Returns a mask of the groups that have a value, if none of it was sent."""
    assert isinstance(pending, ExtremumStack)
    return np.asarray((sent == pending.unsent) & (pending.advance(sent) != sent), bool)


def _is(stack: Any, protocol: type) -> bool:
    """Returns `isinstance(stack, protocol)`, which looks at each attribute of a runtime protocol, once per class."""
    kind = type(stack), protocol
    if kind not in _CONFORMS:
        _CONFORMS[kind] = isinstance(stack, protocol)
    return _CONFORMS[kind]


_CONFORMS: dict[tuple[type, type], bool] = {}


def _order_of(columns: Sequence[pa.Array]) -> IntArray:
    """Returns the positions of distinct keys in ascending order; at least one column."""
    texts = [c.cast(pa.uint8()) if pa.types.is_boolean(c.type) else c for c in columns]
    if len(texts) == 1:
        order = pc.array_sort_indices(texts[0])
    else:
        names = [str(i) for i in range(len(columns))]
        order = pc.sort_indices(pa.table(texts, names), [(name, "ascending") for name in names])
    return np.asarray(order, np.int64)


def _per_measure(pending: GroupedAggregate, bounded: Sequence[str]) -> dict[str, tuple[npt.DTypeLike, float]]:
    """Returns the arrays of the measures: name -> dtype, and the value of a group without records.

    `sent:` has what was sent of a measure. `squares:` has sums of squares, which give the spread from which sums are
    forecast.
    """
    kept: dict[str, tuple[npt.DTypeLike, float]] = {}
    for name in bounded:
        stack = pending.measures[name]
        if isinstance(stack, ExtremumStack):
            kept[f"sent:{name}"] = stack.arrays["best"]
        elif isinstance(stack, BoundedError):
            kept[f"sent:{name}"] = ("<f8", 0.0)
        if isinstance(stack, SumStack):
            kept[f"squares:{name}"] = ("<f4", 0.0)
    return kept


def _grown(array: npt.NDArray[Any], capacity: int, empty: float) -> npt.NDArray[Any]:
    shape = capacity, *array.shape[1:]
    grown = np.zeros(shape, array.dtype) if empty == 0.0 else np.full(shape, empty, array.dtype)
    if len(array):
        grown[: len(array)] = array
    return grown
