"""Ends of alerts at their targets: with wrong clocks, refusals and full outboxes, and when something is removed.

Debian's Alertmanager notifies a web server of the test, which then has what a receiver of the Alertmanager sees.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from center.sinks import SinkRunner, SinkStore, alert_delivery, alerts, read_definition
from center.sinks.alert_delivery import Outbox
from center.sinks.alert_targets import DeliveryFailed, TargetSection
from center.sinks.process import SinkProcess
from center.sinks.store import WaitingQuery
from edgewater.base.streams import EdgeId
from sim.demo.ports import free_port
from tests.center.api.conftest import HOUR, T0, Desk
from tests.center.sinks.alert_receivers import Receiver
from tests.center.sinks.test_alerts_sink import RULES, Pager
from tests.programs import running


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Paged:
    """An Alertmanager, and the notifications of its receiver: (status, alert) in their order."""

    def __init__(self, url: str, receiver: Receiver) -> None:
        self.url, self._receiver = url, receiver

    @property
    def target(self) -> dict[str, Any]:
        return {"alertmanager": {"url": self.url}}

    def active(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.url}/api/v2/alerts").json()
        return found

    def sent(self, carrier: str) -> list[dict[str, Any]]:
        alerts = [a for notice in self._receiver.notices for a in notice["alerts"]]
        return [a for a in alerts if a["labels"].get("carrier") == carrier]


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory, alertmanager: str) -> Iterator[Paged]:
    path, port = tmp_path_factory.mktemp("am"), free_port()
    with Receiver().serving() as receiver:
        (path / "am.yml").write_text(
            "route: {receiver: r, group_by: [...], group_wait: 0s, group_interval: 100ms, repeat_interval: 1h}\n"
            f"receivers: [{{name: r, webhook_configs: [{{url: '{receiver.url}', send_resolved: true}}]}}]\n"
            "global: {resolve_timeout: 1s}\n"
        )
        arguments = [f"--config.file={path}/am.yml", f"--web.listen-address=127.0.0.1:{port}",
                     f"--storage.path={path}/data", "--cluster.listen-address="]  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        with running([alertmanager, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            until(lambda: _is_ready(url))
            yield Paged(url, receiver)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready").is_success
    except httpx.HTTPError:
        return False


def until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("carrier", "before", "after"),
    [("right", 0, 0), ("ahead", 1, 1), ("behind", -1, -1), ("forward", 0, 1), ("back", 0, -1), ("far", 200, -200)],
)
def test_an_alert_fires_and_ends_at_an_alertmanager_whatever_the_clock_of_the_sink_says(
    desk: Desk, paged: Paged, carrier: str, before: int, after: int
) -> None:
    desk.now = wall_ms() + before * HOUR
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"am": paged.target})
    desk.report(query, "jfk", T0, {carrier: 5})
    pager.run_until(lambda: paged.sent(carrier))
    (alert,) = (a for a in paged.active() if a["labels"]["carrier"] == carrier)
    started_s, ends_s = (datetime.fromisoformat(alert[name]).timestamp() for name in ("startsAt", "endsAt"))
    assert abs(started_s - time.time()) < 60 and 200 < ends_s - time.time() < 400  # noqa: TID251
    assert alert["annotations"]["since"] == "2013-01-01T00:00:00Z" and alert["annotations"]["fired_at"]
    pager.run_until(lambda: paged.sent(carrier), 61)  # it is repeated
    desk.now = wall_ms() + after * HOUR
    desk.report(query, "jfk", T0 + HOUR, {carrier: 1})
    pager.run_until(lambda: len(paged.sent(carrier)) == 2)
    assert [a["status"] for a in paged.sent(carrier)] == ["firing", "resolved"]
    assert paged.sent(carrier)[1]["startsAt"] == paged.sent(carrier)[0]["startsAt"]
    assert not any(a["labels"]["carrier"] == carrier for a in paged.active())
    pager.run(40, 5)
    assert len(paged.sent(carrier)) == 2 and not pager.problem


def test_a_server_without_a_time_is_named(desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver.server.RequestHandlerClass, "date_time_string", lambda *_: "soon")
    section = TargetSection.model_validate({"alertmanager": {"url": receiver.url.partition("/hook")[0]}})
    with pytest.raises(DeliveryFailed, match="Date") as failed:
        section.make(wall_ms).deliver(notice("n", ("a", "firing")))
    assert not failed.value.is_final


def test_pauses_hangs_and_repetitions_follow_no_wall_clock(desk: Desk, receiver: Receiver) -> None:
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"am": {"alertmanager": {"url": receiver.url.partition("/hook")[0]}}})
    receiver.replies.clear()
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run(4)
    for step_ms in (24 * HOUR, -48 * HOUR):
        desk.now += step_ms
        pager.run(2, 1)
        assert pager.problem == "", "nobody has waited for long"
    pager.run(2, 10)
    assert "no reply" in pager.problem
    receiver.replies.set()
    pager.run_until(lambda: len(receiver.got) == 4, 0)  # the notice and a repetition, each after a request for the time
    desk.now += 24 * HOUR
    pager.run(5, 0)
    assert len(receiver.got) == 4, "it is not repeated before its time"
    desk.now -= 48 * HOUR
    pager.run(1, 61)
    pager.run_until(lambda: len(receiver.got) == 6, 0)


def test_a_step_of_the_clock_neither_begins_nor_ends_silence(desk: Desk, receiver: Receiver) -> None:
    query = desk.register(lateness="99h")
    rules = [{"alert": "silent", "query": "flights", "no_answer_for": "1m"}]
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}}, rules)
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run(4)
    for step_ms in (HOUR, -2 * HOUR, 48 * HOUR):
        desk.now += step_ms
        pager.run(4)
    assert receiver.got == []
    pager.run_until(lambda: receiver.got, 10)
    desk.now -= 2 * HOUR
    pager.run(4)
    assert [a["status"] for n in receiver.notices for a in n["alerts"]] == ["firing"]
    pager.runner.stop()
    pager.runner = pager.new_runner("host:2")
    pager.run(4)
    assert len(receiver.got) == 1


# Refusals and full outboxes


class Picky:
    """A target that refuses notices with some alerts, and holds the state of all others."""

    repeats = False

    def __init__(self, *refuses: str) -> None:
        self.refuses, self.is_away = set(refuses), False
        self.state: dict[str, str] = {}
        self.got: list[str] = []

    def deliver(self, given: Any) -> None:
        if self.is_away:
            raise DeliveryFailed("away")
        pairs = [(a["labels"]["g"], a["status"]) for a in given["alerts"]]
        if any(pair[0] in self.refuses or ":".join(pair) in self.refuses for pair in pairs):
            raise DeliveryFailed("HTTP 400", is_final=True)
        self.state.update(pairs)
        self.got.append(given["id"])


def notice(name: str, *alerts: tuple[str, str]) -> dict[str, Any]:
    stated = [{"status": status, "labels": {"alertname": "r", "g": group}, "annotations": {"summary": "s"}, "since":
               "2013-01-01T00:00:00Z", "starts_at": "2013-01-01T00:00:00Z"} for group, status in alerts]  # fmt: skip
    return {"id": name, "rule": "r", "title": "", "alerts": stated}


class Mail:
    """An outbox with a clock."""

    def __init__(self, target: Any) -> None:
        self.box, self.now_ms = Outbox("s.t", target), 10**9

    def run(self, steps: int = 50, seconds: int = 1) -> None:
        for _ in range(steps):
            self.now_ms += seconds * 1000
            self.box.step(self.now_ms, tuple)
            self.box.finish(self.now_ms, 5)


def test_one_alert_that_is_refused_costs_no_other_one() -> None:
    mail = Mail(target := Picky("bad"))
    groups = [*(f"g{n}" for n in range(20)), "bad", *(f"h{n}" for n in range(20))]
    mail.box.add(notice("a", *((group, "firing") for group in groups)))
    mail.run()
    assert target.state == {group: "firing" for group in groups if group != "bad"}
    assert len(set(target.got)) == len(target.got) and mail.box.refused == 1
    mail.box.add(notice("b", *((group, "resolved") for group in groups)))
    mail.run()
    assert set(target.state.values()) == {"resolved"} and mail.box.left == 0, "no end of what was not told"


def test_a_refused_end_is_repeated_until_it_is_accepted_and_delays_nothing() -> None:
    mail = Mail(target := Picky("a:resolved"))
    mail.box.add(notice("1", ("a", "firing"), ("b", "firing")))
    mail.box.add(notice("2", ("a", "resolved"), ("b", "resolved")))
    mail.run(5)
    mail.box.add(notice("3", ("c", "firing")))
    mail.run(200)
    assert target.state == {"a": "firing", "b": "resolved", "c": "firing"}
    assert (mail.box.left, mail.box.refused) == (1, 1) and "400" in mail.box.problem
    mail.box = Outbox.restored("s.t", target, mail.box.to_state())  # a restart
    mail.run(100)
    assert target.state["a"] == "firing" and "400" in mail.box.problem
    target.refuses.clear()
    mail.run(100)
    assert target.state["a"] == "resolved" and (mail.box.left, mail.box.problem) == (0, "")


def test_a_refused_end_is_not_repeated_after_the_next_start() -> None:
    mail = Mail(target := Picky("a:resolved"))
    for name, status in (("1", "firing"), ("2", "resolved"), ("3", "firing")):
        mail.box.add(notice(name, ("a", status)))
        mail.run(3)
    target.refuses.clear()
    mail.run(200)
    assert target.state == {"a": "firing"} and (mail.box.left, mail.box.problem) == (0, "")


def test_a_full_outbox_drops_starts_but_no_end_of_a_delivered_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_delivery, "MAX_WAITING", 10)
    mail = Mail(target := Picky())
    told = [f"told{n}" for n in range(15)]
    mail.box.add(notice("0", *((group, "firing") for group in told)))
    mail.run(3)
    target.is_away = True
    for group in told:
        mail.box.add(notice(f"end {group}", (group, "resolved")))
        mail.box.add(notice(f"start {group}", (f"new {group}", "firing")))
        mail.run(1)
    mail.box.add(notice("again", *((group, "firing") for group in told)))
    mail.box.add(notice("over", *((f"new {group}", "resolved") for group in told)))
    mail.box = Outbox.restored("s.t", target, mail.box.to_state())
    target.is_away = False
    mail.run(300, 5)
    assert mail.box.dropped and mail.box.left == 0
    assert {target.state[group] for group in told} == {"resolved"}, "their next starts were dropped"
    mail.box.add(notice("last", *((group, "resolved") for group in told)))
    assert mail.box.left == 0, "the target has no start of them"


# Whatever is removed


def ended_by(alerts: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    return [(alert["status"], alert["annotations"].get("ended")) for alert in alerts]


@pytest.mark.parametrize("again", [False, True])
def test_the_alert_of_a_deleted_query_ends_at_an_alertmanager(desk: Desk, paged: Paged, again: bool) -> None:
    carrier = f"deleted {again}"
    query = desk.register(lateness="99h")
    silent = {"alert": "silent", "query": "flights", "no_answer_for": "1m" if not again else "999h"}
    pager = Pager(desk, {"am": paged.target}, [*RULES, silent])
    desk.report(query, "jfk", T0, {carrier: 5})
    pager.run_until(lambda: paged.sent(carrier))
    assert desk.ask("DELETE", "/v1/queries/flights").status_code == 204
    if again:
        desk.register(lateness="98h")
    pager.run_until(lambda: len(paged.sent(carrier)) > 1)
    assert ended_by(paged.sent(carrier)) == [("firing", None), ("resolved", "the query was deleted")]
    pager.run(10, 10)
    assert desk.get("/v1/alerts").json()["alerts"] == [], "nobody waits for its answers"
    assert len(paged.sent(carrier)) == 2
    assert ("is not registered" in pager.problem) == (not again)


def test_the_alert_about_a_retired_edge_ends(desk: Desk, receiver: Receiver) -> None:
    desk.connect("lga")
    query = desk.register(lateness="99h", budget={"staleness": "1h"})
    rules = [{"alert": "edge", "query": "flights", "edge": "missing"}]
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}}, rules)
    desk.report(query, "jfk", T0, {"UA": 5})
    desk.now += 2 * HOUR
    desk.results.tick(desk.ledger, [], desk.now)
    pager.run_until(lambda: receiver.got)
    desk.catalog.edges.retire(EdgeId("lga"))  # and the job gives no answer, which could end the alert
    pager.run_until(lambda: len(receiver.got) == 2)
    assert ended_by(receiver.notices[1]["alerts"]) == [("resolved", "the edge was retired")]
    pager.run(5)
    assert len(receiver.got) == 2


def test_alerts_end_at_a_target_that_is_removed_and_go_on_at_the_others(
    desk: Desk, receiver: Receiver, paged: Paged
) -> None:
    query = desk.register(lateness="99h")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOOK", receiver.url)
        pager = Pager(desk, {"am": paged.target, "hook": {"webhook": {"url": {"env": "HOOK"}}}})
        desk.report(query, "jfk", T0, {"removed": 5})
        pager.run_until(lambda: receiver.got and paged.sent("removed"))
        pager.runner.stop()
        pager.document["targets"] = {"hook": {"webhook": {"url": {"env": "HOOK"}}}}
        pager.runner = pager.new_runner()
        pager.run_until(lambda: len(paged.sent("removed")) == 2)
        assert ended_by(paged.sent("removed"))[1] == ("resolved", "the target was removed")
        pager.run_until(lambda: len(pager.targets) == 1)
        assert len(receiver.got) == 1
        pager.runner.stop()
        pager.document["targets"] = {"am": paged.target}
        pager.runner = pager.new_runner()
        pager.run_until(lambda: len(receiver.got) == 2 and len(paged.sent("removed")) == 3)
    assert ended_by(receiver.notices[1]["alerts"]) == [("resolved", "the target was removed")]
    assert paged.sent("removed")[2]["status"] == "firing", "a new target gets what fires"
    pager.run(5)
    assert pager.problem == "" and desk.get("/v1/alarms").json()["alarms"] == []


@pytest.mark.parametrize("is_secret", [True, False])
def test_a_removed_target_that_cannot_be_told_is_named(
    desk: Desk, receiver: Receiver, is_secret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", receiver.url)
    query = desk.register(lateness="99h")
    hook = {"webhook": {"url": receiver.url if is_secret else {"env": "HOOK"}}}
    with Receiver().serving() as other:
        pager = Pager(desk, {"hook": hook, "other": {"webhook": {"url": other.url}}})
        desk.report(query, "jfk", T0, {"UA": 5})
        pager.run_until(lambda: receiver.got)
        pager.runner.stop()
        assert "secret" not in "".join(pager.store.memories().values()), "no secret is stored"
        receiver.status = 503
        del pager.document["targets"]["hook"]
        pager.runner = pager.new_runner()
        if not is_secret:
            pager.run_until(lambda: "target hook" in pager.problem)
        pager.run_until(lambda: len(pager.targets) == 1, 60)
        (alarm,) = [a for a in desk.get("/v1/alarms").json()["alarms"] if a["kind"] == "alerts-left"]
        assert "hook" in alarm["message"] and ("503" in alarm["message"]) == (not is_secret)
        pager.run(2)
        assert pager.problem == ""


@contextmanager
def sinks(desk: Desk, *configured: dict[str, Any], owner: str = "host:1") -> Iterator[SinkProcess]:
    """The process of the sinks, with the machine's clock."""
    made = SinkProcess(
        [read_definition("pager", document) for document in configured], desk.catalog, desk.results,
        SinkStore(desk.results.engine), owner=owner, now_ms=wall_ms,
    )  # fmt: skip
    stop = threading.Event()
    thread = threading.Thread(target=made.run, args=[stop])
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join(90)


