"""Arrival statistics of a sub-stream, as an edge ships them. They can be added over batches and over reports.

For a query with groups they are columns over all groups. Groups are rows of a table of keys that is part of each
report, so each report can be read alone. The number of groups is bounded. Above the limit, and on a narrow link, a
report has only the number of events. The center then answers windows only when they are complete. A query without
groups has one group without keys.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pyarrow as pa

from edgewater.arrivals.schedule import SlotGrid, lag_groups
from edgewater.base.errors import CorruptSynopsis, InvalidRecord, InvalidRequest, UnsupportedVersion
from edgewater.synopses import FloatArray, IntArray, KeyTable
from edgewater.synopses.checks import check_whole
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import KEYS, MAX_SHIPPED, Field, Layout, layout_for
from edgewater.synopses.encoding.layout import field as array_of

_KIND, _VERSION = "grouped-substream", 1
"""The kind and the version of the encoding of statistics with groups. Version 1 has no ranges of values."""
_HEADER, _RANGE = struct.Struct("<BqII88x"), struct.Struct("<2d")
"""The beginning of an encoding without groups: version, index, number of cells, number of lag groups.

No release reads the numbers in the place of the 88 zeros, but release 0.3.0 expects them. Zeros compress well."""
MAX_INDEX = 1 << 53  # format: integers of float64

DEFAULT_MAX_SKEW_MS = 1_000
"""The accepted clock skew in ms. If an event time is after the arrival time by at most this much, the delay is 0."""

_MAX_STEP = 1 << 40  # limit: input of a report
MAX_GROUPS = 1 << 12
"""The largest number of groups in a report that is read. A monitor has fewer groups. The center needs memory for each
lag group of each group.
"""
MAX_KEYS = 16  # limit: memory of a sub-stream
MAX_CELLS = 1 << 19
"""The largest number of cells of a report, 1 to 3 MB. Arrivals between two report slots (at most 30 slots) need less
than half of it. If the link is down, a report grows up to every lag of every group.
"""

_DENSE, _DENSE_SHARE = 1 << 14, 4
"""A range of codes is summed with one sum per code if it has at most `_DENSE` codes, or at most `_DENSE_SHARE` times as
many codes as are summed. A larger range is sorted."""

NO_VALUES = np.array([[np.inf], [-np.inf]])
"""The least and the greatest value of a group without values, float64 (2, 1)."""
_EMPTY = np.zeros(0, np.int64)


@dataclass(slots=True)
class SubstreamStatistics:
    """The reported events of one source with event times in sub-stream `index`, per group.

    Attributes:
        index: number of the sub-stream.
        keys: one column per column of `group_by`, one row per group; empty for a query without groups.
        cells: codes (slot in the sub-stream · lags + lag) · groups + group, int64, ascending. They are the cells of the
            center's run-off triangle.
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
    keys: list[pa.Array] = field(default_factory=list)
    cells: IntArray = field(default_factory=lambda: _EMPTY)
    counts: IntArray = field(default_factory=lambda: _EMPTY)
    value_cells: IntArray = field(default_factory=lambda: _EMPTY)
    value_sums: FloatArray = field(default_factory=lambda: np.zeros((3, 0)))
    ranges: FloatArray = field(default_factory=lambda: NO_VALUES)
    unattributed: int = 0

    @property
    def groups(self) -> int:
        return len(self.keys[0]) if self.keys else 1

    @property
    def events(self) -> int:
        """The number of events with group and lag."""
        return int(self.counts.sum())

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

    def merge(self, other: SubstreamStatistics) -> None:
        """Adds another report of the same sub-stream.

        Raises:
            InvalidRecord: the sub-stream, the grid or the types of the key columns differ.
        """
        types = [k.type for k in self.keys]
        if (other.grid, other.index, [k.type for k in other.keys]) != (self.grid, self.index, types):
            raise InvalidRecord("substream", (other.grid, other.index), f"{(self.grid, self.index)}, keys of {types}")
        table = KeyTable(tuple(types))
        both = [pa.concat_arrays([mine, theirs]) for mine, theirs in zip(self.keys, other.keys, strict=True)]
        codes = table.encode(both, self.groups + other.groups)
        mine, theirs, groups = codes[: self.groups], codes[self.groups :], len(table)
        cells = np.concatenate([_recoded(self.cells, mine, groups), _recoded(other.cells, theirs, groups)])
        weights = np.concatenate([self.counts, other.counts])[None].astype(np.float64)
        self.cells, counts = summed(cells, weights)
        self.counts = counts[0].astype(np.int64)
        width = self.lag_groups
        value_cells = [
            code[s.value_cells // width] * width + s.value_cells % width for s, code in ((self, mine), (other, theirs))
        ]
        value_sums = np.concatenate([self.value_sums, other.value_sums], axis=1)
        self.value_cells, self.value_sums = summed(np.concatenate(value_cells), value_sums)
        ranges = np.repeat(NO_VALUES, groups, axis=1)
        for statistics, code in ((self, mine), (other, theirs)):
            with np.errstate(invalid="ignore"):  # NaN stays NaN
                np.minimum.at(ranges[0], code, statistics.ranges[0])
                np.maximum.at(ranges[1], code, statistics.ranges[1])
        self.keys, self.ranges = table.rows(), ranges
        self.unattributed += other.unattributed
        self.bound()

    def bound(self) -> None:
        """Replaces the statistics of groups by the number of events if there are more cells than `MAX_CELLS`."""
        if self.keys and len(self.cells) > MAX_CELLS:
            self.drop_groups()

    def drop_groups(self) -> None:
        """Replaces the statistics by the number of events."""
        self.unattributed += int(self.counts.sum())
        self.keys = [k.slice(0, 0) for k in self.keys]
        self.cells = self.counts = self.value_cells = np.zeros(0, np.int64)
        self.value_sums, self.ranges = np.zeros((3, 0)), np.zeros((2, 0))

    def to_state(self) -> bytes:
        """Encodes the statistics. With groups, in the envelope of synopses: a header, the key columns, and integers of
        minimal width. Without groups, without key columns, and with sums for each lag group.
        """
        steps = np.diff(self.cells, prepend=0)
        if not self.keys:
            sums = np.zeros((3, self.lag_groups if len(self.value_cells) else 0))
            sums[:, self.value_cells] = self.value_sums
            head = _HEADER.pack(_VERSION, self.index, len(self.cells), sums.shape[1])
            numbers = _packed(steps) + _packed(self.counts) + sums.astype("<f8").tobytes()
            return head + _RANGE.pack(*self.ranges[:, 0]) + numbers
        message = codec.header(
            _KIND, _VERSION, {"index": self.index, "unattributed": self.unattributed, "keys": len(self.keys)}
        )
        message.arrays.extend(codec.encode_keys(k) for k in self.keys)
        arrays = (steps, self.counts, np.diff(self.value_cells, prepend=0), self.value_sums, self.ranges)
        message.arrays.extend(codec.encode(a) for a in arrays)
        return codec.seal(message)

    @classmethod
    def from_state(cls, state: bytes, grid: SlotGrid, *, grouped: bool = False) -> Self:
        """Decodes the result of `to_state`.

        Args:
            grouped: whether the query has groups.

        Raises:
            CorruptSynopsis, UnsupportedVersion: the bytes cannot be read.
        """
        made, steps, jumps = cls._with_groups(state, grid) if grouped else cls._without_groups(state, grid)
        made.check(steps, jumps)
        return made

    @classmethod
    def _with_groups(cls, state: bytes, grid: SlotGrid) -> tuple[Self, IntArray, IntArray]:
        message = codec.unseal(state)
        header = codec.open_message(message, _KIND, _VERSION, len(message.arrays))
        try:
            columns = check_whole("keys", header["keys"], 1, MAX_KEYS)
            index, unattributed = (
                check_whole(name, header[name], least, MAX_INDEX)
                for name, least in (("index", -MAX_INDEX), ("unattributed", 0))
            )
        except (KeyError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{_KIND} cannot be read: {type(exc).__name__}: {exc}") from exc
        layout = layout_for(_KIND, (_layout(columns),), message.arrays)
        decoded = layout.decode(_KIND, message.arrays)
        steps, counts, jumps, value_sums, ranges = decoded[columns:]
        cells, value_cells = np.cumsum(steps), np.cumsum(jumps)
        keys = list(decoded[:columns])
        return cls(grid, index, keys, cells, counts, value_cells, value_sums, ranges, unattributed), steps, jumps

    @classmethod
    def _without_groups(cls, state: bytes, grid: SlotGrid) -> tuple[Self, IntArray, IntArray]:
        if state[:1] and state[0] != _VERSION:
            raise UnsupportedVersion(f"sub-stream statistics of version {state[0]}; this release reads {_VERSION}")
        try:
            _, index, cells, groups = _HEADER.unpack_from(state)
            ranges = np.array(_RANGE.unpack_from(state, _HEADER.size))[:, None]
            steps, at = _unpacked(state, _HEADER.size + _RANGE.size, cells)
            counts, at = _unpacked(state, at, cells)
            if len(state) != at + 24 * groups:
                raise ValueError("length")
            sums = np.frombuffer(state, "<f8", 3 * groups, at).reshape(3, groups).astype(float)
        except (struct.error, ValueError, IndexError) as exc:
            raise CorruptSynopsis(f"sub-stream statistics cannot be read: {exc}") from exc
        if (counts <= 0).any() or (counts > MAX_SHIPPED).any() or abs(index) > MAX_INDEX:
            raise CorruptSynopsis(
                f"sub-stream statistics have a count outside 1 to {MAX_SHIPPED}, or the index {index} outside ±2^53"
            )
        if groups not in (0, int(lag_groups(grid.lags)[-1]) + 1):
            raise CorruptSynopsis(f"sub-stream statistics of values in {groups} lag groups")
        used = np.flatnonzero((sums != 0).any(axis=0))
        made = cls(grid, index, [], np.cumsum(steps), counts, used, sums[:, used], ranges)
        return made, steps, np.diff(used, prepend=0)

    def check(self, steps: IntArray, jumps: IntArray) -> None:
        """Raises CorruptSynopsis if decoded statistics are not possible.

        Args:
            steps, jumps: differences of `cells` and of `value_cells`. The first one is the difference from 0.
        """
        groups = self.groups
        if groups > MAX_GROUPS:
            raise CorruptSynopsis(f"sub-stream statistics of {groups} groups, at most {MAX_GROUPS}")
        for name, at, ascending, limit in (
            ("cells", self.cells, steps, self.grid.substream_slots * self.grid.lags * groups),
            ("value cells", self.value_cells, jumps, groups * self.lag_groups),
        ):
            if len(at) and (at[0] < 0 or at[-1] >= limit or (ascending[1:] <= 0).any() or (ascending > limit).any()):
                raise CorruptSynopsis(f"sub-stream statistics: {name} are not ascending from 0 to below {limit}")
        if not ((self.value_sums[0] >= 0) & (self.value_sums[0] <= MAX_SHIPPED)).all():
            raise CorruptSynopsis(f"sub-stream statistics have a number of sampled values outside 0 to {MAX_SHIPPED}")
        least, greatest = self.ranges
        finite = np.isfinite(least) & np.isfinite(greatest) & (least <= greatest)
        empty = (least == np.inf) & (greatest == -np.inf)
        if not (finite | empty | (np.isnan(least) & np.isnan(greatest))).all():
            raise CorruptSynopsis("sub-stream statistics have a least value above the greatest, or only one of them")


def _layout(columns: int) -> Layout:
    keys = (Field(f"key {number}", (KEYS,), (("groups",),)) for number in range(columns))
    return Layout.of(
        *keys,
        array_of("steps", "<i8", "cells", least=0, most=_MAX_STEP),
        array_of("counts", "<i8", "cells", least=1, most=MAX_SHIPPED),
        array_of("steps of values", "<i8", "value cells", least=0, most=_MAX_STEP),
        array_of("sums of values", "<f8", 3, "value cells"),
        array_of("ranges of values", "<f8", 2, "groups"),
    )


def _recoded(cells: IntArray, codes: IntArray, groups: int) -> IntArray:
    before = max(len(codes), 1)
    return cells // before * groups + codes[cells % before] if len(cells) else cells


def summed(codes: IntArray, weights: FloatArray) -> tuple[IntArray, FloatArray]:
    """Returns the distinct codes, ascending, and the sum of each row of weights per code, float64.

    Weights are added in their order, so the result is the same to the last bit wherever the input was split.
    """
    if not len(codes):
        return codes, weights
    distinct, inverse = distinct_codes(codes)
    rows = np.array([np.bincount(inverse, row, minlength=len(distinct)) for row in weights], np.float64)
    used = np.flatnonzero(np.bincount(inverse, minlength=len(distinct)))
    return distinct[used], rows[:, used]


def distinct_codes(codes: IntArray) -> tuple[IntArray, IntArray]:
    """Returns codes, ascending, and the position of each of `codes` in them. They include all distinct codes.

    If the codes are close together, the result has the codes between them, too. This is faster than sorting them.
    """
    first, last = int(codes.min()), int(codes.max())
    if last - first < max(_DENSE, _DENSE_SHARE * len(codes)):
        return np.arange(first, last + 1), codes - first
    distinct, inverse = np.unique(codes, return_inverse=True)
    return distinct, np.asarray(inverse, np.int64)


def _packed(values: IntArray) -> bytes:
    """Encodes values in the narrowest unsigned type, after one byte with the width in bytes."""
    width = next(w for w in (1, 2, 4, 8) if int(values.max(initial=0)) < 1 << (8 * w))
    return bytes([width]) + values.astype(f"<u{width}").tobytes()


def _unpacked(state: bytes, at: int, count: int) -> tuple[IntArray, int]:
    width = state[at]
    if width not in (1, 2, 4, 8):
        raise ValueError(f"width {width}")
    values = np.frombuffer(state, f"<u{width}", count, at + 1).astype(np.int64)
    return values, at + 1 + width * count
