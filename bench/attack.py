"""``python -m bench.attack``: the effects of an attacker on honest edges and readers.

A center and two honest edges run on loopback, as real processes. Records are pushed to the edges, and each window of
the query `honest` is timed from its end to its answer in the REST API. Half of the time an attacker works beside them:

- a legitimate edge that sends the worst known frames at 100 per second, to a query that expects it and to `honest`,
  which does not;
- a client that sends the worst known requests and holds silent connections.

The figure is the ratio of the 99th percentiles with and without the attacker. Answers are compared with the records.

    python -m bench.attack --minutes 30
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
import psutil
import pyarrow as pa

from bench.early_answers_e2e.__main__ import LiveListener, sleep_until
from bench.early_answers_e2e.edges import PushSchedule, pusher, start_edges
from bench.early_answers_e2e.machine import MachineSnapshot
from bench.first_light.synthetic_edge import SyntheticEdge
from bench.outcome import OUT, logs_kept_on_failure, store_result
from bench.scale.processes import center_processes
from edge.process import now_ms
from edgewater.synopses import CountStack, GroupedAggregate
from edgewater.synopses.encoding import codec
from edgewater.wire import Frame, FrameBody, Partial, SliceClose
from edgewater.wire.synopsis_pb2 import Synopsis
from sim.demo.run import Demo

WINDOW_MS = 1_000
EDGES = ("e0", "e1")
ATTACKER = "evil"
FRAMES_S, REQUESTS_S, SILENT_CONNECTIONS = 100, 20, 500
RATE, MEAN_DELAY_MS, DISORDER_MS = 200.0, 20.0, 200
SETTLE_S, WARM_UP_S, LAST_ANSWER_S = 3.0, 10, 120.0
GOAL_RATIO = 1.5


def specs() -> list[dict[str, Any]]:
    common = {"from": "trips", "window": {"tumbling": f"{WINDOW_MS}ms"}}
    return [
        {"name": "honest", **common, "measures": {"total": "sum(x)", "n": "count()"}, "edges": list(EDGES)},
        {"name": "shared", **common, "measures": {"n": "count()"}, "group_by": ["key"], "edges": [ATTACKER]},
    ]


def partial() -> Synopsis:
    """Returns the message of an honest partial of the query `shared`."""
    aggregate = GroupedAggregate({"key": pa.string()}, {"n": CountStack()})
    aggregate.update([pa.array(["a"])], {"n": None}, 1)
    return codec.unseal(aggregate.to_bytes())


def hostile_bodies() -> Iterator[FrameBody]:
    """Yields bodies of the worst known kinds in turn, endlessly, with event times of the present."""
    long_list, many, wide = partial(), partial(), partial()
    long_list.parts[0].parameters = "[" * 100_000
    many.records = (1 << 64) - 1
    wide.parts[0].arrays[0].shape[:] = [0, 1 << 62]
    wide.parts[0].arrays[0].data = b""
    bomb = partial()
    bomb.arrays[0].data = b"a" * (16 << 20)
    zeros = partial()
    zeros.parts[0].arrays[0].CopyFrom(codec.encode(np.zeros(2_000_000, np.int64)))
    payloads = [codec.seal(m) for m in (long_list, many, wide, bomb, zeros, partial())]
    yield from itertools.chain.from_iterable(_round(payloads) for _ in itertools.count())


def _round(payloads: list[bytes]) -> Iterator[FrameBody]:
    start = now_ms() // WINDOW_MS * WINDOW_MS
    for payload in payloads:
        yield FrameBody(start, (Partial(start, payload),), (SliceClose(start, 1, 0),))
    honest = payloads[-1]
    yield FrameBody(start, tuple(Partial(start - i * WINDOW_MS, honest) for i in range(2_000)))
    yield FrameBody(start, (), tuple(SliceClose(start - i * WINDOW_MS, 0, 0) for i in range(20_000)))
    yield FrameBody(1 << 60, (Partial(1 << 60, honest),))
    yield FrameBody(-(1 << 60), (Partial(-(1 << 60), honest),))


@dataclass
class Attacker:
    """An edge that sends hostile frames and a client that sends hostile requests, while `working` is set."""

    demo: Demo
    sent: Counter[str] = field(default_factory=Counter)
    replies: Counter[str] = field(default_factory=Counter)
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.edge = SyntheticEdge(f"127.0.0.1:{self.demo.gateway_port}", ATTACKER, "trips")
        self.working, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join(20)

    def _run(self) -> None:
        try:
            asyncio.run(self._attack())
        except BaseException as exc:
            self.failure = exc

    async def _attack(self) -> None:
        tasks = [asyncio.create_task(t) for t in (self._connect(), self._frames(), self._requests(), self._silence())]
        while not self._ending.is_set():
            await asyncio.sleep(0.1)
            for task in tasks:
                if task.done():
                    task.result()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self) -> None:
        """Keeps the uplink: if the gateway ends a session, it begins a new one."""
        while True:
            with contextlib.suppress(Exception):
                await self.edge.uplink.run()
            self.replies["session ended"] += 1
            await asyncio.sleep(0.1)

    async def _frames(self) -> None:
        bodies = hostile_bodies()
        due = time.monotonic()
        while True:
            due += 1 / FRAMES_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not self.working.is_set() or "shared" not in self.edge.queries or self.edge.queue.qsize() > 100:
                due = time.monotonic()
                continue
            body = next(bodies)
            self.edge.put_body("shared", body)
            self.sent["frames"] += 1
            if self.sent["frames"] % 10 == 0:  # to a query that does not expect this edge
                honest = replace(self.edge.queries["shared"], name="honest")
                self.edge.queue.put_nowait(Frame.pack(self.edge.next_seq, honest, body))
                self.edge.next_seq += 1

    async def _requests(self) -> None:
        yaml = {"content-type": "application/yaml"}
        long_sum = "measures: {n: sum(" + "+".join(["x"] * 30_000) + ")}"
        requests: list[tuple[str, str, dict[str, Any]]] = [
            ("POST", "/v1/queries", {"content": "[" * 500_000, "headers": yaml}),
            ("POST", "/v1/queries", {"content": "[" * 60_000, "headers": yaml}),
            ("POST", "/v1/queries", {"content": long_sum, "headers": yaml}),
            ("GET", "/v1/queries/honest/windows", {"params": {"group": "k:" + "x" * 50_000}}),
            ("GET", "/v1/queries/honest/windows", {"params": {"from": "0", "to": str(1 << 62)}}),
            ("GET", "/v1/queries/" + "%2e%2e/" * 100, {}),
        ]
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(base_url=self.demo.url, timeout=10, limits=limits) as client:
            for method, path, arguments in itertools.cycle(requests):
                await asyncio.sleep(1 / REQUESTS_S)
                if not self.working.is_set():
                    continue
                self.sent["requests"] += 1
                try:
                    reply = await client.request(method, path, **arguments)
                    self.replies[str(reply.status_code)] += 1
                except httpx.HTTPError as exc:
                    self.replies[type(exc).__name__] += 1

    async def _silence(self) -> None:
        """Holds connections to the API and the gateway on which nothing is sent."""
        held: list[socket.socket] = []
        while True:
            await asyncio.sleep(0.5)
            if not self.working.is_set():
                while held:
                    held.pop().close()
                continue
            for _ in range(min(50, SILENT_CONNECTIONS - len(held))):
                for port in (self.demo.api_port, self.demo.gateway_port):
                    with contextlib.suppress(OSError):
                        held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                        self.sent["silent connections"] += 1


def measure(demo: Demo, phase_s: float, phases: int, warm_up_s: int, sample_s: float) -> Any:
    """Runs `phases` phases, alternately without and with the attacker. Memory is sampled each `sample_s` seconds."""
    demo.start_center()
    for spec in specs():
        demo.client.post("/v1/queries", json=spec).raise_for_status()
    ports = start_edges(demo, EDGES, {"trips": DISORDER_MS})
    attacker = Attacker(demo)
    attacker.start()
    time.sleep(SETTLE_S)
    listener = LiveListener(demo.url)
    listener.start()
    begin_ms = (now_ms() // WINDOW_MS + 1) * WINDOW_MS
    seconds = warm_up_s + phase_s * phases + 2  # records after the last window close it
    schedules = [PushSchedule.make(begin_ms, seconds, RATE, MEAN_DELAY_MS, seed) for seed in range(len(EDGES))]
    pushers = [pusher(f"http://127.0.0.1:{p}/v1/streams/trips", s) for p, s in zip(ports, schedules, strict=True)]
    for each in pushers:
        each.start()
    machine = MachineSnapshot.take(psutil.Process().pid)
    memory: defaultdict[str, list[float]] = defaultdict(list)
    for phase in range(phases):
        end_ms = begin_ms + (warm_up_s + phase * phase_s) * 1000
        while phase and now_ms() < end_ms:
            for kind, mib in resident_mib(demo).items():
                memory[kind].append(mib)
            sleep_until(min(end_ms, now_ms() + sample_s * 1000))
        sleep_until(end_ms)
        (attacker.working.set if phase % 2 else attacker.working.clear)()
    for each in pushers:
        each.join()
    attacker.working.clear()
    deadline_s, last_ms = time.monotonic() + LAST_ANSWER_S, begin_ms + int(warm_up_s + phase_s * phases - 1) * 1000
    while ("honest", last_ms) not in {at[:2] for at in list(listener.seen)} and time.monotonic() < deadline_s:
        time.sleep(0.2)
    listener.stopping.set()
    attacker.stop()
    demo.check_alive()
    failures = [f for f in (listener.failure, attacker.failure, *(p.failure for p in pushers)) if f is not None]
    if failures:
        raise click.ClickException(f"the bench failed: {failures!r}")
    windows = {
        phase: range(begin_ms + (warm_up_s + int(phase * phase_s)) * 1000,
                     begin_ms + (warm_up_s + int((phase + 1) * phase_s)) * 1000, WINDOW_MS)
        for phase in range(phases)
    }  # fmt: skip
    result = summarise(demo, listener, schedules, windows)
    alarms = Counter(alarm["kind"] for alarm in demo.client.get("/v1/alarms").json()["alarms"])
    return {
        **result,
        "machine": MachineSnapshot.take(psutil.Process().pid).since(machine),
        "sent": dict(attacker.sent),
        "replies": dict(attacker.replies),
        "refused": dict(attacker.edge.refused),
        "alarms": dict(alarms),
        "memory_mib": {
            kind: {"median": round(float(np.median(mib))), "most": round(max(mib))} for kind, mib in memory.items()
        },
    }


def resident_mib(demo: Demo) -> dict[str, float]:
    """Returns the resident memory of the center's processes, by kind."""
    sizes = Counter[str]()
    for kind, process in center_processes(demo):
        with contextlib.suppress(psutil.Error):
            sizes[kind] += process.memory_info().rss
    return {kind: size / (1 << 20) for kind, size in sizes.items()}


