"""The stash of cuckoo filters: cells with their copies, of many groups, as sorted arrays."""

from __future__ import annotations

import numpy as np

from edgewater.synopses.base import IntArray


class CuckooStash:
    """Copies of cells beyond the one in the table, and cells that found no place there.

    Attributes:
        keys: of the cells, distinct, ascending (`cuckoo_table.py`).
        copies: of each; never 0.
    """

    def __init__(self) -> None:
        self.keys: IntArray = np.zeros(0, np.int64)
        self.copies: IntArray = np.zeros(0, np.int64)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.copies.nbytes

    def holds(self, keys: IntArray) -> IntArray:
        """Copies per cell."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int64)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.copies[at], 0)

    def add(self, keys: IntArray, copies: IntArray) -> None:
        """Adds copies (or takes them out, if negative) of distinct cells."""
        if len(keys):
            self.keys, self.copies = self.joined(keys, copies)

    def joined(self, keys: IntArray, copies: IntArray) -> tuple[IntArray, IntArray]:
        """These cells and the stash's, ascending and distinct, with the sum of their copies where that is not 0."""
        keys, copies = np.concatenate([keys, self.keys]), np.concatenate([copies, self.copies])
        if not len(keys):
            return keys, copies
        order = np.argsort(keys, kind="stable")
        keys, copies = keys[order], copies[order]
        first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        total = np.add.reduceat(copies, first)
        return keys[first][total != 0], total[total != 0]

    def take(self, groups: IntArray, span: int) -> CuckooStash:
        """The cells of these groups, which are then 0, 1, …; each group has `span` keys."""
        starts, ends = (np.searchsorted(self.keys, (groups + i) * span) for i in (0, 1))
        counts = ends - starts
        before = np.cumsum(counts) - counts
        at = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
        result = CuckooStash()
        result.keys = self.keys[at] + np.repeat((np.arange(len(groups)) - groups) * span, counts)
        result.copies = self.copies[at]
        return result

    def reset(self, groups: IntArray, span: int) -> None:
        kept = ~np.isin(self.keys // span, groups)
        self.keys, self.copies = self.keys[kept], self.copies[kept]