def definition(target: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "alerts", "rules": RULES, "targets": {"t": target}, "begin": "beginning"}


def test_a_sink_that_the_api_deletes_ends_its_alerts_and_then_its_state(desk: Desk, paged: Paged) -> None:
    desk.now = wall_ms()
    query, store = desk.register(lateness="9999h"), SinkStore(desk.results.engine)
    desk.report(query, "jfk", T0, {"sink deleted": 5})
    with sinks(desk):
        assert desk.ask("PUT", "/v1/sinks/pager", json=definition(paged.target)).status_code == 201
        until(lambda: paged.sent("sink deleted"))
        desk.now = wall_ms()
        assert desk.ask("DELETE", "/v1/sinks/pager").status_code == 204
        assert desk.get("/v1/sinks/pager").status_code == desk.ask("DELETE", "/v1/sinks/pager").status_code == 404
        until(lambda: store.memories() == {} and store.ending() == [])
        until(lambda: len(paged.sent("sink deleted")) == 2)
        assert ended_by(paged.sent("sink deleted"))[1] == ("resolved", "the sink was deleted")
        assert desk.get("/v1/sinks").json() == {"sinks": []} and desk.get("/v1/alerts").json() == {"alerts": []}
        assert desk.ask("PUT", "/v1/sinks/pager", json=definition(paged.target)).status_code == 201
        until(lambda: len(paged.sent("sink deleted")) == 3)


