"""The interface of receivers. A kind of source implements it to receive requests with records.

`edge.sources.receiving` authorises a request, reserves memory, and reads and decompresses the body. A receiver names
the sources that the request feeds, decodes the body, and renders the replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starlette.responses import Response

from edge.codecs.schema import RecordSchema
from edge.records import Chunk, Decoded, Position, Rejection, UnrepeatableSource
from edge.series import SeriesMemory, SeriesUpdate
from edge.utilization import ActivityMarker, no_marker
from edgewater.base.streams import Delivery

LOOK_S = 0.25  # limit: how late an idle source is noticed
"""The interval, in seconds, at which a source without requests is recorded as having nothing to read."""

Decompress = Callable[[bytes, int], bytes]
"""Returns the decompressed body. The arguments are the body and the limit in bytes.

Raises BodyTooLarge before more than `limit` bytes are in memory, and InvalidRecord for data that cannot be
decompressed.
"""


class BodyTooLarge(Exception):
    """The body exceeds the size limit, as sent or decompressed."""


class BodyTooCostly(Exception):
    """Decoding the body took more CPU time than allowed."""


class Refused(Exception):
    """A request is refused.

    Args:
        status: the HTTP status.
        code: a stable label of the reason.
        retry_after_s: the time after which the client should repeat the request; None if it should not.
        headers: further headers of the reply.
        members: further members of the reply's body, if the body is JSON.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
        members: Mapping[str, object] | None = None,
    ) -> None:
        self.status, self.code, self.detail, self.retry_after_s = status, code, detail, retry_after_s
        self.headers, self.members = dict(headers or {}), dict(members or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class Request:
    """A request without its body.

    Attributes:
        media: the media type in lower case, without parameters; "" if the client sent none.
        headers: the headers, by name in lower case.
        parameters: the parameters of the path.
    """

    media: str
    headers: Mapping[str, str]
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Body:
    """A decompressed body, and the limits of decoding it.

    Attributes:
        arrival_ms: wall time at which the body arrived.
        limit_bytes: the largest size of a body. The records may need `MAX_EXPANSION` times as much memory.
        check: raises BodyTooCostly when the CPU time is used up. Decoders call it between small pieces of work.
    """

    plain: bytes
    arrival_ms: int
    limit_bytes: int
    check: Callable[[], None]


MAX_EXPANSION = 16
"""The largest size of decoded columns, as a multiple of the largest size of a body."""


class PushedSource(UnrepeatableSource):
    """A `Source` whose records arrive in requests. `chunks` yields no records and never ends.

    A request is acknowledged when the journal has its records. If the client repeats an unacknowledged request
    unchanged, each record therefore counts exactly once.

    Attributes:
        knows_bodies: whether a request without an `Idempotency-Key` is recognised by its body, so that it does not
            count again.
        delivery: exactly once if `knows_bodies`, otherwise at least once.
    """

    gone = "pushed records cannot be read again; they are in the journal"

    def __init__(
        self,
        name: str,
        stream: str,
        schema: RecordSchema,
        idle: ActivityMarker = no_marker,
        *,
        knows_bodies: bool = True,
    ) -> None:
        self.name = name
        self.stream = stream
        self.schema = schema
        self.knows_bodies = knows_bodies
        self.delivery = Delivery.EXACTLY_ONCE if knows_bodies else Delivery.AT_LEAST_ONCE
        self._idle = idle

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        while True:
            with self._idle(self.name):
                await asyncio.sleep(LOOK_S)  # requests that arrive in the meantime have begun after it
            for chunk in list[Chunk]():  # makes this a generator
                yield chunk


Conversion = Callable[[SeriesMemory], tuple[Decoded, SeriesUpdate]]
"""Computes records from points of cumulative series. It is called on the event loop, and must take at most a few ms."""


@dataclass(frozen=True, slots=True)
class Part:
    """The records of one source in a request.

    Attributes:
        decoded: the records, and the rejected records.
        convert: returns the records that count in place of `decoded`, with all rejections; None if `decoded` counts. It
            is called just before the ingestion, so that two requests with the same series are converted one after the
            other.
    """

    source: PushedSource
    decoded: Decoded
    convert: Conversion | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """The records of one source in a request, after the journal has stored them.

    Attributes:
        records: number of records that count.
        rejected: the records that do not count, by reason.
        already_counted: whether the request was counted before, so that it was not counted again.
    """

    source: PushedSource
    records: int
    rejected: tuple[Rejection, ...]
    already_counted: bool


class Receiver(Protocol):
    """Takes the requests of one path. All methods but `decode` are called on the event loop and must not block.

    Attributes:
        path: the path of the route, such as ``/v1/logs``. It may have parameters, such as ``/v1/streams/{stream}``.
        encodings: the function that decompresses a body, by value of ``Content-Encoding`` (``identity`` without one).
        grpc_method: the gRPC method whose messages are bodies, such as ``/package.Service/Method``; None for HTTP only.
    """

    path: str
    encodings: Mapping[str, Decompress]
    grpc_method: str | None

    def sources(self, request: Request) -> Sequence[PushedSource]:
        """Returns the sources that the request may feed.

        Raises:
            Refused: the path or the media type is not accepted.
        """

    def decode(self, request: Request, body: Body) -> Sequence[Part]:
        """Decodes a body into at most one part for each source. Rejects invalid records. Runs in a thread.

        Raises:
            InvalidRecord: the body as a whole is invalid.
            BodyTooLarge: the records need too much memory.
            BodyTooCostly: see `Body.check`.
        """

    def reply(self, request: Request, counted: Sequence[Counted]) -> Response:
        """Renders the positive reply. Raises Refused if all records were rejected and the client should be told so."""

    def refusal(self, request: Request, refused: Refused) -> Response:
        """Renders the reply to a refused request. The caller adds `Refused.headers`."""
