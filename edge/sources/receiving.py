"""Serves receivers (`edge.receivers`): the part that is the same for every path and format.

A positive reply guarantees that the records are counted exactly once. It is therefore sent only after `Accept` has
returned, which waits for the journal. A client that gets no reply sends the same request again. Each source recognises
the repeated request by its `Idempotency-Key`, or else by its body and client.

A request reserves memory for the bytes that have arrived, not for the bytes that it announces, and has a deadline.
Clients divide the memory (`PushMemory`), so a client that sends slowly or stops sending blocks no other client. Bodies
are decoded in separate threads, within a limit of CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pydantic import SecretStr
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from edge.config import EdgeConfig
from edge.receivers import BodyTooCostly, BodyTooLarge, Counted, Part, PushedSource, Receiver, Refused, Request
from edge.records import Chunk, PushId
from edge.series import SeriesMemory
from edge.sources.http_body import BodyLimits
from edge.sources.push_shares import DecodingThreads, PushMemory, Reservation, TooManyBytes
from edge.utilization import ActivityMarker, no_marker
from edgewater.base.errors import EdgewaterError, InvalidInput, InvalidRequest, Retired, StorageError
from edgewater.runtime.bearer import bearer_token, token_digest

MAX_BODIES_PENDING = 4  # limit: memory of bodies, as a multiple of the largest
DECODING_THREADS = 2  # limit: CPU of decoding
RETRY_AFTER_S = 1  # limit: how soon a client tries again
MAX_KEY_CHARACTERS = 255
"""The largest length of an `Idempotency-Key`."""

Accept = Callable[[Chunk, str], Awaitable[int | None]]
"""Ingests a chunk of a stream, unless the chunk was counted before. Returns when the chunk is durable.

