"""Reads OTLP requests (protobuf or JSON) into groups of records, within bounds of memory.

A record or an attribute of two bytes takes fifty bytes or more as a message. So this module reads the levels of a
request one after the other, and counts records before it makes messages. Some fields of the classes here are `bytes`,
where `opentelemetry-proto` has a message. Bytes and messages have the same encoding. An attribute stays bytes until a
column needs it. Equal attributes are then decoded once.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
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
from edgewater.model.errors import InvalidRecord

IntArray = npt.NDArray[np.int64]
T = TypeVar("T")

UNIT_BYTES = 16
RECORD_UNITS = 4
"""The cost of a record or a point, in units. Its messages need about a kilobyte. A bucket or a JSON token costs one
unit. A body may cost one unit per `UNIT_BYTES` bytes of the largest body.
"""
_PACKAGE = "opentelemetry.proto."
_OPAQUE = (
    "common.v1.KeyValue", "common.v1.AnyValue", "metrics.v1.Exemplar", "trace.v1.Span.Event", "trace.v1.Span.Link",
    "metrics.v1.Gauge", "metrics.v1.Sum", "metrics.v1.Histogram", "metrics.v1.ExponentialHistogram",
    "metrics.v1.Summary",
)  # fmt: skip
_REQUESTS = {"logs": logs_pb2.LogsData, "metrics": metrics_pb2.MetricsData, "traces": trace_pb2.TracesData}
"""The message class with the fields of an export request, by signal."""
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
            if each.type_name.removeprefix("." + _PACKAGE) in _OPAQUE:
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


class Budget:
    """Counts the parts of a body before they need memory."""

    def __init__(self, body: Body) -> None:
        self._most = self._left = max(body.limit_bytes // UNIT_BYTES, RECORD_UNITS)
        self.check = body.check

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
    """

    budget: Budget
    messages: list[Any] = field(default_factory=list)
    resources: list[Any] = field(default_factory=list)
    scopes: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

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
    read_group, read_scope = message_class("levels.Group").FromString, message_class("levels.Scope").FromString
    read_resource = message_class("resource.v1.Resource").FromString
    read_name = message_class("common.v1.InstrumentationScope").FromString
    whole, name = {
        "logs": ("logs.v1.ScopeLogs", "log_records"),
        "metrics": ("metrics.v1.ScopeMetrics", "metrics"),
        "traces": ("trace.v1.ScopeSpans", "spans"),
    }[signal]
    read_records = message_class(whole).FromString
    groups = message_class("levels.Request").FromString(body).groups
    budget.take(len(groups))
    for group_bytes in groups:
        group = read_group(group_bytes)
        resource = read_resource(group.resource)
        budget.take(len(group.scopes))
        for scope_bytes in group.scopes:
            scope = read_scope(scope_bytes)
            size = len(scope.records)
            budget.take(size)
            records.resources.append(resource)
            records.scopes.append(read_name(scope.scope))
            records.sizes.append(size)
            records.messages.extend(getattr(read_records(scope_bytes), name))
    return records


def json_to_protobuf(body: bytes, signal: str, budget: Budget) -> bytes:
    """Converts the JSON encoding of an export request to protobuf. In JSON, trace and span identifiers are hexadecimal.

    Raises:
        InvalidRecord: the body is no such request.
        BodyTooCostly: see `edge.receivers.Body`.
    """
    budget.take(sum(map(body.count, (b"{", b"[", b","))), unit=1)

    def convert() -> bytes:
        document = json.loads(body, object_hook=_base64_ids)
        if not isinstance(document, dict):
            raise ValueError("it is no object")
        message = json_format.ParseDict(document, _REQUESTS[signal](), ignore_unknown_fields=True)
        return bytes(message.SerializeToString())

    return refusing(convert, f"an OTLP request with {signal} in JSON")


def _base64_ids(members: dict[str, Any]) -> dict[str, Any]:
    for name in _IDS:
        if isinstance(members.get(name), str):
            try:
                members[name] = base64.b64encode(bytes.fromhex(members[name])).decode()
            except ValueError as exc:
                raise binascii.Error(f"{name}: {members[name][:40]!r} is not hexadecimal") from exc
    return members


def attribute(data: bytes) -> tuple[str, Any]:
    """Returns the key and the value of a serialized attribute."""
    pair = common_pb2.KeyValue.FromString(data)
    return pair.key, plain(pair.value)


def any_value(data: bytes) -> Any:
    """Returns the value of a serialized `AnyValue` in the form of `plain`."""
    return plain(common_pb2.AnyValue.FromString(data))


def plain(value: Any) -> Any:
    """Returns an `AnyValue` as text, a number, a bool or None. Arrays and maps become JSON text, bytes become base64
    text.
    """
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind in ("array_value", "kvlist_value"):
        return json.dumps(_tree(value), ensure_ascii=False, separators=(",", ":"))
    result = getattr(value, kind)
    return base64.b64encode(result).decode() if kind == "bytes_value" else result


def _tree(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_tree(each) for each in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _tree(pair.value) for pair in value.kvlist_value.values}
    return plain(value)


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
        self._with_key: dict[str, list[int]] = {}
        for number, data in enumerate(numbers):
            key, value = attribute(data)
            self._values.append(value)
            self._with_key.setdefault(key, []).append(number)

    def column(self, key: str) -> tuple[list[Any], IntArray]:
        """Returns the distinct values of a key, and for each owner the index of its value; -1 without a value.

        If an owner has a key twice, the last value counts.
        """
        numbers = self._with_key.get(key, [])
        codes = np.full(self._count, -1)
        if numbers:
            code_of = np.full(len(self._values), -1)
            code_of[numbers] = np.arange(len(numbers))
            found = code_of[self._number_of]
            has = found >= 0
            codes[self._owner_of[has]] = found[has]
        return [self._values[number] for number in numbers], codes
