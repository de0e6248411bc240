"""Small queries beside a heavy one: the delay of their answers, alone and while 300 MB of partials of a window come."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.first_light.center_rates import FIRST_MS, Load, steady
from bench.first_light.synthetic_edge import WINDOW_MS, synopsis
from bench.scale.processes import CpuMeter, started
from edgewater.wire import FrameBody, Partial

SMALL, EVERY_S, WINDOWS = 10, 0.5, 40
"""Number of small queries, interval of their windows, and number of windows that are measured alone."""
GROUPS, EDGES, FRAMES = 170_000, 8, 10
"""Of the heavy query: groups of a partial of 3.9 MB, edges, and frames of each edge for one window."""
SETTINGS: dict[str, Any] = {
    "api": {"limits": {"changes": "1000/second"}},
    "gateway": {"work": 100_000_000},
    "spark": {"max_answer": "512MiB"},
}
"""The limits that a query of 300 MB a window needs: an edge's work a second, and the size of an answer."""


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
    large = [synopsis(groups, seed) for seed in range(EDGES)]
    async with Load(demo, names) as small, Load(demo, ["heavy"], edges=[f"h{n}" for n in range(EDGES)]) as heavy:
        number = 0

        async def one_window() -> float:
            nonlocal number
            start_ms, began_s = FIRST_MS + number * WINDOW_MS, time.perf_counter()
            number += 1
            for name in names:
                small.edge.put(name, start_ms, [payload])
            await small.wait_for({(name, start_ms): 0 for name in names})
            at_s = sorted(small.answered_at[name, start_ms] for name in names)
            await asyncio.sleep(max(0.0, began_s + EVERY_S - time.perf_counter()))
            return (at_s[-1] - began_s) * 1000

        alone = [await one_window() for _ in range(windows)]
        meter, began_s = CpuMeter(demo), time.perf_counter()
        for each in range(FRAMES):
            for edge, data in zip(heavy.edges, large, strict=True):
                if each < FRAMES - 1:
                    edge.put_body("heavy", FrameBody(FIRST_MS, (Partial(FIRST_MS, data),)))
                else:
                    edge.put("heavy", FIRST_MS, [data])
        beside = []
        while ("heavy", FIRST_MS) not in heavy.answered_at:
            beside.append(await one_window())
        took_s, used = heavy.answered_at["heavy", FIRST_MS] - began_s, meter.seconds()
    rows = {"alone": _row(alone), "beside": _row(beside)}
    return rows | {
        "p95_ratio": round(rows["beside"]["p95_ms"] / rows["alone"]["p95_ms"], 2),
        "heavy_mb": round(EDGES * FRAMES * len(large[0]) / 1e6, 1),
        "heavy_answered_s": round(took_s, 1),
        "cpu_s": used,
    }


def _row(delays_ms: list[float]) -> dict[str, float]:
    p50, p95 = np.percentile(delays_ms, [50, 95])
    largest = max(delays_ms)
    return {"windows": len(delays_ms), "p50_ms": round(p50), "p95_ms": round(p95), "max_ms": round(largest)}
