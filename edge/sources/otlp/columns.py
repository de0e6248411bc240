"""Converts OTLP records to columns: finds fields and attributes by path, and casts them to the types of a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs.event_time import extract_event_times
from edge.codecs.schema import RecordSchema
from edge.records import Decoded, RejectionReason, Rejections
from edge.sources.otlp.messages import Attributes, OtlpRecords, Unreadable, any_value, text
from edgewater.base.streams import type_name
from edgewater.model import arithmetic

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_NS_PER_UNIT = {"ms": 1_000_000, "s": 1_000_000_000, "us": 1_000}
LATEST_NS = (1 << 63) - 1  # format: the largest int64


class _Bad:
    """A marker in place of a value that cannot be converted."""


@dataclass(frozen=True, slots=True)
class Values:
    """A column of values.

    Attributes:
        values: distinct values, or one value per row if `codes` is None.
        codes: for each row, the index of its value in `values`; -1 for null.
    """

    values: Sequence[Any]
    codes: IntArray | None = None

    def at(self, rows: IntArray) -> Values:
        return Values(self.values, rows if self.codes is None else self.codes[rows])

    def typed(self, kind: pa.DataType) -> tuple[pa.Array, BoolArray]:
        """Returns the column cast to a type, and a mask of the rows whose value cannot be converted."""
        array, bad = _typed(self.values, kind)
        if self.codes is None:
            return array, bad
        taken = array.take(pa.array(self.codes, mask=self.codes < 0))
        return taken, (np.append(bad, False)[self.codes] if bad.any() else np.zeros(len(self.codes), np.bool_))

    def example(self, row: int) -> Any:
        return self.values[row if self.codes is None else int(self.codes[row])]


def _typed(values: Sequence[Any], kind: pa.DataType) -> tuple[pa.Array, BoolArray]:
    """Returns values as a type, and a mask of the values that cannot be converted without a loss. Texts are read as in
    all formats (`arithmetic.parse`).
    """
    natural: dict[pa.DataType, type] = {pa.string(): str, pa.int64(): int, pa.float64(): float, pa.bool_(): bool}
    if set(map(type, values)) <= {natural[kind], type(None)}:
        try:
            return pa.array(values, kind), np.zeros(len(values), np.bool_)
        except (pa.ArrowInvalid, OverflowError):  # an integer is too large for int64
            pass
    converted = [_convert(value, kind) for value in values]
    bad = np.array([each is _Bad for each in converted], np.bool_)
    array = pa.array([None if each is _Bad else each for each in converted], kind)
    texts = pa.array([value if isinstance(value, str) else None for value in values], pa.string())
    if kind != pa.string() and texts.null_count < len(texts):
        array = pc.coalesce(array, arithmetic.parse(texts, kind))
        bad |= pc.and_(texts.is_valid(), array.is_null()).to_numpy(zero_copy_only=False)
    return array, bad


def _convert(value: Any, kind: pa.DataType) -> Any:
    """Returns a value as a type; `_Bad` if the conversion would lose information. A text becomes None, unless `kind` is
    a text.
    """
    if isinstance(value, Unreadable):
        return _Bad
    if kind == pa.string():
        return (
            value if isinstance(value, str | None) else str(value).lower() if isinstance(value, bool) else repr(value)
        )
    if value is None or isinstance(value, str):
        return None
    if kind == pa.bool_() or isinstance(value, bool):
        return value if kind == pa.bool_() and isinstance(value, bool) else _Bad
    if kind == pa.float64():
        return float(value)
    if isinstance(value, float):
        value = int(value) if value.is_integer() else 1 << 63
    return value if -(1 << 63) <= value < 1 << 63 else _Bad


class Rows:
    """The rows of a request. Each row has one event time. A column is computed once, and all streams share it.

    Attributes:
        time_ns: event time of each row, int64; 0 if the row has none.
    """

    signal: ClassVar[str]
    fields: ClassVar[Mapping[str, str]]
    """The fields besides attributes. The value is the type that a column of the field must have, or `any`."""

    def __init__(self, records: OtlpRecords) -> None:
        self.records = records
        self.time_ns = self._times()
        self._owners: dict[str, Attributes] = {}
        self._columns: dict[str, Values] = {}

    def __len__(self) -> int:
        return len(self.time_ns)

    def _times(self) -> IntArray:
        raise NotImplementedError

    def column(self, path: str) -> Values:
        """Returns the column of a field or an attribute."""
        if path not in self._columns:
            self._columns[path] = self._column(path)
        return self._columns[path]

    def _column(self, path: str) -> Values:
        records = self.records
        if path.startswith("resource."):
            return self._attribute("resource", [list(each.attributes) for each in records.resources], path[9:])
        if path.startswith("scope.attributes."):
            return self._attribute("scope", [list(each.attributes) for each in records.scopes], path[17:])
        if path.startswith("attributes."):
            return self._own_attribute(path[11:])
        if path in ("scope.name", "scope.version"):
            names = [text(getattr(scope, path[6:])) or None for scope in records.scopes]
            return Values(names).at(self.group_of())
        return self._field(path)

    def group_of(self) -> IntArray:
        """Returns, for each row, the index of its resource and scope."""
        return self.records.group_of

    def _attribute(self, owner: str, owners: Sequence[Sequence[bytes]], key: str) -> Values:
        return Values(*self._attributes(owner, owners).column(key)).at(self.group_of())

    def _own_attribute(self, key: str) -> Values:
        owners = [] if "own" in self._owners else list(map(attrgetter("attributes"), self.records.messages))
        return Values(*self._attributes("own", owners).column(key))

    def _attributes(self, owner: str, owners: Sequence[Sequence[bytes]]) -> Attributes:
        if owner not in self._owners:
            self._owners[owner] = Attributes(owners, self.records.budget)
        return self._owners[owner]

    def _field(self, path: str) -> Values:
        raise NotImplementedError

    def _texts(self, name: str) -> Values:
        return Values([text(each) or None for each in map(attrgetter(name), self.records.messages)])

    def _hex(self, name: str) -> Values:
        return Values([each.hex() or None for each in map(attrgetter(name), self.records.messages)])

    def _labels(self, name: str, labels: Sequence[str]) -> Values:
        texts = dict(enumerate(labels))
        return Values([texts.get(each, str(each)) for each in map(attrgetter(name), self.records.messages)])


def nanoseconds(messages: Sequence[Any], name: str) -> IntArray:
    """Returns a time field of messages in nanoseconds, int64. Times above the int64 range become the largest int64."""
    times = np.fromiter(map(attrgetter(name), messages), np.uint64, len(messages))
    return np.minimum(times, np.uint64(LATEST_NS)).astype(np.int64)


class LogRows(Rows):
    """One row for each log record."""

    signal = "logs"
    fields = dict.fromkeys(("severity_text", "severity_number", "body", "event_name"), "any")
    fields |= {"trace_id": "string", "span_id": "string"}

    def _times(self) -> IntArray:
        times = nanoseconds(self.records.messages, "time_unix_nano")
        if times.all():
            return times
        return np.where(times != 0, times, nanoseconds(self.records.messages, "observed_time_unix_nano"))

    def _field(self, path: str) -> Values:
        if path == "body":
            numbers: dict[bytes, int] = {}
            codes = [numbers.setdefault(body, len(numbers)) for body in map(attrgetter("body"), self.records.messages)]
            return Values(list(map(any_value, numbers)), np.array(codes, np.int64))
        if path == "severity_number":
            return Values([number or None for number in map(attrgetter(path), self.records.messages)])
        return self._hex(path) if path.endswith("_id") else self._texts(path)


class SpanRows(Rows):
    """One row for each span. The event time is the span's end."""

    signal = "traces"
    fields = {"name": "any", "status_message": "any", "duration_ms": "float64", "duration_ns": "int64"}
    fields |= dict.fromkeys("kind status trace_id span_id parent_span_id trace_state".split(), "string")

    def _times(self) -> IntArray:
        return nanoseconds(self.records.messages, "end_time_unix_nano")

    def _field(self, path: str) -> Values:
        if path.startswith("duration"):
            start_ns = nanoseconds(self.records.messages, "start_time_unix_nano")
            lasted = self.time_ns - start_ns
            numbers = (lasted / 1e6 if path == "duration_ms" else lasted).tolist()
            known = (lasted >= 0) & (start_ns != 0)
            return Values([each if has else None for each, has in zip(numbers, known.tolist(), strict=True)])
        if path == "kind":
            return self._labels("kind", ("unspecified", "internal", "server", "client", "producer", "consumer"))
        if path == "status":
            return self._labels("status.code", ("unset", "ok", "error"))
        if path == "status_message":
            return self._texts("status.message")
        return self._hex(path) if path.endswith("_id") else self._texts(path)


