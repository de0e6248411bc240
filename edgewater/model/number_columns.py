"""Columns of numbers as columns of another type. Bounds are rounded outwards, so that they stay bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.model.float_bounds import LARGEST_EXACT, Side, side_of, to_float

DECIMAL = pa.decimal128(38, 0)
"""The type of a column of integers if one of them is beyond int64."""


def float_column(column: pa.Array | pa.ChunkedArray, side: Side) -> npt.NDArray[np.float64]:
    """Returns numbers of any type as float64. Null is NaN."""
    floats = pc.fill_null(pc.cast(column, pa.float64(), safe=False), math.nan)
    numbers = np.copy(np.asarray(floats))
    if side and not pa.types.is_floating(column.type):
        rounded = np.flatnonzero(np.abs(numbers) >= LARGEST_EXACT)
        numbers[rounded] = [to_float(v, side) for v in column.take(pa.array(rounded)).to_pylist()]
    return numbers


def outwards(bounds: npt.NDArray[np.float64], side: Side) -> npt.NDArray[np.float64]:
    """Returns bounds of which a large one is moved by one float64, because it may be a rounded integer."""
    is_large = np.isfinite(bounds) & (np.abs(bounds) >= LARGEST_EXACT)
    return np.where(is_large, np.nextafter(bounds, side * math.inf), bounds)


def concatenated(tables: Sequence[pa.Table]) -> pa.Table:
    """Returns the rows of answers as one table. A column that a table lacks is null.

    A column may have integers in one answer, and integers beyond int64, fractions or no values in another answer. All
    values fit into the type of its result.
    """
    types: dict[str, list[pa.DataType]] = {}
    for table in tables:
        for field, column in zip(table.schema, table.columns, strict=True):
            types.setdefault(field.name, []).extend([] if _is_empty(column) else [field.type])
    common = {name: _common(found) for name, found in types.items() if found}
    return pa.concat_tables([_with_types(table, common) for table in tables], promote_options="permissive")


def _common(types: list[pa.DataType]) -> pa.DataType:
    kinds = set(types)
    if len(kinds) == 1 or not all(map(is_number, kinds)):
        return types[0]
    return pa.float64() if any(map(pa.types.is_floating, kinds)) else DECIMAL


def is_number(kind: pa.DataType) -> bool:
    """Returns whether a column of this type has numbers."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_empty(column: pa.ChunkedArray) -> bool:
    """Returns whether a column has no value, so that its type does not say which numbers the measure has."""
    return column.null_count == len(column) and (is_number(column.type) or pa.types.is_null(column.type))


def _with_types(table: pa.Table, types: dict[str, pa.DataType]) -> pa.Table:
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = types.get(name, column.type)
        if kind == column.type:
            columns.append(column)
        elif _is_empty(column):
            columns.append(pa.nulls(len(column), kind))
        elif pa.types.is_floating(kind):
            floats = float_column(column, side_of(name))
            columns.append(pa.array(floats, kind, mask=np.asarray(column.is_null())))
        else:
            columns.append(column.cast(kind) if kind == DECIMAL else column)
    return pa.table(columns, names=table.column_names)


def rounded_by_pandas(column: pa.ChunkedArray) -> bool:
    """Returns whether pandas would round integers of a column: large integers beside nulls become float64."""
    is_whole = pa.types.is_integer(column.type) and column.null_count
    return bool(is_whole and (np.abs(float_column(column, 0)) >= LARGEST_EXACT).any())
