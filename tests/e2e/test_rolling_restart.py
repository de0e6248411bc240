"""Gateways and APIs are replaced one after the other, as a rolling update does, while clients and an edge work.

The processes are real. `Service` is what Kubernetes puts before them: a new connection goes to a process that is ready,
and a connection stays where it is. `edgewater center` gets SIGTERM as soon as the Service has no address of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from sim.demo.ports import free_port

# test_disturbances.py kills each part of a center. test_api_connections.py stops an API with clients, test_gateway.py a
# gateway with an edge.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

CLIENTS, WITHIN_S = 6, 120
PAUSE_S = 0.1
"""Between the requests of a client. There are always some at work, and they leave the processors to the center."""
QUERY = {
    "name": "by_shop", "from": "sales", "group_by": ["shop"], "measures": {"n": "count()"},
    "window": {"tumbling": "1s"}, "edges": ["till"],
}  # fmt: skip


class Service:
    """One address before several processes, which come and go."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        self._turn = itertools.count()
        self._open: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._connected, "127.0.0.1")
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with contextlib.closing(writer), contextlib.suppress(ConnectionError):
                there, forth = await asyncio.open_connection(
                    "127.0.0.1", self.ready[next(self._turn) % len(self.ready)]
                )
                with contextlib.closing(forth):
                    await _both_ways(reader, writer, there, forth)
        finally:
            self._open.discard(task)


