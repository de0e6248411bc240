"""The process `edgewater center sink` is killed with SIGKILL again and again while answers are given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.center.api.conftest import HOUR, T0, Desk
from tests.center.postgres import PostgresServer
from tests.center.sinks.test_postgres_sink import Warehouse

KILLS = int(os.environ.get("EDGEWATER_SINK_KILLS", "3"))
pytestmark = pytest.mark.e2e


def started(directory: Path, warehouse: Warehouse) -> subprocess.Popen[bytes]:
    config = directory / "center.yaml"
    config.write_text(yaml.safe_dump({"data_dir": str(directory), "sinks": {"warehouse": warehouse.document}}))
    return subprocess.Popen([sys.executable, "-m", "edgewater", "center", "sink", "--config", str(config)])


def test_a_process_that_is_killed_at_random_leaves_what_rest_answers(tmp_path: Path, postgres: PostgresServer) -> None:
    desk, rng = Desk(tmp_path), np.random.default_rng(7)
    desk.now = int(time.time() * 1000)  # noqa: TID251  # the process has the real clock
    warehouse = Warehouse(desk, tmp_path, postgres)
    desk.connect("jfk")
    query = desk.register(lateness="9h")
    hour = 0
    for kill in range(KILLS):
        process = started(tmp_path, warehouse)
        try:
            before = warehouse.store.statuses()
            deadline_s = time.monotonic() + 60
            while warehouse.store.statuses() == before:  # it has taken the sink and writes
                desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 1 + hour, "AA": 2, f"c{kill}": 1})
                hour += 1
                time.sleep(0.02)
                assert process.poll() is None and time.monotonic() < deadline_s
            for _ in range(int(rng.integers(1, 6))):
                desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 1 + hour, "AA": 2})
                hour += 1
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    process = started(tmp_path, warehouse)
    try:
        deadline_s = time.monotonic() + 60
        while warehouse.store.status("warehouse").position.answer_id < desk.results.last_answer_id():
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
    finally:
        process.terminate()
        assert process.wait(30) == 0
    assert warehouse.rows() == warehouse.truth() and len(warehouse.rows()) > 2 * hour
    assert warehouse.ask("SELECT count(*), count(DISTINCT window_start) FROM edgewater_windows") == [(hour, hour)]
    assert warehouse.store.status("warehouse").owner == ""
