"""Columns of numbers as columns of another type. Bounds are rounded outwards, so that they stay bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.base.float_bounds import LARGEST_EXACT, Side, side_of, to_float

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
        fits = _is_empty(column) or (is_number(kind) and is_number(column.type))
        columns.append(fitted(column, pa.field(name, kind)) if fits else column)
    return pa.table(columns, names=table.column_names)


def fitted(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    """Returns a column in the type of a field. A bound is rounded outwards. A number that does not fit is null.

    Raises pa.ArrowInvalid or pa.ArrowNotImplementedError if values that are no numbers have another type.
    """
    kind, side = field.type, side_of(field.name)
    if column.type == kind:
        return column
    if column.null_count == len(column):
        return pa.nulls(len(column), kind)
    if pa.types.is_floating(kind) and is_number(column.type):
        return pa.array(float_column(column, side), kind, mask=np.asarray(column.is_null()))
    if pa.types.is_integer(kind) and pa.types.is_floating(column.type):
        column = pc.round(column, round_mode={-1: "down", 0: "half_to_even", 1: "up"}[side])
        column = pc.if_else(pc.and_(pc.greater_equal(column, -(2.0**63)), pc.less(column, 2.0**63)), column, None)
    return pc.cast(column, kind)


def rounded_by_pandas(column: pa.ChunkedArray) -> bool:
    """Returns whether pandas would round integers of a column: large integers beside nulls become float64."""
    is_whole = pa.types.is_integer(column.type) and column.null_count
    return bool(is_whole and (np.abs(float_column(column, 0)) >= LARGEST_EXACT).any())
