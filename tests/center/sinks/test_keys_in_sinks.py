"""Sinks keep groups apart whatever their columns are called and whatever their keys are; a query costs only itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import psycopg
import pyarrow as pa
import pytest
from sqlalchemy import select, update

from center.results.schema import answers as stored_answers
from center.sinks import SinkRunner, SinkStore, read_definition
from center.sinks.base import SinkAnswer, SinkContext, SinkQuery
from center.sinks.testing import QUERY, REF, SCHEMA, answer
from edgewater.base.errors import InvalidConfig
from edgewater.model.own_columns import OWN_COLUMNS, own_names
from edgewater.wire import QueryRef
from tests.center.api import conftest
from tests.center.api.conftest import HOUR, T0, Desk
from tests.center.sinks.alert_receivers import SeriesReceiver
from tests.center.sinks.systems import SYSTEMS, Kafka, Postgres, System

BIG = (1 << 53) + 1
FAR = 1 << 63
"""The sum of two of the largest integers is beyond int64."""
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning:pyiceberg.*", "ignore::UserWarning:pyiceberg.*")]


def runner(desk: Desk, document: dict[str, Any]) -> SinkRunner:
    definition = read_definition("out", {"begin": "beginning", **document})
    store = SinkStore(desk.results.engine)
    return SinkRunner(definition, desk.catalog, desk.results, store, owner="host:1", now_ms=lambda: desk.now)


def catch_up(running: SinkRunner) -> None:
    while running.step() == 0:
        pass


def rows_of(system: System, query: str, version: int | str) -> list[dict[str, Any]]:
    """What a reader sees, with its own names of columns."""
    if isinstance(system, Postgres):
        with psycopg.connect(system.url) as connection:
            cursor = connection.execute(f"SELECT * FROM {system.schema}.{query}")
            return [dict(zip([c.name for c in cursor.description or ()], row, strict=True)) for row in cursor]
    if isinstance(system, Kafka):
        return [value for key, value in system.newest().items() if "group" in json.loads(key)]
    document = system.document
    if document["kind"] == "delta":
        return list(deltalake.DeltaTable(f"{document['path']}/{query}_v{version}").to_pyarrow_table().to_pylist())
    if document["kind"] == "iceberg":
        from pyiceberg.catalog import load_catalog

        table = load_catalog("edgewater", **document["catalog"]).load_table(f"edgewater.{query}_v{version}")
        return list(table.scan().to_arrow().to_pylist())
    files = f"read_parquet('{document['path']}/{query}_v{version}/*/*.parquet', hive_partitioning=true)"
    return list(duckdb.sql(f"SELECT * FROM {files}").to_arrow_table().to_pylist())


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest, tmp_path: Path) -> System:
    return SYSTEMS[request.param](request, tmp_path)


NAMES = ("day", "answer_id", "window_start", "version", "revision", "K", "k", "query", "Phase")
"""Names of groups: names that sinks add, and names that differ only in case."""


@pytest.mark.slow
def test_groups_may_have_the_names_that_a_sink_adds(
    desk: Desk, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "COLUMNS", {**conftest.COLUMNS, **dict.fromkeys(NAMES, pa.string())})
    query = desk.register_over(
        "jfk", group_by=list(NAMES), measures={"n": "count()", "day_": "sum(distance)"}, lateness="0s"
    )
    keys = {name: pa.array([f"{name}1", f"{name}2"]) for name in NAMES}
    running = runner(desk, system.document)
    desk.ship(query, "jfk", T0, {**keys, "distance": pa.array([1, 2])})
    catch_up(running)
    running.stop()
    rows = rows_of(system, "flights", query.ref.version)
    assert not running.problem and len(rows) == 2
    for at in "12":
        (row,) = (r for r in rows if f"day{at}" in r.values())
        assert {f"{name}{at}" for name in NAMES} <= set(row.values()), "each key is in a column of its own"
        assert {own_names(NAMES)[name] for name in OWN_COLUMNS} <= row.keys(), "the same names as in each table"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "delta", "iceberg"])
def test_a_lake_has_a_row_per_answer_also_if_the_answer_has_no_group(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    system = SYSTEMS[kind](request, tmp_path)
    pages = [[answer(1, 0, {}), answer(2, HOUR, {"a": 1, "b": 2})], [answer(3, 2 * HOUR, {})]]
    for epoch, page in enumerate(pages, 1):
        sink = system.sink(SinkContext("kit", epoch, center=1))
        stored = sink.open([SinkQuery(REF, QUERY, SCHEMA)])
        assert stored == ({REF: 2} if epoch == 2 else {})
        for _ in range(2):  # a page that comes again changes nothing
            sink.write(page, {REF: page[-1].answer_id})
        sink.close()
    rows = sorted(rows_of(system, "kit", "3_windows"), key=lambda row: row["answer_id"])
    assert [row["answer_id"] for row in rows] == [1, 2, 3]
    assert [row["window_start"].timestamp() * 1000 for row in rows] == [0, HOUR, 2 * HOUR]
    assert {(row["phase"], row["contract"], row["completeness"]) for row in rows} == {("final", "met", 1.0)}
    assert json.loads(rows[0]["statement"])["query"] == "kit"
    assert system.contents() == {HOUR: {"a": 1, "b": 2}}


@pytest.mark.slow
def test_integers_beyond_a_type_are_exact_or_null_and_cost_no_other_answer(desk: Desk, system: System) -> None:
    query = desk.register(group_by=[], measures={"n": "count()", "miles": "sum(distance)"}, lateness="0s")
    running = runner(desk, system.document)
    shipped = {0: [BIG], 1: [FAR - 1, FAR - 1], 3: [7]}
    for hour, values in shipped.items():
        desk.ship(query, "jfk", T0 + hour * HOUR, {"distance": pa.array(values, pa.int64())})
    desk.ship(query, "jfk", T0 + 2 * HOUR, {"distance": pa.array([], pa.int64())})
    catch_up(running)
    running.stop()
    assert not running.problem
    found = sorted(
        ((int(r["n"] or 0), r) for r in rows_of(system, "flights", query.ref.version) if r["n"]), key=lambda p: str(p)
    )
    sums = {None if r["miles"] is None else int(r["miles"]): r for _, r in found}
    assert {BIG, 7} <= sums.keys() and sums.keys() <= {BIG, 7, 2 * FAR - 2, None}
    for value, row in sums.items():
        bounds = [row["miles_lower"], row["miles_upper"]]
        assert [None if b is None else int(b) for b in bounds] == [value, value]
        assert value is not None or row["contract"] == "beyond-int64"


@pytest.mark.slow
def test_an_integer_beside_an_answer_without_records_is_exact(desk: Desk, request: pytest.FixtureRequest) -> None:
    system = Postgres(request.getfixturevalue("postgres"))
    query = desk.register(group_by=[], measures={"miles": "sum(distance)"}, budget={"staleness": "2s"})
    start, running = desk.now // HOUR * HOUR, runner(desk, system.document)
    desk.now += 3 * HOUR
    desk.results.tick(desk.ledger, [], desk.now)
    desk.ship(query, "jfk", start + 2 * HOUR, {"distance": pa.array([BIG])})
    catch_up(running)
    assert not running.problem
    rows = rows_of(system, "flights", query.ref.version)
    assert len(rows) > 1, "answers without records, too"
    assert {r["miles"] for r in rows} == {None, BIG}
    path = {"Accept": "text/csv"}
    assert desk.get("/v1/queries/flights/windows", headers=path).text.count(str(BIG)) == 3
    running.stop()


def test_series_of_different_groups_and_queries_differ(
    desk: Desk, series: SeriesReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("url.path", "url_path", "version", "site", "__name__")
    monkeypatch.setattr(conftest, "COLUMNS", {**conftest.COLUMNS, **dict.fromkeys(names, pa.string())})
    keyed = desk.register_over("jfk", group_by=["carrier"], measures={"s": "sum(distance)"}, name="keyed")
    named = desk.register(group_by=list(names), measures={"s": "sum(distance)"}, name="named")
    one = desk.register(group_by=[], measures={"b_c": "sum(distance)"}, name="a")
    two = desk.register(group_by=[], measures={"c": "sum(distance)"}, name="a_b")
    carriers = [None, "null", "", '"null"', "x"]
    records = {"distance": pa.array([1, 2, 4, 8, 16])}
    running = runner(desk, {"kind": "remote_write", "url": series.url, "labels": {"site": "here"}})
    desk.ship(keyed, "jfk", T0, {"carrier": pa.array(carriers, pa.string()), **records})
    same = {name: pa.array(["p"] * 5) for name in names}
    desk.ship(named, "jfk", T0, {**same, "url.path": pa.array(list("abcde")), **records})
    desk.ship(one, "jfk", T0, records)
    desk.ship(two, "jfk", T0, {"distance": pa.array([5])})
    for query in (keyed, named, one, two):
        for hour in (1, 2):
            empty = {name: pa.array([], pa.string()) for name in query.spec.group_by}
            desk.ship(query, "jfk", T0 + hour * HOUR, {**empty, "distance": pa.array([], pa.int64())})
    catch_up(running)
    assert series.values("keyed_s") == series.values("named_s") == [1, 2, 4, 8, 16]
    assert {5.0, 31.0} <= set(series.values("a_b_c"))
    assert SinkStore(desk.results.engine).status("out").refused == 0
    assert all(dict(s)["version"] and dict(s)["site"] == "here" for s in series.samples)


def test_refused_samples_are_counted_and_stop_nothing(desk: Desk, series: SeriesReceiver) -> None:
    query = desk.register(group_by=["carrier"], measures={"n": "count()"}, lateness="0s")
    running = runner(desk, {"kind": "remote_write", "url": series.url})
    desk.report(query, "jfk", T0, {"UA": 1})
    catch_up(running)
    for each in series.samples.values():  # another writer has written other values at the end of the next window
        each[T0 + 2 * HOUR] = -1.0
    desk.report(query, "jfk", T0 + HOUR, {"UA": 2})
    desk.report(query, "jfk", T0 + 2 * HOUR, {"UA": 3})
    catch_up(running)
    assert not running.problem and 3.0 in series.values("flights_n")
    (stated,) = desk.get("/v1/sinks").json()["sinks"]
    assert stated["refused"] == 4, "n, its bounds and the completeness"
    assert "sink-refused" in [alarm["kind"] for alarm in desk.get("/v1/alarms").json()["alarms"]]


def test_bounds_beyond_the_integers_of_a_float_stay_outside(desk: Desk, series: SeriesReceiver) -> None:
    query = desk.register(group_by=[], measures={"s": "sum(distance)"}, lateness="0s")
    running = runner(desk, {"kind": "remote_write", "url": series.url})
    desk.ship(query, "jfk", T0, {"distance": pa.array([BIG])})
    catch_up(running)
    (lower,), (upper,) = series.values("flights_s_lower"), series.values("flights_s_upper")
    assert int(lower) <= BIG <= int(upper)
    at = {"query": '{__name__=~"flights:s_.*"}', "time": str((T0 + HOUR) // 1000)}
    result = desk.get("/prometheus/api/v1/query", params=at).json()["data"]["result"]
    face = {r["metric"]["__name__"]: int(float(r["value"][1])) for r in result}
    assert face["flights:s_lower"] <= BIG <= face["flights:s_upper"]


class Listed:
    """A system that is a list."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int]] = []
        self.positions: dict[QueryRef, int] = {}

    def open(self, queries: Sequence[SinkQuery]) -> Mapping[QueryRef, int]:
        return {query.ref: self.positions[query.ref] for query in queries if query.ref in self.positions}

    def write(self, answers: Sequence[SinkAnswer], positions: Mapping[QueryRef, int]) -> None:
        self.rows += [(answer.query.name, answer.window_start_ms) for answer in answers]
        self.positions |= positions

    def close(self) -> None:
        pass


