"""What a source hands to the agent: chunks of decoded records, and where they came from.

A replayable source gives each chunk the two positions it lies between. The journal stores only
those; `Source.reread` makes the very same batch of them again. So everything that the content of a
batch depends on has to be in the position, the arrival time included: it is the yardstick of
"later than possible".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

import pyarrow as pa

Position = dict[str, Any]
"""A place in a source: JSON-able, opaque to everybody but the source that made it."""

MAX_EXAMPLE_CHARACTERS = 200
MAX_CHUNK_ROWS = 65_536
BLOCK_BYTES = 1 << 22
DRAINED_BYTES = 1 << 16
"""Who has got less than this of what is still being written has reached its end: a pipe holds as much."""
GRAIN_S = 0.02
"""A moment that a source waits when it gets a little again and again. Without it every line would be a batch of its
own, whatever it costs, and a source that keeps up easily would never be seen to wait."""


class Reason(StrEnum):
    """Why records were refused."""

    MALFORMED = "malformed"
    WRONG_TYPE = "wrong-type"
    TIME_MISSING = "time-missing"
    TIME_UNPARSEABLE = "time-unparseable"
    TIME_OUT_OF_RANGE = "time-out-of-range"
    TOO_LONG = "too-long"
    # The rest are not single records: how many are lost cannot be known, so they count 1 each.
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    FILE_TRUNCATED = "file-truncated"
    FILE_GONE = "file-gone"


@dataclass(frozen=True, slots=True)
class Rejection:
    """Records refused for one reason.

    Attributes:
        reason: a `Reason`; a stable word that metrics count by.
        count: how many records.
        example: the first of them, or the value at fault, cut to `MAX_EXAMPLE_CHARACTERS`.
        message: what was wrong with the first, and what would be right.
    """

    reason: str
    count: int
    example: str
    message: str

    def to_json(self) -> dict[str, object]:
        return {"reason": self.reason, "count": self.count, "example": self.example, "message": self.message}


class Rejections:
    """Adds up rejections: one per reason, with the first example seen."""

    def __init__(self, initial: Iterable[Rejection] = ()) -> None:
        self._by_reason: dict[str, Rejection] = {}
        self.extend(initial)

    def add(self, reason: Reason, example: str | bytes, message: str, count: int = 1) -> None:
        if count:
            self.extend([Rejection(str(reason), count, shorten(example), message)])

    def extend(self, rejections: Iterable[Rejection]) -> None:
        for new in rejections:
            known = self._by_reason.get(new.reason)
            self._by_reason[new.reason] = new if known is None else replace(known, count=known.count + new.count)

    def as_tuple(self) -> tuple[Rejection, ...]:
        return tuple(self._by_reason.values())

    @property
    def count(self) -> int:
        return sum(r.count for r in self._by_reason.values())


def shorten(example: str | bytes) -> str:
    """An example as it may be shown and logged: one line of text, not too long."""
    head = example[: 4 * MAX_EXAMPLE_CHARACTERS]
    text = head.decode("utf-8", "backslashreplace") if isinstance(head, bytes) else head
    text = text.rstrip("\r\n")
    return text if len(text) <= MAX_EXAMPLE_CHARACTERS else text[: MAX_EXAMPLE_CHARACTERS - 1] + "…"


@dataclass(frozen=True, slots=True)
class Decoded:
    """The records of one block.

    Attributes:
        batch: the stream's columns in their declared types, then int64 `event_time_ms` without nulls.
    """

    batch: pa.RecordBatch
    rejected: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records on their way from a source into the core.

    Attributes:
        source: name of the source.
        batch: as `Decoded.batch`; may have no rows if there are only rejections.
        start: position before the first record; None for a source that cannot be read again.
        end: position behind the last; where reading goes on after a restart.
        nbytes: bytes of input, decompressed.
    """

    source: str
    batch: pa.RecordBatch
    start: Position | None
    end: Position | None
    rejected: tuple[Rejection, ...]
    nbytes: int

    def split(self, rows: int) -> tuple[Chunk, Chunk]:
        """The first `rows` records and the others, each with positions of its own.

        Args:
            rows: more than 0 and less than the number of rows.
        """
        total = self.batch.num_rows
        assert 0 < rows < total, f"{rows} of {total} rows"
        middle = None
        if self.start is not None and self.end is not None:
            middle = position_inside(self.start, self.end, rows)
        nbytes = self.nbytes * rows // total
        head = replace(self, batch=self.batch.slice(0, rows), end=middle, nbytes=nbytes)
        tail = replace(
            self, batch=self.batch.slice(rows), start=middle, rejected=(), nbytes=self.nbytes - nbytes
        )  # fmt: skip
        return head, tail


def position_inside(start: Position, end: Position, rows: int) -> Position:
    """The position `rows` records behind `start`, inside the block that `start` and `end` lie in.

    A position inside a block reads: the first `row` good records of the `block` units at `offset`.
    """
    if end.get("row"):
        return {**end, "row": start.get("row", 0) + rows}
    block = end["offset"] - start["offset"]
    return {**end, "offset": start["offset"], "block": block, "row": start.get("row", 0) + rows}


def split_rows(chunk: Chunk, rows: int = MAX_CHUNK_ROWS) -> list[Chunk]:
    """The chunk in pieces of at most `rows` records."""
    pieces = []
    while chunk.batch.num_rows > rows:
        head, chunk = chunk.split(rows)
        pieces.append(head)
    return [*pieces, chunk]


class Source(Protocol):
    """Where the records of a stream come from."""

    @property
    def name(self) -> str:
        """Unique in the agent, and the same after a restart: positions are stored under it."""

    @property
    def stream(self) -> str: ...

    @property
    def replayable(self) -> bool:
        """Whether chunks carry positions and `reread` works."""

    def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        """Everything from the position on (None: from the beginning), in order.

        Ends when the source ends; never, if it is followed.

        Raises:
            InvalidRecord: a file as a whole does not fit the stream, such as a missing column.
        """

    def reread(self, start: Position | None, end: Position) -> Chunk:
        """Exactly the chunk that was read between two positions. Blocking.

        Raises:
            StorageError: what was read is no longer there, or the source is not replayable.
        """
