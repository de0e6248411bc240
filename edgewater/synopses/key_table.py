"""Group keys as dense codes: maps rows of key columns to int64 group numbers without a loop over rows.

Arrow's dictionary encoding reduces each batch to its distinct key rows. Only distinct rows are looked up: column by
column in the table's dictionaries, then as pairs of ids in a sorted array. Look-ups compare keys, never only their
hashes. Memory is the keys themselves plus 12 bytes per group and column, and 16 for integers that are looked up few at
a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.synopses.base import IntArray

FEW = 16  # measured: bench.synopses
"""A column uses a sorted array if the looked-up values are fewer than one in this many of the table's values. So few
rows are compared in Python, which is faster than a call of Arrow."""


class _Column:
    """The distinct values of one key column, numbered in order of first appearance."""

    def __init__(self, data_type: pa.DataType) -> None:
        self.values: pa.Array = _empty_array(data_type)
        self._sorted: tuple[IntArray, IntArray] | None = None

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes) + sum(a.nbytes for a in self._sorted or ())

    def encode(self, values: pa.Array) -> IntArray:
        """Returns the ids of distinct values; adds new ones."""
        if not len(self.values):
            self.values = pa.concat_arrays([self.values, values])  # a copy, as a part of an array would keep all of it
            return np.arange(len(values))
        numbers = self._found(values)
        missing = numbers < 0
        fresh = values.filter(pa.array(missing)) if missing.any() else None
        if fresh is not None:
            first = len(self.values)
            self.values = pa.concat_arrays([self.values, fresh])
            numbers[missing] = np.arange(first, first + len(fresh))
            self._sorted = self._with(self._sorted, np.asarray(fresh), first) if self._sorted else None
        return numbers

    def _found(self, values: pa.Array) -> IntArray:
        """Returns the ids of values, -1 for new ones.

        Arrow indexes the whole column at each call. Few integers are looked up in a sorted array instead.
        """
        nulls = values.null_count or self.values.null_count
        if nulls or not pa.types.is_int64(values.type) or FEW * len(values) > len(self.values):
            self._sorted = None if nulls else self._sorted
            found = pc.index_in(values, value_set=self.values)
            return np.asarray(found.fill_null(-1) if found.null_count else found).astype(np.int64)
        if self._sorted is None:
            held = np.asarray(self.values)
            order = np.argsort(held, kind="stable")
            self._sorted = held[order], order
        (held, order), wanted = self._sorted, np.asarray(values)
        at = np.minimum(np.searchsorted(held, wanted), len(held) - 1)
        return np.where(held[at] == wanted, order[at], -1)

    @staticmethod
    def _with(index: tuple[IntArray, IntArray], fresh: IntArray, first: int) -> tuple[IntArray, IntArray]:
        held, order = index
        by_value = np.argsort(fresh)
        at = np.searchsorted(held, fresh[by_value])
        return np.insert(held, at, fresh[by_value]), np.insert(order, at, first + by_value)


@cache
def _empty_array(data_type: pa.DataType) -> pa.Array:
    """Returns an empty array.

    Arrays are immutable, so all callers share one: making one takes longer than reading a partial.

    It is not made from a list, for which Arrow imports pandas. That would cost processes such as the gateway 0.4 s.
    """
    return pa.nulls(0, data_type)


class _Pairs:
    """Numbers for pairs (left id, right id), as a sorted array of ``left << 31 | right``."""

    def __init__(self) -> None:
        self._sorted = np.zeros(0, np.int64)
        self._numbers = np.zeros(0, np.int64)
        self.count = 0

    def encode(self, left: IntArray, right: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the pairs' numbers, and the position in the input of each new pair's first occurrence."""
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
        # Number in order of appearance, so that rows can be appended to the table in input order.
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


