"""Lookups of a query: columns that a table of the center adds to the records, by the value of a key column.

The query of an edge has the rows of its tables. So an edge needs no other state, and a query keeps the rows that it was
registered with: a new version of a table makes new versions of its queries. The rows travel apart from the queries, and
only to edges that lack them. Center and edge name them by their digest, so a table that a restored center has again
under the same version cannot be mistaken.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.base.errors import InvalidQuery, did_you_mean
from edgewater.base.quantities import require_keys
from edgewater.base.streams import COLUMN_TYPES, type_name
from edgewater.model import arithmetic
from edgewater.model.measure import NAME, NAME_ACCEPTED
from edgewater.synopses import IntArray
from edgewater.synopses.hashing import WordArray, hash_values

MAX_LOOKUPS = 8  # limit: rows that travel with a query
MAX_TABLE_BYTES = 1 << 20
"""The largest size of a table's body, and of its rows in Arrow."""
MAX_TABLE_ROWS = 10_000  # limit: rows that travel with a query
MAX_TABLE_COLUMNS = 16  # limit: rows that travel with a query
MAX_KNOWN_TABLES = 1_024  # limit: tables that an edge states at the begin of a session
KEY_TYPES = ("string", "int64", "bool")
"""A float64 is no key, because two floats that look the same may differ."""
_WIDER = {"int64": ("string", "float64"), "bool": ("string",)}
_KEYS = {"key": True, "columns": False, "key_type": False, "version": False, "rows": False}


class LookupTable:
    """The rows of a lookup, by key.

    Args:
        keys: the key of each row, text, int64 or bool, without nulls and without duplicates.
        columns: the columns to add, each with one value per row.

    Raises:
        ValueError: a key is null or occurs twice. The message shows the key.
    """

    def __init__(self, keys: pa.Array, columns: Mapping[str, pa.Array]) -> None:
        if keys.null_count:
            row = pc.index(keys.is_null(), pa.scalar(True)).as_py() + 1
            raise ValueError(f"row {row} has no key; expected a key in each row")
        self._keys, self._columns = keys, dict(columns)
        seed = 0
        while True:
            hashes = hash_values(keys, seed)
            order = np.argsort(hashes, kind="stable")
            same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
            if not len(same):
                break
            first, second = sorted(order[same[0] : same[0] + 2].tolist())
            if keys[first] == keys[second]:
                raise ValueError(f"rows {first + 1} and {second + 1} have the key {keys[first].as_py()!r:.100}")
            seed += 1  # two keys have the same hash
        self._seed, self._order = seed, order
        self._hashes: WordArray = hashes[order]

    def __len__(self) -> int:
        return len(self._keys)

    def rows_of(self, values: pa.Array) -> pa.Array:
        """Returns the row of each value, int64; null for a null value or a value that is no key. Looks up each distinct
        value once.
        """
        distinct = values.dictionary_encode()
        rows = self._rows(distinct.dictionary)
        return pa.array(rows, mask=rows < 0).take(distinct.indices)

    def _rows(self, values: pa.Array) -> IntArray:
        """Returns the row of each value; -1 for a value that is no key."""
        if not len(self) or not len(values):
            return np.full(len(values), -1)
        hashes = hash_values(values, self._seed)
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self) - 1)
        rows: IntArray = self._order[at]
        equal = pc.equal(self._keys.take(pa.array(rows)), values).to_numpy(zero_copy_only=False)
        return np.where(equal, rows, -1)

    def take(self, rows: pa.Array) -> dict[str, pa.Array]:
        """Returns the added columns for the rows that `rows_of` returned."""
        return {name: column.take(rows) for name, column in self._columns.items()}


