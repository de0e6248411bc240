"""The encoding of a report: the arrival statistics of all sub-streams that an edge reports at once.

Counts are exact. An event is a place in a table of group, lag and arrival slot. Places are ascending, and their
distances are written as Rice codes: 5 to 7 bits for a record. If all values are sampled, their numbers follow from the
events and are not written.

Values are summed over the sub-streams of a slice, because windows consist of whole slices. They are rounded, because
floats hardly compress. Estimates depend on the sum of a group, so it is the most precise (`ROUNDED_SUM`). The sum of a
lag group is written as its difference from the mean value of the group, in parts of its standard error. So it takes 6
to 7 bits, equal values stay equal, and the variance of the group is right. Ranges are rounded outwards.

The state of an edge and of the center must not be rounded. It has `SubstreamStatistics.to_state`. Edges of release
0.3.0 report this encoding, too, with one state per sub-stream. `read_report` reads both.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import pyarrow as pa

from edgewater.arrivals.schedule import SlotGrid, lag_groups
from edgewater.arrivals.substream import (
    MAX_CELLS,
    MAX_GROUPS,
    MAX_INDEX,
    MAX_KEYS,
    NO_VALUES,
    SubstreamStatistics,
    summed,
)
from edgewater.base.errors import CorruptSynopsis
from edgewater.synopses import BoolArray, FloatArray, IntArray, KeyTable
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import KEYS, MAX_SHIPPED, Field, Layout, layout_for
from edgewater.synopses.encoding.rice import pack_integers, unpack_integers

_MAX_ROWS = 1 << 18
"""The largest product of the numbers of sub-streams and of groups of a report. A reader needs memory for each pair."""
ROUNDED_SUM = 2.0**-29  # derived: from the bits of `_SUM`
"""Largest relative error of a reported sum of values."""
ROUNDED_RANGE = 2.0**-12  # derived: from the bits of `_PRECISE`
"""Largest relative distance of a reported range from the range of the values. It is rounded outwards."""
_SUM, _PRECISE = 5, 3  # format: of reports
"""Bytes of a rounded float64. They have 28 and 12 bits of the mantissa."""
_STEPS = 16.0
"""Steps per standard error of a sum, in which the sums of lag groups are written."""
_MOST_STEPS = float(1 << 40)
_VERSION, _KIND = 2, "reported-groups"
_MAX_SPAN = 1 << 38  # limit: memory of a damaged report
_HEADER = struct.Struct("<B?qQQIHIIIII")


@dataclass(frozen=True, slots=True)
class _Header:
    """The numbers at the beginning of a report.

    Attributes:
        derived: whether the numbers of values follow from the events.
        base: the least sub-stream. The other sub-streams are given as distances from it (*parts*).
        start, span: the first arrival slot, as a distance from the first slot of `base`, and the number of slots from
            the first to the last arrival slot.
        per_slice: number of sub-streams of a slice.
        columns, groups: number of key columns and of groups.
        places, values, owners, unattributed: number of places, of value cells, of owners of values, and of
            sub-streams with unattributed events. An *owner* is a group in a part.
    """

    derived: bool
    base: int
    start: int
    span: int
    per_slice: int
    columns: int
    groups: int
    places: int
    values: int
    owners: int
    unattributed: int

    def owners_of(self, parts: IntArray, groups: IntArray, events: _Events) -> IntArray:
        """Returns the owners of values in parts and groups.

        The values of a slice belong to its first part in which the group has events. Without such events, values stay
        in their part.
        """
        known_slices = self._slices(events.parts, events.groups)
        order = np.lexsort((events.parts, known_slices))
        known, first = np.unique(known_slices[order], return_index=True)
        if len(known):
            wanted = self._slices(parts, groups)
            at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            parts = np.where(known[at] == wanted, events.parts[order][first][at], parts)
        return np.asarray(parts * self.groups + groups)

    def _slices(self, parts: IntArray, groups: IntArray) -> IntArray:
        slices = (parts + self.base) // self.per_slice - self.base // self.per_slice
        return np.asarray(slices * self.groups + groups)


@dataclass(frozen=True, slots=True)
class _Events:
    """The events of a report, one row per cell: part, group, slot within the sub-stream, lag and count, int64."""

    parts: IntArray
    groups: IntArray
    slots: IntArray
    lags: IntArray
    counts: IntArray


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of a report.

    Attributes:
        codes: owner · lag groups + lag group, ascending.
        sums: count, Σv and Σv², [3, value cell].
        owners: ascending.
        ranges: least and greatest value, [2, owner].
    """

    codes: IntArray
    sums: FloatArray
    owners: IntArray
    ranges: FloatArray


