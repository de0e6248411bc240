"""Decodes blocks of lines. A block may contain invalid lines.

Arrow decodes a whole block, or nothing of it. A block that fails is halved until the invalid lines are in small pieces.
Each line of such a piece is validated individually, which also gives better messages than Arrow's. A block of n lines
is parsed at most log2(n / PIECE_LINES) + 2 times, for any number of invalid lines. Whether a line is rejected does not
depend on the other lines of its block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

from edge.codecs.event_time import extract_event_times
from edge.codecs.schema import RecordSchema
from edge.records import Decoded, RejectionReason, Rejections

PIECE_LINES = 256  # limit: the lines that are decoded again to find an invalid one


class Undecodable(Exception):
    """The block cannot be decoded as a whole."""


class LineCodec(Protocol):
    """The codec of a text format with one record per line."""

    @property
    def schema(self) -> RecordSchema: ...

    def parse(self, data: bytes, rejections: Rejections) -> pa.Table:
        """Parses lines to one row for each line that is neither blank nor rejected, with the columns `schema.textual`.

        Raises:
            Undecodable: some line is invalid. Nothing has been added to `rejections`.
        """

    def reject_invalid(self, lines: list[bytes], rejections: Rejections) -> list[bytes]:
        """Returns the lines that `parse` may accept, some of them with other values (`RecordSchema.lenient`). Adds the
        other lines to `rejections`.
        """


def unlimited() -> None:
    """Allows any work. It is the default of `check`."""


class LineDecoder:
    """Decodes blocks of complete lines to batches.

    Args:
        check: called between pieces of work. It raises an exception to end the decoding.
    """

    def __init__(self, codec: LineCodec, check: Callable[[], None] = unlimited) -> None:
        self._codec = codec
        self._check = check

    @property
    def schema(self) -> RecordSchema:
        return self._codec.schema

    def decode(self, data: bytes, arrival_ms: int) -> Decoded:
        """Decodes the valid records of a block, in order, and collects the rejected records.

        Args:
            data: complete lines. The last line may lack its newline. Blank lines are skipped.
            arrival_ms: the time against which event times are validated (`EventTime.latest_ms`).
        """
        rejections = Rejections()
        table = self.parse(data, rejections)
        return extract_event_times(table, self.schema, arrival_ms, rejections)

    def parse(self, data: bytes, rejections: Rejections) -> pa.Table:
        """Returns the valid records of a block with the columns `schema.textual`. Does not examine event times."""
        self._check()
        try:
            return self._codec.parse(data, rejections)
        except Undecodable:
            lines = [line for line in data.split(b"\n") if line and not line.isspace()]
            tables = self._isolate(lines, rejections, known_bad=True)
            return pa.concat_tables(tables) if tables else self._codec.parse(b"", rejections)

    def _isolate(self, lines: list[bytes], rejections: Rejections, known_bad: bool = False) -> list[pa.Table]:
        self._check()
        if not known_bad:
            try:
                return [self._codec.parse(b"\n".join(lines), rejections)]
            except Undecodable as exc:
                if len(lines) == 1:
                    rejections.add(RejectionReason.MALFORMED, lines[0], str(exc))
                    return []
        if len(lines) <= PIECE_LINES:
            valid = self._codec.reject_invalid(lines, rejections)
            if not valid:
                return []
            if valid != lines or len(valid) == 1:
                return self._isolate(valid, rejections)
        middle = len(lines) // 2
        return self._isolate(lines[:middle], rejections) + self._isolate(lines[middle:], rejections)


def count_lines(data: bytes, expected: int) -> int:
    """Returns the number of lines that are not blank. If the number of newlines fits `expected`, blank lines are not
    searched.
    """
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    if lines == expected:
        return lines
    return sum(1 for line in data.split(b"\n") if line and not line.isspace())
