"""One center: time from acknowledgement to answer, highest sustained rate, start-up time.

The center is `edgewater center run`; frames are sent through its gateway, and an answer is timed when the live stream
of the REST API delivers it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.first_light.synthetic_edge import EDGE, WINDOW_MS, SyntheticEdge, spec, synopsis
from sim.demo.run import Demo

QUERIES = 10
GROUPS_4KB = 170
FIRST_MS = 1_600_000_000_000


def start(directory: Path) -> tuple[Demo, float]:
    """Starts a new center. Yields it and the seconds until it was ready."""
    demo = Demo(directory, 1.0)
    began = time.perf_counter()
    demo.start_center()
    return demo, time.perf_counter() - began


async def steady(demo: Demo, partials_s: float, seconds: float) -> dict[str, Any]:
    """Returns the time from acknowledgement to answer at a steady rate over `QUERIES` queries.

    Each frame closes a window.
    """
    names = [f"steady{i}" for i in range(QUERIES)]
    async with Load(demo, names) as load:
        payload = synopsis(GROUPS_4KB, 0)
        sent: dict[tuple[str, int], int] = {}
        began = time.perf_counter()
        for i in range(int(partials_s * seconds)):
            await asyncio.sleep(max(0.0, began + i / partials_s - time.perf_counter()))
            name, start_ms = names[i % QUERIES], FIRST_MS + (i // QUERIES) * WINDOW_MS
            sent[(name, start_ms)] = load.edge.put(name, start_ms, [payload])
        await load.wait_for(sent)
        waits = np.array([load.answered_at[key] - load.edge.acked_at[seq] for key, seq in sent.items()]) * 1000
    settled = waits[len(waits) // 5 :]
    return {
        "partials_s": partials_s,
        "partial_bytes": len(payload),
        "answers": len(waits),
        "ack_to_answer_ms_p50": float(np.quantile(settled, 0.5)),
        "ack_to_answer_ms_p95": float(np.quantile(settled, 0.95)),
    }


async def flood(
    demo: Demo, groups: int, partials_per_frame: int, windows: int, edges: Sequence[str] = (EDGE,)
) -> dict[str, Any]:
    """Returns the highest sustained rate, with frames sent as fast as the center accepts them.

    Args:
        partials_per_frame: of one window; each edge has one frame per window.
    """
    names = [f"flood{groups}x{i}" for i in range(QUERIES)]
    async with Load(demo, names, edges=edges) as load:
        payloads = [synopsis(groups, seed) for seed in range(8)]
        began = time.perf_counter()
        sent = {}
        for i in range(windows):
            name, start_ms = names[i % QUERIES], FIRST_MS + (i // QUERIES) * WINDOW_MS
            for number, edge in enumerate(load.edges):
                chosen = [payloads[(number + j) % 8] for j in range(partials_per_frame)]
                sent[(name, start_ms)] = edge.put(name, start_ms, chosen)
        await load.wait_for(sent)
        took = max(load.answered_at[key] for key in sent) - began
        acked = max(at for edge in load.edges for at in edge.acked_at.values()) - began
    partials = windows * len(edges) * partials_per_frame
    size = partials * len(payloads[0])
    return {
        "partial_bytes": len(payloads[0]),
        "partials": partials,
        "partials_s": partials / took,
        "mb_s": size / took / 1e6,
        "acked_partials_s": partials / acked,
        "seconds": took,
    }


class Load:
    """Synthetic edges and a live stream of answers, for a measurement.

    Attributes:
        edge: the first of `edges`.
        answered_at: time of the first answer of each (query, window start).
    """

    def __init__(
        self, demo: Demo, names: list[str], listened: list[str] | None = None, edges: Sequence[str] = (EDGE,)
    ) -> None:
        """Connects the edges and listens.

        Args:
            listened: the queries with a live stream; None: all.
        """
        self.demo, self.names = demo, names
        self._listened = names if listened is None else listened
        self.edges = [SyntheticEdge(f"127.0.0.1:{demo.gateway_port}", edge) for edge in edges]
        self.edge = self.edges[0]
        self.answered_at: dict[tuple[str, int], float] = {}

    async def __aenter__(self) -> Load:
        for name in self.names:
            document = spec(name, [edge.edge for edge in self.edges])
            self.demo.client.post("/v1/queries", json=document).raise_for_status()
        self._tasks = [asyncio.create_task(edge.uplink.run()) for edge in self.edges]
        self._tasks += [asyncio.create_task(self._listen(name)) for name in self._listened]
        await self._until(lambda: all(set(self.names) <= set(edge.queries) for edge in self.edges))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in self.names:
            self.demo.client.delete(f"/v1/queries/{name}")

    async def _listen(self, name: str) -> None:
        """Listens to live answers, restricted to one group, so that rendering does not dominate."""
        one_group, resume = {"group": "key:key-00000"}, dict[str, str]()
        async with httpx.AsyncClient(base_url=self.demo.url, timeout=None) as client:
            while True:  # the API ends its streams when its database is unreachable
                url = f"/v1/queries/{name}/live"
                async with client.stream("GET", url, params=one_group, headers=resume) as stream:
                    if stream.status_code < 500:
                        stream.raise_for_status()
                    async for line in stream.aiter_lines():
                        if line.startswith("id:"):
                            resume = {"Last-Event-ID": line[3:].strip()}
                        elif line.startswith("data:") and '"window"' in line:
                            answer = json.loads(line[5:])
                            start = round(_seconds(answer["window"]["start"]) * 1000)
                            self.answered_at.setdefault((answer["query"], start), time.perf_counter())
                await asyncio.sleep(0.05)

    async def wait_for(self, sent: dict[tuple[str, int], int]) -> None:
        await self._until(lambda: sent.keys() <= self.answered_at.keys())

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition. Raises the error of the uplink or the listener, or TimeoutError."""
        async with asyncio.timeout(300):
            while not condition():
                for task in self._tasks:
                    if task.done():
                        task.result()
                        raise RuntimeError(f"{task.get_coro()} has ended")
                await asyncio.sleep(0.02)


def _seconds(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()
