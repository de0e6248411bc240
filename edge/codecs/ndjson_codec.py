"""NDJSON: one JSON object per line, decoded by Arrow.

The codec guards against two faults of Arrow's reader (26.0). First, a block that begins with the value `null` crashes
the process (apache/arrow#47409). So an empty object is prepended to every block, and its row is removed. Second, the
reader accepts two objects on one line as two rows. So the numbers of rows and lines are compared.
"""

from __future__ import annotations

import functools
import json
import re
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from edge.codecs.event_time import readable_times, time_accepted
from edge.codecs.lenient import WrittenFloat, is_null, lenient_values
from edge.codecs.line_decoder import Undecodable, count_lines
from edge.codecs.schema import RecordSchema
from edge.records import RejectionReason, Rejections
from edgewater.base.streams import type_name

_LEAD = b"{}\n"
_EXAMPLES = {"string": '"JFK"', "int64": "42", "float64": "4.2", "bool": "true"}
_NAMED = re.compile(rb"[:,\[\s]-?Inf\b|-NaN\b")
"""Names of numbers that only Arrow reads."""


@functools.cache
def _pyarrow_json() -> ModuleType:
    import pyarrow.json  # imported late, so that an edge with other formats does not load it

    return pyarrow.json  # type: ignore[no-any-return,unused-ignore]


