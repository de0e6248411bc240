"""Bounds as float64, for interfaces without other numbers. A bound is rounded outwards, so that it stays a bound."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Literal

LARGEST_EXACT = 2.0**53  # format: of float64
"""All integers up to this one are float64."""
LEAST_INT, GREATEST_INT = -(1 << 63), (1 << 63) - 1  # format: of int64
Side = Literal[-1, 0, 1]
"""The direction in which a number is rounded: -1 for a lower bound, 1 for an upper bound, 0 for an estimate."""
SIDES: tuple[Side, Side] = (-1, 1)  # format: of bounds


def side_of(column: str) -> Side:
    """Returns the side of a column of an answer's table. Columns of bounds end with ``_lower`` and ``_upper``."""
    return -1 if column.endswith("_lower") else 1 if column.endswith("_upper") else 0


def to_float(number: float | Decimal, side: Side) -> float:
    """Returns the nearest float64. A bound is rounded outwards."""
    try:
        nearest = float(number)
    except OverflowError:
        nearest = math.copysign(math.inf, number)
    if side and not math.isnan(nearest) and (nearest > number if side < 0 else nearest < number):
        return math.nextafter(nearest, side * math.inf)
    return nearest
