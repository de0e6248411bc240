"""Group keys as dense codes: rows of key columns in, int64 group numbers out, no loop over rows.

Each batch is reduced to its distinct key rows by Arrow's dictionary encoding. Only those are looked
up: column by column in the table's dictionaries, then as pairs of ids in a sorted array. Lookups are
exact (no hash of a key ever stands for the key), and memory is the keys themselves plus 12 bytes a
group and column.
"""

from __future__ import annotations

from functools import cache
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.synopses.base import IntArray


class _Column:
    """The distinct values of one key column, numbered in order of first appearance."""

    def __init__(self, data_type: pa.DataType) -> None:
        self.values: pa.Array = _nothing(data_type)

    def encode(self, values: pa.Array) -> IntArray:
        """Ids of distinct values, new ones added."""
        ids = pc.index_in(values, value_set=self.values)
        if ids.null_count:
            fresh = values.filter(ids.is_null())
            first = len(self.values)
            self.values = pa.concat_arrays([self.values, fresh])
            numbers: IntArray = np.array(ids.fill_null(-1), np.int64)
            numbers[numbers < 0] = np.arange(first, first + len(fresh))
            return numbers
        return np.asarray(ids, np.int64)


@cache
def _nothing(data_type: pa.DataType) -> pa.Array:
    """Arrays are immutable, and making one from a list costs more than reading a partial's arrays."""
    return pa.array([], data_type)


class _Pairs:
    """Numbers for pairs (left id, right id), as a sorted array of ``left << 31 | right``."""

    def __init__(self) -> None:
        self._sorted = np.zeros(0, np.int64)
        self._numbers = np.zeros(0, np.int64)
        self.count = 0

    def encode(self, left: IntArray, right: IntArray) -> tuple[IntArray, IntArray]:
        """The pairs' numbers, and the positions in the input of those that are new, one each."""
        wanted = left << 31 | right
        at = np.searchsorted(self._sorted, wanted)
        numbers = np.full(len(wanted), -1, np.int64)
        inside = at < len(self._sorted)
        hit = np.zeros(len(wanted), bool)
        hit[inside] = self._sorted[at[inside]] == wanted[inside]
        numbers[hit] = self._numbers[at[hit]]
        missing = np.flatnonzero(~hit)
        if not len(missing):
            return numbers, missing
        fresh, first, inverse = np.unique(wanted[missing], return_index=True, return_inverse=True)
        # Number in order of appearance, so that the table's rows can be appended in input order.
        rank = np.empty(len(fresh), np.int64)
        rank[np.argsort(first)] = np.arange(len(fresh))
        numbers[missing] = self.count + rank[inverse]
        where = np.searchsorted(self._sorted, fresh)
        self._sorted = np.insert(self._sorted, where, fresh)
        self._numbers = np.insert(self._numbers, where, self.count + rank)
        self.count += len(fresh)
        return numbers, missing[np.sort(first)]

    @property
    def nbytes(self) -> int:
        return self._sorted.nbytes + self._numbers.nbytes