def summarise(
    demo: Demo, listener: LiveListener, schedules: list[PushSchedule], windows: dict[int, range]
) -> dict[str, Any]:
    """Compares the answers of `honest` with the records, and the staleness with and without the attacker."""
    first: dict[int, float] = {}
    for (query, start, _), (at_ms, _) in sorted(listener.seen.items(), key=lambda item: item[0]):
        if query == "honest":
            first.setdefault(start, at_ms)
    waits: dict[bool, list[float]] = {False: [], True: []}
    wrong, missing = 0, 0
    for phase, starts in windows.items():
        for start in starts:
            if start not in first:
                missing += 1
                continue
            waits[bool(phase % 2)].append(first[start] - start - WINDOW_MS)
            answer = demo.client.get(f"/v1/queries/honest/windows/{start}").raise_for_status().json()
            truth = sum(s.truth(start, start + WINDOW_MS) for s in schedules)
            cell, quality = answer["data"][0]["total"], answer["quality"]["completeness"]
            wrong += abs(cell["estimate"] - truth) > 1e-9 * truth or quality["ratio"] != 1 or bool(quality["missing"])
    quantiles = {
        name: {f"p{q}": round(float(np.percentile(waits[attacked], q)), 1) for q in (50, 95, 99)}
        for name, attacked in (("without", False), ("with attacker", True))
        if waits[attacked]
    }
    ratio = None  # on a very busy machine, no window of a short phase is answered
    if len(quantiles) == 2:
        ratio = round(quantiles["with attacker"]["p99"] / quantiles["without"]["p99"], 2)
    return {
        "windows": {"without": len(waits[False]), "with attacker": len(waits[True])},
        "windows_without_an_answer": missing,
        "windows_wrong_or_incomplete": wrong,
        "staleness_ms": quantiles,
        "p99_ratio": ratio,
        "goal": GOAL_RATIO,
    }


@click.command()
@click.option("--minutes", default=10.0, show_default=True, help="Length of the measurement, half of it under attack.")
@click.option("--phase", "phase_s", default=30.0, show_default=True, help="Seconds of a phase with or without attack.")
@click.option("--sample", "sample_s", default=10.0, show_default=True, help="Seconds between two samples of memory.")
@click.option("--smoke", is_flag=True, help="Check that the bench runs: two phases of three seconds.")
def main(minutes: float, phase_s: float, sample_s: float, smoke: bool) -> None:
    """Measure what honest edges and readers notice of an attacker."""
    phases = 2 * max(1, round(minutes * 60 / phase_s / 2))
    warm_up_s = WARM_UP_S
    if smoke:
        phase_s, phases, warm_up_s = 3.0, 2, 3
    demo = Demo(Path(tempfile.mkdtemp(prefix="edgewater-attack-")), phase_s * phases)
    with logs_kept_on_failure(demo):
        result = measure(demo, phase_s, phases, warm_up_s, 0.5 if smoke else sample_s)
    click.echo(store_result(OUT / "attack.json", result))


if __name__ == "__main__":
    main()
