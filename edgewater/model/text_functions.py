"""The text functions of expressions: their kernels on Arrow arrays and scalars, and their binding.

The result for a null is null. Regular expressions are matched by RE2, in time linear in the length of the text for
every pattern.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from edgewater.model.arithmetic import Value
from edgewater.model.binding import Binder, BoundExpression, Operator, inverted

MAX_PATTERN = 1_000
"""The largest length of a regular expression, in characters. It is small, because Arrow compiles the expression for
each batch.
"""
MAX_GROWTH = 64
"""The largest length of a text that an expression builds, as a multiple of the columns that the expression reads."""
MAX_ADDED_BYTES = 4_096
"""The largest number of bytes of literals in a text that an expression builds."""


class InvalidPattern(ValueError):
    """A regular expression is too long, or RE2 does not accept it. The message says why."""


def check_pattern(pattern: str, replacement: str = "") -> None:
    """Raises InvalidPattern if RE2 does not accept the pattern, or if the replacement refers to a missing group."""
    if len(pattern) > MAX_PATTERN:
        raise InvalidPattern(f"it has {len(pattern)} characters, at most {MAX_PATTERN} are accepted")
    try:
        pc.replace_substring_regex(pa.array(["x"]), pattern=pattern, replacement=replacement)
    except pa.ArrowInvalid as exc:
        raise InvalidPattern(str(exc)) from exc


def substring(text: Value, start: int, length: int | None) -> Value:
    """Returns up to `length` characters from the position `start`, which is 1 for the first character.

    As in PostgreSQL, positions before the first character count towards the length.
    """
    first = start - 1
    stop = None if length is None else max(first + length, 0)
    return pc.utf8_slice_codeunits(text, start=max(first, 0), stop=stop)


def left(text: Value, length: int) -> Value:
    """Returns the first `length` characters. A negative length is the number of characters to remove at the end."""
    return pc.utf8_slice_codeunits(text, start=0, stop=length)


def right(text: Value, length: int) -> Value:
    """Returns the last `length` characters. A negative length is the number of characters to remove at the start."""
    if length == 0:
        return pc.utf8_slice_codeunits(text, start=0, stop=0)
    return pc.utf8_slice_codeunits(text, start=-length)


def split_part(text: Value, delimiter: str, number: int) -> Value:
    """Divides a text at a delimiter, and returns part `number`; "" if there are fewer parts.

    Args:
        number: 1 for the first part, -1 for the last part.
    """
    if isinstance(text, pa.Scalar):
        return split_part(pa.array([text.as_py()], pa.string()), delimiter, number)[0]
    parts = pc.split_pattern(text, delimiter)
    offsets = np.asarray(parts.offsets)
    begins, ends = offsets[:-1], offsets[1:]
    at = begins + number - 1 if number > 0 else ends + number
    exists = (at >= begins) & (at < ends)
    chosen = pc.fill_null(parts.values.take(pa.array(at, mask=~exists)), "")
    return pc.if_else(pc.is_valid(text), chosen, pa.scalar(None, pa.string()))


def regexp_extract(text: Value, pattern: str, group: int) -> Value:
    """Returns the text of a group in the leftmost match of the pattern; null if there is no match.

    Args:
        group: number of the group; 0 for the whole match. If the group is not part of the match, the text is "".
    """
    # The replacement removes everything but the match. Group 1 of this pattern is the whole match.
    whole = rf"\A(?s:.*?)({pattern})(?s:.*)\z"
    rest = pc.replace_substring_regex(text, pattern=whole, replacement=rf"\{group + 1}", max_replacements=1)
    return pc.if_else(pc.match_substring_regex(text, pattern), rest, pa.scalar(None, pa.string()))


def check_group(pattern: str, group: int) -> None:
    """Raises InvalidPattern if `regexp_extract` does not accept these arguments."""
    check_pattern(pattern)
    check_pattern(f"({pattern})", rf"\{group + 1}")


def has_group(pattern: str) -> bool:
    """Returns whether a valid pattern has a capturing group."""
    try:
        check_pattern(pattern, r"\1")
    except InvalidPattern:
        return False
    return True


_STRING_FUNCTIONS: dict[type[exp.Expression], tuple[Callable[[Value], Value], pa.DataType]] = {
    exp.Lower: (pc.utf8_lower, pa.string()),
    exp.Upper: (pc.utf8_upper, pa.string()),
    exp.Trim: (pc.utf8_trim_whitespace, pa.string()),
    exp.Length: (lambda text: pc.cast(pc.utf8_length(text), pa.int64()), pa.int64()),
}
_TEXT_TESTS: dict[type[exp.Expression], Callable[[Value, str], Value]] = {
    exp.StartsWith: pc.starts_with,
    exp.EndsWith: pc.ends_with,
    exp.Contains: pc.match_substring,
    exp.RegexpLike: pc.match_substring_regex,
}


_BUILDS_TEXT = (exp.DPipe, exp.Concat, exp.Replace, exp.RegexpReplace)
READ_ONCE_PER_TEXT = (
    exp.Lower,
    exp.Upper,
    exp.Trim,
    exp.Like,
    exp.ILike,
    exp.Substring,
    exp.Left,
    exp.Right,
    exp.SplitPart,
    exp.RegexpExtract,
    *_TEXT_TESTS,
    *_BUILDS_TEXT,
)
"""Operators that take more time per text than finding the distinct texts of a batch."""


def _like(binder: Binder, node: exp.Binary) -> BoundExpression:
    text = binder.text(node.left)
    if not (isinstance(node.right, exp.Literal) and node.right.is_string):
        raise binder.error(node, "LIKE with a string literal as its pattern")
    pattern, folded = node.right.this, isinstance(node, exp.ILike)
    matched = BoundExpression(pa.bool_(), lambda b: pc.match_like(text.evaluate(b), pattern, ignore_case=folded))
    # Some sqlglot releases parse NOT LIKE into one node, others into two.
    return inverted(matched) if node.args.get("negate") else matched


def _string_function(binder: Binder, node: exp.Expression) -> BoundExpression:
    inner = binder.text(node.this)
    kernel, result = _STRING_FUNCTIONS[type(node)]
    return BoundExpression(result, lambda b: kernel(inner.evaluate(b)))


def _concatenation(binder: Binder, node: exp.DPipe | exp.Concat) -> BoundExpression:
    operands = node.expressions if isinstance(node, exp.Concat) else list(node.flatten(unnest=False))
    texts = [binder.as_text(operand) for operand in operands]
    _check_growth(binder, node)
    # As in PostgreSQL, concat leaves nulls out. With ||, one null makes the result null.
    nulls = {"null_handling": "replace", "null_replacement": ""} if isinstance(node, exp.Concat) else {}
    return BoundExpression(
        pa.string(), lambda b: pc.binary_join_element_wise(*(t.evaluate(b) for t in texts), "", **nulls)
    )


def _check_growth(binder: Binder, node: exp.Expression) -> None:
    times, added = _growth(node)
    if times > MAX_GROWTH or added > MAX_ADDED_BYTES:
        accepted = f"a text of at most {MAX_GROWTH} times its columns and {MAX_ADDED_BYTES} bytes of literals"
        raise binder.error(node, accepted)


def _substring(binder: Binder, node: exp.Substring) -> BoundExpression:
    text, usage = binder.text(node.this), "substring(text, start) or substring(text, start, length), in numbers"
    start = binder.whole_number(node.args.get("start"), node, usage)
    length = node.args.get("length")
    count = None if length is None else binder.whole_number(length, node, usage)
    if count is not None and count < 0:
        raise binder.error(node, usage, "the length is negative")
    return BoundExpression(pa.string(), lambda b: substring(text.evaluate(b), start, count))


def _end(binder: Binder, node: exp.Left | exp.Right) -> BoundExpression:
    text, count = (
        binder.text(node.this),
        binder.whole_number(node.expression, node, "a text and a number of characters"),
    )
    kernel = left if isinstance(node, exp.Left) else right
    return BoundExpression(pa.string(), lambda b: kernel(text.evaluate(b), count))


def _split_part(binder: Binder, node: exp.SplitPart) -> BoundExpression:
    text, usage = binder.text(node.this), "split_part(text, '/', 2), with a literal delimiter and number"
    delimiter = binder.text_literal(node.args.get("delimiter"), node, usage)
    number = binder.whole_number(node.args.get("part_index"), node, usage)
    if not delimiter or not number:
        raise binder.error(node, usage, "the delimiter is empty or the number 0")
    return BoundExpression(pa.string(), lambda b: split_part(text.evaluate(b), delimiter, number))


def _replace(binder: Binder, node: exp.Replace | exp.RegexpReplace) -> BoundExpression:
    text, usage = binder.text(node.this), "a text, a literal pattern and a literal replacement"
    pattern = binder.text_literal(node.expression, node, usage)
    replacement = binder.text_literal(node.args.get("replacement"), node, usage)
    _check_growth(binder, node)
    kernel = pc.replace_substring
    if isinstance(node, exp.RegexpReplace):
        _check_pattern(binder, lambda: check_pattern(pattern, replacement), node)
        kernel = pc.replace_substring_regex
    elif not pattern:
        raise binder.error(node, usage, "the pattern is empty")
    return BoundExpression(pa.string(), lambda b: kernel(text.evaluate(b), pattern=pattern, replacement=replacement))


def _text_test(binder: Binder, node: exp.Expression) -> BoundExpression:
    text, kernel = binder.text(node.this), _TEXT_TESTS[type(node)]
    pattern = binder.text_literal(node.args.get("expression"), node, "a text and a literal")
    if isinstance(node, exp.RegexpLike):
        _check_pattern(binder, lambda: check_pattern(pattern), node)
    return BoundExpression(pa.bool_(), lambda b: kernel(text.evaluate(b), pattern))


def _regexp_extract(binder: Binder, node: exp.RegexpExtract) -> BoundExpression:
    text, usage = binder.text(node.this), "regexp_extract(text, 'pattern') or with the number of a group"
    pattern = binder.text_literal(node.expression, node, usage)
    given = node.args.get("position")
    group = int(has_group(pattern)) if given is None else binder.whole_number(given, node, usage)
    if not 0 <= group <= 8:
        raise binder.error(node, "the number of a group from 0 to 8")
    _check_pattern(binder, lambda: check_group(pattern, group), node)
    return BoundExpression(pa.string(), lambda b: regexp_extract(text.evaluate(b), pattern, group))


def _check_pattern(binder: Binder, check: Callable[[], None], node: exp.Expression) -> None:
    try:
        check()
    except InvalidPattern as exc:
        accepted = "a regular expression of RE2, without references such as \\1 and without looking ahead or back"
        raise binder.error(node, accepted, str(exc)) from None


def _growth(node: exp.Expression) -> tuple[float, int]:
    """Returns an upper bound for the length of a text: a multiple of the columns' bytes, and the bytes of literals."""
    if isinstance(node, exp.Column):
        return 1.0, 0
    if isinstance(node, exp.Literal):
        return 0.0, len(node.name.encode())
    if isinstance(node, exp.Predicate | exp.Connector | exp.Not):
        return 0.0, 0
    if isinstance(node, exp.Replace | exp.RegexpReplace):
        times, added = _growth(node.this)
        factor = 1 + len(node.args["replacement"].name.encode())
        return times * factor, added * factor
    parts = [_growth(child) for child in node.iter_expressions()]
    return sum(times for times, _ in parts), sum(added for _, added in parts)


OPERATORS: tuple[Operator, ...] = (
    ((exp.Like, exp.ILike), _like, ("this", "expression", "negate")),
    (tuple(_STRING_FUNCTIONS), _string_function, ("this",)),
    ((exp.DPipe, exp.Concat), _concatenation, ("this", "expression", "expressions", "safe")),
    (exp.Substring, _substring, ("this", "start", "length")),
    ((exp.Left, exp.Right), _end, ("this", "expression")),
    (exp.SplitPart, _split_part, ("this", "delimiter", "part_index")),
    ((exp.Replace, exp.RegexpReplace), _replace, ("this", "expression", "replacement")),
    (tuple(_TEXT_TESTS), _text_test, ("this", "expression")),
    (exp.RegexpExtract, _regexp_extract, ("this", "expression", "position")),
)
