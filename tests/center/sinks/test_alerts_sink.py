"""The sink `alerts` with real receivers: a web server and Debian's Alertmanager."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from center.sinks import SinkRunner, SinkStore, read_definition, runner
from center.sinks.alert_rules import Alert, AlertRule
from center.sinks.alert_states import AlertCollector, saved_states
from center.sinks.alerts import AlertSink, stated
from edgewater.base.errors import InvalidConfig
from tests.center.api.conftest import HOUR, T0, Desk
from tests.center.sinks.alert_receivers import Receiver
from tests.certificates import make_certificates

RULES = [
    {"alert": "many", "query": "flights", "certainly": "n > 3", "labels": {"severity": "page"}, "summary": "too many"}
]


def exposition(store: SinkStore) -> str:
    registry = CollectorRegistry()
    registry.register(AlertCollector(store))
    return generate_latest(registry).decode()


class Pager:
    """A sink of rules over the center of a desk. `uptime_s` is its monotonic clock."""

    def __init__(self, desk: Desk, targets: dict[str, Any], rules: list[dict[str, Any]] = RULES) -> None:
        self.desk, self.store, self.uptime_s = desk, SinkStore(desk.results.engine), 0.0
        self.document = {"kind": "alerts", "rules": rules, "targets": targets, "begin": "beginning"}
        self.runner = self.new_runner()

    def new_runner(self, owner: str = "host:1") -> SinkRunner:
        return SinkRunner(
            read_definition("pager", self.document), self.desk.catalog, self.desk.results, self.store, owner=owner,
            now_ms=lambda: self.desk.now, monotonic=lambda: self.uptime_s,
        )  # fmt: skip

    @property
    def problem(self) -> str:
        return "".join(status.problem for status in self.store.statuses())

    @property
    def targets(self) -> list[str]:
        """The names of the targets in the stored state."""
        return [name for _, state in saved_states(self.store) for name in state.targets]

    def run(self, steps: int = 8, seconds: int = 2) -> None:
        for _ in range(steps):
            self.desk.now += seconds * 1_000
            self.uptime_s += seconds
            self.runner.step()

    def run_until(self, is_done: Callable[[], object], seconds: int = 2) -> None:
        """Steps until something is there; deliveries take as long as the machine needs."""
        deadline_s = time.monotonic() + 30
        while not is_done():
            assert time.monotonic() < deadline_s, self.problem
            self.run(1, seconds)
            time.sleep(0.01)


def test_a_webhook_gets_each_change_once_signed(desk: Desk, receiver: Receiver) -> None:
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url, "key": "k", "headers": {"X-Team": "ops"}}}})
    desk.report(query, "jfk", T0, {"UA": 5, "AA": 1})
    pager.run_until(lambda: receiver.got)
    (firing,) = desk.get("/v1/alerts").json()["alerts"]
    assert firing["sink"] == "pager" and firing["status"] == "firing" and firing["labels"]["carrier"] == "UA"
    desk.report(query, "jfk", T0 + HOUR, {"UA": 9})
    desk.report(query, "jfk", T0 + 2 * HOUR, {"UA": 1})
    pager.run_until(lambda: len(receiver.got) == 2)
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


def test_final_revisions_that_come_after_later_windows_change_no_alert(desk: Desk, receiver: Receiver) -> None:
    query = desk.register(lateness="2h")
    for hour in range(6):  # of which the first are final before the sink reads any
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 1 if hour % 2 else 5})
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}})
    pager.run_until(lambda: sum(len(notice["alerts"]) for notice in receiver.notices) >= 6)
    assert [a["status"] for notice in receiver.notices for a in notice["alerts"]] == ["firing", "resolved"] * 3
    assert desk.get("/v1/alerts").json()["alerts"] == []


def test_a_target_that_refuses_delays_only_itself_and_gets_everything_later(desk: Desk, receiver: Receiver) -> None:
    query = desk.register(lateness="99h")
    with Receiver().serving() as broken:
        broken.status = 503
        pager = Pager(desk, {"bad": {"webhook": {"url": broken.url}}, "good": {"webhook": {"url": receiver.url}}})
        desk.report(query, "jfk", T0, {"UA": 5})
        pager.run_until(lambda: receiver.got and "503" in pager.problem)
        assert len(receiver.got) == 1 and broken.got == []
        problem = pager.problem
        assert "target bad" in problem and "503" in problem and "secret" not in problem
        pager.runner.stop()
        pager.runner = pager.new_runner("host:2")  # a restart forgets no notice
        broken.status = 200
        pager.run_until(lambda: broken.got and pager.problem == "", 5)
        assert broken.notices == receiver.notices and len(broken.got) == 1
        assert pager.problem == ""


def test_a_process_that_dies_before_it_learns_of_a_delivery_delivers_again_with_the_same_id(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}})
    pager.run(2)
    desk.report(query, "jfk", T0, {"UA": 5})

    class Killed(SystemExit):
        pass

    def dies(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        save = AlertSink._save
        calls: list[int] = []

        def saves_once(self: Any, *positions: Any) -> None:
            calls.append(1)
            save(self, *positions) if len(calls) == 1 else dies()

        patched.setattr(AlertSink, "_save", saves_once)
        with pytest.raises(Killed):
            pager.run_until(lambda: False)
    desk.now += 60_000
    pager.runner = pager.new_runner("host:2")
    pager.run_until(lambda: len(receiver.got) == 2)
    assert len(receiver.got) == 2 and receiver.notices[0]["id"] == receiver.notices[1]["id"]


def test_a_notice_goes_through_a_proxy_only_if_the_target_names_one(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captive portal answers 200 to everything. It must not get notices, or count as Alertmanager."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with Receiver().serving() as proxy:
        way = f"http://127.0.0.1:{proxy.server.server_port}"
        targets = {
            "direct": {"webhook": {"url": receiver.url}},
            "indirect": {"webhook": {"url": "http://elsewhere.invalid/hook", "proxy": way}},
        }
        query = desk.register(lateness="99h")
        pager = Pager(desk, targets)
        desk.report(query, "jfk", T0, {"UA": 5})
        pager.run_until(lambda: receiver.got and proxy.got)
        pager.runner.stop()
    assert (len(receiver.got), len(proxy.got)) == (1, 1)
    with pytest.raises(InvalidConfig) as refused:
        read_definition("pager", {"kind": "alerts", "rules": RULES, "targets": {
            "t": {"webhook": {"url": "http://x", "proxy": "proxy:3128"}}}})  # fmt: skip
    assert refused.value.field == "sinks.pager.targets.t.webhook.proxy"


@pytest.mark.parametrize(
    ("kind", "reply"), [("webhook", "<html>log in</html>"), ("alertmanager", "<html>log in</html>"),
                        ("alertmanager", '{"status": "success"}')]
)  # fmt: skip
def test_the_reply_of_something_else_is_no_confirmation(desk: Desk, receiver: Receiver, kind: str, reply: str) -> None:
    receiver.reply = reply.encode()
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"t": {kind: {"url": receiver.url.partition("?")[0]}}})
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run_until(lambda: "127.0.0.1" in pager.problem)
    receiver.reply = b""
    pager.run_until(lambda: not pager.problem)
    pager.runner.stop()
    assert len(receiver.got) >= 2, "it is sent again"


def test_a_target_that_hangs_delays_neither_the_others_nor_the_lease(desk: Desk, receiver: Receiver) -> None:
    query = desk.register(lateness="99h")
    with Receiver().serving() as hanging:
        hanging.replies.clear()
        pager = Pager(desk, {"a": {"webhook": {"url": hanging.url}}, "b": {"webhook": {"url": receiver.url}}})
        desk.report(query, "jfk", T0, {"UA": 5})
        pager.run_until(lambda: receiver.got)
        desk.report(query, "jfk", T0 + HOUR, {"UA": 1})
        pager.run_until(lambda: len(receiver.got) == 2)
        asked = hanging.asked
        pager.run(10)
        assert hanging.asked - asked <= 2, "most steps wait for no reply"
        assert hanging.got == [] and "target a: no reply" in pager.problem
        hanging.replies.set()
        pager.run_until(lambda: len(hanging.got) >= 2)
    assert [n["id"] for n in hanging.notices][-2:] == [n["id"] for n in receiver.notices]


def test_a_target_that_takes_nothing_for_a_minute_raises_an_alarm_once(desk: Desk, receiver: Receiver) -> None:
    receiver.status = 503
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}})
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run_until(lambda: desk.get("/v1/alarms").json()["alarms"])
    pager.run(20, 10)
    (alarm,) = desk.get("/v1/alarms").json()["alarms"]
    assert (alarm["kind"], alarm["times"]) == ("sink-failing", 1) and "pager" in alarm["message"]


def test_a_notice_that_is_refused_for_good_does_not_hold_up_those_behind_it(desk: Desk, receiver: Receiver) -> None:
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}})
    receiver.status, receiver.reply = 422, b"no\x1b[2J\nmore"
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run_until(lambda: "422" in pager.problem)
    assert "[2J more" in pager.problem and pager.problem.isprintable()
    receiver.status, receiver.reply = 200, b""
    desk.report(query, "jfk", T0 + HOUR, {"UA": 1, "AA": 5})
    pager.run_until(lambda: receiver.got)
    told = [(a["status"], a["labels"]["carrier"]) for n in receiver.notices for a in n["alerts"]]
    assert told == [("firing", "AA")], "the target has no start of UA"
    pager.run(1)
    text = exposition(pager.store)
    assert 'edgewater_alerts_notices_total{result="refused",sink="pager",target="hook"} 1.0' in text
    assert 'edgewater_alerts_notices_total{result="delivered",sink="pager",target="hook"} 1.0' in text
    assert 'edgewater_alerts_target_up{sink="pager",target="hook"} 1.0' in text


def test_the_refused_start_of_an_alert_is_named_until_the_alert_ends(desk: Desk, receiver: Receiver) -> None:
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}})
    receiver.status = 422
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run_until(lambda: "422" in pager.problem)
    receiver.status = 200
    desk.report(query, "jfk", T0 + HOUR, {"UA": 5, "AA": 5})
    pager.run_until(lambda: receiver.got)
    pager.run(2)
    assert "alerts are refused" in pager.problem and "422" in pager.problem, "nobody has been told of UA"
    desk.report(query, "jfk", T0 + 2 * HOUR, {"AA": 1})
    pager.run_until(lambda: len(receiver.got) > 1)
    pager.run(1)
    assert pager.problem == ""


def test_an_exception_that_may_quote_a_secret_costs_only_its_target_and_is_not_quoted(
    desk: Desk, receiver: Receiver
) -> None:
    query = desk.register(lateness="99h")
    bad = {"url": receiver.url, "headers": {"Authorization": "p\u00e4ssword\u2603"}}
    pager = Pager(desk, {"bad": {"webhook": bad}, "good": {"webhook": {"url": receiver.url}}})
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run_until(lambda: receiver.got and "target bad" in pager.problem)
    assert "ssword" not in pager.problem and len(receiver.got) == 1


def test_a_webhook_over_tls_is_verified(desk: Desk, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path, {"server": "IP:127.0.0.1"})
    query = desk.register(lateness="99h")
    with Receiver(certificates).serving() as receiver:
        trusted = {"url": receiver.url, "ca": str(certificates / "ca.pem")}
        pager = Pager(desk, {"a": {"webhook": trusted}, "b": {"webhook": {"url": receiver.url}}})
        desk.report(query, "jfk", T0, {"UA": 5})
        pager.run_until(lambda: receiver.got and "certificate" in pager.problem.lower())
        assert "target b" in pager.problem and len(receiver.got) == 1


def test_a_rule_that_is_gone_resolves_its_alerts_with_a_notice(desk: Desk, receiver: Receiver) -> None:
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}})
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run_until(lambda: receiver.got)
    pager.runner.stop()
    pager.document["rules"] = [{"alert": "other", "query": "flights", "contract": "broken"}]
    pager.runner = pager.new_runner()
    pager.run_until(lambda: len(receiver.got) == 2)
    (ended,) = receiver.notices[1]["alerts"]
    assert (ended["status"], ended["labels"]["alertname"], ended["labels"]["severity"]) == ("resolved", "many", "page")
    assert (ended["details"]["condition"], ended["annotations"]["ended"]) == ("ended", "the rule was removed")


def test_groups_named_like_labels_of_the_sink_keep_both(desk: Desk, receiver: Receiver) -> None:
    rule = AlertRule("many", "flights", labels={"x": "1"})
    shown = stated(rule, Alert("many", (("query", "a"), ("alertname", "b"), ("x", "2")), 0, 1, 2, {}), "firing")
    assert shown["labels"] == {
        "alertname": "many", "query": "flights", "group_query": "a", "group_alertname": "b", "x": "2",
    }  # fmt: skip


def test_silence_is_not_stated_while_answers_wait_to_be_read(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = desk.register(lateness="99h")
    rules = [{"alert": "silent", "query": "flights", "no_answer_for": "1h"}]
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}}, rules)
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run(3)
    pager.runner.stop()
    for hour in range(1, 7):  # nobody runs the sink for six hours
        desk.now += HOUR
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 5})
    monkeypatch.setattr(runner, "MAX_ANSWERS", 2)
    pager.runner = pager.new_runner()
    pager.run(8)
    assert receiver.got == []
    pager.run_until(lambda: receiver.got, 600)
    assert receiver.notices[0]["alerts"][0]["status"] == "firing"


def test_silence_fires_without_any_answer(desk: Desk, receiver: Receiver) -> None:
    desk.register()
    rules = [{"alert": "silent", "query": "flights", "no_answer_for": "1m"}]
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}}, rules)
    pager.run(20)
    assert receiver.got == []
    pager.run_until(lambda: receiver.got)
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
    pager.run_until(lambda: receiver.got and "rule gone" in pager.problem)
    problem = pager.problem
    assert "rule odd" in problem and "rule gone: query x is not registered" in problem and len(receiver.got) == 1


def test_rules_and_their_state_are_stated_and_measured(desk: Desk, receiver: Receiver) -> None:
    rules = [*RULES, {"alert": "odd", "query": "flights", "possibly": "m BETWEEN 3 AND 4"}]
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}}, rules)
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run_until(lambda: receiver.got)
    many, odd = desk.get("/v1/alerts/rules").json()["rules"]
    assert (many["sink"], many["rule"], many["condition"]) == ("pager", "many", "certainly: n > 3")
    assert (many["state"], many["firing"], many["pending"], many["problem"]) == ("firing", 1, 0, None)
    assert many["window"]["start"] == "2013-01-01T00:00:00Z"
    assert odd["state"] == "failing" and "m" in odd["problem"]
    text = exposition(pager.store)
    assert 'edgewater_alerts{rule="many",sink="pager",state="firing"} 1.0' in text
    assert 'edgewater_alerts_rule_up{rule="odd",sink="pager"} 0.0' in text


def test_rules_are_tried_on_stored_answers_without_a_notice(desk: Desk, receiver: Receiver) -> None:
    query = desk.register(lateness="99h")
    for hour, flights in enumerate((1, 5, 6, 1, 7)):
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": flights})
        desk.now += HOUR
    document = {
        "kind": "alerts",
        "targets": {"hook": {"webhook": {"url": {"env": "HOOK"}}}},
        "rules": [*RULES, {"alert": "long", "query": "flights", "certainly": "n > 3", "for": "2h"},
                  {"alert": "odd", "query": "flights", "certainly": "m > 3"},
                  {"alert": "silent", "query": "flights", "no_answer_for": "30m"}],
    }  # fmt: skip
    checked = desk.ask("POST", "/v1/alerts/check", json=document).json()
    assert checked["answers"] == 5 and checked["is_whole"]
    assert [rule["fired"] for rule in checked["rules"]] == [2, 1, 0, 5]
    assert [c["status"] for c in checked["rules"][0]["changes"]] == ["firing", "resolved", "firing"]
    assert checked["rules"][0]["changes"][0]["details"]["window"]["start"] == "2013-01-01T01:00:00Z"
    assert "m" in checked["rules"][2]["problem"]
    later = desk.ask("POST", "/v1/alerts/check?from=2013-01-01T04:00:00Z", json=document).json()
    assert later["answers"] == 1 and later["rules"][0]["fired"] == 1
    assert receiver.got == [] and desk.get("/v1/alerts/rules").json() == {"rules": []}


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"kind": "kafka", "brokers": ["x:1"]}, "kind"),
        ({"kind": "alerts", "rules": [], "targets": {}}, "rules"),
        ([], ""),
    ],
)
def test_a_check_of_something_else_is_refused(desk: Desk, document: object, field: str) -> None:
    refused = desk.ask("POST", "/v1/alerts/check", json=document)
    assert refused.status_code == 422 and refused.json()["field"] == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rules": []}, "sinks.pager.rules"),
        ({"queries": ["other"]}, "sinks.pager.queries"),
        ({"rules": [{**RULES[0], "labels": {"a-b": "c"}}]}, "sinks.pager.rules.0.labels.a-b.[key]"),
        ({"rules": [{"alert": "a", "query": "q"}]}, "sinks.pager.rules.0"),
        ({"rules": [{"alert": "a", "query": "q", "certainly": "n >"}]}, "sinks.pager.rules.0"),
        ({"rules": [{"alert": "a", "query": "q", "certainly": "n > 1", "contract": "broken"}]}, "sinks.pager.rules.0"),
        ({"rules": [{"alert": "a", "query": "q", "certainly": "n > 1", "targets": ["x"]}]}, "sinks.pager"),
        ({"rules": RULES * 2}, "sinks.pager"),
        ({"targets": {"t": {}}}, "sinks.pager.targets.t"),
        ({"targets": {"t": {"webhook": {"url": "x"}, "alertmanager": {"url": "http://x"}}}}, "sinks.pager.targets.t"),
        ({"targets": {"t": {"email": {"server": "mail:25"}}}}, "sinks.pager.targets.t.email"),
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
    desk.sink_secrets = ("HOOK", "/x")
    made = desk.ask("PUT", "/v1/sinks/pager", json=document)
    assert made.status_code == 201, made.text


def test_while_one_query_waits_the_problems_of_all_rules_are_stated(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = AlertSink.write

    def refuses(sink: AlertSink, answers: Any, positions: Any) -> None:
        if any(answer.query.name == "broken" for answer in answers):
            raise OSError("refused")
        writes(sink, answers, positions)

    monkeypatch.setattr(AlertSink, "write", refuses)
    queries = {name: desk.register(name=name, lateness="99h") for name in ("broken", "flights")}
    rules = [*RULES, {**RULES[0], "alert": "b", "query": "broken"}, {**RULES[0], "alert": "none", "query": "missing"}]
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}}, rules)
    for hour, n in enumerate((5, 1)):
        for query in queries.values():
            desk.report(query, "jfk", T0 + hour * HOUR, {"UA": n})
        pager.run_until(lambda hour=hour: len(receiver.got) > hour)  # type: ignore[misc]
        pager.run(2, 1)
        assert "broken@1" in pager.problem and "missing is not registered" in pager.problem
    assert [(n["query"], a["status"]) for n in receiver.notices for a in n["alerts"]] == [
        ("flights", "firing"), ("flights", "resolved"),
    ]  # fmt: skip
    assert [query["query"] for query in desk.get("/v1/sinks/pager").json()["queries"]] == ["broken"]
    pager.runner.stop()


def test_a_target_that_fails_while_a_query_is_deleted_goes_on(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = desk.register(lateness="99h")
    desk.register(name="gone")
    pager = Pager(
        desk, {"hook": {"webhook": {"url": receiver.url}}}, [*RULES, {**RULES[0], "alert": "g", "query": "gone"}]
    )
    pager.run(4)
    assert desk.ask("DELETE", "/v1/queries/gone").status_code == 204
    opens, failures = AlertSink.open, [OSError("the connection was lost")]

    def fails_once(sink: AlertSink, queries: Any) -> Any:
        if failures:
            raise failures.pop()
        return opens(sink, queries)

    monkeypatch.setattr(AlertSink, "open", fails_once)
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run(1)
    assert not failures and "rule g" in pager.problem and "Error" not in pager.problem
    pager.run_until(lambda: receiver.got)
    pager.runner.stop()
