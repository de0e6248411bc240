"""Computes the text functions of expressions on Arrow arrays and scalars. The result for a null is null.

Regular expressions run on RE2. For every pattern, the time of a match is linear in the length of the text.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.model.arithmetic import Value

MAX_PATTERN = 1_000
"""Characters of a regular expression. Arrow compiles it for each batch."""


class InvalidPattern(ValueError):
    """RE2 does not accept a regular expression. The message says why."""


def check_pattern(pattern: str, replacement: str = "") -> None:
    """Raises InvalidPattern for a pattern or a replacement with a reference to a group that the pattern lacks."""
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
    """Returns the first `length` characters; a negative length leaves out as many at the end."""
    return pc.utf8_slice_codeunits(text, start=0, stop=length)


def right(text: Value, length: int) -> Value:
    """Returns the last `length` characters; a negative length leaves out as many at the begin."""
    if length == 0:
        return pc.utf8_slice_codeunits(text, start=0, stop=0)
    return pc.utf8_slice_codeunits(text, start=-length)


def split_part(text: Value, delimiter: str, number: int) -> Value:
    """Returns part `number` of a text divided at a delimiter; empty if there are fewer parts.

    Args:
        number: 1 for the first part, -1 for the last one.
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
    """Returns what a group of the leftmost match has matched; null without a match.

    Args:
        group: 0 for the whole match. A group without a part in the match gives the empty text.
    """
    # The match is the only thing that is left of the text. Group 1 of this pattern is the whole match.
    whole = rf"\A(?s:.*?)({pattern})(?s:.*)\z"
    rest = pc.replace_substring_regex(text, pattern=whole, replacement=rf"\{group + 1}", max_replacements=1)
    return pc.if_else(pc.match_substring_regex(text, pattern), rest, pa.scalar(None, pa.string()))


def check_group(pattern: str, group: int) -> None:
    """Raises InvalidPattern unless `regexp_extract` accepts these arguments."""
    check_pattern(pattern)
    check_pattern(f"({pattern})", rf"\{group + 1}")


def has_group(pattern: str) -> bool:
    """Returns whether a valid pattern has a group that captures."""
    try:
        check_pattern(pattern, r"\1")
    except InvalidPattern:
        return False
    return True
