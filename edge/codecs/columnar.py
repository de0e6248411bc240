"""Converts typed columns (Parquet, Arrow IPC) to the types that the stream declares.

If a column is missing or its type cannot be widened to the declared type, the whole file is refused. If a single value
is out of range, such as a uint64 above the greatest int64, its record is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs.csv_codec import check_columns
from edge.codecs.event_time import cast_or_null, described, extract_event_times, reject
from edge.codecs.lenient import CONVERTED, lenient_parse, without_words
from edge.codecs.schema import RecordSchema
from edge.records import Decoded, RejectionReason, Rejections
from edgewater.base.errors import InvalidRecord
from edgewater.base.streams import type_name
from edgewater.synopses import BoolArray


def needed_columns(schema: RecordSchema) -> list[str]:
    """Returns the names of the columns to read, including the time column."""
    return list(dict.fromkeys([*schema.columns, *schema.time.columns]))


def check_schema(input_schema: pa.Schema, schema: RecordSchema, where: str) -> None:
    """Raises InvalidRecord if a declared column is missing, occurs twice, or has a type that cannot be widened."""
    check_columns(needed_columns(schema), list(input_schema.names), where)
    for name, declared in schema.columns.items():
        actual = _decoded_type(input_schema.field(name).type)
        if not (_widens(actual, declared) or (name in schema.lenient and _converts(actual, declared))):
            raise InvalidRecord(f"{where}: column {name}", type_name(actual), f"{type_name(declared)}, as declared")
    time = schema.time
    if time.time_of_day is not None:
        for name, has_type in ((time.column, pa.types.is_date), (time.time_of_day, pa.types.is_time)):
            actual = _decoded_type(input_schema.field(name).type)
            if not (is_text(actual) or has_type(actual)):
                accepted = "text, or Parquet's own date and time of day"
                raise InvalidRecord(f"{where}: column {name}", str(actual), f"{accepted}, with time.time_of_day")
        return
    actual = _decoded_type(input_schema.field(time.column).type)
    numeric = pa.types.is_integer(actual) or pa.types.is_floating(actual)
    if pa.types.is_timestamp(actual) or pa.types.is_date(actual):
        return
    if not (is_text(actual) if time.is_text else numeric):
        accepted = "text or timestamps" if time.is_text else "numbers or timestamps"
        raise InvalidRecord(f"{where}: column {time.column}", str(actual), f"{accepted} for time.unit {time.unit}")


def convert(batch: pa.RecordBatch, schema: RecordSchema, arrival_ms: int) -> Decoded:
    """Converts a batch whose schema has passed `check_schema`, and validates event times against `arrival_ms`."""
    rejections = Rejections()
    keep = np.ones(batch.num_rows, dtype=np.bool_)
    faults: list[tuple[BoolArray, Callable[[int], tuple[str, str]]]] = []
    columns: dict[str, pa.Array] = {}
    for name in needed_columns(schema):
        column = batch.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if is_text(column.type) and not _is_valid(column):
            bad = _invalid_text(column) & keep
            keep &= ~bad
            faults.append((bad, partial(_not_utf8, name)))
            column = pc.if_else(pa.array(bad), pa.scalar(None, column.type), column)
        declared = schema.columns.get(name, pa.string() if is_text(column.type) else column.type)
        if is_text(column.type) and not is_text(declared):
            column = pc.utf8_trim_whitespace(column.cast(pa.string()))
            column = without_words(column, ("", *schema.nulls.get(name, ())))
            columns[name] = lenient_parse(column, name, schema)
        else:
            columns[name] = _widen(column, declared)
            if name in schema.lenient and not _widens(column.type, declared):
                CONVERTED.labels(name).inc(len(column) - columns[name].null_count)
        lost = columns[name].null_count - column.null_count
        if lost:
            bad = pc.and_(columns[name].is_null(), column.is_valid()).to_numpy(zero_copy_only=False) & keep
            keep &= ~bad
            message = f"it is out of range for {type_name(declared)}, or no value of this type"
            faults.append((bad, described(name, message, column)))
    table = pa.table(columns)
    for bad, describe in faults:
        reject(RejectionReason.WRONG_TYPE, bad, table, schema, describe, rejections)
    if faults:
        table = table.filter(pa.array(keep))
    return extract_event_times(table, schema, arrival_ms, rejections)


def _not_utf8(name: str, _row: int) -> tuple[str, str]:
    return name, f"{name}: text that is not UTF-8"


def _is_valid(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _invalid_text(column: pa.Array) -> BoolArray:
    """Returns a mask of the values that are not UTF-8. It tests each value in Python, because such files are rare."""

    def invalid(value: bytes | None) -> bool:
        try:
            return value is not None and value.decode() is None
        except UnicodeDecodeError:
            return True

    wide = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
    return np.array([invalid(value) for value in column.cast(wide).to_pylist()], np.bool_)


def _decoded_type(dtype: pa.DataType) -> pa.DataType:
    return dtype.value_type if pa.types.is_dictionary(dtype) else dtype


def is_text(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or dtype == pa.string_view())


def _is_scalar(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype))


def _widens(actual: pa.DataType, declared: pa.DataType) -> bool:
    types = pa.types
    if types.is_string(declared):
        return is_text(actual)
    if types.is_boolean(declared):
        return bool(types.is_boolean(actual))
    if types.is_integer(declared):
        return bool(types.is_integer(actual))
    return bool(types.is_integer(actual) or types.is_floating(actual) or types.is_decimal(actual))


def _converts(actual: pa.DataType, declared: pa.DataType) -> bool:
    """Returns whether a lenient column may have another type: a column of integers with nulls is often float64."""
    types = pa.types
    if types.is_boolean(declared):
        return is_text(actual) or bool(types.is_integer(actual))
    if types.is_string(declared):
        return is_text(actual) or _is_scalar(actual)
    return is_text(actual) or bool(types.is_floating(actual) or types.is_decimal(actual))


def _widen(column: pa.Array, declared: pa.DataType) -> pa.Array:
    if column.type == declared:
        return column
    if pa.types.is_floating(declared):
        return column.cast(declared, safe=False)  # rounds an integer above 2^53
    if pa.types.is_boolean(declared):
        column = pc.if_else(pc.is_in(column, pa.array([0, 1], column.type)), column, None)
    return cast_or_null(column, declared)


def concat(batches: Sequence[Decoded], schema: RecordSchema) -> Decoded:
    """Concatenates decoded blocks into one batch."""
    rejections = Rejections(r for decoded in batches for r in decoded.rejected)
    guessed = Rejections(r for decoded in batches for r in decoded.guessed).as_tuple()
    if len(batches) == 1:
        return Decoded(batches[0].batch, rejections.as_tuple(), guessed=guessed)
    table = pa.Table.from_batches([decoded.batch for decoded in batches], schema=schema.output).combine_chunks()
    whole = table.to_batches()[0] if table.num_rows else schema.empty()
    return Decoded(whole, rejections.as_tuple(), guessed=guessed)
