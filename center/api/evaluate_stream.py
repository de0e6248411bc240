"""A stream of questions in, a stream of answers out, both at once, in bounded memory.

LineSplitter are answered in the order in which they come, a few at a time: while some are evaluated, the next
part of the body is received. A client that does not read is not evaluated for; one that leaves stops the
work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from anyio.to_thread import run_sync
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from center.api.problems import INTERNAL_ERROR, problem_of
from center.api.time_params import parse_time
from center.serving import Evaluator, StoredWindows, WindowQuestion, parse_json
from edgewater.errors import EdgewaterError, InvalidRequest

NDJSON = "application/x-ndjson"
READ_TYPES = (NDJSON, "application/ndjson", "application/jsonl", "application/json-lines")
MAX_LINE_BYTES = 64 << 10
BATCH_BYTES = 64 << 10
"""Bytes of an answer after which it is sent, and the client may have left."""
_WAITING = 2
"""Parts of the body that may wait for evaluation."""

log = logging.getLogger(__name__)


class OversizedLine:
    """Stands for a line of more than `MAX_LINE_BYTES`, which is not kept."""


@dataclass(slots=True)
class LineSplitter:
    """Cuts parts of a body into lines; holds at most one that is not complete."""

    _rest: bytearray = field(default_factory=bytearray)
    _dropping: bool = False

    def feed(self, part: bytes, *, ends: bool = False) -> list[bytes | OversizedLine]:
        """The lines that are complete with this part; the last one needs no line break if the body `ends`."""
        found: list[bytes | OversizedLine] = []
        for piece in _split(part):
            self._take(piece, found)
        if ends:
            self._finish(found)
        return found

    def _take(self, piece: bytes, found: list[bytes | OversizedLine]) -> None:
        if not self._dropping:
            self._rest += piece
            if len(self._rest) > MAX_LINE_BYTES + 1:
                self._dropping = True
                self._rest.clear()
        if piece.endswith(b"\n"):
            self._finish(found)

    def _finish(self, found: list[bytes | OversizedLine]) -> None:
        if self._dropping:
            found.append(OversizedLine())
        elif self._rest.strip():
            found.append(bytes(self._rest))
        self._rest.clear()
        self._dropping = False


def _split(part: bytes) -> Iterator[bytes]:
    """At line feeds only: a carriage return belongs to the white space of JSON."""
    start = 0
    while start < len(part):
        end = part.find(b"\n", start)
        end = len(part) if end < 0 else end + 1
        yield part[start:end]
        start = end


@dataclass(slots=True)
class LineEvaluator:
    """Answers lines about one query.

    Attributes:
        path: of the request, for problems.
    """

    windows: StoredWindows
    evaluator: Evaluator
    path: str

    def answers(self, lines: list[bytes | OversizedLine]) -> Iterator[bytes]:
        """Answers as NDJSON, at least one line for each; blocks. Every part is about `BATCH_BYTES`."""
        held = bytearray()
        try:
            self.windows.refresh()
        except EdgewaterError as exc:
            log.warning("%s: answers as they stood before: %s", self.path, exc)
        for line in lines:
            for answer in self._answered(line):
                held += answer
                if len(held) >= BATCH_BYTES:
                    yield bytes(held)
                    held.clear()
        yield bytes(held)

    def _answered(self, text: bytes | OversizedLine) -> Iterator[bytes]:
        named: object = None
        try:
            if isinstance(text, OversizedLine):
                raise InvalidRequest("", "a longer line", f"lines of at most {MAX_LINE_BYTES} bytes")
            given = parse_json(text)
            named = given.get("id") if isinstance(given, dict) else None
            yield from map(_json, self.evaluator.answer(WindowQuestion.from_mapping(given, parse_time)))
        except EdgewaterError as exc:
            yield _json({"id": named, "error": problem_of(exc, self.path)})
        except Exception:
            # Ours to mend, but not to be paid for by the other lines, whose status 200 is out already.
            log.exception("%s: %r", self.path, text)
            yield _json({"id": named, "error": problem_of(EdgewaterError(INTERNAL_ERROR), self.path)})


class DuplexResponse(Response):
    """Sends what `answers` makes of the lines of the body, while it receives the body.

    Starlette's own streaming response waits for the client to leave by reading what this reads as the body,
    so it cannot be used here.
    """

    media_type = NDJSON

    def __init__(self, answers: Callable[[list[bytes | OversizedLine]], Iterator[bytes]]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        parts: asyncio.Queue[list[bytes | OversizedLine] | None] = asyncio.Queue(_WAITING)
        gone = asyncio.Event()
        receiving = asyncio.create_task(_receive(receive, parts, gone))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            async for body in self._bodies(parts, gone):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if not gone.is_set():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # ASGI 2.4: the client left while something was sent
            log.debug("the client left")
        finally:
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receiving

    async def _bodies(
        self, parts: asyncio.Queue[list[bytes | OversizedLine] | None], gone: asyncio.Event
    ) -> AsyncIterator[bytes]:
        while (lines := await parts.get()) is not None:
            answers = self._answers(lines)
            while not gone.is_set() and (body := await run_sync(next, answers, None)) is not None:
                if body:
                    yield body
            if gone.is_set():
                return


async def _receive(
    receive: Receive, parts: asyncio.Queue[list[bytes | OversizedLine] | None], gone: asyncio.Event
) -> None:
    """Puts the lines of the body into `parts`, None behind them, and then waits for the client to leave."""
    lines = LineSplitter()
    ended = False
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            gone.set()
            if not ended:
                await parts.put(None)
            return
        if ended:
            continue
        ended = not message.get("more_body", False)
        found = lines.feed(message.get("body", b""), ends=ended)
        if found:
            await parts.put(found)
        if ended:
            await parts.put(None)


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
