"""A query that groups by a column of a table, on real processes: the table changes while the edge is killed with -9."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from edgewater.base.timestamps import rfc3339
from sim.demo.compare import millis
from sim.demo.run import Demo
from tests.e2e.test_backup import NDJSON, Site, until

pytestmark = pytest.mark.e2e

HALLS = "device_id,hall\nd1,H1\nd2,H1\n"
MOVED = HALLS.replace("d2,H1", "d2,H2")
QUERY = {
    "name": "by_hall", "from": "readings", "lookup": {"halls": {"key": {"device": "device_id"}}}, "group_by": ["hall"],
    "measures": {"n": "count()"}, "window": {"tumbling": "1s"}, "lateness": "2s", "edges": ["hall-edge"],
}  # fmt: skip


def tables(system: Demo, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "edgewater", "tables", *arguments]
    environment = {**os.environ, "EDGEWATER_URL": str(system.client.base_url)}
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)


def push(site: Site, truth: dict[int, Counter[str]], until_ms: int) -> None:
    """Pushes a record of each of three devices, one of which is in no table, until a wall time."""
    while (at_ms := time.time_ns() // 1_000_000) < until_ms:
        rows = [{"device": f"d{number}", "at": at_ms} for number in (1, 2, 3)]
        reply = site._http.post("/v1/streams/readings", content="\n".join(map(json.dumps, rows)), headers=NDJSON)
        assert (reply.status_code, reply.json()["accepted"]) == (200, 3), reply.text
        truth.setdefault(at_ms // 1000 * 1000, Counter()).update(row["device"] for row in rows)
        time.sleep(0.15)


def groups(answer: dict[str, Any]) -> dict[str | None, int]:
    return {row["group"]["hall"]: row["n"]["estimate"] for row in answer["data"]}


def test_later_windows_have_the_new_rows_and_earlier_ones_the_old_rows_over_a_kill_of_the_edge(
    system: Demo, tmp_path: Path
) -> None:
    file = tmp_path / "halls.csv"
    file.write_text(HALLS)
    assert tables(system, "put", "halls", str(file)).stdout.startswith("halls has 2 rows, version 1")
    site = Site(system, "hall-edge", "readings", {"device": "string"})
    with contextlib.closing(site):
        system.client.post("/v1/queries", json=QUERY).raise_for_status()
        path, now_ms = "/v1/queries/by_hall", lambda: time.time_ns() // 1_000_000
        until(lambda: system.client.get(path).json()["edges"][0]["accepted"])
        truth: dict[int, Counter[str]] = {}
        begin_ms = now_ms() // 1000 * 1000 + 1000
        push(site, truth, begin_ms + 2000)

        file.write_text(MOVED)
        border_ms = now_ms() // 1000 * 1000 + 20_000
        changed = tables(system, "put", "halls", str(file), "--at", rfc3339(border_ms), "--json")
        assert json.loads(changed.stdout)["queries"] == ["by_hall"], changed.stderr
        until(lambda: system.client.get(path).json()["edges"][0]["accepted"])
        site.kill()
        site.start()
        push(site, truth, border_ms + 3000)
        last_ms = max(truth) - 1000

        def answers() -> dict[int, dict[str, Any]]:
            return {millis(a["window"]["start"]): a for a in system.answers("by_hall")}

        until(lambda: answers().get(last_ms, {}).get("phase") == "final")
        given = answers()
        versions = {v["version"]: v["tables"] for v in system.client.get(path).json()["versions"]}
        old = [start for start in truth if begin_ms <= start < border_ms]
        new = [start for start in truth if border_ms <= start <= last_ms]
        assert len(old) > 1 and len(new) > 1
        for start in (*old, *new):
            counted = truth[start]
            halls = {"H1": counted["d1"] + counted["d2"], None: counted["d3"]}
            if start >= border_ms:
                halls = {"H1": counted["d1"], "H2": counted["d2"], None: counted["d3"]}
            assert groups(given[start]) == halls, (start, border_ms)
            assert versions[given[start]["version"]] == {"halls": 1 if start < border_ms else 2}
    refused = tables(system, "delete", "halls")
    assert refused.returncode == 1 and "by_hall" in refused.stderr
    assert tables(system, "get", "halls").stdout == MOVED
