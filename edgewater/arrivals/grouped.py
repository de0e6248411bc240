"""Statistics of a sub-stream per group, as columns: what an edge ships of a query with a `group_by` and an accuracy.

For each group they are what `SubstreamStatistics` says of all events. Groups are rows of a small table of keys that
travels with the statistics, so a statement depends on none before it. Groups are many only by mistake: above a limit
nothing is told of any, but how many events there were, and the center waits with its answers until they are complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from edgewater.arrivals.schedule import SlotGrid, lag_groups
from edgewater.errors import CorruptSynopsis, InvalidRecord
from edgewater.synopses.base import FloatArray, IntArray
from edgewater.synopses.encoding import codec
from edgewater.synopses.key_table import KeyTable

_KIND, _VERSION = "grouped-substream", 1

MAX_CELLS = 1 << 19
"""Of one statement, 1 to 3 MB. Between two points come arrivals of 30 slots at most, in each slot and group, less than
half of that. What an edge holds back while its link is down may come to more: every lag of every group."""


@dataclass(slots=True)
class GroupedSubstream:
    """One source's events born in sub-stream `index`, per group, as far as reported.

    Attributes:
        keys: a column per `group_by`, a row per group.
        cells: (slot of the sub-stream · lags + lag) · groups + group, int64, ascending; `counts`: events of each.
        places: group · lag groups + lag group, ascending; `late`: count, Σv, Σv² of the sampled values there, (3, n).
        others: events of which nothing else is said, for there were too many groups.
    """

    grid: SlotGrid
    index: int
    keys: list[pa.Array]
    cells: IntArray
    counts: IntArray
    places: IntArray
    late: FloatArray
    others: int = 0

    @property
    def groups(self) -> int:
        return len(self.keys[0])

    @property
    def lag_groups(self) -> int:
        return int(lag_groups(self.grid.lags)[-1]) + 1

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self.keys, self.cells, self.counts, self.places, self.late))

    def arrivals(self) -> IntArray:
        """Rows of (arrival slot since epoch, lag, count, group), int64."""
        cell, group = np.divmod(self.cells, max(self.groups, 1))
        slot, lag = np.divmod(cell, self.grid.lags)
        return np.stack([self.index * self.grid.substream_slots + slot + lag, lag, self.counts, group], axis=1)

    def tallies(self) -> FloatArray:
        """Per group: events, and behind it the three rows of sampled values by lag group, flat. float64."""
        width, groups = self.lag_groups, self.groups
        result = np.zeros((groups, 1 + 3 * width))
        np.add.at(result[:, 0], self.cells % max(groups, 1), self.counts)
        group, lag = np.divmod(self.places, width)
        for row in range(3):
            result[group, 1 + row * width + lag] = self.late[row]
        return result

    def merge(self, other: GroupedSubstream) -> None:
        """Adds what another batch has of the same sub-stream.

        Raises:
            InvalidRecord: of another sub-stream, grid or key columns.
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
        places = [code[s.places // width] * width + s.places % width for s, code in ((self, mine), (other, theirs))]
        self.places, self.late = summed(np.concatenate(places), np.concatenate([self.late, other.late], axis=1))
        self.keys = table.rows()
        self.others += other.others
        self.bound()

    def bound(self) -> None:
        """With more cells than a frame has room for, only the number of events is told."""
        if len(self.cells) > MAX_CELLS:
            self.others += int(self.counts.sum())
            self.keys = [k.slice(0, 0) for k in self.keys]
            self.cells = self.counts = self.places = np.zeros(0, np.int64)
            self.late = np.zeros((3, 0))

    def to_state(self) -> bytes:
        """The envelope of synopses: a header, the key columns, narrow integers."""
        message = codec.header(_KIND, _VERSION, {"index": self.index, "others": self.others, "keys": len(self.keys)})
        message.arrays.extend(codec.encode_keys(k) for k in self.keys)
        arrays = (np.diff(self.cells, prepend=0), self.counts, np.diff(self.places, prepend=0), self.late)
        message.arrays.extend(codec.encode(a) for a in arrays)
        return codec.seal(message)

    @classmethod
    def from_state(cls, state: bytes, grid: SlotGrid) -> Self:
        """Raises CorruptSynopsis, UnsupportedVersion."""
        message = codec.unseal(state)
        given = codec.open_message(message, _KIND, _VERSION, len(message.arrays))
        try:
            columns = int(given["keys"])
            keys = [codec.decode_keys(a) for a in message.arrays[:columns]]
            steps, counts, jumps, late = (codec.decode(a) for a in message.arrays[columns:])
            late = np.asarray(late, np.float64).reshape(3, len(jumps))
            made = cls(
                grid, int(given["index"]), keys, np.cumsum(steps), np.asarray(counts, np.int64), np.cumsum(jumps),
                late, int(given["others"]),
            )  # fmt: skip
        except (KeyError, ValueError, TypeError) as exc:
            raise CorruptSynopsis(f"{_KIND} cannot be read: {type(exc).__name__}: {exc}") from exc
        made._check(steps, jumps)
        return made

    def _check(self, steps: IntArray, jumps: IntArray) -> None:
        groups = self.groups if self.keys else -1
        if groups < 0 or any(len(k) != groups for k in self.keys):
            raise CorruptSynopsis(f"{_KIND}: {len(self.keys)} key columns, which are not of one length")
        for name, at, ascending, limit in (
            ("cells", self.cells, steps, self.grid.substream_slots * self.grid.lags * groups),
            ("places", self.places, jumps, groups * self.lag_groups),
        ):
            if len(at) and (at[0] < 0 or at[-1] >= limit or (ascending[1:] <= 0).any()):
                raise CorruptSynopsis(f"{_KIND}: {name} outside of {limit}, or not ascending")
        if len(self.counts) != len(self.cells) or (self.counts <= 0).any() or self.others < 0:
            raise CorruptSynopsis(f"{_KIND}: cells without events")


def _recoded(cells: IntArray, codes: IntArray, groups: int) -> IntArray:
    before = max(len(codes), 1)
    return cells // before * groups + codes[cells % before] if len(cells) else cells


def summed(codes: IntArray, weights: FloatArray) -> tuple[IntArray, FloatArray]:
    """Distinct codes, ascending, and the sum of each row of weights by them."""
    distinct, inverse = np.unique(codes, return_inverse=True)
    rows = [np.bincount(inverse, row, minlength=len(distinct)) for row in weights]
    return distinct, np.stack(rows) if rows else weights
