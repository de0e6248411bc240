"""Kills a driver, gateway, executor or database, or stalls a driver until another has taken over.

It measures the time until the next answer, and checks that no answer is wrong. An edge ships ten windows a second. The
time runs from the signal until the live stream delivers the answer of a window that was shipped after it.
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
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.first_light.center_rates import FIRST_MS, Load
from bench.first_light.synthetic_edge import WINDOW_MS, synopsis
from bench.scale.executors import spark_settings, standalone_cluster
from bench.scale.processes import GATEWAY, job_readiness, kind_of, leading_driver, started
from sim.demo.run import Demo
from tests.center.postgres import find_binaries, serving_pair

NAME = "takeover"
GROUPS = 20
EVERY_S = 0.1
BEFORE_S, AFTER_S = 3.0, 5.0


@dataclass(frozen=True, slots=True)
class Case:
    """A fault and its victim.

    Attributes:
        victim: ``driver``: the leading driver; ``database``: it is killed, and its synchronous standby promoted;
            ``gateway``; ``executor``: one of two of a standalone cluster.
        standby: whether a second driver waits.
        fault: the signal; to a database always SIGKILL.
        postgres: whether catalog and results are in PostgreSQL.
    """

    name: str
    victim: str = "driver"
    standby: bool = False
    fault: signal.Signals = signal.SIGKILL
    postgres: bool = False


CASES = (
    Case("killed, no standby"),
    Case("killed, standby", standby=True),
    Case("stalled, standby", standby=True, fault=signal.SIGSTOP),
    Case("killed, standby, PostgreSQL", standby=True, postgres=True),
    Case("PostgreSQL killed, its standby promoted", "database", postgres=True),
    Case("gateway killed", "gateway"),
    Case("executor killed, of two", "executor"),
)
SMOKE = CASES[1]


def measure(smoke: bool) -> dict[str, Any]:
    """Returns one row per case."""
    rows = {}
    binaries = find_binaries()
    for case in [SMOKE] if smoke else CASES:
        if case.postgres and binaries is None:
            rows[case.name] = {"not_measured": "no PostgreSQL on this machine (Debian: apt-get install postgresql)"}
            continue
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings: dict[str, Any] = {"spark": {"standby": case.standby}}
            strike: Callable[[Demo], object] = partial(_signal, case)
            if case.postgres and binaries is not None:
                primary, secondary = stack.enter_context(serving_pair(binaries))
                settings |= dict.fromkeys(("catalog_url", "results_url"), primary.url_of_pair(secondary))
                if case.victim == "database":
                    strike = lambda _, p=primary, s=secondary: (p.kill(), s.promote())  # noqa: E731
            if case.victim == "executor":
                (cluster := directory / "cluster").mkdir()
                master, workers = stack.enter_context(standalone_cluster(cluster, 2))
                settings["spark"] |= spark_settings(master, 2)
                strike = lambda _, worker=workers[0].pid: _executor_of(worker).kill()  # noqa: E731
            demo, _ = started(directory, settings)
            stack.callback(demo.stop)
            rows[case.name] = asyncio.run(_take_over(demo, case, strike)) | {"load_average": os.getloadavg()[0]}
    return rows


def _signal(case: Case, demo: Demo) -> None:
    """Sends the case's signal to the leading driver, or to the gateway."""
    if case.victim == "driver":
        os.kill(leading_driver(demo), case.fault)
        return
    children = psutil.Process(demo.processes["center"].pid).children(recursive=True)
    (gateway,) = (process for process in children if kind_of(process) == GATEWAY)
    gateway.send_signal(case.fault)


def _executor_of(worker: int) -> psutil.Process:
    children = psutil.Process(worker).children(recursive=True)
    return next(p for p in children if any("ExecutorBackend" in word for word in p.cmdline()))


async def _take_over(demo: Demo, case: Case, strike: Callable[[Demo], object]) -> dict[str, Any]:
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
            await asyncio.to_thread(strike, demo)
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
    """Yields the newest answer of each window."""
    cursor: str | None = None
    while True:
        params = {"limit": "200", **({"cursor": cursor} if cursor else {})}
        page = demo.client.get(f"/v1/queries/{NAME}/windows", params=params).raise_for_status().json()
        yield from page["answers"]
        if (cursor := page["next_cursor"]) is None:
            return


def _is_right(answer: dict[str, Any]) -> bool:
    """Returns whether each group has its one record, and nothing is missing."""
    counts = [row["n"]["estimate"] for row in answer["data"]]
    return counts == [1] * GROUPS and not answer["quality"]["completeness"]["missing"]
