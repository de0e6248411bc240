"""Agents with real sources and a real journal, and a real gateway, in one event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from center.catalog import Catalog
from center.config import CenterConfig
from center.ingest.gateway import Gateway
from center.storage.frame_log import FrameLog
from edge.agent import Agent
from edge.config import parse_config
from edge.process import now_ms
from edgewater.base.streams import MAX_TIME_MS
from edgewater.model.query import QuerySpec
from edgewater.wire import FrameBody
from sim.demo.ports import free_address
from tests.center.kept_frames import stored_body
from tests.query_specs import query_spec

DAY_MS = 86_400_000
QUERY = query_spec(
    name="miles",
    stream="flights",
    group_by=["carrier"],
    measures={"flights": "count()", "miles": "sum(distance)", "longest": "max(distance)"},
    window={"tumbling": "1d"},
)
START_MS = 1_600_000_000_000 // DAY_MS * DAY_MS


def lines(rows: range) -> str:
    return "".join(
        json.dumps({"carrier": f"C{i % 7}", "distance": i, "at": START_MS + i * 3_600_000}) + "\n" for i in rows
    )


def closed(rows: range) -> dict[tuple[str, int], dict[Any, dict[str, float]]]:
    """The expected groups of all days but the last."""
    want = expected(rows)
    return {key: groups for key, groups in want.items() if key[1] < max(want)[1]}


def expected(rows: range) -> dict[tuple[str, int], dict[Any, dict[str, float]]]:
    result: dict[tuple[str, int], dict[Any, dict[str, float]]] = {}
    for i in rows:
        start = (START_MS + i * 3_600_000) // DAY_MS * DAY_MS
        groups = result.setdefault(("miles", start), {})
        held = groups.setdefault(f"C{i % 7}", {"flights": 0.0, "miles": 0.0, "longest": 0.0})
        held["flights"] += 1
        held["miles"] += i
        held["longest"] = max(held["longest"], i)
    return result


class Center:
    """A real gateway, catalog and frame log."""

    def __init__(self, directory: Path) -> None:
        self.catalog = Catalog(f"sqlite:///{directory / 'catalog.db'}")
        self.log = FrameLog(directory / "log")
        self.gateway: Gateway | None = None
        self.port = 0

    async def start(self) -> None:
        self.gateway = Gateway(self.catalog, self.log, CenterConfig(), now_ms)
        self.port = await self.gateway.start(f"127.0.0.1:{self.port}")

    async def stop(self) -> None:
        if self.gateway is not None:
            await self.gateway.stop()
            self.gateway = None

    def bodies(self) -> list[tuple[str, FrameBody]]:
        result = []
        for key, last in self.catalog.frames.last_positions().items():
            for entry in self.catalog.frames.entries(key, 0, last):
                result.append((entry.query.name, stored_body(self.catalog, self.log, entry)))
        return result

    def ended(self) -> bool:
        return any(body.through_ms == MAX_TIME_MS for _, body in self.bodies())


NDJSON = {"Content-Type": "application/x-ndjson"}


def config(directory: Path, center: Center, sources: list[dict[str, Any]], *, idle: str = "1d", **more: Any) -> Any:
    return parse_config(
        {
            "edge": "jfk",
            "center": {"address": f"127.0.0.1:{center.port}"},
            "state_dir": str(directory / "state"),
            "http": {"listen": free_address()},
            "streams": {
                "flights": {
                    "columns": {"carrier": "string", "distance": "int64"},
                    "time": {"column": "at", "unit": "ms"},
                    "idle": idle,
                    "sources": sources,
                }
            },
            **more,
        }
    )


@asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[asyncio.Task[None]]:
    stop = asyncio.Event()
    task = asyncio.create_task(agent.run(stop))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait([task], timeout=20)
        task.result()


async def until(condition: Callable[[], bool], what: str, task: asyncio.Task[None] | None = None) -> None:
    """Waits for a state of the real processes; the timeout is generous, the wait is not."""
    async with asyncio.timeout(120):
        while not condition():
            if task is not None and task.done():
                task.result()
            await asyncio.sleep(0.02)


def with_center(*queries: QuerySpec) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Runs a test on an event loop, with a center that has these queries; by default, `QUERY`."""

    def decorated(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def run(tmp_path: Path, **fixtures: Any) -> None:
            async def main() -> None:
                center = Center(tmp_path)
                for query in queries or (QUERY,):
                    center.catalog.queries.register(query, now_ms())
                await center.start()
                try:
                    await test(center, tmp_path=tmp_path, **fixtures)
                finally:
                    await center.stop()
                    center.catalog.close()

            asyncio.run(main())

        functools.update_wrapper(run, test)
        asked = inspect.signature(test)
        run.__signature__ = asked.replace(  # type: ignore[attr-defined]
            parameters=[each for name, each in asked.parameters.items() if name != "center"]
        )
        return run

    return decorated


@asynccontextmanager
async def serving(agent: Agent) -> AsyncIterator[tuple[asyncio.Task[None], httpx.AsyncClient]]:
    """Runs an agent. Yields its task, and a client of it, when it knows its queries."""
    async with running(agent) as task, httpx.AsyncClient(base_url=f"http://{agent.config.http.listen}") as client:
        await until(agent.outbox.configured.is_set, "queries", task)
        yield task, client


async def push_to(client: httpx.AsyncClient, text: str, **headers: str) -> httpx.Response:
    return await client.post("/v1/streams/flights", content=text, headers={**NDJSON, **headers}, timeout=20)
