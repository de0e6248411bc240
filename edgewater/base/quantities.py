"""Parses durations, sizes and percentages of configurations and queries.

`durationpy` parses durations (Go syntax), and pydantic's `ByteSize` parses sizes. This module converts them to
milliseconds and bytes, with the error messages of `InvalidInput`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import timedelta

import durationpy
from pydantic import ByteSize, TypeAdapter, ValidationError

from edgewater.base.errors import InvalidInput, did_you_mean

MAX_DURATION_MS = 36_525 * 86_400_000
"""The largest accepted duration, 100 years. durationpy computes in floats, which are exact to the millisecond up to 200
years.
"""

DURATION_ACCEPTED = "a duration such as 500ms, 30s, 5m, 1h30m or 1d"
SIZE_ACCEPTED = "a size such as 200, 64KiB or 1MB"

_BYTES = TypeAdapter(ByteSize)


def duration_ms(value: object, field: str, error: type[InvalidInput] = InvalidInput, *, minimum_ms: int = 0) -> int:
    """Returns the milliseconds of a duration.

    Raises:
        error: the value is not a duration, is not in whole milliseconds, is below `minimum_ms` or above
            `MAX_DURATION_MS`.
    """
    if not isinstance(value, str):
        raise error(field, value, DURATION_ACCEPTED, "a duration needs a unit")
    try:
        # The computation is in integers, because total_seconds() is a float.
        millis, rest = divmod(durationpy.from_str(value.strip()), timedelta(milliseconds=1))
    except (durationpy.DurationError, OverflowError) as exc:
        raise error(field, value, DURATION_ACCEPTED) from exc
    # A timedelta has a resolution of 1 µs: shorter durations become 0.
    lost = millis == 0 and any(digit in value for digit in "123456789")
    if millis > MAX_DURATION_MS:
        raise error(field, value, f"at most {format_duration(MAX_DURATION_MS)}")
    if rest or lost:
        raise error(field, value, "whole milliseconds")
    if millis < minimum_ms:
        raise error(field, value, f"at least {minimum_ms} ms")
    return int(millis)


def format_duration(millis: int) -> str:
    """Returns the shortest text that `duration_ms` parses to `millis`."""
    for unit, size in (("w", 604_800_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if millis and millis % size == 0:
            return f"{millis // size}{unit}"
    return f"{millis}ms"


def size_bytes(value: object, field: str, error: type[InvalidInput] = InvalidInput) -> int:
    """Returns the bytes of a size such as ``64KiB``. Raises `error` for anything else and for negative sizes."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise error(field, value, SIZE_ACCEPTED)
    try:
        # pydantic truncates a number without a unit.
        size = int(_BYTES.validate_python(int(value) if isinstance(value, str) and is_number(value) else value))
    except (ValidationError, ValueError) as exc:
        raise error(field, value, SIZE_ACCEPTED) from exc
    if size < 0:
        raise error(field, value, SIZE_ACCEPTED)
    return size


def fraction(value: object) -> float | None:
    """Returns the fraction of a percentage, such as 0.05 for ``"5%"``; None for a value that is no percentage."""
    if isinstance(value, str) and value.strip().endswith("%"):
        number = value.strip()[:-1]
        if is_number(number) and math.isfinite(float(number)):
            return float(number) / 100.0
    return None


def is_number(value: object) -> bool:
    """Returns whether Python can convert a value to a float."""
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def require_keys(
    mapping: object, field: str, allowed: Mapping[str, bool], error: type[InvalidInput]
) -> dict[str, object]:
    """Returns a mapping as a dict.

    Args:
        allowed: the accepted keys, and whether each is required.

    Raises:
        error: the value is not a mapping, or a key is unknown or missing.
    """
    names = ", ".join(allowed)
    if not isinstance(mapping, Mapping):
        raise error(field, mapping, f"a mapping with the keys {names}")
    prefix = f"{field}." if field else ""
    for key, value in mapping.items():
        if key not in allowed:
            raise error(f"{prefix}{key}", value, f"one of the keys {names}", f"unknown key{did_you_mean(key, allowed)}")
    for key, required in allowed.items():
        if required and key not in mapping:
            raise error(f"{prefix}{key}", None, "a value", "missing key")
    return {str(k): v for k, v in mapping.items()}


def require_uncut(mapping: object, error: type[InvalidInput]) -> None:
    """Raises `error` if YAML has cut a text with parentheses at a comma, because the text has no quotes.

    YAML parses ``{p99: quantiles(x, 0.99)}`` to ``{"p99": "quantiles(x", "0.99)": None}``.
    """
    for field, value in _nested(mapping):
        if isinstance(value, Mapping):
            _require_uncut_values(list(value.items()), f"{field}." if field else "", error)


def _nested(mapping: object) -> Iterator[tuple[str, object]]:
    """Yields a value and all values in it, at any depth, each with its field."""
    pending, seen = [("", mapping)], set[int]()
    while pending:
        field, value = pending.pop()
        yield field, value
        if not isinstance(value, Mapping | list) or id(value) in seen:
            continue
        seen.add(id(value))  # a YAML alias can make a value contain itself
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        pending += ((f"{field}.{key}" if field else f"{key}", item) for key, item in items)


def _require_uncut_values(items: list[tuple[object, object]], prefix: str, error: type[InvalidInput]) -> None:
    for at, (key, value) in enumerate(items):
        if not isinstance(value, str) or value.count("(") <= value.count(")"):
            continue
        parts = [value]
        for part, nothing in items[at + 1 :]:
            if nothing is not None:
                break
            parts.append(str(part))
        if len(parts) > 1:
            whole = ", ".join(parts)
            reason = "inside { }, YAML ends a value without quotes at a comma"
            raise error(f"{prefix}{key}", value, f'quotes around it: "{whole}"', reason)


def require_serialisable(mapping: object, error: type[InvalidInput]) -> None:
    """Raises `error` if a mapping contains, at any depth, a text or an integer that cannot be serialised.

    These are texts with an unpaired surrogate, and integers with more digits than Python converts to text.
    """
    for field, value in _nested(mapping):
        _require_scalar(value, field, error)
        for key in value if isinstance(value, Mapping) else ():
            _require_scalar(key, field, error)


def _require_scalar(value: object, field: str, error: type[InvalidInput]) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            shown = value.encode(errors="backslashreplace").decode()
            raise error(field, shown, "text in Unicode", "it contains an unpaired surrogate") from exc
    elif isinstance(value, int):
        try:
            str(value)
        except ValueError as exc:
            raise error(field, f"a number of {value.bit_length()} bits", "a number with fewer digits") from exc