@dataclass(slots=True)
class EncodedKeys:
    """Rows of key columns, encoded by their distinct rows.

    It does not depend on a table, so several tables may look it up.

    Attributes:
        inverse: the position in `distinct` of each row's key, int64, shape (rows,).
        distinct: the key columns of the distinct rows, in order of first appearance.
    """

    inverse: IntArray
    distinct: list[pa.Array]
    _counts: IntArray | None = None

    @classmethod
    def of(cls, columns: Sequence[pa.Array], rows: int) -> Self:
        """Encodes `rows` rows.

        As in SQL's GROUP BY, all nulls are one key, all NaNs are one key, and -0.0 is 0.0.

        Args:
            columns: one Arrow array per key column, each of `rows` values; none: all rows have the same key. A
                dictionary-encoded array may have nulls and equal values in its dictionary, and no null indices.
        """
        return cls(*_distinct(columns)) if columns else cls(np.zeros(rows, np.int64), [])

    def split(self, begins: IntArray) -> list[Self]:
        """Returns the keys of runs of rows, each encoded like the rows of one call of `of`.

        Args:
            begins: the first row of each run, int64, strictly ascending from 0.
        """
        lengths = np.diff(begins, append=len(self.inverse))
        if not self.distinct:
            return [type(self)(np.zeros(length, np.int64), []) for length in lengths.tolist()]
        runs = np.repeat(np.arange(len(begins)), lengths)
        inverse, first = _dense(runs * len(self.distinct[0]) + self.inverse)
        columns = [column.take(pa.array(self.inverse[first])) for column in self.distinct]
        counts, firsts = np.bincount(inverse), inverse[begins]  # the first row of a run has its first key
        inverse = inverse - np.repeat(firsts, lengths)
        rows, keys = [*begins.tolist(), len(inverse)], [*firsts.tolist(), len(first)]
        return [
            type(self)(inverse[b:e], [column.slice(k, n - k) for column in columns], counts[k:n])
            for b, e, k, n in zip(rows, rows[1:], keys, keys[1:], strict=False)
        ]

    @property
    def counts(self) -> IntArray:
        """The number of rows of each distinct key, int64."""
        if self._counts is None:
            self._counts = np.bincount(self.inverse)
        return self._counts

    @property
    def nbytes(self) -> int:
        return int(self.inverse.nbytes + sum(column.nbytes for column in self.distinct))