def test_an_answer_of_a_newer_release_waits_for_that_release_and_other_queries_go_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Listed()
    good, newer = desk.register(name="good"), desk.register(name="newer")
    running = runner(desk, {"kind": "parquet", "path": "unused", "min_phase": "final", "batch": "0s"})
    monkeypatch.setattr(type(running.definition), "make", lambda *_: made)
    for hour in range(3):
        for query in (good, newer):
            desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 1})
    of_newer = stored_answers.c.query == "newer@1"
    with desk.results.engine.begin() as connection:
        given = connection.execute(select(stored_answers.c.quality).where(of_newer)).scalars().all()
        connection.execute(update(stored_answers).where(of_newer).values(quality='{"format":3,"facts":{}}'))
    for _ in range(20):
        running.step()
    assert {name for name, _ in made.rows} == {"good"}
    assert "query newer@1" in running.problem and "newer release" in running.problem
    with desk.results.engine.begin() as connection:  # as if this release could read it
        connection.execute(update(stored_answers).where(of_newer).values(quality=given[0]))
    desk.now += 60_000
    catch_up(running)
    assert {at for name, at in made.rows if name == "newer"} == {at for name, at in made.rows if name == "good"}
    assert not running.problem
    running.stop()


def test_a_panic_of_a_library_costs_only_its_sink(desk: Desk) -> None:
    query = desk.register()
    options = {
        "aws_endpoint_url": "not a URL",
        "aws_region": "x",
        "aws_access_key_id": "a",
        "aws_secret_access_key": "b",
    }
    running = runner(desk, {"kind": "delta", "path": "s3://bucket", "options": options, "batch": "0s"})
    desk.report(query, "jfk", T0, {"UA": 1})
    desk.report(query, "jfk", T0 + 2 * HOUR, {"UA": 1})
    for _ in range(3):
        running.step()
    assert "PanicException" in running.problem
    running.stop()