@dataclass(slots=True)
class Prepared:
    """Typed columns of a request, and the rows that are not rejected yet.

    Attributes:
        columns: all rows of each column, by its name.
        keep: a mask of the rows that are not rejected.
    """

    columns: dict[str, pa.Array]
    keep: BoolArray
    rejections: Rejections

    def reject(self, reason: RejectionReason, bad: BoolArray, time_ns: IntArray, example: str, message: str) -> None:
        """Rejects the rows of `bad` that are not rejected yet."""
        new = bad & self.keep
        if new.any():
            self.rejections.add(reason, example, message, int(new.sum()))
            times = time_ns[new]
            self.rejections.add_times(reason, times[times != 0] // 1_000_000)
            self.keep &= ~bad

    def decoded(self, schema: RecordSchema, arrival_ms: int) -> Decoded:
        table = pa.table(self.columns)
        if not self.keep.all():
            table = table.filter(pa.array(self.keep))
        return extract_event_times(table, schema, arrival_ms, self.rejections)


def prepare(rows: Rows, paths: Mapping[str, str], schema: RecordSchema) -> Prepared:
    """Casts the columns of a stream, and rejects rows with values that cannot be cast.

    Args:
        paths: by column, the path of a field or an attribute. A time column without a path gets the event time.
    """
    result = Prepared({}, np.ones(len(rows), np.bool_), Rejections())
    accepted = "a record that cannot be read; expected OTLP in protobuf or JSON"
    result.rejections.add(RejectionReason.MALFORMED, "", accepted, rows.records.unreadable)
    for name, kind in schema.textual.items():
        rows.records.budget.check()
        path = paths.get(name)
        if path is None:
            result.columns[name] = _time_column(rows.time_ns, schema, schema.columns.get(name))
            continue
        column = rows.column(path)
        result.columns[name], bad = column.typed(kind)
        if bad.any():
            example = column.example(int(np.argmax(bad)))
            message = f"{name}: {path} is {str(example)[:100]!r}; expected {type_name(kind)}"
            result.reject(RejectionReason.WRONG_TYPE, bad, rows.time_ns, f"{name} = {example}", message)
    return result


def _time_column(time_ns: IntArray, schema: RecordSchema, declared: pa.DataType | None) -> pa.Array:
    missing = time_ns == 0
    if declared is None:
        return pa.array(time_ns // 1_000_000, pa.timestamp("ms"), mask=missing)
    unit_ns = _NS_PER_UNIT[schema.time.unit]
    numbers = time_ns / unit_ns if declared == pa.float64() else time_ns // unit_ns
    return pa.array(numbers, declared, mask=missing)


ROWS: Mapping[str, Callable[[OtlpRecords], Rows]] = {"logs": LogRows, "traces": SpanRows}