class KeyTable:
    """Distinct rows of key columns, numbered 0, 1, … in order of first appearance.

    Without key columns there is one group, code 0, after the first row was encoded.
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
        columns: int = sum(c.nbytes for c in self._columns)
        columns += sum(c.nbytes for c in self._loaded or [])
        ids = 0 if self._loaded is not None else 4 * self._length * len(self._ids)  # int32, one per group and column
        return columns + ids + sum(p.nbytes for p in self._pairs)

    def encode(self, columns: Sequence[pa.Array], rows: int) -> IntArray:
        """Returns the group codes of `rows` rows; new keys get new codes.

        Args:
            columns: as in `EncodedKeys.of`, in the table's types.
        """
        keys = EncodedKeys.of(columns, rows)
        return self.look_up(keys)[keys.inverse]

    def look_up(self, keys: EncodedKeys) -> IntArray:
        """Returns the group code of each distinct key; new keys get new codes."""
        if not self.types:
            groups = min(len(keys.inverse), 1)
            self._length = max(self._length, groups)
            return np.zeros(groups, np.int64)
        self._index()
        return self._look_up(keys.distinct)

    @classmethod
    def of_distinct(
        cls, types: tuple[pa.DataType, ...], columns: list[pa.Array], rows: int, *, checked: bool = False
    ) -> Self | None:
        """Makes a table of distinct rows, numbered in their order. Returns None if two rows are equal.

        The first `encode` builds the index. A table that is only read or merged into another table never needs it.

        Args:
            checked: the rows were checked before, so that no two are equal.
        """
        if not checked and rows > 1 and not _are_distinct(columns, rows):
            return None
        result = cls(types)
        result._length = rows
        if columns:
            result._loaded = [_canonical(column) for column in columns]
        return result

    def _index(self) -> None:
        if self._loaded is not None:
            columns, self._loaded, self._length = self._loaded, None, 0
            self._look_up(columns)

    def _look_up(self, keys: list[pa.Array]) -> IntArray:
        """Returns the codes of distinct key rows; adds new ones."""
        ids = []
        for column, key in zip(self._columns, keys, strict=True):
            if len(keys) == 1:
                ids.append(column.encode(key))
                continue
            distinct = key.dictionary_encode(null_encoding="encode")
            ids.append(column.encode(distinct.dictionary)[_codes(distinct)])
        numbers = ids[0]
        fresh = np.flatnonzero(numbers >= self._length)
        for pairs, right in zip(self._pairs, ids[1:], strict=True):
            numbers, fresh = pairs.encode(numbers, right)
        if len(fresh):
            for chunks, new in zip(self._ids, ids, strict=True):
                chunks.append(new[fresh].astype(np.int32))
            self._length += len(fresh)
        return numbers

    def rows(self, codes: IntArray | None = None) -> list[pa.Array]:
        """Returns the key columns of these groups, in the order of `codes`; None: of all groups."""
        if self._loaded is not None:
            return self._loaded if codes is None else [column.take(pa.array(codes)) for column in self._loaded]
        if len(self._columns) == 1:  # its values have the same numbers as the groups
            values = self._columns[0].values
            return [values if codes is None else values.take(pa.array(codes))]
        result = []
        for column, chunks in zip(self._columns, self._ids, strict=True):
            if len(chunks) > 1:
                chunks[:] = [np.concatenate(chunks)]
            ids = chunks[0] if chunks else np.zeros(0, np.int32)
            result.append(column.values.take(pa.array(ids if codes is None else ids[codes])))
        return result


def _canonical(column: pa.Array) -> pa.Array:
    """Returns the column with one zero and one NaN. Arrow treats NaN of different bits as different keys."""
    if not pa.types.is_floating(column.type):
        return column
    odd = pc.is_nan(column)
    if pc.any(odd).as_py():
        column = pc.if_else(odd, pa.scalar(float("nan")), column)
    return pc.add(column, 0.0)  # -0.0 + 0.0 is 0.0


def _encoded(column: pa.Array) -> pa.DictionaryArray:
    """Returns a column with each value once in its dictionary, in order of appearance; null is a value."""
    if isinstance(column, pa.DictionaryArray):
        values = _encoded(column.dictionary)
        return pa.DictionaryArray.from_arrays(values.indices.take(column.indices), values.dictionary)
    return _canonical(column).dictionary_encode(null_encoding="encode")


def _distinct(columns: Sequence[pa.Array]) -> tuple[IntArray, list[pa.Array]]:
    """Returns the number of each row's key, and the key columns of the distinct keys, in order of appearance."""
    encoded = [_encoded(column) for column in columns]
    combined = _codes(encoded[0])
    if len(encoded) == 1:
        return combined, [encoded[0].dictionary]
    for column in encoded[1:]:
        combined = combined * max(len(column.dictionary), 1) + _codes(column)
        if column is not encoded[-1]:
            combined = _dense(combined)[0]
    inverse, first = _dense(combined)
    return inverse, [e.dictionary.take(e.indices.take(pa.array(first))) for e in encoded]


def _are_distinct(columns: Sequence[pa.Array], rows: int) -> bool:
    if not columns:
        return False
    if rows <= FEW and not any(pa.types.is_floating(column.type) for column in columns):
        return len(set(zip(*(column.to_pylist() for column in columns), strict=True))) == rows
    return len(_distinct(columns)[1][0]) == rows


def count_distinct(columns: Sequence[pa.Array]) -> int:
    """Returns the number of distinct rows of key columns, at least one column."""
    return len(_distinct(columns)[1][0])


def _codes(encoded: pa.DictionaryArray) -> IntArray:
    return np.asarray(encoded.indices, np.int64)


def _dense(values: IntArray) -> tuple[IntArray, npt.NDArray[np.int64]]:
    """Returns a dense number per value, and the position of each number's first occurrence."""
    encoded = pa.array(values).dictionary_encode()
    inverse = _codes(encoded)
    first = np.empty(len(encoded.dictionary), np.int64)
    first[inverse[::-1]] = np.arange(len(values) - 1, -1, -1)
    return inverse, first
