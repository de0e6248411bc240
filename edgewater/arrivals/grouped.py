"""Arrival statistics of a sub-stream per group, as columns, for queries with a `group_by` and an accuracy.

Per group they have the same numbers as `SubstreamStatistics`. Groups are rows of a table of keys that is part of each
report, so each report can be read alone. The number of groups is bounded. Above the limit, and on a narrow link, a
report has only the number of events. The center then answers windows only when they are complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from edgewater.arrivals.schedule import SlotGrid, lag_groups
from edgewater.arrivals.substream import require_ranges, require_sampled
from edgewater.model.errors import CorruptSynopsis, InvalidRecord, InvalidRequest
from edgewater.synopses import FloatArray, IntArray, KeyTable
from edgewater.synopses.checks import check_whole
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import KEYS, MAX_SHIPPED, Field, Layout, field, layout_for

_KIND, _VERSION = "grouped-substream", 1
"""The kind and the version of the encoding. Version 1 has no ranges of values."""

_MAX_STEP = 1 << 40
_MAX_GROUPS = 1 << 12
"""The largest number of groups in a report that is read. A monitor has fewer groups. The center needs memory for each
lag group of each group.
"""
_MAX_KEYS = 16
MAX_CELLS = 1 << 19
"""The largest number of cells of a report, 1 to 3 MB. Arrivals between two report slots (at most 30 slots) need less
than half of it. If the link is down, a report grows up to every lag of every group.
"""

NO_VALUES = np.array([[np.inf], [-np.inf]])
"""The least and the greatest value of a group without values, float64 (2, 1)."""


@dataclass(slots=True)
class GroupedSubstream:
    """The reported events of one source with event times in sub-stream `index`, per group.

    Attributes:
        index: number of the sub-stream.
        keys: one column per column of `group_by`, one row per group.
        cells: codes (slot in the sub-stream · lags + lag) · groups + group, int64, ascending.
        counts: number of events per cell, int64, in the order of `cells`.
        value_cells: codes group · lag groups + lag group, int64, ascending.
        value_sums: count, Σv and Σv² of the sampled values per value cell, float64 (3, len(value_cells)).
        ranges: the least and the greatest value of all events per group, sampled or not, float64 (2, groups). Infinity
            and -infinity without events or values; NaN if some values are unknown.
        unattributed: number of events without group and lag, because there were too many groups or the link is too
            narrow.
    """

    grid: SlotGrid
    index: int
    keys: list[pa.Array]
    cells: IntArray
    counts: IntArray
    value_cells: IntArray
    value_sums: FloatArray
    ranges: FloatArray
    unattributed: int = 0

    @property
    def groups(self) -> int:
        return len(self.keys[0])

    @property
    def lag_groups(self) -> int:
        return int(lag_groups(self.grid.lags)[-1]) + 1

    @property
    def nbytes(self) -> int:
        return sum(
            a.nbytes for a in (*self.keys, self.cells, self.counts, self.value_cells, self.value_sums, self.ranges)
        )

    def arrivals(self) -> IntArray:
        """Returns rows of (arrival slot since epoch, lag, count, group), int64."""
        cell, group = np.divmod(self.cells, max(self.groups, 1))
        slot, lag = np.divmod(cell, self.grid.lags)
        return np.stack([self.index * self.grid.substream_slots + slot + lag, lag, self.counts, group], axis=1)

    def arrival_counts(self) -> FloatArray:
        """Returns one row per group, float64: the number of events; count, Σv and Σv² by lag group; the least and the
        greatest value.
        """
        width, groups = self.lag_groups, self.groups
        result = np.zeros((groups, 3 + 3 * width))
        result[:, -2:] = self.ranges.T
        np.add.at(result[:, 0], self.cells % max(groups, 1), self.counts)
        group, lag = np.divmod(self.value_cells, width)
        for row in range(3):
            result[group, 1 + row * width + lag] = self.value_sums[row]
        return result

    def merge(self, other: GroupedSubstream) -> None:
        """Adds another report of the same sub-stream.

        Raises:
            InvalidRecord: the sub-stream, the grid or the types of the key columns differ.
        """
        types = [k.type for k in self.keys]
        if (other.grid, other.index, [k.type for k in other.keys]) != (self.grid, self.index, types):
            raise InvalidRecord("substream", (other.grid, other.index), f"{(self.grid, self.index)}, keys of {types}")
        table = KeyTable(tuple(types))
        both = [pa.concat_arrays([mine, theirs]) for mine, theirs in zip(self.keys, other.keys, strict=True)]
        codes = table.encode(both, len(both[0]))
        mine, theirs, groups = codes[: self.groups], codes[self.groups :], len(table)
        cells = np.concatenate([_recoded(self.cells, mine, groups), _recoded(other.cells, theirs, groups)])
        weights = np.concatenate([self.counts, other.counts])[None].astype(np.float64)
        self.cells, counts = summed(cells, weights)
        self.counts = counts[0].astype(np.int64)
        width = self.lag_groups
        value_cells = [
            code[s.value_cells // width] * width + s.value_cells % width for s, code in ((self, mine), (other, theirs))
        ]
        self.value_cells, self.value_sums = summed(
            np.concatenate(value_cells), np.concatenate([self.value_sums, other.value_sums], axis=1)
        )
        ranges = np.repeat(NO_VALUES, groups, axis=1)
        for statistics, code in ((self, mine), (other, theirs)):
            with np.errstate(invalid="ignore"):  # NaN stays NaN
                np.minimum.at(ranges[0], code, statistics.ranges[0])
                np.maximum.at(ranges[1], code, statistics.ranges[1])
        self.keys, self.ranges = table.rows(), ranges
        self.unattributed += other.unattributed
        self.bound()

    def bound(self) -> None:
        """Replaces the statistics by the number of events if there are more cells than `MAX_CELLS`."""
        if len(self.cells) > MAX_CELLS:
            self.drop_groups()

    def drop_groups(self) -> None:
        """Replaces the statistics by the number of events."""
        self.unattributed += int(self.counts.sum())
        self.keys = [k.slice(0, 0) for k in self.keys]
        self.cells = self.counts = self.value_cells = np.zeros(0, np.int64)
        self.value_sums, self.ranges = np.zeros((3, 0)), np.zeros((2, 0))

    def to_state(self) -> bytes:
        """Encodes the statistics in the envelope of synopses: a header, the key columns, and integers of minimal
        width.
        """
        message = codec.header(
            _KIND, _VERSION, {"index": self.index, "unattributed": self.unattributed, "keys": len(self.keys)}
        )
        message.arrays.extend(codec.encode_keys(k) for k in self.keys)
        steps, jumps = np.diff(self.cells, prepend=0), np.diff(self.value_cells, prepend=0)
        arrays = (steps, self.counts, jumps, self.value_sums, self.ranges)
        message.arrays.extend(codec.encode(a) for a in arrays)
        return codec.seal(message)

    @classmethod
    def from_state(cls, state: bytes, grid: SlotGrid) -> Self:
        """Decodes the result of `to_state`. Raises CorruptSynopsis and UnsupportedVersion."""
        message = codec.unseal(state)
        header = codec.open_message(message, _KIND, _VERSION, len(message.arrays))
        try:
            columns = check_whole("keys", header["keys"], 1, _MAX_KEYS)
            index, unattributed = (
                check_whole(name, header[name], least, 1 << 53)
                for name, least in (("index", -(1 << 53)), ("unattributed", 0))
            )
        except (KeyError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{_KIND} cannot be read: {type(exc).__name__}: {exc}") from exc
        layout = layout_for(_KIND, (_layout(columns),), message.arrays)
        decoded = layout.decode(_KIND, message.arrays)
        keys, (steps, counts, jumps, value_sums) = decoded[:columns], decoded[columns : columns + 4]
        ranges = decoded[-1]
        made = cls(
            grid, index, list(keys), np.cumsum(steps), counts, np.cumsum(jumps), value_sums, ranges, unattributed
        )
        made._check(steps, jumps)
        require_sampled(value_sums)
        require_ranges(ranges)
        return made

    def _check(self, steps: IntArray, jumps: IntArray) -> None:
        groups = self.groups
        if groups > _MAX_GROUPS:
            raise CorruptSynopsis(f"{_KIND}: {groups} groups, at most {_MAX_GROUPS}")
        for name, at, ascending, limit in (
            ("cells", self.cells, steps, self.grid.substream_slots * self.grid.lags * groups),
            ("value cells", self.value_cells, jumps, groups * self.lag_groups),
        ):
            if len(at) and (at[0] < 0 or at[-1] >= limit or (ascending[1:] <= 0).any()):
                raise CorruptSynopsis(f"{_KIND}: {name} are not ascending from 0 to below {limit}")


def _layout(columns: int) -> Layout:
    keys = (Field(f"key {number}", (KEYS,), (("groups",),)) for number in range(columns))
    return Layout.of(
        *keys,
        field("steps", "<i8", "cells", least=0, most=_MAX_STEP),
        field("counts", "<i8", "cells", least=1, most=MAX_SHIPPED),
        field("steps of values", "<i8", "value cells", least=0, most=_MAX_STEP),
        field("sums of values", "<f8", 3, "value cells"),
        field("ranges of values", "<f8", 2, "groups"),
    )


def _recoded(cells: IntArray, codes: IntArray, groups: int) -> IntArray:
    before = max(len(codes), 1)
    return cells // before * groups + codes[cells % before] if len(cells) else cells


def summed(codes: IntArray, weights: FloatArray) -> tuple[IntArray, FloatArray]:
    """Returns the distinct codes, ascending, and the sum of each row of weights per code, float64."""
    distinct, inverse = np.unique(codes, return_inverse=True)
    # Without codes, bincount returns integers.
    rows = [np.bincount(inverse, row, minlength=len(distinct)).astype(np.float64) for row in weights]
    return distinct, np.stack(rows) if rows else weights
