"""Starts a center and three edges as processes, registers the queries and reads the answers."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from sim.demo import landings
from sim.demo.data import AIRPORTS, COLUMNS, FIRST_DAY, TIME
from sim.demo.ports import free_address, free_port
from sim.demo.pusher import Pusher
from sim.demo.queries import QUESTIONS, SPECS, WATCHED_SPECS

READY_TIMEOUT_S = 180.0  # limit: time of a start
YEAR_S = 365 * 86_400
STOP_TIMEOUT_S = 30.0  # limit: time of a stop
EDGE_START_S = 6.0  # limit: time of a start
LANDINGS_AFTER = 0.15
"""Part of the replay of the year after which the landings begin."""


class DemoFailed(Exception):
    """A process failed; the message names it and its log."""


@dataclass
class Demo:
    """The processes of one run, on loopback, with all state in `directory`."""

    directory: Path
    seconds: float
    api_port: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """The center's configuration in addition to its addresses: keys of sections, or values."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    feeds: dict[str, Pusher] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.api_port = self.api_port or free_port()
        self.gateway_port = free_port()
        self.client = httpx.Client(base_url=self.url, timeout=30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    def start_center(self) -> None:
        """Starts the center and waits until it is ready.

        Raises:
            DemoFailed: the directory has a `state` that is not of a demo.
        """
        if (self.directory / "state").exists() and not (self.directory / "center.yaml").exists():
            raise DemoFailed(f"{self.directory} has a `state` that is not of a demo; choose another --directory")
        shutil.rmtree(self.directory / "state", ignore_errors=True)
        for log in self.directory.glob("*.log"):
            log.unlink()
        (self.directory / "state").mkdir(parents=True)
        config: dict[str, Any] = {
            "data_dir": str(self.directory / "state" / "center"),
            "gateway": {"listen": f"127.0.0.1:{self.gateway_port}"},
            "api": {"listen": f"127.0.0.1:{self.api_port}"},
        }
        for name, value in self.settings.items():
            config[name] = config.get(name, {}) | value if isinstance(value, dict) else value
        self._start("center", ["center", "run", "--config", self._write("center.yaml", config)])
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Waits until the center is ready."""
        self._until_ready("center", f"{self.url}/readyz")

    def register(self) -> None:
        for spec in (*SPECS, *WATCHED_SPECS):
            self.client.post("/v1/queries", json=spec).raise_for_status()

    def start_edges(self, files: dict[str, Path], landed: pa.Table) -> None:
        """Starts one edge per airport, and pushes landings to it; all start the replay at the same time."""
        begin = datetime.fromtimestamp(time.time() + EDGE_START_S, UTC)  # noqa: TID251
        # Landings begin later: at first, processes compile and answers are late.
        wait_s = LANDINGS_AFTER * self.seconds
        landings_begin, landings_s = begin + timedelta(seconds=wait_s), self.seconds - wait_s
        more = {landings.STREAM: landings.stream(landings_s, landings_begin.isoformat())}
        for airport in AIRPORTS:
            edge, rows = airport.lower(), landed.filter(pc.equal(landed["origin"], airport))
            listen = self.start_edge(edge, files[airport], "flights", YEAR_S / self.seconds, begin, more=more)
            url = f"http://{listen}/v1/streams/{landings.STREAM}"
            self.feeds[edge] = landings.feed(url, rows, landings_s, landings_begin.timestamp())
            self.feeds[edge].start()

    def start_edge(
        self,
        edge: str,
        file: Path,
        stream: str,
        speed: float,
        begin: datetime,
        gateway_port: int | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Starts an edge that replays `file`, from its checkpoint if it ran before. `more`: further streams.

        Returns:
            The address of its HTTP server.
        """
        listen = free_address()
        config = {
            "edge": edge,
            "center": {"address": f"127.0.0.1:{gateway_port or self.gateway_port}"},
            "state_dir": str(self.directory / "state" / edge),
            "http": {"listen": listen},
            "streams": {
                stream: {
                    "columns": COLUMNS,
                    "time": {"column": TIME, "unit": "ms"},
                    "replay": {"start": FIRST_DAY, "speed": speed, "at": begin.isoformat()},
                    "sources": [{"file": {"path": str(file), "format": "csv"}}],
                },
                **(more or {}),
            },
        }
        self.run_edge(config)
        return listen

    def run_edge(self, config: dict[str, Any]) -> None:
        """Starts an edge, from its checkpoint if it ran before."""
        edge = config["edge"]
        self._start(edge, ["edge", "run", self._write(f"{edge}.yaml", config)])

    def wait_for_edge(self, name: str, config: dict[str, Any]) -> None:
        """Waits until an edge accepts records. Raises DemoFailed."""
        self._until_ready(name, f"http://{config['http']['listen']}/readyz")

    def kill(self, name: str) -> None:
        """Ends a process as `kill -9` does."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def _write(self, name: str, config: dict[str, Any]) -> str:
        path = self.directory / name
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return str(path)

    def _start(self, name: str, arguments: list[str]) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-P", "-m", "edgewater", *arguments]
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _until_ready(self, name: str, url: str) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            self.check_alive()
            with contextlib.suppress(httpx.TransportError):
                if self.client.get(url).status_code == 200:
                    return
            time.sleep(0.25)
        raise DemoFailed(f"{name} was not ready after {READY_TIMEOUT_S:.0f} s; see {self.directory / name}.log")

    def check_alive(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is not None:
                log = self.directory / f"{name}.log"
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
                raise DemoFailed(f"{name} exited with code {process.returncode}; end of {log}:\n{tail}")
        for edge, feed in self.feeds.items():
            if feed.failure is not None:
                raise DemoFailed(f"records could not be pushed to {edge}: {feed.failure}")

    def progress(self) -> dict[str, Any]:
        """Returns the edges with their watermarks, and the latest answer of each query."""
        self.check_alive()
        edges = self.client.get("/v1/edges").raise_for_status().json()["edges"]
        latest = {spec["name"]: self.client.get(f"/v1/queries/{spec['name']}/latest") for spec in SPECS}
        return {
            "edges": edges,
            "latest": {name: reply.json() if reply.status_code == 200 else None for name, reply in latest.items()},
        }

    def answers(self, name: str) -> Iterator[dict[str, Any]]:
        """Yields the newest revision of every window, in order of time."""
        cursor = None
        while True:
            params: dict[str, Any] = {"limit": 200, **QUESTIONS.get(name, {})}
            if cursor:
                params["cursor"] = cursor
            page = self.client.get(f"/v1/queries/{name}/windows", params=params).raise_for_status().json()
            yield from page["answers"]
            cursor = page["next_cursor"]
            if not cursor:
                return

    def is_final(self, name: str, start: str) -> bool:
        """Returns whether the last answer of a window is final."""
        reply = self.client.get(f"/v1/queries/{name}/windows/{start}")
        return reply.status_code == 200 and reply.json()["phase"] == "final"

    def first_answers(self, name: str) -> Iterator[dict[str, Any]]:
        """Yields the first revision of every window, in order of time."""
        for answer in self.answers(name):
            start = answer["window"]["start"]
            reply = self.client.get(f"/v1/queries/{name}/windows/{start}", params={"revision": 1})
            yield reply.raise_for_status().json()

    def shipped_bytes(self, name: str) -> int:
        """Returns the wire bytes of the query's frames at the center."""
        edges = self.client.get(f"/v1/queries/{name}").raise_for_status().json()["edges"]
        return sum(int(edge["shipped"]["wire_bytes"]) for edge in edges)

    def stop(self) -> None:
        """Stops all processes, edges first."""
        for name in sorted(self.processes, key=lambda n: n == "center"):
            self.processes[name].send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self.client.close()
