"""Requests that may cost much: they take no thread of a registration, are limited, and end with their client."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from decimal import Decimal
from itertools import pairwise
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from center.api.lanes import CostlyLane
from center.api.prometheus.series import ALL, Matchers, SeriesReader, samples_cache
from center.api.routers import alerts, evaluate, rollup
from center.api.sql_guard import SqlGuard
from center.serving.answer_tables import answer_schema, stated_answer
from center.serving.synopsis_cache import SynopsisCache
from center.sinks import read_definition
from center.sinks.alert_check import RuleCheck, check_rules
from center.sinks.alerts import AlertsConfig
from edgewater.answers import work
from edgewater.answers.work import Work, WorkLimits, spend
from edgewater.base.errors import ClientGone, InvalidQuery, Overspent
from edgewater.model.table_texts import ARROW, CSV, JSON, TooLong, rendered
from tests.center.api.conftest import HOUR, SPEC, T0, Desk

RULE = {"alert": "a", "query": "flights", "certainly": "n > 3"}
CHECK = {"kind": "alerts", "rules": [RULE], "targets": {"t": {"webhook": {"url": {"env": "HOOK"}}}}}


@pytest.fixture
def desk(tmp_path: Any) -> Desk:
    return Desk(tmp_path)


class Client:
    """A request whose client leaves when `gone` is set. `is_missed`: somebody has looked since then."""

    def __init__(self) -> None:
        self.gone, self.is_missed = threading.Event(), False

    async def is_disconnected(self) -> bool:
        self.is_missed = self.gone.is_set()
        return self.is_missed


@pytest.mark.parametrize("waits", [False, True], ids=["works", "waits for a thread"])
def test_work_ends_when_its_client_has_gone(waits: bool) -> None:
    client, lane = Client(), CostlyLane(1)
    ended = threading.Event()

    def work() -> None:
        client.gone.set()
        while True:
            spend()

    async def run() -> None:
        if waits:
            holding = asyncio.create_task(lane.run(Client(), lambda: ended.wait(30)))  # type: ignore[arg-type]
            waiting = asyncio.create_task(lane.run(client, lambda: pytest.fail("nobody waits")))  # type: ignore[arg-type]
            client.gone.set()
            while not (client.is_missed and lane.limiter.statistics().tasks_waiting):
                await asyncio.sleep(0)
            ended.set()
            await holding
            with pytest.raises(ClientGone):
                await waiting
        else:
            with pytest.raises(ClientGone):
                await lane.run(client, work)  # type: ignore[arg-type]

    asyncio.run(run())


def test_a_registration_waits_for_no_check_of_alerts(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, released = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> RuleCheck:
        entered.set()
        assert released.wait(30)
        return {"rules": [], "answers": 0, "is_whole": True}

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


GONE = CostlyLane(1).work(lambda: True)


def limited(**limits: Any) -> Work:
    return CostlyLane(1).work(lambda: False, WorkLimits(**limits))


def test_a_check_of_alerts_ends_with_its_client_and_its_budget(desk: Desk) -> None:
    query = desk.register_over("jfk", lateness="99h")
    for hour in range(4):
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": hour + 1})
    options = read_definition("check", CHECK, reads_secrets=False, field="").options
    assert isinstance(options, AlertsConfig)
    rules = [section.rule() for section in options.rules]

    def checked() -> RuleCheck:
        return check_rules(rules, desk.catalog, desk.results, start_ms=None, now_ms=lambda: 1)

    with pytest.raises(ClientGone), GONE.running():
        checked()
    whole = checked()
    with limited(cells=10).running():
        some = checked()
    assert whole["is_whole"] and whole["answers"] == 4
    assert not some["is_whole"] and 0 < some["answers"] < 4


def test_costly_requests_work_in_turns_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "TURN_S", 0.0)
    lane, order = CostlyLane(2), list[int]()

    def steps(number: int) -> None:
        with lane.work(lambda: False).running():
            while set(order[:-6]) != {0, 1}:
                order.append(number)
                spend()

    threads = [threading.Thread(target=steps, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    both = order[max(order.index(0), order.index(1)) :]
    assert all(one != other for one, other in pairwise(both))


def test_a_turn_that_ends_under_a_lock_of_evaluations_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "TURN_S", 0.0)
    lane, cache, order = CostlyLane(2), SynopsisCache(1 << 20), list[int]()

    def evaluates(number: int) -> None:
        with lane.work(lambda: False).running():
            while set(order[:-6]) != {0, 1}:
                with cache.exclusively():
                    order.append(number)
                    spend()

    threads = [threading.Thread(target=evaluates, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "roll-up": ("GET", "/v1/queries/flights/rollup?every=day", {}),
    "explain": ("GET", f"/v1/queries/flights/windows/{T0}/explain", {}),
    "select": ("POST", "/v1/sql", {"json": {"sql": "SELECT * FROM flights"}}),
    "promql": ("GET", "/prometheus/api/v1/query", {"params": {"query": "flights:n", "time": T0 / 1000 + 3600}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"cells": 5}, {"nbytes": 9}, {"cpu_s": 0.0}], ids=lambda v: next(iter(v)))
@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_of_more_work_than_its_budget_is_422_and_says_what_is_less(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, name: str, limits: dict[str, Any]
) -> None:
    query = desk.register_over("jfk", lateness="99h")
    desk.report(query, "jfk", T0, {f"C{n}": 1 for n in range(10)})
    method, path, request = REQUESTS[name]
    app, most = desk.app(), WorkLimits(**limits)
    assert desk.ask(method, path, app=app, **request).status_code == 200
    monkeypatch.setattr(app.state.services.costly, "limits", most)
    monkeypatch.setattr(rollup, "LIMITS", most)
    app.state.services.samples._cache.clear()
    refused = desk.ask(method, path, app=app, **request)
    assert refused.status_code == 422, refused.text
    body = refused.json()
    assert "ask for fewer windows" in body.get("detail", body.get("error"))
    assert body.get("type", "").endswith("/too-much-work") or body.get("errorType") == "execution"
    app.state.services.sql.close()


def test_questions_beyond_the_budget_of_a_request_say_so_and_the_others_are_answered(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = desk.register_over("jfk", lateness="99h")
    desk.report(query, "jfk", T0, {f"C{n}": 1 for n in range(10)})
    monkeypatch.setattr(evaluate, "LIMITS", WorkLimits(cells=15))
    one = {"latest": 1, "measure": "n", "group": {"carrier": "C1"}}
    answers = desk.ask("POST", "/v1/queries/flights/evaluate", json=[one, {"latest": 1, "measure": "n"}, one]).json()
    problems = [line.get("error", {}).get("type", "").rpartition("/")[2] for line in answers]
    assert problems == ["", "too-much-work", "too-much-work"]


def test_the_end_of_work_is_no_failure_of_an_answer(desk: Desk) -> None:
    """Code that shows an answer as unreadable after an error must not show it so when the budget is spent."""
    query = desk.register_over("jfk", lateness="99h")
    desk.report(query, "jfk", T0, {f"C{n}": 1 for n in range(10)})
    (record,) = desk.results.at(query.ref, T0)
    schema = answer_schema(desk.catalog, query.spec)
    with pytest.raises(Overspent), limited(cells=15).running():
        stated_answer(record, query.spec, schema)
    assert stated_answer(record, query.spec, schema)[1].stated.contract.met
    with pytest.raises(Overspent), limited(cells=15).running():
        SeriesReader(desk.results, (query,), samples_cache()).series(query, record, ALL)


@pytest.mark.slow
def test_a_statement_ends_with_its_client() -> None:
    guard = SqlGuard(timeout_s=60)
    looks = iter([False] * 2)
    try:
        leaves = CostlyLane(1).work(lambda: next(looks, True))
        with pytest.raises(ClientGone), leaves.running():
            guard.run("SELECT count(*) FROM q a, q b, q c", {"q": pa.table({"a": range(100_000)})}, JSON)
    finally:
        guard.close()


def test_a_pattern_is_compiled_once_for_all_series_and_windows(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    query = desk.register_over("jfk", lateness="99h")
    for hour in range(6):
        desk.report(query, "jfk", T0 + hour * HOUR, {f"C{hour}{n}": n for n in range(1, 20)})
    compiled: list[int] = []

    def match(values: pa.Array, pattern: str) -> Any:
        compiled.append(len(values))
        return pc.match_substring_regex(values, pattern)

    compute = type("Compute", (), {"match_substring_regex": staticmethod(match)})
    monkeypatch.setattr("center.api.prometheus.series.pc", compute)
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


@pytest.mark.nightly
def test_a_statement_has_a_limit_of_values() -> None:
    guard = SqlGuard(timeout_s=30)
    try:
        many = ", ".join(f"NULL AS c{n}" for n in range(1_200))
        with pytest.raises(InvalidQuery) as refused:
            guard.run(f"SELECT {many} FROM q", {"q": pa.table({"a": range(100_000)})}, JSON)
        assert "values" in refused.value.accepted
    finally:
        guard.close()


@pytest.mark.nightly
def test_the_text_of_a_result_is_limited() -> None:
    table = pa.table({"a": ["\x01" * 50] * 1_000, "b": range(1_000)})
    for form in (JSON, CSV):
        whole = rendered(table, form)
        assert rendered(table, form, len(whole)) == whole
        with pytest.raises(TooLong):
            rendered(table, form, 1_000)
    guard = SqlGuard(timeout_s=30)
    try:
        with pytest.raises(InvalidQuery) as refused:
            guard.run("SELECT repeat(chr(1), 200) AS t FROM q", {"q": pa.table({"a": range(90_000)})}, JSON)
        assert "text" in refused.value.accepted
        text, small = "SELECT sum(b) AS a, 1.5 AS b FROM q", {"q": table.select(["b"])}
        (row,) = json.loads(guard.run(text, small, JSON))["rows"]
        assert row == [499_500, 1.5]
    finally:
        guard.close()


def test_values_of_each_type_are_json() -> None:
    values: dict[str, tuple[list[Any], pa.DataType, list[Any]]] = {
        "int": ([1, None, -(1 << 63)], pa.int64(), [1, None, -(1 << 63)]),
        "float": ([5.0, None, 1e-300], pa.float64(), [5.0, None, 1e-300]),
        "odd": ([math.nan, math.inf, -0.0], pa.float64(), ["NaN", "Infinity", -0.0]),
        "bool": ([True, None, False], pa.bool_(), [True, None, False]),
        "text": (['"', None, "a"], pa.string(), ['"', None, "a"]),
        "time": ([0, None, 1], pa.timestamp("ms"), ["1970-01-01T00:00:00Z", None, "1970-01-01T00:00:00.001Z"]),
        "decimal": ([Decimal(1 << 70), None, Decimal("0")], pa.decimal128(38, 0), [1 << 70, None, 0]),
        "list": ([[1.5, math.nan], None, []], pa.list_(pa.float64()), [[1.5, "NaN"], None, []]),
    }
    table = pa.table({name: pa.array(given, kind) for name, (given, kind, _) in values.items()})
    assert json.loads(rendered(table, JSON))["rows"] == [
        list(row) for row in zip(*(v[2] for v in values.values()), strict=True)
    ]


def test_a_result_without_rows_is_whole_in_each_form() -> None:
    table = pa.table({"a": pa.array([], pa.string())})
    assert json.loads(rendered(table, JSON)) == {
        "columns": [{"name": "a", "type": "string"}], "rows": [],
    }  # fmt: skip
    assert rendered(table, CSV).splitlines() == [b'"a"']
    assert pa.ipc.open_stream(rendered(table, ARROW)).read_all().num_rows == 0
