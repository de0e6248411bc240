"""Very many sessions of one gateway, without a job. Their edges only speak the protocol."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.first_light.synthetic_edge import STREAM, WINDOW_MS, spec, synopsis
from bench.scale.raw_edges import RawEdges
from center.catalog import Catalog
from edge.process import now_ms
from edgewater.model.query import QuerySpec
from edgewater.wire import Frame, FrameBody, Partial, QueryRef, SliceClose
from edgewater.wire import uplink_pb2 as pb
from sim.demo.ports import free_port

QUERIES = 20
IDLE, ACTIVE, SECONDS = 10_000, 1_000, 30
PREPARE_S = 2.0
"""Time until the first frame is shipped: the times of the frames are 30,000 timers."""
WITHIN_S = 300
START_CPU_S = 1.5
"""CPU seconds of the start of a gateway without edges; imports for the most part."""
US = 1e6


def register_queries(directory: str) -> None:
    """Registers the queries in a new catalog; every edge answers them."""
    catalog = Catalog(f"sqlite:///{directory}/catalog.db")
    for number in range(QUERIES):
        everywhere = {key: value for key, value in spec(f"q{number}").items() if key != "edges"}
        catalog.queries.register(QuerySpec.from_mapping(everywhere), now_ms())
    catalog.close()


def measure(smoke: bool, idle: int = IDLE, active: int = ACTIVE) -> dict[str, Any]:
    """Measures idle sessions beside active sessions. Each active session ships a frame of 3.6 KB per second.

    Then the gateway is killed and started again.
    """
    idle, active, seconds = (40, 4, 1) if smoke else (idle, active, SECONDS)
    with tempfile.TemporaryDirectory() as directory:
        register_queries(directory)
        return _measure(Path(directory), idle, active, seconds)


Reading = tuple[float, float, int, float]


class _Meter:
    """CPU seconds of the gateway and of this process, and the edges' heartbeats, since it was made."""

    def __init__(self, gateway: int, edges: RawEdges) -> None:
        self._gateway, self._edges = gateway, edges
        self._before = self._read()

    def _read(self) -> Reading:
        return cpu_s(self._gateway), cpu_s(), self._edges.heartbeats, time.perf_counter()

    def read(self) -> Reading:
        """Returns gateway, load generator, heartbeats, wall."""
        gateway, load, beats, at_s = (now - then for now, then in zip(self._read(), self._before, strict=True))
        return gateway, load, int(beats), at_s


def _stream() -> pb.Stream:
    columns = [pb.Stream.Column(name="key", type="string"), pb.Stream.Column(name="value", type="int64")]
    return pb.Stream(name=STREAM, columns=columns)


def _measure(directory: Path, idle: int, active: int, seconds: int) -> dict[str, Any]:
    port, count = free_port(), idle + active
    gateway = start_gateway(directory, port)
    probe, edges = RawEdges(port, 1, _stream()), RawEdges(port, count, _stream())
    try:
        probe.start()
        probe.run(lambda: probe.all_joined, WITHIN_S)
        probe.close()
        empty, meter = resident(gateway.pid), _Meter(gateway.pid, edges)
        began_s = time.perf_counter()
        edges.start()
        edges.run(lambda: edges.all_joined, WITHIN_S)
        join, join_refused = meter.read(), edges.refused
        first_join_s = max(edges.joined_at_s.values()) - began_s
        # until statuses are written and all edges have been asked for longer intervals
        edges.rest(0 if count < 100 else 20)

        edges.echo_ms.clear()
        meter = _Meter(gateway.pid, edges)
        edges.rest(seconds)
        rest, echo_ms = meter.read(), list(edges.echo_ms)
        bytes_each = (resident(gateway.pid) - empty) / count

        meter = _Meter(gateway.pid, edges)
        acked_ms = _ship(edges, active, seconds)
        busy, lost = meter.read(), edges.lost

        gateway.kill()
        gateway.wait()
        killed_s = time.perf_counter()
        edges.run(lambda: not edges.joined_at_s, WITHIN_S)
        gateway, edges.refused = start_gateway(directory, port), 0
        edges.run(lambda: edges.all_joined, WITHIN_S)
        rejoined_s, rejoin_cpu_s = max(edges.joined_at_s.values()) - killed_s, cpu_s(gateway.pid) - START_CPU_S
    finally:
        edges.close()
        gateway.kill()
        gateway.wait()
    return {
        "sessions": count,
        "active": active,
        "queries": QUERIES,
        "load_average": round(os.getloadavg()[0], 1),
        "first_join_s": round(first_join_s, 1),
        "asked_to_come_later": join_refused,
        "rejoin_after_restart_s": round(rejoined_s, 1),
        "asked_to_come_later_after_restart": edges.refused,
        "sessions_lost": lost,
        "gateway_bytes_per_session": round(bytes_each),
        **_costs(rest, busy, acked_ms, echo_ms),
        "gateway_cpu_us": _cpu_us(rest, busy, len(acked_ms))
        | {"first_hello": round(join[0] / count * US), "hello_after_restart": round(rejoin_cpu_s / count * US)},
    }


