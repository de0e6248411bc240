"""Collects the arrival statistics of a query with groups: slot of event time, lag and value of every event, by group.

The statistics are the same as in `monitor.SubstreamMonitor`, with the group as an additional column. A report has one
table of keys, so no code loops over groups. The table is bounded. If a report has more groups than the limit, only the
number of events is reported.

Counts are integers, so they may be summed at any time. Values are summed after a fixed number of values, and not when
the state is read. So a replay of the journal builds the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import pyarrow as pa

from edge.arrivals.monitor import extremes
from edgewater.arrivals import DEFAULT_MAX_SKEW_MS, NO_VALUES, GroupedSubstream, SlotGrid, lag_groups, summed
from edgewater.model.errors import CorruptSynopsis, InvalidConfig
from edgewater.synopses import FloatArray, IntArray, KeyTable
from edgewater.synopses.encoding.state import State

_DENSE = 1 << 14
"""The largest range of keys for which a batch is counted with one counter per key. A larger range is sorted."""
_MAX_CELLS, _MAX_VALUES = 1 << 15, 1 << 13
"""The largest numbers of counters and of values that are buffered before they are summed."""
_EMPTY = np.zeros(0, np.int64)


class GroupMonitor:
    """Collects the statistics of one edge. `take` returns and resets them.

    Args:
        types: types of the key columns.
        limit: the largest number of groups in one report.
        max_skew_ms: events that are further in the future than this are not counted.
    """

    def __init__(
        self, grid: SlotGrid, types: Sequence[pa.DataType], limit: int, *, max_skew_ms: int = DEFAULT_MAX_SKEW_MS
    ) -> None:
        if limit < 1 or not types:
            raise InvalidConfig("groups", limit, "at least one group, of at least one column")
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
        keys: Sequence[pa.Array],
        values: FloatArray | None = None,
        kept: IntArray | None = None,
        bounds: tuple[FloatArray, FloatArray] | None = None,
    ) -> None:
        """Adds a batch of events that arrived at the same time.

        Args:
            born_ms: event times of all events, int64.
            arrival_ms: the arrival time.
            keys: one Arrow array per key column, for all events.
            values: values of the sampled events, float64, finite.
            kept: positions of the sampled events, ascending.
            bounds: the least and the greatest possible value of each event, float64, finite. They are equal where the
                value is known. None if only the values of sampled events are known.
        """
        ahead = born_ms > arrival_ms + self.max_skew_ms
        if ahead.any():
            stay = np.flatnonzero(~ahead)
            if values is not None and kept is not None:
                good = ~ahead[kept]
                values, kept = values[good], np.searchsorted(stay, kept[good])
            born_ms, keys = born_ms[stay], [k.take(pa.array(stay)) for k in keys]
            bounds = None if bounds is None else (bounds[0][stay], bounds[1][stay])
        if not len(born_ms):
            return
        slot, arrived = born_ms // self.grid.slot_ms, arrival_ms // self.grid.slot_ms
        codes = None if self._others else self._table.encode(list(keys), len(born_ms))
        if codes is None or len(self._table) > self.limit:
            self._drop_groups(slot)
            return
        self._count(slot, codes, arrived)
        if values is not None and kept is not None:
            all_sampled = len(kept) == len(slot)
            self._extend_ranges(slot, codes, (values, values) if all_sampled else bounds)
        if values is not None and kept is not None and len(kept):
            slot, codes = slot[kept], codes[kept]
            lag = np.clip(arrived - slot, 0, self.grid.lags - 1)
            part = slot // self.grid.substream_slots
            place = (part * self._width + self._lag_groups[lag]) * self.limit + codes
            self._buffered.append((place, np.asarray(values, np.float64)))
            self._value_count += len(kept)
            if self._value_count > _MAX_VALUES:
                self._sum_values()

    def _count(self, slot: IntArray, codes: IntArray, arrived: int) -> None:
        low = int(slot.min())
        span, groups = int(slot.max()) + 1 - low, len(self._table)
        where = (slot - low) * groups + codes
        if span * groups <= max(_DENSE, 4 * len(slot)):
            number = np.bincount(where, minlength=span * groups)
            where = np.flatnonzero(number)
            number = number[where]
        else:
            where, number = np.unique(where, return_counts=True)
        slot, group = where // groups + low, where % groups
        lag = np.clip(arrived - slot, 0, self.grid.lags - 1)
        self._cells.append(((slot * self.grid.lags + lag) * self.limit + group, number))
        self._cell_count += len(number)
        if self._cell_count > _MAX_CELLS:
            self._fold()

    def _extend_ranges(self, slot: IntArray, codes: IntArray, bounds: tuple[FloatArray, FloatArray] | None) -> None:
        """Extends the ranges of the groups' values. `bounds` are of all events; None if unknown."""
        keys = slot // self.grid.substream_slots * self.limit + codes
        unknown = np.full(len(keys) if bounds is None else 0, np.nan)
        chunk = extremes(keys, *(bounds or (unknown, unknown)))
        self._ranges.append(chunk)
        self._range_count += len(chunk[0])
        if self._range_count > _MAX_CELLS:
            self._fold_ranges()

    def _fold_ranges(self) -> None:
        if len(self._ranges) > 1:
            keys, least, greatest = (np.concatenate(each) for each in zip(*self._ranges, strict=True))
            self._ranges = [extremes(keys, least, greatest)]
        self._range_count = len(self._ranges[0][0]) if self._ranges else 0

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

    def _sum_values(self) -> None:
        if not self._buffered:
            return
        places, values = (np.concatenate(each) for each in zip(*self._buffered, strict=True))
        known, sums = self._sums
        weights = np.concatenate([sums, [np.ones(len(values)), values, values * values]], axis=1)
        self._sums = summed(np.concatenate([known, places]), weights)
        self._buffered, self._value_count = [], 0

    def take(self) -> list[GroupedSubstream]:
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
        for index in sorted({*np.unique(cells // per_cells).tolist(), *self._others}):
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
                GroupedSubstream(grid, index, keys, cells_of, counts[mine], place[order], late, ranges, others)
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
        arrays = {"cells": cells, "counts": counts, "places": places, "values": values, "known": known, "sums": sums}
        owners, *extreme = self._ranges[0] if self._ranges else (_EMPTY, *NO_VALUES[:, :0])
        arrays |= {"owners": owners, "ranges": np.stack(extreme)}
        keys = {str(n): column for n, column in enumerate(self._table.rows())}
        return State([self.limit, sorted(self._others.items())], arrays, {"keys": State(None, keys)})

    @classmethod
    def from_state(cls, state: State, grid: SlotGrid, types: Sequence[pa.DataType], limit: int) -> Self:
        """Restores a monitor from its state.

        Raises:
            CorruptSynopsis: the state belongs to a monitor with another limit or other types.
        """
        result, arrays = cls(grid, types, limit), state.arrays
        keys = list(state.components["keys"].arrays.values())
        (stored_limit, others), stored_types = state.numbers, [column.type for column in keys]
        if (stored_limit, stored_types) != (limit, list(types)):
            raise CorruptSynopsis(f"group monitor of {stored_limit} groups of {stored_types}, not {limit} of {types}")
        result._table.encode(keys, len(keys[0]))
        cells, places = arrays["cells"], arrays["places"]
        result._cells, result._cell_count = [(cells, arrays["counts"])] if len(cells) else [], len(cells)
        result._buffered, result._value_count = [(places, arrays["values"])] if len(places) else [], len(places)
        result._sums = arrays["known"], arrays["sums"]
        result._others = dict(others)
        owners, ranges = arrays["owners"], arrays["ranges"]
        result._ranges, result._range_count = [(owners, *ranges)] if len(owners) else [], len(owners)
        return result
