"""What an operator asks of an answer: why a value is what it is, which edges it has, and how the budget is divided."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import Any

import pytest

from center.budgets import AllocationPolicy, BudgetAllocator, BudgetReport
from center.catalog import BudgetStateChange
from center.serving.explanation import explain_value
from center.serving.measures import MeasureQuestions
from edgewater.answers import LateRecords
from edgewater.answers.uniting import with_late
from edgewater.base.streams import EdgeId
from edgewater.model.measure import Measure
from edgewater.wire import Withheld

HOUR = 3_600_000
T0 = 1_356_998_400_000
FIRST = "/v1/queries/flights/windows/2013-01-01T00:00:00Z"
ACCESS = {"principals": {"me": {"token": "mine", "role": "reader", "queries": ["f*"]},
                         "other": {"token": "theirs", "role": "reader", "queries": ["z*"]}}}  # fmt: skip


def withholding(desk):
    """Two edges under an error budget: jfk withholds miles."""
    query = desk.register_over(
        "jfk", "lga", budget={"error": {"miles": 1000}}, measures={"miles": "sum(distance)", "n": "count()"}
    )
    desk.report(query, "jfk", T0, {"UA": 3, "AA": 1}, withheld=(Withheld("miles", 250.0, 0.0, 2),))
    desk.report(query, "lga", T0, {"UA": 2})
    return query


def test_the_error_of_a_value_is_explained_by_cause_and_by_edge(desk):
    withholding(desk)
    told = desk.get(f"{FIRST}/explain?measure=miles&group=carrier:UA").json()
    assert (told["estimate"], told["lower"], told["upper"], told["group"]) == (500, 500, 750, {"carrier": "UA"})
    parts = {p["cause"]: (p["above"], p["below"], p["known"]) for p in told["parts"]}
    assert parts == {"sketch": (0, 0, True), "withheld": (250, 0, True), "missing": (0, 0, True)}
    edges = {e["edge"]: (e["closed"], e["late"], e["withheld"]) for e in told["edges"]}
    assert edges == {"jfk": (True, 0, {"above": 250, "below": 0}), "lga": (True, 0, {"above": 0, "below": 0})}
    assert [(r["revision"], r["phase"], r["upper"]) for r in told["revisions"]] == [(1, "complete", 750)]
    assert desk.get(f"{FIRST}/explain?measure=n").json()["parts"][1]["above"] == 0
    assert "edges" not in desk.get(FIRST).json()["quality"]


def test_a_sketch_states_its_own_error_from_before_it_is_widened(desk):
    query = desk.register_over("jfk", "lga", measures={"delay": "quantiles(dep_delay)"}, budget={"staleness": "1h"})
    desk.report(query, "jfk", T0, {"UA": 50})
    desk.report(query, "lga", T0, {"UA": 2}, closed=False)
    told = desk.get(f"{FIRST}/explain?quantile=0.5").json()
    by_cause = {p["cause"]: p for p in told["parts"]}
    assert told["value"] == "quantiles 0.5"
    assert told["lower"] is None and told["upper"] is None
    assert 0 < by_cause["sketch"]["above"] < told["estimate"]
    assert (by_cause["missing"]["above"], by_cause["missing"]["known"]) == (None, False)
    assert "lga" in by_cause["missing"]["says"]
    edges = {e["edge"]: e["closed"] for e in told["edges"]}
    assert edges == {"jfk": True, "lga": False}


def test_a_known_number_of_late_records_has_bounds_in_the_explanation_of_a_sketch(desk):
    query = desk.register_over("jfk", measures={"delay": "quantiles(dep_delay)", "miles": "sum(distance)"})
    desk.report(query, "jfk", T0, {"UA": 50})
    record = desk.results.answer(query.ref, T0, 1)
    record = replace(record, facts=with_late(record.facts, {"after-final": LateRecords(2)}))

    def parts(measure: Measure) -> tuple[dict[str, Any], dict[str, Any]]:
        told = explain_value(record, query.spec, measure, MeasureQuestions(quantiles=(0.5,)))
        return {name: told[name] for name in ("estimate", "lower", "upper")}, {
            part["cause"]: part for part in told["parts"]
        }

    delay, miles = query.spec.measures
    cell, by_cause = parts(delay)
    own, missing = by_cause["sketch"], by_cause["missing"]
    assert missing["above"] > 0 and missing["below"] > 0 and "2 records" in missing["says"]
    assert cell["upper"] == pytest.approx(cell["estimate"] + own["above"] + missing["above"])
    assert cell["lower"] == pytest.approx(cell["estimate"] - own["below"] - missing["below"])
    assert parts(miles)[1]["missing"]["above"] is None, "the values of two records are unknown"


def test_without_a_group_the_widest_is_explained_and_an_absent_one_is_not_found(desk):
    withholding(desk)
    assert desk.get(f"{FIRST}/explain").json()["groups"] == 2
    assert desk.get(f"{FIRST}/explain?group=carrier:ZZ").status_code == 404
    assert desk.get("/v1/queries/flights/windows/0/explain").status_code == 404
    refused = desk.get(f"{FIRST}/explain?measure=nope")
    assert (refused.status_code, refused.json()["field"]) == (422, "measure")


def test_completeness_has_a_character_per_window_and_edge(desk, two_hours):
    desk.connect("ewr")  # younger than the answers: it was not expected
    matrix = desk.get("/v1/queries/flights/completeness").json()
    assert matrix["windows"] == ["2013-01-01T00:00:00Z", "2013-01-01T01:00:00Z"]
    assert matrix["edges"] == {"ewr": "--", "jfk": "cc", "lga": "cc"}
    assert (matrix["phases"], matrix["ratios"], matrix["earlier"]) == ("fc", [1, 1], False)
    last = desk.get("/v1/queries/flights/completeness?limit=1").json()
    assert (last["phases"], last["earlier"]) == ("c", True)
    assert desk.get("/v1/queries/flights/completeness?start=9&end=3").status_code == 422


def test_a_missing_edge_is_named_in_the_matrix(desk):
    query = desk.register_over("jfk", "lga", budget={"staleness": "1h"})
    desk.report(query, "jfk", T0, {"UA": 1})
    desk.report(query, "lga", T0 - HOUR, {"UA": 1})
    matrix = desk.get("/v1/queries/flights/completeness").json()
    assert {e: states[-1] for e, states in matrix["edges"].items()} == {"jfk": "c", "lga": "m"}


def test_the_budget_shows_each_edges_share_and_their_sum(desk):
    query = withholding(desk)
    allocator = BudgetAllocator({"miles": 1000.0}, {}, AllocationPolicy())
    edges = frozenset(map(EdgeId, ("jfk", "lga")))
    allocator.set_members(edges, {})
    for edge in edges:
        allocator.report(edge, BudgetReport(0, {}, 0), desk.now)
    allocator.rebalance(desk.now, T0)
    desk.catalog.budgets.update(query.ref, lambda *_: BudgetStateChange(allocator.to_state(), True, None), desk.now)
    shown = desk.get("/v1/queries/flights/budget").json()
    assert (shown["limits"], shown["divided"]) == ({"miles": 1000}, ["miles"])
    assert 0 < shown["sums"]["miles"] <= 1000
    by_edge = {e["edge"]: e for e in shown["edges"]}
    assert by_edge["jfk"]["granted"] and by_edge["jfk"]["pending"]["shares"]
    assert by_edge["jfk"]["withheld_last"]["miles"] == {"above": 250, "below": 0}
    assert by_edge["jfk"]["wire_bytes"] == 500


def test_a_query_without_an_error_budget_has_no_limits(desk, two_hours):
    shown = desk.get("/v1/queries/flights/budget").json()
    assert (shown["budget"], shown["limits"], shown["sums"]) == (None, {}, {})
    assert shown["edges"][0]["granted"] is None


def test_each_is_for_readers_of_the_query_only(desk, two_hours):
    app = desk.app(**ACCESS)
    for path in (f"{FIRST}/explain", "/v1/queries/flights/completeness", "/v1/queries/flights/budget"):
        assert desk.get(path, app=app).status_code == 401
        assert desk.get(path, app=app, headers={"Authorization": "Bearer theirs"}).status_code == 404
        assert desk.get(path, app=app, headers={"Authorization": "Bearer mine"}).status_code == 200
    assert desk.get("/v1/functions", app=app).status_code == 401
    body = {"name": "f2", "from": "flights", "measures": {"n": "count()"}, "window": {"tumbling": "1h"}}
    tried = desk.ask("POST", "/v1/queries?dry_run=true", app=app, headers={"Authorization": "Bearer mine"}, json=body)
    assert tried.status_code == 403


def test_min_phase_leaves_out_windows_that_have_not_reached_it(desk, two_hours):
    assert desk.get("/v1/queries/flights/latest").json()["phase"] == "complete"
    assert desk.get("/v1/queries/flights/latest?min_phase=final").json()["phase"] == "final"
    found = desk.get("/v1/queries/flights/windows?min_phase=final").json()["answers"]
    assert [a["phase"] for a in found] == ["final"]
    assert desk.get("/v1/queries/flights/at?time=2013-01-01T01:30:00Z&min_phase=final").json()["answers"] == []
    missing = desk.get("/v1/queries/flights/windows/2013-01-01T01:00:00Z?min_phase=final")
    assert missing.status_code == 404
    assert desk.get("/v1/queries/flights/latest?min_phase=done").status_code == 422


def test_require_complete_refuses_answers_that_lack_an_edge(desk):
    query = desk.register_over("jfk", "lga", budget={"staleness": "1h"})
    desk.report(query, "jfk", T0, {"UA": 1})
    refused = desk.get("/v1/queries/flights/latest?require=complete")
    assert (refused.status_code, refused.json()["type"].rpartition("/")[2]) == (409, "incomplete")
    assert "lga" in refused.json()["detail"]
    desk.report(query, "lga", T0, {"UA": 1})
    assert desk.get("/v1/queries/flights/latest?require=complete").status_code == 200


def test_format_overrides_accept_and_csv_states_the_contract_and_what_is_withheld(desk):
    withholding(desk)
    given = desk.get("/v1/queries/flights/latest?format=csv", headers={"Accept": "application/json"})
    (row, *_) = csv.DictReader(io.StringIO(given.text))
    assert (row["phase"], row["completeness"], row["contract"]) == ("complete", "1", "met")
    assert row["withheld"] == '{"miles":{"above":250.0,"below":0.0}}'
    assert row["given_at"] == desk.get("/v1/queries/flights/latest?format=json").json()["given_at"]
    assert desk.get("/v1/queries/flights/latest?format=arrow").headers["content-type"].startswith("application/vnd")


def test_a_dry_run_says_which_edges_would_refuse_and_registers_nothing(desk):
    desk.connect("jfk")
    body = {"name": "try_me", "from": "flights", "measures": {"n": "count()", "s": "sum(weight)"},
            "window": {"tumbling": "1h"}}  # fmt: skip
    tried = desk.ask("POST", "/v1/queries?dry_run=true", json=body)
    assert tried.status_code == 200, tried.text
    told = tried.json()
    assert told["refused"] and not told["registered"]
    assert [(e["edge"], e["accepted"], e["code"]) for e in told["edges"]] == [("jfk", False, "invalid-query")]
    assert set(told["entry_bytes"]) == {"n", "s"}
    body["measures"].pop("s")
    assert desk.ask("POST", "/v1/queries?dry_run=true", json=body).json()["edges"][0]["accepted"] is True
    (edge,) = desk.ask("POST", "/v1/queries?dry_run=true", json={**body, "priority": 20}).json()["edges"]
    assert (edge["accepted"], edge["code"]) == (None, "old-release"), "it has stated no release"
    assert desk.get("/v1/queries").json()["queries"] == []
    desk.register(name="try_me")
    assert desk.ask("POST", "/v1/queries?dry_run=true", json=body).status_code == 409
    wrong = desk.ask("POST", "/v1/queries?dry_run=true", json={**body, "window": {"tumbling": "soon"}})
    assert (wrong.status_code, wrong.json()["field"]) == (422, "window.tumbling")


def test_streams_show_their_edges_records_and_the_least_watermark(desk):
    desk.connect("jfk", "lga")
    desk.beat("jfk", T0 + HOUR)
    (stream,) = desk.get("/v1/streams").json()["streams"]
    assert (stream["edges"], stream["records"], stream["watermark"]) == (["jfk", "lga"], 7, None)
    desk.beat("lga", T0)
    (stream,) = desk.get("/v1/streams").json()["streams"]
    assert (stream["records"], stream["watermark"]) == (14, "2013-01-01T00:00:00Z")


def test_functions_say_what_interval_they_give_and_whether_they_take_an_error_budget(desk):
    listed = {f["name"]: f for f in desk.get("/v1/functions").json()["functions"]}
    assert (listed["sum"]["interval"], listed["sum"]["error_budget"]) == ("exact", "sum")
    assert (listed["quantiles"]["interval"], listed["quantiles"]["error_budget"]) == ("sketch", None)
    assert (listed["bernoulli"]["interval"], listed["reservoir"]["interval"]) == ("sample", "sample")
    assert listed["quantiles"]["parameters"][0]["name"] == "accuracy"


def test_statements_of_very_many_edges_are_not_stored_and_unknown(desk, monkeypatch):
    monkeypatch.setattr("center.ledger.window_facts.MAX_LISTED_EDGES", 1)
    withholding(desk)
    desk.connect("ewr")
    told = desk.get(f"{FIRST}/explain?measure=miles").json()
    assert told["parts"][1]["above"] == 250
    assert {(e["closed"], e["late"]) for e in told["edges"]} == {(None, None)}
    assert set(desk.get("/v1/queries/flights/completeness").json()["edges"].values()) == {"?"}