def test_a_sink_that_is_removed_from_the_file_ends_its_alerts_and_alarms(desk: Desk, paged: Paged) -> None:
    desk.now = wall_ms()
    query, store = desk.register(lateness="9999h"), SinkStore(desk.results.engine)
    desk.report(query, "jfk", T0, {"file": 5})
    with sinks(desk, definition(paged.target)):
        until(lambda: paged.sent("file"))
    desk.catalog.alarms.add("sink-failing", "sink pager: no reply", EdgeId(""), desk.now)
    desk.catalog.alarms.add("sink-failing", "sink pager2: no reply", EdgeId(""), desk.now)
    with sinks(desk):
        until(lambda: len(paged.sent("file")) == 2 and store.memories() == {})
        until(lambda: store.statuses() == [] == store.ending())
    assert ended_by(paged.sent("file"))[1] == ("resolved", "the sink was deleted")
    assert [a.message for a in desk.catalog.alarms.latest()] == ["sink pager2: no reply"]


def test_a_deleted_sink_whose_target_is_away_is_removed_after_a_time_and_says_so(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", receiver.url)
    desk.now = wall_ms()
    query, store = desk.register(lateness="9999h"), SinkStore(desk.results.engine)
    desk.report(query, "jfk", T0, {"UA": 5})
    with sinks(desk, definition({"webhook": {"url": {"env": "HOOK"}}})):
        until(lambda: receiver.got)
    receiver.status = 503
    monkeypatch.setattr(alerts, "LEAVES_MS", 3_000)
    with sinks(desk) as process:
        until(lambda: any("503" in problem for problem in process.problems()))
        until(lambda: store.memories() == {} and store.ending() == [])
    (alarm,) = desk.catalog.alarms.latest()
    assert alarm.kind == "alerts-left" and "sink pager" in alarm.message and "503" in alarm.message


def test_a_deleted_sink_ends_without_a_fault_and_no_answer_waits_for_it(desk: Desk, receiver: Receiver) -> None:
    query = desk.register(lateness="99h")
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}})
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run_until(lambda: receiver.got)
    epoch = pager.store.take("pager", "host:1", desk.now, 1)
    assert epoch is not None
    pager.store.report("pager", epoch, desk.now, waits={query.ref: WaitingQuery(0, "refused", 1)})
    pager.store.remove("pager", ends=True)
    assert pager.store.lowest_answer() is None
    runner = SinkRunner(
        alerts.ending("pager"), desk.catalog, desk.results, pager.store, owner="host:1", now_ms=lambda: desk.now,
        is_stored=True,
    )  # fmt: skip
    desk.now += 60_000
    runner.step()
    assert runner.problem == ""
    runner.stop()


