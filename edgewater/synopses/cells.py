"""Sparse state of many groups: numbered cells with a value each, kept as one sorted array.

What a group has not touched costs nothing, and there is no object per group. A batch is appended as
a run and sorted in only when the runs outgrow what is sorted already, so that n updates cost
O(n log n) altogether, and not O(n · batches).
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewater.synopses.base import IntArray

_CELL_BITS = 32
_MIN_PENDING = 1 << 14


def cell_keys(groups: IntArray | int, cells: IntArray) -> IntArray:
    """``group << 32 | cell``: sorted by group, then by cell. Cells are in [0, 2^32)."""
    return groups << _CELL_BITS | cells


def groups_of(keys: IntArray) -> IntArray:
    return keys >> _CELL_BITS


def cells_of(keys: IntArray) -> IntArray:
    return keys & ((1 << _CELL_BITS) - 1)


class Cells:
    """Values by (group, cell), where values of the same cell combine by a ufunc such as `np.add`."""

    def __init__(self, combine: np.ufunc, dtype: npt.DTypeLike) -> None:
        self._combine = combine
        self._keys = np.zeros(0, np.int64)
        self._values: npt.NDArray[Any] = np.zeros(0, dtype)
        self._runs: list[tuple[IntArray, npt.NDArray[Any]]] = []
        self._pending = 0

    def copied(self) -> Cells:
        """A copy of settled cells; their arrays, which are never written to, are shared."""
        result = copy(self)
        result._keys, result._values = self.settled()
        result._runs = []
        return result

    @property
    def nbytes(self) -> int:
        runs = sum(k.nbytes + v.nbytes for k, v in self._runs)
        return self._keys.nbytes + self._values.nbytes + runs

    @property
    def is_due(self) -> bool:
        """Whether the runs have outgrown the sorted part."""
        return self._pending > max(len(self._keys), _MIN_PENDING)

    @property
    def is_settled(self) -> bool:
        return not self._runs

    @property
    def holds_any(self) -> bool:
        return bool(len(self._keys) or self._runs)

    def add(self, keys: IntArray, values: npt.NDArray[Any]) -> None:
        """Adds cells in any order; the same cell may stand several times. The arrays are kept."""
        if len(keys):
            self._runs.append((keys, values))
            self._pending += len(keys)

    def settled(self) -> tuple[IntArray, npt.NDArray[Any]]:
        """Keys, ascending and distinct, and their values. Not to be written to."""
        if self._runs:
            keys = np.concatenate([self._keys, *(k for k, _ in self._runs)])
            values = np.concatenate([self._values, *(v for _, v in self._runs)])
            self._keys, self._values = self._combined(keys, values.astype(self._values.dtype, copy=False))
            self._runs, self._pending = [], 0
        return self._keys, self._values

    def _combined(self, keys: IntArray, values: npt.NDArray[Any]) -> tuple[IntArray, npt.NDArray[Any]]:
        order = np.argsort(keys, kind="stable")  # stable: runs that are sorted already merge fast
        keys, values = keys[order], values[order]
        first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        return keys[first], self._combine.reduceat(values, first)

    def replace(self, keys: IntArray, values: npt.NDArray[Any]) -> None:
        """Forgets everything and adds these cells."""
        self._keys, self._values = self._keys[:0], self._values[:0]
        self._runs, self._pending = [], 0
        self.add(keys, values)

    def hold(self, keys: IntArray, values: npt.NDArray[Any]) -> None:
        """Forgets everything and takes over these cells, ascending and distinct, as they are."""
        self._keys, self._values = keys, values
        self._runs, self._pending = [], 0

    def starts(self, groups: int) -> IntArray:
        """Where each of `groups` groups begins in `settled`, and the end: shape (groups + 1,)."""
        return np.searchsorted(self.settled()[0], np.arange(groups + 1) << _CELL_BITS)

    def counts(self, groups: int) -> IntArray:
        """Cells per group, shape (groups,)."""
        return np.diff(self.starts(groups))

    def select(self, groups: IntArray, length: int) -> tuple[IntArray, npt.NDArray[Any]]:
        """The cells of ``groups[i]`` under group i, for each i. `length`: how many groups there are."""
        keys, values = self.settled()
        if length == len(groups) == 1:
            return keys, values  # of the one group that there is; settled arrays are never written to
        starts = self.starts(length)
        counts = np.diff(starts)[groups]
        ends = np.cumsum(counts)
        at = np.arange(int(counts.sum())) + np.repeat(starts[groups] - ends + counts, counts)
        return cell_keys(np.repeat(np.arange(len(groups)), counts), cells_of(keys[at])), values[at]

    def drop(self, gone: npt.NDArray[np.bool_]) -> None:
        """Forgets the cells of the groups for which `gone`, shape (groups,), is true."""
        keys, values = self.settled()
        kept = ~gone[groups_of(keys)]
        self._keys, self._values = keys[kept], values[kept]

    def pack(self, groups: int) -> tuple[IntArray, IntArray, IntArray, npt.NDArray[Any]]:
        """The cells as small numbers: cells per group, the first cell of each group that has any, steps from
        cell to cell (0 at a group's first), values."""
        keys, values = self.settled()
        counts = self.counts(groups)
        cells = cells_of(keys)
        begins = (np.cumsum(counts) - counts)[counts > 0]
        steps = np.diff(cells, prepend=0)
        steps[begins] = 0
        return counts, cells[begins], steps, values

    def unpack(self, counts: IntArray, firsts: IntArray, steps: IntArray, values: npt.NDArray[Any]) -> None:
        """Takes over what `pack` gave. Raises ValueError unless it can be that."""
        held = counts[counts > 0]
        begins = np.cumsum(held) - held
        if values.dtype != self._values.dtype or len(firsts) != len(held) or steps.shape != values.shape:
            raise ValueError(f"{len(firsts)} first cells and {values.dtype}{values.shape} for {steps.shape} cells")
        running = np.cumsum(steps)
        cells = running + np.repeat(firsts - running[begins], held)
        keys = cell_keys(np.repeat(np.arange(len(counts)), counts), cells)
        if ((cells < 0) | (cells >= 1 << _CELL_BITS)).any() or (keys[1:] <= keys[:-1]).any():
            raise ValueError("cells out of range or out of order")
        self._keys, self._values = keys, values
