"""Groups whose keys look alike stay apart on every face, and integers beyond float64 have true bounds there."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.csv
import pytest
from click.testing import CliRunner

from center.sinks.alert_rules import AlertBook, AlertRule, Condition
from center.sinks.runner import read_query, sink_answer
from edgewater.client import Center
from edgewater.client.answers import from_json, to_pandas
from edgewater.client.commands import query
from edgewater.client.display import answer_html
from edgewater.model.key_texts import OWN_COLUMNS, key_text, own_names
from tests.center.api import conftest
from tests.center.api.conftest import HOUR, T0, Desk

CARRIERS: tuple[str | None, ...] = (None, "null", "", '"null"', "NaN", "None", "x")
BIG, FAR = (1 << 53) + 1, (1 << 63) - 1


def select(desk: Desk, text: str) -> httpx.Response:
    return desk.ask("POST", "/v1/sql", content=text.encode(), headers={"Content-Type": "application/sql"})


def alike(desk: Desk) -> None:
    desk.connect("jfk")
    query = desk.register(measures={"n": "count()"})
    desk.report(query, "jfk", T0, {carrier: at + 1 for at, carrier in enumerate(CARRIERS)})


def test_a_parameter_selects_one_group_of_those_that_look_alike(desk: Desk) -> None:
    alike(desk)
    for at, carrier in enumerate(CARRIERS):
        params = {"group": f"carrier:{key_text(carrier)}"}
        (row,) = desk.get("/v1/queries/flights/latest", params=params).json()["data"]
        assert (row["group"]["carrier"], row["n"]["estimate"]) == (carrier, at + 1)


def test_a_column_may_have_a_colon(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.center.api import conftest

    monkeypatch.setattr(conftest, "COLUMNS", {**conftest.COLUMNS, "a:b": pa.string()})
    desk.connect("jfk")
    query = desk.register(group_by=["a:b"], measures={"n": "count()"})
    desk.ship(query, "jfk", T0, {"a:b": pa.array(["x:y", "z"])})
    (row,) = desk.get("/v1/queries/flights/latest", params={"group": "a:b:x:y"}).json()["data"]
    assert row["group"] == {"a:b": "x:y"}


def test_series_alerts_and_notebooks_tell_them_apart(desk: Desk) -> None:
    alike(desk)
    params = {"query": "flights:n", "time": str((T0 + HOUR) // 1000)}
    result = desk.get("/prometheus/api/v1/query", params=params).json()["data"]["result"]
    texts = {key_text(carrier) for carrier in CARRIERS}
    assert {r["metric"]["carrier"] for r in result} == texts and len(result) == len(CARRIERS)
    (registered,) = desk.catalog.queries.all()
    read = read_query(registered, desk.catalog)
    record = desk.results.latest(registered.ref)
    assert record is not None
    answer = sink_answer(record, read)
    book = AlertBook([AlertRule("any", "flights", Condition("n > 0", "certainly", {}))])
    fired = book.answer(answer, registered.spec.measures, desk.now)
    assert {dict(t.alert.labels)["carrier"] for t in fired} == texts and len(fired) == len(CARRIERS)
    assert book.answer(answer, registered.spec.measures, desk.now) == [], "each alert finds its row again"
    live = desk.get("/v1/queries/flights/latest").json()
    html = answer_html(from_json(live, {"group_by": ["carrier"], "measures": {"n": ""}}, None))
    assert "<td>null</td>" in html and "<td>None</td>" in html and "<td>&quot;null&quot;</td>" in html


def test_keys_that_are_not_finite_are_no_null(desk: Desk) -> None:
    desk.connect("jfk")
    query = desk.register(group_by=["dep_delay"], measures={"n": "count()"})
    keys = pa.array([None, float("nan"), float("inf"), 1.0])
    desk.ship(query, "jfk", T0, {"dep_delay": keys})
    for text in ("null", "NaN", "Infinity", "1.0"):
        (row,) = desk.get("/v1/queries/flights/latest", params={"group": f"dep_delay:{text}"}).json()["data"]
        assert key_text(row["group"]["dep_delay"]) == text
    params = {"query": "flights:n", "time": str((T0 + HOUR) // 1000)}
    result = desk.get("/prometheus/api/v1/query", params=params).json()["data"]["result"]
    assert {r["metric"]["dep_delay"] for r in result} == {"null", "NaN", "Infinity", "1.0"}
    rows = select(desk, "SELECT dep_delay FROM flights").json()["rows"]
    assert sorted(map(str, (r[0] for r in rows))) == ["1.0", "Infinity", "NaN", "None"]


@pytest.mark.slow
def test_the_client_and_the_commands_tell_them_apart(desk: Desk) -> None:
    alike(desk)
    with desk.served() as url, Center(url) as center:
        for at, carrier in enumerate(CARRIERS):
            answer = center.query("flights").latest(group={"carrier": carrier})
            assert answer.groups == [{"carrier": carrier}] and answer["n"].interval.estimate == at + 1
        run = CliRunner(env={"EDGEWATER_URL": url})
        (line,) = run.invoke(query, ["windows", "flights", "--json"]).stdout.splitlines()
        assert [row["carrier"] for row in json.loads(line)["rows"]].count("NaN") == 1
        assert {row["carrier"]: row["n"] for row in json.loads(line)["rows"]} == {
            c: at + 1 for at, c in enumerate(CARRIERS)
        }
        (line,) = run.invoke(query, ["windows", "flights", "--json", "--group", "carrier:null"]).stdout.splitlines()
        assert [row["carrier"] for row in json.loads(line)["rows"]] == [None]
        said = run.invoke(query, ["windows", "flights"]).stdout.split()
        assert {key_text(carrier) for carrier in CARRIERS} <= set(said)


def boundless(desk: Desk) -> tuple[Any, dict[int, int]]:
    """Windows with an integer above 2^53, a sum beyond int64, and a small sum."""
    desk.connect("jfk")
    query = desk.register(group_by=[], measures={"miles": "sum(distance)"})
    shipped: list[list[int]] = [[BIG], [FAR, FAR], [7]]
    for hour, values in enumerate(shipped):
        desk.ship(query, "jfk", T0 + hour * HOUR, {"distance": pa.array(values, pa.int64())})
    return query, {T0 + hour * HOUR: sum(values) for hour, values in enumerate(shipped)}


def test_integers_beyond_int64_are_exact_in_json_and_null_with_a_code_in_tables(desk: Desk) -> None:
    _, sums = boundless(desk)
    names = ("miles", "miles_lower", "miles_upper")
    path = "/v1/queries/flights/windows"
    for answer in desk.get(path).json()["answers"]:
        exact = sums[T0 + HOUR * int(answer["window"]["start"][11:13])]
        for cell in (row["miles"] for row in answer["data"]):
            assert cell["estimate"] == exact and cell["lower"] == cell["upper"] == exact
    table = pa.ipc.open_stream(
        desk.get(path, headers={"Accept": "application/vnd.apache.arrow.stream"}).content
    ).read_all()
    fits = [value if value <= FAR else None for value in sums.values()]
    codes = ["met" if value is not None else "beyond-int64" for value in fits]
    for name in names:
        assert table.column(name).type == pa.int64() and table.column(name).to_pylist() == fits
    assert table.column("contract").to_pylist() == codes
    for start in sums:  # the type does not depend on the values of a page
        page = desk.get(path, params={"start": start, "limit": 1, "format": "arrow"}).content
        assert pa.ipc.open_stream(page).read_all().schema.remove_metadata() == table.schema.remove_metadata()
    text = desk.get(path, headers={"Accept": "text/csv"}).content
    types = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True)
    columns = pa.csv.read_csv(io.BytesIO(text), convert_options=types)
    for name in names:
        assert columns.column(name).to_pylist() == [None if v is None else str(v) for v in fits]
    selected = select(desk, "SELECT miles, miles_lower, miles_upper, contract FROM flights")
    found = {tuple(row) for row in selected.json()["rows"]}
    assert found == {(v, v, v, code) for v, code in zip(fits, codes, strict=True)}
    rolled = desk.get("/v1/queries/flights/rollup", params={"every": "3h"}).json()["answers"][0]
    whole = sum(sums.values())
    assert rolled["data"][0]["miles"]["estimate"] == whole
    assert rolled["data"][0]["miles"]["lower"] == rolled["data"][0]["miles"]["upper"] == whole
    assert json.dumps(whole) in json.dumps(rolled["total"])


def test_columns_of_the_answer_have_one_name_on_every_face(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ("Phase", "version", "day", "window_start")
    monkeypatch.setattr(conftest, "COLUMNS", {**conftest.COLUMNS, **dict.fromkeys(taken, pa.string())})
    desk.connect("jfk")
    query = desk.register(group_by=list(taken), measures={"revision": "count()"})
    desk.ship(query, "jfk", T0, {name: pa.array([f"{name} key"]) for name in taken})
    names = own_names([*taken, "revision"])
    wanted = [*(names[name] for name in OWN_COLUMNS), "answer_version", *taken, "revision"]
    assert {"answer_phase", "answer_window_start", "answer_revision", "window_end"} <= set(wanted)
    path = "/v1/queries/flights/windows"
    arrow = pa.ipc.open_stream(desk.get(path, params={"format": "arrow"}).content).read_all()
    csv = pa.csv.read_csv(io.BytesIO(desk.get(path, params={"format": "csv"}).content))
    selected = [column["name"] for column in select(desk, "SELECT * FROM flights").json()["columns"]]
    for found in (arrow.column_names, csv.column_names, selected):
        assert found[: len(wanted)] == wanted
    assert arrow["Phase"].to_pylist() == ["Phase key"] and arrow["answer_phase"].to_pylist() == ["complete"]


def test_bounds_in_pandas_and_in_live_answers_leave_to_the_outside() -> None:
    lower, upper = pa.array([BIG, None]), pa.array([BIG, None])
    frame = to_pandas(pa.table({"n": lower, "n_lower": lower, "n_upper": upper}))
    assert int(frame["n_lower"][0]) <= BIG <= int(frame["n_upper"][0])
    keys = to_pandas(pa.table({"k": pa.array([BIG, BIG - 1, None]), "n": pa.array([1, 2, 4])}))
    assert keys.groupby("k", dropna=False)["n"].sum().tolist() == [2, 1, 4], "no groups become one"
    assert int(frame["n"][0]) == int(frame["n_lower"][0]) == int(frame["n_upper"][0]) == BIG
    cells = [{"estimate": BIG, "lower": BIG, "upper": BIG}, {"estimate": 0.5, "lower": 0.25, "upper": 0.75}]
    live = {"data": [{"group": {"k": str(at)}, "n": cell} for at, cell in enumerate(cells)]}
    answer = from_json(live, {"group_by": ["k"], "measures": {"n": ""}}, None)
    assert int(answer.table["n_lower"][0].as_py()) <= BIG <= int(answer.table["n_upper"][0].as_py())


def test_values_that_are_computed_from_large_integers_have_true_bounds(desk: Desk) -> None:
    desk.connect("jfk")
    query = desk.register(group_by=[], measures={"a": "max(distance)", "b": "min(distance)"})
    desk.ship(query, "jfk", T0, {"distance": pa.array([BIG, BIG - 1])})
    (answer,) = desk.get("/v1/queries/flights/windows", params={"compute": "c: a - b"}).json()["answers"]
    cell = answer["data"][0]["c"]
    assert cell["lower"] <= 1 <= cell["upper"]
    few = desk.get("/v1/queries/flights/windows", params={"compute": "c: a - a"}).json()["answers"]
    assert few[0]["data"][0]["c"]["estimate"] == 0


@pytest.mark.parametrize(
    "measure",
    [
        *("quantile(distance, 0.5)", "quantiles(distance)", "kll(distance)", "reservoir(distance, 3)"),
        *("equi_depth(distance, 4)", "min(distance)"),
    ],
)
def test_synopses_of_large_integers_have_true_bounds(desk: Desk, measure: str) -> None:
    desk.connect("jfk")
    query = desk.register(group_by=[], measures={"x": measure})
    desk.ship(query, "jfk", T0, {"distance": pa.array([BIG, BIG, BIG])})
    for path in ("latest", "rollup?every=1h"):
        reply = desk.get(f"/v1/queries/flights/{path}").json()
        cell = reply.get("answers", [reply])[0]["data"][0]["x"]
        found = list(intervals_in(cell, BIG))
        assert found and all(int(low) <= BIG <= math.ceil(high) for low, high in found), cell


def intervals_in(cell: Any, near: int) -> Iterator[tuple[float, float]]:
    """Yields the intervals of a cell about a value, which is not a sum of it or a count."""
    if isinstance(cell, list):
        cell = dict(enumerate(cell))
    if isinstance(cell, dict) and "lower" in cell:
        if abs(cell["estimate"] - near) < near / 2:
            yield cell["lower"], cell["upper"]
    elif isinstance(cell, dict):
        for member in cell.values():
            yield from intervals_in(member, near)
