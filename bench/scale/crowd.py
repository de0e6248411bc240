"""Very many sessions of one gateway, without a job, by edges that only speak the protocol.

A real agent's end of a session costs as much as the gateway's. Here one process is all edges: a connection each,
prepared frames, heartbeats at the interval that the gateway asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.first_light.synthetic_edge import STREAM, WINDOW_MS, synopsis
from bench.scale.sessions import QUERIES, cpu_s, register_queries, resident, start_gateway
from edge.process import now_ms
from edgewater.wire import RETRY_METADATA, Frame, FrameBody, Partial, QueryRef, SliceClose, uplink_pb2_grpc
from edgewater.wire import uplink_pb2 as pb
from sim.demo.run import free_port

IDLE, ACTIVE, SECONDS = 2_000, 200, 20
WITHIN_S = 600
JOINING = 100
"""Edges that connect at once: this process has to serve the connections that it opens within the gateway's 10 s."""
_AIO: Any = grpc.aio  # its type stubs lack EOF


class Crowd:
    """The edges. `epoch` counts the gateway's starts: a session of an earlier one is not joined any more."""

    def __init__(self, port: int, count: int) -> None:
        self._port, self.count = port, count
        self.joined: dict[int, float] = {}
        self.acked: dict[tuple[int, int], float] = {}
        self.calls: dict[int, Any] = {}
        self.refs: dict[str, QueryRef] = {}
        self.heartbeats = self.refused = 0
        self._joining = asyncio.Semaphore(JOINING)
        self.echo_ms: list[float] = []
        self._next_seq = [1] * count
        self._unacked: list[dict[int, pb.Frame]] = [{} for _ in range(count)]

    async def run(self, number: int) -> None:
        """Keeps a session, with full jitter after one that ended, or the wait that the gateway asks for."""
        while True:
            wait_s = float(np.random.default_rng(number).uniform(0, 1)) if self.joined else 0.0
            await self._joining.acquire()
            turn = contextlib.ExitStack()
            turn.callback(self._joining.release)
            async with grpc.aio.insecure_channel(
                f"127.0.0.1:{self._port}", (("grpc.use_local_subchannel_pool", 1),)
            ) as channel:
                stub: Any = uplink_pb2_grpc.UplinkStub  # generated, untyped
                call = stub(channel).Session()
                try:
                    await self._session(number, call, turn.close)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    trailing = dict(await call.trailing_metadata() or ())
                    if RETRY_METADATA in trailing:
                        self.refused += 1
                        wait_s = int(trailing[RETRY_METADATA]) / 1000
                finally:
                    turn.close()
                    self.calls.pop(number, None)
                    self.joined.pop(number, None)
                    call.cancel()
            await asyncio.sleep(wait_s)

    async def _session(self, number: int, call: Any, on_joined: Callable[[], None]) -> None:
        columns = [pb.Stream.Column(name="key", type="string"), pb.Stream.Column(name="value", type="int64")]
        stream, edge = pb.Stream(name=STREAM, columns=columns), f"e{number}"
        oldest = min(self._unacked[number], default=self._next_seq[number])
        hello = pb.Hello(
            protocol_min=1, protocol_max=1, edge=edge, incarnation=edge, streams=[stream], oldest_seq=oldest,
            next_seq=self._next_seq[number], sent_at_ms=now_ms(),
        )  # fmt: skip
        await call.write(pb.FromEdge(hello=hello))
        beating: asyncio.Task[None] | None = None
        every_s = [1.0]
        try:
            while (message := await call.read()) is not _AIO.EOF:
                kind = message.WhichOneof("message")
                if kind == "queries":
                    self.refs = {q.name: QueryRef(q.name, q.version) for q in message.queries.queries}
                    self.calls[number], self.joined[number] = call, time.perf_counter()
                    on_joined()
                    for frame in list(self._unacked[number].values()):
                        await call.write(pb.FromEdge(frame=frame))
                    beating = beating or asyncio.create_task(self._beat(call, every_s))
                elif kind == "ack":
                    now = time.perf_counter()
                    for seq in [s for s in self._unacked[number] if s <= message.ack.through]:
                        del self._unacked[number][seq]
                        self.acked[number, seq] = now
                elif kind == "time_echo":
                    self.echo_ms.append(now_ms() - message.time_echo.edge_sent_at_ms)
                    every_s[0] = max(1.0, message.time_echo.heartbeat_ms / 1000)
        finally:
            if beating is not None:
                beating.cancel()

    async def _beat(self, call: Any, every_s: list[float]) -> None:
        while True:
            await call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=now_ms())))
            self.heartbeats += 1
            await asyncio.sleep(every_s[0])

    async def ship(self, number: int, frame: Frame) -> tuple[int, int]:
        seq = self._next_seq[number]
        self._next_seq[number] += 1
        message = self._unacked[number][seq] = replace(frame, seq=seq).to_wire()
        if (call := self.calls.get(number)) is not None:
            await call.write(pb.FromEdge(frame=message))
        return number, seq

    async def all_joined(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            while len(self.joined) < self.count:
                await asyncio.sleep(0.1)


def measure(smoke: bool) -> dict[str, Any]:
    """Idle sessions beside active ones that ship a frame of 3.6 KB a second; then the gateway is killed and started."""
    idle, active, seconds = (40, 4, 1) if smoke else (IDLE, ACTIVE, SECONDS)
    with tempfile.TemporaryDirectory() as directory:
        register_queries(directory)
        return asyncio.run(_measure(Path(directory), idle, active, seconds))


async def _measure(directory: Path, idle: int, active: int, seconds: int) -> dict[str, Any]:
    port, count = free_port(), idle + active
    gateway = start_gateway(directory, port)
    crowd, probe = Crowd(port, count), Crowd(port, 1)
    tasks: list[asyncio.Task[None]] = []
    try:
        tasks.append(asyncio.create_task(probe.run(0)))
        await probe.all_joined()
        tasks.pop().cancel()
        empty, load_empty, began_s = resident(gateway.pid), resident(), time.perf_counter()
        before = cpu_s(gateway.pid), cpu_s()
        tasks = [asyncio.create_task(crowd.run(number)) for number in range(count)]
        await crowd.all_joined()
        joined_s, joined = time.perf_counter() - began_s, _since(before, gateway.pid)
        await asyncio.sleep(0 if count < 100 else 10)  # until all have been asked for longer intervals

        crowd.echo_ms.clear()
        beats, before, began_s = crowd.heartbeats, (cpu_s(gateway.pid), cpu_s()), time.perf_counter()
        await asyncio.sleep(seconds)
        at_rest, rest_s, beats = _since(before, gateway.pid), time.perf_counter() - began_s, crowd.heartbeats - beats
        bytes_each = (resident(gateway.pid) - empty) / count, (resident() - load_empty) / count
        echo_p99 = float(np.quantile(crowd.echo_ms, 0.99)) if crowd.echo_ms else 0.0

        before, beats_before = (cpu_s(gateway.pid), cpu_s()), crowd.heartbeats
        waits_ms = await _ship(crowd, active, seconds)
        busy, busy_beats = _since(before, gateway.pid), crowd.heartbeats - beats_before

        gateway.kill()
        gateway.wait()
        killed_s = time.perf_counter()
        gateway, crowd.refused = start_gateway(directory, port), 0
        await asyncio.sleep(0.5)
        await crowd.all_joined()
        rejoined_s, used = max(crowd.joined.values()) - killed_s, cpu_s(gateway.pid)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gateway.kill()
        gateway.wait()
    beat_us = at_rest[0] / max(beats, 1) * 1e6
    ack_us = (busy[0] - busy_beats * beat_us / 1e6) / len(waits_ms) * 1e6
    return {
        "sessions": count,
        "active": active,
        "queries": QUERIES,
        "load_average": os.getloadavg()[0],
        "first_join_s": round(joined_s, 1),
        "rejoin_after_restart_s": round(rejoined_s, 1),
        "told_to_come_again": crowd.refused,
        "ack_ms_p50": round(float(np.quantile(waits_ms, 0.5)), 1),
        "ack_ms_p99": round(float(np.quantile(waits_ms, 0.99)), 1),
        "echo_ms_p99": round(echo_p99, 1),
        "heartbeats_per_s": round(beats / rest_s),
        "gateway_cores_at_rest": round(at_rest[0] / rest_s, 2),
        "gateway_cpu_us": {
            "first_hello": round(joined[0] / count * 1e6),
            "hello_after_restart_with_start": round(used / count * 1e6),
            "heartbeat": round(beat_us),
            "ack": round(ack_us),
        },
        "load_generator_cpu_us": {
            "first_hello": round(joined[1] / count * 1e6),
            "heartbeat": round(at_rest[1] / max(beats, 1) * 1e6),
        },
        "bytes_per_session": {"gateway": round(bytes_each[0]), "load generator": round(bytes_each[1])},
    }


def _since(before: tuple[float, float], gateway: int) -> tuple[float, float]:
    return cpu_s(gateway) - before[0], cpu_s() - before[1]


async def _ship(crowd: Crowd, active: int, seconds: int) -> list[float]:
    """A frame per active session and second; returns the milliseconds until each was acknowledged."""
    payload, sent = synopsis(170, 0), dict[tuple[int, int], float]()
    last_ms = now_ms() // WINDOW_MS * WINDOW_MS
    frames: dict[tuple[int, str], Frame] = {}
    for second in range(seconds):
        start_ms = last_ms - (seconds - second) * WINDOW_MS
        body = FrameBody(start_ms + WINDOW_MS, (Partial(start_ms, 0, payload),), (SliceClose(start_ms, 1, 0),))
        for name, ref in crowd.refs.items():
            frames[second, name] = Frame.pack(1, ref, body)

    async def one(number: int) -> None:
        await asyncio.sleep(number / active)
        for second in range(seconds):
            at = time.perf_counter()
            sent[await crowd.ship(number, frames[second, f"q{number % QUERIES}"])] = at
            await asyncio.sleep(max(0.0, at + 1 - time.perf_counter()))

    await asyncio.gather(*(one(number) for number in range(active)))
    async with asyncio.timeout(WITHIN_S):
        while not sent.keys() <= crowd.acked.keys():
            await asyncio.sleep(0.1)
    return [(crowd.acked[key] - at) * 1000 for key, at in sent.items()]
