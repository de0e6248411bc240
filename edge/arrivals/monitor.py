"""Collects the arrival statistics of a query at an edge: slot of event time, lag and value of every event, by group.

The delays (in slots) and the counts cover all events. The sums of values cover the sampled events, because the values
of other events may not have been evaluated. If all values have been evaluated, the least and the greatest value are
known, too. A sample alone does not bound the values outside of it. All statistics can be merged, over the batches of an
edge and over edges.

Arrival times are from the edge's clock, corrected by the estimated clock offset. Clock errors remain. If the event time
is after the arrival time by at most `max_skew_ms`, the delay is 0. An event further in the future is not counted, so a
device with a wrong clock can neither close windows nor cause negative delays.

A report has one table of keys, so no code loops over groups. The table is bounded. If a report has more groups than the
limit, only the number of events is reported. A query without groups has one group without keys.

Counts are integers, so they may be summed at any time. Values are summed after a fixed number of values, and not when
the state is read. So a replay of the journal builds the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa

from edgewater.arrivals import (
    DEFAULT_MAX_SKEW_MS,
    NO_VALUES,
    SlotGrid,
    SubstreamStatistics,
    distinct_codes,
    lag_groups,
    summed,
)
from edgewater.base.errors import CorruptSynopsis, InvalidConfig, InvalidRecord
from edgewater.synopses import FloatArray, IntArray, KeyTable
from edgewater.synopses.encoding.state import State

_DENSE = 1 << 14  # limit: memory of the counters
"""The largest range of keys for which a batch is counted with one counter per key. A larger range is sorted."""
_MAX_CELLS, _MAX_VALUES = 1 << 15, 1 << 13
"""The largest numbers of counters and of values that are buffered before they are summed."""
_EMPTY = np.zeros(0, np.int64)


class SubstreamMonitor:
    """Collects the statistics of one edge. `take` returns and resets them.

    Args:
        types: types of the key columns; empty for a query without groups.
        limit: the largest number of groups in one report; 1 without groups.
        max_skew_ms: events that are further in the future than this are not counted.
    """

    def __init__(
        self,
        grid: SlotGrid,
        types: Sequence[pa.DataType] = (),
        limit: int = 1,
        *,
        max_skew_ms: int = DEFAULT_MAX_SKEW_MS,
    ) -> None:
        if limit < 1 or (limit > 1 and not types):
            raise InvalidConfig("groups", limit, "at least one group; without key columns exactly one")
        if max_skew_ms < 0:
            raise InvalidConfig("max_skew", max_skew_ms, "0 ms or more")
        self.grid, self.types, self.limit, self.max_skew_ms = grid, tuple(types), limit, max_skew_ms
        self._lag_groups = lag_groups(grid.lags)
        self._width = int(self._lag_groups[-1]) + 1
        self._reset()

    def _reset(self) -> None:
        self._table = KeyTable(self.types)
        # Codes of cells: (slot of event time · lags + lag) · limit + group.
        # Codes of values: (sub-stream · lag groups + lag group) · limit + group.
        self._cells: list[tuple[IntArray, IntArray]] = []
        self._cell_count = 0
        self._buffered: list[tuple[IntArray, FloatArray]] = []
        self._value_count = 0
        self._sums = (_EMPTY, np.zeros((3, 0)))
        # Codes of ranges: sub-stream · limit + group; the least and the greatest value of all events, NaN if unknown.
        self._ranges: list[tuple[IntArray, FloatArray, FloatArray]] = []
        self._range_count = 0
        self._others: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        held = sum(a.nbytes for each in (*self._cells, *self._buffered, self._sums, *self._ranges) for a in each)
        return held + self._table.nbytes

    def observe(
        self,
        born_ms: IntArray,
        arrival_ms: int,
        keys: Sequence[pa.Array] = (),
        values: FloatArray | None = None,
        kept: IntArray | None = None,
        bounds: tuple[FloatArray, FloatArray] | None = None,
    ) -> None:
        """Adds a batch of events that arrived at the same time.

        Args:
            born_ms: event times of all events, int64.
            arrival_ms: the arrival time.
            keys: one Arrow array per key column, for all events.
            values: values of the sampled events, float64. NaN and infinity are left out.
            kept: positions of the sampled events, ascending; None for all events.
            bounds: the least and the greatest possible value of each event, float64. They are equal where the value is
                known. NaN and infinity are left out. None if only the values of sampled events are known.

        Raises:
            InvalidRecord: the lengths of the arrays do not match.
        """
        kept = None if kept is not None and len(kept) == len(born_ms) else kept
        if values is not None:
            sampled = len(born_ms) if kept is None else len(kept)
            if len(values) != sampled:
                raise InvalidRecord("values", len(values), f"as many as sampled events, {sampled}")
            if bounds is not None and len(bounds[0]) != len(born_ms):
                raise InvalidRecord("values", len(bounds[0]), f"as many as events, {len(born_ms)}")
        if not len(born_ms):
            return
        if int(born_ms.max()) > arrival_ms + self.max_skew_ms:
            ahead = born_ms > arrival_ms + self.max_skew_ms
            stay = np.flatnonzero(~ahead)
            if values is not None:
                good = stay if kept is None else np.flatnonzero(~ahead[kept])
                values, kept = values[good], None if kept is None else np.searchsorted(stay, kept[good])
            born_ms, keys = born_ms[stay], [k.take(pa.array(stay)) for k in keys]
            bounds = None if bounds is None else (bounds[0][stay], bounds[1][stay])
        if not len(born_ms):
            return
        slots, at = distinct_codes(born_ms // self.grid.slot_ms)
        codes = self._codes(keys, len(at))
        if codes is None:
            self._drop_groups(slots[at])
            return
        lags = np.minimum(np.maximum(arrival_ms // self.grid.slot_ms - slots, 0), self.grid.lags - 1)
        self._count(slots * self.grid.lags + lags, at, codes)
        if values is None:
            return
        parts, all_sampled = slots // self.grid.substream_slots, kept is None
        self._extend_ranges(parts, at, codes, (values, values) if all_sampled else bounds)
        if kept is not None:
            at, codes = at[kept], codes if isinstance(codes, int) else codes[kept]
        self._buffer_values((parts * self._width + self._lag_groups[lags])[at] * self.limit + codes, values)

    def add_values(
        self,
        born_ms: IntArray,
        arrival_ms: IntArray,
        keys: Sequence[pa.Array],
        values: FloatArray,
        bounds: tuple[FloatArray, FloatArray] | None,
    ) -> None:
        """Adds the values of events that `observe` has counted without their values.

        Args:
            arrival_ms: when each event arrived, int64.
            born_ms, keys, values, bounds: as in `observe`, for these events.
        """
        slots = born_ms // self.grid.slot_ms
        codes = self._codes(keys, len(slots))
        if codes is None:
            return
        lags = np.clip(arrival_ms // self.grid.slot_ms - slots, 0, self.grid.lags - 1)
        parts = slots // self.grid.substream_slots
        self._extend_ranges(parts, np.arange(len(slots)), codes, bounds)
        self._buffer_values((parts * self._width + self._lag_groups[lags]) * self.limit + codes, values)

    def _codes(self, keys: Sequence[pa.Array], rows: int) -> IntArray | int | None:
        """Returns the group of each event; one number without groups; None if there are more groups than the limit."""
        if self._others:
            return None
        if not self.types:
            self._table = self._table if len(self._table) else _one_group()
            return 0
        codes = self._table.encode(list(keys), rows)
        return codes if len(self._table) <= self.limit else None

    def _count(self, cells: IntArray, at: IntArray, codes: IntArray | int) -> None:
        """Adds one event per position `at` in `cells`, the codes of slots and lags."""
        groups = len(self._table)
        where = at * groups + codes
        if len(cells) * groups <= max(_DENSE, 4 * len(at)):
            number = np.bincount(where)
            where = np.flatnonzero(number)
            number = number[where]
        else:
            where, number = np.unique(where, return_counts=True)
        cell, group = np.divmod(where, groups)
        self._cells.append((cells[cell] * self.limit + group, number))
        self._cell_count += len(number)
        if self._cell_count > _MAX_CELLS:
            self._fold()

    def _extend_ranges(
        self, parts: IntArray, at: IntArray, codes: IntArray | int, bounds: tuple[FloatArray, FloatArray] | None
    ) -> None:
        """Extends the ranges of the groups' values, for events at the positions `at` in `parts`.

        Args:
            bounds: of all events; None if unknown.
        """
        low, high = bounds or (np.full(len(at), np.nan),) * 2
        if bounds is not None and not np.isfinite(low.sum() + high.sum()):
            finite = np.isfinite(low) & np.isfinite(high)
            at, low, high = at[finite], low[finite], high[finite]
            codes = codes if isinstance(codes, int) else codes[finite]
        if not len(at):
            return
        chunk = _extremes(parts[at] * self.limit + codes, low, high)
        self._ranges.append(chunk)
        self._range_count += len(chunk[0])
        if self._range_count > _MAX_CELLS:
            self._fold_ranges()

    def _fold_ranges(self) -> None:
        if len(self._ranges) > 1:
            keys, least, greatest = (np.concatenate(each) for each in zip(*self._ranges, strict=True))
            self._ranges = [_extremes(keys, least, greatest)]
        self._range_count = len(self._ranges[0][0]) if self._ranges else 0

    def _buffer_values(self, places: IntArray, values: FloatArray) -> None:
        if not np.isfinite(values.sum()):
            finite = np.isfinite(values)
            places, values = places[finite], values[finite]
        if not len(values):
            return
        self._buffered.append((places, np.asarray(values, np.float64)))
        self._value_count += len(values)
        if self._value_count > _MAX_VALUES:
            self._sum_values()

    def _sum_values(self) -> None:
        if not self._buffered:
            return
        places, values = (np.concatenate(each) for each in zip(*self._buffered, strict=True))
        known, sums = self._sums
        with np.errstate(over="ignore"):  # squares of large values are infinite
            weights = np.concatenate([sums, [np.ones(len(values)), values, values * values]], axis=1)
        self._sums = summed(np.concatenate([known, places]), weights)
        self._buffered, self._value_count = [], 0

    def _drop_groups(self, slot: IntArray) -> None:
        """Drops the groups of this report, and keeps only the number of events."""
        self._fold()
        for cells, counts in self._cells:
            self._add_others(cells // (self.limit * self.grid.lags), counts)
        others = self._others
        self._reset()
        self._others = others
        self._add_others(slot, np.ones(len(slot), np.int64))

    def _add_others(self, slot: IntArray, counts: IntArray) -> None:
        part, inverse = np.unique(slot // self.grid.substream_slots, return_inverse=True)
        for index, count in zip(part.tolist(), np.bincount(inverse, counts).tolist(), strict=True):
            self._others[index] = self._others.get(index, 0) + int(count)

    def _fold(self) -> None:
        if len(self._cells) > 1:
            cells, counts = (np.concatenate(each) for each in zip(*self._cells, strict=True))
            cells, total = summed(cells, counts[None].astype(np.float64))
            self._cells = [(cells, total[0].astype(np.int64))]
        self._cell_count = len(self._cells[0][0]) if self._cells else 0

    def take(self) -> list[SubstreamStatistics]:
        """Returns and resets the statistics since the last call, one entry per sub-stream."""
        self._sum_values()
        self._fold()
        self._fold_ranges()
        keys, groups, grid = self._table.rows(), len(self._table), self.grid
        cells, counts = self._cells[0] if self._cells else (_EMPTY, _EMPTY)
        places, sums = self._sums
        owners, least, greatest = self._ranges[0] if self._ranges else (_EMPTY, *NO_VALUES[:, :0])
        per_cells, per_places = grid.substream_slots * grid.lags * self.limit, self._width * self.limit
        found = []
        indices = np.concatenate([cells // per_cells, places // per_places, owners // self.limit])
        for index in sorted({*np.unique(indices).tolist(), *self._others}):
            mine = slice(*np.searchsorted(cells, [index * per_cells, (index + 1) * per_cells]).tolist())
            valued = slice(*np.searchsorted(places, [index * per_places, (index + 1) * per_places]).tolist())
            cell, group = np.divmod(cells[mine] - index * per_cells, self.limit)
            lag_group, owner = np.divmod(places[valued] - index * per_places, self.limit)
            place = owner * self._width + lag_group
            order = np.argsort(place)
            late, others = sums[:, valued][:, order], self._others.get(index, 0)
            cells_of = cell * groups + group
            ranged = slice(*np.searchsorted(owners, [index * self.limit, (index + 1) * self.limit]).tolist())
            ranges = np.repeat(NO_VALUES, groups, axis=1)
            ranges[:, owners[ranged] - index * self.limit] = least[ranged], greatest[ranged]
            found.append(
                SubstreamStatistics(grid, index, keys, cells_of, counts[mine], place[order], late, ranges, others)
            )
            found[-1].bound()
        self._reset()
        return found

    def to_state(self) -> State:
        """Returns the state. Calling it does not change later results of `take`."""
        self._fold()
        self._fold_ranges()
        cells, counts = self._cells[0] if self._cells else (_EMPTY, _EMPTY)
        buffered = self._buffered or [(_EMPTY, np.zeros(0))]
        places, values = (np.concatenate(each) for each in zip(*buffered, strict=True))
        known, sums = self._sums
        owners, *extreme = self._ranges[0] if self._ranges else (_EMPTY, *NO_VALUES[:, :0])
        if not self.types:
            # Release 0.3.0 writes and reads an event and an arrival of each value, and numbers that have no use.
            part, group = np.divmod(places, self._width)
            arrived = part * self.grid.substream_slots + np.searchsorted(self._lag_groups, group)
            arrays = {
                "keys": cells, "counts": counts, "codes": known, "sums": sums, "born": part * self.grid.substream_ms,
                "arrived": arrived, "values": values, "parts": owners, "ranges": np.stack(extreme, axis=1),
            }  # fmt: skip
            return State([None, 0.0, [], []], arrays)
        arrays = {"cells": cells, "counts": counts, "places": places, "values": values, "known": known, "sums": sums}
        arrays |= {"owners": owners, "ranges": np.stack(extreme)}
        keys = {str(n): column for n, column in enumerate(self._table.rows())}
        return State([self.limit, sorted(self._others.items())], arrays, {"keys": State(None, keys)})

    @classmethod
    def from_state(cls, state: State, grid: SlotGrid, types: Sequence[pa.DataType] = (), limit: int = 1) -> Self:
        """Restores a monitor from its state.

        Raises:
            CorruptSynopsis: the state belongs to a monitor with another limit or other types.
        """
        result, arrays = cls(grid, types, limit), state.arrays
        if types:
            keys = list(state.components["keys"].arrays.values())
            (stored_limit, others), stored_types = state.numbers, [column.type for column in keys]
            if (stored_limit, stored_types) != (limit, list(types)):
                raise CorruptSynopsis(f"monitor of {stored_limit} groups of {stored_types}, not {limit} of {types}")
            result._table.encode(keys, len(keys[0]))
            result._others = dict(others)
        else:
            arrays = result._read_ungrouped(arrays, state.numbers[1])
        cells, places = arrays["cells"], arrays["places"]
        result._cells, result._cell_count = [(cells, arrays["counts"])] if len(cells) else [], len(cells)
        result._buffered, result._value_count = [(places, arrays["values"])] if len(places) else [], len(places)
        result._sums = arrays["known"], arrays["sums"]
        owners, ranges = arrays["owners"], arrays["ranges"]
        result._ranges, result._range_count = [(owners, *ranges)] if len(owners) else [], len(owners)
        return result

    def _read_ungrouped(self, arrays: Any, centre: float) -> dict[str, Any]:
        """Returns the arrays of a state without groups under the names of a state with groups.

        Args:
            centre: the value from which release 0.3.0 sums distances; otherwise 0.
        """
        self._table = _one_group()
        slot, sums = arrays["born"] // self.grid.slot_ms, arrays["sums"]
        if centre:
            count, total, squares = sums
            sums = np.stack([count, total + centre * count, squares + 2 * centre * total + centre * centre * count])
        lag = np.clip(arrays["arrived"] - slot, 0, self.grid.lags - 1)
        places = slot // self.grid.substream_slots * self._width + self._lag_groups[lag]
        return {
            "cells": arrays["keys"], "counts": arrays["counts"], "places": places, "values": arrays["values"],
            "known": arrays["codes"], "sums": sums, "owners": arrays["parts"], "ranges": arrays["ranges"].T,
        }  # fmt: skip


def _one_group() -> KeyTable:
    table = KeyTable(())
    table.encode([], 1)
    return table


def _extremes(keys: IntArray, low: FloatArray, high: FloatArray) -> tuple[IntArray, FloatArray, FloatArray]:
    """Returns the distinct keys, ascending, with the least `low` and the greatest `high` of each key, float64.

    NaN stays NaN.
    """
    distinct, keys = distinct_codes(keys)
    if len(distinct) == 1:
        return distinct, low.min(keepdims=True), high.max(keepdims=True)
    least, greatest = np.full(len(distinct), np.inf), np.full(len(distinct), -np.inf)
    with np.errstate(invalid="ignore"):
        np.minimum.at(least, keys, low)
        np.maximum.at(greatest, keys, high)
    used = np.flatnonzero(~(least > greatest))  # NaN is used
    return distinct[used], least[used], greatest[used]
