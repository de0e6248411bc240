"""A kind of synopsis of an installed package has all its values on every face; nothing but the package knows it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest

from center.sinks.alert_rules import AlertBook, AlertRule, Condition
from center.sinks.runner import read_query, sink_answer
from edgewater.base.errors import InvalidQuery
from edgewater.client import Answer, Center
from edgewater.model.measure import Measure
from edgewater.synopses import plugins
from edgewater.synopses.plugins import SynopsisPluginWarning
from tests.center.api.conftest import HOUR, T0, Desk
from tests.center.sinks.systems import SYSTEMS, System
from tests.center.sinks.test_keys_in_sinks import catch_up, rows_of, runner
from tests.edgewater.synopses.test_plugins import points
from tests.insides import forget_registrations
from tests.packages import write_package

TERRAIN = """
    from dataclasses import dataclass

    import numpy as np
    import pyarrow as pa

    from edgewater.synopses import ArrayStack, Count, Estimates, Function, Properties, Question
    from edgewater.synopses.shapes import ShownInterval, ShownKeyed, ShownList

    PARTS = {"low": (0, 10), "high": (10, 1000)}

    @dataclass(frozen=True, slots=True)
    class Height(Question):
        part: str = ""

    class TerrainStack(ArrayStack):
        kind = "terrain"
        properties = Properties()
        questions = (Height, Count)
        arrays = {"n": ("<i8", 0), "low": ("<i8", 0), "high": ("<i8", 0)}

        def update(self, codes, values, *, times=None):
            self._view("n")[:] += np.bincount(codes, minlength=len(self))
            for name, (low, high) in PARTS.items():
                inside = (values >= low) & (values < high)
                self._view(name)[:] += np.bincount(codes[inside], values[inside], len(self)).astype(np.int64)

        def merge(self, other, codes):
            for name in self.arrays:
                self._view(name)[codes] += other._view(name)

        def query(self, question=None):
            self.check(question)
            if isinstance(question, Count):
                return Estimates.exact(self._view("n"))
            names = [question.part] if question is not None and question.part else list(PARTS)
            value = sum(self._view(name) for name in names).astype(float)
            return Estimates(value, value - 0.5, value + 0.25, 0.99, "terrain")

        def shown(self, asked=None):
            rows, peaks = len(self), Estimates.exact(np.stack([self._view("low"), self._view("high")], axis=1).ravel())
            groups = np.repeat(np.arange(rows), 2)
            listed = ShownList("peaks", groups, {"peak": pa.array(["low", "high"] * rows)}, peaks)
            parts = ShownKeyed("parts", {name: Height(name) for name in PARTS})
            return ShownInterval(), parts, listed

    FUNCTION = Function("terrain", lambda *_: TerrainStack())
    ALL = (TerrainStack, FUNCTION)
