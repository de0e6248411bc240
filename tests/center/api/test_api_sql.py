"""Statements in SQL over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from edgewater.query import QuerySpec
from edgewater.sql import to_sql
from tests.center.api.conftest import SPEC, Desk

CREATE = to_sql(QuerySpec.from_mapping(SPEC))
OTHER = CREATE.replace("GROUP BY", "WHERE distance > 5\nGROUP BY")
SQL = {"Content-Type": "application/sql"}


def run(desk: Desk, text: str, path: str = "/v1/sql", **request: Any) -> httpx.Response:
    headers = {**SQL, **request.pop("headers", {})}
    return desk.ask("POST", path, content=text.encode(), headers=headers, **request)


def rows(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    table = response.json()
    names = [column["name"] for column in table["columns"]]
    return [dict(zip(names, row, strict=True)) for row in table["rows"]]


def test_create_registers_the_query_as_its_yaml_does(desk: Desk) -> None:
    created = run(desk, CREATE)
    assert created.status_code == 201
    assert created.headers["Location"] == "/v1/queries/flights"
    assert desk.ask("POST", "/v1/queries", json=SPEC).status_code == 200
    assert run(desk, CREATE).status_code == 200
    as_json = desk.ask("POST", "/v1/sql", json={"sql": CREATE})
    assert as_json.json() == created.json()


def test_or_replace_deletes_the_other_query_and_keeps_it_if_the_new_one_is_refused(desk: Desk) -> None:
    desk.connect("ewr")
    run(desk, CREATE)
    conflict = run(desk, OTHER)
    assert conflict.status_code == 409
    refused = run(desk, CREATE.replace("sum(distance)", "sum(nothing)").replace("CREATE", "CREATE OR REPLACE"))
    assert refused.status_code == 422
    assert refused.json()["field"] == "measures.miles"
    assert desk.get("/v1/queries/flights").json()["version"] == 1
    replaced = run(desk, OTHER.replace("CREATE", "CREATE OR REPLACE"))
    assert replaced.status_code == 201
    assert replaced.json()["version"] == 2
    assert run(desk, OTHER.replace("CREATE", "CREATE OR REPLACE")).json()["version"] == 2


def test_drop(desk: Desk) -> None:
    run(desk, CREATE)
    assert run(desk, "DROP MATERIALIZED VIEW flights").json() == {"dropped": "flights"}
    assert run(desk, "DROP MATERIALIZED VIEW flights").status_code == 404
    assert run(desk, "DROP MATERIALIZED VIEW IF EXISTS flights").json() == {"dropped": None}


def test_explain_registers_nothing(desk: Desk) -> None:
    desk.connect("ewr")
    explained = run(desk, f"EXPLAIN {CREATE}").json()
    assert explained["spec"] == QuerySpec.from_mapping(SPEC).to_mapping()
    assert explained["sql"] == CREATE
    assert explained["edges"] == [{"edge": "ewr", "accepted": True, "code": None, "message": None}]
    assert {"name": "carrier", "type": "string"} in explained["columns"]
    assert {"name": "miles_upper", "type": "float64"} in explained["columns"]
    assert rows(run(desk, "SHOW QUERIES")) == []


def test_lists_and_columns(desk: Desk) -> None:
    desk.connect("ewr")
    run(desk, CREATE)
    assert [q["query"] for q in rows(run(desk, "SHOW QUERIES"))] == ["flights"]
    assert [s["edges"] for s in rows(run(desk, "SHOW STREAMS"))] == [1]
    assert [e["edge"] for e in rows(run(desk, "SHOW EDGES;"))] == ["ewr"]
    assert "distinct" in [f["function"] for f in rows(run(desk, "SHOW FUNCTIONS"))]
    assert rows(run(desk, "SHOW CREATE flights")) == [{"query": "flights", "sql": CREATE}]
    assert desk.get("/v1/queries/flights?format=sql").text == CREATE
    stream = rows(run(desk, "DESCRIBE STREAM flights"))
    assert {"column": "distance", "type": "int64", "description": ""} in stream
    query = {c["column"]: c["type"] for c in rows(run(desk, "DESCRIBE flights"))}
    assert query["window_start"] == "timestamp"
    assert query["carrier"] == "string"
    assert run(desk, "DESCRIBE nothing").status_code == 404
    assert run(desk, "DESCRIBE QUERY nothing").status_code == 404
    assert run(desk, "SHOW QUERIES", "/v1/sql?format=csv").text.startswith('"query","version"')


@pytest.mark.parametrize(
    ("text", "status", "field"),
    [
        ("", 422, "sql"),
        ("SHOW QUERIES; DROP MATERIALIZED VIEW flights", 422, "sql"),
        ("CREATE MATERIALIZED VIEW q AS SELECT count(*) AS n FROM s", 422, "window"),
        ("CREATE MATERIALIZED VIEW q WITH (stale = '2s') AS SELECT count(*) AS n FROM s GROUP BY TUMBLE('1m')", 422,
         "stale"),
        ("SHOW CREATE nothing", 404, None),
    ],
)  # fmt: skip
def test_a_wrong_statement_is_refused(desk: Desk, text: str, status: int, field: str | None) -> None:
    refused = run(desk, text)
    assert refused.status_code == status
    assert refused.json().get("field") == field


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "application/yaml", ""])
def test_bodies_that_other_sites_may_send_are_refused(desk: Desk, media: str) -> None:
    run(desk, CREATE)
    refused = run(desk, "DROP MATERIALIZED VIEW flights", headers={"Content-Type": media})
    assert refused.status_code == 415
    assert "application/sql" in refused.headers["Accept-Post"]
    assert desk.get("/v1/queries/flights").status_code == 200


def test_a_body_that_is_no_statement_is_refused(desk: Desk) -> None:
    for body in ([], {"sql": 1}, {"sql": "SHOW EDGES", "more": 1}):
        assert desk.ask("POST", "/v1/sql", json=body).json()["field"] == "sql"
    assert desk.ask("POST", "/v1/sql", content=b"\xff", headers=SQL).json()["field"] == "sql"
    assert run(desk, "SHOW EDGES", headers={"Accept": "image/png"}).status_code == 406


def test_each_statement_needs_its_role(desk: Desk) -> None:
    principals = {
        "reader": {"token": "r" * 32, "role": "reader", "queries": ["flights"]},
        "editor": {"token": "e" * 32, "role": "editor", "queries": ["mine_*"], "streams": ["flights"]},
    }
    app = desk.app(principals=principals)

    def ask(who: str, text: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {who[0] * 32}"}
        return run(desk, text, app=app, headers=headers)

    desk.register()
    mine = CREATE.replace("VIEW flights", "VIEW mine_flights")
    assert ask("reader", CREATE).status_code == 403
    assert ask("reader", f"EXPLAIN {CREATE}").status_code == 403
    assert ask("reader", "DROP MATERIALIZED VIEW flights").status_code == 403
    assert ask("editor", "DROP MATERIALIZED VIEW flights").status_code == 404
    assert ask("editor", "DROP MATERIALIZED VIEW IF EXISTS flights").json() == {"dropped": None}
    assert ask("editor", "SHOW CREATE flights").status_code == 404
    assert ask("editor", mine.replace("FROM flights", "FROM other")).status_code == 403
    assert ask("editor", mine).status_code == 201
    assert [q["query"] for q in rows(ask("reader", "SHOW QUERIES"))] == ["flights"]
    assert [q["query"] for q in rows(ask("editor", "SHOW QUERIES"))] == ["mine_flights"]
    assert ask("x", "SHOW QUERIES").status_code == 401
    assert desk.get("/v1/queries/flights").status_code == 200
