"""Pushed records: ``POST /v1/streams/{stream}`` with NDJSON, CSV or Arrow in the body.

A positive reply guarantees that the records are counted exactly once. It is therefore sent only after
`accept` has returned, which waits for the journal. A request is accepted as a whole or not at all;
invalid records in it are rejected individually and listed in the reply. If all are, the reply is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edge.codecs import RecordSchema
from edge.config import EdgeConfig
from edge.records import Chunk, Position
from edge.sources.http_body import MEDIA_TYPES, BodyTooLarge, decode_body, media_type
from edge.utilization import ActivityMarker, no_marker
from edgewater.errors import EdgewaterError, InvalidInput, Retired, StorageError
from edgewater.streams import Delivery

MAX_BODIES_PENDING = 4
TYPE_BASE = "https://edgewater.dev/problems/"
"""Base URI of problem types, the same as in the center's API."""

Accept = Callable[[Chunk, str], Awaitable[None]]
"""Ingests a chunk of a stream; returns when it is durable.

Raises Unavailable, Retired, StorageError: it was not accepted.
"""


class Unavailable(EdgewaterError):
    """The agent cannot accept records at the moment; nothing of the request was accepted."""

    code = "unavailable"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class HttpSource:
    """A `Source` whose records arrive through `push_routes`; `chunks` yields nothing and never ends."""

    replayable = False
    delivery = Delivery.EXACTLY_ONCE

    def __init__(self, name: str, stream: str, schema: RecordSchema, idle: ActivityMarker = no_marker) -> None:
        self.name = name
        self.stream = stream
        self.schema = schema
        self._idle = idle

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        with self._idle(self.name):
            async for chunk in _never():
                yield chunk

    def backfill(self, position: Position | None, until: Position) -> AsyncGenerator[Chunk]:
        raise StorageError(f"{self.name}: pushed records cannot be read again; they are in the journal")

    def reread(self, start: Position | None, end: Position) -> Chunk:
        raise StorageError(f"{self.name}: pushed records cannot be read again; they are in the journal")


async def _never() -> AsyncIterator[Chunk]:
    await asyncio.Event().wait()
    for chunk in list[Chunk]():  # makes this a generator
        yield chunk


@dataclass(frozen=True, slots=True)
class PushLimits:
    """Limits of the push endpoint.

    Attributes:
        max_body_bytes: size of one body, both as sent and decompressed.
        max_pending_bytes: total size of the bodies of all requests in progress.
        retry_after_s: value of ``Retry-After`` in the reply to a refused request.
    """

    max_body_bytes: int
    max_pending_bytes: int
    retry_after_s: int = 1


def push_routes(
    config: EdgeConfig,
    accept: Accept,
    unavailable: Callable[[], Unavailable | Retired | None],
    now_ms: Callable[[], int],
    busy: ActivityMarker = no_marker,
    on_refused: Callable[[str], None] = lambda _: None,
) -> list[Route]:
    """Returns the routes that accept pushed records.

    Args:
        config: streams with an ``http`` source accept records; `config.limits` bounds the memory of requests.
        accept: called once per request, with all of its valid records and its rejections.
        unavailable: called before a body is read; returns why it cannot be accepted now, or None.
        now_ms: the wall clock, for arrival times.
        busy: marks the decoding of a body.
        on_refused: called with the source's name when a request is refused and its client will retry.
    """
    sources = {
        name: HttpSource(http_source_name(name), name, stream.record_schema)
        for name, stream in config.streams.items()
        if any(source.http for source in stream.sources)
    }
    body_bytes = config.limits.max_push_bytes
    limits = PushLimits(body_bytes, MAX_BODIES_PENDING * body_bytes)
    push = _PushEndpoint(sources, accept, unavailable, now_ms, limits, busy, on_refused)
    return [Route("/v1/streams/{stream}", push.post, methods=["POST"])]


def http_source_name(stream: str) -> str:
    return f"{stream}:http"


