"""Frames and their contents as domain types, with their conversion to and from protobuf."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any

import google_crc32c
import pyarrow as pa
from google.protobuf.message import DecodeError, Message

from edgewater.base.errors import CorruptFrame
from edgewater.base.nesting import Nesting, check_nesting
from edgewater.base.streams import COLUMN_TYPES, MAX_CONSTANT, Constant, is_constant
from edgewater.wire import uplink_pb2 as pb

MAX_BODY_BYTES = 64 << 20
"""Maximum bytes of a frame's body before compression that a reader accepts."""

_ZSTD_MIN_BLOCK, _ZSTD_MAX_BLOCK = 4, 128 << 10  # format: of zstd
"""A block of zstd takes at least 4 bytes, and is at most 128 KiB when it is decompressed (RFC 8878, 3.1.1.2)."""

_LEAST_COMPRESSED_BYTES = 256
"""Smaller bodies hardly become smaller if they are compressed alone."""

_WITHHELD = Nesting(packed=frozenset({10}))
_DROPPED = Nesting({5: _WITHHELD})
_BODY_NESTING = Nesting(
    {1: Nesting(), 2: Nesting({4: _WITHHELD}), 5: Nesting(), 6: Nesting(), 7: _DROPPED, 8: _DROPPED, 9: Nesting()}
)
MAX_MESSAGES = 1 << 16
"""Maximum messages in a body that a reader accepts: a third more than a center applies
(`edgewater.guard.frame_work`).
"""
_BYTES_PER_MESSAGE = 4  # limit: memory of nested messages
"""The shortest message, a close of a slice without records, contains the slice's start, which takes more bytes."""

MAX_ONLY = 8 * MAX_CONSTANT
"""The largest length of `DroppedRecords.only`, in characters. JSON escapes a character with at most six."""

RETRY_METADATA = "edgewater-retry-after-ms"
"""Key in the trailing metadata of a call that the center refuses for now: when the edge may connect again."""
CODE_METADATA = "edgewater-code"
"""Key in the trailing metadata of a session that the gateway refuses or ends: the code of the error."""

MIN_PROTOCOL, PROTOCOL = 1, 1  # format: versions of the protocol
"""The versions of the session's protocol that this release speaks."""
MAX_FRAMES = 512
"""Maximum frames of one message that a reader accepts."""
FRAME_OVERHEAD_BYTES = 64  # limit: length of a frame's fields
"""Upper bound of the bytes of a frame on the wire without its body and the query's name."""


class Signs(IntEnum):
    """The signs of an edge's values of a measure in a slice. The numbers are the numbers on the wire."""

    NOT_NEGATIVE = 0
    """No group is below 0, or the edge does not report signs."""
    NEGATIVE = 1
    """Some group is below 0, and none above."""
    BOTH = 2

    @classmethod
    def from_number(cls, number: int) -> Signs:
        """Returns the signs with this number. For an unknown number it returns BOTH, which excludes nothing."""
        return cls(number) if number in cls._value2member_map_ else cls.BOTH


@dataclass(frozen=True, slots=True)
class Rest:
    """The values of a measure that an edge did not send, over all groups together. It is exact.

    Attributes:
        values: number of values; of records for a count of records and for synopses.
        parts: float64 numbers whose exact sum is the sum of the values, or the extreme value; () for counts and
            synopses.
        squares: for a variance: the sum of the squared deviations of the values from their mean.
    """

    values: int = 0
    parts: tuple[float, ...] = ()
    squares: float = 0.0

    def to_state(self) -> list[Any]:
        """Returns the numbers; NaN and infinity as text, since JSON has no such numbers."""
        parts = [part if math.isfinite(part) else str(part) for part in (self.squares, *self.parts)]
        return [self.values, *parts]

    @classmethod
    def from_state(cls, value: Sequence[Any]) -> Rest:
        """Reads `to_json`."""
        values, squares, *parts = value
        return cls(values, tuple(map(float, parts)), float(squares))