def test_a_sink_goes_on_after_the_clock_has_stepped_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    made, opened = Listed(), list[str]()
    first = desk.register(name="first")
    running = runner(desk, {"kind": "kafka", "brokers": ["a:1"], "batch": "5m"})
    monkeypatch.setattr(type(running.definition), "make", lambda *_: made)
    monkeypatch.setattr(made, "open", lambda queries: opened.extend(query.ref.name for query in queries) or {})
    desk.report(first, "jfk", T0, {"UA": 1})
    running.step()
    assert made.rows == [], "the answer waits for others"
    desk.now -= 24 * HOUR
    running.step()
    assert made.rows == [("first", T0)]
    (status,) = SinkStore(desk.results.engine).statuses()
    assert desk.now < status.until_ms <= desk.now + 3_000
    desk.register(name="second")
    desk.now -= 24 * HOUR
    running.step()
    assert opened == ["first", "second"]
    running.stop()


@pytest.mark.parametrize("label", ["version", "query", "__name__", "http.route", "9x", ""])
def test_a_label_that_series_cannot_have_is_refused_when_the_sink_is_defined(label: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        read_definition("out", {"kind": "remote_write", "url": "http://h/write", "labels": {label: "x"}})
    assert refused.value.field.startswith("sinks.out.labels")