def _cpu_us(rest: Reading, busy: Reading, acks: int) -> dict[str, int]:
    beat_us = rest[0] / max(rest[2], 1) * US
    return {"heartbeat": round(beat_us), "ack": round((busy[0] - busy[2] * beat_us / US) / acks * US)}


def _costs(rest: Reading, busy: Reading, acked_ms: Sequence[float], echo_ms: Sequence[float]) -> dict[str, Any]:
    return {
        "ack_ms_p50": round(float(np.quantile(acked_ms, 0.5)), 1),
        "ack_ms_p99": round(float(np.quantile(acked_ms, 0.99)), 1),
        "echo_ms_p99": round(float(np.quantile(echo_ms, 0.99)), 1) if echo_ms else None,
        "heartbeats_per_s": round(rest[2] / rest[3]),
        "cores": {
            "gateway at rest": round(rest[0] / rest[3], 3),
            "gateway busy": round(busy[0] / busy[3], 3),
            "load generator at rest": round(rest[1] / rest[3], 3),
            "load generator busy": round(busy[1] / busy[3], 3),
        },
    }


def resident(pid: int | None = None) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def start_gateway(directory: Path, port: int, *settings: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "edgewater", "center", "gateway", "--data-dir", str(directory)]
    for setting in (f"gateway.listen=127.0.0.1:{port}", *settings):
        command += ["--set", setting]
    command += ["--log-level", "error"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def cpu_s(pid: int | None = None) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _ship(edges: RawEdges, active: int, seconds: int) -> list[float]:
    """Ships a frame per active session and second, spread over the second. Returns the milliseconds until each
    acknowledgement.
    """
    payload, last_ms = synopsis(170, 0), now_ms() // WINDOW_MS * WINDOW_MS
    edges.acked_ms.clear()

    def frame(second: int, ref: QueryRef) -> pb.Frame:
        start_ms = last_ms - (seconds - second) * WINDOW_MS
        body = FrameBody(start_ms + WINDOW_MS, (Partial(start_ms, payload),), (SliceClose(start_ms, 1, 0),))
        return Frame.pack(1, ref, body).to_wire()

    frames = {(s, name): frame(s, ref) for s in range(seconds) for name, ref in edges.refs.items()}

    def copy(second: int, query: str) -> pb.Frame:
        made = pb.Frame()
        made.CopyFrom(frames[second, query])
        return made

    # Times in the future: frames due before the schedule is complete would all be sent at once.
    at_s = time.perf_counter() + PREPARE_S
    for second in range(seconds):
        for number in range(active):
            query = f"q{number % QUERIES}"
            edges.ship_at(at_s + second + number / active, number, partial(copy, second, query))
    late_s = time.perf_counter() - at_s
    assert late_s < 0, f"the schedule was made {late_s:.1f} s too late"
    edges.run(lambda: len(edges.acked_ms) == seconds * active, seconds + WITHIN_S)
    return list(edges.acked_ms)
