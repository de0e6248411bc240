"""What an edge notes of every event of a query with groups: the slots it was born and came in, and its value, by group.

As `monitor.SubstreamMonitor`, with the group as a further column: no loop over groups, one table of keys per report.
The table is bounded. In a report with more groups than the limit nothing is kept but the number of events.

Integers may be added up at any time. Sums of values may not: a replayed journal has to build the same bytes, so they
are added up after so many values, and not when somebody asks for the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import pyarrow as pa

from edgewater.arrivals import DEFAULT_MAX_SKEW_MS, GroupedSubstream, SlotGrid, lag_groups, summed
from edgewater.errors import CorruptSynopsis, InvalidConfig
from edgewater.synopses import FloatArray, IntArray, KeyTable
from edgewater.synopses.encoding import codec

_KIND, _VERSION = "group-monitor", 1
_DENSE = 1 << 14
"""Counters that are worth having for a batch; what is spread wider is sorted instead."""
_PENDING, _PENDING_VALUES = 1 << 15, 1 << 13
"""Counters and values that are held before they are added up: what is held is bounded."""
_NOTHING = np.zeros(0, np.int64)


class GroupMonitor:
    """Collects one source's statistics; `take` hands out what has come since the last time.

    Args:
        types: of the key columns.
        limit: the most groups that one report tells of.
        max_skew_ms: how far in the future an event may be and still count.
    """

    def __init__(
        self, grid: SlotGrid, types: Sequence[pa.DataType], limit: int, *, max_skew_ms: int = DEFAULT_MAX_SKEW_MS
    ) -> None:
        if limit < 1 or not types:
            raise InvalidConfig("groups", limit, "at least one group, of at least one column")
        self.grid, self.types, self.limit, self.max_skew_ms = grid, tuple(types), limit, max_skew_ms
        self._lag_groups = lag_groups(grid.lags)
        self._width = int(self._lag_groups[-1]) + 1
        self._forget()

    def _forget(self) -> None:
        self._table = KeyTable(self.types)
        # Codes of cells: (slot of birth · lags + lag) · limit + group; of values: (sub-stream · lag groups + lag group)
        # · limit + group.
        self._cells: list[tuple[IntArray, IntArray]] = []
        self._cells_held = 0
        self._worth: list[tuple[IntArray, FloatArray]] = []
        self._worth_held = 0
        self._sums = (_NOTHING, np.zeros((3, 0)))
        self._others: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        held = sum(a.nbytes for pair in (*self._cells, *self._worth, self._sums) for a in pair)
        return held + self._table.nbytes

    def observe(
        self,
        born_ms: IntArray,
        arrival_ms: int,
        keys: Sequence[pa.Array],
        values: FloatArray | None = None,
        kept: IntArray | None = None,
    ) -> None:
        """A batch that arrived at once.

        Args:
            keys: an Arrow array per key column, of all events.
            values: of the sampled events, finite; `kept` their positions, ascending.
        """
        ahead = born_ms > arrival_ms + self.max_skew_ms
        if ahead.any():
            stay = np.flatnonzero(~ahead)
            if values is not None and kept is not None:
                good = ~ahead[kept]
                values, kept = values[good], np.searchsorted(stay, kept[good])
            born_ms, keys = born_ms[stay], [k.take(pa.array(stay)) for k in keys]
        if not len(born_ms):
            return
        slot, arrived = born_ms // self.grid.slot_ms, arrival_ms // self.grid.slot_ms
        codes = None if self._others else self._table.encode(list(keys), len(born_ms))
        if codes is None or len(self._table) > self.limit:
            self._give_up(slot)
            return
        self._count(slot, codes, arrived)
        if values is not None and kept is not None and len(kept):
            slot, codes = slot[kept], codes[kept]
            lag = np.clip(arrived - slot, 0, self.grid.lags - 1)
            part = slot // self.grid.substream_slots
            place = (part * self._width + self._lag_groups[lag]) * self.limit + codes
            self._worth.append((place, np.asarray(values, np.float64)))
            self._worth_held += len(kept)
            if self._worth_held > _PENDING_VALUES:
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
        self._cells_held += len(number)
        if self._cells_held > _PENDING:
            self._fold()

    def _give_up(self, slot: IntArray) -> None:
        """Of this report only the number of events is kept, those before this batch included."""
        self._fold()
        for cells, counts in self._cells:
            self._add_others(cells // (self.limit * self.grid.lags), counts)
        others = self._others
        self._forget()
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
        self._cells_held = len(self._cells[0][0]) if self._cells else 0

    def _sum_values(self) -> None:
        if not self._worth:
            return
        places, values = (np.concatenate(each) for each in zip(*self._worth, strict=True))
        known, sums = self._sums
        weights = np.concatenate([sums, [np.ones(len(values)), values, values * values]], axis=1)
        self._sums = summed(np.concatenate([known, places]), weights)
        self._worth, self._worth_held = [], 0

    def take(self) -> list[GroupedSubstream]:
        """What was observed since the last call, by sub-stream."""
        self._sum_values()
        self._fold()
        keys, groups, grid = self._table.rows(), len(self._table), self.grid
        cells, counts = self._cells[0] if self._cells else (_NOTHING, _NOTHING)
        places, sums = self._sums
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
            found.append(GroupedSubstream(grid, index, keys, cells_of, counts[mine], place[order], late, others))
            found[-1].bound()
        self._forget()
        return found

    def to_state(self) -> bytes:
        """What was not taken yet. What is taken later does not depend on its being asked."""
        self._fold()
        cells, counts = self._cells[0] if self._cells else (_NOTHING, _NOTHING)
        held = self._worth or [(_NOTHING, np.zeros(0))]
        places, values = (np.concatenate(each) for each in zip(*held, strict=True))
        others = np.array(sorted(self._others.items()), np.int64).reshape(-1, 2)
        message = codec.header(_KIND, _VERSION, {"keys": len(self.types), "limit": self.limit})
        message.arrays.extend(codec.encode_keys(k) for k in self._table.rows())
        message.arrays.extend(codec.encode(a) for a in (cells, counts, places, values, *self._sums, others))
        return codec.seal(message)

    @classmethod
    def from_state(cls, state: bytes, grid: SlotGrid, types: Sequence[pa.DataType], limit: int) -> Self:
        """Raises CorruptSynopsis, UnsupportedVersion."""
        result = cls(grid, types, limit)
        message = codec.unseal(state)
        given = codec.open_message(message, _KIND, _VERSION, len(types) + 7)
        keys = [codec.decode_keys(a) for a in message.arrays[: len(types)]]
        cells, counts, places, values, known, sums, others = (codec.decode(a) for a in message.arrays[len(types) :])
        before = given.get("limit")  # an earlier release had another one, and codes are made with it
        same = [k.type for k in keys] == list(types) and given == {"keys": len(types), "limit": before}
        same = same and isinstance(before, int) and len(keys[0]) <= min(before, limit)
        if not same or cells.shape != counts.shape or places.shape != values.shape or sums.shape != (3, len(known)):
            raise CorruptSynopsis(f"{_KIND}: columns of other types, or of unequal length")
        cells, places, known = (codes // before * limit + codes % before for codes in (cells, places, known))
        result._table.encode(keys, len(keys[0]))
        result._cells, result._cells_held = [(cells, counts)] if len(cells) else [], len(cells)
        result._worth, result._worth_held = [(places, values)] if len(places) else [], len(places)
        result._sums = (known, sums)
        result._others = dict(others.tolist())
        return result