@dataclass(frozen=True, slots=True)
class Withheld:
    """The amounts of a measure in a slice that an edge withheld, over all groups.

    Attributes:
        largest_above: by how much the true value of a group exceeds the sent value, at most; infinite: by an unknown
            amount.
        largest_below: by how much the true value of a group is below the sent value, at most, as a positive number.
        groups: number of groups with a withheld amount.
        largest_unsent: for a maximum: the largest value of the groups of which the edge sent nothing; None: there is
            none. It bounds the true maximum of any group at the center, whatever other edges sent.
        signs: for a sum of a query with a relative limit. Values of both signs may cancel at the center.
        above_share, below_share: for a query with a relative limit, the largest withheld amounts of a group, as
            fractions of the group's own value in the slice. For a measure without an error function, as fractions of
            its records. None: unknown.
        rest: the values that all groups together lack; None: unknown.
    """

    measure: str
    largest_above: float
    largest_below: float
    groups: int
    largest_unsent: float | None = None
    signs: Signs = Signs.NOT_NEGATIVE
    above_share: float | None = None
    below_share: float | None = None
    rest: Rest | None = None


@dataclass(frozen=True, slots=True)
class Partial:
    """The serialised synopsis of one (query, slice); the frame names the query."""

    slice_start_ms: int
    synopsis: bytes


@dataclass(frozen=True, slots=True)
class SliceClose:
    """An edge's counters of a slice. They are totals since the slice began: a newer close replaces an older one.

    Attributes:
        observed: records of the slice that passed `where`.
        late: observed records that arrived after the slice was closed.
        first_ms, last_ms: event times of the first and the last observed record; for session windows only, in every
            frame that contains records of the slice.
        provisional: whether the edge goes on sending values of the slice. `FrameBody.through_ms` does not include the
            slice yet, and `withheld` is what has not been sent so far.
    """

    slice_start_ms: int
    observed: int
    late: int
    withheld: tuple[Withheld, ...] = ()
    first_ms: int | None = None
    last_ms: int | None = None
    provisional: bool = False


class DropReason(IntEnum):
    """Why an edge did not count a record that it had read, or counted it late or on a guess.

    The numbers are the numbers on the wire.
    """

    COUNTED = -1
    """It was counted, after the close of its slice. It is in `FrameBody.late` only, and has no number on the wire."""
    TOO_LATE = 0
    """The lateness had passed at the edge."""
    OUT_OF_ORDER = 1
    """The slice was closed, and a measure accepts no late records."""
    MALFORMED = 2
    """This reason and the following ones up to OTHER_CONSTANT: a source rejected the record
    (`edge.records.RejectionReason`)."""
    WRONG_TYPE = 3
    TIME_MISSING = 4
    TIME_UNPARSEABLE = 5
    TIME_OUT_OF_RANGE = 6
    TOO_LONG = 7
    OTHER_CONSTANT = 8
    ASSUMED_COPY = 9
    """A file begins like another file, so its records are left out. The guesses from here to LATE_TOTAL may lack
    records."""
    ASSUMED_REPETITION = 10
    """A request or a message is equal to an earlier one, and nothing but its content identifies it."""
    FIRST_TOTAL = 11
    """The increment before the first total of a series is unknown."""
    LATE_TOTAL = 12
    """A total came after a later total of its series, which is assumed to include it."""
    OVERLAPPING_TOTAL = 13
    """A total has another start, but its interval overlaps the last one, so it is assumed to continue the series. The
    guesses from here on may count too much."""
    ASSUMED_RESET = 14
    """A total is smaller than the last one, so it is counted as a new beginning."""
    READ_AGAIN = 15
    """A file was replaced or overwritten, and its new content has event times of the old content."""
    DOUBLED_HOUR = 16
    """The clocks of a zone show the time twice, so the record may belong to an hour before or after."""

    @property
    def is_late(self) -> bool:
        """Whether the record came too late. Only of such a record the slice is known."""
        return self in (DropReason.TOO_LATE, DropReason.OUT_OF_ORDER)

    @property
    def is_rejection(self) -> bool:
        """Whether a source rejected the record."""
        return DropReason.MALFORMED <= self <= DropReason.OTHER_CONSTANT

    @property
    def is_guess(self) -> bool:
        """Whether the edge guessed. It takes the more probable case."""
        return self >= DropReason.ASSUMED_COPY

    @property
    def may_lack(self) -> bool:
        """Whether the answer may lack records, because the edge left them out or counted them in another window."""
        return self < DropReason.OVERLAPPING_TOTAL or self is DropReason.DOUBLED_HOUR

    @property
    def adds(self) -> bool:
        """Whether the edge counted the record with an assumed value, or once more, so the answer may have too much."""
        return self >= DropReason.OVERLAPPING_TOTAL

    @property
    def label(self) -> str:
        """The reason in metrics and answers."""
        return self.name.lower().replace("_", "-")

    @classmethod
    def from_number(cls, number: int) -> DropReason:
        """Returns the reason with this number; TOO_LATE for a number that a newer release has added."""
        return cls(number) if number >= 0 and number in cls._value2member_map_ else cls.TOO_LATE


