"""Durations, sizes and percentages as people write them.

The parsing itself is `durationpy`'s (Go-style durations) and pydantic's (`ByteSize`); this module
gives both the project's error message and units: durations in ms, sizes in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta

import durationpy
from pydantic import ByteSize, TypeAdapter, ValidationError

from edgewater.errors import InvalidInput

MAX_DURATION_MS = 36_525 * 86_400_000
"""A century; durationpy itself computes in floats and is exact to the millisecond for twice as long."""

DURATION_ACCEPTED = "a duration such as 500ms, 30s, 5m, 1h30m or 1d"
SIZE_ACCEPTED = "a size such as 200, 64KiB or 1MB"

_BYTES = TypeAdapter(ByteSize)


def duration_ms(value: object, field: str, error: type[InvalidInput] = InvalidInput, *, minimum_ms: int = 0) -> int:
    """Whole milliseconds of a duration.

    Raises:
        error: not a duration, finer than a millisecond, or below `minimum_ms`.
    """
    if not isinstance(value, str):
        raise error(field, value, DURATION_ACCEPTED, "a duration needs a unit")
    try:
        # In whole numbers: total_seconds() is a float.
        millis, rest = divmod(durationpy.from_str(value.strip()), timedelta(milliseconds=1))
    except (durationpy.DurationError, OverflowError) as exc:
        raise error(field, value, DURATION_ACCEPTED) from exc
    # A timedelta has microseconds: what is finer comes out as nothing.
    lost = millis == 0 and any(digit in value for digit in "123456789")
    if millis > MAX_DURATION_MS:
        raise error(field, value, f"at most {format_duration(MAX_DURATION_MS)}")
    if rest or lost:
        raise error(field, value, "whole milliseconds")
    if millis < minimum_ms:
        raise error(field, value, f"at least {minimum_ms} ms")
    return int(millis)


def format_duration(millis: int) -> str:
    """The shortest text that `duration_ms` reads back as `millis`."""
    for unit, size in (("w", 604_800_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if millis and millis % size == 0:
            return f"{millis // size}{unit}"
    return f"{millis}ms"


def size_bytes(value: object, field: str, error: type[InvalidInput] = InvalidInput) -> int:
    """Bytes of a size such as ``64KiB``. Raises `error` for anything else, or a negative one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise error(field, value, SIZE_ACCEPTED)
    try:
        # pydantic cuts off the fraction of a number without a unit.
        size = int(_BYTES.validate_python(int(value) if isinstance(value, str) and _is_number(value) else value))
    except (ValidationError, ValueError) as exc:
        raise error(field, value, SIZE_ACCEPTED) from exc
    if size < 0:
        raise error(field, value, SIZE_ACCEPTED)
    return size


def fraction(value: object) -> float | None:
    """0.05 for ``"5%"``; None if `value` is not written as a percentage."""
    if isinstance(value, str) and value.strip().endswith("%"):
        number = value.strip()[:-1]
        if _is_number(number) and math.isfinite(float(number)):
            return float(number) / 100.0
    return None


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def require_keys(
    mapping: object, field: str, allowed: Mapping[str, bool], error: type[InvalidInput]
) -> dict[str, object]:
    """`mapping` as a dict, with no unknown and no missing key.

    Args:
        allowed: key -> whether it must be there.
    """
    names = ", ".join(allowed)
    if not isinstance(mapping, Mapping):
        raise error(field, mapping, f"a mapping with the keys {names}")
    prefix = f"{field}." if field else ""
    for key, value in mapping.items():
        if key not in allowed:
            raise error(f"{prefix}{key}", value, f"one of the keys {names}", "unknown key")
    for key, required in allowed.items():
        if required and key not in mapping:
            raise error(f"{prefix}{key}", None, "a value", "missing key")
    return {str(k): v for k, v in mapping.items()}


def require_writable(given: object, error: type[InvalidInput]) -> None:
    """Raises `error` for a text or a number, anywhere in a mapping, that could be neither stored nor sent nor named.

    These are texts with half of a surrogate pair, which are not Unicode, and whole numbers with more digits than
    Python writes.
    """
    waiting, seen = [("", given)], set[int]()
    while waiting:
        field, value = waiting.pop()
        _require_scalar(value, field, error)
        if not isinstance(value, Mapping | list) or id(value) in seen:
            continue
        seen.add(id(value))  # YAML's aliases make a value part of itself
        prefix = f"{field}." if field else ""
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            _require_scalar(key, field, error)
            waiting.append((f"{prefix}{key}", part))


def _require_scalar(value: object, field: str, error: type[InvalidInput]) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            shown = value.encode(errors="backslashreplace").decode()
            raise error(field, shown, "text in Unicode", "half of a surrogate pair is no character") from exc
    elif isinstance(value, int):
        try:
            str(value)
        except ValueError as exc:
            raise error(field, f"a number of {value.bit_length()} bits", "a number with fewer digits") from exc
