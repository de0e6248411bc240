"""A query whose answer kills the driver of the real job: it alone is set aside, and an operator lets it go on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgewater.synopses import plugins
from sim.demo.compare import millis
from sim.demo.ports import free_port
from sim.demo.run import Demo
from tests.packages import write_package

pytestmark = [pytest.mark.e2e, pytest.mark.full]

TIMEOUT_S = 900.0
SECOND = 1_000
FIRST_MS = 1_700_000_000_000
DEADLY = 1 << 40
KILLED = "job was killed by SIGSEGV"
PLUGIN = """
import os, pathlib, signal

from edgewater.synopses.exact.aggregates import IntegerSumStack
from edgewater.synopses.registry import Function

FAULT = pathlib.Path(__file__).with_name("fault")


class FragileSumStack(IntegerSumStack):
    kind = "fragile_sum"

    def merge(self, other, codes):
        sums = {int(self._view("sum").max(initial=0)), int(other._view("sum").max(initial=0))}
        if max(sums) >= 1 << 40 and len(sums) > 1 and FAULT.exists():
            os.kill(os.getpid(), signal.SIGSEGV)
        super().merge(other, codes)


ALL = (FragileSumStack, Function("fragile_sum", lambda *_: FragileSumStack(), types=("int64",), exact=True))
"""


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs a function for all processes of the test. While the returned file exists, its native code ends a process
    that merges a large sum with another one: workers and gateway do not, the driver does for a sliding window."""
    path = tmp_path / "plugins"
    write_package(path, "fragile", PLUGIN, plugins.GROUP, {"fragile": "fragile:ALL"})
    (path / "fault").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path), *filter(None, sys.path)]))
    return path / "fault"


@dataclass
class Center(Demo):
    """A center, and an edge to which a window of records is pushed at a time."""

    pushed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._edge = httpx.Client(base_url=f"http://127.0.0.1:{free_port()}", timeout=30)

    def start(self) -> None:
        self.start_center()
        common = {"from": "trips", "edges": ["e0"]}
        specs: list[dict[str, Any]] = [
            {"name": "honest", **common, "measures": {"total": "sum(x)"}, "window": {"tumbling": "1s"}},
            {"name": "evil", **common, "measures": {"total": "fragile_sum(x)"},
             "window": {"sliding": "3s", "every": "1s"}},
        ]  # fmt: skip
        for spec in specs:
            self.client.post("/v1/queries", json=spec).raise_for_status()
        port = int(self._edge.base_url.port or 0)
        stream = {
            "columns": {"x": "int64"}, "time": {"column": "t", "unit": "ms"}, "disorder": "0ms", "idle": "1h",
            "sources": [{"http": None}],
        }  # fmt: skip
        config = {
            "edge": "e0", "center": {"address": f"127.0.0.1:{self.gateway_port}"}, "streams": {"trips": stream},
            "state_dir": str(self.directory / "state" / "e0"), "http": {"listen": f"127.0.0.1:{port}"},
        }  # fmt: skip
        self._start("e0", ["edge", "run", self._write("e0.yaml", config)])
        self._until_ready("e0", f"http://127.0.0.1:{port}/readyz")
        self.until(lambda: len(self.client.get("/v1/edges").json()["edges"]) == 1)

    def stop(self) -> None:
        super().stop()
        self._edge.close()

    def push(self, value: int) -> None:
        """Pushes the one record of the next window, which closes the one before."""
        record = f'{{"t":{FIRST_MS + len(self.pushed) * SECOND},"x":{value}}}\n'
        headers = {"content-type": "application/x-ndjson"}
        self._edge.post("/v1/streams/trips", content=record, headers=headers).raise_for_status()
        self.pushed.append(value)

    def until(self, holds: Callable[[], bool], *, pushing: bool = False) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline, (self.directory / "center.log").read_text()[-4000:]
            self.check_alive()
            if pushing:
                self.push(1 + len(self.pushed))
            time.sleep(0.2)

    def latest(self, query: str) -> int:
        """The number of the last window with an answer, -1: none."""
        reply = self.client.get(f"/v1/queries/{query}/latest")
        return (millis(reply.json()["window"]["start"]) - FIRST_MS) // SECOND if reply.status_code == 200 else -1

    def deaths(self) -> int:
        return (self.directory / "center.log").read_text().count(KILLED)

    def totals(self, query: str) -> dict[int, int]:
        found = {}
        for answer in self.answers(query):
            assert answer["quality"]["completeness"]["ratio"] == 1.0
            (row,) = answer["data"]
            found[(millis(answer["window"]["start"]) - FIRST_MS) // SECOND] = row["total"]["estimate"]
        return found


@pytest.fixture
def center(tmp_path: Path, fault: Path) -> Iterator[Center]:
    center = Center(tmp_path / "center", 1.0)
    (tmp_path / "center").mkdir()
    try:
        center.start()
        yield center
    finally:
        center.stop()


def test_a_query_whose_answer_kills_the_job_is_set_aside_and_the_others_are_answered(
    center: Center, fault: Path, record_property: Callable[[str, object], None]
) -> None:
    center.until(lambda: min(center.latest("honest"), center.latest("evil")) >= 3, pushing=True)
    assert center.deaths() == 0
    center.push(DEADLY)
    center.until(lambda: center.deaths() > 0, pushing=True)
    began_s, at_death = time.monotonic(), len(center.pushed)
    center.until(lambda: center.latest("honest") >= at_death, pushing=True)
    recovery_s = time.monotonic() - began_s
    record_property("recovery_s", round(recovery_s, 1))
    print(f"{center.deaths()} deaths; {recovery_s:.1f} s from the first to the others' answers")
    center.until(lambda: center.client.get("/readyz").json()["set_aside"] == {"evil@1": "quarantined"}, pushing=True)
    alarms = Counter(alarm["kind"] for alarm in center.client.get("/v1/alarms").json()["alarms"])
    assert alarms["query-quarantined"] == 1

    deaths = center.deaths()
    at = len(center.pushed)
    center.until(lambda: center.latest("honest") >= at + 10, pushing=True)
    assert center.deaths() == deaths, "the others go on without another death"
    center.push(0)
    center.until(lambda: center.latest("honest") == len(center.pushed) - 2)
    assert center.totals("honest") == dict(enumerate(center.pushed[:-1]))

    fault.unlink()
    config = str(center.directory / "center.yaml")
    command = [sys.executable, "-m", "edgewater", "center", "quarantine", "retry", "evil", "--config", config]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    last = len(center.pushed) - 4  # of three slices, and the last one is open
    center.until(lambda: center.latest("evil") == last)
    sums = {start: sum(center.pushed[max(start, 0) : start + 3]) for start in range(-2, last + 1)}
    assert center.totals("evil") == sums
