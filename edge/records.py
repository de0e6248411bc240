"""The interface between sources and the agent: chunks of decoded records with their positions.

A replayable source gives each chunk a start and an end position. The journal stores only the positions. `Source.reread`
returns the identical batch. So a position contains everything that determines the content of a batch, including the
arrival time, against which event times are validated.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edge.series import SeriesUpdate
from edgewater.base.errors import StorageError
from edgewater.base.streams import Delivery
from edgewater.wire import DropReason

IntArray = npt.NDArray[np.int64]
Position = dict[str, Any]
"""A place in a source. It is serialisable as JSON, and only the source that made it interprets it."""

MAX_EXAMPLE_CHARACTERS = 200  # limit: length of an example in messages
MAX_SPANS = 256
"""The largest number of time spans for the records of a block that were rejected for one reason."""
SPAN_UNITS_MS = (1, 1_000, 60_000, 3_600_000)  # format: units of time
"""Lengths of time spans for rejected records. A block uses the smallest length with at most `MAX_SPANS` spans."""
MAX_VALUES = 64
"""The largest number of values of the column `rejects.by` in the rejections of a block. Others are not told apart."""
MAX_CHUNK_ROWS = 65_536  # limit: memory of a batch
BLOCK_BYTES = 1 << 22  # limit: memory of a block
SHORT_READ_BYTES = 1 << 16  # format: capacity of a pipe
"""A read shorter than this (the capacity of a pipe) has reached the end of input that is still being written. After a
longer wait than `COALESCE_S`, the limit for a file grows in proportion to the wait.
"""
COALESCE_S = 0.02  # limit: the delay of a record in a source
"""The least time, in seconds, between two short reads of a source, so that their input is decoded together. Without it,
every line would become a batch, and a source would never be idle.
"""
CoalesceTime = Callable[[str, str], float]
"""Returns how long, in seconds, a source's next records may wait to be processed together. Takes stream and source."""


def shortest_wait(_stream: str, _source: str) -> float:
    """Returns the shortest wait. It is the default `CoalesceTime`."""
    return COALESCE_S


class RejectionReason(StrEnum):
    """The reason why records were rejected."""

    MALFORMED = "malformed"
    WRONG_TYPE = "wrong-type"
    TIME_MISSING = "time-missing"
    TIME_UNPARSEABLE = "time-unparseable"
    TIME_OUT_OF_RANGE = "time-out-of-range"
    TOO_LONG = "too-long"
    OTHER_CONSTANT = "other-constant"
    TOO_MANY_SERIES = "too-many-series"
    UNSUPPORTED = "unsupported"
    # The following reasons concern whole files. The number of lost records is unknown, so each file counts as 1.
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    FILE_TRUNCATED = "file-truncated"
    FILE_GONE = "file-gone"


ASSUMED = {
    DropReason.ASSUMED_COPY: "a file that begins like another file is a copy of it; these records do not count again",
    DropReason.ASSUMED_REPETITION: "a request or a message equal to an earlier one repeats it; it does not count again,"
    " and needs no guess if it has an Idempotency-Key",
    DropReason.FIRST_TOTAL: "the first total of a series does not count, because its increment is not known",
    DropReason.LATE_TOTAL: "a total that came after a later one does not count, because the later one includes it",
    DropReason.OVERLAPPING_TOTAL: "a total with another start, or after the end of its series, continues the series",
    DropReason.ASSUMED_RESET: "a smaller total than the last one begins the series anew; two senders of one series need"
    " a label, or an attribute such as service.instance.id, that tells them apart",
    DropReason.READ_AGAIN: "a file was replaced or overwritten; records with event times of its old content count, too",
    DropReason.DOUBLED_HOUR: "the clocks of time.zone show this time twice; it counts at the one nearer to its arrival",
}
"""What an edge assumes, by guess."""


def guesses(reason: DropReason, times_ms: IntArray, until_ms: IntArray | None = None) -> tuple[Rejection, ...]:
    """Returns the statement that records with these event times were counted, or left out, on a guess.

    Args:
        until_ms: as for `Rejections.add_times`.
    """
    counted = Rejections()
    counted.add(reason.label, "", ASSUMED[reason], len(times_ms))
    counted.add_times(reason.label, times_ms, until_ms)
    return counted.as_tuple()


