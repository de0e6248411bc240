"""Small queries beside a heavy one: the delay of their answers, alone and while 300 MB of partials of a window come.

The heavy query's edges are another process. Otherwise the delays would contain the work of preparing their frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.first_light.center_rates import FIRST_MS, Load, steady
from bench.first_light.synthetic_edge import WINDOW_MS, SyntheticEdge, spec, synopsis
from bench.scale.processes import CpuMeter, leading_driver, started
from edgewater.wire import FrameBody, Partial, SliceClose

SMALL, EVERY_S, WINDOWS = 10, 0.5, 40
"""Number of small queries, interval of their windows, and number of windows that are measured alone."""
GROUPS, EDGES, FRAMES = 170_000, 8, 10
"""Of the heavy query: groups of a partial of 3.9 MB, edges, and frames of each edge for one window."""
HEAVY = "heavy"
SETTINGS: dict[str, Any] = {
    "api": {"limits": {"changes": "1000/second"}},
    "gateway": {"work_per_s": 100_000_000},
    "spark": {"max_answer_bytes": "512MiB"},
}
"""The limits that a query of 300 MB a window needs: an edge's work a second, and the size of an answer."""
MIB, POLL_S = 1 << 20, 0.1


def measure(smoke: bool) -> dict[str, Any]:
    """Returns the delays of the small queries' answers in ms, and when the heavy query was answered."""
    with tempfile.TemporaryDirectory() as directory:
        demo, _ = started(Path(directory), SETTINGS)
        try:
            asyncio.run(steady(demo, 20, 1 if smoke else 20))
            return asyncio.run(_measure(demo, 2 if smoke else WINDOWS, 1_000 if smoke else GROUPS))
        finally:
            demo.stop()


async def _measure(demo: Any, windows: int, groups: int) -> dict[str, Any]:
    names, payload = [f"s{n}" for n in range(SMALL)], synopsis(1, 0)
    demo.client.post("/v1/queries", json=spec(HEAVY, _edges())).raise_for_status()
    with _heavy_edges(f"127.0.0.1:{demo.gateway_port}", groups) as (pipe, heavy_bytes):
        async with Load(demo, names) as small:
            number = 0

            async def one_window() -> tuple[float, float]:
                """Returns the delays of the last answer in ms, from its frame and from its acknowledgement."""
                nonlocal number
                start_ms, began_s = FIRST_MS + number * WINDOW_MS, time.perf_counter()
                number += 1
                sent = {(name, start_ms): small.edge.put(name, start_ms, [payload]) for name in names}
                await small.wait_for(sent)
                answered_s = max(small.answered_at[at] for at in sent)
                acked_s = max(small.edge.acked_at.get(seq, began_s) for seq in sent.values())
                return (answered_s - began_s) * 1000, max(0.0, answered_s - acked_s) * 1000

            async def windows_until(is_enough: Callable[[int], bool]) -> list[tuple[float, float]]:
                """Begins a window each `EVERY_S`, whether or not the last one is answered. Slow windows count fully."""
                began_s, tasks = time.perf_counter(), list[asyncio.Task[tuple[float, float]]]()
                while not await asyncio.to_thread(is_enough, len(tasks)):
                    tasks.append(asyncio.create_task(one_window()))
                    await asyncio.sleep(max(0.0, began_s + len(tasks) * EVERY_S - time.perf_counter()))
                return await asyncio.gather(*tasks)

            alone = await windows_until(lambda count: count >= windows)
            meter, began_s = CpuMeter(demo), time.perf_counter()
            driver = psutil.Process(leading_driver(demo))
            before_mib, most_mib, took_s = _mib(driver), 0.0, 0.0
            pipe.send(None)

            def is_answered(_: int) -> bool:
                nonlocal most_mib, took_s
                most_mib, took_s = max(most_mib, _mib(driver)), time.perf_counter() - began_s
                latest = demo.client.get(f"/v1/queries/{HEAVY}/latest", params={"group": "key:key-00000"})
                return bool(latest.status_code == 200)

            beside = await windows_until(is_answered)
            used = meter.seconds()
    rows = {"alone": _row(alone), "beside": _row(beside)}
    return rows | {
        "p95_ratio": round(rows["beside"]["p95_ms"] / rows["alone"]["p95_ms"], 2),
        "ack_p95_ratio": round(rows["beside"]["ack_p95_ms"] / rows["alone"]["ack_p95_ms"], 2),
        "heavy_mb": round(heavy_bytes / 1e6, 1),
        "heavy_answered_s": round(took_s, 1),
        "driver_mib": {"before": round(before_mib), "most": round(most_mib)},
        "cpu_s": used,
    }


def _mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / MIB


def _row(delays_ms: list[tuple[float, float]]) -> dict[str, float]:
    answers, after_ack = np.array(delays_ms).T
    p50, p95 = np.percentile(answers, [50, 95])
    row = {"windows": len(delays_ms), "p50_ms": round(p50), "p95_ms": round(p95), "max_ms": round(max(answers))}
    return row | {"ack_p50_ms": round(np.median(after_ack)), "ack_p95_ms": round(np.percentile(after_ack, 95))}


# The heavy query's edges


def _edges() -> list[str]:
    return [f"h{n}" for n in range(EDGES)]


@contextlib.contextmanager
def _heavy_edges(address: str, groups: int) -> Iterator[tuple[Connection, int]]:
    """Starts the process. Yields a pipe; the process sends its frames when it receives anything. And their bytes."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, address, groups), daemon=True)
    process.start()
    try:
        yield pipe, pipe.recv()
    finally:
        process.kill()
        process.join()


def _send(pipe: Connection, address: str, groups: int) -> None:
    asyncio.run(_sending(pipe, address, [synopsis(groups, seed) for seed in range(EDGES)]))


async def _sending(pipe: Connection, address: str, partials: list[bytes]) -> None:
    edges = [SyntheticEdge(address, name) for name in _edges()]
    uplinks = [asyncio.create_task(edge.uplink.run()) for edge in edges]
    while not all(HEAVY in edge.queries for edge in edges):
        await asyncio.sleep(POLL_S)
    # Real edges are other machines, so their work is done before the measurement.
    frames = [
        [edge.pack(HEAVY, _body(data, is_last=each == FRAMES - 1)) for each in range(FRAMES)]
        for edge, data in zip(edges, partials, strict=True)
    ]
    pipe.send(FRAMES * sum(map(len, partials)))
    await asyncio.to_thread(pipe.recv)
    for edge, of_edge in zip(edges, frames, strict=True):
        for frame in of_edge:
            edge.queue.put_nowait(frame)
    await asyncio.gather(*uplinks)


def _body(data: bytes, *, is_last: bool) -> FrameBody:
    closes = (SliceClose(FIRST_MS, FRAMES, 0),) if is_last else ()
    return FrameBody(FIRST_MS + WINDOW_MS if is_last else FIRST_MS, (Partial(FIRST_MS, data),), closes)