def fits_report(statistics: Sequence[SubstreamStatistics]) -> bool:
    """Returns whether statistics are within the limits of one report. A single one always is."""
    groups, cells = sum(s.groups for s in statistics), sum(len(s.cells) for s in statistics)
    is_small = groups <= MAX_GROUPS and len(statistics) * groups <= _MAX_ROWS and cells <= MAX_CELLS
    return is_small or len(statistics) == 1


def encode_report(statistics: Sequence[SubstreamStatistics], slice_substreams: int = 1) -> bytes:
    """Encodes statistics of one grid, at least one, by ascending sub-stream. `read_report` reads them if `fits_report`.

    Args:
        slice_substreams: number of sub-streams of a slice.
    """
    grid, base, width = statistics[0].grid, statistics[0].index, statistics[0].lag_groups
    table, codes = _common_table(statistics)
    groups = len(table) if table is not None else 1
    events = _events(statistics, codes, base)
    arrival = events.parts * grid.substream_slots + events.slots + events.lags
    start = int(arrival.min()) if len(arrival) else 0
    span = int(arrival.max()) - start + 1 if len(arrival) else 1
    others = np.array([(s.index - base, s.unattributed) for s in statistics if s.unattributed], np.int64).reshape(-1, 2)
    columns = len(statistics[0].keys)
    head = _Header(False, base, start, span, slice_substreams, columns, groups, 0, 0, 0, len(others))
    values = _values(statistics, codes, head, events)
    derived = _is_derived(values, head, events, grid)
    place = (events.groups * grid.lags + events.lags) * span + arrival - start
    order = np.argsort(place)
    place, counts = place[order], events.counts[order]
    head = replace(
        head, derived=derived, places=len(place), values=len(values.codes), owners=len(values.owners)
    )  # fmt: skip
    numbers = [np.diff(place, prepend=-1) - 1, counts - 1, *others.T]
    if not derived:
        numbers += [np.diff(values.codes, prepend=-1) - 1, values.sums[0].astype(np.int64)]
        numbers += [np.diff(values.owners, prepend=-1) - 1]
    data = _HEADER.pack(_VERSION, *astuple(head)) + b"".join(map(pack_integers, numbers))
    data += _rounded_values(values, width, derived=derived)
    if table is None:
        return data
    message = codec.header(_KIND, _VERSION, {})
    message.arrays.extend(map(codec.encode_keys, table.rows()))
    return data + codec.seal(message)


def read_report(state: bytes, grid: SlotGrid, *, grouped: bool = False) -> list[SubstreamStatistics]:
    """Decodes a report, or the one sub-stream of a report of release 0.3.0.

    Args:
        grouped: whether the query has groups.

    Raises:
        CorruptSynopsis, UnsupportedVersion: the bytes cannot be read.
    """
    if state[:1] != bytes([_VERSION]):
        return [SubstreamStatistics.from_state(state, grid, grouped=grouped)]
    try:
        _, *numbers = _HEADER.unpack_from(state)
        return _decoded(_Header(*numbers), _Reader(state, _HEADER.size), grid, grouped=grouped)
    except (struct.error, ValueError, IndexError) as exc:
        raise CorruptSynopsis(f"a report cannot be read: {exc}") from exc