@dataclass(frozen=True, slots=True)
class Rejection:
    """Records rejected for one reason.

    Attributes:
        reason: a `RejectionReason`, the stable label of metrics.
        count: number of records.
        example: the first rejected record, or its invalid value, cut to `MAX_EXAMPLE_CHARACTERS`.
        message: what was wrong with the first record, and what is accepted.
        spans: (from_ms, to_ms, records) for event times in [from_ms, to_ms). Records whose event times cannot be read
            are in no span.
        around: the first event time of the valid records in the same input, and the time after the last; None if there
            are none.
        only: the column `rejects.by` and its value in all of the records, as a JSON object; empty if it is not known.
    """

    reason: str
    count: int
    example: str
    message: str
    spans: tuple[tuple[int, int, int], ...] = ()
    around: tuple[int, int] | None = None
    only: str = ""

    def parts(self) -> Iterator[RejectedRecords]:
        """Yields the records by event time. Records whose event time cannot be read come last."""
        first = truncate_example(f"{self.only}: {self.message}") if self.only else ""
        for from_ms, to_ms, records in self.spans:
            yield RejectedRecords(self.reason, records, from_ms, to_ms, is_timed=True, only=self.only, first=first)
        untimed = self.count - sum(records for _, _, records in self.spans)
        if untimed:
            start_ms, end_ms = self.around or (None, None)
            yield RejectedRecords(self.reason, untimed, start_ms, end_ms, only=self.only, first=first)

    def to_json(self) -> dict[str, object]:
        only = {"only": json.loads(self.only)} if self.only else {}
        return {"reason": self.reason, "count": self.count, "example": self.example, "message": self.message, **only}


@dataclass(frozen=True, slots=True)
class RejectedRecords:
    """Rejected records of one input of a source, as the core counts them.

    Attributes:
        reason: a `RejectionReason`.
        from_ms, to_ms: the range [from_ms, to_ms) of the records' event times; None if unknown.
        is_timed: whether the event times have been read. If not, the range is from the valid records of the same input.
        only: as in `Rejection`.
        first: what was wrong with the first record; empty if `only` is.
    """

    reason: str
    records: int
    from_ms: int | None = None
    to_ms: int | None = None
    is_timed: bool = False
    only: str = ""
    first: str = ""


class Rejections:
    """Accumulates rejections: one entry per reason and value of the column `rejects.by`, with the first example."""

    def __init__(self, initial: Iterable[Rejection] = ()) -> None:
        self._entries: dict[tuple[str, str], Rejection] = {}
        self._spans: dict[tuple[str, str], list[IntArray]] = {}
        self._around: tuple[int, int] | None = None
        self.extend(initial)

    def add(self, reason: str, example: str | bytes, message: str, count: int = 1, only: str = "") -> None:
        if count:
            self.extend([Rejection(str(reason), count, truncate_example(example), message, only=only)])

    def extend(self, rejections: Iterable[Rejection]) -> None:
        for new in rejections:
            key = new.reason, self.told(new.reason, new.only)
            known = self._entries.get(key, replace(new, count=0, only=key[1]))
            self._entries[key] = replace(known, count=known.count + new.count)
            if new.spans:
                self._spans.setdefault(key, []).append(np.array(new.spans, np.int64))
            if new.around is not None:
                first, end = self._around or new.around
                self._around = min(first, new.around[0]), max(end, new.around[1])

    def add_times(self, reason: str, times_ms: IntArray, until_ms: IntArray | None = None, only: str = "") -> None:
        """Adds the event times of rejected records that have been added, as far as the times can be read.

        Args:
            until_ms: each record is in [times_ms, until_ms); None: at `times_ms`.
        """
        if len(times_ms):
            until_ms = times_ms + 1 if until_ms is None else until_ms
            each = np.stack([times_ms, until_ms, np.ones_like(times_ms)], axis=1)
            self._spans.setdefault((str(reason), self.told(reason, only)), []).append(each)

    def told(self, reason: str, only: str) -> str:
        """Returns `only`, or an empty text if there are too many values to tell records with this one apart."""
        is_known = (str(reason), only) in self._entries or len(self._entries) < MAX_VALUES
        return only if is_known else ""

    def place(self, earliest_ms: int, latest_ms: int, valid_ms: IntArray) -> None:
        """Removes implausible event times. Stores the range of the valid records' event times."""
        for key, parts in self._spans.items():
            kept = [p[(p[:, 1] > earliest_ms) & (p[:, 0] <= latest_ms)] for p in parts]
            for spans in kept:
                np.clip(spans[:, :2], earliest_ms, latest_ms + 1, out=spans[:, :2])
            self._spans[key] = kept
        if self._entries and len(valid_ms):
            self._around = int(valid_ms.min()), int(valid_ms.max()) + 1

    def as_tuple(self) -> tuple[Rejection, ...]:
        return tuple(
            replace(r, spans=_few_spans(self._spans.get(key, ())), around=self._around)
            for key, r in self._entries.items()
        )

    @property
    def count(self) -> int:
        return sum(r.count for r in self._entries.values())


