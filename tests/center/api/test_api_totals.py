"""Totals over HTTP: in answers of every form, in a live stream, and of questions about all groups."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from edgewater.client import Center
from edgewater.wire import Rest, Withheld
from tests.center.api.conftest import HOUR, T0, Desk

BUDGET = {"error": {"n": 10, "miles": 1_000}}
MEASURES = {"n": "count()", "miles": "sum(distance)", "delay": "mean(dep_delay)", "planes": "distinct(distance)"}
RESTS = (
    Withheld("n", 2.0, 0.0, 2, rest=Rest(4)),
    Withheld("miles", 200.0, 0.0, 2, rest=Rest(4, (400.0,))),
    Withheld("delay", 2.0, 0.0, 2, rest=Rest(4, (10.0,))),
    Withheld("planes", 2.0, 0.0, 2, rest=Rest(4)),
)


@pytest.fixture
def withheld(desk: Desk) -> Desk:
    """One window: two edges have sent six records of two groups, and withhold four records of other groups."""
    query = desk.register_over("jfk", "lga", measures=MEASURES, budget=BUDGET)
    desk.report(query, "jfk", T0, {"UA": 3}, withheld=RESTS)
    desk.report(query, "lga", T0, {"AA": 3})
    return desk


def question(desk: Desk, **asked: object) -> dict[str, object]:
    body = json.dumps({"latest": 1, **asked})
    line: dict[str, object] = json.loads(desk.ask("POST", "/v1/queries/flights/evaluate", content=body).content)
    return {name: line.get(name) for name in ("estimate", "lower", "upper")}


def test_an_answer_states_its_totals_and_what_is_in_no_group(withheld: Desk) -> None:
    answer = withheld.get("/v1/queries/flights/latest", params={"group": "carrier:UA"}).json()
    assert [row["n"]["estimate"] for row in answer["data"]] == [3]
    assert answer["total"] == {
        "n": {"estimate": 10, "lower": 10, "upper": 10},
        "miles": {"estimate": 1_000, "lower": 1_000, "upper": 1_000},
        "delay": {"estimate": 1.6, "lower": 1.6, "upper": 1.6},
        "planes": {**question(withheld, measure="planes", **{"global": True}), "confidence": 0.95},
    }
    assert answer["total"]["planes"]["lower"] == 1 and answer["total"]["planes"]["upper"] >= 1 + 4
    assert answer["rest"] == {"n": 4, "miles": 400}
    (note,) = answer["notes"]
    assert "n 4, miles 400" in note


def test_a_total_of_synopses_merges_all_groups(desk: Desk) -> None:
    measures = {"planes": "distinct(distance)", "delay": "quantiles(dep_delay)", "per": "planes / n", "n": "count()"}
    query = desk.register_over("jfk", "lga", measures=measures)
    for edge, carriers in (("jfk", ["UA"] * 400), ("lga", ["AA"] * 200 + ["DL"] * 200)):
        columns = {"carrier": pa.array(carriers), "distance": np.arange(400) % 300, "dep_delay": np.arange(400.0)}
        desk.ship(query, edge, T0, columns)
    answer = desk.get("/v1/queries/flights/latest", params={"group": "carrier:AA"}).json()
    total = answer["total"]
    assert set(total) == {"n", "planes", "per", *(f"delay_{q}" for q in (0.5, 0.9, 0.95, 0.99))}
    assert total["planes"]["lower"] <= 300 <= total["planes"]["upper"] < 400 and total["planes"]["confidence"] == 0.95
    assert total["delay_0.9"]["lower"] <= 359 <= total["delay_0.9"]["upper"] < 380
    assert total["per"]["lower"] <= 300 / 800 <= total["per"]["upper"] < 0.5 and "confidence" not in total["n"]
    asked = desk.get("/v1/queries/flights/latest", params={"quantile": "0.25", "measure": "delay"}).json()["total"]
    assert asked["delay_0.25"]["lower"] <= 99 <= asked["delay_0.25"]["upper"] and set(asked) == {"delay_0.25"}
    params = {"query": "flights:all:planes", "time": str((T0 + HOUR) // 1000)}
    (sample,) = desk.get("/prometheus/api/v1/query", params=params).json()["data"]["result"]
    assert float(sample["value"][1]) == total["planes"]["estimate"]
    with desk.served() as url, Center(url) as center:
        assert center.query("flights").latest().total["planes"].confidence == 0.95


def test_a_total_has_no_bound_that_an_edge_may_exceed(desk: Desk) -> None:
    query = desk.register_over("jfk", "lga", measures=MEASURES, budget={**BUDGET, "staleness": "1s"})
    desk.report(query, "jfk", T0, {"UA": 3}, withheld=RESTS)
    desk.results.tick(desk.ledger, [], desk.now)
    answer = desk.get("/v1/queries/flights/latest").json()
    assert answer["quality"]["completeness"]["missing"] == ["lga"]
    assert answer["total"]["n"] == {"estimate": 7, "lower": 7, "upper": None}
    assert answer["total"]["miles"] == {"estimate": 700, "lower": None, "upper": None}
    assert answer["rest"] == {"n": None, "miles": None} and "notes" not in answer


def test_clients_read_totals_of_answers_and_of_live_streams(withheld: Desk) -> None:
    with withheld.served() as url, Center(url) as center:
        live = next(e for e in center.query("flights").live() if hasattr(e, "total"))
        for answer in (center.query("flights").latest(), live):
            assert int(answer.total["n"]) == 10 and answer.total["n"].confidence == 1.0
            assert float(answer.total["delay"]) == 1.6
            assert answer.rest == {"n": 4, "miles": 400}


def test_a_question_about_all_groups_has_what_edges_withhold(withheld: Desk) -> None:
    assert question(withheld, measure="n", **{"global": True}) == {"estimate": 10, "lower": 10, "upper": 10}
    assert question(withheld, measure="miles", **{"global": True}) == {
        "estimate": 1_000,
        "lower": 1_000,
        "upper": 1_000,
    }
    assert question(withheld, measure="delay", **{"global": True})["lower"] == 1.6
    count = question(withheld, measure="miles", question="count", **{"global": True})
    assert count == {"estimate": 10, "lower": 10, "upper": 10}
    planes = question(withheld, measure="planes", **{"global": True})
    assert planes == {"estimate": pytest.approx(1.0, abs=0.01), "lower": 1, "upper": 2 + 4}
