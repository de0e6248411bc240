"""Requests that may cost much: they take no thread of a registration, are limited, and end with their client."""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from center.api.lanes import Alive, Lane
from center.api.negotiation import ARROW, CSV, JSON
from center.api.problems import HttpProblem
from center.api.prometheus.evaluate import Matchers
from center.api.routers import alerts, sql
from center.api.sql_guard import SqlGuard
from center.sinks.alert_check import CheckReport, check_rules
from edgewater.model.errors import InvalidQuery
from tests.center.api.conftest import HOUR, SPEC, T0, Desk

RULE = {"alert": "a", "query": "flights", "certainly": "n > 3"}
CHECK = {"kind": "alerts", "rules": [RULE], "targets": {"t": {"webhook": {"url": {"env": "HOOK"}}}}}


@pytest.fixture
def desk(tmp_path: Any) -> Desk:
    return Desk(tmp_path)


class Client:
    """A request whose client leaves when `gone` is set."""

    def __init__(self) -> None:
        self.gone = threading.Event()

    async def is_disconnected(self) -> bool:
        return self.gone.is_set()


@pytest.mark.parametrize("waits", [False, True], ids=["works", "waits for a thread"])
def test_work_ends_when_its_client_has_gone(waits: bool) -> None:
    client, lane = Client(), Lane(1)
    ended = threading.Event()

    def work(alive: Alive) -> None:
        client.gone.set()
        while True:
            alive()

    async def run() -> None:
        if waits:
            holding = asyncio.create_task(lane.run(Client(), lambda _: ended.wait(30)))  # type: ignore[arg-type]
            waiting = asyncio.create_task(lane.run(client, lambda _: pytest.fail("nobody waits")))  # type: ignore[arg-type]
            client.gone.set()
            await asyncio.sleep(0)
            while not lane.limiter.statistics().tasks_waiting:
                await asyncio.sleep(0)
            await asyncio.sleep(0.3)  # the look at the client
            ended.set()
            await holding
            with pytest.raises(HttpProblem):
                await waiting
        else:
            with pytest.raises(HttpProblem):
                await lane.run(client, work)  # type: ignore[arg-type]

    asyncio.run(run())


def test_a_registration_waits_for_no_check_of_alerts(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, released = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> CheckReport:
        entered.set()
        assert released.wait(30)
        return CheckReport([])

    monkeypatch.setattr(alerts, "check_rules", slow)
    desk.register()

    async def both() -> None:
        transport = httpx.ASGITransport(desk.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            checking = asyncio.create_task(client.post("/v1/alerts/check", json=CHECK))
            await asyncio.to_thread(entered.wait, 30)
            made = await client.post("/v1/queries", json={**SPEC, "name": "other"})
            assert made.status_code == 201, made.text
            released.set()
            assert (await checking).status_code == 200

    asyncio.run(both())


def test_a_check_of_alerts_ends_with_its_client_and_its_time(desk: Desk) -> None:
    desk.connect("jfk")
    query = desk.register(lateness="99h")
    for hour in range(4):
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": hour})
    times = iter(range(0, 10_000, 10))

    def leave() -> None:
        raise HttpProblem("unavailable", "gone")

    with pytest.raises(HttpProblem):
        check_rules([], desk.catalog, desk.results, start_ms=None, now_ms=lambda: 1, timeout_ms=1, alive=leave)
    late = check_rules([], desk.catalog, desk.results, start_ms=None, now_ms=lambda: next(times), timeout_ms=15)
    assert not late.is_whole and late.answers == 0


def test_a_pattern_is_compiled_once_for_all_series_and_windows(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.connect("jfk")
    query = desk.register(lateness="99h")
    for hour in range(6):
        desk.report(query, "jfk", T0 + hour * HOUR, {f"C{hour}{n}": n for n in range(1, 20)})
    compiled: list[int] = []

    def match(values: pa.Array, pattern: str) -> Any:
        compiled.append(len(values))
        return pc.match_substring_regex(values, pattern)

    module = importlib.import_module("center.api.prometheus.evaluate")  # the package has a function of this name
    monkeypatch.setattr(module, "pc", type("Compute", (), {"match_substring_regex": staticmethod(match)}))
    asked = {"query": 'flights:n{carrier=~"C[0-4].*"}', "start": T0 / 1000, "end": T0 / 1000 + 6 * 3600, "step": "900"}
    found = desk.get("/prometheus/api/v1/query_range", params=asked).json()["data"]["result"]
    assert len(found) == 5 * 19
    assert len(compiled) == 2 and compiled[0] == 1, "once to check it, and once for all series"


@pytest.mark.parametrize(
    ("matcher", "selected"),
    [
        (("c", "=~", "a|b"), [True, True, False, False]),
        (("c", "!~", "a|b"), [False, False, True, True]),
        (("c", "=~", "a?"), [True, False, False, True]),
        (("c", "=", "ab"), [False, False, True, False]),
        (("c", "!=", "a"), [False, True, True, True]),
        (("missing", "=~", ""), [True] * 4),
    ],
)
def test_matchers_of_several_series_are_those_of_each(matcher: tuple[str, str, str], selected: list[bool]) -> None:
    series = [(("c", "a"),), (("c", "b"),), (("c", "ab"),), (("d", "x"),)]
    assert Matchers((matcher,)).selects(series) == selected
    assert [Matchers((matcher,)).selects([each])[0] for each in series] == selected
    assert Matchers((matcher,)).selects([]) == []


def test_a_statement_has_a_limit_of_values() -> None:
    guard = SqlGuard(timeout_s=30)
    try:
        many = ", ".join(f"NULL AS c{n}" for n in range(1_200))
        with pytest.raises(InvalidQuery) as refused:
            guard.run(f"SELECT {many} FROM q", {"q": pa.table({"a": range(100_000)})})
        assert "values" in refused.value.accepted
    finally:
        guard.close()


@pytest.mark.parametrize("form", [JSON, CSV])
def test_the_text_of_a_result_is_limited_in_size_and_time_and_ends_with_its_client(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"a": ["\x01" * 50] * 1_000, "b": range(1_000)})
    monkeypatch.setattr(sql, "RENDERED_AT_ONCE", 100)
    whole = sql._rendered(table, form, lambda: None)
    for name, value in (("MAX_RENDERED_BYTES", 1_000), ("RENDER_S", -1.0)):
        with monkeypatch.context() as patch:
            patch.setattr(sql, name, value)
            with pytest.raises(InvalidQuery):
                sql._rendered(table, form, lambda: None)

    def leave() -> None:
        raise HttpProblem("unavailable", "gone")

    with pytest.raises(HttpProblem):
        sql._rendered(table, form, leave)
    monkeypatch.setattr(sql, "RENDERED_AT_ONCE", 1 << 30)
    assert sql._rendered(table, form, lambda: None) == whole, "in parts as at once"
    for length in (0, 1):
        sql._rendered(table.slice(0, length), form, lambda: None)


def test_a_result_without_rows_is_whole_in_each_form() -> None:
    table = pa.table({"a": pa.array([], pa.string())})
    assert json.loads(sql._rendered(table, JSON, lambda: None)) == {
        "columns": [{"name": "a", "type": "string"}], "rows": [],
    }  # fmt: skip
    assert sql._rendered(table, CSV, lambda: None).splitlines() == [b'"a"']
    assert pa.ipc.open_stream(sql._rendered(table, ARROW, lambda: None)).read_all().num_rows == 0
