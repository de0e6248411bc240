"""The sink `alerts` with real receivers: a web server, Debian's Alertmanager, a mail server."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from center.sinks import SinkRunner, SinkStore, read_definition
from edgewater.model.errors import InvalidConfig
from tests.center.api.conftest import HOUR, T0, Desk

RULES = [
    {"alert": "many", "query": "flights", "certainly": "n > 3", "labels": {"severity": "page"}, "summary": "too many"}
]


MAIL = {"sender": "edgewater@example.com", "to": ["ops@example.com"], "tls": "none"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Pager:
    """A sink of rules over the center of a desk."""

    def __init__(self, desk: Desk, targets: dict[str, Any], rules: list[dict[str, Any]] = RULES) -> None:
        self.desk, self.store = desk, SinkStore(desk.results.engine)
        self.document = {"kind": "alerts", "rules": rules, "targets": targets, "begin": "beginning"}
        self.runner = self.new_runner()

    def new_runner(self, owner: str = "host:1") -> SinkRunner:
        return SinkRunner(
            read_definition("pager", self.document), self.desk.catalog, self.desk.results, self.store, owner=owner,
            now_ms=lambda: self.desk.now,
        )  # fmt: skip

    def run(self, steps: int = 8, seconds: int = 2) -> None:
        for _ in range(steps):
            self.desk.now += seconds * 1_000
            self.runner.step()


class Receiver:
    """A web server that keeps what it gets, and replies with `status`."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if receiver.status == 200:
                    receiver.got.append((dict(self.headers), body))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?token=secret"

    @property
    def notices(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]

    @contextmanager
    def serving(self) -> Iterator[Receiver]:
        thread = threading.Thread(target=self.server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            thread.join()
            self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().serving() as made:
        yield made


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.connect("jfk")
    return made


def test_a_webhook_gets_each_change_once_signed(desk: Desk, receiver: Receiver) -> None:
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url, "key": "k", "headers": {"X-Team": "ops"}}}})
    desk.report(query, "jfk", T0, {"UA": 5, "AA": 1})
    pager.run()
    (firing,) = desk.get("/v1/alerts").json()["alerts"]
    assert firing["sink"] == "pager" and firing["status"] == "firing" and firing["labels"]["carrier"] == "UA"
    desk.report(query, "jfk", T0 + HOUR, {"UA": 9})
    desk.report(query, "jfk", T0 + 2 * HOUR, {"UA": 1})
    pager.run()
    first, second = receiver.notices
    assert desk.get("/v1/alerts").json()["alerts"] == []
    assert [(a["status"], a["labels"]["carrier"], a["labels"]["severity"]) for a in first["alerts"]] == [
        ("firing", "UA", "page")
    ]
    assert first["alerts"][0]["details"]["n"] == {"value": 5.0, "lower": 5.0, "upper": 5.0}
    assert [(a["status"], a["labels"]["carrier"]) for a in second["alerts"]] == [("resolved", "UA")]
    headers, body = receiver.got[0]
    time_s, digest = (part.partition("=")[2] for part in headers["Edgewater-Signature"].split(","))
    assert hmac.new(b"k", f"{time_s}.".encode() + body, hashlib.sha256).hexdigest() == digest
    assert headers["Idempotency-Key"] == first["id"] and headers["X-Team"] == "ops"


def test_a_target_that_refuses_delays_only_itself_and_gets_everything_later(desk: Desk, receiver: Receiver) -> None:
    query = desk.register(lateness="99h")
    with Receiver().serving() as broken:
        broken.status = 503
        pager = Pager(desk, {"bad": {"webhook": {"url": broken.url}}, "good": {"webhook": {"url": receiver.url}}})
        desk.report(query, "jfk", T0, {"UA": 5})
        pager.run()
        assert len(receiver.got) == 1 and broken.got == []
        problem = pager.store.status("pager").problem
        assert "target bad" in problem and "503" in problem and "secret" not in problem
        pager.runner.stop()
        pager.runner = pager.new_runner("host:2")  # a restart forgets no notice
        broken.status = 200
        pager.run(40, 5)
        assert broken.notices == receiver.notices and len(broken.got) == 1
        assert pager.store.status("pager").problem == ""


