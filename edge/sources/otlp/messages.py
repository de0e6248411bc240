"""Reads OTLP requests (protobuf or JSON) into groups of records, within bounds of memory.

A record or an attribute of two bytes takes fifty bytes or more as a message. So this module reads the levels of a
request one after the other, and counts records before it makes messages. Some fields of the classes here are `bytes`,
where `opentelemetry-proto` has a message or a text, which have the same encoding. An attribute stays bytes until a
column needs it. Equal attributes are then decoded once.

A part that cannot be read costs only the records that need it. So texts are decoded here, because the library would
refuse a whole request for a text that is not UTF-8. A value that cannot be read becomes `Unreadable`.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from edge.receivers import Body
from edgewater.base.errors import InvalidRecord

IntArray = npt.NDArray[np.int64]
T = TypeVar("T")

UNIT_BYTES = 16  # limit: memory of a decoded body, as a multiple of its size
RECORD_UNITS = 4  # limit: memory of a decoded record
"""The cost of a record or a point, in units. Its messages need about a kilobyte. A bucket or a JSON token costs one
unit. A body may cost one unit per `UNIT_BYTES` bytes of the largest body.
"""
_PACKAGE = "opentelemetry.proto."
_OPAQUE = tuple(
    (
        "common.v1.KeyValue common.v1.AnyValue metrics.v1.Exemplar trace.v1.Span.Event trace.v1.Span.Link "
        "metrics.v1.Gauge metrics.v1.Sum metrics.v1.Histogram metrics.v1.ExponentialHistogram metrics.v1.Summary"
    ).split()
)
_REQUESTS = {"logs": logs_pb2.LogsData, "metrics": metrics_pb2.MetricsData, "traces": trace_pb2.TracesData}
"""The message class with the fields of an export request, by signal."""
_RECORDS = {"logs": "logs.v1.LogRecord", "metrics": "metrics.v1.Metric", "traces": "trace.v1.Span"}
_RECORD_CLASSES = {"logs": logs_pb2.LogRecord, "metrics": metrics_pb2.Metric, "traces": trace_pb2.Span}
_LEVELS = {
    "logs": ("resource_logs", "scope_logs", "log_records"),
    "metrics": ("resource_metrics", "scope_metrics", "metrics"),
    "traces": ("resource_spans", "scope_spans", "spans"),
}
"""The names of the lists of resources, of scopes and of records in a request, by signal."""
_MARKS = ("\U0010fffe", "\U0010ffff", "\U000ffffe", "\U000fffff")
"""Characters without a meaning. One that a body in JSON lacks replaces half surrogate pairs in it."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_IDS = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")


def _fields(messages: Iterable[Any]) -> Iterator[Any]:
    for message in messages:
        yield from message.field
        yield from _fields(message.nested_type)


@functools.cache
def _pool() -> Any:
    pool, kinds = descriptor_pool.DescriptorPool(), descriptor_pb2.FieldDescriptorProto
    for module in (common_pb2, resource_pb2, logs_pb2, metrics_pb2, trace_pb2):
        file = descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        for each in _fields(file.message_type):
            if each.type == kinds.TYPE_STRING or each.type_name.removeprefix("." + _PACKAGE) in _OPAQUE:
                each.type = kinds.TYPE_BYTES
                each.ClearField("type_name")
        pool.Add(file)
    # The levels of a request are the same for all signals.
    levels = descriptor_pb2.FileDescriptorProto(name="levels.proto", package="levels", syntax="proto3")
    for name, fields in (("Request", "*groups"), ("Group", "resource *scopes"), ("Scope", "scope *records")):
        level = levels.message_type.add(name=name)
        for number, text in enumerate(fields.split(), 1):
            label = kinds.LABEL_REPEATED if text.startswith("*") else kinds.LABEL_OPTIONAL
            level.field.add(name=text.strip("*"), number=number, label=label, type=kinds.TYPE_BYTES)
    pool.Add(levels)
    return pool


@functools.cache
def message_class(name: str) -> Any:
    """Returns the class of a message. `name` is its full name without `opentelemetry.proto.`."""
    full = name if name.startswith("levels.") else _PACKAGE + name
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(full))


class Unreadable(bytes):
    """A marker in place of a value: bytes that are not UTF-8 or no message. No column can have it."""


