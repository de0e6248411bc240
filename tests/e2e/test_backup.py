"""A real center, backed up while it works, killed with -9 and restored: its answers are true, or state the gap."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import yaml

from sim.demo.compare import millis
from sim.demo.ports import free_address
from sim.demo.run import Demo
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]  # tests/center/ops/test_backup.py, with processes

WITHIN_S = 120.0
NDJSON = {"Content-Type": "application/x-ndjson"}
QUERY = {
    "name": "n", "from": "events", "measures": {"n": "count()"}, "window": {"tumbling": "1s"}, "lateness": "2s",
    "edges": ["a"],
}  # fmt: skip
Answer = dict[str, Any]


class Site:
    """An edge to which records are pushed, and how many it has accepted of each window."""

    def __init__(
        self,
        center: Demo,
        edge: str = "a",
        name: str = "events",
        columns: Mapping[str, str] = MappingProxyType({"x": "int64"}),
    ) -> None:
        self.accepted: Counter[int] = Counter()
        self._center, self._edge, address = center, edge, free_address()
        self._http = httpx.Client(base_url=f"http://{address}", timeout=WITHIN_S)
        stream = {"columns": dict(columns), "time": {"column": "at", "unit": "ms"}, "idle": "1s"}
        document = {
            "edge": edge,
            "center": {"address": f"127.0.0.1:{center.gateway_port}"},
            "state_dir": str(center.directory / f"edge-{edge}"),
            "http": {"listen": address},
            "streams": {name: {**stream, "sources": [{"http": {}}]}},
        }
        self._path = center.directory / f"{edge}.yaml"
        self._path.write_text(yaml.safe_dump(document))
        self.start()

    def start(self) -> None:
        self._center._start(self._edge, ["edge", "run", str(self._path)])
        until(self.is_ready)

    def kill(self) -> None:
        """kill -9, at once and without a word."""
        process = self._center.processes.pop(self._edge)
        process.kill()
        process.wait()

    def close(self) -> None:
        self._http.close()

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self._http.get("/readyz").status_code == 200
        return False

    def push(self, seconds: float) -> int:
        """Pushes some records a second; returns the start of the last window."""
        end_s, start_ms = time.monotonic() + seconds, 0
        while time.monotonic() < end_s:
            at_ms = time.time_ns() // 1_000_000
            text = json.dumps({"x": 1, "at": at_ms}) + "\n"
            reply = self._http.post("/v1/streams/events", content=text, headers=NDJSON)
            assert (reply.status_code, reply.json()["accepted"]) == (200, 1), reply.text
            start_ms = at_ms // 1000 * 1000
            self.accepted[start_ms] += 1
            time.sleep(0.15)
        return start_ms


def command(center: Demo, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "edgewater", "center", *arguments, "--config", str(center.directory / "center.yaml")]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def answers(center: Demo) -> dict[int, Answer]:
    """The newest answer of each window."""
    return {millis(a["window"]["start"]): a for a in center.answers("n")}


def alarms(center: Demo) -> set[str]:
    return {a["kind"] for a in center.client.get("/v1/alarms").json()["alarms"]}


def wait_for_final(center: Demo, start_ms: int) -> None:
    until(lambda: answers(center).get(start_ms, {}).get("phase") == "final")


def kill(center: Demo) -> None:
    """kill -9 of the supervisor and of every process of the center."""
    pids = [int(p.read_text()) for p in (center.directory / "state" / "center" / "pids").glob("*.pid")]
    supervisor = center.processes.pop("center")
    supervisor.kill()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    supervisor.wait()


def start(center: Demo) -> None:
    center._start("center", ["center", "run", "--config", str(center.directory / "center.yaml")])
    center.wait_until_ready()


def check(center: Demo, site: Site) -> dict[int, Answer]:
    """No answer says more than is true; returns them."""
    given = answers(center)
    for start_ms, answer in given.items():
        truth = site.accepted[start_ms]
        for row in answer["data"]:
            lower, upper = row["n"]["lower"], row["n"]["upper"]
            assert lower is None or lower <= truth, (answer, truth)
            assert upper is None or answer["phase"] == "early" or truth <= upper, (answer, truth)
        if answer["contract"]["met"] and answer["phase"] != "early":
            assert [row["n"]["estimate"] for row in answer["data"]] == [truth], answer
    return given


@pytest.fixture
def center(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path, 1.0)
    try:
        demo.start_center()
        demo.client.post("/v1/queries", json=QUERY).raise_for_status()
        yield demo
    finally:
        demo.stop()


def test_a_center_that_is_restored_says_what_it_lacks_and_a_mixed_one_does_not_start(center: Demo) -> None:
    with contextlib.closing(Site(center)) as site:
        check_restoration(center, site)


def check_restoration(center: Demo, site: Site) -> None:
    data_dir = center.directory / "state" / "center"
    first_ms = site.push(4)
    wait_for_final(center, first_ms - 2000)
    taken = command(center, "backup", str(center.directory / "backup"), "--json")
    assert taken.returncode == 0, taken.stderr
    later_ms = site.push(5)
    wait_for_final(center, later_ms - 1000)
    before = check(center, site)
    kill(center)

    # Only the catalog is put back: the center does not start.
    mixed = center.directory / "mixed"
    shutil.copytree(data_dir, mixed, ignore=shutil.ignore_patterns("*-wake"))
    for path in mixed.glob("catalog.db*"):
        path.unlink()
    shutil.copy(center.directory / "backup" / "catalog.db", mixed / "catalog.db")
    refused = command(center, "run", "--data-dir", str(mixed), "--set", "gateway.listen=127.0.0.1:0",
                      "--set", "api.listen=127.0.0.1:0")  # fmt: skip
    assert refused.returncode != 0 and "older" in refused.stderr and "edgewater center restore" in refused.stderr

    shutil.move(data_dir, center.directory / "lost")
    restored = command(center, "restore", str(center.directory / "backup"))
    assert restored.returncode == 0, restored.stderr
    start(center)
    until(lambda: "frames-lost" in alarms(center))
    last_ms = site.push(4)
    wait_for_final(center, last_ms - 1000)
    after = check(center, site)
    assert after[last_ms - 1000]["contract"]["met"], "what began after the restoration is whole"
    one = center.client.get(
        f"/v1/queries/n/windows/{last_ms - 1000}", params={"revision": after[last_ms - 1000]["revision"]}
    )
    assert one.json()["data"] == after[last_ms - 1000]["data"]
    for start_ms, answer in before.items():
        again = after.get(start_ms)
        if again is not None and again["revision"] == answer["revision"]:
            assert again["data"] == answer["data"]
        else:
            assert again is None or again["revision"] > 1_000_000
            assert again is None or not again["contract"]["met"] or again["data"] == answer["data"]
    gap = [start for start in before if first_ms < start < later_ms and start not in after]
    assert gap == [], "a window that was answered has an answer, which states what it lacks"
