"""Decoding a block of lines when some of them are bad.

Arrow decodes a block as a whole or not at all. A block that fails is halved until the bad lines sit
in small pieces; there each line is looked at by itself, which also gives a better message than
Arrow's. A block of n lines, however many are bad, is parsed at most log2(n / PIECE_LINES) + 2 times.
A line is refused for itself alone, never for its neighbours: the same line has the same fate in any
block.
"""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa

from edge.codecs.event_time import decoded
from edge.codecs.schema import RecordSchema
from edge.records import Decoded, Reason, Rejections

PIECE_LINES = 256


class Undecodable(Exception):
    """A block that cannot be decoded as a whole."""


class LineCodec(Protocol):
    """A text format of one record a line."""

    @property
    def schema(self) -> RecordSchema: ...

    def parse(self, data: bytes, rejections: Rejections) -> pa.Table:
        """One row per line that is neither blank nor refused, with the columns `schema.textual`.

        Raises:
            Undecodable: some line is bad; nothing has been added to `rejections`.
        """

    def sift(self, lines: list[bytes], rejections: Rejections) -> list[bytes]:
        """`lines` without those that `parse` is certain to refuse; each is explained."""


class LineDecoder:
    """Turns blocks of whole lines into batches."""

    def __init__(self, codec: LineCodec) -> None:
        self._codec = codec

    @property
    def schema(self) -> RecordSchema:
        return self._codec.schema

    def decode(self, data: bytes, arrival_ms: int) -> Decoded:
        """All good records of a block, in order, and what was refused.

        Args:
            data: whole lines; the last may lack its newline. Blank lines are passed over.
            arrival_ms: against it event times are judged (`EventTime.latest_ms`).
        """
        rejections = Rejections()
        try:
            table = self._codec.parse(data, rejections)
        except Undecodable:
            lines = [line for line in data.split(b"\n") if line and not line.isspace()]
            tables = self._isolate(lines, rejections, known_bad=True)
            table = pa.concat_tables(tables) if tables else self._codec.parse(b"", rejections)
        return decoded(table, self.schema, arrival_ms, rejections)

    def _isolate(self, lines: list[bytes], rejections: Rejections, known_bad: bool = False) -> list[pa.Table]:
        if not known_bad:
            try:
                return [self._codec.parse(b"\n".join(lines), rejections)]
            except Undecodable as exc:
                if len(lines) == 1:
                    rejections.add(Reason.MALFORMED, lines[0], str(exc))
                    return []
        if len(lines) <= PIECE_LINES:
            good = self._codec.sift(lines, rejections)
            if not good:
                return []
            if len(good) < len(lines):
                return self._isolate(good, rejections)
            if len(good) == 1:
                return self._isolate(good, rejections)
        middle = len(lines) // 2
        return self._isolate(lines[:middle], rejections) + self._isolate(lines[middle:], rejections)


def count_lines(data: bytes, expected: int) -> int:
    """How many lines are not blank; counted exactly only if it is not the expected number at a glance."""
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    if lines == expected:
        return lines
    return sum(1 for line in data.split(b"\n") if line and not line.isspace())
