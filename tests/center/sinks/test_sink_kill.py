"""The process `edgewater center sink` is killed with SIGKILL again and again while answers are given.

By default, `test_targets.py` and `test_alerts_sink.py` let a process die between a write and its record.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from center.sinks import SinkStore
from tests.center.api.conftest import HOUR, T0, Desk
from tests.center.sinks.alert_receivers import Receiver
from tests.center.sinks.systems import SYSTEMS

KILLS = int(os.environ.get("EDGEWATER_SINK_KILLS", "1"))
FINALS_WAIT_S = 240
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def started(directory: Path, document: dict[str, Any]) -> subprocess.Popen[bytes]:
    config = directory / "center.yaml"
    config.write_text(yaml.safe_dump({"data_dir": str(directory), "sinks": {"out": document}}))
    return subprocess.Popen([sys.executable, "-m", "edgewater", "center", "sink", "--config", str(config)])


def truth_of(desk: Desk, min_phase: str) -> dict[int, dict[str | None, int]]:
    """What REST answers: `n` per window and group."""
    found: dict[int, dict[str | None, int]] = {}
    cursor = ""
    while True:
        page = desk.get(f"/v1/queries/flights/windows?limit=1000&min_phase={min_phase}{cursor}").json()
        for answer in page["answers"]:
            start = int(np.datetime64(answer["window"]["start"].rstrip("Z"), "ms").astype(np.int64))
            found[start] = {row["group"]["carrier"]: row["n"]["estimate"] for row in answer["data"]}
        if page["next_cursor"] is None:
            return found
        cursor = f"&cursor={page['next_cursor']}"


@pytest.mark.parametrize(
    "kind", [name if name == "postgres" else pytest.param(name, marks=pytest.mark.full) for name in SYSTEMS]
)
def test_a_process_that_is_killed_at_random_leaves_what_rest_answers(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    desk, rng = Desk(tmp_path), np.random.default_rng(7)
    desk.now = int(time.time() * 1000)  # noqa: TID251  # the process has the real clock
    system = SYSTEMS[kind](request, tmp_path)
    store = SinkStore(desk.results.engine)
    query = desk.register_over("jfk", lateness="2h")
    hour = 0
    for kill in range(KILLS):
        process = started(tmp_path, system.document)
        try:
            before, deadline_s = store.statuses(), time.monotonic() + FINALS_WAIT_S
            while store.statuses() == before:  # it has taken the sink and writes
                desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 1 + hour, "AA": 2, f"c{kill}": 1})
                hour += 1
                time.sleep(0.1)
                assert process.poll() is None and time.monotonic() < deadline_s
            for _ in range(int(rng.integers(1, 12))):
                desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 1 + hour, "AA": 2})
                time.sleep(float(rng.uniform(0, 0.03)))
                hour += 1
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    process = started(tmp_path, system.document)
    try:
        deadline_s = time.monotonic() + FINALS_WAIT_S
        while (status := store.status("out")).waiting or status.answer_id < desk.results.last_answer_id():
            assert process.poll() is None and time.monotonic() < deadline_s, store.status("out").problem
            time.sleep(0.05)
    finally:
        process.terminate()
        assert process.wait(30) == 0
    truth = truth_of(desk, "final" if system.only_final else "early")
    assert len(truth) > hour - 4
    assert system.read("flights", query.ref.version, "carrier") == truth
    assert store.status("out").owner == ""


def test_a_process_that_is_killed_at_random_forgets_no_notice_and_repeats_none_under_another_id(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    desk, rng, hour = Desk(tmp_path), np.random.default_rng(11), 0
    desk.now = int(time.time() * 1000)  # noqa: TID251  # the process has the real clock
    query = desk.register_over("jfk", lateness="2h")
    with Receiver().serving() as receiver:
        document = {
            "kind": "alerts",
            "begin": "beginning",
            "targets": {"hook": {"webhook": {"url": receiver.url}}},
            "rules": [{"alert": "many", "query": "flights", "certainly": "n > 3"}],
        }
        for kill in range(KILLS + 1):
            process = started(tmp_path, document)
            deadline_s = time.monotonic() + FINALS_WAIT_S
            delivered, wanted = len(receiver.got), int(rng.integers(1, 12))
            try:
                while len(receiver.got) < delivered + wanted or (kill == KILLS and len(of_notices(receiver)) < hour):
                    assert process.poll() is None and time.monotonic() < deadline_s, len(receiver.got)
                    if kill < KILLS or len(of_notices(receiver)) >= hour:  # each window begins or ends the alert
                        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 1 if hour % 2 else 5})
                        hour += 1
                    time.sleep(float(rng.uniform(0, 0.03)))
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
    assert "token=secret" not in "".join(capfd.readouterr()), "the token of the webhook is logged"
    starts = [np.datetime_as_string(np.datetime64(T0 + n * HOUR, "ms"), "s") + "Z" for n in range(hour)]
    assert of_notices(receiver) == [("resolved" if n % 2 else "firing", start) for n, start in enumerate(starts)]


def of_notices(receiver: Receiver) -> list[tuple[str, str]]:
    """What the notices say: status and start of the window, each once, in the order of arrival."""
    by_id = {notice["id"]: notice for notice in receiver.notices}
    alerts = [alert for notice in by_id.values() for alert in notice["alerts"]]
    return [(alert["status"], alert["details"]["window"]["start"]) for alert in alerts]
