"""`ResponseMiddleware`: middleware that sees the start of each response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

OnStart: TypeAlias = Callable[[Message], Awaitable[None]]
"""Called with the message that starts a response, which it may change, before the message is sent."""


class ResponseMiddleware(ABC):
    """Middleware of HTTP requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    @abstractmethod
    def begin(self, scope: Scope) -> OnStart:
        """Is called with each request. Returns what is called when its response starts."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        on_start = self.begin(scope)

        async def noted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                await on_start(message)
            await send(message)

        await self._app(scope, receive, noted_send)