class NdjsonCodec:
    """A `LineCodec` for JSON objects. An absent key is null. Undeclared keys are ignored."""

    def __init__(self, schema: RecordSchema) -> None:
        self.schema = schema
        self._textual = schema.textual
        self._arrow = pa.schema(list(self._textual.items()))
        self._converting = (schema.lenient | schema.nulls.keys()) & self._textual.keys()

    def parse(self, data: bytes, rejections: Rejections) -> pa.Table:
        if not data.isascii():
            _check_utf8(data)
        pj = _pyarrow_json()
        led = _LEAD + data
        try:
            table = pj.read_json(
                pa.BufferReader(led),
                read_options=pj.ReadOptions(use_threads=False, block_size=len(led) + 1),
                parse_options=pj.ParseOptions(explicit_schema=self._arrow, unexpected_field_behavior="ignore"),
            )
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
            raise Undecodable(f"not a JSON object as declared: {_without_row(str(exc))}") from exc
        if table.num_rows - 1 != count_lines(data, table.num_rows - 1):
            raise Undecodable("expected exactly one JSON object per line")
        return table.slice(1)

    def reject_invalid(self, lines: list[bytes], rejections: Rejections) -> list[bytes]:
        wrong: list[tuple[str, dict[str, Any]]] = []
        good: list[bytes | None] = [*lines]
        odd: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(lines):
            values: dict[str, Any] = {}
            fault = self._fault_of_values(line, values)
            if fault is None:
                continue
            if fault[0] is not RejectionReason.MALFORMED and self._converting:
                odd[number] = values
                continue
            good[number] = None
            only = rejections.told(fault[0], self._only(values))
            rejections.add(fault[0], line, fault[1], only=only)
            if fault[0] is RejectionReason.WRONG_TYPE:
                wrong.append((only, values))
        for number, fitting in zip(odd, self._converted(list(odd.values())), strict=True):
            fault = self._misfit(fitting)
            if fault is None:
                good[number] = json.dumps({name: fitting.get(name) for name in self._textual}).encode()
                continue
            good[number] = None
            only = rejections.told(fault[0], self._only(fitting))
            rejections.add(fault[0], lines[number], fault[1], only=only)
            if fault[0] is RejectionReason.WRONG_TYPE:
                wrong.append((only, odd[number]))
        if wrong and self.schema.has_time:
            kinds = {name: self._textual[name] for name in self.schema.time.columns}
            columns = [pa.array([_fitting(v.get(n), kind) for _, v in wrong], kind) for n, kind in kinds.items()]
            times, onlys = readable_times(columns, self.schema.time), np.array([only for only, _ in wrong], object)
            for only in dict.fromkeys(onlys):
                rejections.add_times(RejectionReason.WRONG_TYPE, *times.spans(onlys == only), only)
        return [line for line in good if line is not None]

    def _only(self, values: dict[str, Any]) -> str:
        name = self.schema.rejects_by
        return "" if name is None or name not in values else self.schema.only(values[name])

    def _converted(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the records with the values of lenient columns in the types of the columns, as far as they can be."""
        found = [dict(values) for values in records]
        for name in self._converting:
            at = [n for n, values in enumerate(records) if not _fits(values.get(name), self._textual[name])]
            nulls = [n for n in at if is_null(records[n][name], name, self.schema)]
            found_here = dict.fromkeys(nulls)
            if name in self.schema.lenient:
                others = [n for n in at if n not in found_here]
                values = lenient_values([records[n][name] for n in others], name, self.schema)
                found_here |= {n: value for n, value in zip(others, values, strict=True) if value is not None}
            for n, value in found_here.items():
                found[n][name] = value
        return found

    def _fault_of_values(self, line: bytes, values: dict[str, Any]) -> tuple[RejectionReason, str] | None:
        keys: list[str] = []
        try:
            kept = functools.partial(_keep_keys, keys)
            number = WrittenFloat if self._converting else None
            value = json.loads(line.decode("utf-8"), object_pairs_hook=kept, parse_float=number)
        except RecursionError:
            return None  # the line is nested deeper than Python's limit, so Arrow decides
        except UnicodeDecodeError as exc:
            return RejectionReason.MALFORMED, f"not UTF-8 at byte {exc.start}; expected JSON in UTF-8"
        except json.JSONDecodeError as exc:
            if _NAMED.search(line):
                return None  # Arrow decides, as in a block without faults
            return (
                RejectionReason.MALFORMED,
                f"not JSON: {exc.msg} at character {exc.pos}; expected one JSON object per line",
            )
        except ValueError as exc:
            return RejectionReason.MALFORMED, f"not JSON: {exc}"
        if not isinstance(value, dict):
            return RejectionReason.MALFORMED, f"{_json_type(value)} instead of a JSON object such as {{…}}"
        if len(value) < len(keys):
            duplicates = [name for name in self._textual if keys.count(name) > 1]
            if duplicates:
                return RejectionReason.MALFORMED, f"{duplicates[0]}: duplicate key; expected once"
        values |= value
        return self._misfit(value)

    def _misfit(self, values: dict[str, Any]) -> tuple[RejectionReason, str] | None:
        for name, declared in self._textual.items():
            if not _fits(values.get(name), declared):
                return self._wrong(name, declared, values[name])
        return None

    def _wrong(self, name: str, declared: pa.DataType, value: object) -> tuple[RejectionReason, str]:
        got = f"got {_json_type(value)}"
        if name in self.schema.time.columns:
            return RejectionReason.TIME_UNPARSEABLE, f"{name}: {got}; expected {time_accepted(self.schema.time)}"
        kind = type_name(declared)
        return RejectionReason.WRONG_TYPE, f"{name}: {got}; expected {kind} such as {_EXAMPLES.get(kind, 'null')}"


def _check_utf8(data: bytes) -> None:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise Undecodable(f"not UTF-8 at byte {exc.start}") from exc


def _without_row(message: str) -> str:
    """Removes the row number from Arrow's message, because the number is relative to the block."""
    return message.rsplit(" in row ", 1)[0]


def _keep_keys(keys: list[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object and stores its keys in `keys`. The last call is for the outermost object."""
    keys[:] = [key for key, _ in pairs]
    return dict(pairs)


def _fits(value: Any, declared: pa.DataType) -> bool:
    """Returns False only if Arrow would certainly reject the value."""
    if value is None:
        return True
    if pa.types.is_boolean(declared):
        return isinstance(value, bool)
    if pa.types.is_string(declared):
        return isinstance(value, str)
    if isinstance(value, bool):
        return False
    if pa.types.is_integer(declared):
        return isinstance(value, int) and -(1 << 63) <= value < 1 << 63
    return isinstance(value, int | float)


def _fitting(value: Any, declared: pa.DataType) -> Any:
    """Returns the value in a type that Arrow accepts; None for a value that does not fit."""
    if not _fits(value, declared):
        return None
    try:
        return float(value) if value is not None and pa.types.is_floating(declared) else value
    except OverflowError:
        return None


def _json_type(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, dict):
        return "an object"
    return "an array" if isinstance(value, list) else "null"
