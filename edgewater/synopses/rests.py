"""Describes in a few numbers (`Rest`) the values of a measure that edges withhold, over all groups together.

The rest of a count, sum, extremum, mean or variance is exact. So the total over all groups is exact, too. The rest of
any other measure is the number of its records. This number bounds the total (`missing_records`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgewater.synopses.base import IntArray, Stack
from edgewater.synopses.exact.aggregates import (
    CountStack,
    ExtremumStack,
    FloatSumStack,
    IntegerMaxStack,
    IntegerMinStack,
    IntegerSumStack,
    MaxStack,
    MeanStack,
    MinStack,
    VarianceStack,
)
from edgewater.synopses.exact.float_sums import FloatSums
from edgewater.synopses.named_questions import merge_groups
from edgewater.wire import Rest

MAX_PARTS = 8
"""Maximum numbers of a rest that a reader accepts. Sums of floats of usual sizes have one to three."""
NOTHING = Rest()
_MAX_VALUES = 1 << 62  # format: of int64
_MAX_INTEGER = 1 << 120
"""Larger sums of integers are unknown: the sum over all edges has to fit into 128 bits."""
_BY_FUNCTION = {"sum": FloatSumStack, "mean": MeanStack, "var": VarianceStack}
_EXACT: frozenset[Any] = frozenset(
    {
        CountStack,
        IntegerSumStack,
        FloatSumStack,
        MeanStack,
        VarianceStack,
        MinStack,
        MaxStack,
        IntegerMinStack,
        IntegerMaxStack,
    }
)
FUNCTIONS = ("count", "sum", "min", "max", "mean", "var")
"""The functions whose rests are exact."""


def has_exact_rest(stack: Stack) -> bool:
    """Returns whether the rests of a measure are exact. False for a subclass, whose values may differ."""
    return type(stack) in _EXACT


def rest_of(stack: Stack, groups: IntArray, records: int) -> Rest | None:
    """Returns the rest of a measure; None: a few numbers do not represent it.

    Args:
        stack: the values that were not sent.
        groups: the groups with such values.
        records: number of records of these groups that were not sent.
    """
    if not has_exact_rest(stack):
        return Rest(records)
    return _as_numbers(merge_groups(stack.take(groups))) if len(groups) else NOTHING


def union_of_rests(function: str, rests: Sequence[Rest | None]) -> Rest | None:
    """Returns the rest of several edges and slices; None: one of the rests is unknown.

    Args:
        function: of the measure.
    """
    known = [rest for rest in rests if rest is not None]
    if len(known) < len(rests) or sum(rest.values for rest in known) > _MAX_VALUES:
        return None
    if len(known) == 1:
        return known[0]
    if function in ("min", "max"):
        return _extreme(known, max if function == "max" else min)
    kind = _BY_FUNCTION.get(function)
    values, parts = sum(rest.values for rest in known), [part for rest in known for part in rest.parts]
    if kind is None:
        return Rest(values)
    if kind is not VarianceStack and all(part.is_integer() and abs(part) < _MAX_INTEGER for part in parts):
        number = sum(map(int, parts))
        return Rest(values, _parts_of_number(number) if number else ())  # takes a hundredth of the time
    return _as_numbers(merge_groups(_from_numbers(kind(), known)))


def with_rest(stack: Stack, rest: Rest) -> Stack | None:
    """Returns the union of all groups of an exact stack and of a rest, as a stack of one group.

    Returns None if the rest is no value of the measure, such as a fraction in a sum of integers.
    """
    result = merge_groups(stack)
    added: Stack | None = _from_numbers(result, [rest])
    if added is None:
        return None
    result.merge(added, np.zeros(1, np.int64))
    return result


def _as_numbers(stack: Any) -> Rest | None:
    """Returns the only group of a stack as a rest; None: a few numbers do not represent it."""
    values = int(stack._view("n")[0])
    if isinstance(stack, CountStack):
        return Rest(values)
    if isinstance(stack, ExtremumStack):
        return Rest(1, _parts_of_number(stack._view("best")[0].item())) if values else NOTHING
    if isinstance(stack, IntegerSumStack):
        low, carry = stack.wide()
        number = (int(carry[0]) << 64) + int(low[0])
        return Rest(values, _parts_of_number(number) if number else ())
    parts = _parts_of_sum(stack._totals)
    if parts is None:
        return None
    return Rest(values, parts, float(stack._view("m2")[0]) if isinstance(stack, VarianceStack) else 0.0)


def _parts_of_sum(sums: FloatSums) -> tuple[float, ...] | None:
    if sums.odd is not None and sums.odd[0] != 0.0:
        return (float(sums.odd[0]),)
    parts = tuple(part for part in sums.parts[:, 0].tolist() if part)
    is_huge = sums.huge is not None and bool(sums.huge.parts[:, 0].any())
    return None if is_huge or len(parts) > MAX_PARTS else parts


def _parts_of_number(number: float) -> tuple[float, ...]:
    """Returns float64 numbers whose sum is a float64, or an integer of at most 128 bits; the largest first."""
    parts = [float(number)]
    while isinstance(number, int) and (number := number - int(parts[-1])):
        parts.append(float(number))
    return tuple(parts)


def _from_numbers(like: Any, rests: Sequence[Rest]) -> Any:
    """Returns a stack of the kind of `like` with a group for each rest; None: a rest is no value of this kind."""
    result = like.take(np.zeros(0, np.int64))
    result.grow(len(rests))
    result._view("n")[:] = [rest.values for rest in rests]
    counts = np.array([len(rest.parts) for rest in rests], np.int64)
    if isinstance(result, CountStack):
        return result
    if isinstance(result, IntegerSumStack | ExtremumStack):
        return result if _set_numbers(result, rests) else None
    result._totals.add_values(
        np.repeat(np.arange(len(rests)), counts), np.array([part for rest in rests for part in rest.parts]), counts
    )
    if isinstance(result, VarianceStack):
        result._view("m2")[:] = [rest.squares for rest in rests]
    return result


def _set_numbers(stack: Any, rests: Sequence[Rest]) -> bool:
    """Sets the integer sums, or the extrema, of the groups; returns whether all rests are such values."""
    is_float = isinstance(stack, ExtremumStack) and stack._view("best").dtype.kind == "f"
    for at, rest in enumerate(rests):
        if isinstance(stack, ExtremumStack) and not rest.values:
            continue
        number = _number(rest.parts, is_float=is_float)
        if number is None:
            return False
        if is_float:
            stack._view("best")[at] = number
        elif isinstance(stack, ExtremumStack):
            if not -(1 << 63) <= number < 1 << 63:
                return False
            stack._view("best")[at] = number
        else:
            low = (number + (1 << 63)) % (1 << 64) - (1 << 63)
            stack._view("sum")[at], stack._view("carry")[at] = low, (number - low) >> 64
    return True


def _number(parts: Sequence[float], *, is_float: bool) -> Any:
    """Returns the number with these parts: a float, or an integer; None: there is none of this type."""
    if is_float:
        return parts[0] if len(parts) == 1 else None
    if not all(math.isfinite(part) and part == int(part) for part in parts):
        return None
    number = sum(map(int, parts))
    return number if abs(number) < _MAX_INTEGER else None


def _extreme(rests: Sequence[Rest], better: Any) -> Rest:
    """Returns the best of extrema, or NaN if one of them is NaN.

    The first part of a number is the number rounded to float64. So tuples of parts compare like the numbers.
    """
    known = [rest for rest in rests if rest.values]
    odd = next((rest for rest in known if any(map(math.isnan, rest.parts))), None)
    padded = [rest.parts + (0.0,) * (MAX_PARTS - len(rest.parts)) for rest in known]
    return odd or (known[padded.index(better(padded))] if known else NOTHING)
