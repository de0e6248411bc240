"""The agent as a process of its own, without a center: it is killed, and its state is read from what is on disk."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import yaml

from edge.agent import Agent, open_agent
from edge.config import EdgeConfig, parse_config
from edge.core.events import Configured, SourceEnded
from edge.durability import DurableCore
from edge.process import now_ms
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import FrameBody, InputLoss, QueryRef
from sim.demo.ports import free_port
from tests.cores import drained
from tests.query_specs import query_spec

COUNT = query_spec(name="n", stream="events", window={"tumbling": "1h"}, lateness="1h")
QUERY = QueryRef("n", 1)
TIMEOUT_S = 60.0
SETTLED_S, QUIET_S = 15.0, 1.0


def no_ranges(*_: object) -> pa.RecordBatch:
    raise AssertionError("the state has no records to read again")


class AgentProcess:
    """`edgewater edge run` over a directory, with one query, which it has learned before.

    Args:
        query: None: the agent knows no query, so it refuses records.
        port: of HTTP; 0: a free one.
    """

    def __init__(
        self,
        directory: Path,
        sources: list[dict[str, Any]],
        *,
        columns: dict[str, str] | None = None,
        http: dict[str, Any] | None = None,
        stream: Mapping[str, Any] | None = None,
        query: QuerySpec | None = COUNT,
        port: int = 0,
        **limits: Any,
    ) -> None:
        self.directory = directory
        self.columns = columns or {"x": "int64"}
        self.port = port or free_port()
        self._document = {
            "edge": "a",
            "center": {"address": "127.0.0.1:1"},
            "state_dir": str(directory / "state"),
            "http": {"listen": f"127.0.0.1:{self.port}", **(http or {})},
            "streams": {
                "events": {
                    "columns": self.columns,
                    "time": {"column": "at", "unit": "ms"},
                    "sources": sources,
                    **(stream or {}),
                }
            },
            # Nothing is synced by the way: no center pulls frames, and no checkpoint is due.
            "limits": {"checkpoint": "1h", **limits},
        }
        self.process: subprocess.Popen[bytes] | None = None
        # One client: a new one reads the certificates of all authorities, which takes more CPU time than the requests.
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=TIMEOUT_S)
        if query is None:
            return
        with self.state() as agent:  # creates the identity, and syncs nothing
            state_dir, make_core = agent.durable.directory, agent.durable._make_core
        prepared = DurableCore(state_dir, make_core, no_ranges, "")
        prepared.handle(Configured(((QUERY, query),)))
        prepared.sync()
        prepared.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def config(self) -> EdgeConfig:
        return parse_config(self._document)

    def start(self, *options: str) -> None:
        path = self.directory / "edge.yaml"
        path.write_text(yaml.safe_dump(self._document))
        command = [sys.executable, "-m", "edgewater", "edge", "run", str(path), *options]
        with (self.directory / "edge.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(Path.cwd())},
            )
        self.until(lambda: self.metrics() is not None)

    def write(self, data: str) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(data.encode())
        self.process.stdin.flush()

    def push(self, data: str, key: str | None = None) -> dict[str, Any]:
        """Pushes records; returns the reply."""
        headers = {"Content-Type": "application/x-ndjson"} | ({"Idempotency-Key": key} if key else {})
        reply = self._http.post("/v1/streams/events", content=data, headers=headers)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def push_unheard(self, data: str, key: str | None = None) -> socket.socket:
        """Sends a push and reads no reply, as a client whose time is out; the connection is the caller's to close."""
        connection = socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S)
        named = f"Idempotency-Key: {key}\r\n" if key else ""
        head = (f"POST /v1/streams/events HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n{named}"
                f"Content-Type: application/x-ndjson\r\nContent-Length: {len(data)}\r\n\r\n")  # fmt: skip
        connection.sendall((head + data).encode())
        return connection

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        self.process = None

    def close(self) -> None:
        if self.process is not None:
            self.kill()
        self._http.close()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return (self.directory / "edge.log").read_text()

    def metrics(self) -> dict[str, float] | None:
        assert self.process is not None
        assert self.process.poll() is None, f"exit {self.process.returncode}: {self.log}"
        try:
            text = self._http.get("/metrics").text
        except httpx.TransportError:
            return None
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def records(self) -> int:
        found = self.metrics() or {}
        return int(found.get('edgewater_edge_records_total{stream="events"}', 0))

    def losses(self) -> dict[str, int]:
        """Stated losses by reason, from the metrics."""
        prefix = 'edgewater_edge_input_losses_total{reason="'
        found = self.metrics() or {}
        return {k[len(prefix) :].split('"')[0]: int(v) for k, v in found.items() if k.startswith(prefix)}

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)  # most conditions read all metrics of the agent

    def settle(self, records: int) -> None:
        """Waits until so many records are counted and no more come for a while. Then stops the agent."""
        seen, since = -1, time.monotonic()
        while time.monotonic() - since < (QUIET_S if seen >= records else SETTLED_S):
            if (now := self.records()) != seen:
                seen, since = now, time.monotonic()
            time.sleep(0.1)
        assert self.process is not None and self.process.stdin is not None
        self.process.terminate()
        self.process.wait()
        self.process.stdin.close()
        self.process = None

    @contextlib.contextmanager
    def state(self) -> Iterator[Agent]:
        """Recovers the state in this process, as the next agent would, and journals nothing."""
        agent = open_agent(self.config)
        try:
            yield agent
        finally:
            agent.durable.close()

    def recovered_groups(self) -> Counter[Any]:
        """The records that are counted after a recovery, by the first column of the key."""
        groups: Counter[Any] = Counter()
        with self.state() as agent:
            for source in agent.sources:
                agent.durable.handle(SourceEnded(source.stream, source.name))
            for body in pull(agent):
                for part in (GroupedAggregate.from_bytes(p.synopsis) for p in body.partials):
                    counts = part.query("n").value.astype(int).tolist()
                    for key, count in zip(part.rows()[0].to_pylist(), counts, strict=True):
                        groups[key] += count
        return groups

    def recovered(self) -> tuple[float, list[InputLoss]]:
        """The records that are counted after a recovery, over all windows, and the stated losses."""
        with self.state() as agent:
            for source in agent.sources:
                agent.durable.handle(SourceEnded(source.stream, source.name))
            bodies = pull(agent)
        return counted(bodies), [loss for body in bodies for loss in body.losses]


def pull(agent: Agent) -> list[FrameBody]:
    """All that the agent has to send."""
    return [frame.unpack() for frame in drained(agent.durable)]


def counted(bodies: list[FrameBody]) -> float:
    partials = [GroupedAggregate.from_bytes(p.synopsis) for body in bodies for p in body.partials]
    return sum(float(p.query("n").value.sum()) for p in partials)


def lines(first: int, count: int) -> str:
    """Records of now, each 40 bytes or more."""
    at = now_ms()
    return "".join(f'{{"x": {first + i:9d}, "at": {at}, "pad": "{first + i:09d}"}}\n' for i in range(count))
