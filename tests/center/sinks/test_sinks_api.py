"""The API and the commands of sinks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from center.sinks import SinkStore
from center.sinks.process import SinkProcess
from tests.center.api.conftest import HOUR, T0, Desk

WAREHOUSE = {"kind": "postgres", "url": {"env": "WAREHOUSE_URL"}, "queries": ["flights"]}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_sink_is_defined_changed_shown_and_deleted(desk: Desk) -> None:
    assert desk.get("/v1/sinks").json() == {"sinks": []}
    made = desk.ask("PUT", "/v1/sinks/warehouse", json=WAREHOUSE)
    assert made.status_code == 201 and made.json()["definition"] == WAREHOUSE and made.json()["state"] == "waiting"
    changed = desk.ask("PUT", "/v1/sinks/warehouse", json={**WAREHOUSE, "queries": "all"})
    assert changed.status_code == 200 and changed.json()["definition"]["queries"] == "all"
    assert [s["name"] for s in desk.get("/v1/sinks").json()["sinks"]] == ["warehouse"]
    assert desk.ask("POST", "/v1/sinks/warehouse/pause").json()["state"] == "paused"
    assert desk.ask("POST", "/v1/sinks/warehouse/resume").json()["state"] == "waiting"
    assert desk.ask("DELETE", "/v1/sinks/warehouse").status_code == 204
    assert desk.get("/v1/sinks/warehouse").status_code == 404


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({**WAREHOUSE, "url": "postgresql://user:top-secret@host/db"}, "url"),
        ({**WAREHOUSE, "url": {"vault": "x"}}, "url.vault"),
        ({**WAREHOUSE, "kind": "oracle"}, "kind"),
        ({**WAREHOUSE, "query": "flights"}, "query"),
        ({"kind": "kafka", "brokers": ["a:1"], "properties": {"ssl.key.password": "top-secret"}}, "properties"),
        (
            {"kind": "kafka", "brokers": ["a:1"], "secrets": {"ssl.key.password": "top-secret"}},
            "secrets.ssl.key.password",
        ),
        ([], ""),
    ],
)
def test_a_wrong_definition_is_refused_and_no_secret_is_stored(desk: Desk, document: Any, field: str) -> None:
    refused = desk.ask("PUT", "/v1/sinks/warehouse", json=document)
    assert refused.status_code == 422 and "top-secret" not in refused.text
    assert refused.json()["field"] in (field, f"warehouse.{field}", "warehouse")
    assert desk.get("/v1/sinks").json() == {"sinks": []}


def test_a_sink_of_the_centers_file_is_changed_there(desk: Desk) -> None:
    SinkStore(desk.results.engine).take("warehouse", "host:1", desk.now, 1_000)
    assert desk.ask("PUT", "/v1/sinks/warehouse", json=WAREHOUSE).status_code == 409
    shown = desk.get("/v1/sinks/warehouse").json()
    assert shown["definition"] is None and shown["state"] == "running" and shown["owner"] == "host:1"


def test_a_replay_begins_with_the_first_answer_to_the_window(desk: Desk) -> None:
    desk.connect("jfk")
    query = desk.register()
    for hour in range(3):
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 1})
    desk.ask("PUT", "/v1/sinks/warehouse", json=WAREHOUSE)
    store = SinkStore(desk.results.engine)
    answer = desk.results.revisions(query.ref, T0 + HOUR)
    assert answer
    first = desk.results.answer(query.ref, T0 + HOUR, 1).answer_id
    assert desk.ask("POST", f"/v1/sinks/warehouse/replay?from={T0 + HOUR}").status_code == 200
    assert store.status("warehouse").replay_after == first - 1
    desk.ask("POST", "/v1/sinks/warehouse/replay")
    assert store.status("warehouse").replay_after == 0
    assert desk.ask("POST", "/v1/sinks/warehouse/replay?from=yesterday").status_code == 422
    assert desk.ask("POST", "/v1/sinks/none/replay").status_code == 404
    assert desk.get("/v1/sinks/warehouse").json()["behind_answers"] == desk.results.last_answer_id()


def test_a_sink_that_a_process_cannot_build_says_why(desk: Desk) -> None:
    desk.ask("PUT", "/v1/sinks/warehouse", json=WAREHOUSE)
    store = SinkStore(desk.results.engine)
    process = SinkProcess([], desk.catalog, desk.results, store, owner="host:1", now_ms=lambda: desk.now)
    stop = threading.Event()
    stop.set()
    process.run(stop)
    shown = desk.get("/v1/sinks/warehouse").json()
    assert shown["state"] == "failing" and "WAREHOUSE_URL" in shown["problem"]
    assert process.problems() == [f"warehouse: {shown['problem']}"]


def test_a_reader_sees_no_sink_and_changes_none(desk: Desk) -> None:
    app = desk.app(token="x", principals={"reader": {"token": "r", "queries": ["flights"]}})
    login = {"Authorization": "Bearer r"}
    assert desk.get("/v1/sinks", app=app, headers=login).status_code == 403
    assert desk.ask("PUT", "/v1/sinks/w", app=app, headers=login, json=WAREHOUSE).status_code == 403
