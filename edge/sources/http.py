"""Pushed records: ``POST /v1/streams/{stream}`` with NDJSON, CSV or Arrow in the body.

A positive reply guarantees that the records are counted exactly once. It is therefore sent only after
`accept` has returned, which waits for the journal. A request is accepted as a whole or not at all;
invalid records in it are rejected individually and listed in the reply. If all are, the reply is an error.

A client that gets no reply pushes the same batch again. The repetition is recognised by the `Idempotency-Key` of the
request, or else by its body and client; its reply says `already_counted`.

A request reserves memory for what has arrived of it, not for what it announces, and has a deadline; clients divide the
memory (`PushMemory`): one that sends slowly or not at all keeps nobody else out. Bodies are decoded in threads of their
own, within a CPU time.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edge.codecs import RecordSchema, TextFormat
from edge.config import EdgeConfig
from edge.records import Chunk, Decoded, Position, PushId
from edge.sources.http_body import MEDIA_TYPES, BodyLimits, BodyTooCostly, BodyTooLarge, decode_body, media_type
from edge.sources.push_shares import DecodingThreads, PushMemory, Reservation, TooManyBytes
from edge.utilization import ActivityMarker, no_marker
from edgewater.bearer import bearer_token, token_digest
from edgewater.errors import EdgewaterError, InvalidInput, InvalidRequest, Retired, StorageError
from edgewater.streams import Delivery

MAX_BODIES_PENDING = 4
LOOK_S = 0.25
"""Interval at which a source without pushes is recorded as having nothing to read."""
DECODING_THREADS = 2
TYPE_BASE = "https://edgewater.dev/problems/"
"""Base URI of problem types, the same as in the center's API."""

MAX_KEY_CHARACTERS = 255
"""Length of an `Idempotency-Key`."""

Accept = Callable[[Chunk, str], Awaitable[int | None]]
"""Ingests a chunk of a stream, unless it was counted before; returns when it is durable.

Returns the number of records of a chunk that was counted before; None: it was not.
Raises Unavailable, Retired, StorageError, InvalidRequest: it was not accepted.
"""


class Unavailable(EdgewaterError):
    """The agent cannot accept records at the moment; nothing of the request was accepted."""

    code = "unavailable"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class HttpSource:
    """A `Source` whose records arrive through `push_routes`; `chunks` yields nothing and never ends.

    Attributes:
        text: the format of bodies of the type text/plain; None: they are refused.
        knows_bodies: whether a body without an `Idempotency-Key` that its client sends again is a repetition.
    """

    replayable = False
    delivery = Delivery.EXACTLY_ONCE

    def __init__(
        self,
        name: str,
        stream: str,
        schema: RecordSchema,
        idle: ActivityMarker = no_marker,
        *,
        knows_bodies: bool = True,
        text: TextFormat | None = None,
    ) -> None:
        self.name = name
        self.stream = stream
        self.schema = schema
        self.knows_bodies = knows_bodies
        self.text = text
        self._idle = idle

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        while True:
            with self._idle(self.name):
                await asyncio.sleep(LOOK_S)  # after it, requests that came meanwhile have begun
            for chunk in list[Chunk]():  # makes this a generator
                yield chunk

    def committed(self, position: Position) -> None:
        pass

    def backfill(self, position: Position | None, until: Position, since_ms: int) -> AsyncGenerator[Chunk]:
        raise StorageError(f"{self.name}: pushed records cannot be read again; they are in the journal")

    def reread(self, start: Position | None, end: Position) -> Chunk:
        raise StorageError(f"{self.name}: pushed records cannot be read again; they are in the journal")

    def fingerprints(self, position: Position, most: int) -> tuple[int, ...]:
        return ()


class BearerTokens:
    """The tokens of those who may push.

    Args:
        tokens: empty: every request is allowed.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._digests = frozenset(map(token_digest, tokens))

    def principal(self, request: Request) -> bytes | str | None:
        """Returns who pushes: the holder of a token, or without tokens the client's address; None: not allowed."""
        if not self._digests:
            return request.client.host if request.client is not None else ""
        token = bearer_token(request.headers.get("authorization"))
        digest = token_digest(token) if token is not None else b""
        return digest if digest in self._digests else None


@dataclass(frozen=True, slots=True)
class PushLimits:
    """Limits of the push endpoint.

    Attributes:
        body: of one body.
        max_pending_bytes: total size of the bodies of all requests in progress, as far as they have arrived.
        timeout_s: time in which a body must arrive.
        retry_after_s: value of ``Retry-After`` in the reply to a refused request.
    """

    body: BodyLimits
    max_pending_bytes: int
    timeout_s: float
    retry_after_s: int = 1


