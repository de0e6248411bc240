"""The push endpoint of an edge, with an agent that journals nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
from starlette.applications import Starlette

from edge.config import parse_config
from edge.records import Chunk
from edge.series import SeriesMemory
from edge.sources.factory import package_receivers
from edge.sources.http import StreamReceiver
from edge.sources.receiving import PushEndpoint, Unavailable


class PushEdge:
    """An endpoint whose agent takes chunks.

    Attributes:
        taken: the chunks that were taken, with their streams.
        refused: requests by the reason of their refusal.
        unavailable: why the next requests are refused, each once.
    """

    def __init__(
        self, streams: dict[str, Any], now_ms: int, http: dict[str, Any] | None = None, **limits: object
    ) -> None:
        document = {"edge": "e", "state_dir": "state", "streams": streams, "http": http or {}, "limits": limits}
        config = parse_config(document, {})
        self.taken: list[tuple[str, Chunk]] = []
        self.refused = Counter[str]()
        self.unavailable: list[Unavailable] = []
        self.series: dict[str, SeriesMemory] = {}
        self.endpoint = PushEndpoint(
            [StreamReceiver.of(config), *package_receivers(config, lambda: now_ms)], config, self.accept,
            lambda: self.unavailable.pop() if self.unavailable else None, lambda: now_ms, count_refused=self.count,
            series_of=lambda source: self.series.setdefault(source, SeriesMemory((now_ms - 3_600_000) * 1_000_000)),
        )  # fmt: skip
        self.app = Starlette(routes=self.endpoint.routes)

    def count(self, reason: str) -> None:
        self.refused[reason] += 1

    async def accept(self, chunk: Chunk, stream: str) -> int | None:
        self.taken.append((stream, chunk))
        return None

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://edge")

    async def send(self, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, content=body, headers=headers)

    def sent(self, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
        return asyncio.run(self.send(path, body, headers))