def _decoded(head: _Header, reader: _Reader, grid: SlotGrid, *, grouped: bool) -> list[SubstreamStatistics]:
    _check_header(head, grouped=grouped)
    width, places, counts = _lag_groups(grid), reader.ascending(head.places), reader.integers(head.places) + 1
    others = np.stack([reader.integers(head.unattributed), reader.integers(head.unattributed)])
    events = _placed(head, grid, places, counts)
    if head.derived:
        codes, sums = _by_lag_group(head, events, grid)
        owners = np.unique(codes // width)
    else:
        codes, sums = reader.ascending(head.values), reader.integers(head.values)[None].astype(np.float64)
        owners = reader.ascending(head.owners)
    if (len(codes), len(owners)) != (head.values, head.owners) or not np.isin(codes // width, owners).all():
        raise CorruptSynopsis("a report's values do not match their owners")
    values = _read_values(reader, codes, sums[0], owners, width, derived=head.derived)
    keys: list[pa.Array] = []
    if head.columns:
        message = codec.unseal(reader.rest)
        codec.open_message(message, _KIND, _VERSION, len(message.arrays))
        columns = (Field(f"key {number}", (KEYS,), (("groups",),)) for number in range(head.columns))
        keys = list(layout_for(_KIND, (Layout.of(*columns),), message.arrays).decode(_KIND, message.arrays))
    if (len(keys[0]) if keys else 1) != head.groups or not (keys or not reader.rest):
        raise CorruptSynopsis(f"a report of {head.groups} groups has other keys, or bytes behind its values")
    return _statistics(head, grid, keys, events, values, others)


def _common_table(statistics: Sequence[SubstreamStatistics]) -> tuple[KeyTable | None, list[IntArray]]:
    """Returns a table of the keys of all statistics, and the code of each group of each of them."""
    if not statistics[0].keys:
        return None, [np.zeros(1, np.int64)] * len(statistics)
    table, rows = KeyTable(tuple(k.type for k in statistics[0].keys)), [s.groups for s in statistics]
    columns = [pa.concat_arrays(each) for each in zip(*(s.keys for s in statistics), strict=True)]
    return table, np.split(table.encode(columns, sum(rows)), np.cumsum(rows)[:-1])


def _lag_groups(grid: SlotGrid) -> int:
    return int(lag_groups(grid.lags)[-1]) + 1


def _events(statistics: Sequence[SubstreamStatistics], codes: Sequence[IntArray], base: int) -> _Events:
    columns = []
    for each, code in zip(statistics, codes, strict=True):
        cell, group = np.divmod(each.cells, max(each.groups, 1))
        slot, lag = np.divmod(cell, each.grid.lags)
        columns.append(
            np.stack([np.full(len(cell), each.index - base), _looked_up(code, group), slot, lag, each.counts])
        )
    return _Events(*np.concatenate(columns, axis=1))


def _looked_up(code: IntArray, groups: IntArray) -> IntArray:
    return code[groups] if len(groups) else groups


def _values(
    statistics: Sequence[SubstreamStatistics], codes: Sequence[IntArray], head: _Header, events: _Events
) -> _Values:
    """Returns the values of all statistics, summed over the sub-streams of a slice."""
    parts, groups, within, sums = [], [], [], []
    ranged_parts, ranged_groups, ranges = [], [], []
    width = statistics[0].lag_groups
    for each, code in zip(statistics, codes, strict=True):
        group, lag_group = np.divmod(each.value_cells, width)
        parts.append(np.full(len(group), each.index - head.base))
        groups.append(_looked_up(code, group))
        within.append(lag_group)
        sums.append(each.value_sums)
        ranged = np.flatnonzero(~(each.ranges == NO_VALUES).all(axis=0))
        ranged_parts.append(np.full(len(ranged), each.index - head.base))
        ranged_groups.append(_looked_up(code, ranged))
        ranges.append(each.ranges[:, ranged])
    owner = head.owners_of(np.concatenate(parts), np.concatenate(groups), events)
    cells, total = summed(owner * width + np.concatenate(within), np.concatenate(sums, axis=1))
    ranged_owner = head.owners_of(np.concatenate(ranged_parts), np.concatenate(ranged_groups), events)
    owners = np.union1d(cells // width, ranged_owner)
    extremes = np.repeat(NO_VALUES, len(owners), axis=1)
    at, (least, greatest) = np.searchsorted(owners, ranged_owner), np.concatenate(ranges, axis=1)
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        np.minimum.at(extremes[0], at, least)
        np.maximum.at(extremes[1], at, greatest)
    return _Values(cells, total, owners, extremes)


def _by_lag_group(head: _Header, events: _Events, grid: SlotGrid) -> tuple[IntArray, FloatArray]:
    """Returns the codes of the value cells that events have, and the number of events of each, [1, value cell]."""
    owner = head.owners_of(events.parts, events.groups, events)
    return summed(
        owner * _lag_groups(grid) + lag_groups(grid.lags)[events.lags], events.counts[None].astype(np.float64)
    )


def _is_derived(values: _Values, head: _Header, events: _Events, grid: SlotGrid) -> bool:
    """Returns whether all events have sampled values. A single value is then also the range."""
    codes, counts = _by_lag_group(head, events, grid)
    if not np.array_equal(codes, values.codes) or not np.array_equal(counts[0], values.sums[0]):
        return False
    at = np.searchsorted(values.owners, codes // _lag_groups(grid))
    single = np.bincount(at, counts[0], len(values.owners)) == 1
    alone = single[at]
    has_values = len(np.unique(at)) == len(values.owners)
    return has_values and bool((values.ranges[:, at[alone]] == values.sums[1, alone]).all())


def _rounded_values(values: _Values, width: int, *, derived: bool) -> bytes:
    """Returns all numbers of `values` that are not integers, rounded.

    Args:
        width: number of lag groups.
        derived: whether a single value is also the range.
    """
    owners = len(values.owners)
    at = np.searchsorted(values.owners, values.codes // width)
    count, total, squares = (np.asarray(np.bincount(at, row, owners), np.float64) for row in values.sums)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = total / np.maximum(count, 1.0)
        variation = np.maximum(squares - total * mean, 0.0)
        differences = values.sums[1] - values.sums[0] * mean[at]
    variation = _rounded(np.where(np.isnan(variation), np.inf, variation), _PRECISE)
    others = _others(at, values.sums[0])
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        steps = np.rint(differences / _step(variation, count, at, values.sums[0]))[others]
    steps = np.clip(np.where(np.isnan(steps), 0.0, steps), -_MOST_STEPS, _MOST_STEPS).astype(np.int64)
    least, greatest = values.ranges[:, ~(derived & (count == 1))]
    rounded = (
        _to_bytes(total, _SUM),
        _to_bytes(variation[count > 1], _PRECISE),
        _to_bytes(-_rounded_up(-least, _PRECISE), _PRECISE),
        _to_bytes(_rounded_up(greatest, _PRECISE), _PRECISE),
    )
    return pack_integers(np.where(steps < 0, -2 * steps - 1, 2 * steps)) + b"".join(rounded)


def _read_values(
    reader: _Reader, codes: IntArray, counts: FloatArray, owners: IntArray, width: int, *, derived: bool
) -> _Values:
    at = np.searchsorted(owners, codes // width)
    count, others = np.asarray(np.bincount(at, counts, len(owners)), np.float64), _others(at, counts)
    signed = reader.integers(int(others.sum()))
    total, variation = reader.floats(len(owners), _SUM), np.zeros(len(owners))
    variation[count > 1] = reader.floats(int((count > 1).sum()), _PRECISE)
    steps = np.zeros(len(codes))
    steps[others] = np.where(signed % 2, -(signed + 1) // 2, signed // 2)
    sent = ~(derived & (count == 1))
    ranges = np.stack([total - ROUNDED_SUM * np.abs(total), total + ROUNDED_SUM * np.abs(total)])
    for row in ranges:
        row[sent] = reader.floats(int(sent.sum()), _PRECISE)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        mean, size = total / np.maximum(count, 1.0), np.maximum(counts, 1.0)
        differences = steps * _step(variation, count, at, counts)
        differences = np.where(np.isfinite(differences), differences, 0.0)
        # The differences of an owner add up to 0.
        differences[~others] = -np.bincount(at, differences, len(owners))[at[~others]]
        sums = counts * mean[at] + differences
        between = np.bincount(at, differences * (differences / size), len(owners))
        within = np.maximum(variation - between, 0.0) / np.maximum(count, 1.0)
        squares = sums * (sums / size) + within[at] * counts
    return _Values(codes, np.stack([counts, sums, squares]), owners, ranges)


def _step(variation: FloatArray, count: FloatArray, at: IntArray, counts: FloatArray) -> FloatArray:
    """Returns the step in which the sum of each value cell is written.

    Args:
        variation, count: squared differences from the mean, and number of values, per owner.
        at, counts: owner and number of values, per value cell.
    """
    return np.asarray(np.sqrt(variation / np.maximum(count, 1.0))[at] * np.sqrt(counts) / _STEPS)


def _others(at: IntArray, counts: FloatArray) -> BoolArray:
    """Returns a mask of all value cells but the largest one of each owner.

    Args:
        at: owner of each value cell, ascending.
    """
    result = np.ones(len(at), bool)
    order = np.lexsort((-counts, at))
    result[order[np.unique(at, return_index=True)[1]]] = False
    return result


def _rounded(values: FloatArray, size: int) -> FloatArray:
    """Returns the nearest float64 whose bytes after the first `size` bytes are 0."""
    bits, cut = np.ascontiguousarray(values, np.float64).view(np.uint64), np.uint64(64 - 8 * size)
    rounded = np.where(np.isnan(values), bits, bits + (np.uint64(1) << cut >> np.uint64(1)))
    return (rounded >> cut << cut).view(np.float64)


def _to_bytes(values: FloatArray, size: int) -> bytes:
    """Returns the first `size` bytes of each rounded value. The first bytes of all values are together."""
    return _rounded(values, size).astype(">f8").view(np.uint8).reshape(-1, 8)[:, :size].T.tobytes()


def _rounded_up(values: FloatArray, size: int) -> FloatArray:
    """Returns the least numbers that are at least `values` and have `size` bytes."""
    bits, cut = np.ascontiguousarray(values, np.float64).view(np.uint64), np.uint64(64 - 8 * size)
    towards_zero = bits >> cut << cut
    further = np.where(np.isfinite(values), towards_zero + (np.uint64(1) << cut), towards_zero).view(np.float64)
    shorter = towards_zero.view(np.float64)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(shorter < values, further, shorter))


class _Reader:
    """Reads the arrays of a report one after another."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    @property
    def rest(self) -> bytes:
        return self._data[self.at :]

    def integers(self, count: int) -> IntArray:
        values, self.at = unpack_integers(self._data, self.at, count)
        return values

    def ascending(self, count: int) -> IntArray:
        return np.cumsum(self.integers(count) + 1) - 1

    def floats(self, count: int, size: int) -> FloatArray:
        begin, self.at = self.at, self.at + count * size
        bits = np.zeros((count, 8), np.uint8)
        bits[:, :size] = np.frombuffer(self._data, np.uint8, count * size, begin).reshape(size, count).T
        return bits.view(">f8")[:, 0].astype(np.float64)


def _check_header(head: _Header, *, grouped: bool) -> None:
    fits = abs(head.base) <= MAX_INDEX and head.start <= MAX_INDEX and 1 <= head.span <= _MAX_SPAN
    fits &= head.per_slice >= 1 and head.groups <= MAX_GROUPS and head.places <= MAX_CELLS
    fits &= 1 <= head.columns <= MAX_KEYS if grouped else (head.columns, head.groups) == (0, 1)
    if not fits:
        raise CorruptSynopsis(f"a report cannot have {head}")


def _placed(head: _Header, grid: SlotGrid, places: IntArray, counts: IntArray) -> _Events:
    """Returns the events at the given places of the table."""
    cell, arrival = np.divmod(places, head.span)
    group, lag = np.divmod(cell, grid.lags)
    born = arrival + head.start - lag
    if len(places) and (group[-1] >= head.groups or born.min() < 0 or counts.max() > MAX_SHIPPED):
        raise CorruptSynopsis("a report has events before its first sub-stream, of unknown groups, or too many events")
    part, slot = np.divmod(born, grid.substream_slots)
    return _Events(part, group, slot, lag, counts)


def _statistics(
    head: _Header, grid: SlotGrid, keys: list[pa.Array], events: _Events, values: _Values, others: IntArray
) -> list[SubstreamStatistics]:
    """Returns one entry per sub-stream."""
    groups, width = max(head.groups, 1), _lag_groups(grid)
    owner_part = values.owners // groups
    parts = np.unique(np.concatenate([events.parts, owner_part, others[0]]))
    if len(parts) * groups > _MAX_ROWS or max(int(parts.max(initial=0)), int(others[1].max(initial=0))) > MAX_INDEX:
        raise CorruptSynopsis(f"a report of {len(parts)} sub-streams and {groups} groups, or of more than 2^53 events")
    cells = (events.slots * grid.lags + events.lags) * groups + events.groups
    order = np.lexsort((cells, events.parts))
    cells, counts, of_cells = cells[order], events.counts[order], events.parts[order]
    unattributed = dict(zip(*others.tolist(), strict=True))
    result = []
    for part in parts.tolist():
        mine, valued, owned = (
            slice(*np.searchsorted(at, [part, part + 1]).tolist())
            for at in (of_cells, values.codes // (width * groups), owner_part)
        )
        ranges = np.repeat(NO_VALUES, head.groups, axis=1)
        ranges[:, values.owners[owned] - part * groups] = values.ranges[:, owned]
        codes = values.codes[valued] - part * groups * width
        each = SubstreamStatistics(
            grid, head.base + part, keys, cells[mine], counts[mine], codes, values.sums[:, valued], ranges,
            unattributed.get(part, 0),
        )  # fmt: skip
        each.check(np.diff(each.cells, prepend=0), np.diff(each.value_cells, prepend=0))
        result.append(each)
    return result