@pytest.mark.nightly
@pytest.mark.parametrize(("between", "after"), [("other", "hook"), ("other", "renamed"), (None, "renamed")])
def test_a_target_that_comes_back_or_is_renamed_gets_the_ends_before_the_starts(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, between: str | None, after: str
) -> None:
    monkeypatch.setenv("HOOK", receiver.url)
    query = desk.register(lateness="99h")
    hook = {"webhook": {"url": {"env": "HOOK"}}}
    with Receiver().serving() as other:
        monkeypatch.setenv("OTHER", other.url)
        pager = Pager(desk, {"hook": hook})
        desk.report(query, "jfk", T0, {"UA": 5})
        pager.run_until(lambda: receiver.got)
        pager.runner.stop()
        receiver.status = 503
        if between is not None:
            pager.document["targets"] = {"hook": {"webhook": {"url": {"env": "OTHER"}}}}
            pager.runner = pager.new_runner()
            pager.run_until(lambda: other.got and "503" in pager.problem)
            pager.runner.stop()
        pager.document["targets"] = {after: hook}
        pager.runner = pager.new_runner()
        receiver.status = 200
        pager.run_until(lambda: len(receiver.got) == 3, 5)
        pager.run_until(lambda: pager.targets == [after] and pager.problem == "")
    assert [a["status"] for n in receiver.notices for a in n["alerts"]] == ["firing", "resolved", "firing"]
    assert desk.get("/v1/alarms").json()["alarms"] == []
    pager.runner.stop()


