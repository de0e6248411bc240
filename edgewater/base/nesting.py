"""Counts the nested messages in protobuf bytes before they are parsed.

A parser makes an object of about 100 bytes for each nested message, but an empty message needs only two bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_FREE = 1 << 10  # limit: CPU of the check of small messages
"""The number of nested messages that any bytes may have."""
_SMALL = 16 << 10  # limit: CPU of the check of small messages
"""Up to this number of bytes, nested messages cannot need much memory."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types; format: of protobuf


@dataclass(frozen=True, slots=True)
class Nesting:
    """The fields of a message type that need more memory than their bytes.

    Attributes:
        messages: field number -> the type of the nested message.
        packed: numbers of the fields with packed numbers. Each may have up to `MAX_PACKED` bytes.
        is_plain: returns whether the bytes between two positions are certainly such a message, without nested messages
            and with few packed numbers. It saves time.
    """

    messages: Mapping[int, Nesting] = field(default_factory=dict)
    packed: frozenset[int] = frozenset()
    is_plain: Callable[[bytes, int, int], bool] | None = None


MAX_PACKED = 64
"""The largest number of bytes of packed numbers."""
_FIELDS_PER_MESSAGE = 12  # limit: memory of a message


def check_nesting(data: bytes, of: Nesting, bytes_per_message: int, depth: int, max_messages: int = 1 << 20) -> int:
    """Checks bytes that are to be parsed as a message.

    Args:
        of: the type of the message.
        bytes_per_message: the least number of bytes per nested message, on average.
        depth: the largest number of levels of nested messages.
        max_messages: the largest number of nested messages, for any number of bytes. Counting one takes half a
            microsecond.

    Returns:
        The number of fields; 0 for few bytes, whose fields are not counted.

    Raises:
        ValueError: there are more or deeper messages, or the bytes are no message.
    """
    if len(data) <= _SMALL:
        return 0
    most = min(_FREE + len(data) // bytes_per_message, max_messages)
    found = fields = 0
    pending = [(0, len(data), of, 0)]
    while pending:
        at, end, kind, level = pending.pop()
        while at < end:
            fields += 1
            if fields > _FIELDS_PER_MESSAGE * most:
                raise ValueError(f"more than {_FIELDS_PER_MESSAGE * most} fields")
            tag = data[at]
            if tag < 128:
                at += 1
            else:
                tag, at = _varint(data, at, end)
            wire, number = tag & 7, tag >> 3
            if wire == _VARINT:
                _, at = _varint(data, at, end)
                continue
            length = 8 if wire == _FIXED64 else 4
            if wire == _BYTES:
                if at < end and data[at] < 128:
                    length, at = data[at], at + 1
                else:
                    length, at = _varint(data, at, end)
            elif wire not in (_FIXED64, _FIXED32):
                raise ValueError(f"a field of wire type {wire}")
            if length > end - at:
                raise ValueError(f"a field of {length} bytes where {end - at} are left")
            nested = kind.messages.get(number) if wire == _BYTES else None
            if nested is not None:
                found += 1
                if found > most or level == depth:
                    raise ValueError(f"nested messages: more than {most}, or more than {depth} levels of them")
                if nested.is_plain is None or not nested.is_plain(data, at, at + length):
                    pending.append((at, at + length, nested, level + 1))
            elif number in kind.packed and length > MAX_PACKED:
                raise ValueError(f"field {number} has {length} bytes; expected at most {MAX_PACKED}")
            at += length
    return fields


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number that does not end")
