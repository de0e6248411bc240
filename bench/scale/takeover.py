"""A driver or a database that is killed, or a driver that is stalled until another has taken over: time until the next
answer, and that none is wrong.

An edge ships ten windows a second. The time runs from the signal until the live stream delivers the answer of a window
that was shipped after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.first_light.center_rates import FIRST_MS, Load
from bench.first_light.synthetic_edge import WINDOW_MS, synopsis
from bench.scale.processes import job_readiness, leading_driver, started
from sim.demo.run import Demo
from tests.center.postgres import find_binaries, serving_pair

NAME = "takeover"
GROUPS = 20
EVERY_S = 0.1
BEFORE_S, AFTER_S = 3.0, 5.0


@dataclass(frozen=True, slots=True)
class Case:
    """What happens, and to what.

    Attributes:
        standby: whether a second driver waits.
        fault: the signal to the driver that leads; None: the database is killed and its synchronous standby promoted.
        postgres: whether catalog and results are in PostgreSQL.
    """

    name: str
    standby: bool
    fault: signal.Signals | None
    postgres: bool = False


CASES = (
    Case("killed, no standby", False, signal.SIGKILL),
    Case("killed, standby", True, signal.SIGKILL),
    Case("stalled, standby", True, signal.SIGSTOP),
    Case("killed, standby, PostgreSQL", True, signal.SIGKILL, postgres=True),
    Case("PostgreSQL killed, its standby promoted", False, None, postgres=True),
)
SMOKE = CASES[1]


def measure(smoke: bool) -> dict[str, Any]:
    """One row per case."""
    rows = {}
    binaries = find_binaries()
    for case in [SMOKE] if smoke else CASES:
        if case.postgres and binaries is None:
            rows[case.name] = {"not_measured": "no PostgreSQL on this machine (Debian: apt-get install postgresql)"}
            continue
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings: dict[str, Any] = {"spark": {"standby": case.standby}}
            fail_over: Callable[[], object] = lambda: None  # noqa: E731
            if case.postgres and binaries is not None:
                primary, secondary = stack.enter_context(serving_pair(binaries))
                settings |= dict.fromkeys(("catalog_url", "results_url"), primary.url_of_pair(secondary))
                fail_over = lambda p=primary, s=secondary: (p.kill(), s.promote())  # noqa: E731
            demo, _ = started(directory, settings)
            stack.callback(demo.stop)
            rows[case.name] = asyncio.run(_take_over(demo, case, fail_over)) | {"load_average": os.getloadavg()[0]}
    return rows


async def _take_over(demo: Demo, case: Case, fail_over: Callable[[], object]) -> dict[str, Any]:
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
            if case.fault is None:
                await asyncio.to_thread(fail_over)
            else:
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
