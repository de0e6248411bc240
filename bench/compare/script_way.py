"""The usual ways: scripts at the sites, and a script, Flink or Spark at the center."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.compare.links import Links, center_address
from bench.compare.processes import Processes
from bench.compare.score import WindowAnswer
from bench.compare.ways import SCRIPTS, Way
from bench.compare.workload import Workload
from sim.demo.ports import free_port

READY_S = 240.0
QUIET_S = 2.0
"""Flink's answers are complete if no row has come for this long after rows of the last window."""
LOW_RATE_BYTES_S, HIGH_LEVEL, LOW_LEVEL = 8 << 10, 19, 6
"""Sites compress raw records with the high level on links of at most this rate."""


@dataclass
class ScriptWay:
    """One run of a usual way.

    Attributes:
        flink_python: an interpreter that has apache-flink and zstandard.
        rows: for Flink: (time, window, group, bytes, downloads) in order of output.
    """

    way: Way
    load: Workload
    directory: Path
    processes: Processes
    rate_bytes_s: float | None
    run: dict[str, Any]
    flink_python: str = "python"
    gateway_port: int = field(default_factory=free_port)
    rows: list[tuple[float, int, str, int, int]] = field(default_factory=list)

    @property
    def answers_file(self) -> Path:
        return self.directory / "answers.jsonl"

    @property
    def environment(self) -> dict[str, str]:
        return {"RUN": json.dumps(self.run)}

    def start_center(self) -> None:
        sites = len(self.load.files)
        script, *arguments = self.way.center
        words = [str(SCRIPTS / script), center_address(), str(self.gateway_port)]
        if self.way.kind == "flink":
            self._start_flink(words, [free_port() for _ in range(sites)])
        elif self.way.kind == "spark":
            self._start_spark(words)
        else:
            rate = self.way.site[2:3] if script == "sample_center.py" else ()
            words = [sys.executable, *words, str(self.answers_file), str(sites), *rate, *arguments]
            center = self.processes.start("center", words, self.directory / "center.log", self.environment)
            self._wait(center, lambda: self.gateway_port in _listening())

    def _start_flink(self, words: list[str], local_ports: list[int]) -> None:
        words = [self.flink_python, *words, *map(str, local_ports)]
        environment = self.environment | {"JVM_ARGS": "-Xmx1g"}
        center = self.processes.start("center", words, self.directory / "center.log", environment, subprocess.PIPE)
        threading.Thread(target=self._read_flink, args=(center,), daemon=True).start()
        self._wait(center, lambda: set(local_ports) <= _connected())

    def _read_flink(self, center: subprocess.Popen[bytes]) -> None:
        assert center.stdout is not None
        for line in center.stdout:
            _, begins, fields = line.decode().rstrip().rstrip("]").partition("+I[")
            if begins:
                start_ms, package, country, amount, count = fields.split(", ")
                number = (int(start_ms) - self.load.start_ms) // self.load.window_ms
                self.rows.append((time.time(), number, f"{package},{country}", int(amount), int(count)))  # noqa: TID251

    def _start_spark(self, words: list[str]) -> None:
        folders = [self.directory / f"records{site}" for site in range(len(self.load.files))]
        for folder in folders:  # earlier records, so that the first batch ends before the run begins
            folder.mkdir()
            (folder / "before.csv").write_text(f"{self.load.start_ms - 2 * self.load.window_ms},,,\n")
        words = [sys.executable, *words, str(self.answers_file), *map(str, folders)]
        environment = self.environment | {"SPARK_LOCAL_IP": "127.0.0.1"}
        center = self.processes.start("center", words, self.directory / "center.log", environment)
        commits = Path(f"{self.answers_file}.checkpoint/commits")
        self._wait(center, lambda: (commits / "0").exists())

    def _wait(self, center: subprocess.Popen[bytes], is_ready: Any) -> None:
        deadline = time.monotonic() + READY_S
        while not is_ready():
            if center.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.way.name} does not start; see {self.directory / 'center.log'}")
            time.sleep(0.1)

    def start_sites(self, links: Links, run: dict[str, Any]) -> None:
        self.run.update(run)
        script, *arguments = self.way.site
        rate = self.rate_bytes_s
        values = {
            "level": HIGH_LEVEL if rate is not None and rate <= LOW_RATE_BYTES_S else LOW_LEVEL,
            "quarter": int((self.way.error_share or 0) * self.load.largest / len(self.load.files)),
        }
        for site, file in enumerate(self.load.files):
            host, port = links.addresses[self.way.name, site]
            words = [sys.executable, str(SCRIPTS / script), str(file), host, str(port)]
            words += [argument.format(**values) for argument in arguments]
            words += [str(site)] if script == "raw_site.py" else []
            command = links.command(self.way.name, site, words)
            self.processes.start("site", command, self.directory / f"site{site}.log", self.environment)

    def is_complete(self) -> bool:
        """Whether each window has an answer."""
        if self.way.kind == "flink":
            numbers = {number for _, number, *_ in self.rows[-100_000:]}
            quiet = bool(self.rows) and time.time() - self.rows[-1][0] > QUIET_S  # noqa: TID251
            return quiet and self.load.windows - 1 in numbers
        return len({answer.window for answer in self._given()}) >= self.load.windows

    def answers(self) -> dict[int, WindowAnswer]:
        """Returns the last answer of each window."""
        if self.way.kind != "flink":
            return {answer.window: answer for answer in self._given()}
        result: dict[int, WindowAnswer] = {}
        for at_s, number, key, amount, count in self.rows:
            if 0 <= number < self.load.windows:
                sums = result[number].sums if number in result else {}
                sums[key] = amount, count  # type: ignore[index]
                result[number] = WindowAnswer(number, at_s, sums)
        return result

    def _given(self) -> Iterator[WindowAnswer]:
        if not self.answers_file.exists():
            return
        for line in self.answers_file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last line may not be complete yet
                answer = json.loads(line)
                if 0 <= answer["window"] < self.load.windows:
                    yield WindowAnswer(answer["window"], answer["given_s"], answer["groups"])


def _listening() -> set[int]:
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def _connected() -> set[int]:
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED}