def test_each_target_of_an_address_that_changes_twice_gets_its_ends(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = desk.register(lateness="99h")
    with Receiver().serving() as one, Receiver().serving() as two, Receiver().serving() as three:
        receivers = {"ONE": one, "TWO": two, "THREE": three}
        for name, each in receivers.items():
            monkeypatch.setenv(name, each.url)
        pager = Pager(desk, {"hook": {"webhook": {"url": {"env": "ONE"}}}})
        desk.report(query, "jfk", T0, {"UA": 5})
        for name, each in receivers.items():
            pager.runner.stop()
            pager.document["targets"] = {"hook": {"webhook": {"url": {"env": name}}}}
            pager.runner = pager.new_runner()
            pager.run_until(lambda each=each: each.got)  # type: ignore[misc]
            each.status = 503
        one.status = two.status = 200
        pager.run_until(lambda: len(one.got) == len(two.got) == 2, 5)
        pager.runner.stop()
    assert [[a["status"] for n in each.notices for a in n["alerts"]] for each in (one, two)] == [
        ["firing", "resolved"], ["firing", "resolved"],
    ]  # fmt: skip


def test_a_sink_with_alerts_becomes_no_sink_of_another_kind_before_they_end(
    desk: Desk, paged: Paged, tmp_path: Path
) -> None:
    desk.now = wall_ms()
    query, parquet = desk.register(lateness="9999h"), {"kind": "parquet", "path": str(tmp_path / "files")}
    desk.report(query, "jfk", T0, {"kind": 5})
    store = SinkStore(desk.results.engine)
    store.define("pager", definition(paged.target))
    with sinks(desk):
        until(lambda: paged.sent("kind"))
    assert desk.ask("PUT", "/v1/sinks/pager", json=parquet).status_code == 409
    assert desk.ask("DELETE", "/v1/sinks/pager").status_code == 204
    assert desk.ask("PUT", "/v1/sinks/pager", json=parquet).status_code == 409
    with sinks(desk):
        until(lambda: store.ending() == [] and len(paged.sent("kind")) == 2)
    assert [a["status"] for a in paged.sent("kind")] == ["firing", "resolved"]
    assert desk.ask("PUT", "/v1/sinks/pager", json=parquet).status_code == 201


def test_a_condition_on_a_column_with_a_point_reaches_an_alertmanager(desk: Desk, paged: Paged) -> None:
    shares = {"n": "count()", "late": "count(dep_delay)", "share": "late / n"}
    query = desk.register(lateness="99h", measures=shares)
    rule = {"alert": "evidence", "query": "flights", "certainly": '"share.binomial" > 0.3', "labels": {"a_b": "1"}}
    pager = Pager(desk, {"oncall": paged.target}, [rule])
    desk.report(query, "jfk", T0, {"pointed": 9})
    pager.run_until(lambda: paged.sent("pointed") or pager.problem)
    assert pager.problem == ""
    (alert,) = paged.sent("pointed")
    assert '"value": 1.0' in alert["annotations"]["share_binomial"]
    (listed,) = desk.get("/prometheus/api/v1/alerts").json()["data"]["alerts"]
    assert all(name.isidentifier() for name in (*listed["annotations"], *listed["labels"]))
    assert "share.binomial" in desk.get("/v1/alerts").json()["alerts"][0]["details"]


@pytest.mark.nightly
@pytest.mark.parametrize("on_missing", ["hold", "evaluate-others", "fire"])
def test_an_alert_outlives_a_cut_edge_as_its_rule_says(tmp_path: Path, paged: Paged, on_missing: str) -> None:
    desk, carrier = Desk(tmp_path), on_missing
    desk.connect("jfk", "lga")
    query = desk.register(budget={"staleness": "1s"}, lateness="99h")
    rules = [{**RULES[0], "phase": "early", "on_missing": on_missing}]
    pager = Pager(desk, {"oncall": paged.target}, rules)
    desk.report(query, "jfk", T0, {carrier: 5, f"{carrier} 2": 1})
    desk.report(query, "lga", T0, {carrier: 1})
    pager.run_until(lambda: paged.sent(carrier), 0)
    asked = {"params": {"type": "alert"}}
    (alert,) = desk.get("/prometheus/api/v1/alerts").json()["data"]["alerts"]
    assert (alert["state"], alert["labels"]["carrier"], alert["value"]) == ("firing", carrier, "6")
    desk.report(query, "jfk", T0 + HOUR, {carrier: 1, f"{carrier} 2": 1})  # lga is cut
    desk.results.tick(desk.ledger, [], desk.now)
    pager.run(3, 0)
    (told,) = [a for a in desk.get("/v1/alerts").json()["alerts"] if a["labels"]["carrier"] == carrier] or [{}]
    (group,) = desk.get("/prometheus/api/v1/rules", **asked).json()["data"]["groups"]
    (rule,) = group["rules"]
    assert rule["duration"] == 0 and rule["health"] == "ok"
    if on_missing == "evaluate-others":
        pager.run_until(lambda: len(paged.sent(carrier)) == 2, 0)
        resolved = paged.sent(carrier)[1]
        assert resolved["status"] == "resolved" and resolved["annotations"]["missing"] == '["lga"]'
        assert resolved["annotations"]["ended"] == "the condition does not hold any more"
        assert (told, rule["state"], rule["alerts"]) == ({}, "inactive", [])
        return
    assert told["status"] == "firing" and told["details"]["missing"] == ["lga"]
    assert told["details"]["condition"] == ("unknown" if on_missing == "hold" else "holds")
    assert rule["state"] == "firing" and len(rule["alerts"]) == (1 if on_missing == "hold" else 2)
    desk.report(query, "lga", T0 + HOUR, {})
    pager.run_until(lambda: len(paged.sent(carrier)) == 2, 0)
    assert paged.sent(carrier)[1]["status"] == "resolved"


@pytest.mark.parametrize("on_missing", ["hold", "evaluate-others", "fire"])
def test_an_alert_goes_on_while_all_edges_are_cut_off(desk: Desk, receiver: Receiver, on_missing: str) -> None:
    query = desk.register(budget={"staleness": "1s"}, lateness="99h")
    rules = [{**RULES[0], "phase": "early", "on_missing": on_missing}]
    pager = Pager(desk, {"hook": {"webhook": {"url": receiver.url}}}, rules)
    desk.report(query, "jfk", T0, {"UA": 5})
    pager.run_until(lambda: receiver.got)
    desk.now += 2 * HOUR
    desk.results.tick(desk.ledger, [], desk.now)
    pager.run()
    (alert,) = desk.get("/v1/alerts").json()["alerts"]
    assert (alert["status"], alert["details"]["missing"]) == ("firing", ["jfk"])
