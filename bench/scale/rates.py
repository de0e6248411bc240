"""Partials through a whole center, and the close of a window by many queries: rates, and CPU seconds by process."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.first_light.center_rates import FIRST_MS, GROUPS_4KB, Load, flood, steady
from bench.first_light.synthetic_edge import EDGE, WINDOW_MS, synopsis
from bench.scale.processes import CpuMeter, counters, metered, started
from sim.demo.run import Demo

LOAD = "load generator"
WARM_UP_S = 20
SETTINGS: dict[str, Any] = {"api": {"limits": {"changes": "1000/second"}}, "gateway": {"work_per_s": 100_000_000}}
"""By default an edge gets 25,000 units of work a second, which are 1,316 of the small partials. With one edge the bench
would measure this share."""


def measure(smoke: bool) -> dict[str, Any]:
    """Returns the rows of one center, all as fast as it accepts frames.

    They are: partials of 3.6 KB, 32 a window, in one frame and in frames of 32 edges; partials of 200 KB, one a window
    and of 8 edges; and windows that many queries close at the same time.
    """
    with tempfile.TemporaryDirectory() as directory:
        demo, start = started(Path(directory), metered(SETTINGS))
        try:
            # While the JVM loads and compiles its classes, a batch costs ten times as much as later.
            asyncio.run(steady(demo, 20, 1 if smoke else WARM_UP_S))
            small = _flood(demo, GROUPS_4KB, 32, 10 if smoke else 1_000)
            large = _flood(demo, 10_000, 1, 10 if smoke else 400)
            names = [f"e{i}" for i in range(2 if smoke else 32)]
            small_many = _flood(demo, GROUPS_4KB, 1, 10 if smoke else 200, names)
            large_many = _flood(demo, 10_000, 1, 10 if smoke else 100, names[:8])
            queries = asyncio.run(_close(demo, 20, 2) if smoke else _close(demo, 500, 5))
        finally:
            demo.stop()
    return {
        "start_cpu_s": start,
        "small_partials_s": round(small["partials_s"], 1),
        "small": small,
        "large_mb_s": round(large["mb_s"], 2),
        "large": large,
        "small_of_32_edges": small_many,
        "large_of_8_edges": large_many,
        "queries": queries,
    }


def _flood(
    demo: Demo, groups: int, partials_per_frame: int, windows: int, edges: Sequence[str] = (EDGE,)
) -> dict[str, Any]:
    meter = CpuMeter(demo)
    done = asyncio.run(flood(demo, groups, partials_per_frame, windows, edges))
    used = meter.seconds()
    each = {kind: round(s / done["partials"] * 1e6, 1) for kind, s in used.items() if kind != "wall"}
    center = sum(us for kind, us in each.items() if kind != LOAD)
    return done | {"cpu_us_per_partial": each, "cpu_us_per_partial_of_the_center": round(center, 1)}


async def _close(demo: Demo, count: int, windows: int) -> dict[str, Any]:
    """Returns the CPU of a window's close by many queries of one edge: a small frame each, all at the same time."""
    names = [f"q{i}" for i in range(count)]
    async with Load(demo, names, listened=names[:1]) as load:
        payload = synopsis(1, 0)

        async def close(number: int) -> float:
            start_ms, began_s = FIRST_MS + number * WINDOW_MS, time.perf_counter()
            for name in names[1:]:
                load.edge.put(name, start_ms, [payload])
            # The listened query's frame is the last one, so its answer is among the last.
            load.edge.put(names[0], start_ms, [payload])
            await load.wait_for({(names[0], start_ms): 0})
            return time.perf_counter() - began_s

        await close(0)
        before, meter = await asyncio.to_thread(counters, demo), CpuMeter(demo)
        took_s = [await close(number) for number in range(1, windows + 1)]
        used, after = meter.seconds(), await asyncio.to_thread(counters, demo)
    center = sum(s for kind, s in used.items() if kind not in (LOAD, "wall"))
    return {
        "queries": count,
        "close_cpu_s": round(center / windows, 3),
        "cpu_s_per_close": {kind: round(s / windows, 3) for kind, s in used.items() if kind != "wall"},
        "close_to_answer_s": round(sorted(took_s)[len(took_s) // 2], 3),
        "batches_per_close": (after["edgewater_job_batches_total"] - before["edgewater_job_batches_total"]) / windows,
        "commits_per_close": (after["edgewater_gateway_commits_total"] - before["edgewater_gateway_commits_total"])
        / windows,
    }