REJECTIONS = {reason.label: reason for reason in DropReason if reason.is_rejection} | {
    "too-many-series": DropReason.MALFORMED,
    "unsupported": DropReason.MALFORMED,
}
"""The reasons of sources, by label. Some reasons have no number of their own on the wire."""
GUESSES = {reason.label: reason for reason in DropReason if reason.is_guess}
"""The guesses of edges, by label."""
UNCERTAIN = REJECTIONS | GUESSES
"""The reasons that make it uncertain which records a window has, by label."""


@dataclass(frozen=True, slots=True)
class DroppedRecords:
    """Records of a slice that came too late, that a source rejected, or that an edge counted or left out on a guess.

    Attributes:
        slice_start_ms: `MIN_TIME_MS` without `until_ms`: the slices are not known, because there were too many.
        until_ms: end of the last slice that may contain the records; it is not known which slices do. None: the records
            are in the slice that starts at `slice_start_ms`.
        amounts: of records that came late, per measure, by how much all of them together may move a value. An absent
            measure is unknown.
        only: of rejected records, a column of `group_by` with its value as a JSON object: the records can be in no
            other groups; empty: they may be in any group.
    """

    slice_start_ms: int
    reason: DropReason
    records: int
    until_ms: int | None = None
    amounts: tuple[Withheld, ...] = ()
    only: str = ""

    @property
    def kind(self) -> str:
        """The label of the reason, followed by `only`. `reason_of` separates them."""
        return self.reason.label + self.only


def reason_of(kind: str) -> tuple[str, str]:
    """Returns the label of the reason, and `only`, of `DroppedRecords.kind`."""
    label, brace, rest = kind.partition("{")
    return label, brace + rest


def groups_of(only: str) -> dict[str, Constant]:
    """Reads `DroppedRecords.only`. Returns an empty mapping, which stands for all groups, if it cannot be read."""
    try:
        values = json.loads(only) if 0 < len(only) <= MAX_ONLY else {}
    except (ValueError, RecursionError):
        return {}
    are_constants = isinstance(values, dict) and all(
        any(is_constant(value, kind) for kind in COLUMN_TYPES) for value in values.values()
    )
    return values if are_constants else {}


class SamplingReason(IntEnum):
    """Why an edge processes a sample of its records. The numbers are the numbers on the wire."""

    NONE = 0
    """It processes all records, or reports no reason."""
    MEASURE = 1
    """The measure is expensive."""
    PROCESSOR = 2
    """The edge's processor cannot keep up."""
    LINK = 3
    """The edge's link cannot keep up."""

    @classmethod
    def from_number(cls, number: int) -> SamplingReason:
        """Returns the reason with this number; NONE for a number that a newer release has added."""
        return cls(number) if number in cls._value2member_map_ else cls.NONE


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival statistics of the records at an edge, for a query with an accuracy.

    Attributes:
        through_ms: time by the stream's clock; all records that arrived before it are reported.
        substreams: the statistics, in encodings that `edgewater.arrivals.read_report` reads; they are additive.
        sampled: why some of these records were not processed, if any were not.
        unread: the sources may have more input, which the edge has not read.
    """

    through_ms: int
    substreams: tuple[bytes, ...] = ()
    sampled: SamplingReason = SamplingReason.NONE
    unread: bool = False


class LossReason(StrEnum):
    """Why input is or may be lost. A newer release may add reasons, so receivers treat them as text."""

    RESTART = "restart"
    """The agent restarted; its source cannot be read again."""
    FILE_GONE = "file-gone"
    """A file was deleted before its end was known to have been read."""
    FILE_TRUNCATED = "file-truncated"
    """A file was truncated or overwritten in place. Data that were appended shortly before may not have been read."""
    FILE_DAMAGED = "file-damaged"
    """A part of a file cannot be read, such as the rest of a damaged compressed file."""
    INPUT_GONE = "input-gone"
    """A broker no longer has messages that were not read."""
    JOURNAL_DAMAGED = "journal-damaged"
    """Records of the edge's journal are damaged."""
    BEFORE_QUERY = "before-query"
    """Records were read before the query was registered, and its edge does not read them again. They are records ahead
    of the clock or, of a query with `since`, records of sources that can no longer be read. They are lost to this query
    only."""
    QUERY_MEMORY = "query-memory"
    """The groups of the query's open windows need more memory than an edge gives the query. They are lost to this query
    only."""
    FRAME_DAMAGED = "frame-damaged"
    """The center cannot read a frame of the edge; stated by the center."""
    PARTIAL_REFUSED = "partial-refused"
    """The center cannot merge a partial of the edge; stated by the center."""


