"""Typed columns (Parquet, Arrow IPC) as the stream declares them.

A whole column that cannot be widened to its declared type is an error of the file, as a missing one
is. Single values that do not fit (an uint64 above the greatest int64) are records refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs.csv_codec import check_columns
from edge.codecs.event_time import cast_or_null, decoded
from edge.codecs.schema import RecordSchema
from edge.records import Decoded, Reason, Rejections
from edgewater.errors import InvalidRecord
from edgewater.streams import type_name
from edgewater.synopses.base import BoolArray


def needed_columns(schema: RecordSchema) -> list[str]:
    """The columns to read, the time among them."""
    return list(dict.fromkeys([*schema.columns, schema.time.column]))


def check_schema(given: pa.Schema, schema: RecordSchema, where: str) -> None:
    """Raises InvalidRecord: a declared column is missing, twice there, or of a type that does not widen."""
    check_columns(needed_columns(schema), list(given.names), where)
    for name, declared in schema.columns.items():
        actual = _decoded_type(given.field(name).type)
        if not _widens(actual, declared):
            raise InvalidRecord(f"{where}: column {name}", type_name(actual), f"{type_name(declared)}, as declared")
    time = schema.time
    actual = _decoded_type(given.field(time.column).type)
    numeric = pa.types.is_integer(actual) or pa.types.is_floating(actual)
    if pa.types.is_timestamp(actual) or pa.types.is_date(actual):
        return
    if not (is_text(actual) if time.unit == "iso8601" else numeric):
        accepted = "text or timestamps" if time.unit == "iso8601" else "numbers or timestamps"
        raise InvalidRecord(f"{where}: column {time.column}", str(actual), f"{accepted} for time.unit {time.unit}")


def convert(batch: pa.RecordBatch, schema: RecordSchema, arrival_ms: int) -> Decoded:
    """The records of a batch whose schema has passed `check_schema`."""
    rejections = Rejections()
    keep = np.ones(batch.num_rows, dtype=np.bool_)
    columns: dict[str, pa.Array] = {}
    for name in needed_columns(schema):
        given = batch.column(name)
        if pa.types.is_dictionary(given.type):
            given = given.dictionary_decode()
        if is_text(given.type) and not _is_sound(given):
            bad = _broken_text(given) & keep
            keep &= ~bad
            rejections.add(Reason.WRONG_TYPE, name, f"{name}: text that is not UTF-8", int(bad.sum()))
            given = pc.if_else(pa.array(bad), pa.scalar(None, given.type), given)
        declared = schema.columns.get(name, pa.string() if is_text(given.type) else given.type)
        columns[name] = _widen(given, declared)
        lost = columns[name].null_count - given.null_count
        if lost:
            bad = pc.and_(columns[name].is_null(), given.is_valid()).to_numpy(zero_copy_only=False) & keep
            keep &= ~bad
            if bad.any():
                example = given[int(np.argmax(bad))]
                message = f"{name}: does not fit into {type_name(declared)}"
                rejections.add(Reason.WRONG_TYPE, f"{name} = {example}", message, int(bad.sum()))
    table = pa.table(columns)
    if not keep.all():
        table = table.filter(pa.array(keep))
    return decoded(table, schema, arrival_ms, rejections)


def _is_sound(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _broken_text(column: pa.Array) -> BoolArray:
    """Which texts are not UTF-8. Value by value: a file that has any is rare."""

    def broken(value: bytes | None) -> bool:
        try:
            return value is not None and value.decode() is None
        except UnicodeDecodeError:
            return True

    wide = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
    return np.array([broken(value) for value in column.cast(wide).to_pylist()], np.bool_)


def _decoded_type(given: pa.DataType) -> pa.DataType:
    return given.value_type if pa.types.is_dictionary(given) else given


def is_text(given: pa.DataType) -> bool:
    return bool(pa.types.is_string(given) or pa.types.is_large_string(given) or given == pa.string_view())


def _widens(actual: pa.DataType, declared: pa.DataType) -> bool:
    types = pa.types
    if types.is_string(declared):
        return is_text(actual)
    if types.is_boolean(declared):
        return bool(types.is_boolean(actual))
    if types.is_integer(declared):
        return bool(types.is_integer(actual))
    return bool(types.is_integer(actual) or types.is_floating(actual) or types.is_decimal(actual))


def _widen(given: pa.Array, declared: pa.DataType) -> pa.Array:
    if given.type == declared:
        return given
    if pa.types.is_floating(declared):
        return given.cast(declared, safe=False)  # an integer above 2^53 is rounded, as everywhere
    return cast_or_null(given, declared)


def concat(batches: Sequence[Decoded], schema: RecordSchema) -> Decoded:
    """Several decoded blocks as one."""
    rejections = Rejections(r for part in batches for r in part.rejected)
    if len(batches) == 1:
        return Decoded(batches[0].batch, rejections.as_tuple())
    table = pa.Table.from_batches([part.batch for part in batches], schema=schema.output).combine_chunks()
    whole = table.to_batches()[0] if table.num_rows else schema.empty()
    return Decoded(whole, rejections.as_tuple())