class _PushEndpoint:
    def __init__(
        self,
        sources: Mapping[str, HttpSource],
        accept: Accept,
        unavailable: Callable[[], Unavailable | Retired | None],
        now_ms: Callable[[], int],
        limits: PushLimits,
        busy: ActivityMarker,
        on_refused: Callable[[str], None],
    ) -> None:
        self._sources = sources
        self._accept = accept
        self._unavailable = unavailable
        self._now_ms = now_ms
        self._limits = limits
        self._busy = busy
        self._on_refused = on_refused
        self._pending_bytes = 0

    async def post(self, request: Request) -> Response:
        source = self._sources.get(request.path_params["stream"])
        if source is None:
            known = ", ".join(sorted(self._sources)) or "(none)"
            name = request.path_params["stream"]
            return problem(
                404, "not-found", f"stream {name!r} does not accept pushed records; streams that do: {known}"
            )
        media = media_type(request.headers.get("content-type", ""))
        if media is None:
            header = request.headers.get("content-type", "(none)")
            return problem(
                415, "unsupported-media-type", f"Content-Type {header} is not accepted; expected {MEDIA_TYPES}"
            )
        reserved = self._size(request)
        if reserved > self._limits.max_body_bytes:
            return self._too_large()
        if self._pending_bytes + reserved > self._limits.max_pending_bytes:
            detail = f"{self._pending_bytes} bytes are pending; the limit is {self._limits.max_pending_bytes}"
            return self._refuse(source, 429, "too-many-requests", detail, self._limits.retry_after_s)
        reason = self._unavailable()
        if isinstance(reason, Retired):
            return problem(410, reason.code, reason.message)
        if reason is not None:
            return self._refuse(source, 503, reason.code, reason.message, reason.retry_after_s)
        self._pending_bytes += reserved
        try:
            return await self._ingest(request, source, media)
        finally:
            self._pending_bytes -= reserved

    def _size(self, request: Request) -> int:
        """Returns the bytes to reserve: the announced length, or the limit if the length is unknown."""
        announced = request.headers.get("content-length", "")
        compressed = "content-encoding" in request.headers
        return int(announced) if announced.isdigit() and not compressed else self._limits.max_body_bytes

    async def _ingest(self, request: Request, source: HttpSource, media: str) -> Response:
        try:
            body = await self._read(request)
            encoding = request.headers.get("content-encoding", "identity")
            limit = self._limits.max_body_bytes
            with self._busy(source.name):
                decoded = await asyncio.to_thread(
                    decode_body, body, media, encoding, source.schema, self._now_ms(), limit, source.stream
                )
            await self._accept(
                Chunk(source.name, decoded.batch, None, None, decoded.rejected, len(body)), source.stream
            )
        except BodyTooLarge:
            return self._too_large()
        except ClientDisconnect:
            return problem(400, "incomplete-body", "the body did not arrive completely; nothing was accepted")
        except InvalidInput as exc:
            return problem(422, exc.code, exc.message)
        except Retired as exc:
            return problem(410, exc.code, exc.message)
        except Unavailable as exc:
            return self._refuse(source, 503, exc.code, exc.message, exc.retry_after_s)
        except StorageError as exc:
            return self._refuse(source, 503, exc.code, exc.message, self._limits.retry_after_s)
        accepted, rejected = decoded.batch.num_rows, [r.to_json() for r in decoded.rejected]
        if rejected and not accepted:
            first = decoded.rejected[0]
            detail = f"none of {sum(r.count for r in decoded.rejected)} records can be read: {first.message}"
            return problem(422, "invalid-record", detail, members={"accepted": 0, "rejected": rejected})
        return JSONResponse({"accepted": accepted, "rejected": rejected})

    async def _read(self, request: Request) -> bytes:
        received, size = [], 0
        async for data in request.stream():
            received.append(data)
            size += len(data)
            if size > self._limits.max_body_bytes:
                raise BodyTooLarge
        return b"".join(received)

    def _refuse(self, source: HttpSource, status: int, code: str, detail: str, retry_after_s: int) -> Response:
        """Returns the reply to a request that the client is asked to retry."""
        self._on_refused(source.name)
        return problem(status, code, detail, retry_after_s=retry_after_s)

    def _too_large(self) -> Response:
        limit = self._limits.max_body_bytes
        return problem(413, "too-large", f"the body is longer than {limit} bytes; expected several smaller requests")


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    retry_after_s: int | None = None,
    members: Mapping[str, object] | None = None,
) -> Response:
    """Returns an RFC 9457 reply with the stable error code `code` and the extension `members`."""
    body = {"type": TYPE_BASE + code, "title": code.replace("-", " "), "status": status, "detail": detail}
    body |= members or {}
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return JSONResponse(body, status, headers, media_type="application/problem+json")
