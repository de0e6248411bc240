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

from center.sinks import lake
from center.sinks.runner import read_query, sink_answer
from edgewater.client import Center
from edgewater.client.answers import from_json, to_pandas
from edgewater.client.commands import query
from edgewater.model.key_texts import key_text
from edgewater.model.own_columns import OWN_COLUMNS, own_names
from tests.center.api import conftest
from tests.center.api.conftest import HOUR, T0, Desk

CARRIERS: tuple[str | None, ...] = (None, "null", "", '"null"', "NaN", "None", "x")
BIG = (1 << 53) + 1


def select(desk: Desk, text: str) -> httpx.Response:
    return desk.ask("POST", "/v1/sql", content=text.encode(), headers={"Content-Type": "application/sql"})


def alike(desk: Desk) -> None:
    query = desk.register_over("jfk", measures={"n": "count()"})
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
    query = desk.register_over("jfk", group_by=["a:b"], measures={"n": "count()"})
    desk.ship(query, "jfk", T0, {"a:b": pa.array(["x:y", "z"])})
    (row,) = desk.get("/v1/queries/flights/latest", params={"group": "a:b:x:y"}).json()["data"]
    assert row["group"] == {"a:b": "x:y"}


def test_keys_that_are_not_finite_are_no_null(desk: Desk) -> None:
    query = desk.register_over("jfk", group_by=["dep_delay"], measures={"n": "count()"})
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


def test_columns_of_the_answer_have_one_name_on_every_face(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ("Phase", "version", "day", "window_start")
    monkeypatch.setattr(conftest, "COLUMNS", {**conftest.COLUMNS, **dict.fromkeys(taken, pa.string())})
    query = desk.register_over("jfk", group_by=list(taken), measures={"revision": "count()"})
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


def test_columns_of_tables_depend_on_no_value(desk: Desk) -> None:
    measures = {"q": "quantiles(dep_delay)", "kll": "kll(dep_delay)", "t": "top_k(distance, 3)", "m": "max(dep_delay)"}
    measures |= {"cut": "equi_depth(dep_delay, 4)", "each": "m / n", "n": "count()"}
    query = desk.register_over("jfk", measures=measures)
    delays = ([1.0, 2.0], [None, None], [math.nan, math.inf])
    for hour, values in enumerate(delays):
        rows = {"dep_delay": pa.array(values, pa.float64()), "distance": pa.nulls(2, pa.int64())}
        desk.ship(query, "jfk", T0 + hour * HOUR, {**rows, "carrier": pa.array(["UA", None][: len(values)])})
    path = "/v1/queries/flights/windows"
    pages = [
        pa.ipc.open_stream(
            desk.get(path, params={"start": T0 + hour * HOUR, "limit": 1, "format": "arrow"}).content
        ).read_all()
        for hour in range(4)
    ]
    assert [page.num_rows for page in pages] == [2, 2, 2, 0]
    assert len({page.schema.remove_metadata() for page in pages}) == 1
    assert [sum(page["kll.nan"].to_pylist()) for page in pages] == [0, 0, 1, 0]
    cells = [answer["data"][0]["q"] for answer in desk.get(path).json()["answers"]]
    assert ["nan" in cell for cell in cells] == [False, False, True], "JSON has it where there are any"
    (record,) = desk.results.at(query.ref, T0 + 2 * HOUR)
    read = read_query(query, desk.catalog)
    assert lake.lake_rows([sink_answer(record, read)], read.schema)["q.nan"].to_pylist() == [1, 0]


def test_a_client_finds_a_measure_whose_columns_begin_as_those_of_the_answer(desk: Desk) -> None:
    query = desk.register_over("jfk", group_by=[], measures={"answer": "quantiles(distance)", "n": "count()"})
    desk.report(query, "jfk", T0, {"UA": 3})
    with desk.served() as url, Center(url) as center:
        answer = center.query("flights").latest()
    assert answer.measures == [*(f"answer_{q}" for q in (0.5, 0.9, 0.95, 0.99)), "answer.nan", "n"]
    assert int(answer["answer_0.5"].interval) == 100


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
    query = desk.register_over("jfk", group_by=[], measures={"a": "max(distance)", "b": "min(distance)"})
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
    query = desk.register_over("jfk", group_by=[], measures={"x": measure})
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