@dataclass(frozen=True, slots=True)
class InputLoss:
    """Records of one source of an edge that are, or may be, in none of its frames.

    Attributes:
        source: name of the source.
        reason: a `LossReason`, or one that a newer release has added.
        from_ms, to_ms: event times of the lost records, [from_ms, to_ms); None: unknown, no bound.
        records: number of lost records; None: unknown, possibly none.
    """

    source: str
    reason: str
    from_ms: int | None = None
    to_ms: int | None = None
    records: int | None = None

    def overlaps(self, begin_ms: int, end_ms: int) -> bool:
        """Returns whether a lost record may have an event time in [begin_ms, end_ms)."""
        return (self.from_ms is None or self.from_ms < end_ms) and (self.to_ms is None or begin_ms < self.to_ms)

    def union(self, other: InputLoss) -> InputLoss:
        """Returns a loss that covers both; source and reason are of this one."""
        return InputLoss(
            self.source,
            self.reason,
            None if self.from_ms is None or other.from_ms is None else min(self.from_ms, other.from_ms),
            None if self.to_ms is None or other.to_ms is None else max(self.to_ms, other.to_ms),
            None if self.records is None or other.records is None else self.records + other.records,
        )


@dataclass(frozen=True, slots=True)
class FrameBody:
    """Partials and closes of one query.

    Attributes:
        through_ms: the data of all slices that end at or before this event time has been shipped in this frame or
            an earlier one, or is stated as withheld. Never decreases.
        since_ms: event time from which the edge has all records; None: it has all records.
        arrivals: new arrival statistics, for a query with an accuracy.
        losses: input that is or may be lost, stated since the query's last frame.
        dropped: records not counted since the last frame; additive.
        late: records that came after the close of their slice and were counted, since the last frame; additive.
    """

    through_ms: int
    partials: tuple[Partial, ...] = ()
    closes: tuple[SliceClose, ...] = ()
    since_ms: int | None = None
    arrivals: Arrivals | None = None
    losses: tuple[InputLoss, ...] = ()
    dropped: tuple[DroppedRecords, ...] = ()
    late: tuple[DroppedRecords, ...] = ()


@dataclass(frozen=True, slots=True)
class QueryRef:
    """A query by name and version. A version is never reused for another spec with the same name."""

    name: str
    version: int


class Encoding(IntEnum):
    """Compression of a frame's body; the numbers are those on the wire."""

    PLAIN = 1
    ZSTD = 2


