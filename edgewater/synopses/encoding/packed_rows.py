"""Rows of cells in the fewer of two forms: all cells, or those that are not zero.

Which form a row gets depends on its content alone, so equal states are equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewater.synopses.cells import Cells, cell_keys, cells_of, groups_of
from edgewater.synopses.encoding import codec
from edgewater.wire.synopsis_pb2 import Array as ArrayMessage

ARRAYS = 6
_SPARSE_SHARE = 2
"""A row with at most 1/2 of its cells in use is sparse: a cell in use costs a step and a value."""


def pack_rows(rows: npt.NDArray[Any]) -> list[ArrayMessage]:
    """`ARRAYS` arrays that hold `rows`, shape (groups, cells)."""
    sparse = np.count_nonzero(rows, axis=1) * _SPARSE_SHARE <= rows.shape[1]
    which = np.flatnonzero(sparse)
    groups, cells = np.nonzero(rows[which])
    held = Cells(np.maximum, rows.dtype)  # cells are distinct; add would widen small types
    held.replace(cell_keys(which[groups], cells.astype(np.int64)), rows[which[groups], cells])
    dense = np.flatnonzero(~sparse)
    return [codec.encode(array) for array in (*held.pack(len(rows)), dense, rows[dense])]


def unpack_rows(arrays: Iterable[ArrayMessage], cells: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """What `pack_rows` was given. Raises ValueError unless it can be that, and CorruptSynopsis."""
    *packed, dense, dense_rows = (codec.decode(a) for a in arrays)
    groups = len(packed[0])
    held = Cells(np.maximum, dtype)
    held.unpack(*packed)
    keys, values = held.settled()
    in_range = (cells_of(keys) < cells).all() and dense.dtype == np.int64 and not np.isin(dense, groups_of(keys)).any()
    ordered = (dense[1:] > dense[:-1]).all() and ((dense >= 0) & (dense < groups)).all()
    if not in_range or not ordered or dense_rows.dtype != dtype or dense_rows.shape != (len(dense), cells):
        raise ValueError(f"rows of {cells} cells out of range or out of order")
    rows = np.zeros((groups, cells), dtype)
    rows[groups_of(keys), cells_of(keys)] = values
    rows[dense] = dense_rows
    return rows
