"""Checks of arguments that users pass to constructors and questions. All raise InvalidRequest."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgewater.base.errors import InvalidRecord, InvalidRequest
from edgewater.synopses.base import BoolArray, IntArray


def check_whole(name: str, value: object, low: int, high: int) -> int:
    """Returns a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(name, value, f"a whole number from {low} to {high}")
    return value


def check_power_of_two(name: str, value: object, low: int, high: int) -> int:
    """Returns a power of two from `low` to `high`."""
    number = check_whole(name, value, low, high)
    if number & (number - 1):
        raise InvalidRequest(name, value, f"a power of two from {low} to {high}")
    return number


def check_fraction(name: str, value: object, example: float = 0.01) -> float:
    """Returns a number between 0 and 1, both excluded."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise InvalidRequest(name, value, f"a number between 0 and 1, such as {example}")
    return float(value)


def check_confidence(value: object) -> float:
    """Returns the confidence of an interval, between 0 and 1, both excluded."""
    return check_fraction("confidence", value, 0.95)


def check_quantile(q: float) -> float:
    """Returns a quantile's rank from 0 to 1, both included."""
    if not 0 <= q <= 1:
        raise InvalidRequest("q", q, "a number from 0 to 1, such as 0.99")
    return q


def check_not_nan(name: str, value: float) -> float:
    """Returns a number, infinities included."""
    if value != value:
        raise InvalidRequest(name, value, "a number")
    return value


MAX_DENSE_BYTES = 2 << 30
"""Limit of the memory that a stack's states of fixed size take. A message may state many groups in few bytes."""


def check_dense(groups: int, group_bytes: int) -> None:
    """Checks that a decoded stack's states of fixed size fit into memory. Raises ValueError."""
    if groups > 1 and groups * group_bytes > MAX_DENSE_BYTES:
        raise ValueError(f"{groups} groups of {group_bytes} bytes, at most {MAX_DENSE_BYTES} altogether")


def whole_numbers(name: str, values: Any, present: BoolArray) -> IntArray:
    """Returns int64 numbers, one per value, at the places where `present` is true.

    Raises:
        InvalidRecord: a value is no such number, or the lengths differ.
    """
    numbers = np.asarray(values)
    if numbers.dtype.kind not in "iu" or numbers.shape != present.shape:
        accepted = f"{len(present)} whole numbers, one per value"
        raise InvalidRecord(name, f"{numbers.dtype}{numbers.shape}", accepted)
    present_numbers: IntArray = numbers.astype(np.int64)[present]
    return present_numbers
