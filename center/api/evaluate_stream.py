"""Answers a stream of questions while it is received, in bounded memory.

The event loop only passes the body's chunks on; a worker splits and parses them. Lines are answered in their order, a
few at a time, and the next chunk is received meanwhile. If a client does not read its answers, the evaluation waits. If
it disconnects, the evaluation ends. Each question has a budget of work of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO

from anyio.to_thread import run_sync
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from center.api.lanes import Lane
from center.api.problems import INTERNAL_ERROR, problem_of
from center.serving.evaluator import Evaluator
from center.serving.question_lines import WindowQuestion, parse_json
from center.serving.stored_windows import StoredWindows
from edgewater.answers.work import WorkEnded, renew
from edgewater.model.errors import ClientGone, EdgewaterError, InvalidRequest
from edgewater.model.table_texts import to_json
from edgewater.model.timestamps import parse_time

NDJSON = "application/x-ndjson"
READ_TYPES = (NDJSON, "application/ndjson", "application/jsonl", "application/json-lines")
MAX_LINE_BYTES = 64 << 10
BATCH_BYTES = 64 << 10
"""Bytes of answers per send. A disconnected client is noticed between two sends."""
_WAITING = 2
"""Chunks of the body that may wait for evaluation."""

Part = tuple[bytes, bool]
"""A chunk of the body, and whether it is the last chunk."""

log = logging.getLogger(__name__)


class OversizedLine:
    """Replaces a line longer than `MAX_LINE_BYTES`, whose text is discarded."""


@dataclass(slots=True)
class LineSplitter:
    """Splits the chunks of a body into lines; buffers at most one incomplete line."""

    _rest: bytearray = field(default_factory=bytearray)
    _dropping: bool = False

    def feed(self, part: bytes, *, ends: bool = False) -> Iterator[bytes | OversizedLine]:
        """Yields the lines that this chunk completes. With `ends`, the last line needs no line break."""
        for piece in BytesIO(part):  # lines end with line feeds only: a carriage return is white space in JSON
            if not self._dropping:
                self._rest += piece
                if len(self._rest) > MAX_LINE_BYTES + 1:
                    self._dropping = True
                    self._rest.clear()
            if piece.endswith(b"\n"):
                yield from self._finish()
        if ends:
            yield from self._finish()

    def _finish(self) -> Iterator[bytes | OversizedLine]:
        if self._dropping:
            yield OversizedLine()
        elif self._rest.strip():
            yield bytes(self._rest)
        self._rest.clear()
        self._dropping = False


@dataclass(slots=True)
class LineEvaluator:
    """Answers lines about one query.

    Attributes:
        path: path of the request, for problem details.
    """

    windows: StoredWindows
    evaluator: Evaluator
    path: str
    _lines: LineSplitter = field(default_factory=LineSplitter, init=False)

    def answers(self, part: bytes, ends: bool) -> Iterator[bytes]:
        """Yields the answers to the lines that a chunk of the body completes, in chunks of about `BATCH_BYTES`; blocks.

        Args:
            part: the next chunk of the body.
            ends: whether it is the last chunk.
        """
        held = bytearray()
        try:
            self.windows.refresh()
        except EdgewaterError as exc:
            log.warning("%s: the store is unreachable, cached lookups are used: %s", self.path, exc)
        for line in self._lines.feed(part, ends=ends):
            for answer in self._answered(line):
                held += answer
                if len(held) >= BATCH_BYTES:
                    yield bytes(held)
                    held.clear()
        yield bytes(held)

    def _answered(self, text: bytes | OversizedLine) -> Iterator[bytes]:
        named: object = None
        renew()
        try:
            if isinstance(text, OversizedLine):
                raise InvalidRequest("", "a longer line", f"lines of at most {MAX_LINE_BYTES} bytes")
            given = parse_json(text)
            named = given.get("id") if isinstance(given, dict) else None
            yield from map(_line, self.evaluator.answer(WindowQuestion.from_mapping(given, parse_time)))
        except EdgewaterError as exc:
            yield _line({"id": named, "error": problem_of(exc, self.path)})
        except WorkEnded as end:
            if isinstance(end.error, ClientGone):
                raise  # the other lines end, too
            yield _line({"id": named, "error": problem_of(end.error, self.path)})
        except Exception:
            # Status 200 is already sent, so an internal error fails only this line.
            log.exception("%s: %r", self.path, text)
            yield _line({"id": named, "error": problem_of(EdgewaterError(INTERNAL_ERROR), self.path)})


class DuplexResponse(Response):
    """Sends the answers to the lines of the body while it receives the body.

    Starlette's streaming response detects disconnects by reading the messages that this class reads as the body. So it
    cannot be used here.

    Args:
        answers: called with each chunk of the body, and whether it is the last chunk.
        require_allowed: called before each chunk is answered; raises EdgewaterError to end the stream.
        idle_s: time without a chunk after which the stream ends.
        lane: its threads answer lines, each with the budget of a request.
    """

    media_type = NDJSON

    def __init__(
        self,
        answers: Callable[[bytes, bool], Iterator[bytes]],
        require_allowed: Callable[[], Awaitable[None]],
        idle_s: float,
        lane: Lane,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._answers = answers
        self._require_allowed = require_allowed
        self._idle_s = idle_s
        self._lane = lane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        parts: asyncio.Queue[Part | None] = asyncio.Queue(_WAITING)
        disconnected = asyncio.Event()
        receiving = asyncio.create_task(_receive(receive, parts, disconnected, self._idle_s))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            async for body in self._bodies(parts, disconnected):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if not disconnected.is_set():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # ASGI 2.4: the client disconnected during a send
            log.debug("the client left")
        finally:
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receiving

    async def _bodies(self, parts: asyncio.Queue[Part | None], disconnected: asyncio.Event) -> AsyncIterator[bytes]:
        work = self._lane.work(disconnected.is_set)
        while (part := await parts.get()) is not None:
            try:
                await self._require_allowed()
            except EdgewaterError as exc:
                yield _line({"id": None, "error": problem_of(exc, "")})
                return
            answers = self._answers(*part)

            def further(answers: Iterator[bytes] = answers) -> bytes | None:
                with work.running():
                    return next(answers, None)

            while not disconnected.is_set():
                try:
                    body = await run_sync(further, limiter=self._lane.limiter)
                except ClientGone:
                    return
                if body is None:
                    break
                if body:
                    yield body
            if disconnected.is_set():
                return


async def _receive(
    receive: Receive, parts: asyncio.Queue[Part | None], disconnected: asyncio.Event, idle_s: float
) -> None:
    """Puts the chunks of the body into the queue, then None, and waits for the client to disconnect."""
    ended = False
    while True:
        try:
            async with asyncio.timeout(None if ended else idle_s):
                message = await receive()
        except TimeoutError:
            await parts.put(None)
            ended = True
            continue
        if message["type"] == "http.disconnect":
            disconnected.set()
            if not ended:
                await parts.put(None)
            return
        if ended:
            continue
        ended = not message.get("more_body", False)
        await parts.put((message.get("body", b""), ended))
        if ended:
            await parts.put(None)


def _line(value: object) -> bytes:
    return to_json(value) + b"\n"
