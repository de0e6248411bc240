"""Pushed records: ``POST /v1/streams/{stream}`` with NDJSON, CSV or Arrow in the body.

A positive reply is a promise: the records are counted exactly once, whatever happens then. So it is
given only when `accept` has returned, which waits for the journal. A request is accepted as a whole
or not at all; bad records in it are refused one by one and named in the reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edge.codecs.schema import RecordSchema
from edge.config import EdgeConfig
from edge.records import Chunk, Position
from edge.sources.http_body import MEDIA_TYPES, BodyTooLarge, decode_body, media_type
from edge.utilization import Mark, unmarked
from edgewater.errors import EdgewaterError, InvalidInput, StorageError

MAX_BODIES_PENDING = 4
TYPE_BASE = "https://edgewater.dev/problems/"
"""Of problem types, the same as the center's API has."""

Accept = Callable[[Chunk, str], Awaitable[None]]
"""Takes a chunk for a stream; returns when it is durable. Raises Busy or StorageError if it was not taken."""


class Busy(EdgewaterError):
    """The agent cannot take records at the moment; nothing of the request was taken."""

    code = "busy"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class HttpSource:
    """A `Source` whose records come through `push_routes`; `chunks` itself gives none and never ends."""

    replayable = False

    def __init__(self, name: str, stream: str, schema: RecordSchema, waiting: Mark = unmarked) -> None:
        self.name = name
        self.stream = stream
        self.schema = schema
        self._waiting = waiting

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        with self._waiting(self.name):
            async for chunk in _never():
                yield chunk

    def reread(self, start: Position | None, end: Position) -> Chunk:
        raise StorageError(f"{self.name}: pushed records cannot be read again; the journal has them")


async def _never() -> AsyncIterator[Chunk]:
    await asyncio.Event().wait()
    for chunk in list[Chunk]():  # makes this a generator
        yield chunk


@dataclass(frozen=True, slots=True)
class PushLimits:
    """Bounds on what is held for pushing clients.

    Attributes:
        max_body_bytes: of one request, as sent and decompressed.
        max_pending_bytes: of all requests that have not been answered.
        retry_after_s: what a client that is turned away is told.
    """

    max_body_bytes: int
    max_pending_bytes: int
    retry_after_s: int = 1


def push_routes(
    config: EdgeConfig,
    accept: Accept,
    busy: Callable[[], Busy | None],
    now_ms: Callable[[], int],
    working: Mark = unmarked,
    refused: Callable[[str], None] = lambda _: None,
) -> list[Route]:
    """The routes through which records are pushed.

    Args:
        config: streams with an ``http`` source take records; its limits bound what is held.
        accept: called once per request, with all of its good records and its rejections.
        busy: asked before a body is read: why it cannot be taken now, or None.
        now_ms: the wall clock, for arrival times.
        working: marks when a body is being decoded.
        refused: told the source when a request is to be sent again.
    """
    sources = {
        name: HttpSource(http_source_name(name), name, stream.record_schema)
        for name, stream in config.streams.items()
        if any(source.http for source in stream.sources)
    }
    body_bytes = config.limits.max_push_bytes
    limits = PushLimits(body_bytes, MAX_BODIES_PENDING * body_bytes)
    push = _Push(sources, accept, busy, now_ms, limits, working, refused)
    return [Route("/v1/streams/{stream}", push.post, methods=["POST"])]


def http_source_name(stream: str) -> str:
    return f"{stream}:http"


class _Push:
    def __init__(
        self,
        sources: Mapping[str, HttpSource],
        accept: Accept,
        busy: Callable[[], Busy | None],
        now_ms: Callable[[], int],
        limits: PushLimits,
        working: Mark,
        refused: Callable[[str], None],
    ) -> None:
        self._sources = sources
        self._accept = accept
        self._busy = busy
        self._now_ms = now_ms
        self._limits = limits
        self._working = working
        self._refused = refused
        self._pending_bytes = 0

    async def post(self, request: Request) -> Response:
        source = self._sources.get(request.path_params["stream"])
        if source is None:
            known = ", ".join(sorted(self._sources)) or "(none)"
            name = request.path_params["stream"]
            return problem(404, "not-found", f"{name!r} is no stream that takes pushed records; those are: {known}")
        media = media_type(request.headers.get("content-type", ""))
        if media is None:
            given = request.headers.get("content-type", "(none)")
            return problem(
                415, "unsupported-media-type", f"Content-Type {given} is not accepted; expected {MEDIA_TYPES}"
            )
        reserved = self._size(request)
        if reserved > self._limits.max_body_bytes:
            return self._too_large()
        if self._pending_bytes + reserved > self._limits.max_pending_bytes:
            detail = f"{self._pending_bytes} bytes wait to be written; at most {self._limits.max_pending_bytes}"
            return self._again(source, 429, "too-many-requests", detail, self._limits.retry_after_s)
        if (busy := self._busy()) is not None:
            return self._again(source, 503, busy.code, busy.message, busy.retry_after_s)
        self._pending_bytes += reserved
        try:
            return await self._take(request, source, media)
        finally:
            self._pending_bytes -= reserved

    def _size(self, request: Request) -> int:
        """Bytes to reserve: as announced, or as much as may come."""
        announced = request.headers.get("content-length", "")
        compressed = "content-encoding" in request.headers
        return int(announced) if announced.isdigit() and not compressed else self._limits.max_body_bytes

    async def _take(self, request: Request, source: HttpSource, media: str) -> Response:
        try:
            body = await self._read(request)
            encoding = request.headers.get("content-encoding", "identity")
            limit = self._limits.max_body_bytes
            with self._working(source.name):
                decoded = await asyncio.to_thread(
                    decode_body, body, media, encoding, source.schema, self._now_ms(), limit, source.stream
                )
            await self._accept(
                Chunk(source.name, decoded.batch, None, None, decoded.rejected, len(body)), source.stream
            )
        except BodyTooLarge:
            return self._too_large()
        except ClientDisconnect:
            return problem(400, "incomplete-body", "the body did not arrive as a whole; nothing was taken")
        except InvalidInput as exc:
            return problem(422, exc.code, exc.message)
        except Busy as exc:
            return self._again(source, 503, exc.code, exc.message, exc.retry_after_s)
        except StorageError as exc:
            return self._again(source, 503, exc.code, exc.message, self._limits.retry_after_s)
        reply = {"accepted": decoded.batch.num_rows, "rejected": [r.to_json() for r in decoded.rejected]}
        return JSONResponse(reply)

    async def _read(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > self._limits.max_body_bytes:
                raise BodyTooLarge
        return b"".join(parts)

    def _again(self, source: HttpSource, status: int, code: str, detail: str, retry_after_s: int) -> Response:
        """The reply to a request that could not be taken now."""
        self._refused(source.name)
        return problem(status, code, detail, retry_after_s=retry_after_s)

    def _too_large(self) -> Response:
        limit = self._limits.max_body_bytes
        return problem(413, "too-large", f"the body is longer than {limit} bytes; expected several smaller requests")


def problem(status: int, code: str, detail: str, *, retry_after_s: int | None = None) -> Response:
    """An RFC 9457 reply; `code` is stable."""
    body = {"type": TYPE_BASE + code, "title": code.replace("-", " "), "status": status, "detail": detail}
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return JSONResponse(body, status, headers, media_type="application/problem+json")
