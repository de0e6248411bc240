"""The Prometheus face: the same answers as Prometheus itself gives on the same samples, and what Grafana asks."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import httpx
import pyarrow as pa
import pytest

from center.api.prometheus import series
from edgewater.answers.work import WorkLimits
from sim.demo.ports import free_address
from tests.center.api.conftest import HOUR, T0, Desk
from tests.center.api.test_api_sessions import ship, two_sessions
from tests.programs import running

__all__ = ["two_sessions"]

API = "/prometheus/api/v1"
WITHIN_S = 60
S0 = T0 // 1000
HOURS = (0, 1, 2, 5, 8)
"""Windows with records. The one without `lga` is beyond the lookback of the one before: a bound that has become unknown
is no sample here, where Prometheus, that has no sample of it, still shows the old one. Windows between them are empty,
so a value ends where the next window ends: the lookback of Prometheus is shorter than an hour."""


def fill(desk: Desk) -> Desk:
    """Windows of an hour of two edges, the last one without `lga`; values of both signs, and a second query."""
    query = desk.register_over("jfk", "lga", budget={"staleness": "2s"})
    other = desk.register(
        name="trips", group_by=["carrier"], measures={"n": "count()", "spread": "quantiles(dep_delay)"}
    )
    for hour in HOURS:
        for edge in ("jfk", "lga")[: 1 if hour == 8 else 2]:
            desk.report(query, edge, T0 + hour * HOUR, {"UA": 2 + hour, "AA": 1, 'q"\\\n': 3})
            desk.report(other, edge, T0 + hour * HOUR, {"UA": 1 + hour, "AA": 4})
    for each in (query, other):
        desk.report(each, "lga", T0 + 7 * HOUR, {})  # so hour 6 is empty, too
    return desk


def open_metrics(desk: Desk) -> str:
    """The answers as OpenMetrics, from the API's JSON."""
    lines: dict[str, list[str]] = {}

    def add(name: str, labels: dict[str, str], at: str, value: Any) -> None:
        if value is not None:
            text = ",".join(f'{k}="{_escaped(v)}"' for k, v in labels.items())
            lines.setdefault(name, []).append(f"{name}{{{text}}} {float(value)!r} {at}")

    for query in ("flights", "trips"):
        for answer in desk.get(f"/v1/queries/{query}/windows").json()["answers"]:
            at = str(S0 + HOUR // 1000 * (1 + int(answer["window"]["start"][11:13])))
            for row in answer["data"]:
                for measure, cell in row.items():
                    each = {"": cell} if "estimate" in cell else cell.get("quantiles", {})
                    for rank, interval in each.items() if measure != "group" else ():
                        labels = {**row["group"], **({"quantile": rank} if rank else {})}
                        add(f"{query}:{measure}", labels, at, interval["estimate"])
                        add(f"{query}:{measure}_lower", labels, at, interval["lower"])
                        add(f"{query}:{measure}_upper", labels, at, interval["upper"])
            for measure, cell in answer["total"].items():
                if "." in measure:
                    continue  # totals of quantiles are no series
                add(f"{query}:all:{measure}", {}, at, cell["estimate"])
                add(f"{query}:all:{measure}_lower", {}, at, cell["lower"])
                add(f"{query}:all:{measure}_upper", {}, at, cell["upper"])
            add(f"{query}:completeness", {}, at, answer["quality"]["completeness"]["ratio"])
            add(f"{query}:staleness_seconds", {}, at, answer["quality"]["staleness_ms"] / 1000)
            add(f"{query}:contract_met", {}, at, answer["contract"]["met"])
            add(f"{query}:exactly_once", {}, at, "delivery" not in answer["quality"]["completeness"])
            add(f"{query}:phase", {}, at, ("early", "complete", "final").index(answer["phase"]))
    families = [f"# TYPE {name} gauge\n" + "\n".join(samples) for name, samples in lines.items()]
    return "\n".join(families) + "\n# EOF\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/-/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory, prometheus: str, promtool: str) -> Iterator[tuple[Desk, str]]:
    """A center, and the address of a Prometheus with the same samples."""
    path = tmp_path_factory.mktemp("prometheus")
    desk = fill(Desk(path))
    (path / "samples.om").write_text(open_metrics(desk))
    (path / "prometheus.yml").write_text("global: {}\n")
    blocks = [promtool, "tsdb", "create-blocks-from", "openmetrics", "samples.om", "data"]
    subprocess.run(blocks, cwd=path, check=True, capture_output=True)
    address = free_address()
    arguments = [f"--web.listen-address={address}", "--storage.tsdb.path=data", "--storage.tsdb.retention.time=100y",
                 "--query.lookback-delta=3599999ms", "--log.level=error"]  # fmt: skip
    try:
        with running([prometheus, *arguments], cwd=path, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + WITHIN_S
            while not is_ready(address):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)  # until another program listens
            yield desk, f"http://{address}"
    finally:
        for store in (desk.catalog, desk.components, desk.results):
            store.close()


def instant(query: str, hours: float = 3.0) -> tuple[str, dict[str, Any]]:
    return "query", {"query": query, "time": S0 + hours * 3600}


def over(query: str, start: float = 0.0, end: float = 9.0, step: str = "900") -> tuple[str, dict[str, Any]]:
    return "query_range", {"query": query, "start": S0 + start * 3600, "end": S0 + end * 3600, "step": step}


DAY = {"start": S0, "end": S0 + 3 * 3600}
CASES = [
    instant("flights:n"),
    instant('flights:n_upper{carrier="UA"}', 7),
    instant('{__name__=~"flights:n.*",carrier!="UA"}'),
    instant('trips:spread{quantile=~"0.9|0.99",carrier!~"U.*"}'),
    instant("1 + 2 * 3 / 4 - .5"),
    instant("flights:n", 1),
    instant("flights:n", 4),  # exactly the lookback after the last window
    instant("flights:n", 4.001),
    over("flights:n"),
    over("flights:delay_upper - flights:delay_lower"),
    over("flights:miles / on(carrier) trips:n"),
    over("flights:n * ignoring(carrier) trips:n"),
    over('-flights:n{carrier="AA"} offset 1h', step="1h30m"),
    over("(flights:n - 1) / (flights:n - 1)"),  # NaN where n is 1
    over("flights:completeness * 100", 0.7, 8.9, "137.5"),
    over("2 / 0"),
    over("flights:phase + flights:contract_met"),
    over("flights:all:n_upper - flights:all:n"),
    over('{carrier=~"(UA|AA)?"} - 0', 2, 3),
    over("flights:nothing"),
    over("sum(flights:n)"),
    over("sum by (carrier) (flights:n)"),
    over("sum without (carrier) (trips:n)"),
    over("avg by (quantile) (trips:spread)"),
    over("max(flights:miles)"),
    over("min by (nothing) (flights:n)"),
    over('count({__name__=~"flights:.*"})'),
    over("topk(1, flights:n)"),
    over("bottomk(2, trips:spread)"),
    over("topk by (quantile) (1, trips:spread)"),
    over("flights:n > 1"),
    over("1 < flights:n"),
    over("flights:n >= bool 2"),
    over("flights:n == on(carrier) trips:n"),
    over("flights:n != bool on(carrier) trips:n"),
    over("1 > bool 2"),
    over("1 > 2"),
    over("sum((flights:n))"),
    instant('flights:n{carrier="q\\"\\\\\\n"}'),
    ("series", {"match[]": 'flights:n{carrier=~"A.|U."}', **DAY}),
    ("labels", {**DAY}),
    ("label/__name__/values", {**DAY}),
    ("label/carrier/values", {"match[]": "trips:n", **DAY}),
    ("label/nothing/values", {**DAY}),
    instant("flights:n +"),
    instant('{a=""}'),
    instant('flights:n{carrier=~"("}'),
    over("flights:n", 2, 1),
    over("flights:n", step="0"),
    ("query_range", {"query": "flights:n", "start": S0, "end": S0}),
    ("series", {}),
]  # fmt: skip


def told(path: str, body: dict[str, Any]) -> Any:
    """What an answer says, without the order of series and the text of errors."""
    data = body.get("data")
    if body["status"] == "error":
        return body["status"], body["errorType"]
    if isinstance(data, dict):
        return data["resultType"], sorted(data["result"], key=repr) if data["resultType"] != "scalar" else data[
            "result"
        ]
    return sorted(data, key=repr)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GET", pytest.param("POST", marks=pytest.mark.full)])
def test_answers_are_those_of_prometheus_on_the_same_samples(peers, method):
    desk, address = peers
    app, differing = desk.app(), []
    for path, params in CASES:
        if method == "POST" and path.startswith("label/"):
            continue
        given = {"params" if method == "GET" else "data": params}
        theirs = httpx.request(method, f"{address}/api/v1/{path}", **given)
        ours = desk.ask(method, f"{API}/{path}", app=app, **given)
        expected, found = told(path, theirs.json()), told(path, ours.json())
        if (theirs.status_code, expected) != (ours.status_code, found):
            differing.append((path, params, theirs.status_code, expected, ours.status_code, found))
    assert not differing, json.dumps(differing[:3], indent=1)[:4000]


@pytest.fixture
def filled(desk: Desk) -> Desk:
    return fill(desk)


@pytest.mark.slow
def test_an_aggregation_of_bounds_is_absent_where_one_group_has_none(desk):
    query = desk.register(name="exact", lateness="9h")
    desk.connect("jfk", "lga")
    desk.report_both(query, T0, {"UA": 4, "AA": 2})
    early = desk.register(name="early", lateness="9h", budget={"staleness": "1s"})
    desk.report(early, "jfk", T0, {"UA": 4, "AA": 2})
    desk.now += 10_000_000
    desk.results.tick(desk.ledger, [], desk.now)
    app = desk.app()

    def asked(text: str) -> list[str]:
        reply = desk.get(f"{API}/query", app=app, params={"query": text, "time": T0 / 1000 + 3600}).json()
        return [sample["value"][1] for sample in reply["data"]["result"]]

    assert asked("sum(exact:n)") == asked("sum(exact:n_lower)") == asked("sum(exact:n_upper)") == ["12"]
    assert asked("sum(early:n)") == asked("sum(early:n_lower)") == ["6"]
    assert asked("sum(early:n_upper)") == asked("max by (carrier) (early:n_upper)") == []


def test_a_sum_of_bounds_that_a_matcher_names_is_absent_where_a_group_has_none(desk):
    query = desk.register(name="q", measures={"m": "mean(dep_delay)", "n": "max(dep_delay)"})
    desk.connect("jfk")
    delays = {"carrier": pa.array(["a", "b"]), "dep_delay": pa.array([float("inf"), 2.0])}
    desk.ship(query, "jfk", T0, delays)
    params = {"time": T0 / 1000 + 3600}
    for text in ("q:m_upper", '{__name__="q:m_upper"}', '{__name__=~"q:(m|x)_upper"}'):
        each, found = (
            desk.get(f"{API}/query", params={**params, "query": asked}).json()["data"]["result"]
            for asked in (text, f"sum({text})")
        )
        assert len(each) == 1 and found == [], text


@pytest.mark.parametrize("joined", [">", "==", " and ", " OR ", " unless ", "and(1)and ", '+ # "\n', "> # {\n"])
def test_an_expression_has_few_operators_of_any_kind(desk: Desk, joined: str) -> None:
    began_s = time.process_time()
    reply = desk.get(f"{API}/query", params={"query": joined.join(["a{b!='<>'}"] * 110), "time": "1"})
    assert reply.status_code == 400 and "operators" in reply.json()["error"]
    fine = desk.get(f"{API}/query", params={"query": "a{" + "b!='+'," * 200 + "}>0 # < # >", "time": "1"})
    assert fine.status_code == 200 and time.process_time() - began_s < 2


@pytest.mark.slow
def test_what_is_about_time_is_refused_with_what_to_do_instead(filled):
    app = filled.app()
    for expression in ("rate(flights:n[5m])", "quantile_over_time(0.9, flights:n[1h])", "flights:n[5m]"):
        reply = filled.get(f"{API}/query", app=app, params={"query": expression})
        assert (reply.status_code, reply.json()["errorType"]) == (400, "bad_data")
        assert "a value is about its whole window already" in reply.json()["error"]
    for expression in ("abs(flights:n)", "histogram_quantile(0.9, flights:n)", "time()", "absent(flights:n)"):
        said = filled.get(f"{API}/query", app=app, params={"query": expression}).json()["error"]
        assert "whole window" not in said and "accepted are selectors" in said
    for expression in ("sum(flights:n + 1)", "stddev(flights:n)", "topk(0, flights:n)", "topk(flights:n, flights:n)",
                       "flights:n @ 100", "a / on(x) group_left b", '"text"',
                       "flights:n and trips:n", "(" * 60 + "1" + ")" * 60, "1" + "+1" * 200, "x" * 9000):  # fmt: skip
        reply = filled.get(f"{API}/query", app=app, params={"query": expression})
        assert (reply.status_code, reply.json()["status"]) == (400, "error"), expression


@pytest.mark.slow
def test_limits_are_422_and_say_what_to_do(filled, monkeypatch):
    app = filled.app()

    def refused(path: str, **params: Any) -> str:
        reply = filled.get(f"{API}/{path}", app=app, params=params)
        assert (reply.status_code, reply.json().get("errorType")) == (422, "execution"), reply.text
        return str(reply.json()["error"])

    assert "11000 points" in refused("query_range", query="flights:n", start=0, end=11_000, step=1)
    assert "unique on one side" in refused("query", query="flights:n / on() trips:n", time=S0 + 3600)
    assert "same labelset" in refused("query", query='{__name__=~"flights:n.*"} * 2', time=S0 + 3600)
    range_ = {"query": "flights:n", "start": S0, "end": S0 + 9 * 3600, "step": 900}
    with monkeypatch.context() as patched:
        patched.setattr("center.api.prometheus.series.MAX_SERIES", 2)
        assert "select groups" in refused("query_range", **range_)
    for limits in (WorkLimits(cells=5), WorkLimits(nbytes=9), WorkLimits(cpu_s=0)):
        with monkeypatch.context() as patched:
            patched.setattr(app.state.services.costly, "limits", limits)
            assert limits.less in refused("query_range", **range_)


@pytest.mark.slow
def test_only_queries_that_the_caller_may_read_exist(filled):
    principals = {"some": {"token": "right", "role": "reader", "queries": ["tr*"]}}
    app, auth = filled.app(principals=principals), {"headers": {"Authorization": "Bearer right"}}
    assert filled.get(f"{API}/query", app=app, params={"query": "trips:n"}).status_code == 401
    assert filled.get("/prometheus/", app=app).status_code == 200
    names = filled.get(f"{API}/label/__name__/values", app=app, **auth).json()["data"]
    assert {n.partition(":")[0] for n in names} == {"trips"}
    hidden = filled.get(f"{API}/query", app=app, params={"query": "flights:n", "time": S0 + 3600}, **auth)
    assert hidden.json() == {"status": "success", "data": {"resultType": "vector", "result": []}}
    assert set(filled.get(f"{API}/metadata", app=app, **auth).json()["data"]) == set(names)


def test_a_group_that_the_newest_window_lacks_and_an_unknown_bound_are_no_samples(desk):
    query = desk.register_over("jfk", "lga", budget={"staleness": "2s"})
    desk.report(query, "jfk", T0, {"UA": 3, "AA": 1})
    desk.report(query, "jfk", T0 + HOUR, {"UA": 2})
    at = {"time": S0 + 2 * 3600 + 60}
    upper = desk.get(f"{API}/query", params={"query": "flights:n_upper", **at}).json()["data"]["result"]
    assert upper == []
    found = desk.get(f"{API}/query", params={"query": "flights:n", **at}).json()["data"]["result"]
    assert [s["metric"] for s in found] == [{"__name__": "flights:n", "carrier": "UA"}]


def test_a_session_is_a_sample_at_its_end_and_one_that_was_merged_is_none(two_sessions):
    desk, query = two_sessions
    times = {"query": "flights:n", "start": S0, "end": S0 + 720, "step": 15}

    def ends() -> list[tuple[int, str]]:
        (series,) = desk.get(f"{API}/query_range", params=times).json()["data"]["result"]
        values = [(int(at) - S0, value) for at, value in series["values"]]
        return [v for v, before in zip(values, [(0, ""), *values], strict=False) if v[1] != before[1]]

    assert ends() == [(135, "2"), (195, "1")]  # the last two sessions have the same value
    ship(desk, query, 2, 100, before=[65])
    assert ends() == [(195, "4"), (660, "1")]


@pytest.mark.slow
def test_groups_keep_their_identity_as_labels(desk):
    query = desk.register_over("jfk", lateness="0s", measures={"completeness": "count()", "phase": "sum(distance)"})
    desk.report(query, "jfk", T0, {None: 1, "null": 2, "": 3, '"': 4})
    found = desk.get(f"{API}/query", params={"query": "flights:completeness", "time": S0 + 3600}).json()["data"][
        "result"
    ]
    assert {s["metric"]["carrier"]: s["value"][1] for s in found} == {
        "null": "1",
        '"null"': "2",
        '""': "3",
        '"\\""': "4",
    }
    for label, value in (("null", "1"), ('\\"null\\"', "2"), ('\\"\\"', "3")):
        one = desk.get(
            f"{API}/query", params={"query": f'flights:completeness{{carrier="{label}"}}', "time": S0 + 3600}
        )
        assert [s["value"][1] for s in one.json()["data"]["result"]] == [value]
    described = desk.get(f"{API}/query", params={"query": "flights:answer_phase", "time": S0 + 3600}).json()
    assert described["data"]["result"][0]["value"][1] in ("1", "2")


def test_a_refresh_evaluates_only_answers_that_are_new_or_have_changed(two_hours, monkeypatch):
    desk, query = two_hours
    app = desk.app()
    evaluated: list[int] = []
    answer_rows = series.answer_rows

    def counted(record: Any, *rest: Any, **more: Any) -> Any:
        evaluated.append(record.revision)
        return answer_rows(record, *rest, **more)

    monkeypatch.setattr(series, "answer_rows", counted)

    def asked(measure: str) -> Any:
        params = {"query": f"flights:{measure}", "start": S0, "end": S0 + 3 * 3600, "step": 300}
        return desk.get(f"{API}/query_range", app=app, params=params).json()["data"]["result"]

    first = asked("n")
    assert asked("n") == first and len(evaluated) == 2
    assert asked("miles") != first and len(evaluated) == 4
    desk.report_both(query, T0 + 2 * HOUR, {"UA": 1})
    assert len(asked("n")) == len(first)
    assert len(evaluated) == 6  # the new window, and the one before, which has become final


def test_data_that_cannot_be_evaluated_are_a_warning(desk, two_hours, monkeypatch):

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("center.api.prometheus.series.answer_rows", fail)
    body = desk.get(f"{API}/query", params={"query": "flights:n", "time": S0 + 7200}).json()
    assert (body["status"], body["data"]["result"]) == ("success", [])
    assert "cannot be evaluated (ZeroDivisionError)" in body["warnings"][0]


RANGE = {"start": str(S0), "end": str(S0 + 7200)}
GRAFANA = [
    ("GET", "status/buildinfo", {}),
    ("POST", "query", {"query": "1+1", "time": "4"}),  # the health check of the data source
    ("GET", "query", {"query": "1+1", "time": "4"}),
    ("GET", "rules", {}),
    ("POST", "query_exemplars", {"query": "test", **RANGE}),  # does it have exemplars?
    ("GET", "metadata", {"limit": "40000"}),
    ("GET", "label/__name__/values", {"limit": "40000", **RANGE}),
    ("GET", "label/__name__/values", {"match[]": '{__name__=~".*fli.*"}', "limit": "1000", **RANGE}),
    ("GET", "labels", {"match[]": "flights:n", "limit": "40000", **RANGE}),
    ("POST", "labels", {"limit": "40000", **RANGE}),
    ("POST", "series", {"match[]": '{__name__!=""}', "limit": "40000", **RANGE}),
    ("POST", "series", {"match[]": '{carrier!=""}', "limit": "40000", **RANGE}),
    ("GET", "label/carrier/values", {"match[]": "flights:n", "limit": "40000", **RANGE}),
    ("POST", "query_range", {"query": "flights:n", **RANGE, "step": "15", "timeout": "60s"}),
    ("POST", "query", {"query": "flights:n", "time": f"{S0 + 7200}.001", "timeout": "60s"}),
]


@pytest.mark.slow
def test_what_grafana_asks_is_answered(filled):
    app = filled.app()
    for method, path, params in GRAFANA:
        reply = filled.ask(method, f"{API}/{path}", app=app, **{"params" if method == "GET" else "data": params})
        assert (reply.status_code, reply.json()["status"]) == (200, "success"), (path, reply.text)
        assert reply.json()["data"] or path in ("query_exemplars",), path
    assert filled.get(f"{API}/status/buildinfo", app=app).json()["data"]["version"] == "2.42.0"
    for wrong in ("start=soon&end=1", "start=2&end=1", "match[]=1%2B1", "start=nan", "match[]=%7B%7D"):
        assert filled.get(f"{API}/series?match[]=x&{wrong}", app=app).status_code == 400
    body = filled.ask("POST", f"{API}/query", app=app, json={"query": "1"})
    assert (body.status_code, "form" in body.json()["error"]) == (400, True)


def test_sums_and_means_of_bounds_are_bounds_beyond_the_integers_of_a_float(desk: Desk) -> None:
    query = desk.register_over("jfk", measures={"s": "sum(distance)"})
    distances = {"a": (1 << 53) + 1, "b": (1 << 53) + 1, "c": 3, "d": -5}
    columns = {"carrier": pa.array(list(distances)), "distance": pa.array(list(distances.values()))}
    desk.ship(query, "jfk", T0, columns)
    app, exact = desk.app(), sum(distances.values())

    def asked(text: str) -> Fraction:
        params = {"query": text, "time": T0 / 1000 + 3600}
        (sample,) = desk.get(f"{API}/query", app=app, params=params).json()["data"]["result"]
        return Fraction(float(sample["value"][1]))

    assert asked("sum(flights:s_lower)") <= exact <= asked("sum(flights:s_upper)")
    assert asked("avg(flights:s_lower)") <= Fraction(exact, 4) <= asked("avg(flights:s_upper)")
    for sign in ("=", "=~"):
        lower, upper = (f'{{__name__{sign}"flights:s_{side}"}}' for side in ("lower", "upper"))
        assert asked(f"sum({lower})") == asked("sum(flights:s_lower)")
        assert asked(f"avg({upper})") == asked("avg(flights:s_upper)")
    few = 'flights:s_%s{carrier=~"c|d"}'
    assert asked(f"sum({few % 'lower'})") == asked(f"sum({few % 'upper'})") == -2, "small integers are exact"