def _few_spans(parts: Sequence[IntArray]) -> tuple[tuple[int, int, int], ...]:
    """Returns at most `MAX_SPANS` spans, ordered by time. If there are more, neighbouring spans are merged."""
    if not parts:
        return ()
    spans = np.concatenate(parts)
    spans = spans[np.lexsort((spans[:, 1], spans[:, 0]))]
    for unit_ms in SPAN_UNITS_MS:
        begins = np.flatnonzero(np.append(True, np.diff(spans[:, 0] // unit_ms) != 0)[: len(spans)])
        if len(begins) <= MAX_SPANS:
            break
    else:
        begins = np.arange(0, len(spans), -(-len(spans) // MAX_SPANS))
    if not len(begins):
        return ()
    first, end = spans[begins, 0], np.maximum.reduceat(spans[:, 1], begins)
    return tuple(zip(first.tolist(), end.tolist(), np.add.reduceat(spans[:, 2], begins).tolist(), strict=True))


def truncate_example(example: str | bytes) -> str:
    """Returns the example as one line of at most `MAX_EXAMPLE_CHARACTERS` characters, safe to log."""
    head = example[: 4 * MAX_EXAMPLE_CHARACTERS]
    text = head.decode("utf-8", "backslashreplace") if isinstance(head, bytes) else head
    text = text.rstrip("\r\n")
    return text if len(text) <= MAX_EXAMPLE_CHARACTERS else text[: MAX_EXAMPLE_CHARACTERS - 1] + "…"


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decoded records of one block.

    Attributes:
        batch: the stream's columns in their declared types, then int64 `event_time_ms` without nulls.
        rejected: the records that could not be decoded, by reason.
        skipped: numbers of valid values that are no records, by reason.
        guessed: the records that are counted or left out on a guess (`guesses`), by reason.
    """

    batch: pa.RecordBatch
    rejected: tuple[Rejection, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    guessed: tuple[Rejection, ...] = ()

    def part(self, rows: slice) -> Decoded:
        """Returns some records. What the block states besides them goes with its first record."""
        batch = self.batch[rows]
        return Decoded(batch) if rows.start else replace(self, batch=batch)


@dataclass(frozen=True, slots=True)
class PushId:
    """Identifies a pushed batch, so that the batch counts once even if its client sends it again.

    Attributes:
        key: digest of the parts that a repeated push has in common with the first push, 16 bytes.
        body: digest of the body, 16 bytes.
        shown: the client's key, for an error message; "" if the client gave none.
    """

    key: bytes
    body: bytes
    shown: str = field(default="", compare=False)

    @property
    def is_guess(self) -> bool:
        """Whether only the content of a batch identifies it, so that a repeated push may be a new batch."""
        return not self.shown

    def to_hex(self) -> str:
        return (self.key + self.body).hex()

    @classmethod
    def from_hex(cls, text: str) -> PushId:
        data = bytes.fromhex(text)
        return cls(data[:16], data[16:])


@dataclass(frozen=True, slots=True)
class Chunk:
    """A batch of records that a source passes to the core.

    Attributes:
        source: name of the source.
        batch: as `Decoded.batch`. It has no rows if there are only rejections.
        start: position before the first record; None if nothing reads from it again.
        end: position after the last record, from which reading continues after a restart; None if it never does.
        rejected: the rejected records of this input, by reason.
        nbytes: bytes of input, decompressed.
        losses: a `LossReason` for each loss of input before `end`. Only chunks without rows have losses.
        input_gone: whether the input of earlier chunks can no longer be read again, so that they should leave the
            journal.
        push: identity of a pushed batch; None if the batch is not pushed, or repeated batches are not recognised.
        series: the last points of the cumulative series of the records; None if there are none.
        keep: whether the journal stores the records as well as `end`, because the source may not deliver them again.
        opens: sources of the same stream that the agent reads from now on, such as new partitions of a topic. Sources
            that are read already are ignored.
        guessed: as in `Decoded`.
    """

    source: str
    batch: pa.RecordBatch
    start: Position | None
    end: Position | None
    rejected: tuple[Rejection, ...]
    nbytes: int
    losses: tuple[str, ...] = ()
    input_gone: bool = False
    push: PushId | None = None
    series: SeriesUpdate | None = None
    keep: bool = False
    opens: tuple[Source, ...] = ()
    guessed: tuple[Rejection, ...] = ()

    @property
    def rejected_records(self) -> tuple[RejectedRecords, ...]:
        """The rejected and the guessed records by event time, in the form of the core's events."""
        return tuple(part for each in (*self.rejected, *self.guessed) for part in each.parts())

    def split(self, rows: int) -> tuple[Chunk, Chunk]:
        """Returns the first `rows` records and the rest as two chunks, each with its own positions.

        Args:
            rows: greater than 0 and less than the number of rows.
        """
        total = self.batch.num_rows
        assert 0 < rows < total, f"{rows} of {total} rows"
        assert not self.keep, "a crash between the parts would count the first part again"
        middle = None
        if self.start is not None and self.end is not None:
            middle = position_inside(self.start, self.end, rows)
        nbytes = self.nbytes * rows // total
        head = replace(self, batch=self.batch.slice(0, rows), end=middle, nbytes=nbytes)
        tail = replace(
            self, batch=self.batch.slice(rows), start=middle, rejected=(), guessed=(), nbytes=self.nbytes - nbytes
        )
        return head, tail


def position_inside(start: Position, end: Position, rows: int) -> Position:
    """Returns the position `rows` records after `start`, inside the block that contains `start` and `end`.

    At a position inside a block, the first `row` valid records of the `block` units at `offset` have been read.
    """
    if end.get("row"):
        return {**end, "row": start.get("row", 0) + rows}
    block = end["offset"] - start["offset"]
    of_offset = ("tail", "digest")  # of the bytes before the offset
    before = {key: start[key] for key in of_offset if key in start}
    rest = {key: value for key, value in end.items() if key not in of_offset}
    return {**rest, **before, "offset": start["offset"], "block": block, "row": start.get("row", 0) + rows}


def split_rows(chunk: Chunk, rows: int = MAX_CHUNK_ROWS) -> list[Chunk]:
    """Splits a chunk into chunks of `rows` records. The last chunk may have up to 1.5 times as many records.

    A smaller last chunk would cost each query a fixed time.
    """
    pieces = []
    while 2 * chunk.batch.num_rows > 3 * rows:
        head, chunk = chunk.split(rows)
        pieces.append(head)
    return [*pieces, chunk]


class InputGone(StorageError):
    """Input can no longer be read again, because it was deleted, truncated or overwritten."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a source is behind the system that it reads. A figure is None if it is unknown.

    Attributes:
        messages: number of messages, or records, that the system has and the agent has not read.
        seconds: approximate age of the oldest unread message; 0 if there are none.
    """

    messages: int | None = None
    seconds: float | None = None

    @classmethod
    def of_all(cls, lags: Sequence[Lag]) -> Lag:
        """Returns the lag of several sources together. A figure is unknown if it is unknown for any source."""
        messages = [lag.messages for lag in lags if lag.messages is not None]
        seconds = [lag.seconds for lag in lags if lag.seconds is not None]
        is_known = bool(lags)
        return cls(
            sum(messages) if is_known and len(messages) == len(lags) else None,
            max(seconds) if is_known and len(seconds) == len(lags) else None,
        )


@runtime_checkable
class ReportsLag(Protocol):
    """A source that can report its lag."""

    def lag(self) -> Lag:
        """Returns the lag. The event loop calls it about once a second, so it must not block or send a request."""


class Source(Protocol):
    """An input of a stream.

    A source may also have `lag` (see `ReportsLag`), and an attribute `entry`, a text. Metrics and `edgewater edge top`
    show sources with the same entry together, under this text. Without it they show a source under its name.
    """

    @property
    def name(self) -> str:
        """The name of the source, unique in the agent and stable across restarts. Positions are stored under it."""

    @property
    def stream(self) -> str: ...

    @property
    def replayable(self) -> bool:
        """Whether `backfill` can read earlier records again, and `reread` can do so for chunks without `Chunk.keep`."""

    @property
    def delivery(self) -> Delivery:
        """How often a record counts if processes crash or connections are lost. Answers state it, so it must be true.

        For exactly-once, an intact journal is not enough. The source must recognise each record that it receives again.
        A record that the source has taken must be on disk, or be delivered to it again.
        """

    def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        """Yields all records after the position in order; from the beginning if it is None.

        The iterator ends when the source ends. A followed source never ends. After an exception, the agent calls
        `chunks` again.

        Raises:
            InvalidRecord: a whole file does not match the stream, for example because a column is missing.
            Exception: the source cannot be read at the moment. No other source is affected.
        """

    def committed(self, position: Position) -> None:
        """Called when all chunks with `keep` up to a position are on disk. Must not block."""

    def backfill(self, position: Position | None, until: Position, since_ms: int) -> AsyncGenerator[Chunk]:
        """Yields the records before `until` that can still be read, in any order.

        Args:
            position: the end of the last chunk of an earlier call; None for the beginning.
            until: a position that `chunks` has returned.
            since_ms: records with an earlier event time are not needed.

        Raises:
            InvalidRecord: as `chunks`.
            StorageError: the source is not replayable.
        """

    def reread(self, start: Position | None, end: Position) -> Chunk:
        """Returns the identical chunk that was read between two positions. Blocks.

        Raises:
            InputGone: the data no longer exists, or has changed.
            StorageError: the data cannot be read now, or the source is not replayable.
        """

    def fingerprints(self, position: Position, most: int) -> tuple[int, ...]:
        """Returns hashes below 2^62 of the input up to a position, at most `most`, ascending. Blocks.

        Sources with equal input return equal hashes, also at other edges. If no other source can read the same input,
        returns ().
        """


class UnrepeatableSource:
    """A base of sources that cannot read earlier records again.

    Attributes:
        gone: why not, as a clause of an error's message.
    """

    name: str
    replayable = False
    gone: str

    def committed(self, position: Position) -> None:
        """Does nothing (see `Source.committed`)."""

    def backfill(self, position: Position | None, until: Position, since_ms: int) -> AsyncGenerator[Chunk]:
        raise StorageError(f"{self.name}: {self.gone}")

    def reread(self, start: Position | None, end: Position) -> Chunk:
        raise StorageError(f"{self.name}: {self.gone}")

    def fingerprints(self, position: Position, most: int) -> tuple[int, ...]:
        return ()


def batch_to_bytes(batch: pa.RecordBatch) -> bytes:
    """Returns the records of a batch with their schema, as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def batch_from_bytes(data: bytes) -> pa.RecordBatch:
    """Reads the result of `batch_to_bytes`."""
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_next_batch()