async def _both_ways(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, there: asyncio.StreamReader, forth: asyncio.StreamWriter
) -> None:
    """Copies until one end closes the connection. The caller then closes the other end."""
    ways = [asyncio.ensure_future(_copy(reader, forth)), asyncio.ensure_future(_copy(there, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


class Center:
    """Processes over one state, and the logs that they write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        (folder / "center.yaml").write_text(
            yaml.safe_dump({"data_dir": str(folder / "state"), "spark": {"master": "local[1]"}})
        )

    async def start(self, part: str, *settings: str, port: int | None = None) -> int:
        """Starts a process; returns the number by which it is known."""
        config = f"--config={self._folder}/center.yaml"
        return await self.run(part, "center", part, config, *(f"--set={s}" for s in settings), port=port)

    async def run(self, name: str, *command: str, port: int | None = None) -> int:
        number = port or free_port()
        with (self._folder / f"{name}-{next(self._numbers)}.log").open("wb") as log:
            self.processes[number] = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "edgewater", *command, stdout=log, stderr=log
            )
        return number

    async def end(self, number: int) -> float:
        """SIGTERM, and the seconds until the process has ended."""
        process, began = self.processes.pop(number), time.monotonic()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(25):  # terminationGracePeriodSeconds without the wait before
            assert await process.wait() in (0, -signal.SIGTERM)
        return time.monotonic() - began

    async def kill_all(self) -> None:
        for process in self.processes.values():
            process.kill()
            await process.wait()

    def logs(self) -> str:
        return "\n".join(f"== {f.name}\n{f.read_text()[-2000:]}" for f in sorted(self._folder.glob("*.log")))


async def until(what: str, answer: Callable[[], Any], client: httpx.AsyncClient) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WITHIN_S):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if await answer():
                        return
                await asyncio.sleep(0.1)
    raise AssertionError(f"{what}: not within {WITHIN_S} s")


async def ask(url: str, stop: asyncio.Event, outcomes: Counter[str], keep: bool) -> None:
    """A client that asks again and again, over one connection or over a new one each time."""
    limits = httpx.Limits(max_keepalive_connections=1 if keep else 0)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=20) as client:
        while not stop.is_set():
            try:
                reply = await client.get("/v1/queries/by_shop")
                outcomes[str(reply.status_code)] += 1
            except httpx.TransportError as exc:
                outcomes[repr(exc)] += 1
            await asyncio.sleep(PAUSE_S)


async def push(url: str, stop: asyncio.Event) -> Counter[str]:
    """Pushes records until it is stopped; returns how many of each shop were accepted."""
    pushed = Counter[str]()
    async with httpx.AsyncClient(timeout=20) as client:
        while not stop.is_set():
            at = int(time.time() * 1000)  # noqa: TID251
            lines = [f'{{"time": {at}, "shop": "{shop}"}}' for shop in ("a", "b", "b")]
            reply = await client.post(
                f"{url}/v1/streams/sales", content="\n".join(lines), headers={"Content-Type": "application/x-ndjson"}
            )
            reply.raise_for_status()
            pushed.update(("a", "b", "b"))
            await asyncio.sleep(PAUSE_S)
    return pushed


def edge_config(folder: Path, gateway: int, port: int) -> Path:
    config = {
        "edge": "till",
        "center": {"address": f"127.0.0.1:{gateway}"},
        "state_dir": str(folder / "till"),
        "http": {"listen": f"127.0.0.1:{port}"},
        "streams": {
            "sales": {
                "columns": {"shop": "string"}, "time": {"column": "time", "unit": "ms"}, "disorder": "200ms",
                "idle": "1s", "sources": [{"http": {}}],
            }
        },
    }  # fmt: skip
    (folder / "till.yaml").write_text(yaml.safe_dump(config))
    return folder / "till.yaml"


async def roll(center: Center, service: Service, part: str, client: httpx.AsyncClient) -> list[float]:
    """Replaces each process of a part: a new one is ready, the Service forgets the old one, the old one ends."""
    took = []
    for old in list(service.ready):
        await replace(center, service, part, client)
        service.ready.remove(old)
        took.append(await center.end(old))
    return took


async def replace(center: Center, service: Service, part: str, client: httpx.AsyncClient) -> None:
    """Starts a process, and adds it to the Service once its readiness probe succeeds."""
    port, health = free_port(), free_port()
    path = {"gateway": "readyz", "api": "livez"}[part]
    await center.start(part, f"{part}.listen=127.0.0.1:{port}", f"{part}.metrics=127.0.0.1:{health}", port=port)

    async def ready() -> bool:
        reply = await client.get(f"http://127.0.0.1:{health}/{path}")
        return reply.status_code == 200

    await until(f"{part} at {port}", ready, client)
    service.ready.append(port)


async def counted(api: str, client: httpx.AsyncClient) -> Counter[str]:
    """The records of complete windows by shop; empty while a window is not complete."""
    found = Counter[str]()
    answers = (await client.get(f"{api}/v1/queries/by_shop/windows", params={"limit": 1000})).raise_for_status().json()
    for answer in answers["answers"]:
        if answer["quality"]["completeness"]["ratio"] != 1.0:
            return Counter()
        found.update({row["group"]["shop"]: row["n"]["estimate"] for row in answer["data"]})
    return found


def test_no_request_and_no_record_is_lost_while_gateways_and_apis_are_replaced(tmp_path: Path) -> None:
    async def run() -> None:
        center, gateways, apis = Center(tmp_path), Service(), Service()
        outcomes, stop = Counter[str](), asyncio.Event()
        async with gateways.serve() as gateway, apis.serve() as api_port, httpx.AsyncClient(timeout=20) as client:
            api, edge = f"http://127.0.0.1:{api_port}", free_port()
            try:
                for service, part in ((gateways, "gateway"), (apis, "api")):
                    await replace(center, service, part, client)
                await center.start("job")
                (await client.post(f"{api}/v1/queries", json=QUERY)).raise_for_status()
                await center.run("edge", "edge", "run", str(edge_config(tmp_path, gateway, edge)), port=edge)
                url = f"http://127.0.0.1:{edge}"
                await until("edge", lambda: _succeeds(client, f"{url}/readyz"), client)
                clients = [asyncio.create_task(ask(api, stop, outcomes, i % 2 == 0)) for i in range(CLIENTS)]
                pushing = asyncio.create_task(push(url, stop))
                took = {part: await roll(center, s, part, client) for s, part in ((gateways, "gateway"), (apis, "api"))}
                stop.set()
                pushed = await pushing
                await asyncio.gather(*clients)
                print(dict(outcomes), {part: [round(s, 2) for s in times] for part, times in took.items()})
                assert outcomes.keys() == {"200"} and outcomes["200"] > 100
                await until("answers", lambda: _equal(api, client, pushed), client)
            except AssertionError:
                print(center.logs())
                raise
            finally:
                await center.kill_all()

    asyncio.run(run())


async def _succeeds(client: httpx.AsyncClient, url: str) -> bool:
    return (await client.get(url)).status_code == 200


async def _equal(api: str, client: httpx.AsyncClient, pushed: Counter[str]) -> bool:
    return await counted(api, client) == pushed
