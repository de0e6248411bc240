"""SQL arithmetic and casts on Arrow arrays, with null for undefined results.

Division by zero, integer overflow and the cast of a text that is not a number give null for the record. If a kernel
raised an exception, one bad record would reject the whole batch, and every replay would reject it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.base.float_bounds import GREATEST_INT, LEAST_INT

Value = Any  # pa.Array | pa.Scalar; pyarrow's own stubs cannot express the kernels' overloads
Kernel = Callable[[Value, Value], Value]

_INTEGER = r"^[+-]?\d+$"
_FLOAT = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_NINE, _BRACKET = ord("9"), ord("(")
_NOT_FINITE = r"^[+-]?(inf|infinity|nan)$"


def _where(condition: Value, value: Value) -> Value:
    """Returns `value` where the condition is true, otherwise null."""
    return pc.if_else(condition, value, pa.scalar(None, value.type))


def _or_null(checked: Kernel, wrapping: Kernel, fits: Callable[[Value, Value, Value], Value]) -> Kernel:
    """Returns a kernel that computes `checked`. If a value overflows, records with a wrong result become null.

    Args:
        wrapping: the same operation, which wraps on overflow.
        fits: returns where the wrapped result is right.
    """

    def kernel(left: Value, right: Value) -> Value:
        try:
            return checked(left, right)
        except pa.ArrowInvalid:
            result = wrapping(left, right)
            return _where(fits(left, right, result), result)

    return kernel


def _sum_fits(left: Value, right: Value, result: Value) -> Value:
    """Returns where a sum did not wrap.

    A sum wraps only if both operands have the same sign and the result has the other sign.
    """
    up = pc.and_(pc.greater(left, 0), pc.greater(right, 0))
    down = pc.and_(pc.less(left, 0), pc.less(right, 0))
    wrapped = pc.or_(pc.and_(up, pc.less(result, 0)), pc.and_(down, pc.greater_equal(result, 0)))
    return pc.invert(wrapped)


def _difference_fits(left: Value, right: Value, result: Value) -> Value:
    up = pc.and_(pc.greater_equal(left, 0), pc.less(right, 0))
    down = pc.and_(pc.less(left, 0), pc.greater(right, 0))
    wrapped = pc.or_(pc.and_(up, pc.less(result, 0)), pc.and_(down, pc.greater_equal(result, 0)))
    return pc.invert(wrapped)


def _product_fits(left: Value, right: Value, result: Value) -> Value:
    """Returns where a product did not wrap, by division. 0 and -1 are special cases, because division by them may
    fail.
    """
    special = pc.or_(pc.equal(left, 0), pc.equal(left, -1))
    divisor = pc.if_else(special, 1, left)
    negation = pc.or_(pc.equal(left, 0), pc.not_equal(right, LEAST_INT))
    return pc.if_else(special, negation, pc.equal(pc.divide(result, divisor), right))


add = _or_null(pc.add_checked, pc.add, _sum_fits)
subtract = _or_null(pc.subtract_checked, pc.subtract, _difference_fits)
multiply = _or_null(pc.multiply_checked, pc.multiply, _product_fits)


def divide(left: Value, right: Value) -> Value:
    """Returns the floating-point quotient; null for a divisor of 0."""
    divisor = to_float(right)
    return pc.divide(to_float(left), _where(pc.not_equal(divisor, 0.0), divisor))


def modulo(left: Value, right: Value) -> Value:
    """Returns the remainder with the sign of the dividend, exact for all numbers; null for a divisor of 0."""
    if not (pa.types.is_integer(left.type) and pa.types.is_integer(right.type)):
        dividend, divisor = to_float(left), to_float(right)
        has_result = pc.and_(pc.is_valid(dividend), pc.not_equal(divisor, 0.0))
        with np.errstate(invalid="ignore"):
            result = np.fmod(_numbers(dividend), _numbers(divisor))
        return _where(has_result, pa.scalar(float(result)) if result.ndim == 0 else pa.array(result))
    # x % -1 is 0, like x % 1. Division of the least integer by -1 would overflow.
    divisor = pc.if_else(pc.equal(right, -1), 1, _where(pc.not_equal(right, 0), right))
    return pc.subtract(left, pc.multiply(divisor, pc.divide(left, divisor)))


def _numbers(value: Value) -> npt.NDArray[np.float64]:
    """Returns floats, with NaN for null."""
    array = pa.array([value.as_py()], pa.float64()) if isinstance(value, pa.Scalar) else value
    numbers: npt.NDArray[np.float64] = array.to_numpy(zero_copy_only=False)
    return numbers[0] if isinstance(value, pa.Scalar) else numbers


def rounded(value: Value, decimals: int) -> Value:
    """Rounds floats to a number of decimals. A tie is rounded away from 0, as in Spark.

    A tie is a float whose shortest decimal notation ends in a 5 after the decimals, such as 2.675 for 2 decimals.
    """
    scale = 10.0**decimals
    size = pc.abs(value)
    below = pc.floor(pc.multiply(size, scale))
    # Both operands of each division are exact, so the result is the float that is nearest to the decimal.
    down = pc.divide(below, scale)
    is_up = pc.and_(pc.greater_equal(size, pc.divide(pc.add(below, 0.5), scale)), pc.not_equal(size, down))
    result = pc.if_else(is_up, pc.divide(pc.add(below, 1.0), scale), down)
    signed = pc.if_else(pc.less(value, 0.0), pc.subtract(0.0, result), result)
    # Larger floats have no decimals at this position. The comparison is false for NaN.
    return pc.if_else(pc.less(size, 2.0**52 / scale), signed, value)


def greatest(*values: Value) -> Value:
    """Returns the greatest value of each record. NaN is greater than all numbers, as in Spark; nulls are left out."""
    result = pc.max_element_wise(*values)
    if not pa.types.is_floating(result.type):
        return result
    for value in values:
        result = pc.if_else(pc.fill_null(pc.is_nan(value), False), math.nan, result)
    return result


def negate(value: Value) -> Value:
    return subtract(0, value) if pa.types.is_integer(value.type) else pc.negate(value)


def absolute(value: Value) -> Value:
    if not pa.types.is_integer(value.type):
        return pc.abs(value)
    return pc.abs(_where(pc.not_equal(value, LEAST_INT), value))


def to_float(value: Value) -> Value:
    """Casts numbers to float64. Integers beyond 2^53 are rounded."""
    return pc.cast(value, pa.float64(), safe=False)


def cast(value: Value, target: pa.DataType) -> Value:
    """Casts between the column types of a stream.

    Fractions are truncated. A value becomes null if the target type cannot represent it.
    """
    source = value.type
    if pa.types.is_string(source) and not pa.types.is_string(target):
        return parse(value, target)
    if pa.types.is_floating(source) and pa.types.is_integer(target):
        whole = pc.trunc(value)
        inside = pc.and_(pc.greater_equal(whole, -(2.0**63)), pc.less(whole, 2.0**63))
        return pc.cast(_where(inside, whole), target, safe=False)
    if pa.types.is_integer(source) and pa.types.is_floating(target):
        return to_float(value)
    return pc.cast(value, target)


def parse(text: Value, target: pa.DataType) -> Value:
    """Returns texts as numbers or booleans; null for a text that is no value of the type.

    All formats of text, lookups and CAST call this function, so they accept the same texts. White space around a value
    is ignored. An integer has decimal digits and an optional sign.
    A float may also have a fraction and an exponent, or be ``inf``, ``infinity`` or ``nan`` in any case.
    A boolean is ``true``, ``false``, 1 or 0, in any case.
    """
    if pa.types.is_boolean(target):
        lower = pc.utf8_lower(pc.utf8_trim_whitespace(text))
        return pc.cast(_where(pc.is_in(lower, pa.array(["true", "false", "1", "0"])), lower), target)
    if (plain := _cast_of_all(text, target)) is not None:
        return plain
    trimmed = pc.utf8_trim_whitespace(text)
    bare = pc.replace_substring_regex(trimmed, r"^\+", "")
    if pa.types.is_floating(target):
        number = pc.match_substring_regex(trimmed, _FLOAT)
        named = pc.match_substring_regex(trimmed, _NOT_FINITE, ignore_case=True)
        return pc.cast(_where(pc.or_(number, named), bare), target)
    return pc.cast(_where(pc.and_(pc.match_substring_regex(trimmed, _INTEGER), _is_int64(bare)), bare), target)


def _cast_of_all(text: Value, target: pa.DataType) -> pa.Array | None:
    """Returns the result of Arrow's faster cast; None if the cast might not give the result of `parse`.

    The cast accepts fewer texts than `parse`, except hexadecimal integers and ``nan(…)``. So integers with a letter and
    floats with a bracket are not cast here.
    """
    if not isinstance(text, pa.Array) or text.buffers()[2] is None:
        return None
    data = np.frombuffer(text.buffers()[2], np.uint8)
    if (data > _NINE).any() if pa.types.is_integer(target) else (data == _BRACKET).any():
        return None
    try:
        return text.cast(target)
    except pa.ArrowInvalid:
        return None


def _is_int64(text: Value) -> Value:
    """Returns where signed digits are in the range of int64. Compares digits as text."""
    negative = pc.starts_with(text, "-")
    digits = pc.utf8_ltrim(pc.replace_substring_regex(text, "^-", ""), "0")
    length = pc.binary_length(digits)
    limit = pc.if_else(negative, str(-LEAST_INT), str(GREATEST_INT))
    return pc.or_(pc.less(length, 19), pc.and_(pc.equal(length, 19), pc.less_equal(digits, limit)))
