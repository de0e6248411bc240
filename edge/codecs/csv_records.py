"""Finds the records of CSV. A line break in quotes does not end a record (RFC 4180).

A quote opens a field only at the field's beginning, so a stray quote such as ``5" disk`` is text. A quote that opens a
field by mistake hides the lines after it, up to the next quote. The record is then invalid, and so are its lines. If it
is longer than `OPEN_BYTES`, only its first lines are rejected, and the next line begins a record.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from edge.records import IntArray, RejectionReason, Rejections
from edgewater.synopses import BoolArray

OPEN_BYTES = 64 << 10  # limit: the input that a quote without an end takes along
"""The largest size of the lines that are rejected because a quote is not closed, or is closed inside of a text."""
_LF, _CR, _QUOTE = b'\n\r"'
_OPEN = "a quote that is not closed; expected a closing quote before a delimiter or the end of a line"
_AFTER_QUOTE = "text after a closing quote, in a record with line breaks; expected a delimiter or the end of the record"
_LONE_CR = "a carriage return without a line feed; expected it in quotes only"


@dataclass(slots=True)
class _Layout:
    """The records in some bytes, which begin with a record.

    Attributes:
        ends: the offset after each record, with its line feed.
        inner: the offsets of line feeds in quotes.
        begins, closes: the offsets of opening quotes, and the offsets after closing quotes.
        cut: the offsets of the invalid records that end after `OPEN_BYTES`. `ends` has their ends.
    """

    ends: IntArray
    inner: IntArray
    begins: IntArray
    closes: IntArray
    cut: IntArray

    @property
    def is_open(self) -> bool:
        """Whether the last bytes are in quotes."""
        return len(self.closes) < len(self.begins)

    def inside(self, offsets: IntArray) -> BoolArray:
        """Returns a mask of the offsets that are in quotes."""
        ends = np.append(self.closes, np.iinfo(np.int64).max)
        at = np.searchsorted(self.begins, offsets, "right") - 1
        mask: BoolArray = (at >= 0) & (offsets < ends[at])
        return mask

    def before(self, offset: int) -> _Layout:
        """Returns the records before the begin of a record."""
        begins, ends = self.begins[self.begins < offset], self.ends[self.ends <= offset]
        return _Layout(ends, self.inner[self.inner < offset], begins, self.closes[: len(begins)], self.cut)


def _layout(data: bytes, delimiter: int, is_whole: bool = True) -> _Layout:
    """Returns the records in `data`. If `is_whole` is false, the rest of the last record may still come."""
    start, parts = 0, list[_Layout]()
    while True:
        part = _scanned(data, start, delimiter)
        found = _first_to_cut(part, start, data, delimiter, is_whole)
        if found is None:
            break
        begin, start = found
        part = part.before(begin)
        parts.append(_Layout(np.append(part.ends, start), part.inner, part.begins, part.closes, np.array([begin])))
    if not parts:
        return part
    return _Layout(*(np.concatenate([getattr(p, n) for p in (*parts, part)]) for n in _Layout.__slots__))


def _scanned(data: bytes, start: int, delimiter: int) -> _Layout:
    text = np.frombuffer(data, np.uint8)[start:]
    lines, quotes = np.flatnonzero(text == _LF), np.flatnonzero(text == _QUOTE)
    begins, closes = quotes[::2], quotes[1::2] + 1
    before = text[begins - 1]
    # A quote after a quote is an escaped quote, which closes the field and opens it again.
    if not ((before == delimiter) | (before == _LF) | (before == _QUOTE) | (begins == 0)).all():
        begins, closes = _fields(data[start:], delimiter)  # there are stray quotes
    layout = _Layout(lines, lines, begins, closes, np.zeros(0, np.int64))
    inside = layout.inside(lines)
    return _Layout(start + lines[~inside] + 1, start + lines[inside], start + begins, start + closes, layout.cut)


def _fields(data: bytes, delimiter: int) -> tuple[IntArray, IntArray]:
    """Returns the begins and the ends of the quoted fields. The last field may have no end."""
    pattern = rb'(?:\A|(?<=[\n%b]))"[^"]*(?:""[^"]*)*("|\Z)' % re.escape(bytes([delimiter]))
    found = list(re.finditer(pattern, data))
    ends = [match.end() for match in found if match[1]]
    return np.array([match.start() for match in found], np.int64), np.array(ends, np.int64)


def _wrong(layout: _Layout, data: bytes, delimiter: int) -> IntArray:
    """Returns the offsets of closing quotes after which the field does not end."""
    text = np.frombuffer(data + b"\n", np.uint8)
    after = text[layout.closes]
    is_right = (after == delimiter) | (after == _LF) | (after == _CR) | (after == _QUOTE)
    return np.asarray(layout.closes[~is_right] - 1)


def _first_to_cut(layout: _Layout, start: int, data: bytes, delimiter: int, is_whole: bool) -> tuple[int, int] | None:
    """Returns the begin of the first invalid record that is too long, and the end of its last line within the limit."""
    if not len(layout.inner):
        return None
    ends = np.append(layout.ends, len(data))  # the last record may not be complete
    begins = np.append(start, ends[:-1])
    wrong = np.searchsorted(ends, _wrong(layout, data, delimiter), "right")
    if layout.is_open and is_whole:
        wrong = np.append(wrong, len(ends) - 1)
    of = np.intersect1d(np.searchsorted(ends, layout.inner, "right"), wrong)
    of = of[(ends - begins)[of] > OPEN_BYTES]
    if not len(of):
        return None
    begin = int(begins[of[0]])
    lines = layout.inner[layout.inner >= begin]
    within = lines[lines < begin + OPEN_BYTES]
    return begin, int(within[-1] if len(within) else lines[0]) + 1


def records_end(data: bytes, is_full: bool, delimiter: str) -> int:
    """Returns the offset after the last record in bytes that begin with a record; 0 if there is no whole record.

    Args:
        is_full: whether a record that has not ended will not be read further.
    """
    if b'"' not in data:
        return data.rfind(b"\n") + 1
    ends = _layout(data, ord(delimiter), is_whole=False).ends
    if not len(ends) and is_full:
        ends = _layout(data, ord(delimiter)).ends
    return int(ends[-1]) if len(ends) else 0


def is_one_record(data: bytes, delimiter: str) -> bool:
    """Returns whether bytes without a last line feed are one record."""
    layout = _layout(data + b"\n", ord(delimiter))
    return len(layout.ends) == 1 and not len(layout.cut)


def whole_records(data: bytes, delimiter: str, rejections: Rejections) -> bytes:
    """Returns a block without blank and invalid records. Rejects the invalid records.

    A record is invalid if a quote stays open, or if a carriage return stands alone. So is a record with line breaks
    and text after a closing quote, because two parts of records look like this.
    """
    layout = _layout(data, ord(delimiter))
    text = np.frombuffer(data + b"\n", np.uint8)
    ends = layout.ends
    if not len(ends) or ends[-1] < len(data):
        ends = np.append(ends, len(data))
    begins = np.append(0, ends[:-1])
    kept = np.ones(len(ends), np.bool_)

    def record_of(offsets: IntArray) -> IntArray:
        return np.asarray(np.searchsorted(ends, offsets, "right"))

    def reject(records: IntArray, message: str) -> None:
        """Rejects records. Each line counts, because it may have been meant as a record."""
        new = np.unique(records)
        new = new[kept[new]]
        if len(new):
            kept[new] = False
            lines = np.flatnonzero(text == _LF)
            count = int((np.searchsorted(lines, ends[new]) - np.searchsorted(lines, begins[new])).sum())
            example = data[begins[new[0]] : ends[new[0]]].partition(b"\n")[0]
            rejections.add(
                RejectionReason.MALFORMED, example, message, count + int(new[-1] == len(ends) - 1 and is_cut)
            )

    is_cut = not data.endswith(b"\n")
    if (text[begins] <= ord(" ")).any():
        visible = np.cumsum((text > ord(" ")) | (text == ord(delimiter)), dtype=np.int32)
        kept &= visible[ends - 1] > np.append(0, visible[ends[:-1] - 1])
    opened = record_of(layout.cut)
    reject(np.append(opened, len(ends) - 1) if layout.is_open else opened, _OPEN)
    wrong = _wrong(layout, data, ord(delimiter))
    reject(np.intersect1d(record_of(layout.inner), record_of(wrong)), _AFTER_QUOTE)
    returns = np.flatnonzero(text == _CR)
    returns = returns[(text[returns + 1] != _LF) & (text[returns + 1] != _CR)]
    reject(record_of(returns[~layout.inside(returns)]), _LONE_CR)
    return data if kept.all() else text[:-1][np.repeat(kept, ends - begins)].tobytes()


def are_lines(data: bytes) -> bool:
    """Returns whether each line of a block without quotes is certainly a record, or has no byte."""
    text = np.frombuffer(data, np.uint8)
    if b"\r" in data and ((text[:-1] == _CR) & (text[1:] != _LF)).any():
        return False
    has_blanks = b" " in data or b"\t" in data
    return not has_blanks or (data[:1] > b" " and not ((text[:-1] == _LF) & (text[1:] <= ord(" "))).any())


def are_all_records(data: bytes, rows: int, delimiter: str) -> bool:
    """Returns whether a block with quotes, from which a parser has made `rows` rows, has one record on each line."""
    lines = int(np.count_nonzero(np.frombuffer(data, np.uint8) == _LF)) + (not data.endswith(b"\n"))
    return rows == lines and not _layout(data[data.rfind(b"\n", 0, -1) + 1 :], ord(delimiter)).is_open
