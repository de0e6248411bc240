"""Sums of int64 that never wrap: a low word of 64 bits, and how many times 2^64 are to be added to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgewater.synopses.base import FloatArray, IntArray

_HALF = 32
_ROWS = 1 << 20  # whose lower halves add up to less than 2^53

Wide = tuple[IntArray, IntArray]
"""Low word and carry per group: ``low + carry * 2^64``, with low in [-2^63, 2^63)."""


def summed(codes: IntArray, values: npt.NDArray[Any], groups: int) -> Wide:
    """Per group the exact sum of its values."""
    low, carry = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    for at in range(0, len(values), _ROWS):
        # bincount sums in float64, which is exact below 2^53 only: two halves are exact.
        part, of = values[at : at + _ROWS], codes[at : at + _ROWS]
        lower = np.bincount(of, part & 0xFFFFFFFF, groups).astype(np.int64)
        upper = np.bincount(of, part >> _HALF, groups).astype(np.int64) + (lower >> _HALF)
        # From here on in words of 64 bits: the upper half's own upper half, rounded, is carried.
        wraps = (upper + (1 << (_HALF - 1))) >> _HALF
        add(low, carry, ((upper - (wraps << _HALF)) << _HALF) | (lower & 0xFFFFFFFF), wraps)
    return low, carry


def add(low: IntArray, carry: IntArray, other_low: IntArray, other_carry: IntArray, at: Any = slice(None)) -> None:
    """Adds in place, at distinct positions `at`."""
    held = low[at]
    total = held + other_low  # arrays wrap around silently
    # It wrapped where both have one sign and the sum has the other: down by 2^64 if they are positive.
    wrapped = ((held ^ total) & (other_low ^ total)) < 0
    low[at] = total
    carry[at] += other_carry + np.where(wrapped, np.where(total < 0, 1, -1), 0)


def as_float(low: IntArray, carry: IntArray) -> FloatArray:
    """The sums as float64: the nearest one while the carry is 0, and within one unit in the last place if not."""
    return np.asarray(low + carry * 2.0**64, np.float64)
