"""Sessions of one gateway, without a job: time to an acknowledgement, and until all are back after its restart."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.first_light.synthetic_edge import STREAM, WINDOW_MS, SyntheticEdge, spec, synopsis
from center.catalog import Catalog
from edge.process import now_ms
from edgewater.query import QuerySpec
from sim.demo.run import free_port

QUERIES = 20
WITHIN_S = 300


class Session(SyntheticEdge):
    """An edge that notes when it was welcome last."""

    welcome_at = 0.0

    def on_welcome(self, acked_through: int | None) -> None:
        self.welcome_at = time.perf_counter()
        super().on_welcome(acked_through)


def measure(smoke: bool) -> dict[str, Any]:
    """Idle sessions beside active ones that ship a frame of 3.6 KB a second."""
    idle, active, seconds = (8, 4, 1) if smoke else (400, 40, 20)
    with tempfile.TemporaryDirectory() as directory:
        catalog = Catalog(f"sqlite:///{directory}/catalog.db")
        for number in range(QUERIES):
            everywhere = {key: value for key, value in spec(f"q{number}").items() if key != "edges"}
            catalog.register(QuerySpec.from_mapping(everywhere), now_ms())
        catalog.close()
        return asyncio.run(_measure(Path(directory), idle, active, seconds))


async def _measure(directory: Path, idle: int, active: int, seconds: int) -> dict[str, Any]:
    port = free_port()
    gateway = _start(directory, port)
    sessions = [Session(f"127.0.0.1:{port}", f"e{n}", STREAM) for n in range(idle + active)]
    began_s = time.perf_counter()
    tasks = [asyncio.create_task(session.uplink.run()) for session in sessions]
    try:
        await _all_joined(sessions, tasks, began_s)
        joined_s = time.perf_counter() - began_s
        before = _cpu_s(gateway.pid), _cpu_s()
        waits_ms = await _ship(sessions[:active], seconds)
        after = _cpu_s(gateway.pid), _cpu_s()
        resident_mib = psutil.Process(gateway.pid).memory_info().rss / 2**20

        gateway.kill()
        gateway.wait()
        killed_s = time.perf_counter()
        gateway = _start(directory, port)
        await _all_joined(sessions, tasks, killed_s)
        rejoined_s = max(session.welcome_at for session in sessions) - killed_s
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gateway.kill()
        gateway.wait()
    return {
        "sessions": idle + active,
        "active": active,
        "queries": QUERIES,
        "first_join_s": round(joined_s, 2),
        "ack_ms_p50": round(float(np.quantile(waits_ms, 0.5)), 1),
        "ack_ms_p99": round(float(np.quantile(waits_ms, 0.99)), 1),
        "rejoin_after_restart_s": round(rejoined_s, 2),
        "cpu_s_per_s": {"gateway": round((after[0] - before[0]) / seconds, 3),
                        "load generator": round((after[1] - before[1]) / seconds, 3)},
        "gateway_mib": round(resident_mib),
    }  # fmt: skip


def _start(directory: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "edgewater", "center", "gateway", "--data-dir", str(directory)]
    command += ["--set", f"gateway.listen=127.0.0.1:{port}", "--log-level", "error"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _cpu_s(pid: int | None = None) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def _all_joined(sessions: list[Session], tasks: list[asyncio.Task[None]], since_s: float) -> None:
    """Waits until each session was welcome since then and has the queries."""
    async with asyncio.timeout(WITHIN_S):
        while not all(s.welcome_at > since_s and len(s.queries) == QUERIES for s in sessions):
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)


async def _ship(sessions: list[Session], seconds: int) -> list[float]:
    """A frame per session and second, spread over the second; returns the milliseconds until each was acknowledged."""
    payload, sent = synopsis(170, 0), dict[tuple[int, int], float]()

    async def one(index: int, session: Session) -> None:
        await asyncio.sleep(index / len(sessions))
        for number in range(seconds):
            start_ms = (now_ms() // WINDOW_MS - seconds + number) * WINDOW_MS
            seq = session.put(f"q{index % QUERIES}", start_ms, [payload])
            sent[index, seq] = time.perf_counter()
            await asyncio.sleep(1)

    await asyncio.gather(*(one(index, session) for index, session in enumerate(sessions)))
    async with asyncio.timeout(WITHIN_S):
        while any(seq not in sessions[index].acked_at for index, seq in sent):
            await asyncio.sleep(0.05)
    return [(sessions[index].acked_at[seq] - at) * 1000 for (index, seq), at in sent.items()]
