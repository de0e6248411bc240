"""`python -m bench.wire [--smoke]`: bytes that agents ship, compared with the gzip-compressed raw records.

A gateway and one agent per edge run as processes; a proxy between them counts the bytes in both directions, with
acknowledgements and heartbeats. Writes bench/out/wire.json.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import click
import yaml

from bench.data import DOWNLOADS_WEEK, existing, made_downloads
from bench.wire import workload
from center.catalog import Catalog
from center.config import CenterConfig
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import query_key
from edgewater.model.streams import MAX_TIME_MS
from sim.demo.ports import free_address, free_port

OUT = Path("bench/out")
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
SHARES = (None, 0.001, 0.01)
GROUPINGS = {"package, version, country": ["package", "version", "country"], "package": ["package"]}


@dataclass
class CountingProxy:
    """A TCP proxy that counts the bytes in both directions."""

    target_port: int
    up: int = 0
    down: int = 0
    port: int = 0
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield
            server.close()
            await asyncio.gather(*self._connections)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        await asyncio.gather(self._pump(reader, far_writer, True), self._pump(far_reader, writer, False))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.up, self.down = (self.up + len(data), self.down) if up else (self.up, self.down + len(data))
                writer.write(data)
                await writer.drain()
        writer.close()


def spec(group_by: list[str], window: str, error: float | None, edges: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": "bytes_by_group",
        "from": workload.STREAM,
        "group_by": group_by,
        "measures": {"bytes": "sum(size)"},
        "window": {"tumbling": window},
        "edges": edges,
    }
    return result if error is None else {**result, "budget": {"error": {"bytes": error}}}


async def measure(
    directory: Path, load: workload.WireWorkload, query: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Replays the week in `seconds`; returns the bytes of the query's frames and of the link."""
    center = CenterConfig(data_dir=directory / "center")
    center.data_dir.mkdir()
    catalog = Catalog(center.catalog_url)
    ref = catalog.queries.register(QuerySpec.from_mapping(query), 0)[0].ref
    port = free_port()
    listen = f"gateway.listen=127.0.0.1:{port}"
    gateway = ["center", "gateway", "--data-dir", str(center.data_dir), "--set", listen]
    counter = CountingProxy(port)
    async with counter.running(), AsyncExitStack() as processes:
        processes.push_async_callback(_stop, _start(directory, "gateway", gateway))
        await _until_listening(port)
        for i, path in enumerate(load.files):
            config = _edge(directory, i, path, counter.port, seconds)
            processes.push_async_callback(_stop, _start(directory, f"edge{i}", ["edge", "run", config]))
        await _until_through(catalog, len(load.files))
    frames = catalog.frames.entries(query_key(ref), 0, 1 << 60)
    size = sum(f.wire_bytes for f in frames)
    return {"frames": len(frames), "frame_bytes": size, "up": counter.up, "down": counter.down}


async def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    await asyncio.to_thread(process.wait, 30)


async def _until_listening(port: int) -> None:
    for _ in range(300):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return
    raise TimeoutError(f"nothing listens on port {port}")


def _edge(directory: Path, i: int, path: Path, port: int, seconds: float) -> str:
    config = {
        "edge": f"edge{i}",
        "center": {"address": f"127.0.0.1:{port}"},
        "state_dir": str(directory / f"state{i}"),
        "http": {"listen": free_address()},
        "streams": {
            workload.STREAM: {
                "columns": workload.COLUMNS,
                "time": {"column": workload.TIME, "unit": "ms"},
                "replay": {"start": workload.START, "speed": workload.SPAN_MS / 1000 / seconds},
                "sources": [{"file": {"path": str(path), "format": "csv"}}],
            }
        },
    }
    file = directory / f"edge{i}.yaml"
    file.write_text(yaml.safe_dump(config))
    return str(file)


def _start(directory: Path, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
    with (directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", "edgewater", *arguments], stdout=log, stderr=log)


async def _until_through(catalog: Catalog, edges: int, timeout_s: float = 600) -> None:
    """Waits until every edge has ended its stream and everything is acknowledged."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        known = catalog.edges.all()
        ended = [e for e in known if e.watermarks.get(workload.STREAM, 0) >= MAX_TIME_MS and not e.backlog_bytes]
        if len(ended) == edges:
            return
        await asyncio.sleep(0.5)
    raise TimeoutError(f"{len(ended)} of {edges} edges have ended their streams: {known}")


@dataclass(frozen=True, slots=True)
class WireCase:
    """One query with an error budget, `share` of the largest possible error; None: exact."""

    grouping: str
    window: str
    share: float | None

    def run(self, load: workload.WireWorkload, edges: int, seconds: float) -> dict[str, Any]:
        largest = load.largest[HOUR_MS if self.window == "1h" else DAY_MS]
        error = None if self.share is None else self.share * largest
        query = spec(GROUPINGS[self.grouping], self.window, error, [f"edge{i}" for i in range(edges)])
        with tempfile.TemporaryDirectory() as directory:
            found = asyncio.run(measure(Path(directory), load, query, seconds))
        ratios = {"of_needed": found["up"] / load.gzip_needed, "of_logged": found["up"] / load.gzip_logged}
        return {
            "group_by": self.grouping,
            "window": self.window,
            "error": self.share,
            "edges": edges,
            **found,
            **ratios,
        }


@click.command()
@click.option("--edges", default=4, show_default=True)
@click.option("--seconds", default=60.0, show_default=True, help="Wall time for the replay of the week.")
@click.option("--group", "groupings", type=click.Choice(list(GROUPINGS)), multiple=True, default=list(GROUPINGS))
@click.option("--window", "windows", type=click.Choice(["1h", "1d"]), multiple=True, default=["1h", "1d"])
@click.option(
    "--smoke", is_flag=True, help="Check that the bench runs: half a minute, one edge, a few generated records."
)
def main(edges: int, seconds: float, groupings: tuple[str, ...], windows: tuple[str, ...], smoke: bool) -> None:
    """Measure exact queries, and error budgets of 0.1 % and 1 % of the largest possible error."""
    rows, shares = [], SHARES
    if smoke:
        edges, seconds, groupings, windows, shares = 1, 2.0, ("package",), ("1d",), (None, 0.01)
    with tempfile.TemporaryDirectory() as scratch:
        logs = made_downloads(Path(scratch), 300) if smoke else existing(DOWNLOADS_WEEK)
        load = workload.prepare(Path(scratch), logs, edges, [HOUR_MS, DAY_MS])
        click.echo(f"{load.records:,} records on {edges} edges, gzip-compressed: {load.gzip_needed:,} B the columns")
        click.echo(f"that the query needs, {load.gzip_logged:,} B the log as it is written")
        click.echo(
            f"{'group by':26} {'window':6} {'error':>6} {'frames':>12} {'link':>12} {'of needed':>9} {'of log':>7}"
        )
        for grouping, window, share in product(groupings, windows, shares):
            row = WireCase(grouping, window, share).run(load, edges, seconds)
            rows.append(row)
            click.echo(
                f"{grouping:26} {window:6} {'exact' if share is None else f'{share:.1%}':>6} {row['frame_bytes']:12,}"
                f" {row['up']:12,} {row['of_needed']:9.3f} {row['of_logged']:7.3f}"
            )
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "wire.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
