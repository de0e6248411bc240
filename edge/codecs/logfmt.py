"""Splits lines of logfmt, such as ``level=info msg="a text" took_ms=12``, all lines of a block at once.

Fields are separated by white space outside of quotes. A key without a value is a flag, whose value is ``true``. In
quotes, a backslash escapes the next character; ``\\n`` and ``\\t`` are a line feed and a tab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.synopses import BoolArray, IntArray

_QUOTE, _BACKSLASH, _EQUALS = ord('"'), ord("\\"), ord("=")
_ESCAPES = (("\\\\", "\n0"), ('\\"', '"'), ("\\n", "\n1"), ("\\t", "\t"), ("\\r", "\r"), ("\n0", "\\"), ("\n1", "\n"))
"""Replacements, in this order. A line has no line feed, so a line feed marks a part that is replaced twice."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The fields of all lines. All arrays but `text` have one entry per field.

    Attributes:
        text: the bytes of all lines, each line with a line feed at its end.
        lines: number of the field's line.
        begins, key_ends, ends: offsets of the field in `text`. For a flag, `key_ends` equals `ends`.
    """

    text: npt.NDArray[np.uint8]
    lines: IntArray
    begins: IntArray
    key_ends: IntArray
    ends: IntArray


def logfmt_fields(lines: pa.Array, columns: Sequence[str]) -> tuple[BoolArray, dict[str, pa.Array]]:
    """Returns a mask of the well-formed lines, and the texts of each column; null where a line lacks the key.

    A line is malformed if a quote is not closed, a key is empty, a key among `columns` occurs twice, or no key has a
    value.
    """
    count = len(lines)
    text, ends = _text_of(lines)
    quotes = _quotes(text)
    per_line = np.diff(np.concatenate([[0], np.cumsum(quotes, dtype=np.int64)[ends]]))
    valid = per_line % 2 == 0
    quotes[ends[~valid]] = (
        True  # the end of a line closes an open quote, so that the quote does not reach into the next line
    )
    tokens = _tokens(text, ends, quotes)
    has_value = tokens.key_ends < tokens.ends
    valid &= np.bincount(tokens.lines[has_value], minlength=count) > 0
    valid[tokens.lines[tokens.key_ends == tokens.begins]] = False
    texts = {}
    for name in columns:
        at = _of_key(tokens, name.encode())
        rows = tokens.lines[at]
        first = np.append(True, rows[1:] != rows[:-1]) if len(rows) else np.zeros(0, np.bool_)
        valid[rows[~first]] = False
        texts[name] = _values(tokens, at[first], count)
    return valid, texts


def _text_of(lines: pa.Array) -> tuple[npt.NDArray[np.uint8], IntArray]:
    """Returns the bytes of the lines with a line feed after each line, and the offsets of the line feeds."""
    joined = pc.binary_join_element_wise(lines, "", "\n")
    offsets = np.frombuffer(joined.buffers()[1], np.int32)[joined.offset : joined.offset + len(joined) + 1]
    text = np.frombuffer(joined.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    return text, offsets[1:].astype(np.int64) - offsets[0] - 1


def _quotes(text: npt.NDArray[np.uint8]) -> BoolArray:
    """Returns a mask of the quotes that are not escaped."""
    quotes: BoolArray = text == _QUOTE
    escapes = text == _BACKSLASH
    if escapes.any():
        places = np.arange(len(text))
        last_other = np.maximum.accumulate(np.where(escapes, -1, places))
        at = np.flatnonzero(quotes[1:] & escapes[:-1]) + 1
        quotes[at] = (at - 1 - last_other[at - 1]) % 2 == 0
    return quotes


def _tokens(text: npt.NDArray[np.uint8], ends: IntArray, quotes: BoolArray) -> _Tokens:
    outside = np.cumsum(quotes, dtype=np.int32) % 2 == 0
    separators = (text <= ord(" ")) & outside
    edges = np.flatnonzero(np.diff(separators, prepend=True, append=True))
    begins, token_ends = edges[::2], edges[1::2]
    equals = np.append(np.flatnonzero((text == _EQUALS) & outside), len(text))
    key_ends = np.minimum(equals[np.searchsorted(equals, begins)], token_ends)
    return _Tokens(text, np.searchsorted(ends, begins), begins, key_ends, token_ends)


def _of_key(tokens: _Tokens, key: bytes) -> IntArray:
    """Returns the indices of the fields with this key, ascending."""
    at = np.flatnonzero(tokens.key_ends - tokens.begins == len(key))
    for place, byte in enumerate(key):
        at = at[tokens.text[tokens.begins[at] + place] == byte]
    return at


def _values(tokens: _Tokens, at: IntArray, count: int) -> pa.Array:
    """Returns the values of fields as `count` rows, one row per line; null for a line without a field in `at`."""
    ends = tokens.ends[at]
    begins = np.minimum(tokens.key_ends[at] + 1, ends)
    is_flag = tokens.key_ends[at] == ends
    last = np.maximum(ends - 1, 0)
    quoted = (ends - begins >= 2) & (tokens.text[np.minimum(begins, last)] == _QUOTE) & (tokens.text[last] == _QUOTE)
    begins, ends = begins + quoted, ends - quoted
    lengths = np.zeros(count, np.int64)
    lengths[tokens.lines[at]] = ends - begins
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    places = np.arange(offsets[-1]) + np.repeat(begins - offsets[tokens.lines[at]], ends - begins)
    has_key = np.zeros(count, np.bool_)
    has_key[tokens.lines[at]] = True
    data = pa.py_buffer(np.ascontiguousarray(tokens.text[places]))
    texts = pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets.astype(np.int32)), data])
    texts = pc.if_else(pa.array(has_key), texts, pa.scalar(None, pa.string()))
    if is_flag.any():
        flags = np.zeros(count, np.bool_)
        flags[tokens.lines[at[is_flag]]] = True
        texts = pc.if_else(pa.array(flags), "true", texts)
    if (tokens.text[places] == _BACKSLASH).any():
        unescaped, in_quotes = texts, np.zeros(count, np.bool_)
        in_quotes[tokens.lines[at[quoted]]] = True
        for escape, plain in _ESCAPES:
            unescaped = pc.replace_substring(unescaped, escape, plain)
        texts = pc.if_else(pa.array(in_quotes), unescaped, texts)
    return texts