@dataclass(frozen=True, slots=True)
class Frame:
    """A numbered frame as it is sent: the body is encoded and possibly compressed.

    (edge, incarnation, seq) identifies a frame. `crc32c` covers the body before compression, so it distinguishes a
    re-delivery, whatever its compression, from another body with the same number, which raises an alarm.

    Attributes:
        shipped_bytes: its part of the message in which it came through a session's stream; 0: it did not.
    """

    seq: int
    query: QueryRef
    body: bytes = field(repr=False)
    crc32c: int = 0
    encoding: Encoding = Encoding.PLAIN
    raw_bytes: int = 0
    shipped_bytes: int = field(default=0, compare=False)

    @classmethod
    def pack(cls, seq: int, query: QueryRef, body: FrameBody) -> Frame:
        """Encodes a body. Its compression is cheap: it saves memory and disk, and sessions compress what they send."""
        plain = encode_body(body)
        return cls(seq, query, plain, google_crc32c.value(plain), raw_bytes=len(plain)).compressed()

    def compressed(self) -> Frame:
        """Returns the frame with a compressed body, or unchanged if that is not smaller. The body must be PLAIN."""
        if self.raw_bytes < _LEAST_COMPRESSED_BYTES:
            return self
        zstd = pa.compress(self.body, codec="zstd", asbytes=True)
        return self if len(zstd) >= self.raw_bytes else replace(self, body=zstd, encoding=Encoding.ZSTD)

    def plain(self) -> Frame:
        """Returns the frame with its body before compression. Raises CorruptFrame like `plain_body`."""
        return (
            self if self.encoding is Encoding.PLAIN else replace(self, body=self.plain_body(), encoding=Encoding.PLAIN)
        )

    def unpack(self) -> FrameBody:
        """Decodes the body. Raises CorruptFrame like `plain_body`, and for bytes that are not a FrameBody."""
        plain = self.plain_body()
        try:
            return body_from_wire(parse_body(plain)[0])
        except (DecodeError, ValueError) as exc:
            raise CorruptFrame(f"frame {self.seq}: the checksum holds but the body cannot be read: {exc}") from exc

    def plain_body(self) -> bytes:
        """Returns the encoded body before compression. Decompresses at most `raw_bytes`.

        Raises:
            CorruptFrame: the body is too long, cannot be decompressed, or its length or checksum does not match.
        """
        if self.raw_bytes > MAX_BODY_BYTES:
            raise CorruptFrame(f"frame {self.seq}: a body of {self.raw_bytes} bytes, at most {MAX_BODY_BYTES}")
        if (
            self.encoding is Encoding.ZSTD
            and self.raw_bytes > (1 + len(self.body) // _ZSTD_MIN_BLOCK) * _ZSTD_MAX_BLOCK
        ):
            raise CorruptFrame(f"frame {self.seq}: {len(self.body)} bytes cannot be a body of {self.raw_bytes} bytes")
        try:
            plain = self._decompressed()
        except (OSError, ValueError) as exc:
            raise CorruptFrame(f"frame {self.seq}: the body cannot be decompressed: {exc}") from exc
        if len(plain) != self.raw_bytes:
            raise CorruptFrame(f"frame {self.seq}: a body of {len(plain)} bytes, the frame says {self.raw_bytes}")
        actual = google_crc32c.value(plain)
        if actual != self.crc32c:
            raise CorruptFrame(f"frame {self.seq}: CRC32C is {actual:#010x}, the frame says {self.crc32c:#010x}")
        return plain

    def _decompressed(self) -> bytes:
        match self.encoding:
            case Encoding.PLAIN:
                return self.body
            case Encoding.ZSTD:
                plain: bytes = pa.decompress(self.body, decompressed_size=self.raw_bytes, codec="zstd", asbytes=True)
                return plain

    @property
    def wire_bytes(self) -> int:
        """Bytes on the wire with the protobuf and gRPC envelope: `shipped_bytes`, if they are known.

        Otherwise it is an upper bound for a frame outside a session's stream, exact to within a few bytes.
        """
        return self.shipped_bytes or len(self.body) + len(self.query.name) + FRAME_OVERHEAD_BYTES

    @property
    def plain_wire_bytes(self) -> int:
        """Upper bound of the bytes of the message before compression."""
        return self.raw_bytes + len(self.query.name) + FRAME_OVERHEAD_BYTES

    def to_wire(self) -> pb.Frame:
        return pb.Frame(
            seq=self.seq,
            crc32c=self.crc32c,
            encoding=pb.Frame.Encoding.ValueType(self.encoding),
            body=self.body,
            query=self.query.name,
            query_version=self.query.version,
            raw_bytes=self.raw_bytes,
        )

    @classmethod
    def from_wire(cls, message: pb.Frame) -> Frame:
        """Converts a message. Raises CorruptFrame for an unknown encoding. `plain_body` checks the body."""
        try:
            encoding = Encoding(message.encoding)
        except ValueError as exc:
            known = ", ".join(e.name for e in Encoding)
            raise CorruptFrame(f"frame {message.seq}: encoding {message.encoding} is none of {known}") from exc
        query = QueryRef(message.query, message.query_version)
        return cls(message.seq, query, message.body, message.crc32c, encoding, message.raw_bytes)


def encode_body(body: FrameBody) -> bytes:
    """Encodes a body; the frame's checksum covers these bytes. Equal bodies give equal bytes."""
    return body_to_wire(body).SerializeToString(deterministic=True)


def parse_body(plain: bytes) -> tuple[pb.FrameBody, int]:
    """Parses an encoded body of at most `MAX_MESSAGES`, which are counted first. Raises DecodeError, ValueError.

    Returns:
        The body, and the number of fields as in `check_nesting`.
    """
    fields = check_nesting(plain, _BODY_NESTING, _BYTES_PER_MESSAGE, depth=2, max_messages=MAX_MESSAGES)
    return pb.FrameBody.FromString(plain), fields


def body_to_wire(body: FrameBody) -> pb.FrameBody:
    return pb.FrameBody(
        partials=[pb.Partial(slice_start_ms=p.slice_start_ms, synopsis=p.synopsis) for p in body.partials],
        closes=list(map(close_to_wire, body.closes)),
        through_ms=body.through_ms,
        since_ms=body.since_ms,
        report=None if body.arrivals is None else arrivals_to_wire(body.arrivals),
        losses=[pb.InputLoss(**{name: getattr(loss, name) for name in _LOSS}) for loss in body.losses],
        dropped=list(map(_dropped_to_wire, body.dropped)),
        late=list(map(_dropped_to_wire, body.late)),
    )


def body_from_wire(message: pb.FrameBody) -> FrameBody:
    return FrameBody(
        message.through_ms,
        tuple(Partial(p.slice_start_ms, p.synopsis) for p in message.partials),
        tuple(map(close_from_wire, message.closes)),
        _given(message, "since_ms"),
        _arrivals_of(message),
        tuple(map(loss_from_wire, message.losses)),
        tuple(_dropped_from_wire(d, DropReason.from_number(d.reason)) for d in message.dropped),
        tuple(_dropped_from_wire(d, DropReason.COUNTED) for d in message.late),
    )


def _given(message: Message, field: str) -> Any:
    """Returns an optional field; None if it is absent."""
    return getattr(message, field) if message.HasField(field) else None


def _arrivals_of(message: pb.FrameBody) -> Arrivals | None:
    if message.HasField("report"):
        return arrivals_from_wire(message.report)
    return arrivals_from_wire(message.arrivals) if message.HasField("arrivals") else None


def _dropped_to_wire(d: DroppedRecords) -> pb.DroppedRecords:
    return pb.DroppedRecords(
        slice_start_ms=d.slice_start_ms,
        reason=pb.DroppedRecords.Reason.ValueType(max(d.reason, 0)),
        records=d.records,
        until_ms=d.until_ms,
        amounts=list(map(_withheld_to_wire, d.amounts)),
        only=d.only,
    )


def _dropped_from_wire(d: pb.DroppedRecords, reason: DropReason) -> DroppedRecords:
    amounts = tuple(map(_withheld_from_wire, d.amounts))
    return DroppedRecords(d.slice_start_ms, reason, d.records, _given(d, "until_ms"), amounts, d.only)


_LOSS = "source", "reason", "from_ms", "to_ms", "records"


def loss_from_wire(m: pb.InputLoss) -> InputLoss:
    return InputLoss(m.source, m.reason, *(_given(m, name) for name in ("from_ms", "to_ms", "records")))


def arrivals_to_wire(arrivals: Arrivals) -> pb.Arrivals:
    sampled = pb.Sampling.Reason.ValueType(arrivals.sampled)
    return pb.Arrivals(
        through_ms=arrivals.through_ms, substreams=arrivals.substreams, sampled=sampled, unread=arrivals.unread
    )


def arrivals_from_wire(m: pb.Arrivals) -> Arrivals:
    return Arrivals(m.through_ms, tuple(m.substreams), SamplingReason.from_number(m.sampled), m.unread)


def close_to_wire(close: SliceClose) -> pb.SliceClose:
    return pb.SliceClose(
        slice_start_ms=close.slice_start_ms,
        observed=close.observed,
        late=close.late,
        withheld=list(map(_withheld_to_wire, close.withheld)),
        first_ms=close.first_ms,
        last_ms=close.last_ms,
        provisional=close.provisional,
    )


def close_from_wire(m: pb.SliceClose) -> SliceClose:
    withheld = tuple(map(_withheld_from_wire, m.withheld))
    extent = _given(m, "first_ms"), _given(m, "last_ms")
    return SliceClose(m.slice_start_ms, m.observed, m.late, withheld, *extent, m.provisional)


def _withheld_to_wire(w: Withheld) -> pb.Withheld:
    return pb.Withheld(
        measure=w.measure,
        largest_above=w.largest_above,
        largest_below=w.largest_below,
        groups=w.groups,
        largest_unsent=w.largest_unsent,
        signs=int(w.signs),  # type: ignore[arg-type]
        above_share=w.above_share,
        below_share=w.below_share,
        rest_values=None if w.rest is None else w.rest.values,
        rest_parts=None if w.rest is None else w.rest.parts,
        rest_squares=0.0 if w.rest is None else w.rest.squares,
    )


def _withheld_from_wire(m: pb.Withheld) -> Withheld:
    rest = Rest(m.rest_values, tuple(m.rest_parts), m.rest_squares) if m.HasField("rest_values") else None
    bounds, signs = (m.measure, m.largest_above, m.largest_below, m.groups), Signs.from_number(m.signs)
    shares = _given(m, "above_share"), _given(m, "below_share")
    return Withheld(*bounds, _given(m, "largest_unsent"), signs, *shares, rest)