def push_routes(
    config: EdgeConfig,
    accept: Accept,
    unavailable: Callable[[], Unavailable | Retired | None],
    now_ms: Callable[[], int],
    busy: ActivityMarker = no_marker,
    on_refused: Callable[[str], None] = lambda _: None,
    count_refused: Callable[[str], None] = lambda _: None,
) -> list[Route]:
    """Returns the routes that accept pushed records.

    Args:
        config: streams with an ``http`` source accept records; `config.limits` bounds the memory of requests.
        accept: called once per request, with all of its valid records and its rejections.
        unavailable: called before a body is read; returns why it cannot be accepted now, or None.
        now_ms: the wall clock, for arrival times.
        busy: marks the decoding of a body.
        on_refused: called with the source's name when a request is refused and its client will retry.
        count_refused: called with the error code of each refused request.
    """
    sources = {
        name: HttpSource(
            http_source_name(name),
            name,
            stream.record_schema,
            knows_bodies=source.http.dedupe == "body",
            text=source.http.text_format(stream.record_schema) if source.http.format is not None else None,
        )
        for name, stream in config.streams.items()
        for source in stream.sources
        if source.http is not None
    }
    body = BodyLimits(config.limits.max_push_bytes, config.limits.push_cpu_ms / 1000)
    limits = PushLimits(body, MAX_BODIES_PENDING * body.size_bytes, config.limits.push_timeout_ms / 1000)
    tokens = BearerTokens(token.get_secret_value() for token in config.http.tokens)
    push = _PushEndpoint(sources, accept, unavailable, now_ms, limits, tokens, busy, on_refused, count_refused)
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
        tokens: BearerTokens,
        busy: ActivityMarker,
        on_refused: Callable[[str], None],
        count_refused: Callable[[str], None],
    ) -> None:
        self._sources = sources
        self._accept = accept
        self._unavailable = unavailable
        self._now_ms = now_ms
        self._limits = limits
        self._tokens = tokens
        self._busy = busy
        self._on_refused = on_refused
        self._count_refused = count_refused
        self._memory = PushMemory(limits.max_pending_bytes)
        # Not the loop's default threads, which write the journal.
        self._decoding = ThreadPoolExecutor(DECODING_THREADS, "push-decode")
        self._permits = DecodingThreads(DECODING_THREADS)

    async def post(self, request: Request) -> Response:
        principal = self._tokens.principal(request)
        if principal is None:
            detail = "a bearer token of http.tokens is required: Authorization: Bearer <token>"
            return self._problem(401, "unauthenticated", detail, headers={"WWW-Authenticate": "Bearer"})
        source = self._sources.get(request.path_params["stream"])
        if source is None:
            known = ", ".join(sorted(self._sources)) or "(none)"
            name = request.path_params["stream"]
            detail = f"stream {name[:100]!r} does not accept pushed records; streams that do: {known}"
            return self._problem(404, "not-found", detail)
        media = media_type(request.headers.get("content-type", ""))
        if media is None:
            header = request.headers.get("content-type", "(none)")[:100]
            detail = f"Content-Type {header} is not accepted; expected {MEDIA_TYPES}"
            return self._problem(415, "unsupported-media-type", detail)
        if media == "text" and source.text is None:
            detail = f"text/plain needs http: {{format: …}} in the sources of stream {source.stream}, such as logfmt"
            return self._problem(415, "unsupported-media-type", detail)
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._limits.body.size_bytes:
            return self._too_large()
        reason = self._unavailable()
        if isinstance(reason, Retired):
            return self._problem(410, reason.code, reason.message)
        if reason is not None:
            return self._refuse(source, 503, reason.code, reason.message, reason.retry_after_s)
        with self._memory.reservation(principal) as reserved:
            return await self._ingest(request, source, media, reserved)

    async def _ingest(self, request: Request, source: HttpSource, media: str, reserved: Reservation) -> Response:
        limits = self._limits
        try:
            async with asyncio.timeout(limits.timeout_s) as reserved.deadline:
                body = await self._read(request, reserved)
        except TimeoutError:
            if reserved.is_refused:
                return self._too_many(source)
            detail = f"the body did not arrive in {limits.timeout_s:g} s (limits.push_timeout); nothing was accepted"
            return self._problem(408, "timeout", detail, headers={"Connection": "close"})
        except TooManyBytes:
            return self._too_many(source)
        except BodyTooLarge:
            return self._too_large()
        except ClientDisconnect:
            return self._problem(400, "incomplete-body", "the body did not arrive completely; nothing was accepted")
        finally:
            reserved.deadline = None
        try:
            encoding = request.headers.get("content-encoding", "identity")[:100]
            key = _idempotency_key(request)
            with self._busy(source.name):
                async with self._permits.permit(reserved.principal):
                    decoded, digest = await self._decode(body, media, encoding, source)
            push = _push_id(source, key, digest, reserved.principal)
            chunk = Chunk(source.name, decoded.batch, None, None, decoded.rejected, len(body), push=push)
            counted = await self._accept(chunk, source.stream)
        except BodyTooLarge:
            return self._too_large()
        except BodyTooCostly:
            return self._problem(
                422,
                "too-costly",
                f"decoding the body takes more than {limits.body.cpu_s:g} s of CPU time (limits.push_cpu); nothing was "
                "accepted; expected several smaller requests with fewer invalid records",
            )
        except InvalidInput as exc:
            return self._problem(422, exc.code, exc.message)
        except Retired as exc:
            return self._problem(410, exc.code, exc.message)
        except Unavailable as exc:
            return self._refuse(source, 503, exc.code, exc.message, exc.retry_after_s)
        except StorageError as exc:
            return self._refuse(source, 503, exc.code, exc.message, limits.retry_after_s)
        accepted = decoded.batch.num_rows if counted is None else counted
        rejected = [r.to_json() for r in decoded.rejected]
        if rejected and not accepted:
            first = decoded.rejected[0]
            detail = f"none of {sum(r.count for r in decoded.rejected)} records can be read: {first.message}"
            return self._problem(422, "invalid-record", detail, members={"accepted": 0, "rejected": rejected})
        return JSONResponse({"accepted": accepted, "rejected": rejected, "already_counted": counted is not None})

    async def _decode(self, body: bytes, media: str, encoding: str, source: HttpSource) -> tuple[Decoded, bytes]:
        """Returns the records and a digest of the decompressed body: gzip data contain a time, so compressed
        repetitions differ.

        Raises:
            BodyTooLarge, BodyTooCostly, InvalidInput: as `decode_body`.
        """
        arrival_ms, limits = self._now_ms(), self._limits.body

        def decode() -> tuple[Decoded, bytes]:
            digests = list[bytes]()
            decoded = decode_body(
                body, media, encoding, source.schema, arrival_ms, limits, source.stream,
                lambda plain: digests.append(_digest(media.encode(), plain)), source.text,
            )  # fmt: skip
            return decoded, digests[0]

        return await asyncio.get_running_loop().run_in_executor(self._decoding, decode)

    async def _read(self, request: Request, reserved: Reservation) -> bytes:
        """Raises BodyTooLarge, TooManyBytes and ClientDisconnect."""
        received = []
        async for data in request.stream():
            if reserved.nbytes + len(data) > self._limits.body.size_bytes:
                raise BodyTooLarge
            self._memory.add(reserved, len(data))
            received.append(data)
        return b"".join(received)

    def _refuse(self, source: HttpSource, status: int, code: str, detail: str, retry_after_s: int) -> Response:
        """Returns the reply to a request that the client is asked to retry."""
        self._on_refused(source.name)
        return self._problem(status, code, detail, headers={"Retry-After": str(retry_after_s)})

    def _too_many(self, source: HttpSource) -> Response:
        """Returns the reply to a request whose body finds no memory, or was refused for that of another client."""
        limit = self._memory.limit_bytes
        detail = f"bodies in progress take {self._memory.nbytes} bytes; the limit is {limit}; nothing was accepted"
        return self._refuse(source, 429, "too-many-requests", detail, self._limits.retry_after_s)

    def _too_large(self) -> Response:
        limit = self._limits.body.size_bytes
        detail = f"the body is longer than {limit} bytes, as sent or decompressed; expected several smaller requests"
        return self._problem(413, "too-large", detail)

    def _problem(self, status: int, code: str, detail: str, **more: Any) -> Response:
        """As `problem`; counts it."""
        self._count_refused(code)
        return problem(status, code, detail, **more)


