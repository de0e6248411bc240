"""Sparse state of many groups: numbered cells with a value each, in one sorted array.

A cell that is not in use costs no memory, and there is no object per group. A batch is appended as a run; runs
are merged into the sorted array when they outgrow it, so that n updates cost O(n log n) in total instead of
O(n · batches).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewater.synopses.base import MIN_PENDING, BoolArray, IntArray, run_indices
from edgewater.synopses.encoding.layout import Field, field, totals

_CELL_BITS = 32  # format: half of int64
_DENSE, _DENSE_SMALL, _SMALL = 3, 32, 1 << 20  # measured: bench.synopses
"""When cells are combined in an array of all cells. Up to `_SMALL` cells, it may be `_DENSE_SMALL` times as long as the
used cells, because it stays in the cache. Above, it may be `_DENSE` times as long."""
_IDENTITIES: dict[np.ufunc, Callable[[np.dtype[Any]], Any]] = {
    np.add: lambda dtype: 0,
    np.maximum: lambda dtype: np.iinfo(dtype).min,
}


def cell_keys(groups: IntArray | int, cells: IntArray) -> IntArray:
    """Returns ``group << 32 | cell``, which sorts by group, then by cell. Cells are in [0, 2^32)."""
    return groups << _CELL_BITS | cells


def groups_of(keys: IntArray) -> IntArray:
    return keys >> _CELL_BITS


def cells_of(keys: IntArray) -> IntArray:
    return keys & ((1 << _CELL_BITS) - 1)


def cell_fields(type_: str, **limits: Any) -> tuple[Field, ...]:
    """Returns the fields of the output of `SparseCells.pack`, of values of this type."""
    return (
        totals("cells per group", "cells", "groups with cells"),
        field("first cells", "<i8", "groups with cells", least=0, most=(1 << _CELL_BITS) - 1),
        field("steps", "<i8", "cells", least=0, most=(1 << _CELL_BITS) - 1),
        field("values", type_, "cells", **limits),
    )


class SparseCells:
    """Values by (group, cell); a ufunc such as `np.add` combines values of the same cell."""

    def __init__(self, combine: np.ufunc, dtype: npt.DTypeLike) -> None:
        self._combine = combine
        self._keys = np.zeros(0, np.int64)
        self._values: npt.NDArray[Any] = np.zeros(0, dtype)
        self._runs: list[tuple[IntArray, npt.NDArray[Any]]] = []
        self._pending = 0

    def copy(self) -> SparseCells:
        """Returns a consolidated copy. It shares the arrays, which are never written to."""
        result = SparseCells(self._combine, self._values.dtype)
        result.replace_sorted(*self.consolidated())
        return result

    @property
    def nbytes(self) -> int:
        runs = sum(k.nbytes + v.nbytes for k, v in self._runs)
        return self._keys.nbytes + self._values.nbytes + runs

    @property
    def needs_consolidation(self) -> bool:
        """Whether the runs have outgrown the sorted array."""
        return self._pending > max(len(self._keys), MIN_PENDING)

    @property
    def is_consolidated(self) -> bool:
        return not self._runs

    @property
    def holds_any(self) -> bool:
        return bool(len(self._keys) or self._runs)

    def add(self, keys: IntArray, values: npt.NDArray[Any]) -> None:
        """Adds cells in any order, duplicates included. Keeps references to the arrays."""
        if len(keys):
            self._runs.append((keys, values))
            self._pending += len(keys)

    def consolidated(self) -> tuple[IntArray, npt.NDArray[Any]]:
        """Returns the keys, ascending and distinct, and their values. Callers must not write to them."""
        if self._runs:
            keys = np.concatenate([self._keys, *(k for k, _ in self._runs)])
            values = np.concatenate([self._values, *(v for _, v in self._runs)])
            self._keys, self._values = self._combined(keys, values.astype(self._values.dtype, copy=False))
            self._runs, self._pending = [], 0
        return self._keys, self._values

    def _combined(self, keys: IntArray, values: npt.NDArray[Any]) -> tuple[IntArray, npt.NDArray[Any]]:
        if self._combine in _IDENTITIES:
            least, groups = int(cells_of(keys).min()), int(groups_of(keys).max()) + 1
            span = int(cells_of(keys).max()) - least + 1
            if groups * span <= max(_DENSE * len(keys), min(_SMALL, _DENSE_SMALL * len(keys))):
                return self._scattered(keys, values, least, (groups, span))
        order = np.argsort(keys, kind="stable")  # stable: runs that are sorted already merge fast
        keys, values = keys[order], values[order]
        first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        return keys[first], self._combine.reduceat(values, first)

    def _scattered(
        self, keys: IntArray, values: npt.NDArray[Any], least: int, shape: tuple[int, int]
    ) -> tuple[IntArray, npt.NDArray[Any]]:
        """As `_combined`, but scatters into an array of all cells from `least` on, which takes a tenth of a sort's
        time.
        """
        at = groups_of(keys) * shape[1] + (cells_of(keys) - least)
        used = np.zeros(shape[0] * shape[1], bool)
        used[at] = True
        empty = _IDENTITIES[self._combine](values.dtype)
        combined = np.full(len(used), empty, values.dtype)
        self._combine.at(combined, at, values)
        places = np.flatnonzero(used)
        groups, cells = np.divmod(places, shape[1])
        return cell_keys(groups, cells + least), combined[places]

    def replace(self, keys: IntArray, values: npt.NDArray[Any]) -> None:
        """Replaces all cells by these, in any order."""
        self.replace_sorted(self._keys[:0], self._values[:0])
        self.add(keys, values)

    def replace_sorted(self, keys: IntArray, values: npt.NDArray[Any]) -> None:
        """Replaces all cells by these, which are ascending and distinct."""
        self._keys, self._values = keys, values
        self._runs, self._pending = [], 0

    def starts(self, groups: int) -> IntArray:
        """Returns the index in `consolidated` at which each of `groups` groups begins, and the end; int64, shape
        (groups + 1,).
        """
        return np.searchsorted(self.consolidated()[0], np.arange(groups + 1) << _CELL_BITS)

    def counts(self, groups: int) -> IntArray:
        """Returns the number of cells per group, shape (groups,)."""
        return np.diff(self.starts(groups))

    def select(self, groups: IntArray, length: int) -> tuple[IntArray, npt.NDArray[Any]]:
        """Returns the cells of ``groups[i]`` as the cells of group i, for each i. `length`: the number of groups."""
        keys, values = self.consolidated()
        if length == len(groups) == 1:
            return keys, values  # no copy: consolidated arrays are never written to
        starts = self.starts(length)
        counts = np.diff(starts)[groups]
        at = run_indices(starts[groups], counts)
        return cell_keys(np.repeat(np.arange(len(groups)), counts), cells_of(keys[at])), values[at]

    def drop(self, dropped: BoolArray) -> None:
        """Removes the cells of the groups for which `dropped`, shape (groups,), is true."""
        keys, values = self.consolidated()
        kept = ~dropped[groups_of(keys)]
        self._keys, self._values = keys[kept], values[kept]

    def pack(self, groups: int) -> tuple[IntArray, IntArray, IntArray, npt.NDArray[Any]]:
        """Returns the cells as four arrays of small numbers.

        They are: cells per group; the first cell of each group that has any; differences between neighbouring cells (0
        at a group's first); values.
        """
        keys, values = self.consolidated()
        counts = self.counts(groups)
        cells = cells_of(keys)
        begins = (np.cumsum(counts) - counts)[counts > 0]
        steps = np.diff(cells, prepend=0)
        steps[begins] = 0
        return counts, cells[begins], steps, values

    def unpack(self, counts: IntArray, firsts: IntArray, steps: IntArray, values: npt.NDArray[Any]) -> None:
        """Loads arrays of `cell_fields`. Raises ValueError if `pack` cannot have returned them."""
        held = counts[counts > 0]
        begins = np.cumsum(held) - held
        running = np.cumsum(steps)
        cells = running + np.repeat(firsts - running[begins], held)
        keys = cell_keys(np.repeat(np.arange(len(counts)), counts), cells)
        if ((cells < 0) | (cells >= 1 << _CELL_BITS)).any() or (keys[1:] <= keys[:-1]).any():
            raise ValueError("cells out of range or out of order")
        self._keys, self._values = keys, values
