"""A driver that is killed, or stalled until another has taken over: time until the next answer, and that none is wrong.

An edge ships ten windows a second. The time runs from the signal until the live stream delivers the answer of a window
that was shipped after it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.first_light.center_rates import FIRST_MS, Load
from bench.first_light.synthetic_edge import WINDOW_MS, synopsis
from bench.scale.processes import job_readiness, leading_driver, started
from sim.demo.run import Demo

NAME = "takeover"
GROUPS = 20
EVERY_S = 0.1
BEFORE_S, AFTER_S = 3.0, 5.0


@dataclass(frozen=True, slots=True)
class Case:
    """What happens to the driver that leads."""

    name: str
    standby: bool
    fault: signal.Signals


CASES = (
    Case("killed, no standby", False, signal.SIGKILL),
    Case("killed, standby", True, signal.SIGKILL),
    Case("stalled, standby", True, signal.SIGSTOP),
)


def measure(smoke: bool) -> dict[str, Any]:
    """One row per case."""
    rows = {}
    for case in CASES[1:2] if smoke else CASES:
        with tempfile.TemporaryDirectory() as directory:
            demo, _ = started(Path(directory), {"spark": {"standby": case.standby}})
            try:
                rows[case.name] = asyncio.run(_take_over(demo, case))
            finally:
                demo.stop()
    return rows


async def _take_over(demo: Demo, case: Case) -> dict[str, Any]:
    async with asyncio.timeout(120):
        while case.standby and job_readiness(demo)["standbys"] < 1:
            await asyncio.sleep(0.2)
    sent: dict[tuple[str, int], int] = {}
    async with Load(demo, [NAME]) as load:
        sending = asyncio.create_task(_send(load, sent))
        try:
            await asyncio.sleep(BEFORE_S)
            driver = leading_driver(demo)
            before, at_s = set(sent), time.perf_counter()
            os.kill(driver, case.fault)
            async with asyncio.timeout(180):
                while load.answered_at.keys() <= before:
                    await asyncio.sleep(0.01)
            took_s = time.perf_counter() - at_s
            if case.fault is signal.SIGSTOP:
                os.kill(driver, signal.SIGCONT)
            await asyncio.sleep(AFTER_S)
        finally:
            sending.cancel()
        await load.wait_for(sent)
        answers = list(_answers(demo))
    return {
        "next_answer_s": round(took_s, 2),
        "windows": len(sent),
        "answered": len(answers),
        "wrong_or_incomplete": sum(not _is_right(answer) for answer in answers),
    }


async def _send(load: Load, sent: dict[tuple[str, int], int]) -> None:
    payload = synopsis(GROUPS, 0)
    while True:
        start_ms = FIRST_MS + len(sent) * WINDOW_MS
        sent[(NAME, start_ms)] = load.edge.put(NAME, start_ms, [payload])
        await asyncio.sleep(EVERY_S)


def _answers(demo: Demo) -> Iterator[dict[str, Any]]:
    """The newest answer of each window."""
    cursor: str | None = None
    while True:
        params = {"limit": "200", **({"cursor": cursor} if cursor else {})}
        page = demo.client.get(f"/v1/queries/{NAME}/windows", params=params).raise_for_status().json()
        yield from page["answers"]
        if (cursor := page["next_cursor"]) is None:
            return


def _is_right(answer: dict[str, Any]) -> bool:
    """Whether each group has its one record, and nothing is missing."""
    counts = [row["n"]["estimate"] for row in answer["data"]]
    return counts == [1] * GROUPS and not answer["quality"]["completeness"]["missing"]