def test_a_process_that_dies_before_it_learns_of_a_delivery_delivers_again_with_the_same_id(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}})
    pager.run(2)
    desk.report(query, "jfk", T0, {"UA": 5})

    class Killed(BaseException):
        pass

    def dies(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        save = type(pager.runner._sink)._save  # type: ignore[attr-defined]
        calls: list[int] = []

        def saves_once(self: Any) -> None:
            calls.append(1)
            save(self) if len(calls) == 1 else dies()

        patched.setattr(type(pager.runner._sink), "_save", saves_once)
        with pytest.raises(Killed):
            pager.run()
    desk.now += 60_000
    pager.runner = pager.new_runner("host:2")
    pager.run()
    assert len(receiver.got) == 2 and receiver.notices[0]["id"] == receiver.notices[1]["id"]


def test_an_alertmanager_shows_what_fires_and_what_is_resolved(desk: Desk, tmp_path: Path) -> None:
    program = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if program is None:
        assert "CI" not in os.environ
        pytest.skip("Debian's prometheus-alertmanager is not installed")
    port, cluster = free_port(), tmp_path / "alertmanager.yml"
    cluster.write_text("route: {receiver: none}\nreceivers: [{name: none}]\n")
    arguments = [f"--config.file={cluster}", f"--web.listen-address=127.0.0.1:{port}", f"--storage.path={tmp_path}/am",
                 "--cluster.listen-address="]  # fmt: skip
    process = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        desk.now = int(time.time() * 1000)  # noqa: TID251  # it compares times with its clock
        query = desk.register(lateness="9999h")
        pager = Pager(desk, {"am": {"alertmanager": {"url": url}}})
        desk.report(query, "jfk", T0, {"UA": 5, "AA": 4})
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            pager.runner.step()
            try:
                shown = httpx.get(f"{url}/api/v2/alerts").json()
            except httpx.HTTPError:
                time.sleep(0.1)
                desk.now = int(time.time() * 1000)  # noqa: TID251
                continue
            if len(shown) == 2:
                break
            desk.now = int(time.time() * 1000)  # noqa: TID251
        assert sorted(a["labels"]["carrier"] for a in shown) == ["AA", "UA"]
        assert shown[0]["labels"]["alertname"] == "many" and shown[0]["annotations"]["summary"] == "too many"
        desk.report(query, "jfk", T0 + HOUR, {"UA": 5})
        while len(shown) > 1 and time.monotonic() < deadline_s:
            desk.now = int(time.time() * 1000)  # noqa: TID251
            pager.runner.step()
            shown = httpx.get(f"{url}/api/v2/alerts?active=true").json()
        assert [a["labels"]["carrier"] for a in shown] == ["UA"]
    finally:
        process.kill()
        process.wait()


def test_a_mail_server_gets_a_mail_per_change(desk: Desk) -> None:
    controllers = pytest.importorskip("aiosmtpd.controller")
    mails: list[Any] = []

    class Handler:
        async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802
            mails.append(envelope)
            return "250 OK"

    controller = controllers.Controller(Handler(), hostname="127.0.0.1", port=free_port())
    controller.start()
    try:
        query = desk.register(lateness="99h")
        section = {**MAIL, "server": f"127.0.0.1:{controller.port}"}
        pager = Pager(desk, {"mail": {"email": section}})
        desk.report(query, "jfk", T0, {"UA": 5})
        pager.run()
    finally:
        controller.stop()
    (mail,) = mails
    assert mail.rcpt_tos == ["ops@example.com"] and b"many: 1 firing, 0 resolved" in mail.content
    assert b"carrier=UA" in mail.content


def test_silence_fires_without_any_answer(desk: Desk, receiver: Receiver) -> None:
    desk.register()
    rules = [{"alert": "silent", "query": "flights", "no_answer_for": "1m"}]
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}}, rules)
    pager.run(20)
    assert receiver.got == []
    pager.run(20)
    assert [a["status"] for n in receiver.notices for a in n["alerts"]] == ["firing"]


def test_a_rule_that_cannot_be_evaluated_is_named_and_the_others_work(desk: Desk, receiver: Receiver) -> None:
    rules = [
        *RULES,
        {"alert": "odd", "query": "flights", "possibly": "m > 3"},
        {"alert": "gone", "query": "x", "contract": "broken"},
    ]
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}}, rules)
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run()
    problem = pager.store.status("pager").problem
    assert "rule odd" in problem and "rule gone: query x is not registered" in problem and len(receiver.got) == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rules": []}, "sinks.pager.rules"),
        ({"rules": [{"alert": "a", "query": "q"}]}, "sinks.pager.rules.0"),
        ({"rules": [{"alert": "a", "query": "q", "certainly": "n >"}]}, "sinks.pager.rules.0"),
        ({"rules": [{"alert": "a", "query": "q", "certainly": "n > 1", "contract": "broken"}]}, "sinks.pager.rules.0"),
        ({"rules": [{"alert": "a", "query": "q", "certainly": "n > 1", "targets": ["x"]}]}, "sinks.pager"),
        ({"rules": RULES * 2}, "sinks.pager"),
        ({"targets": {"t": {}}}, "sinks.pager.targets.t"),
        ({"targets": {"t": {"webhook": {"url": "x"}, "alertmanager": {"url": "http://x"}}}}, "sinks.pager.targets.t"),
        (
            {"targets": {"t": {"email": {"server": "mail", "sender": "a@b", "to": ["c@d"]}}}},
            "sinks.pager.targets.t.email.server",
        ),
    ],
)
def test_a_wrong_definition_is_refused_with_its_key(changes: dict[str, Any], field: str) -> None:
    document = {"kind": "alerts", "rules": RULES, "targets": {"t": {"webhook": {"url": "http://x"}}}, **changes}
    with pytest.raises(InvalidConfig) as refused:
        read_definition("pager", document)
    assert refused.value.field == field


def test_a_stored_definition_has_no_secret_at_any_depth(desk: Desk) -> None:
    document = {"kind": "alerts", "rules": RULES, "targets": {"t": {"webhook": {"url": "https://x/top-secret"}}}}
    refused = desk.ask("PUT", "/v1/sinks/pager", json=document)
    assert refused.status_code == 422 and "top-secret" not in refused.text
    assert refused.json()["field"] == "targets.t.webhook.url"
    document["targets"] = {"t": {"webhook": {"url": {"env": "HOOK"}, "headers": {"Authorization": {"file": "/x"}}}}}
    assert desk.ask("PUT", "/v1/sinks/pager", json=document).status_code == 201
