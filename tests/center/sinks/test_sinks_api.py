"""The API and the commands of sinks."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from center.sinks import SinkStore, read_definition
from center.sinks.definitions import masked
from center.sinks.process import SinkProcess
from edge.sources.kafka_client import KafkaConfig
from edgewater.base.errors import InvalidConfig
from tests.center.api.conftest import HOUR, T0, Desk

WAREHOUSE = {"kind": "postgres", "url": {"env": "WAREHOUSE_URL"}, "queries": ["flights"]}


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
        ({**WAREHOUSE, "url": {"vault": "x"}}, "url"),
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


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"kind": "remote_write", "url": "http://a/w", "labels": {"a": "\ud800"}}, "labels.a"),
        ({"kind": "parquet", "path": "/\ud800"}, "path"),
        ({"kind": "kafka", "brokers": ["\ud800"]}, "brokers.0"),
        ({"kind": "parquet", "path": "/a", "queries": ["\ud800"]}, "queries.0"),
    ],
)
def test_a_text_that_cannot_be_sent_is_refused_and_no_list_fails(desk: Desk, document: Any, field: str) -> None:
    body = json.dumps(document).encode()
    for method, path in (("PUT", "/v1/sinks/w"), ("POST", "/v1/alerts/check")):
        refused = desk.ask(method, path, content=body, headers={"Content-Type": "application/json"})
        assert (refused.status_code, refused.json()["field"]) == (422, field)
    assert desk.get("/v1/sinks").json() == {"sinks": []}


NOT_LISTED = [
    {"kind": "postgres", "url": {"env": "PATH"}},
    {"kind": "postgres", "url": {"file": "/etc/passwd"}},
    {"kind": "kafka", "brokers": ["a:1"], "password": {"env": "PATH"}, "username": "u"},
    {"kind": "kafka", "brokers": ["a:1"], "secrets": {"ssl.key.pem": {"file": "/etc/passwd"}}},
    {"kind": "kafka", "brokers": ["a:1"], "properties": {"ssl.ca.location": "/etc/passwd"}},
    {"kind": "kafka", "brokers": ["a:1"], "properties": {"ssl.keystore.location": "/dev/zero"}},
    {"kind": "remote_write", "url": "http://a/w", "token": {"file": "/dev/zero"}},
    {"kind": "delta", "path": "s3://a", "options": {"AWS_SECRET_ACCESS_KEY": {"env": "PATH"}}},
    {"kind": "delta", "path": "s3://a", "options": {"google_service_account": "/etc/passwd"}},
    {"kind": "iceberg", "catalog": {"type": "rest", "token": {"env": "PATH"}}},
    {"kind": "iceberg", "catalog": {"py-io-impl": "os.system"}},
    {"kind": "iceberg", "catalog": {"uri": "postgresql://user:top-secret@host/db"}},
    {"kind": "iceberg", "catalog": {"uri": "postgresql+psycopg://host/db?passfile=/etc/passwd"}},
    {"kind": "remote_write", "url": "http://user:top-secret@a/w"},
    {"kind": "delta", "path": "s3://user:top-secret@a"},
    *(
        {"kind": "alerts", "rules": [{"alert": "a", "query": "q", "contract": "broken"}], "targets": {"t": target}}
        for target in (
            {"webhook": {"url": {"env": "PATH"}}},
            {"webhook": {"url": {"env": "WAREHOUSE_URL"}, "key": {"file": "/etc/passwd"}}},
            {"webhook": {"url": {"env": "WAREHOUSE_URL"}, "headers": {"X": {"env": "PATH"}}}},
            {"webhook": {"url": {"env": "WAREHOUSE_URL"}, "ca": "/etc/passwd"}},
            {"alertmanager": {"url": "http://a", "token": {"env": "PATH"}}},
            {"alertmanager": {"url": "http://a", "ca": "/dev/zero"}},
            {"alertmanager": {"url": "http://user:top-secret@a"}},
        )
    ),
]


@pytest.mark.parametrize("document", NOT_LISTED)
def test_a_definition_of_the_api_uses_only_listed_secrets_and_files(desk: Desk, document: dict[str, Any]) -> None:
    refused = desk.ask("PUT", "/v1/sinks/w", json=document)
    assert refused.status_code == 422 and "top-secret" not in refused.text
    assert desk.get("/v1/sinks").json() == {"sinks": []}
    store = SinkStore(desk.results.engine)
    store.define("w", document)  # by an earlier release
    process = SinkProcess(
        [], desk.catalog, desk.results, store, owner="h:1", now_ms=lambda: 1, listed=desk.sink_secrets
    )
    stop = threading.Event()
    stop.set()
    process.run(stop)
    (problem,) = process.problems()
    assert problem.startswith("w: ") and "top-secret" not in problem


@pytest.mark.parametrize("folder", ["properties", "secrets"])
@pytest.mark.parametrize(
    "name",
    [
        *("plugin.library.paths", "ssl.engine.location", "ssl.providers", "sasl.kerberos.kinit.cmd"),
        *("sasl.kerberos.keytab", "sasl.kerberos.principal", "https.ca.location", "sasl.oauthbearer.assertion.file"),
        *("sasl.oauthbearer.assertion.private.key.file", "sasl.oauthbearer.assertion.jwt.template.file"),
        *("client.plugin.path", "broker.cmd", "debug", "interceptor", ""),
    ],
)
def test_a_property_of_kafka_that_loads_code_runs_a_program_or_reads_a_file_is_refused(folder: str, name: str) -> None:
    value: Any = "/tmp/a.so" if folder == "properties" else {"env": "PATH"}
    for listed in (None, ["PATH", "/tmp/a.so"]):
        with pytest.raises(InvalidConfig) as refused:
            read_definition("k", {"kind": "kafka", "brokers": ["a:1"], folder: {name: value}}, listed=listed)
        assert folder in refused.value.field
    with pytest.raises(ValidationError):
        KafkaConfig.model_validate({"brokers": ["a:1"], "topic": "t", "properties": {name: "/tmp/a.so"}})


def documented() -> Iterator[tuple[str, dict[str, Any]]]:
    for page in sorted((Path(__file__).parents[3] / "docs").rglob("*.md")):
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            found = next(iter(yaml.safe_load_all(block)), None) if re.search(r"^sinks:", block, re.MULTILINE) else None
            for name, document in (found or {}).get("sinks", {}).items():
                if document.get("kind", "sqlite") != "sqlite":  # that is a kind of an example
                    yield name, document


def names_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and list(value) in (["env"], ["file"]):
        yield from value.values()
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from names_in(each)


@pytest.mark.parametrize(("name", "document"), list(documented()))
def test_each_documented_example_of_a_sink_can_be_defined_by_the_api(
    desk: Desk, name: str, document: dict[str, Any]
) -> None:
    desk.sink_secrets = tuple(names_in(document))
    made = desk.ask("PUT", f"/v1/sinks/{name}", json=document)
    assert made.status_code == 201, made.text
    assert made.json()["definition"] == document


def test_messages_show_no_secret_of_a_definition() -> None:
    document = {"kind": "remote_write", "url": "http://a", "token": "top-secret", "labels": {"a": "public"}}
    options = read_definition("w", document).options
    assert masked("header 'Bearer top-secret' of public", options) == "header 'Bearer …' of public"


def test_a_sink_of_the_centers_file_is_changed_there(desk: Desk) -> None:
    SinkStore(desk.results.engine).take("warehouse", "host:1", desk.now, 1_000)
    assert desk.ask("PUT", "/v1/sinks/warehouse", json=WAREHOUSE).status_code == 409
    shown = desk.get("/v1/sinks/warehouse").json()
    assert shown["definition"] is None and shown["state"] == "running" and shown["owner"] == "host:1"


def test_a_replay_begins_with_the_first_answer_to_the_window(desk: Desk) -> None:
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
    process = SinkProcess(
        [], desk.catalog, desk.results, store, owner="host:1", now_ms=lambda: desk.now, listed=["WAREHOUSE_URL"]
    )
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
