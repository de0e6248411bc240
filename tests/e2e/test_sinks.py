"""A real center whose sink and whose warehouse are killed: the tables equal what REST answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.engine import make_url

from sim.demo import data
from sim.demo.run import Demo
from tests.center.postgres import PostgresServer, serving
from tests.e2e.conftest import WAREHOUSE_URL
from tests.e2e.test_disturbances import DAY_MS, DAYS, FIRST_MS, Scenario, kill_part
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def warehouse(postgres_binaries: Path) -> Iterator[PostgresServer]:
    with serving(postgres_binaries) as server:
        yield server


def sinks(system: Demo, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "edgewater", "sinks", *arguments, "--url", system.url, "--json"]
    reply = subprocess.run(command, capture_output=True, text=True, check=False)
    assert reply.returncode == 0, reply.stderr
    return dict(json.loads(reply.stdout))


def shown(system: Demo) -> dict[str, Any]:
    """The state of the sink, without the start of an interpreter."""
    return dict(system.client.get("/v1/sinks/warehouse").raise_for_status().json())


def of_rest(system: Demo, query: str, measures: tuple[str, ...]) -> set[tuple[Any, ...]]:
    """A row per window and group, with each measure's interval."""
    return {
        (
            datetime.fromisoformat(answer["window"]["start"]).astimezone(UTC), answer["revision"], answer["phase"],
            answer["quality"]["completeness"]["ratio"], *row.get("group", {}).values(),
            *(row[m][part] for m in measures for part in ("estimate", "lower", "upper")),
        )
        for answer in system.answers(query)
        for row in answer["data"]
    }  # fmt: skip


def of_table(url: str, query: str, groups: tuple[str, ...], measures: tuple[str, ...]) -> list[tuple[Any, ...]]:
    columns = ["window_start", "revision", "phase", "completeness", *groups]
    columns += [f"{m}{part}" for m in measures for part in ("", "_lower", "_upper")]
    with psycopg.connect(url, options="-c timezone=UTC") as connection:
        return connection.execute(f"SELECT {', '.join(columns)} FROM reach.{query}").fetchall()  # type: ignore[arg-type]


@pytest.mark.nightly  # tests/center/sinks kill a sink at each step, test_stored_system.py has sinks of a whole center
def test_a_warehouse_equals_the_answers_whatever_is_killed(
    system: Demo, warehouse: PostgresServer, tmp_path: Path
) -> None:
    table = data.load()
    flights = table.slice(0, sum(at < FIRST_MS + DAYS * DAY_MS for at in table[data.TIME].to_pylist()))
    url = make_url(warehouse.new_database()).set(drivername="postgresql", query={}).render_as_string(False)
    secret = system.directory / WAREHOUSE_URL
    secret.write_text(url)
    document = {"kind": "postgres", "url": {"file": str(secret)}, "schema": "reach"}
    file = tmp_path / "warehouse.yaml"
    file.write_text(json.dumps(document))
    sinks(system, "put", "warehouse", "--file", str(file))
    try:
        scenario = Scenario(system, flights, "reach")
        scenario.start()
        pid = system.directory / "state" / "center" / "pids" / "sink.pid"
        for day in (5, 10, 15, 25):
            scenario.wait_for_day(day)
            until(pid.exists)  # the supervisor waits before it starts it again
            kill_part(system, "sink")
        scenario.wait_for_day(28)
        warehouse.kill()
        until(lambda: shown(system)["state"] == "failing")
        assert "PostgreSQL" in shown(system)["problem"]
        warehouse.start()
        kill_part(system, "job")
        scenario.check()
        until(lambda: shown(system)["behind_answers"] == 0)
        for query, groups, measures in (
            ("exact_reach", ("carrier", "dest"), ("flights", "miles", "longest", "length", "far")),
            ("sliding_reach", (), ("late",)),
        ):
            rows, truth = of_table(url, query, groups, measures), of_rest(system, query, measures)
            assert len(rows) == len(truth) and set(rows) == truth and len(truth) >= DAYS
        last = sinks(system, "show", "warehouse")
        assert (last["state"], last["gap"], last["problem"]) == ("running", None, None)
    finally:
        sinks(system, "rm", "warehouse")