def _idempotency_key(request: Request) -> str | None:
    """Returns the key by which the client recognises its batch. Raises InvalidRequest."""
    key: str | None = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise InvalidRequest("Idempotency-Key", key[:100], f"1 to {MAX_KEY_CHARACTERS} characters")
    return key


def _push_id(source: HttpSource, key: str | None, body: bytes, principal: bytes | str) -> PushId | None:
    """Returns the identity of a batch; None: repetitions of it are not recognised.

    Clients may choose equal keys, so a key belongs to the client's token. Without tokens any address may repeat it, as
    a client's address may change. A body without a key belongs to the token, or to the address.
    """
    stream = source.stream.encode()
    if key is not None:
        owner = principal if isinstance(principal, bytes) else b""
        return PushId(_digest(b"key", stream, owner, key.encode()), body, key)
    if not source.knows_bodies:
        return None
    owner = principal if isinstance(principal, bytes) else principal.encode()
    return PushId(_digest(b"body", stream, owner, body), body)


def _digest(*parts: bytes) -> bytes:
    """Returns 16 bytes that identify a sequence of byte strings."""
    lengths = b"".join(len(part).to_bytes(8, "little") for part in parts)
    result = hashlib.blake2b(lengths, digest_size=16)
    for part in parts:
        result.update(part)
    return result.digest()


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    members: Mapping[str, object] | None = None,
) -> Response:
    """Returns an RFC 9457 reply with the stable error code `code` and the extension `members`."""
    body = {"type": TYPE_BASE + code, "title": code.replace("-", " "), "status": status, "detail": detail}
    return JSONResponse(body | dict(members or {}), status, headers, media_type="application/problem+json")
