"""The processes of a soak: a center, edges, and the links between them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from sim.demo.ports import free_address, free_port
from sim.demo.run import Demo, DemoFailed
from tests.brokers import Broker, KafkaBroker, MqttBroker
from tests.e2e.link import Link
from tests.e2e.soak.plan import IDLE_MS, EdgePlan
from tests.e2e.soak.records import COLUMNS

READY_S = 60.0
KAFKA_PARTITIONS = 2
STATE_DISK_BYTES = 16 << 20


class SoakFailed(Exception):
    """The soak itself could not go on; says nothing about the system's statements."""


class Brokers:
    """The brokers of an episode; each runs only if an edge has a source of its kind."""

    def __init__(self, directory: Path, plans: Sequence[EdgePlan]) -> None:
        kinds = {source.kind for plan in plans for source in plan.sources}
        self.kafka = KafkaBroker(directory / "kafka") if "kafka" in kinds else None
        self.mqtt = MqttBroker(directory / "mqtt") if "mqtt" in kinds else None
        self._topics = [topic_of(p.name, i) for p in plans for i, s in enumerate(p.sources) if s.kind == "kafka"]

    def start(self) -> None:
        if self.kafka is not None:
            self.kafka.start()
            self.kafka.create(*self._topics, partitions=KAFKA_PARTITIONS)
        if self.mqtt is not None:
            self.mqtt.start()

    def wait_for_sessions(self, plans: Sequence[EdgePlan]) -> None:
        """Waits until the edges have subscribed: mosquitto drops what is published before."""
        for plan in plans:
            for number, source in enumerate(plan.sources):
                if source.kind == "mqtt" and self.mqtt is not None:
                    self.mqtt.wait_for_session(topic_of(plan.name, number))

    def entry(self, kind: str, topic: str) -> dict[str, Any]:
        """Returns the entry of a source in the configuration of an edge."""
        if kind == "kafka":
            assert self.kafka is not None
            return {"kafka": {"brokers": [self.kafka.address], "topic": topic}}
        assert self.mqtt is not None
        return {"mqtt": {"broker": self.mqtt.address, "topics": [topic], "client_id": topic}}

    def pause(self, seconds: float) -> None:
        """Makes the brokers silent for a time."""
        running: list[Broker] = [broker for broker in (self.kafka, self.mqtt) if broker is not None]
        for broker in running:
            broker.pause()
        time.sleep(seconds)
        for broker in running:
            broker.resume()

    def close(self) -> None:
        for broker in (self.kafka, self.mqtt):
            if broker is not None:
                broker.kill()


def topic_of(edge: str, number: int) -> str:
    return f"{edge}-{number}"


