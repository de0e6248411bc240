"""Several expressions as one argument: rows of numbers, for functions of a sample (`synopses.sample_functions`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from sqlglot import exp

from edgewater.arithmetic import to_float
from edgewater.errors import InvalidQuery
from edgewater.expressions import NUMERIC, Bound, bind
from edgewater.record_functions import Failures
from edgewater.streams import type_name


def as_row(columns: Sequence[exp.Expression]) -> exp.Expression:
    """One expression for several: `(x, y)`. A lone literal keeps parentheses, or it would be read as a parameter."""
    if len(columns) > 1:
        return exp.Tuple(expressions=list(columns))
    (only,) = columns
    return exp.Paren(this=only) if isinstance(only.this if isinstance(only, exp.Neg) else only, exp.Literal) else only


def columns_of(row: exp.Expression) -> list[exp.Expression]:
    """The expressions of a row's columns."""
    if isinstance(row, exp.Tuple):
        return list(row.expressions)
    return [row.unnest()]


def bind_row(
    row: exp.Expression, columns: Mapping[str, pa.DataType], field: str, failures: Failures | None = None
) -> Bound:
    """A row's columns as one array of float64 lists of fixed size.

    A row in which a number is null, or no finite number, is null.

    Raises:
        InvalidQuery: an unknown column, or an expression that is no number.
    """
    parts = [bind(column, columns, field, failures) for column in columns_of(row)]
    for part, column in zip(parts, columns_of(row), strict=True):
        if type_name(part.type) not in NUMERIC:
            raise InvalidQuery(field, column.sql(), "a number", f"its type is {type_name(part.type)}")

    def evaluate(batch: pa.RecordBatch) -> pa.Array:
        arrays = [to_float(part.array(batch)) for part in parts]
        rows = np.stack([a.to_numpy(zero_copy_only=False) for a in arrays], axis=1)  # a null is NaN
        absent = ~np.isfinite(rows).all(axis=1)
        mask = pa.array(absent) if absent.any() else None
        return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), len(parts), mask=mask)

    return Bound(pa.list_(pa.float64(), len(parts)), evaluate)
