"""Runs edges with a query over modelled connections in virtual time, and measures answers and bytes."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from edge.uplink import LinkLimits
from edgewater.base.streams import StreamClock
from edgewater.model.query import QuerySpec
from sim.budgets.center import MergingCenter
from sim.budgets.link import SimulatedLink
from sim.budgets.outcome import PolicyOutcome, truth_per_window
from sim.budgets.trace import Trace
from sim.wire.center import CenterTimes, WireCenter
from sim.wire.connection import Call
from sim.wire.edge import EdgeTimes, WireEdge
from sim.wire.virtual_loop import VirtualLoop

EPOCH_MS = 1_767_225_600_000  # format: 2026-01-01
"""The wall time at which each simulation begins: 2026-01-01."""
POLL_S = 0.05  # limit: time of a simulation


@dataclass(frozen=True, slots=True)
class WireSettings:
    """The settings of a run.

    Attributes:
        speed: ms of event time for each ms of wall time.
        lead_s: edges connect this long before the first record is due.
        limit_s: the run ends at the latest this long after the end of the last window, even if windows are incomplete.
        limits: the limits of the edges' uplinks.
    """

    speed: float = 1.0
    lead_s: float = 3.0
    limit_s: float = 120.0
    edge: EdgeTimes = field(default_factory=EdgeTimes)
    center: CenterTimes = field(default_factory=CenterTimes)
    limits: LinkLimits = field(default_factory=lambda: LinkLimits(goodbye_s=0.01))


def run(
    trace: Trace, parts: list[Trace], query: QuerySpec, link: SimulatedLink, settings: WireSettings | None = None
) -> PolicyOutcome:
    """Runs the edges until every window is complete at the center.

    Args:
        trace: the records of all edges.
        parts: one per edge.
        query: tumbling windows; its first measure is evaluated.
        link: of each edge, in each direction.
    """
    settings = settings or WireSettings()
    loop = VirtualLoop(settings.edge.thread_s)
    try:
        with tempfile.TemporaryDirectory() as directory:
            return loop.run_until_complete(_run(loop, trace, parts, query, link, settings, Path(directory)))
    finally:
        loop.close()


async def _run(
    loop: VirtualLoop,
    trace: Trace,
    parts: list[Trace],
    query: QuerySpec,
    link: SimulatedLink,
    settings: WireSettings,
    directory: Path,
) -> PolicyOutcome:
    truth = truth_per_window(trace, query)
    starts, size = list(truth), query.window.slice_ms
    clock = StreamClock(starts[0], EPOCH_MS + round(1000 * settings.lead_s), settings.speed)
    merging = MergingCenter(trace, query, starts, len(parts))

    def now_ms() -> int:
        return EPOCH_MS + int(loop.time() * 1000)

    center = WireCenter(query, len(parts), merging, settings.center, clock, now_ms)
    calls, edges = list[Call](), []
    for number, part in enumerate(parts):
        calls.append(Call(loop, link, number, partial(center.serve, number)))
        center.connect(number, calls[-1])
        arguments = clock, directory / str(number), calls[-1], settings.edge, settings.limits, now_ms
        edges.append(WireEdge(number, part, query.stream, *arguments))
    tasks = [asyncio.create_task(each) for edge in edges for each in edge.loops()]
    tasks.append(asyncio.create_task(center.allocate()))
    last_s = settings.lead_s + (starts[-1] + size - starts[0]) / settings.speed / 1000
    try:
        while loop.time() < last_s + settings.limit_s and not all(map(merging.complete, range(len(parts)))):
            await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return merging.outcome(truth, size, center.entries, sum(call.carried_bytes for call in calls))
