"""Limits of the resources that clients use: rates per principal, open streams, and responses that clients do not
read.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Literal
from weakref import WeakValueDictionary

import limits
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from center.api.problems import HttpProblem, problem_response
from center.api_access import ANYONE, Principal
from center.config import ApiLimitsSection

OnRefused = Callable[[str], None]
"""Called with the reason of each refusal."""
RETRY_AFTER = {"Retry-After": "5"}
MAX_WAITING = 256
"""How many requests of one principal may read or wait for their turn."""
PART_BYTES = 64 << 10  # limit: bytes that wait for a slow client
"""Responses are passed to the transport in parts of this size. For a slow client, only two parts are in memory."""
MAX_PARAMETERS = 1_000
"""Maximum number of parameters in a query string; FastAPI validates them on the event loop."""


class Rates:
    """The rates of requests that a principal may send. Each API process counts for itself."""

    def __init__(self, config: ApiLimitsSection, on_refused: OnRefused) -> None:
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._rates = {
            "reads": limits.parse(config.reads),
            "changes": limits.parse(config.changes),
            "registrations": limits.parse(config.registrations),
        }
        self._on_refused = on_refused

    async def spend(self, principal: Principal, kind: Literal["reads", "changes", "registrations"]) -> None:
        """Counts a request. Raises HttpProblem: too-many-requests."""
        if principal is ANYONE:
            return
        rate = self._rates[kind]
        if await self._limiter.hit(rate, kind, principal.name):
            return
        self._on_refused(f"{kind}-rate")
        stats = await self._limiter.get_window_stats(rate, kind, principal.name)
        wait_s = max(1, math.ceil(stats.reset_time - time.time()))  # noqa: TID251  # the library's clock
        raise HttpProblem(
            "too-many-requests", f"{principal.name} may send {rate} ({kind})", {"Retry-After": str(wait_s)}
        )


class Slots:
    """Limits how many live streams may be open at once, in total and per principal."""

    def __init__(self, most: int, most_per_principal: int, on_refused: OnRefused) -> None:
        self._most, self._most_per_principal = most, most_per_principal
        self._held: Counter[str] = Counter()
        self._on_refused = on_refused

    @contextlib.contextmanager
    def held(self, principal: Principal) -> Iterator[None]:
        """Holds a slot while entered. Raises HttpProblem: too-many-requests if the principal has too many streams,
        unavailable if all slots are used.
        """
        if principal is not ANYONE and self._held[principal.name] >= self._most_per_principal:
            self._on_refused("live-per-principal")
            text = f"{principal.name} has {self._most_per_principal} live streams open"
            raise HttpProblem("too-many-requests", text, RETRY_AFTER)
        if self._held.total() >= self._most:
            self._on_refused("live")
            raise HttpProblem("unavailable", f"{self._most} live streams are open", RETRY_AFTER)
        self._held[principal.name] += 1
        try:
            yield
        finally:
            self._held[principal.name] -= 1
            self._held += Counter()  # forgets principals without a stream


class ReadTurns:
    """Limits how many requests of each principal read at the same time. Further requests wait for their turn.

    So one principal does not use all of the threads that read and render.
    """

    def __init__(self, most_per_principal: int, on_refused: OnRefused) -> None:
        self._most = most_per_principal
        self._semaphores: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._requests: Counter[str] = Counter()
        self._on_refused = on_refused

    @contextlib.asynccontextmanager
    async def taken(self, principal: Principal) -> AsyncIterator[None]:
        """Holds a turn while entered. Raises HttpProblem: too-many-requests if too many wait."""
        if principal is ANYONE:
            yield
            return
        name = principal.name
        if self._requests[name] >= MAX_WAITING:
            self._on_refused("reads-waiting")
            raise HttpProblem("too-many-requests", f"{MAX_WAITING} requests of {name} wait already", RETRY_AFTER)
        self._requests[name] += 1
        try:
            async with self._semaphores.setdefault(name, asyncio.Semaphore(self._most)):
                yield
        finally:
            self._requests[name] -= 1
            self._requests += Counter()  # forgets principals without a request


class InSlot(Response):
    """A response that wraps another one, and holds a slot while it is sent."""

    def __init__(self, inner: Response, slots: Slots, principal: Principal) -> None:
        super().__init__()
        self._inner, self._slots, self._principal = inner, slots, principal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._slots.held(self._principal):
            await self._inner(scope, receive, send)


class PendingResponses:
    """Middleware: limits the bytes of all large responses that clients have not read.

    The server closes the connection of a client that reads no part of its response for long.
    """

    def __init__(self, app: ASGIApp, most_bytes: int, on_refused: OnRefused) -> None:
        self._app = app
        self._most_bytes = most_bytes
        self._on_refused = on_refused
        self._pending = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["query_string"].count(b"&") >= MAX_PARAMETERS:
            self._on_refused("parameters")
            detail = f"a request has at most {MAX_PARAMETERS} parameters"
            await problem_response("invalid-request", detail, instance=scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, _Sending(self, scope, receive, send))

    @contextlib.contextmanager
    def held(self, count: int) -> Iterator[bool]:
        """Counts the bytes of a response while entered; yields whether there is room for them."""
        fits = self._pending == 0 or self._pending + count <= self._most_bytes
        if not fits:
            self._on_refused("responses")
            yield False
            return
        self._pending += count
        try:
            yield True
        finally:
            self._pending -= count


class _Sending:
    """Passes the messages of one response on: a large body in parts, or a problem instead of it."""

    def __init__(self, pending: PendingResponses, scope: Scope, receive: Receive, send: Send) -> None:
        self._pending = pending
        self._scope, self._receive, self._send = scope, receive, send
        self._start: Message | None = None
        self._ended = False

    async def __call__(self, message: Message) -> None:
        if self._ended:
            return
        if (
            message["type"] == "http.response.start"
            and int(Headers(scope=message).get("content-length", 0)) > PART_BYTES
        ):
            self._start = message  # sent later: only the body shows whether there is room for it
            return
        body = message.get("body", b"")
        if message["type"] != "http.response.body" or len(body) <= PART_BYTES:
            await self._flush_start()
            await self._send(message)
            return
        with self._pending.held(len(body)) as fits:
            if not fits and self._start is not None:
                self._ended = True
                detail = "clients have not taken earlier responses yet"
                refusal = problem_response("unavailable", detail, instance=self._scope["path"], headers=RETRY_AFTER)
                await refusal(self._scope, self._receive, self._send)
                return
            await self._flush_start()
            more = message.get("more_body", False)
            for at in range(0, len(body), PART_BYTES):
                is_last = at + PART_BYTES >= len(body)
                part = {"type": "http.response.body", "body": body[at : at + PART_BYTES]}
                await self._send({**part, "more_body": more or not is_last})

    async def _flush_start(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)
