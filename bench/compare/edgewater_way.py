"""Edgewater as one of the ways: center, edges, the query, and the answers that a client of the live stream gets."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import yaml
from httpx_sse import connect_sse

from bench.compare.links import Links, center_address
from bench.compare.processes import Processes
from bench.compare.score import WindowAnswer
from bench.compare.ways import TOP, Way
from bench.compare.workload import COLUMNS, Workload
from edgewater.client import Center
from sim.demo.ports import free_address, free_port

READY_S = 180.0
EDGEWATER = (sys.executable, "-m", "edgewater")


@dataclass
class EdgewaterWay:
    """One run of Edgewater.

    Attributes:
        events: (wall time at which the event arrived, the answer without its data), in order of arrival.
    """

    way: Way
    load: Workload
    directory: Path
    processes: Processes
    gateway_port: int = field(default_factory=free_port)
    api_port: int = field(default_factory=free_port)
    events: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    @property
    def query(self) -> dict[str, Any]:
        return self.way.query(self.load.largest, [self.edge(site) for site in range(len(self.load.files))])

    def edge(self, site: int) -> str:
        return f"site{site}"

    def start_center(self) -> None:
        tokens = {self.edge(site): f"token-of-site-{site}" for site in range(len(self.load.files))}
        config = {
            "data_dir": str(self.directory / "center"),
            "gateway": {"listen": f"{center_address()}:{self.gateway_port}"},
            "api": {"listen": f"127.0.0.1:{self.api_port}"},
            "tokens": tokens,
            "streams": {"downloads": {"replay": "edges"}},
        }
        path = self.directory / "center.yaml"
        path.write_text(yaml.safe_dump(config))
        words = [*EDGEWATER, "center", "run", "--config", str(path)]
        center = self.processes.start("center", words, self.directory / "center.log")
        url, deadline = f"http://127.0.0.1:{self.api_port}", time.monotonic() + READY_S
        with httpx.Client(base_url=url) as client:
            while not _is_ready(client):
                if center.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the center does not start; see {self.directory / 'center.log'}")
                time.sleep(0.2)
        with Center(url) as api:
            api.register(self.query)
        threading.Thread(target=self._listen, args=(url,), daemon=True).start()

    def start_sites(self, links: Links, run: dict[str, Any]) -> None:
        for site, file in enumerate(self.load.files):
            host, port = links.addresses[self.way.name, site]
            begin = datetime.fromtimestamp(run["begin_s"], UTC).isoformat()
            replay = {"speed": run["speed"], "start": _iso(self.load.start_ms), "at": begin}
            config = {
                "edge": self.edge(site),
                "center": {"address": f"{host}:{port}", "token": f"token-of-site-{site}"},
                "state_dir": str(self.directory / f"state{site}"),
                "http": {"listen": free_address()},
                "streams": {
                    "downloads": {
                        "columns": COLUMNS,
                        "time": {"column": "at_ms", "unit": "ms"},
                        "replay": replay,
                        "sources": [{"file": {"path": str(file), "format": "csv"}}],
                    }
                },
            }
            path = self.directory / f"edge{site}.yaml"
            path.write_text(yaml.safe_dump(config))
            words = links.command(self.way.name, site, [*EDGEWATER, "edge", "run", str(path)])
            self.processes.start("site", words, self.directory / f"site{site}.log")

    def _listen(self, url: str) -> None:
        """Notes when each answer arrives on the live stream, until the center stops."""
        parameters = {"summary": "true", "query": self.query["name"]}
        with (
            suppress(httpx.TransportError),
            httpx.Client(base_url=url, timeout=None) as client,
            connect_sse(client, "GET", "/v1/live", params=parameters) as source,
        ):
            for event in source.iter_sse():
                if event.event == "answer":
                    self.events.append((time.time(), json.loads(event.data)))  # noqa: TID251

    def is_complete(self) -> bool:
        """Whether each window has an answer with all sites."""
        complete = {e["window"]["start"] for _, e in list(self.events) if e["phase"] != "early"}
        return len(complete) >= self.load.windows

    def forecast(self) -> str:
        """Returns whether the center expects that the values of the query are in time: yes, no or unknown."""
        reply = httpx.get(f"http://127.0.0.1:{self.api_port}/v1/queries/{self.query['name']}", timeout=60)
        return str(reply.json()["forecast"]["in_time"])

    def answers(self) -> dict[int, WindowAnswer]:
        """Reads, for each window, the answer that a client uses."""
        is_deadline_bound = self.way.deadline_s is not None or "accuracy" in self.way.budget
        use: Callable[[dict[str, Any]], bool] = (
            (lambda event: True) if is_deadline_bound else (lambda event: event["phase"] != "early")
        )
        first: dict[int, tuple[float, dict[str, Any]]] = {}
        for seen_s, event in self.events:
            start_ms = datetime.fromisoformat(event["window"]["start"]).timestamp() * 1000
            number = int(start_ms - self.load.start_ms) // self.load.window_ms
            if 0 <= number < self.load.windows and use(event):
                first.setdefault(number, (seen_s, event))
        return {number: self._read(number, *answer) for number, answer in first.items()}

    def _read(self, number: int, seen_s: float, event: dict[str, Any]) -> WindowAnswer:
        path = f"/v1/queries/{self.query['name']}/windows/{event['window']['start']}"
        url = f"http://127.0.0.1:{self.api_port}{path}"
        if self.way.function != "sum":
            return self._read_function(number, seen_s, event, url)
        headers = {"Accept": "application/vnd.apache.arrow.stream"}
        reply = httpx.get(url, params={"revision": event["revision"]}, headers=headers, timeout=60)
        reply.raise_for_status()
        table = pa.ipc.open_stream(reply.content).read_all()
        keys = zip(*(table[column].to_pylist() for column in self.way.group_by), strict=True)
        values = zip(table["bytes"].to_pylist(), table["n"].to_pylist(), strict=True)
        rows = zip(keys, values, strict=True)
        # An answer that lacks an edge may have a row for groups that are not known.
        sums = {",".join(key): (amount or 0, n or 0) for key, (amount, n) in rows if None not in key}
        return WindowAnswer(number, seen_s, sums, event["contract"]["met"])

    def _read_function(self, number: int, seen_s: float, event: dict[str, Any], url: str) -> WindowAnswer:
        questions = {"p99": {"quantile": 0.99}, "top": {"top": TOP}}.get(self.way.function, {})
        parameters = {"revision": event["revision"], **questions}
        reply = httpx.get(url, params=parameters, timeout=60)
        reply.raise_for_status()
        cells: dict[str, dict[str, Any]] = {}
        for row in reply.json()["data"]:
            country, cell = row["group"]["country"], row["value"]
            if self.way.function == "top":
                cells |= {f"{country},{item['item']}": item for item in cell["top"]}
            else:
                cells[country] = cell["quantiles"]["0.99"] if self.way.function == "p99" else cell
        sums = {key: (cell["estimate"],) for key, cell in cells.items()}
        bounds = {key: (cell["lower"], cell["upper"]) for key, cell in cells.items()}
        return WindowAnswer(number, seen_s, sums, event["contract"]["met"], bounds)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").is_success
    except httpx.TransportError:
        return False


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat()
