"""Stacks with a row of numbers per group, such as counters or bits, and the encoding of rows.

A row is written sparse or dense, whichever is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from edgewater.synopses.array_stack import ArrayStack, with_capacity
from edgewater.synopses.base import IntArray
from edgewater.synopses.checks import check_dense
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import Field, field
from edgewater.synopses.sparse_cells import SparseCells, cell_fields, cell_keys, cells_of, groups_of
from edgewater.wire.synopsis_pb2 import Array as ArrayMessage
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage


class RowStack(ArrayStack):
    """A stack with a row per group besides its arrays; its constructor calls `_set_row`.

    Attributes:
        level: how many times release 0.3.0 has halved the rows.
    """

    level: int
    _rows: npt.NDArray[Any]  # shape (groups, …), with room for further groups

    def _set_row(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._rows = np.zeros((len(self), *shape), dtype)

    def table(self) -> npt.NDArray[Any]:
        """Returns a view of the rows of all groups."""
        return self._rows[: len(self)]

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._rows.nbytes

    def grow(self, groups: int) -> None:
        super().grow(groups)
        self._rows = with_capacity(self._rows, groups)

    def take(self, groups: IntArray) -> Self:
        if len(self) == len(groups) == 1:
            result = self._copy_single()
            result._rows = self._rows[:1].copy()
            return result
        result = super().take(groups)
        result._rows = self.table()[groups]
        return result

    def reset(self, groups: IntArray) -> None:
        super().reset(groups)
        self._rows[groups] = 0

    def to_message(self) -> SynopsisMessage:
        message = self._header()
        own = (self._view(name) for name in self.arrays)
        message.arrays.extend(codec.encode(array) for array in (np.array([self.level]), *own))
        message.arrays.extend(pack_rows(self.table().reshape(len(self), math.prod(self._rows.shape[1:]))))
        return message

    @classmethod
    def _decoded(cls, given: dict[str, Any], arrays: list[Any]) -> Self:
        level, *own = arrays
        result = super()._decoded({**given, "level": int(level[0])}, own)
        shape = result._rows.shape[1:]
        rows = unpack_rows(own[len(cls.arrays) :], math.prod(shape))
        result._rows = rows.reshape(len(rows), *shape)
        result._check_rows()
        return result

    def _check_rows(self) -> None:
        """Raises ValueError for decoded rows that are no state of this kind."""


def row_fields(type_: str, **limits: Any) -> tuple[Field, ...]:
    """Returns the fields of the output of `pack_rows`, of rows of this type."""
    rows = field("dense rows", type_, "dense groups", "cells of a row", **limits)
    return *cell_fields(type_, **limits), field("dense groups", "<i8", "dense groups", least=0), rows


_SPARSE_DIVISOR = 2  # derived: a sparse cell takes a difference and a value
"""A row with at most 1/2 of its cells in use is stored sparse: a sparse cell costs a difference and a value."""


def pack_rows(rows: npt.NDArray[Any]) -> list[ArrayMessage]:
    """Encodes `rows`, shape (groups, cells), as the arrays of `row_fields`.

    A row is stored as all its cells, or as its non-zero cells.

    The content of a row alone decides, so equal states give equal bytes.
    """
    sparse = np.count_nonzero(rows, axis=1) * _SPARSE_DIVISOR <= rows.shape[1]
    which = np.flatnonzero(sparse)
    groups, cells = np.nonzero(rows[which])
    held = SparseCells(np.maximum, rows.dtype)  # cells are distinct; add would widen small types
    held.replace(cell_keys(which[groups], cells.astype(np.int64)), rows[which[groups], cells])
    dense = np.flatnonzero(~sparse)
    return [codec.encode(array) for array in (*held.pack(len(rows)), dense, rows[dense])]


def unpack_rows(arrays: Sequence[npt.NDArray[Any]], cells: int) -> npt.NDArray[Any]:
    """Returns rows of this many cells from arrays of `row_fields`. Raises ValueError for arrays that do not fit."""
    *packed, dense, dense_rows = arrays
    groups, dtype = len(packed[0]), dense_rows.dtype
    check_dense(groups, cells * dtype.itemsize)
    held = SparseCells(np.maximum, dtype)
    held.unpack(*packed)
    keys, values = held.consolidated()
    in_range = (cells_of(keys) < cells).all() and not np.isin(dense, groups_of(keys)).any()
    ordered = (dense[1:] > dense[:-1]).all() and (dense < groups).all()
    if not in_range or not ordered or dense_rows.shape != (len(dense), cells):
        raise ValueError(f"rows of {cells} cells out of range or out of order")
    rows = np.zeros((groups, cells), dtype)
    rows[groups_of(keys), cells_of(keys)] = values
    rows[dense] = dense_rows
    return rows
