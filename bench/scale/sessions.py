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
from edgewater.wire import uplink_pb2 as pb
from sim.demo.run import free_port

QUERIES = 20
IDLE, ACTIVE = 400, 40
SETTLE_S = 3
START_CPU_S = 1.5
"""What a gateway without edges takes to start; imports for the most part."""
WITHIN_S = 300


class Session(SyntheticEdge):
    """An edge that notes when it was welcome last, and counts its heartbeats."""

    welcome_at = 0.0
    heartbeats = 0

    def heartbeat(self) -> pb.Heartbeat:
        self.heartbeats += 1
        return super().heartbeat()

    def on_welcome(self, acked_through: int | None) -> None:
        self.welcome_at = time.perf_counter()
        super().on_welcome(acked_through)


def register_queries(directory: str) -> None:
    """Registers the queries in a new catalog; every edge answers them."""
    catalog = Catalog(f"sqlite:///{directory}/catalog.db")
    for number in range(QUERIES):
        everywhere = {key: value for key, value in spec(f"q{number}").items() if key != "edges"}
        catalog.register(QuerySpec.from_mapping(everywhere), now_ms())
    catalog.close()


def measure(smoke: bool) -> dict[str, Any]:
    """Idle sessions beside active ones that ship a frame of 3.6 KB a second."""
    idle, active, seconds = (8, 4, 1) if smoke else (IDLE, ACTIVE, 20)
    with tempfile.TemporaryDirectory() as directory:
        register_queries(directory)
        return asyncio.run(_measure(Path(directory), idle, active, seconds))


class GatewayMeter:
    """CPU seconds of a gateway and of this process, and messages of the gateway's edges, since it was made."""

    def __init__(self, gateway: int, sessions: list[Session]) -> None:
        self._gateway, self._sessions = gateway, sessions
        self._before = self._read()

    def _read(self) -> tuple[float, float, int, float]:
        beats = sum(session.heartbeats for session in self._sessions)
        return cpu_s(self._gateway), cpu_s(), beats, time.perf_counter()

    def read(self) -> dict[str, float]:
        gateway, load, beats, at = (now - then for now, then in zip(self._read(), self._before, strict=True))
        return {"gateway_s": gateway, "load_s": load, "heartbeats": beats, "wall_s": at}


async def _measure(directory: Path, idle: int, active: int, seconds: int) -> dict[str, Any]:
    port, count = free_port(), idle + active
    gateway = start_gateway(directory, port)
    sessions = [Session(f"127.0.0.1:{port}", f"e{n}", STREAM) for n in range(count)]
    probe = asyncio.create_task(sessions[0].uplink.run())
    try:
        await _all_joined(sessions[:1], [probe], 0)
        empty, load_empty = resident(gateway.pid), resident()
        meter, began_s = GatewayMeter(gateway.pid, sessions), time.perf_counter()
        tasks = [probe, *(asyncio.create_task(session.uplink.run()) for session in sessions[1:])]
        await _all_joined(sessions[1:], tasks, began_s)
        joined = meter.read()
        await asyncio.sleep(SETTLE_S)  # statuses and first heartbeats
        meter = GatewayMeter(gateway.pid, sessions)
        await asyncio.sleep(seconds)
        at_rest = meter.read()
        used, load_used = resident(gateway.pid) - empty, resident() - load_empty
        meter = GatewayMeter(gateway.pid, sessions)
        waits_ms = await _ship(sessions[:active], seconds)
        busy = meter.read()

        gateway.kill()
        gateway.wait()
        killed_s = time.perf_counter()
        gateway = start_gateway(directory, port)
        meter = GatewayMeter(gateway.pid, sessions)
        await _all_joined(sessions, tasks, killed_s)
        gateway_mib = resident(gateway.pid) / 2**20
        rejoined, rejoined_s = meter.read(), max(session.welcome_at for session in sessions) - killed_s
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gateway.kill()
        gateway.wait()
    heartbeat_us = at_rest["gateway_s"] / max(at_rest["heartbeats"], 1) * 1e6
    ack_us = (busy["gateway_s"] - busy["heartbeats"] * heartbeat_us / 1e6) / len(waits_ms) * 1e6
    # The gateway asks for heartbeats every 3 s at this number of sessions; a tenth of them ship a frame a second.
    per_session_us = heartbeat_us / 3 + ack_us / 11
    return {
        "sessions": count,
        "active": active,
        "queries": QUERIES,
        "first_join_s": round(joined["wall_s"], 2),
        "ack_ms_p50": round(float(np.quantile(waits_ms, 0.5)), 1),
        "ack_ms_p99": round(float(np.quantile(waits_ms, 0.99)), 1),
        "rejoin_after_restart_s": round(rejoined_s, 2),
        "gateway_cpu_us": {
            "first_hello": round(joined["gateway_s"] / count * 1e6),
            "hello_after_restart": round((rejoined["gateway_s"] - START_CPU_S) / count * 1e6),
            "heartbeat": round(heartbeat_us),
            "ack": round(ack_us),
        },
        "load_generator_cpu_us": {
            "first_hello": round(joined["load_s"] / count * 1e6),
            "heartbeat": round(at_rest["load_s"] / max(at_rest["heartbeats"], 1) * 1e6),
        },
        "heartbeats_per_s": round(at_rest["heartbeats"] / at_rest["wall_s"]),
        "sessions_of_one_core": round(1e6 / per_session_us),
        "gateway_bytes_per_session": round(used / count),
        "load_generator_bytes_per_session": round(load_used / count),
        "gateway_mib": round(gateway_mib),
    }


def resident(pid: int | None = None) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def start_gateway(directory: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "edgewater", "center", "gateway", "--data-dir", str(directory)]
    command += ["--set", f"gateway.listen=127.0.0.1:{port}", "--log-level", "error"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def cpu_s(pid: int | None = None) -> float:
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
