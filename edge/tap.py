"""Shows decoded records: ``GET /v1/streams/{stream}/tap`` returns some records of the next chunk of a stream.

No record is stored for it. When a chunk is read, each request that waits for its stream gets some of its records.
Clients that may push records may use it. Without tokens, only clients on this machine may use it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edge.config import EdgeConfig
from edge.records import Chunk
from edge.sources import BearerTokens
from edgewater.base.errors import did_you_mean
from edgewater.runtime.problems import problem

MAX_WAITING = 8  # limit: requests that wait
MAX_RECORDS = 100  # limit: size of a reply
MAX_WAIT_S = 60.0  # limit: how long a request waits


class StreamTap:
    """Passes chunks to the requests that wait for one.

    Args:
        streams: names of the streams.
    """

    def __init__(self, streams: Iterable[str]) -> None:
        self._waiting: dict[str, dict[asyncio.Future[Chunk], str]] = {name: {} for name in streams}

    def offer(self, stream: str, chunk: Chunk) -> None:
        """Passes a chunk to all requests that wait for it. Called with each chunk that is read, before it is
        ingested.
        """
        if self._waiting[stream] and (chunk.batch.num_rows or chunk.rejected or chunk.guessed):
            for waiter, source in self._waiting[stream].items():
                if not waiter.done() and chunk.source.startswith(source):
                    waiter.set_result(chunk)

    async def next(self, stream: str, wait_s: float, source: str = "") -> Chunk | None:
        """Returns the next chunk of a stream; None if no chunk arrives in time.

        Args:
            wait_s: the longest wait, in seconds.
            source: the beginning of the names of the sources whose chunks count.
        """
        waiter: asyncio.Future[Chunk] = asyncio.get_running_loop().create_future()
        self._waiting[stream][waiter] = source
        try:
            async with asyncio.timeout(wait_s):
                return await waiter
        except TimeoutError:
            return None
        finally:
            del self._waiting[stream][waiter]

    @property
    def streams(self) -> list[str]:
        return sorted(self._waiting)

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))


def tap_routes(config: EdgeConfig, tap: StreamTap) -> list[Route]:
    """Returns the HTTP route of the tap."""
    tokens = BearerTokens(config.http.tokens)

    async def look(request: Request) -> Response:
        if tokens.principal(request) is None:
            detail = "a bearer token of http.tokens is required: Authorization: Bearer <token>"
            return problem(401, "unauthenticated", detail)
        stream = request.path_params["stream"]
        if stream not in tap.streams:
            near = did_you_mean(stream[:100], tap.streams)
            return problem(404, "not-found", f"no stream {stream[:100]!r}{near}; streams: {', '.join(tap.streams)}")
        asked = {}
        for name, default, most in (("records", 10.0, float(MAX_RECORDS)), ("wait", 10.0, MAX_WAIT_S)):
            text = request.query_params.get(name, str(default))
            try:
                asked[name] = float(text)
            except ValueError:
                asked[name] = math.nan
            if not 0 < asked[name] <= most:
                return problem(
                    422, "invalid-request", f"{name}: {text[:100]!r} is not accepted; expected up to {most:g}"
                )
        if tap.waiting >= MAX_WAITING:
            detail = f"{MAX_WAITING} requests wait for records already"
            return problem(429, "too-many-requests", detail, headers={"Retry-After": "1"})
        chunk = await tap.next(stream, asked["wait"], request.query_params.get("source", ""))
        return JSONResponse({"stream": stream, **_sample(chunk, max(1, int(asked["records"])))})

    return [Route("/v1/streams/{stream}/tap", look, methods=["GET"])]


def _sample(chunk: Chunk | None, count: int) -> dict[str, Any]:
    """Returns some records of a chunk at equal distances, the number of its records, and its rejections."""
    if chunk is None:
        return {"source": None, "of": 0, "records": [], "rejected": [], "guessed": []}
    rows = chunk.batch.num_rows
    at = np.unique(np.linspace(0, rows - 1, min(count, rows)).astype(np.int64)) if rows else np.arange(0)
    records = [_plain(record) for record in chunk.batch.take(at).to_pylist()]
    rejected, guessed = ([each.to_json() for each in part] for part in (chunk.rejected, chunk.guessed))
    return {"source": chunk.source, "of": rows, "records": records, "rejected": rejected, "guessed": guessed}


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record for JSON, which has no NaN and no infinity."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