@dataclass(frozen=True, slots=True)
class TableLookup:
    """A lookup as a query states it: `lookup: {halls: {key: device, columns: [hall]}}`.

    Attributes:
        table: name of the table.
        key: the column with the key: of the stream, or of an earlier lookup.
        table_key: the key column of the table.
        columns: the added columns and their types. An empty type is unknown. None: all columns of the table.
        key_type: the type of the key column of the table; empty: unknown.
        version: the version of the table; 0: the newest.
        rows: the rows as `encode_rows` returns them, in the query that an edge gets; empty elsewhere.
    """

    table: str
    key: str
    table_key: str
    columns: tuple[tuple[str, str], ...] | None
    key_type: str = ""
    version: int = 0
    rows: str = ""

    @classmethod
    def from_mapping(cls, table: object, value: object) -> TableLookup:
        """Reads an entry of `lookup`. Raises InvalidQuery."""
        if not isinstance(table, str) or not NAME.fullmatch(table):
            raise InvalidQuery("lookup", table, NAME_ACCEPTED)
        at = f"lookup.{table}"
        given: dict[str, Any] = require_keys(value, at, _KEYS, InvalidQuery)
        key, version, rows = given["key"], given.get("version", 0), given.get("rows", "")
        pairs = list(key.items()) if isinstance(key, Mapping) else [(key, key)]
        if len(pairs) != 1 or not all(isinstance(name, str) and name for name in pairs[0]):
            raise InvalidQuery(f"{at}.key", key, "a column, or {column of the stream: column of the table}")
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 1 << 31:
            raise InvalidQuery(f"{at}.version", version, "the number of the table's newest version, or no version")
        if not isinstance(rows, str):
            raise InvalidQuery(f"{at}.rows", "…", "no rows: the center adds them")
        key_type = given.get("key_type", "")
        if key_type not in ("", *KEY_TYPES):
            raise InvalidQuery(f"{at}.key_type", key_type, f"one of {', '.join(KEY_TYPES)}, or no type")
        return cls(table, *pairs[0], _columns(given.get("columns"), f"{at}.columns"), key_type, version, rows)

    def to_mapping(self) -> dict[str, object]:
        """Returns the canonical entry."""
        key: object = self.key if self.key == self.table_key else {self.key: self.table_key}
        columns: object = None if self.columns is None else dict(self.columns)
        if self.columns is not None and not all(kind for _, kind in self.columns):
            columns = [name for name, _ in self.columns]
        rest = {"columns": columns, "key_type": self.key_type, "version": self.version, "rows": self.rows}
        return {"key": key} | {name: value for name, value in rest.items() if value}

    def resolved(self, key: str, types: Mapping[str, str], version: int) -> TableLookup:
        """Returns the lookup with a version of its table.

        Args:
            key: the key column of the table.
            types: all columns of the table and their types.

        Raises:
            InvalidQuery: the table has another key, lacks a column, or has it with another type.
        """
        at, number = f"lookup.{self.table}", f"version {version} of table {self.table}"
        if self.table_key != key:
            reason = f"{number} has the key {key}"
            raise InvalidQuery(f"{at}.key", self.table_key, f"{key}, or {{{self.key}: {key}}}", reason)
        if self.version not in (0, version):
            raise InvalidQuery(f"{at}.version", self.version, f"no version, or {version}, the newest version")
        types, key_type = {name: kind for name, kind in types.items() if name != key}, types[key]
        for name, kind in self.columns or ():
            if name not in types:
                reason = f"{number} has no such column{did_you_mean(name, types)}"
                raise InvalidQuery(f"{at}.columns", name, f"some of the columns {', '.join(types)}", reason)
            if kind and not _fits(types[name], kind):
                raise InvalidQuery(f"{at}.columns.{name}", kind, f"{types[name]}, its type in {number}")
        wanted = types.items() if self.columns is None else self.columns
        columns = tuple((name, kind or types[name]) for name, kind in wanted)
        return replace(self, columns=columns, key_type=key_type, version=version)

    def bind(self, columns: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        """Checks the lookup against a stream's columns. Returns the added columns and their types.

        Raises:
            InvalidQuery: the key is unknown or has a type that is no key's, a column is in the stream already, or the
                version of the table is not known yet.
        """
        at = f"lookup.{self.table}"
        kind = type_name(columns[self.key]) if self.key in columns else ""
        if kind not in KEY_TYPES:
            fitting = ", ".join(name for name, each in columns.items() if type_name(each) in KEY_TYPES)
            reason = f"it is {kind}" if kind else f"unknown column{did_you_mean(self.key, columns)}"
            raise InvalidQuery(f"{at}.key", self.key, f"one of the columns {fitting}", reason)
        if self.key_type and not _fits(self.key_type, kind):
            accepted = f"a column of the type {self.key_type}, as {self.table_key} of table {self.table}"
            raise InvalidQuery(f"{at}.key", self.key, accepted, f"it is {kind}")
        if not self.version or self.columns is None:
            reason = "the rows are at the center, which checks the query: edgewater query add --dry-run"
            raise InvalidQuery(at, None, "a table of a center", reason)
        for name, _ in self.columns:
            if name in columns:
                raise InvalidQuery(f"{at}.columns", name, "columns that the stream lacks", "it is a column already")
        return {name: COLUMN_TYPES[kind] for name, kind in self.columns}

    def require_rows(self) -> None:
        """Raises InvalidQuery if the query does not have the rows, or they are damaged."""
        if not self.rows:
            raise InvalidQuery(f"lookup.{self.table}.rows", None, "the rows of the table, which a center adds")
        try:
            _decoded(self.rows)
        except ValueError as exc:
            raise InvalidQuery(f"lookup.{self.table}.rows", "…", "the rows of the table", str(exc)) from exc

    def joined(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the records with the added columns; null where no row has the key."""
        keys = batch.column(self.key)
        table = _loaded(self, keys.type)
        for name, column in table.take(table.rows_of(keys)).items():
            batch = batch.append_column(name, column)
        return batch


def _fits(given: str, wanted: str) -> bool:
    """Whether each value of a table's column has a value of another type that is written in the same way."""
    return wanted in (given, *_WIDER.get(given, ()))


def _columns(value: object, at: str) -> tuple[tuple[str, str], ...] | None:
    if value is None:
        return None
    given = value if isinstance(value, Mapping) else dict.fromkeys(value, "") if _are_names(value) else {}
    if not given or not all(isinstance(name, str) and kind in ("", *COLUMN_TYPES) for name, kind in given.items()):
        raise InvalidQuery(at, value, "a list of columns of the table, or a mapping of columns to their types")
    return tuple(given.items())


def _are_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def read_lookups(value: object) -> tuple[TableLookup, ...]:
    """Reads the key `lookup` of a query. Raises InvalidQuery."""
    if value is None:
        return ()
    accepted = "a mapping of tables, such as {halls: {key: device, columns: [hall]}}"
    if not isinstance(value, Mapping) or not value:
        raise InvalidQuery("lookup", value, accepted)
    if len(value) > MAX_LOOKUPS:
        raise InvalidQuery("lookup", f"{len(value)} tables", f"at most {MAX_LOOKUPS} tables")
    return tuple(TableLookup.from_mapping(table, each) for table, each in value.items())


def encode_rows(table: pa.Table) -> str:
    """Returns the rows of a table, compressed, as a text for a query's mapping."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return base64.b64encode(zlib.compress(sink.getvalue())).decode()


def decode_rows(rows: str) -> pa.Table:
    """Returns the table that `encode_rows` has encoded. Raises ValueError if the text is damaged."""
    try:
        plain = zlib.decompressobj().decompress(base64.b64decode(rows), 2 * MAX_TABLE_BYTES)
        with pa.ipc.open_stream(plain) as reader:
            return reader.read_all()
    except (ValueError, zlib.error, OSError) as exc:  # Arrow's exceptions are among them
        raise ValueError(f"they cannot be read: {exc}") from exc


def pack_rows(rows: str) -> bytes:
    """Returns rows for the link: as `encode_rows` has compressed them, without the encoding as text."""
    return base64.b64decode(rows)


def unpack_rows(packed: bytes) -> str:
    """Returns the rows that `pack_rows` has packed."""
    return base64.b64encode(packed).decode()


def digest_of(packed: bytes) -> int:
    """Returns the number that names packed rows, of 64 bits."""
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


_decoded = lru_cache(maxsize=64)(decode_rows)


@lru_cache(maxsize=64)
def _loaded(lookup: TableLookup, key_type: pa.DataType) -> LookupTable:
    table = _decoded(lookup.rows)
    assert lookup.columns is not None, "an edge gets resolved lookups"
    columns = {name: _as(table.column(name), COLUMN_TYPES[kind]) for name, kind in lookup.columns}
    return LookupTable(_as(table.column(lookup.table_key), key_type), columns)


def _as(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    array = column.combine_chunks()
    return array if array.type == kind else arithmetic.cast(array, kind)
