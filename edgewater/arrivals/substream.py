"""Arrival statistics of a sub-stream, as an edge ships them. They can be added over batches and over edges."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from edgewater.arrivals.schedule import SlotGrid, lag_groups
from edgewater.model.errors import CorruptSynopsis, InvalidRecord, UnsupportedVersion
from edgewater.synopses import FloatArray, IntArray
from edgewater.synopses.encoding.layout import MAX_SHIPPED

_HEADER, _RANGE = struct.Struct("<BqII88x"), struct.Struct("<2d")
"""No release reads the numbers in the place of the 88 zeros, but release 0.3.0 expects them. Zeros compress well."""
_VERSION = 1
"""The version of the encoding. Version 1 has no range of values."""
_MAX_INDEX = 1 << 53

DEFAULT_MAX_SKEW_MS = 1_000
"""The accepted clock skew in ms. If an event time is after the arrival time by at most this much, the delay is 0."""


@dataclass(slots=True)
class SubstreamStatistics:
    """The reported events of one source with event times in sub-stream `index`.

    Attributes:
        index: number of the sub-stream.
        cells: codes slot · lags + lag, int64, ascending, where the slot is counted within the sub-stream. They are the
            cells of the center's run-off triangle.
        counts: number of events per cell, int64.
        value_sums: count, Σv and Σv² of the sampled values by lag group, float64 (3, lag groups).
        least, greatest: the range of the values of all events, sampled or not. Infinity and -infinity without events or
            values; NaN if some values are unknown.
    """

    grid: SlotGrid
    index: int
    cells: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    value_sums: FloatArray = field(default_factory=lambda: np.zeros((3, 0)))
    least: float = math.inf
    greatest: float = -math.inf

    @property
    def events(self) -> int:
        return int(self.counts.sum())

    def merge(self, other: SubstreamStatistics) -> None:
        """Adds the statistics of another batch or edge for the same sub-stream.

        Raises:
            InvalidRecord: the sub-streams or the grids differ.
        """
        if (other.grid, other.index) != (self.grid, self.index):
            raise InvalidRecord("substream", (other.grid, other.index), f"{(self.grid, self.index)}")
        cells = np.concatenate([self.cells, other.cells])
        self.cells, inverse = np.unique(cells, return_inverse=True)
        weights = np.concatenate([self.counts, other.counts])
        self.counts = np.bincount(inverse, weights=weights, minlength=len(self.cells)).astype(np.int64)
        if not self.value_sums.size:
            self.value_sums = other.value_sums.copy()
        elif other.value_sums.size:
            with np.errstate(over="ignore", invalid="ignore"):  # squares of large values are infinite
                self.value_sums = self.value_sums + other.value_sums
        self.least = float(np.minimum(self.least, other.least))  # NaN stays NaN
        self.greatest = float(np.maximum(self.greatest, other.greatest))

    def arrivals(self) -> tuple[IntArray, IntArray, IntArray]:
        """Returns three arrays with one entry per cell, int64: arrival slot since the epoch, lag, and number of
        events.
        """
        slot, lag = np.divmod(self.cells, self.grid.lags)
        return self.index * self.grid.substream_slots + slot + lag, lag, self.counts

    def to_state(self) -> bytes:
        """Encodes a header, the range of values, cells and counts in integers of minimal width, and the sums of
        values.
        """
        head = _HEADER.pack(_VERSION, self.index, len(self.cells), self.value_sums.shape[1])
        steps = np.diff(self.cells, prepend=0)
        return (
            head
            + _RANGE.pack(self.least, self.greatest)
            + _packed(steps)
            + _packed(self.counts)
            + self.value_sums.astype("<f8").tobytes()
        )

    @classmethod
    def from_state(cls, state: bytes, grid: SlotGrid) -> Self:
        """Decodes the result of `to_state`. Raises CorruptSynopsis and UnsupportedVersion."""
        if state[:1] and state[0] != _VERSION:
            raise UnsupportedVersion(f"sub-stream statistics of version {state[0]}; this release reads {_VERSION}")
        try:
            _, index, cells, groups = _HEADER.unpack_from(state)
            least, greatest = _RANGE.unpack_from(state, _HEADER.size)
            steps, at = _unpacked(state, _HEADER.size + _RANGE.size, cells)
            counts, at = _unpacked(state, at, cells)
            if len(state) != at + 24 * groups:
                raise ValueError("length")
            sums = np.frombuffer(state, "<f8", 3 * groups, at).reshape(3, groups).astype(float)
        except (struct.error, ValueError, IndexError) as exc:
            raise CorruptSynopsis(f"sub-stream statistics cannot be read: {exc}") from exc
        limit = grid.substream_slots * grid.lags
        inside = cells == 0 or ((steps >= 0) & (steps < limit)).all()
        positions = np.cumsum(steps)
        if not inside or (cells and (positions[-1] >= limit or (steps[1:] == 0).any())):
            raise CorruptSynopsis(f"sub-stream statistics have cells that are not ascending, or above {limit}")
        require_counts(counts, index)
        if groups not in (0, int(lag_groups(grid.lags)[-1]) + 1):
            raise CorruptSynopsis(f"sub-stream statistics of values in {groups} lag groups")
        require_sampled(sums)
        require_ranges(np.array([[least], [greatest]]))
        return cls(grid, index, positions, counts, sums, least, greatest)


def require_counts(counts: IntArray, index: int) -> None:
    """Raises CorruptSynopsis if a count of a cell is not from 1 to `MAX_SHIPPED`, or the index could overflow."""
    if (counts <= 0).any() or (counts > MAX_SHIPPED).any() or abs(index) > _MAX_INDEX:
        raise CorruptSynopsis(
            f"sub-stream statistics have a count outside 1 to {MAX_SHIPPED}, or the index {index} outside ±2^53"
        )


def require_sampled(value_sums: FloatArray) -> None:
    """Raises CorruptSynopsis unless the numbers of sampled values are valid. The sums of values may be any number."""
    if not ((value_sums[0] >= 0) & (value_sums[0] <= MAX_SHIPPED)).all():
        raise CorruptSynopsis(f"sub-stream statistics have a number of sampled values outside 0 to {MAX_SHIPPED}")


def require_ranges(ranges: FloatArray) -> None:
    """Raises CorruptSynopsis unless ranges of values are finite, empty, or unknown (NaN).

    Args:
        ranges: the least and the greatest values, float64 (2, n).
    """
    least, greatest = ranges
    finite = np.isfinite(least) & np.isfinite(greatest) & (least <= greatest)
    empty = (least == np.inf) & (greatest == -np.inf)
    if not (finite | empty | (np.isnan(least) & np.isnan(greatest))).all():
        raise CorruptSynopsis("sub-stream statistics have a least value above the greatest, or only one of them")


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
