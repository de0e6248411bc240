"""Selects and sorts the rows of an answer (`having`, `order`). Pure.

Conditions read the columns of the answer's table: `m`, `m_lower`, `m_upper` and the columns of groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.answers.cells import interval_columns
from edgewater.base.errors import InvalidQuery, InvalidRequest, did_you_mean
from edgewater.model.computed import parsed
from edgewater.model.expressions import bind_condition
from edgewater.synopses import BoolArray, Estimates, IntArray


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Which rows of an answer a request reads, and in which order.

    Attributes:
        having: a condition over the columns of the answer's table; empty: all rows.
        order: columns; a minus before a column sorts it in descending order. Empty: by group.
        limit: the largest number of rows; None: all.
    """

    having: str = ""
    order: tuple[str, ...] = ()
    limit: int | None = None

    @property
    def is_needed(self) -> bool:
        return bool(self.having or self.order) or self.limit is not None

    def rows(self, groups: Mapping[str, pa.Array], intervals: Mapping[str, Estimates], length: int) -> IntArray:
        """Returns the selected rows in their order.

        Raises:
            InvalidRequest: the condition or the order names a column that the answer does not have, or does not fit
                its type.
        """
        columns = {n: c.cast(pa.float64()) if pa.types.is_null(c.type) else c for n, c in groups.items()}
        for name, estimates in intervals.items():
            for column, values in interval_columns(name, estimates, wide=True).items():
                columns.setdefault(column, values)
        rows = np.arange(length)
        if self.having:
            batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns)) if columns else None
            rows = np.flatnonzero(self._matching(batch, {n: c.type for n, c in columns.items()}, length))
        if self.order and len(rows):
            rows = rows[self._sorted(columns, rows)]
        return rows if self.limit is None else rows[: self.limit]

    def _matching(self, batch: pa.RecordBatch | None, types: Mapping[str, pa.DataType], length: int) -> BoolArray:
        try:
            condition = bind_condition(parsed(self.having, "having"), types, "having")
        except InvalidQuery as exc:
            raise InvalidRequest("having", self.having, exc.accepted, exc.reason) from exc
        if batch is None:
            return np.ones(length, bool)
        matching: BoolArray = pc.fill_null(condition.array(batch), False).to_numpy(zero_copy_only=False)
        return matching

    def _sorted(self, columns: Mapping[str, pa.Array], rows: IntArray) -> IntArray:
        keys = []
        for key in self.order:
            name = key.removeprefix("-")
            if name not in columns:
                reason = f"unknown column {name}{did_you_mean(name, columns)}"
                raise InvalidRequest("order", key, f"one of {', '.join(columns)}; -column: descending", reason)
            keys.append((name, "descending" if key.startswith("-") else "ascending"))
        table = pa.table({name: columns[name].take(pa.array(rows)) for name, _ in keys})
        positions: IntArray = pc.sort_indices(table, sort_keys=keys).to_numpy()
        return positions


ALL_ROWS = RowSelection()