"""


def install(path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    forget_registrations(monkeypatch)
    monkeypatch.setattr(sys, "path", [str(path), *sys.path])
    monkeypatch.setattr(plugins, "INSTALLED", plugins.Plugins(lambda: points(path)))
    write_package(path, "terrains", source, plugins.GROUP, {"terrain": "terrains:ALL"})
    monkeypatch.delitem(sys.modules, "terrains", raising=False)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    install(tmp_path / "site", monkeypatch, TERRAIN)
    made = Desk(tmp_path)
    made.connect("jfk")
    yield made
    sys.modules.pop("terrains", None)


def given(desk: Desk) -> Any:
    query = desk.register(measures={"m": "terrain(distance)"}, lateness="0s")
    desk.ship(query, "jfk", T0, {"carrier": pa.array(["UA", "UA", "AA"]), "distance": pa.array([3, 20, 7])})
    return query


def three(value: float) -> tuple[float, float, float]:
    return value, value - 0.5, value + 0.25


SUMS = {"AA": (7.0, 7.0, 0.0), "UA": (23.0, 3.0, 20.0)}
"""Per carrier, the whole, and the sums below and above 10."""
PATH = "/v1/queries/flights"
COLUMNS = ("m", "m.parts:low", "m.parts:high")


def by_column(row: Any) -> list[tuple[float, ...]]:
    """The intervals of a row of a table."""
    return [tuple(float(row[name + end]) for end in ("", "_lower", "_upper")) for name in COLUMNS]


def peaks(entries: Any) -> list[tuple[Any, ...]]:
    return [tuple(entry[name] for name in ("peak", "estimate", "lower", "upper")) for entry in entries]


EXPECTED = {carrier: [three(value) for value in sums] for carrier, sums in SUMS.items()}
PEAKS = {c: [("low", low, low, low), ("high", high, high, high)] for c, (_, low, high) in SUMS.items()}


def test_json_tables_and_selects_have_all_its_values(desk: Desk) -> None:
    given(desk)
    answer = desk.get(f"{PATH}/latest").json()
    assert answer["shapes"] == {
        "m": [
            {"name": "", "shape": "interval", "columns": ["m"]},
            {"name": "parts", "shape": "keyed", "columns": list(COLUMNS[1:])},
            {"name": "peaks", "shape": "list", "columns": ["m.peaks"]},
        ]
    }
    for row in answer["data"]:
        cell, carrier = row["m"], row["group"]["carrier"]
        each = (cell, cell["parts"]["low"], cell["parts"]["high"])
        assert [(e["estimate"], e["lower"], e["upper"]) for e in each] == EXPECTED[carrier]
        assert peaks(cell["peaks"]) == PEAKS[carrier]
    accept = {"Accept": "application/vnd.apache.arrow.stream"}
    rows = pa.ipc.open_stream(desk.get(f"{PATH}/windows", headers=accept).content).read_all().to_pylist()
    assert {r["carrier"]: by_column(r) for r in rows} == EXPECTED
    assert {r["carrier"]: peaks(r["m.peaks"]) for r in rows} == PEAKS
    text = desk.get(f"{PATH}/windows", headers={"Accept": "text/csv"}).content
    rows = pa.csv.read_csv(io.BytesIO(text)).to_pylist()
    assert {r["carrier"]: by_column(r) for r in rows} == EXPECTED
    assert {r["carrier"]: peaks(json.loads(r["m.peaks"])) for r in rows} == PEAKS
    names = ["carrier", *(f"{name}{end}" for name in COLUMNS for end in ("", "_lower", "_upper")), "m.peaks"]
    select = f"SELECT {', '.join(json.dumps(n) for n in names)} FROM flights"
    reply = desk.ask("POST", "/v1/sql", content=select.encode(), headers={"Content-Type": "application/sql"}).json()
    rows = [dict(zip(names, row, strict=True)) for row in reply["rows"]]
    assert {r["carrier"]: by_column(r) for r in rows} == EXPECTED
    assert {r["carrier"]: peaks(r["m.peaks"]) for r in rows} == PEAKS


def test_prometheus_has_a_series_of_each_value(desk: Desk) -> None:
    given(desk)
    params = {"query": '{__name__=~"flights:m.*"}', "time": str((T0 + HOUR) // 1000)}
    result = desk.get("/prometheus/api/v1/query", params=params).json()["data"]["result"]
    found = {tuple(sorted(r["metric"].items())): float(r["value"][1]) for r in result}
    expected = {}
    for carrier, each in EXPECTED.items():
        low, high = SUMS[carrier][1:]
        items = {"low": [each[1], (low, low, low)], "high": [each[2], (high, high, high)]}
        for at, end in enumerate(("", "_lower", "_upper")):
            labels = {"carrier": carrier}
            expected[tuple(sorted({"__name__": f"flights:m{end}", **labels}.items()))] = each[0][at]
            for item, values in items.items():
                for member, value in zip(("parts", "peaks"), values, strict=True):
                    name = {"__name__": f"flights:m:{member}{end}", "item": item, **labels}
                    expected[tuple(sorted(name.items()))] = value[at]
    assert found == expected


def test_conditions_of_alerts_read_its_values(desk: Desk) -> None:
    query = given(desk)
    record = desk.results.latest(query.ref)
    assert record is not None
    answer = sink_answer(record, read_query(query, desk.catalog))
    for text, carriers in (("m > 20", {"UA"}), ('"m.parts:low" > 5', {"AA"}), ("m > 7", {"UA"})):
        book = AlertBook([AlertRule("any", "flights", Condition(text, "certainly", {}))])
        fired = book.answer(answer, query.spec.measures, desk.now)
        assert {dict(t.alert.labels)["carrier"] for t in fired} == carriers, text


def test_the_client_has_it_from_arrow_and_live(desk: Desk) -> None:
    given(desk)
    with desk.served() as url, Center(url) as center:
        query = center.query("flights")
        live = next(e for e in query.live() if isinstance(e, Answer))
        for answer in (query.latest(), live):
            assert answer.measures == [*COLUMNS, "m.peaks"] and answer.interval_columns == list(COLUMNS)
            for at, name in enumerate(COLUMNS):
                each = {group["carrier"]: (i.estimate, i.lower, i.upper) for group, i in answer[name]}
                assert each == {carrier: expected[at] for carrier, expected in EXPECTED.items()}
            lists = dict(zip((g["carrier"] for g in answer.groups), answer["m.peaks"].values, strict=True))
            assert {carrier: peaks(entries) for carrier, entries in lists.items()} == PEAKS


@pytest.mark.parametrize("kind", ["parquet", *(pytest.param(k, marks=pytest.mark.slow) for k in ("postgres", "kafka"))])
def test_rows_in_sinks_have_all_its_values(
    desk: Desk, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    system: System = SYSTEMS[kind](request, tmp_path)
    query, running = given(desk), runner(desk, system.document)
    catch_up(running)
    running.stop()
    assert not running.problem
    rows = rows_of(system, "flights", query.ref.version)
    assert {r["carrier"]: by_column(r) for r in rows} == EXPECTED
    lists = {r["carrier"]: r["m.peaks"] for r in rows}
    read = {carrier: json.loads(e) if isinstance(e, str) else e for carrier, e in lists.items()}
    assert {carrier: peaks(entries) for carrier, entries in read.items()} == PEAKS


@pytest.mark.parametrize(
    "wrong", ["(ShownInterval(), ShownInterval())", '(ShownInterval("lower"),)', "()", '("count",)']
)
def test_a_package_whose_members_would_collide_is_refused_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    install(tmp_path / "site", monkeypatch, TERRAIN.replace("ShownInterval(), parts, listed", wrong))
    with pytest.warns(SynopsisPluginWarning, match="terrain"), pytest.raises(InvalidQuery):
        Measure.parse("m", "terrain(x)")
    assert len(plugins.INSTALLED.problems) == 1