Returns the number of records of a chunk that was counted before; None if it was not.
Raises Unavailable, Retired, StorageError or InvalidRequest if the chunk was not accepted.
"""


class Unavailable(EdgewaterError):
    """The agent cannot accept records at the moment. Nothing of the request was accepted."""

    code = "unavailable"

    def __init__(self, message: str, retry_after_s: int = RETRY_AFTER_S) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class BearerTokens:
    """The tokens of the clients that may push.

    Args:
        tokens: the accepted tokens, read at each request. If empty, every request is allowed.
    """

    def __init__(self, tokens: Sequence[SecretStr]) -> None:
        self._tokens = tokens

    def principal(self, authorization: str | None, host: str) -> bytes | str | None:
        """Returns the client, from its header ``Authorization`` and its address: a digest of its token, or the address
        if no tokens are configured; None if it is not allowed.
        """
        if not self._tokens:
            return host
        token = bearer_token(authorization)
        digest = token_digest(token) if token is not None else b""
        return digest if digest in {token_digest(known.get_secret_value()) for known in self._tokens} else None


class PushEndpoint:
    """Passes requests to receivers, and the receivers' records to the agent.

    Args:
        config: `config.limits` bounds the cost of requests.
        accept: called for each source that a request feeds, with its valid records and its rejections.
        unavailable: called before a body is read. Returns why the agent accepts nothing now, or None.
        now_ms: returns the wall time, for arrival times.
        busy: marks the decoding of a body.
        on_refused: called with the name of a source when a request is refused and its client will retry.
        count_refused: called with the code of each refused request.
        series_of: returns the memory of a source's cumulative series.
        count_skipped: called with the name of a stream and `Decoded.skipped` once a request counts.
    """

    def __init__(
        self,
        receivers: Sequence[Receiver],
        config: EdgeConfig,
        accept: Accept,
        unavailable: Callable[[], Unavailable | Retired | None],
        now_ms: Callable[[], int],
        busy: ActivityMarker = no_marker,
        on_refused: Callable[[str], None] = lambda _: None,
        count_refused: Callable[[str], None] = lambda _: None,
        series_of: Callable[[str], SeriesMemory] = lambda _: SeriesMemory(0),
        count_skipped: Callable[[str, Mapping[str, int]], None] = lambda _stream, _skipped: None,
    ) -> None:
        self.receivers = receivers
        self._series_of = series_of
        self._count_skipped = count_skipped
        self.limits = BodyLimits(config.limits.max_push_bytes, config.limits.push_cpu_ms / 1000)
        self.timeout_s = config.limits.push_timeout_ms / 1000
        self._tokens = BearerTokens(config.http.tokens)
        self._accept = accept
        self._unavailable = unavailable
        self._now_ms = now_ms
        self._busy = busy
        self._on_refused = on_refused
        self._count_refused = count_refused
        self._memory = PushMemory(MAX_BODIES_PENDING * self.limits.size_bytes)
        # Not the event loop's default threads, because they write the journal.
        self._decoding = ThreadPoolExecutor(DECODING_THREADS, "push-decode")
        self._permits = DecodingThreads(DECODING_THREADS)

    @property
    def routes(self) -> list[Route]:
        return [Route(each.path, partial(self._post, each), methods=["POST"]) for each in self.receivers]

    async def _post(self, receiver: Receiver, http: HttpRequest) -> Response:
        media = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        request = Request(media, http.headers, http.path_params)
        host = http.client.host if http.client is not None else ""
        response, _ = await self.handle(receiver, request, host, lambda _: http.stream())
        return response

    async def handle(
        self, receiver: Receiver, request: Request, host: str, stream: Callable[[bytes | str], AsyncIterator[bytes]]
    ) -> tuple[Response, Refused | None]:
        """Handles one request.

        Args:
            host: the client's address.
            stream: takes the client and returns the parts of the body. Called once the client is authorized.

        Returns: the reply, and why the request was refused; None if it was accepted.
        """
        try:
            principal = self._tokens.principal(request.headers.get("authorization"), host)
            if principal is None:
                raise Refused(
                    401,
                    "unauthenticated",
                    "a bearer token of http.tokens is required: Authorization: Bearer <token>",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            return receiver.reply(request, await self._receive(receiver, request, principal, stream(principal))), None
        except Refused as refused:
            self._count_refused(refused.code)
            response = receiver.refusal(request, refused)
            response.headers.update(refused.headers)
            return response, refused

    async def _receive(
        self, receiver: Receiver, request: Request, principal: bytes | str, stream: AsyncIterator[bytes]
    ) -> list[Counted]:
        """Reads a request to its end. Once the records are durable, returns what counts for each source. Raises
        Refused.
        """
        sources = receiver.sources(request)
        encoding = request.headers.get("content-encoding", "identity")[:100]
        if encoding.lower() not in receiver.encodings:
            accepted = ", ".join(receiver.encodings)
            detail = f"Content-Encoding {encoding} is not accepted; expected {accepted.replace(', ', ' or ')}"
            raise Refused(415, "unsupported-media-type", detail, headers={"Accept-Encoding": accepted})
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self.limits.size_bytes:
            raise self._too_large()
        try:
            self._require_available()
            with self._memory.reservation(principal) as reserved:
                body = await self._read(stream, reserved)
                return await self._count(receiver, request, sources, body, principal)
        except Refused as refused:
            for source in sources if refused.retry_after_s is not None else ():
                self._on_refused(source.name)
            raise

    def _require_available(self) -> None:
        reason = self._unavailable()
        if reason is not None:
            raise _refused(reason)

    async def _read(self, stream: AsyncIterator[bytes], reserved: Reservation) -> bytes:
        """Returns the whole body. Raises Refused if it arrives late or not completely, is too large, or gets no
        memory.
        """
        received = list[bytes]()
        try:
            async with asyncio.timeout(self.timeout_s) as reserved.deadline:
                async for data in stream:
                    if reserved.nbytes + len(data) > self.limits.size_bytes:
                        raise self._too_large()
                    self._memory.add(reserved, len(data))
                    received.append(data)
        except TimeoutError:
            if reserved.is_refused:
                raise self._too_many() from None
            detail = f"the body did not arrive in {self.timeout_s:g} s (limits.push_timeout); nothing was accepted"
            raise Refused(408, "timeout", detail, headers={"Connection": "close"}) from None
        except TooManyBytes:
            raise self._too_many() from None
        except ClientDisconnect:
            detail = "the body did not arrive completely; nothing was accepted"
            raise Refused(400, "incomplete-body", detail) from None
        finally:
            reserved.deadline = None
        return b"".join(received)

    async def _count(
        self, receiver: Receiver, request: Request, sources: Sequence[PushedSource], body: bytes, principal: bytes | str
    ) -> list[Counted]:
        try:
            key = _idempotency_key(request)
            with contextlib.ExitStack() as busy:
                for source in sources:
                    busy.enter_context(self._busy(source.name))
                async with self._permits.permit(principal):
                    decode = partial(self._decode, receiver, request, body, self._now_ms())
                    parts, digest = await asyncio.get_running_loop().run_in_executor(self._decoding, decode)

            async def accept(part: Part) -> Counted:
                push = _push_id(part.source, key, digest, principal)
                return await self._accept_part(part, push, len(body))

            results = await asyncio.gather(*map(accept, parts), return_exceptions=True)
        except BodyTooLarge:
            raise self._too_large() from None
        except BodyTooCostly:
            raise Refused(
                422,
                "too-costly",
                f"decoding the body takes more than {self.limits.cpu_s:g} s of CPU time (limits.push_cpu); "
                "nothing was accepted; expected several smaller requests with fewer invalid records",
            ) from None
        except InvalidInput as exc:
            raise _refused(exc) from None
        for result in results:
            if isinstance(result, EdgewaterError):
                raise _refused(
                    result
                ) from None  # when the request is repeated, sources that have accepted it recognise it
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, Counted)]

    async def _accept_part(self, part: Part, push: PushId | None, nbytes: int) -> Counted:
        decoded, series = part.decoded, None
        if part.convert is not None:
            # No other request may change the series before `accept` ingests the records, so nothing is awaited here.
            decoded, series = part.convert(self._series_of(part.source.name))
        content = decoded.batch, None, None, decoded.rejected, nbytes
        chunk = Chunk(part.source.name, *content, push=push, series=series, guessed=decoded.guessed)
        counted = await self._accept(chunk, part.source.stream)
        if counted is not None:  # the series may have changed after the request was counted
            return Counted(part.source, counted, part.decoded.rejected, already_counted=True)
        self._count_skipped(part.source.stream, decoded.skipped)
        return Counted(part.source, decoded.batch.num_rows, decoded.rejected, already_counted=False)

    def _decode(
        self, receiver: Receiver, request: Request, body: bytes, arrival_ms: int
    ) -> tuple[Sequence[Part], bytes]:
        """Returns the records, and a digest of the decompressed body. Runs in a thread.

        The digest is not of the compressed body, because gzip data contain a time.

        Raises:
            BodyTooLarge, BodyTooCostly, InvalidInput: as `Receiver.decode`.
        """
        check, limit = self.limits.timer(), self.limits.size_bytes
        plain = receiver.encodings[request.headers.get("content-encoding", "identity").lower()](body, limit)
        digest = _digest(request.media.encode(), plain)
        return receiver.decode(request, self.limits.of(plain, arrival_ms, check)), digest

    def _too_many(self) -> Refused:
        """Returns the refusal of a request for which there is no memory, or whose memory another client needs."""
        limit = self._memory.limit_bytes
        detail = f"bodies in progress take {self._memory.nbytes} bytes; the limit is {limit}; nothing was accepted"
        return Refused(429, "too-many-requests", detail, retry_after_s=RETRY_AFTER_S)

    def _too_large(self) -> Refused:
        limit = self.limits.size_bytes
        detail = f"the body is longer than {limit} bytes, as sent or decompressed; expected several smaller requests"
        return Refused(413, "too-large", detail)


def _refused(exc: EdgewaterError) -> Refused:
    if isinstance(exc, Retired):
        return Refused(410, exc.code, exc.message)
    if isinstance(exc, InvalidInput):
        return Refused(422, exc.code, exc.message)
    if isinstance(exc, Unavailable):
        return Refused(503, exc.code, exc.message, retry_after_s=exc.retry_after_s)
    if isinstance(exc, StorageError):
        return Refused(503, exc.code, exc.message, retry_after_s=RETRY_AFTER_S)
    raise exc


def _idempotency_key(request: Request) -> str | None:
    """Returns the key that the client gave to its batch; None without a key. Raises InvalidRequest."""
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise InvalidRequest("Idempotency-Key", key[:100], f"1 to {MAX_KEY_CHARACTERS} characters")
    return key


def _push_id(source: PushedSource, key: str | None, body: bytes, principal: bytes | str) -> PushId | None:
    """Returns the identity of a batch; None if a repeated batch is not recognised.

    Two clients may choose equal keys. So a key belongs to the client's token. Without tokens, a key belongs to no
    client, because a client's address may change. A batch without a key is identified by its body and by the token, or
    by the address.
    """
    name = source.name.encode()
    if key is not None:
        owner = principal if isinstance(principal, bytes) else b""
        return PushId(_digest(b"key", name, owner, key.encode()), body, key)
    if not source.knows_bodies:
        return None
    owner = principal if isinstance(principal, bytes) else principal.encode()
    return PushId(_digest(b"body", name, owner, body), body)


def _digest(*parts: bytes) -> bytes:
    """Returns 16 bytes that identify a sequence of byte strings."""
    lengths = b"".join(len(part).to_bytes(8, "little") for part in parts)
    result = hashlib.blake2b(lengths, digest_size=16)
    for part in parts:
        result.update(part)
    return result.digest()