class Edge:
    """An edge agent as a process, with a link and a clock of its own.

    Attributes:
        has_own_disk: the state has a file system of its own, that can be filled.
    """

    def __init__(
        self, plan: EdgePlan, stream: str, gateway_port: int, directory: Path, disorder_ms: int, own_disk: bool,
        brokers: Brokers,
    ) -> None:  # fmt: skip
        self.plan, self.name, self.stream = plan, plan.name, stream
        self.directory = directory / plan.name
        self.directory.mkdir(parents=True)
        self.link = Link(gateway_port)
        self.process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self._starting = threading.Lock()
        self._disk: Path | None = None
        self._state = self.directory / "state"
        if own_disk:
            self._mount()
        self._clock = self.directory / "clock"
        self._clock.write_bytes(struct.pack("<d", 0.0))
        self._config = self.directory / "edge.yaml"
        sources: list[dict[str, Any]] = []
        for number, source in enumerate(plan.sources):
            if source.kind in ("kafka", "mqtt"):
                sources.append(brokers.entry(source.kind, topic_of(plan.name, number)))
            elif source.kind == "file":
                sources.append({"file": {"path": str(self.log_file), "format": "ndjson", "follow": True}})
            else:
                sources.append({"http": {}} if source.kind == "http" else {"stdin": {"format": "ndjson"}})
        config = {
            "edge": self.name,
            "center": {"address": f"127.0.0.1:{self.link.port}"},
            "state_dir": str(self._state),
            "http": {"listen": f"127.0.0.1:{self.port}"},
            "streams": {
                stream: {
                    "columns": COLUMNS,
                    "time": {"column": "at", "unit": "ms"},
                    "disorder": f"{disorder_ms}ms",
                    "idle": f"{IDLE_MS}ms",
                    "sources": sources,
                }
            },
            "limits": {"checkpoint": "3s"},
        }
        self._config.write_text(yaml.safe_dump(config, sort_keys=False))
        self._twin: subprocess.Popen[bytes] | None = None

    @property
    def log_file(self) -> Path:
        return self.directory / "logs" / "app.log"

    @property
    def push_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/streams/{self.stream}"

    @property
    def has_own_disk(self) -> bool:
        return self._disk is not None

    def start(self) -> None:
        """Starts the agent, unless another fault of the same edge has started it already."""
        with self._starting:
            if self.process is None or self.process.poll() is not None:
                self._start()

    def _start(self) -> None:
        self._close_stdin()
        with (self.directory / "edge.log").open("ab") as log:
            module = [sys.executable, "-m", "tests.e2e.soak.stepped_edge", str(self._clock)]
            command = [*module, "edge", "run", str(self._config)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def _close_stdin(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):  # what the dead process did not read
                self.process.stdin.close()

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/readyz", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM, and waits for the end."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def lose_state(self) -> None:
        for entry in self._state.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def copy_state(self) -> None:
        """Copies what is on the disk while the agent runs, as a backup of the machine does."""
        self._copy = self.directory / "copy"
        shutil.rmtree(self._copy, ignore_errors=True)
        self._copy.mkdir()
        for entry in self._state.iterdir():
            with contextlib.suppress(FileNotFoundError):  # a checkpoint has removed it
                shutil.copy(entry, self._copy / entry.name)

    def start_twin(self) -> None:
        """Starts a second agent under the same id, on the copy of the state. It reads the same files."""
        config = yaml.safe_load(self._config.read_text())
        config |= {"state_dir": str(self._copy), "http": {"listen": free_address()}}
        path = self.directory / "twin.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        with (self.directory / "twin.log").open("ab") as log:
            module = [sys.executable, "-m", "tests.e2e.soak.stepped_edge", str(self._clock)]
            command = [*module, "edge", "run", str(path)]
            self._twin = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def twin_has_connected(self) -> bool:
        return "connected to the center" in (self.directory / "twin.log").read_text()

    def stop_twin(self) -> None:
        if self._twin is not None:
            self._twin.kill()
            self._twin.wait()

    def restore_state(self) -> None:
        """Puts the copy in the place of the state."""
        self.lose_state()
        for entry in self._copy.iterdir():
            shutil.copy(entry, self._state / entry.name)

    def step_clock(self, seconds: float) -> None:
        with self._clock.open("r+b") as file:
            file.write(struct.pack("<d", seconds))

    def fill_disk(self) -> None:
        """Fills the state's disk to the last byte."""
        assert self._disk is not None
        with (self._disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    def free_disk(self) -> None:
        assert self._disk is not None
        (self._disk / "ballast").unlink()

    def close(self) -> None:
        self.stop_twin()
        self.stop()
        self._close_stdin()
        self.link.close()
        if self._disk is not None:
            subprocess.run(["umount", str(self._disk)], check=False, capture_output=True)

    def _mount(self) -> None:
        disk = self.directory / "disk"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={STATE_DISK_BYTES}", "tmpfs", str(disk)]
        try:
            mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
        except OSError:
            mounted = False
        if mounted:
            self._disk, self._state = disk, disk / "state"


class Center:
    """The center of a `Demo` with what a soak does to it."""

    def __init__(self, demo: Demo) -> None:
        self.demo = demo

    @property
    def _state(self) -> Path:
        return self.demo.directory / "state" / "center"

    def get(self, path: str, **params: Any) -> httpx.Response | None:
        """A reply, or None while the API is away."""
        try:
            return self.demo.client.get(path, params=params)
        except httpx.TransportError:
            return None

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A reply; tries again while the API is away or one of its stores is.

        Raises:
            SoakFailed: it did not come back.
        """
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            self.check_alive()
            with contextlib.suppress(httpx.TransportError):
                reply = self.demo.client.request(method, path, **options)
                if reply.status_code < 500:
                    return reply
            time.sleep(0.2)
        raise SoakFailed(f"{method} {path}: no reply within {READY_S:.0f} s")

    def check_alive(self) -> None:
        """Raises SoakFailed: the center, whose components are restarted when they die, has ended itself."""
        try:
            self.demo.check_alive()
        except DemoFailed as exc:
            raise SoakFailed(str(exc)) from exc

    def is_alive(self) -> bool:
        with contextlib.suppress(SoakFailed):
            self.check_alive()
            return True
        return False

    def is_ready(self) -> bool:
        reply = self.get("/readyz")
        return reply is not None and reply.status_code == 200

    def kill(self, component: str) -> None:
        """kill -9 of a component, which the supervisor starts again."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
            os.kill(int((self._state / "pids" / f"{component}.pid").read_text()), signal.SIGKILL)

    def kill_driver(self) -> None:
        """kill -9 of the driver that has run longest: each time another one, where there are several."""
        pids = self._state / "pids"
        files = [file for file in pids.glob("*.pid") if file.stem.partition("-")[0] in ("job", "standby")]
        with contextlib.suppress(FileNotFoundError, ValueError):  # one of them has ended by itself
            self.kill(min(files, key=lambda file: file.stat().st_mtime).stem)

    def waits_for_corrections(self) -> bool:
        """Whether a final answer may not state all late records yet."""
        with contextlib.closing(sqlite3.connect(f"file:{self._state / 'results.db'}?mode=ro", uri=True)) as store:
            return store.execute("SELECT 1 FROM corrections LIMIT 1").fetchone() is not None

    def delete_checkpoints(self) -> None:
        shutil.rmtree(self._state / "spark", ignore_errors=True)

    def alarms(self) -> list[dict[str, Any]]:
        alarms: list[dict[str, Any]] = self.request("GET", "/v1/alarms").json()["alarms"]
        return alarms


def wait_until_ready(edges: Sequence[Edge], timeout_s: float = READY_S) -> None:
    """Raises SoakFailed: an edge did not become ready, and the end of its log."""
    deadline = time.monotonic() + timeout_s
    waiting = list(edges)
    while waiting := [edge for edge in waiting if not edge.is_ready()]:
        if time.monotonic() > deadline:
            log = (waiting[0].directory / "edge.log").read_text(errors="replace").splitlines()[-5:]
            raise SoakFailed(f"{waiting[0].name} was not ready within {timeout_s:.0f} s: {json.dumps(log)}")
        time.sleep(0.1)