def text(data: bytes) -> str | Unreadable:
    """Returns a text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return Unreadable(data)


class Budget:
    """Counts the parts of a body before they need memory."""

    def __init__(self, body: Body) -> None:
        self._most = self._left = max(body.limit_bytes // UNIT_BYTES, RECORD_UNITS)
        self.check = body.check

    def restart(self) -> None:
        """Begins to count another form of the same body."""
        self._left = self._most

    def take(self, records: int, unit: int = RECORD_UNITS) -> None:
        """Takes units for a number of parts. Raises InvalidRecord for too many parts, and BodyTooCostly as
        `Body.check`.
        """
        self._left -= records * unit
        if self._left < 0:
            accepted = f"several smaller requests, with at most {self._most // RECORD_UNITS} records each"
            raise InvalidRecord("body", None, accepted, "it has too many records, buckets or members")
        self.check()


@dataclass(slots=True)
class OtlpRecords:
    """The records of a request, by resource and scope. A group is one scope of one resource.

    Attributes:
        messages: the records.
        group_of: index of each record's group, int64.
        resources, scopes, sizes: the resource, the scope and the number of records of each group.
        unreadable: number of records that cannot be read. They are not among `messages`.
    """

    budget: Budget
    messages: list[Any] = field(default_factory=list)
    resources: list[Any] = field(default_factory=list)
    scopes: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    unreadable: int = 0

    @property
    def group_of(self) -> IntArray:
        return np.repeat(np.arange(len(self.sizes)), self.sizes)


def refusing(read: Callable[[], T], accepted: str) -> T:
    """Returns the result of `read`. Raises InvalidRecord if `read` cannot decode its bytes.

    Args:
        accepted: what the error message says is accepted.
    """
    try:
        return read()
    except (DecodeError, json_format.ParseError, ValueError, OverflowError, RecursionError) as exc:
        raise InvalidRecord("body", "", accepted, f"{type(exc).__name__}: {exc}"[:200]) from exc


def read_request(body: bytes, signal: str, budget: Budget) -> OtlpRecords:
    """Reads the protobuf encoding of an export request.

    Raises:
        InvalidRecord: the body is no such request.
        BodyTooCostly: see `edge.receivers.Body`.
    """
    return refusing(lambda: _read(body, signal, budget), f"an OTLP request with {signal} in protobuf")


def _read(body: bytes, signal: str, budget: Budget) -> OtlpRecords:
    records = OtlpRecords(budget)
    whole = {"logs": "logs.v1.ScopeLogs", "metrics": "metrics.v1.ScopeMetrics", "traces": "trace.v1.ScopeSpans"}[signal]
    damaged = [b"\xff"]  # an attribute that cannot be read
    groups = message_class("levels.Request").FromString(body).groups
    budget.take(len(groups))
    for group_bytes in groups:
        group = _or_none("levels.Group", group_bytes)
        if group is None:
            records.unreadable += 1
            continue
        resource = _or_none("resource.v1.Resource", group.resource)
        if resource is None:
            resource = message_class("resource.v1.Resource")(attributes=damaged)
        budget.take(len(group.scopes))
        for scope_bytes in group.scopes:
            levels = _or_none("levels.Scope", scope_bytes)
            if levels is None:
                records.unreadable += 1
                continue
            budget.take(len(levels.records))
            scope = _or_none("common.v1.InstrumentationScope", levels.scope)
            if scope is None:
                scope = message_class("common.v1.InstrumentationScope")(
                    name=b"\xff", version=b"\xff", attributes=damaged
                )
            of_scope = _or_none(whole, scope_bytes)
            if of_scope is not None:
                messages = getattr(of_scope, _LEVELS[signal][2])
            else:
                each = [_or_none(_RECORDS[signal], data) for data in levels.records]
                messages = [message for message in each if message is not None]
            records.unreadable += len(levels.records) - len(messages)
            records.resources.append(resource)
            records.scopes.append(scope)
            records.sizes.append(len(messages))
            records.messages.extend(messages)
    return records


def _or_none(name: str, data: bytes) -> Any:
    """Returns a message (see `message_class`); None if it cannot be read."""
    try:
        return message_class(name).FromString(data)
    except DecodeError:
        return None


def read_json(body: bytes, signal: str, budget: Budget) -> OtlpRecords:
    """Reads the JSON encoding of an export request. In JSON, trace and span identifiers are hexadecimal.

    Raises:
        InvalidRecord: the body is no such request.
        BodyTooCostly: see `edge.receivers.Body`.
    """
    budget.take(sum(map(body.count, (b"{", b"[", b","))), unit=1)
    unreadable = 0

    def convert() -> bytes:
        nonlocal unreadable
        document = json.loads(body, object_hook=_base64_ids)
        if not isinstance(document, dict):
            raise ValueError("it is no object")
        mark = next(mark for mark in _MARKS if mark.encode() not in body)
        marked = b"\\u" in body and _mark_surrogates(document, mark)
        try:
            message = json_format.ParseDict(document, _REQUESTS[signal](), ignore_unknown_fields=True)
        except json_format.ParseError:
            unreadable = _remove_unreadable(document, signal)
            message = json_format.ParseDict(document, _REQUESTS[signal](), ignore_unknown_fields=True)
        encoded = bytes(message.SerializeToString())
        return encoded.replace(mark.encode(), b"\xff" * 4) if marked else encoded

    plain = refusing(convert, f"an OTLP request with {signal} in JSON")
    budget.restart()
    records = read_request(plain, signal, budget)
    records.unreadable += unreadable
    return records


def _mark_surrogates(value: Any, mark: str) -> bool:
    """Replaces half surrogate pairs in texts by a mark. Returns whether there are any. JSON can express them, and UTF-8
    cannot.
    """
    found = False
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, dict | list):
            found |= _mark_surrogates(each, mark)
        elif isinstance(each, str) and not each.isascii():
            try:
                each.encode()
            except UnicodeEncodeError:
                value[key], found = _SURROGATE.sub(mark, each), True
    return found


def _remove_unreadable(document: dict[str, Any], signal: str) -> int:
    """Removes the records that cannot be read, and the records with a resource or a scope that cannot be read. Returns
    their number.
    """
    of_request, of_group, of_scope = _LEVELS[signal]
    removed = 0
    for group in _members(document, of_request):
        resource = group.get("resource", {}) if isinstance(group, dict) else None
        is_readable = _parses(resource, resource_pb2.Resource())
        for scope in _members(group, of_group):
            records = _members(scope, of_scope)
            named = isinstance(scope, dict) and _parses(scope.get("scope", {}), common_pb2.InstrumentationScope())
            good = [each for each in records if is_readable and named and _parses(each, _RECORD_CLASSES[signal]())]
            removed += len(records) - len(good)
            records[:] = good
            if not named and isinstance(scope, dict):
                scope["scope"] = {}
        if not is_readable and isinstance(group, dict):
            group["resource"] = {}
    return removed


def _members(parent: Any, name: str) -> list[Any]:
    """Returns a list in JSON by its name in protobuf, which JSON writes in camel case; [] if there is none."""
    first, *rest = name.split("_")
    found = parent.get(first + "".join(map(str.capitalize, rest)), parent.get(name)) if isinstance(parent, dict) else []
    return found if isinstance(found, list) else []


def _parses(value: Any, message: Any) -> bool:
    try:
        json_format.ParseDict(value, message, ignore_unknown_fields=True)
    except (json_format.ParseError, TypeError, AttributeError):
        return False
    return True


def _base64_ids(members: dict[str, Any]) -> dict[str, Any]:
    for name in _IDS:
        if isinstance(members.get(name), str):
            try:
                members[name] = base64.b64encode(bytes.fromhex(members[name])).decode()
            except ValueError:
                members[name] = []  # the record cannot be read
    return members


def attribute(data: bytes) -> tuple[str | Unreadable | None, Any]:
    """Returns the key and the value of a serialized attribute. The key is None if the attribute cannot be read."""
    pair = _or_none("common.v1.KeyValue", data)
    return (None, Unreadable(data)) if pair is None else (text(pair.key), any_value(pair.value))


def any_value(data: bytes) -> Any:
    """Returns the value of a serialized `AnyValue` as text, a number, a bool or None. Arrays and maps become JSON text,
    bytes become base64 text.
    """
    try:
        tree = _tree(data)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return Unreadable(data)
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":")) if isinstance(tree, list | dict) else tree


def _tree(data: bytes) -> Any:
    value = message_class("common.v1.AnyValue").FromString(data)
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_tree(each) for each in value.array_value.values]
    if kind == "kvlist_value":
        pairs = map(message_class("common.v1.KeyValue").FromString, value.kvlist_value.values)
        return {pair.key.decode(): _tree(pair.value) for pair in pairs}
    result = getattr(value, kind)
    if kind == "bytes_value":
        return base64.b64encode(result).decode()
    return result.decode() if kind == "string_value" else result


class Attributes:
    """The attributes of several owners, such as records. Each distinct attribute is decoded once.

    Args:
        owners: for each owner, its serialized attributes.

    Raises:
        InvalidRecord: there are more attributes than `budget` allows.
    """

    def __init__(self, owners: Sequence[Sequence[bytes]], budget: Budget) -> None:
        sizes = np.fromiter(map(len, owners), np.int64, len(owners))
        budget.take(int(sizes.sum()), unit=1)
        flat = list(chain.from_iterable(owners))
        numbers = {data: number for number, data in enumerate(dict.fromkeys(flat))}
        self._number_of = np.fromiter(map(numbers.__getitem__, flat), np.int64, len(flat))
        self._owner_of = np.repeat(np.arange(len(owners)), sizes)
        self._count = len(owners)
        self._values: list[Any] = []
        self._with_key: dict[Any, list[int]] = {}
        for number, data in enumerate(numbers):
            key, value = attribute(data)
            self._values.append(value)
            self._with_key.setdefault(key, []).append(number)

    def column(self, key: str) -> tuple[list[Any], IntArray]:
        """Returns the distinct values of a key, and for each owner the index of its value; -1 without a value.

        If an owner has a key twice, the last value counts. If an attribute of the owner cannot be read, neither can the
        value.
        """
        values, codes = list[Any](), np.full(self._count, -1)
        for wanted in (key, None):
            if numbers := self._with_key.get(wanted, []):
                code_of = np.full(len(self._values), -1)
                code_of[numbers] = len(values) + np.arange(len(numbers))
                found = code_of[self._number_of]
                has = found >= 0
                codes[self._owner_of[has]] = found[has]
                values += [self._values[number] for number in numbers]
        return values, codes
