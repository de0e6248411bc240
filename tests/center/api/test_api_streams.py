"""Streams at the API: their columns, who says so, and what an admin can do about a wrong edge."""

from __future__ import annotations

import pytest

from center.catalog import Catalog
from center.config import CenterConfig
from tests.center.api.conftest import SPEC, Desk

BEFORE = {"name": "flights", "from": "flights", "measures": {"miles": "sum(distance)"}, "window": {"tumbling": "1h"}}


def declare(desk: Desk, columns: object, stream: str = "flights"):
    return desk.ask("PUT", f"/v1/streams/{stream}/columns", json={"columns": columns})


def test_a_query_is_checked_against_declared_columns_before_any_edge_has_connected(desk: Desk) -> None:
    assert desk.get("/v1/streams").json() == {"streams": []}
    declared = declare(desk, {"carrier": "string", "distance": {"type": "string", "description": "in miles"}})
    assert (declared.status_code, declared.json()["source"]) == (200, "admin")
    refused = desk.ask("POST", "/v1/queries", json=BEFORE).json()
    assert (refused["status"], refused["field"]) == (422, "measures.miles")
    assert "by the columns of stream flights at the center" in refused["reason"]
    assert declare(desk, {"carrier": "string", "distance": "int64"}).status_code == 200
    assert desk.ask("POST", "/v1/queries", json=BEFORE).status_code == 201
    misfit = declare(desk, {"carrier": "string"})
    assert (misfit.status_code, "delete it first" in misfit.json()["detail"]) == (409, True)
    (shown,) = desk.get("/v1/streams").json()["streams"]
    assert [(c["name"], c["type"]) for c in shown["columns"]] == [("carrier", "string"), ("distance", "int64")]


def test_edges_that_differ_are_named_and_a_declaration_can_be_taken_back(desk: Desk) -> None:
    desk.connect("jfk")
    (shown,) = desk.get("/v1/streams").json()["streams"]
    assert (shown["source"], len(shown["columns"])) == ("edges", 3)
    (difference,) = declare(desk, {"carrier": "string", "distance": "float64", "dep_delay": "float64"}).json()[
        "differing"
    ]
    assert difference.startswith("column flights.distance is int64 at edge jfk; expected float64, as an admin")
    assert desk.ask("DELETE", "/v1/streams/flights/columns").status_code == 204
    assert desk.ask("DELETE", "/v1/streams/flights/columns").status_code == 404
    assert desk.get("/v1/streams").json()["streams"][0]["source"] == "edges"


@pytest.mark.slow
def test_a_declaration_that_cannot_be_used_says_what_is_right(desk: Desk) -> None:
    given = declare(desk, {"carrier": "text"}).json()
    assert (given["status"], given["field"], given["value"]) == (422, "columns.carrier.type", "text")
    assert declare(desk, {}).status_code == 422
    assert declare(desk, {"a": "string"}, stream="a b").status_code == 422
    assert desk.ask("PUT", "/v1/streams/flights/columns", json={"columns": {}, "replay": None}).status_code == 422
    assert desk.ask("PUT", "/v1/streams/flights/columns", content=b" " * 70_000).status_code == 413
    app = desk.app(principals={"ed": {"token": "of-ed", "role": "editor"}})
    refused = desk.ask("PUT", "/v1/streams/s/columns", app=app, headers={"Authorization": "Bearer of-ed"}, json={})
    assert refused.status_code == 403


def test_the_configurations_columns_are_not_an_admins_to_change(desk: Desk, tmp_path) -> None:
    config = CenterConfig.from_mapping({"streams": {"flights": {"columns": {"distance": "string"}}}})
    declare(desk, {"distance": "int64"})
    desk.catalog.close()
    desk.catalog = Catalog(f"sqlite:///{tmp_path}/catalog.db", config.columns)
    (shown,) = desk.get("/v1/streams").json()["streams"]
    assert (shown["source"], shown["columns"][0]["type"]) == ("configuration", "string")
    assert desk.ask("POST", "/v1/queries", json=SPEC).status_code == 422
    for refused in (declare(desk, {"distance": "int64"}), desk.ask("DELETE", "/v1/streams/flights/columns")):
        assert (refused.status_code, "streams.flights.columns" in refused.json()["detail"]) == (409, True)


def test_a_retired_edge_is_expected_again_only_when_an_admin_says_so(desk: Desk) -> None:
    desk.connect("jfk")
    assert desk.ask("DELETE", "/v1/edges/jfk").status_code == 204
    assert desk.get("/v1/edges/jfk").json()["state"] == "retired"
    assert desk.ask("POST", "/v1/edges/jfk/reinstate").status_code == 204
    assert desk.get("/v1/edges/jfk").json()["state"] == "up"
    assert desk.ask("POST", "/v1/edges/bos/reinstate").status_code == 404