class KeyTable:
    """Distinct rows of key columns, numbered 0, 1, … in order of first appearance.

    With no key columns there is one group, code 0, from the first row on.
    """

    def __init__(self, types: tuple[pa.DataType, ...]) -> None:
        self.types = types
        self._columns = [_Column(t) for t in types]
        self._pairs = [_Pairs() for _ in types[1:]]
        self._ids: list[list[IntArray]] = [[] for _ in types]
        self._length = 0
        self._loaded: list[pa.Array] | None = None

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        columns: int = sum(c.values.nbytes for c in self._columns)
        columns += sum(c.nbytes for c in self._loaded or [])
        ids = sum(part.nbytes for parts in self._ids for part in parts)
        return columns + ids + sum(p.nbytes for p in self._pairs)

    def encode(self, columns: list[pa.Array], rows: int) -> IntArray:
        """Group codes of `rows` rows; unseen keys get new codes.

        Args:
            columns: one Arrow array per key column, each of `rows` values, in the table's types. Nulls are
                one key, NaNs are one key, and -0.0 is 0.0, as in SQL's GROUP BY.
        """
        if not self.types:
            self._length = max(self._length, min(rows, 1))
            return np.zeros(rows, np.int64)
        self._index()
        inverse, parts = _distinct(columns)
        return self._lookup(parts)[inverse]

    @classmethod
    def of_distinct(cls, types: tuple[pa.DataType, ...], columns: list[pa.Array], rows: int) -> Self | None:
        """A table of rows that are distinct already, numbered as they come; None if two are equal.

        Looking them up is left to the first `encode`: a table that is only merged into another, or only
        read, never needs it.
        """
        if rows > 1 and (not columns or len(_distinct(columns)[1][0]) != rows):
            return None
        result = cls(types)
        result._length = rows
        if columns:
            result._loaded = [_one_zero(column) for column in columns]
        return result

    def _index(self) -> None:
        if self._loaded is not None:
            columns, self._loaded, self._length = self._loaded, None, 0
            self._lookup(columns)

    def _lookup(self, parts: list[pa.Array]) -> IntArray:
        """Codes of distinct key rows."""
        ids = []
        for column, part in zip(self._columns, parts, strict=True):
            distinct = part.dictionary_encode(null_encoding="encode")
            ids.append(column.encode(distinct.dictionary)[_codes(distinct)])
        numbers = ids[0]
        fresh = np.flatnonzero(numbers >= self._length)
        for pairs, right in zip(self._pairs, ids[1:], strict=True):
            numbers, fresh = pairs.encode(numbers, right)
        if len(fresh):
            for kept, part in zip(self._ids, ids, strict=True):
                kept.append(part[fresh].astype(np.int32))
            self._length += len(fresh)
        return numbers

    def rows(self, codes: IntArray | None = None) -> list[pa.Array]:
        """The key columns of these groups (all, if None), in the order of `codes`."""
        if self._loaded is not None:
            return self._loaded if codes is None else [column.take(pa.array(codes)) for column in self._loaded]
        result = []
        for column, parts in zip(self._columns, self._ids, strict=True):
            if len(parts) > 1:
                parts[:] = [np.concatenate(parts)]
            ids = parts[0] if parts else np.zeros(0, np.int32)
            result.append(column.values.take(pa.array(ids if codes is None else ids[codes])))
        return result


def _one_zero(column: pa.Array) -> pa.Array:
    return pc.add(column, 0.0) if pa.types.is_floating(column.type) else column  # -0.0 + 0.0 is 0.0


def _distinct(columns: list[pa.Array]) -> tuple[IntArray, list[pa.Array]]:
    """Per row the number of its key, and the key columns of the distinct keys, in order of appearance."""
    encoded = [_one_zero(c).dictionary_encode(null_encoding="encode") for c in columns]
    combined = _codes(encoded[0])
    if len(encoded) == 1:
        return combined, [encoded[0].dictionary]
    for column in encoded[1:]:
        combined = combined * max(len(column.dictionary), 1) + _codes(column)
        if column is not encoded[-1]:
            combined = _dense(combined)[0]
    inverse, first = _dense(combined)
    return inverse, [e.dictionary.take(e.indices.take(pa.array(first))) for e in encoded]


def _codes(encoded: pa.DictionaryArray) -> IntArray:
    return np.asarray(encoded.indices, np.int64)


def _dense(values: IntArray) -> tuple[IntArray, npt.NDArray[np.int64]]:
    """Dense numbers for values, and the position of each number's first occurrence."""
    encoded = pa.array(values).dictionary_encode()
    inverse = _codes(encoded)
    first = np.empty(len(encoded.dictionary), np.int64)
    first[inverse[::-1]] = np.arange(len(values) - 1, -1, -1)
    return inverse, first
