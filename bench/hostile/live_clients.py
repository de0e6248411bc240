"""``python -m bench.hostile.live_clients``: the effect of 1,500 live clients on other requests.

A real API process serves one query, for which an answer is given every second. While that many clients read its live
stream, `/v1/queries` is requested on a separate connection, and each answer's way to the live clients is timed. With
``--other DIR`` the API of another checkout is measured in the same run.

    python -m bench.hostile.live_clients --clients 1500 --seconds 20 --other /tmp/before
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import pyarrow as pa

from center.catalog import Catalog
from center.ledger import EdgesChanged, FrameSummary, Ledger, QueryRegistered
from center.results import MergedDelta, ResultStore
from edge.process import now_ms
from edgewater.model.edge_records import StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.streams import LIVE, EdgeId
from edgewater.synopses import CountStack, GroupedAggregate
from edgewater.wire import SliceClose
from sim.demo.ports import free_port

HOUR = 3_600_000
T0 = 1_356_998_400_000
GROUPS = 100
SPEC = {"name": "n", "from": "s", "group_by": ["g"], "measures": {"n": "count()"}, "window": {"tumbling": "1h"}}
ANSWER_ID = re.compile(rb"\bid: (\d+)\r?\n")


class Job:
    """Gives an answer per call of `answer`, as the job does; `given` has the time of each by its id."""

    def __init__(self, path: Path) -> None:
        self.catalog = Catalog(f"sqlite:///{path}/catalog.db")
        self.results = ResultStore(f"sqlite:///{path}/results.db")
        self.ledger = Ledger()
        streams = [StreamRecord("s", {"g": pa.string()}, LIVE)]
        self.catalog.edges.begin_session(
            EdgeId("e"), "e-1", labels={}, streams=streams, oldest_seq=0, next_seq=0, now_ms=now_ms()
        )
        self.query: RegisteredQuery = self.catalog.queries.register(QuerySpec.from_mapping(SPEC), now_ms())[0]
        events = [EdgesChanged(tuple(self.catalog.edges.all())), QueryRegistered(self.query)]
        self.results.tick(self.ledger, events, now_ms())
        self.given: dict[int, float] = {}
        self._position = 0

    def answer(self) -> None:
        self._position += 1
        start_ms, keys = T0 + self._position * HOUR, pa.array([f"group{i}" for i in range(GROUPS)])
        part = GroupedAggregate({"g": pa.string()}, {"n": CountStack()})
        part.update([keys], {"n": None}, GROUPS)
        close = SliceClose(start_ms, GROUPS, 0, ())
        fact = FrameSummary(
            self.query.ref, self._position, EdgeId("e"), start_ms + HOUR, (close,), (start_ms,), 500, now_ms(), "e-1"
        )
        delta = MergedDelta(self.query.ref, start_ms, part.to_bytes())
        self.results.apply(self.ledger, [delta], [fact], {self.query.key: self._position}, now_ms())
        self.given[self.results.last_answer_id()] = time.time()  # noqa: TID251  # compared between processes


class LiveClient(asyncio.Protocol):
    """Reads a live stream; `seen` has the times at which the first client and the last client had each answer."""

    seen: dict[int, list[float]] = {}
    connected, served = 0, 0

    def __init__(self, host: str) -> None:
        self._head = f"GET /v1/queries/n/live HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        self._is_served = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._head)
        LiveClient.connected += 1

    def data_received(self, data: bytes) -> None:
        LiveClient.served += not self._is_served
        self._is_served = True
        for found in ANSWER_ID.findall(data):
            times = LiveClient.seen.setdefault(int(found), [])
            times.append(time.time())  # noqa: TID251

    def connection_lost(self, exc: Exception | None) -> None:
        LiveClient.connected -= 1


def take_streams(port: int, clients: int) -> None:
    """Runs the process of the live clients until its input ends.

    Then it prints the times at which answers came, as JSON.
    """

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for at in range(0, clients, 50):
            connecting = (
                loop.create_connection(lambda: LiveClient("c"), "127.0.0.1", port) for _ in range(min(50, clients - at))
            )
            await asyncio.gather(*connecting)
        while LiveClient.served < clients:
            await asyncio.sleep(0.05)
        print("connected", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(json.dumps({"connected": LiveClient.connected, "seen": LiveClient.seen}), flush=True)

    asyncio.run(run())


@contextmanager
def api(checkout: Path, data: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Runs the API of a checkout as a separate process."""
    port = free_port()
    argv = [sys.executable, "-m", "edgewater", "center", "api", "--data-dir", str(data), "--log-level", "error"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    process = subprocess.Popen([*argv, "--set", f"api.listen=127.0.0.1:{port}"], cwd=checkout, env=environment)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                ask(port, "/livez")
                break
            except OSError:
                assert time.monotonic() < until and process.poll() is None
                time.sleep(0.1)
        yield port, psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def ask(port: int, path: str) -> float:
    """Returns the seconds that a request takes, on a separate connection."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        assert response.status == 200, response.status
    finally:
        connection.close()
    return time.perf_counter() - began


def measure(checkout: Path, clients: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory))
        job.answer()
        with api(checkout, Path(directory)) as (port, process):
            alone = [ask(port, "/v1/queries") for _ in range(50)]
            argv = [sys.executable, "-m", "bench.hostile.live_clients", "--take", f"{port}:{clients}"]
            taking = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert taking.stdin is not None and taking.stdout is not None
            connecting, began = [], time.monotonic()
            waiting = threading.Thread(target=taking.stdout.readline)
            waiting.start()
            while waiting.is_alive():
                connecting.append(ask(port, "/v1/queries"))
                time.sleep(0.05)
            connecting_s = time.monotonic() - began
            job.given.clear()
            ended = threading.Event()

            def give() -> None:
                while not ended.wait(1.0):
                    job.answer()

            giving = threading.Thread(target=give)
            giving.start()
            beside, cpu_s, began = [], sum(process.cpu_times()[:2]), time.monotonic()
            while time.monotonic() - began < seconds:
                beside.append(ask(port, "/v1/queries"))
                time.sleep(0.05)
            cpu_s = sum(process.cpu_times()[:2]) - cpu_s
            took_s = time.monotonic() - began
            ended.set()
            giving.join()
            time.sleep(2.0)
            out, _ = taking.communicate("\n")
            found = json.loads(out)
            memory = process.memory_info().rss
    reached = {int(i): times for i, times in found["seen"].items() if int(i) in job.given}
    ways = [t - job.given[i] for i, times in reached.items() for t in times]
    return {
        "checkout": str(checkout),
        "live clients": found["connected"],
        "connecting s": connecting_s,
        "connecting p99 ms": 1e3 * float(np.percentile(connecting, 99)),
        "alone p50 ms": 1e3 * float(np.percentile(alone, 50)),
        "p50 ms": 1e3 * float(np.percentile(beside, 50)),
        "p99 ms": 1e3 * float(np.percentile(beside, 99)),
        "worst ms": 1e3 * max(beside),
        "answer to client p50 ms": 1e3 * float(np.percentile(ways, 50)) if ways else None,
        "answer to client p99 ms": 1e3 * float(np.percentile(ways, 99)) if ways else None,
        "answers seen by all": sum(len(t) >= clients for t in reached.values()),
        "answers given": len(job.given),
        "API cores": cpu_s / took_s,
        "API MiB": memory / (1 << 20),
    }


@click.command(help=__doc__)
@click.option("--clients", default=1500, show_default=True)
@click.option("--seconds", default=20.0, show_default=True)
@click.option("--other", "others", type=click.Path(path_type=Path, exists=True), multiple=True)
@click.option("--take", hidden=True)
def main(clients: int, seconds: float, others: tuple[Path, ...], take: str | None) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if take is not None:
        port, _, count = take.partition(":")
        take_streams(int(port), int(count))
        return
    for checkout in (*others, Path.cwd()):
        for name, value in measure(checkout.resolve(), clients, seconds).items():
            print(f"{name:<26} {value:.1f}" if isinstance(value, float) else f"{name:<26} {value}", flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
