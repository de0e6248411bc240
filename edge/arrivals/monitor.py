"""Collects the arrival statistics of a query without groups: delays and values, per sub-stream.

The delays (in slots) and the counts cover all events. The sums of values cover the sampled events, because the values
of other events may not have been evaluated. If all values have been evaluated, the least and the greatest value are
known, too. A sample alone does not bound the values outside of it. All statistics can be merged, over the batches of an
edge and over edges.

Arrival times are from the edge's clock, corrected by the estimated clock offset. Clock errors remain. If the event time
is after the arrival time by at most `max_skew_ms`, the delay is 0. An event further in the future is not counted, so a
device with a wrong clock can neither close windows nor cause negative delays.

The events that arrive in one slot are counted together, so that small batches cost little more than large ones. The
cost per event is a maximum, a minimum, a subtraction and one `bincount` by milliseconds, and one more `bincount` each
for Σv and Σv². Slots, lags and sub-streams are computed from a few thousand sums. If an edge processes every record,
the center computes its answers from exactly these sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from edgewater.arrivals import DEFAULT_MAX_SKEW_MS, SlotGrid, SubstreamStatistics, lag_groups
from edgewater.model.errors import InvalidConfig, InvalidRecord
from edgewater.synopses import FloatArray, IntArray
from edgewater.synopses.encoding.state import State

_MAX_EVENTS, _MAX_VALUES, _MAX_CHUNKS, _MAX_SLOTS = 1 << 16, 1 << 13, 1 << 10, 1 << 6
"""The largest numbers of events, values, chunks of sums, and slots that are buffered before they are aggregated."""
_VALUES_BY_MS = 1 << 11
"""From this number of values in one slot on, values are summed by the millisecond, because it is faster."""
_DENSE = 1 << 17
"""The largest range of keys that is counted with one counter per key. Larger ranges are sorted."""

_BufferedValues = tuple[IntArray, IntArray | int, FloatArray]
"""Event times, arrival slots (one number if all are equal), values."""


class SubstreamMonitor:
    """Collects the statistics of one edge. `take` returns and resets them.

    Args:
        max_skew_ms: events that are further in the future than this are not counted.
    """

    def __init__(self, grid: SlotGrid, *, max_skew_ms: int = DEFAULT_MAX_SKEW_MS) -> None:
        if max_skew_ms < 0:
            raise InvalidConfig("max_skew", max_skew_ms, "0 ms or more")
        self.grid, self.max_skew_ms = grid, max_skew_ms
        self._groups = lag_groups(grid.lags)
        self._lag_groups = int(self._groups[-1]) + 1
        self._reset()

    def _reset(self) -> None:
        self._cells: list[tuple[IntArray, IntArray]] = []  # slot·lags + lag since epoch; events
        self._slots: list[
            tuple[int, int, IntArray]
        ] = []  # slot of arrival, first slot of birth; events by slot of birth
        self._values: list[tuple[IntArray, FloatArray]] = []  # part·groups + group; count, Σv, Σv²
        self._ranges: dict[int, tuple[float, float]] = {}  # part: least and greatest value, NaN if unknown
        self._arrival_slot = 0
        self._born: list[IntArray] = []  # event times of the events that arrived in this slot
        self._event_count = 0
        self._buffered: list[_BufferedValues] = []
        self._value_count, self._value_slot = 0, 0

    def observe(
        self,
        born_ms: IntArray,
        arrival_ms: IntArray | int,
        values: FloatArray | None = None,
        kept: IntArray | None = None,
        bounds: tuple[FloatArray, FloatArray] | None = None,
    ) -> None:
        """Adds a batch in order of arrival. Its arrays are buffered and must not be changed.

        Args:
            born_ms: event times, int64.
            arrival_ms: arrival time of each event, int64; or one time for a batch that was read at once.
            values: values of the sampled events, float64. NaN and infinity are left out.
            kept: positions of the sampled events, ascending; None for all events.
            bounds: the least and the greatest possible value of each event, float64. They are equal where the value is
                known. NaN and infinity are left out. None if only the values of sampled events are known.

        Raises:
            InvalidRecord: the lengths of the arrays do not match.
        """
        if np.ndim(arrival_ms) == 0:
            arrival_ms = int(arrival_ms)
        elif born_ms.shape != np.shape(arrival_ms):
            raise InvalidRecord("arrival_ms", np.shape(arrival_ms), f"as many as events, {born_ms.shape}")
        if not len(born_ms):
            return
        if int(born_ms.max()) > (arrival_ms if isinstance(arrival_ms, int) else int(arrival_ms.min())):
            stay = born_ms - arrival_ms <= self.max_skew_ms
            if not stay.all():
                if kept is not None and values is not None:
                    good = stay[kept]
                    kept, values = (np.cumsum(stay) - 1)[kept[good]], values[good]
                elif values is not None:
                    values = values[stay]
                born_ms, bounds = born_ms[stay], None if bounds is None else (bounds[0][stay], bounds[1][stay])
                arrival_ms = arrival_ms if isinstance(arrival_ms, int) else arrival_ms[stay]
            if not len(born_ms):
                return
        slot = arrival_ms // self.grid.slot_ms
        if isinstance(slot, int):
            if slot != self._arrival_slot or self._event_count > _MAX_EVENTS:
                self._count_events()
                self._arrival_slot = slot
            self._born.append(born_ms)
            self._event_count += len(born_ms)
        else:
            self._add_by_lag(born_ms, slot)
        if values is not None:
            all_sampled = kept is None or len(kept) == len(born_ms)
            self._extend_ranges(born_ms, (values, values) if all_sampled else bounds)
            self._buffer_values(born_ms, slot, values, kept)

    def take(self) -> list[SubstreamStatistics]:
        """Returns and resets the statistics since the last call, one entry per sub-stream."""
        self._sum_values()
        self._fold()
        found: dict[int, SubstreamStatistics] = {}

        def of(index: int) -> SubstreamStatistics:
            return found.setdefault(index, SubstreamStatistics(self.grid, index))

        for keys, counts in self._cells:
            self._fill_counts(of, keys, counts)
        for keys, sums in self._values:
            for index, rows in _runs(keys // self._lag_groups):
                self._fill_values(of(index), keys[rows] - index * self._lag_groups, sums[:, rows])
        for index, (least, greatest) in self._ranges.items():
            of(index).least, of(index).greatest = least, greatest
        self._reset()
        return [found[i] for i in sorted(found)]

    def to_state(self) -> State:
        """Returns the state. Calling it does not change later results of `take`."""
        self._fold()
        buffered = self._buffered or [(np.zeros(0, np.int64), 0, np.zeros(0))]
        born, values = _joined([b[0] for b in buffered]), _joined([b[2] for b in buffered])
        empty = np.zeros(0, np.int64)
        keys, counts = self._cells[0] if self._cells else (empty, empty)
        codes, sums = self._values[0] if self._values else (empty, np.zeros((3, 0)))
        parts = sorted(self._ranges)
        arrays = {
            "keys": keys, "counts": counts, "codes": codes, "sums": sums,
            "born": born, "arrived": np.full(len(born), _joined_slots(buffered)), "values": values,
            "parts": np.array(parts, np.int64),
            "ranges": np.array([self._ranges[part] for part in parts]).reshape(-1, 2),
        }  # fmt: skip
        return State([None, 0.0, [], []], arrays)  # the numbers that release 0.3.0 expects

    @classmethod
    def from_state(cls, state: State, grid: SlotGrid, *, max_skew_ms: int = DEFAULT_MAX_SKEW_MS) -> Self:
        """Restores a monitor from the result of `to_state`."""
        result, arrays = cls(grid, max_skew_ms=max_skew_ms), state.arrays
        if len(arrays["born"]):
            result._buffer_values(arrays["born"], _one_if_all(arrays["arrived"]), arrays["values"], None)
        result._cells = [(arrays["keys"], arrays["counts"])] if len(arrays["keys"]) else []
        sums = arrays["sums"]
        if centre := state.numbers[1]:  # release 0.3.0 sums distances from a centre
            count, total, squares = sums
            sums = np.stack([count, total + centre * count, squares + 2 * centre * total + centre * centre * count])
        result._values = [(arrays["codes"], sums)] if len(arrays["codes"]) else []
        result._ranges = dict(zip(arrays["parts"].tolist(), map(tuple, arrays["ranges"].tolist()), strict=True))
        return result

    def _extend_ranges(self, born_ms: IntArray, bounds: tuple[FloatArray, FloatArray] | None) -> None:
        """Extends the value ranges of the events' sub-streams. `bounds` are of all events; None if unknown."""
        width = self.grid.substream_ms
        if bounds is None:
            found = [(part, math.nan, math.nan) for part in np.unique(born_ms // width).tolist()]
        else:
            if len(bounds[0]) != len(born_ms):
                raise InvalidRecord("values", len(bounds[0]), f"as many as events, {len(born_ms)}")
            low, high = bounds
            if not np.isfinite(low.sum() + (0.0 if high is low else high.sum())):
                finite = np.isfinite(low) & np.isfinite(high)
                born_ms, low, high = born_ms[finite], low[finite], high[finite]
            if not len(born_ms):
                return
            first, last = int(born_ms.min()) // width, int(born_ms.max()) // width
            if first == last:
                found = [(first, float(low.min()), float(high.max()))]
            else:
                found = list(zip(*(each.tolist() for each in extremes(born_ms // width, low, high)), strict=True))
        for part, least, greatest in found:
            before = self._ranges.get(part, (math.inf, -math.inf))
            # If a bound was unknown once, it stays unknown.
            unknown = math.isnan(before[0]) or math.isnan(least)
            self._ranges[part] = (math.nan,) * 2 if unknown else (min(before[0], least), max(before[1], greatest))

    def _count_events(self) -> None:
        """Counts the events that arrived in the current slot, by slot of event time."""
        if not self._event_count:
            return
        born = self._born[0] if len(self._born) == 1 else np.concatenate(self._born)
        self._born, self._event_count = [], 0
        width = self.grid.slot_ms
        low = int(born.min()) // width
        if int(born.max()) - low * width >= _DENSE:
            slot, number = np.unique(born // width, return_counts=True)
            self._add_cells(self._key(slot, self._arrival_slot), number)
            return
        by_ms = np.bincount(born - low * width)
        number = np.add.reduceat(by_ms, np.arange(0, len(by_ms), width))
        self._slots.append((self._arrival_slot, low, number))
        if len(self._slots) > _MAX_SLOTS:
            self._fold()

    def _add_by_lag(self, born_ms: IntArray, arrived: IntArray) -> None:
        """Does the same as `_count_events` for events with individual arrival slots."""
        key = self._key(born_ms // self.grid.slot_ms, arrived)
        first = int(key.min())
        if int(key.max()) - first >= _DENSE:
            self._add_cells(*np.unique(key, return_counts=True))
            return
        number = np.bincount(key - first)
        used = np.flatnonzero(number)
        self._add_cells(first + used, number[used])

    def _key(self, slot: IntArray, arrived: IntArray | int) -> IntArray:
        """Combines the slot of event time and the lag into one number."""
        return np.asarray(slot * self.grid.lags + self._lag(slot, arrived))

    def _lag(self, slot: IntArray, arrived: IntArray | int) -> IntArray:
        return np.minimum(np.maximum(arrived - slot, 0), self.grid.lags - 1)

    def _add_cells(self, keys: IntArray, counts: IntArray) -> None:
        self._cells.append((keys, counts))
        if len(self._cells) > _MAX_CHUNKS:
            self._fold()

    def _fold(self) -> None:
        """Counts the buffered events, and merges all chunks into one, sorted by key.

        Calling it at any time does not change the last bit of any sum, as a replay of the journal requires. Counts are
        integers, and chunks of values are added in their order.
        """
        self._count_events()
        if self._slots or len(self._cells) > 1:
            self._spread_slots()
            keys = np.concatenate([k for k, _ in self._cells])
            order = np.argsort(keys, kind="stable")
            keys, counts = keys[order], np.concatenate([c for _, c in self._cells])[order]
            first = _run_starts(keys)
            self._cells = [(keys[first], np.add.reduceat(counts, first))]
        if len(self._values) > 1:
            codes = np.concatenate([k for k, _ in self._values])
            self._values = [_sum_by_key(codes, np.concatenate([s for _, s in self._values], axis=1))]

    def _spread_slots(self) -> None:
        """Converts the counts of whole slots to cells."""
        if not self._slots:
            return
        arrived, low, number = zip(*self._slots, strict=True)
        self._slots = []
        lengths = [len(n) for n in number]
        starts = np.cumsum([0, *lengths[:-1]])
        counts = np.concatenate(number)
        slot = np.arange(len(counts)) + np.repeat(np.array(low) - starts, lengths)
        used = np.flatnonzero(counts)
        self._cells.append((self._key(slot[used], np.repeat(np.array(arrived), lengths)[used]), counts[used]))

    def _buffer_values(
        self, born_ms: IntArray, slot: IntArray | int, values: FloatArray, kept: IntArray | None
    ) -> None:
        if kept is not None and len(kept) != len(born_ms):
            born_ms, slot = born_ms[kept], slot if isinstance(slot, int) else slot[kept]
        if len(values) != len(born_ms):
            raise InvalidRecord("values", len(values), f"as many as sampled events, {len(born_ms)}")
        if not len(values):
            return
        slot = _one_if_all(slot)
        last = slot if isinstance(slot, int) else int(slot[-1])
        if last != self._value_slot and self._value_count >= _VALUES_BY_MS:
            self._sum_values()
        self._buffered.append((born_ms, slot, np.asarray(values, np.float64)))
        self._value_count, self._value_slot = self._value_count + len(values), last
        if self._value_count > _MAX_VALUES:
            self._sum_values()

    def _sum_values(self) -> None:
        if not self._value_count:
            return
        buffered, self._buffered, self._value_count = self._buffered, [], 0
        born, arrived, values = (
            _joined([h[0] for h in buffered]),
            _joined_slots(buffered),
            _joined([h[2] for h in buffered]),
        )
        if not np.isfinite(values.sum()):
            finite = np.isfinite(values)
            born, values = born[finite], values[finite]
            arrived = arrived if isinstance(arrived, int) else arrived[finite]
        if not len(values):
            return
        if isinstance(arrived, int) and len(values) >= _VALUES_BY_MS and int(born.max()) - int(born.min()) < _DENSE:
            self._values.append(self._summed_by_ms(born, arrived, values))
        else:
            code = self._code(born // self.grid.slot_ms, arrived)
            self._values.append(_sum_by_key(code, np.stack([np.ones(len(values)), values, _squared(values)])))
        if len(self._values) > _MAX_CHUNKS:
            self._fold()

    def _code(self, slot: IntArray, arrived: IntArray | int) -> IntArray:
        """Combines the sub-stream of event time and the lag group into one number."""
        return slot // self.grid.substream_slots * self._lag_groups + self._groups[self._lag(slot, arrived)]

    def _summed_by_ms(self, born: IntArray, arrived: int, values: FloatArray) -> tuple[IntArray, FloatArray]:
        """Does the same as `_sum_by_key` for values that arrived in one slot, as events of one code have adjacent event
        times.
        """
        width = self.grid.slot_ms
        low = int(born.min()) // width
        at = born - low * width
        count = np.bincount(at)
        code = self._code(np.arange(low, low + -(-len(count) // width)), arrived)
        first = _run_starts(code)
        by_ms = count, np.bincount(at, values), np.bincount(at, _squared(values))
        sums = np.array([np.add.reduceat(each, first * width) for each in by_ms], np.float64)
        used = np.flatnonzero(sums[0])
        return code[first[used]], sums[:, used]

    def _fill_counts(self, of: Callable[[int], SubstreamStatistics], keys: IntArray, counts: IntArray) -> None:
        width = self.grid.substream_slots * self.grid.lags
        for index, rows in _runs(keys // width):
            of(index).cells, of(index).counts = keys[rows] - index * width, counts[rows]

    def _fill_values(self, into: SubstreamStatistics, group: IntArray, sums: FloatArray) -> None:
        into.value_sums = np.zeros((3, self._lag_groups))
        into.value_sums[:, group] = sums


def _squared(values: FloatArray) -> FloatArray:
    """Returns the squares. Squares of large values are infinite."""
    with np.errstate(over="ignore"):
        return values * values


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _one_if_all(slots: IntArray | int) -> IntArray | int:
    """Returns one number if all slots are equal."""
    if isinstance(slots, int) or not len(slots) or (slots != slots[0]).any():
        return slots
    return int(slots[0])


def _joined_slots(buffered: list[_BufferedValues]) -> IntArray | int:
    """Returns the arrival slots of all buffered values; one number if all are equal."""
    slots = [slot for _, slot, _ in buffered]
    first = slots[0]
    if isinstance(first, int) and all(isinstance(s, int) and s == first for s in slots):
        return first
    return np.concatenate([np.full(len(born), slot) if isinstance(slot, int) else slot for born, slot, _ in buffered])


def _sum_by_key(keys: IntArray, rows: FloatArray) -> tuple[IntArray, FloatArray]:
    """Sums each row by key. Returns the ascending keys whose sum in the first row is not 0, and the sums as [row, key].

    Values are added in their order, so the result is the same to the last bit wherever the input was split.
    """
    first = int(keys.min())
    if int(keys.max()) - first < _DENSE:
        distinct, keys = np.arange(first, int(keys.max()) + 1), keys - first
    else:
        distinct, keys = np.unique(keys, return_inverse=True)
    sums = np.array([np.bincount(keys, row) for row in rows], np.float64)
    used = np.flatnonzero(sums[0])
    return distinct[used], sums[:, used]


def extremes(keys: IntArray, low: FloatArray, high: FloatArray) -> tuple[IntArray, FloatArray, FloatArray]:
    """Returns the distinct keys, ascending, with the least `low` and the greatest `high` of each key, float64.

    NaN stays NaN.
    """
    first, last = int(keys.min()), int(keys.max())
    if last - first < _DENSE:
        distinct, keys = np.arange(first, last + 1), keys - first
    else:
        distinct, keys = np.unique(keys, return_inverse=True)
    least, greatest = np.full(len(distinct), np.inf), np.full(len(distinct), -np.inf)
    with np.errstate(invalid="ignore"):
        np.minimum.at(least, keys, low)
        np.maximum.at(greatest, keys, high)
    used = np.flatnonzero(~(least > greatest))  # NaN is used
    return distinct[used], least[used], greatest[used]


def _run_starts(ascending: IntArray) -> IntArray:
    """Returns the first position of each run of equal values."""
    return np.concatenate([[0], 1 + np.flatnonzero(ascending[1:] != ascending[:-1])])


def _runs(ascending: IntArray) -> list[tuple[int, slice]]:
    """Returns the distinct values, and the slice of each value."""
    first = _run_starts(ascending).tolist()
    ends = [*first[1:], len(ascending)]
    return [(int(ascending[a]), slice(a, b)) for a, b in zip(first, ends, strict=True)]
