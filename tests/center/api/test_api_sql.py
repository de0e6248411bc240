"""Statements in SQL over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from center.api.sql_guard import SqlGuard
from center.api.sql_select import check_select
from edgewater.answers.work import WorkLimits
from edgewater.base.errors import InvalidQuery
from edgewater.model.query import QuerySpec
from edgewater.model.sql import to_sql
from edgewater.model.table_texts import JSON
from tests.center.api.conftest import HOUR, SPEC, T0, Desk

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
    assert {"name": "miles_upper", "type": "int64"} in explained["columns"]
    assert desk.get("/v1/queries").json()["queries"] == []


def test_the_statement_of_a_query_and_columns(desk: Desk) -> None:
    desk.connect("ewr")
    run(desk, CREATE)
    assert rows(run(desk, "SHOW CREATE flights")) == [{"query": "flights", "sql": CREATE}]
    assert desk.get("/v1/queries/flights?format=sql").text == CREATE
    stream = rows(run(desk, "DESCRIBE STREAM flights"))
    assert {"column": "distance", "type": "int64", "description": ""} in stream
    query = {c["column"]: c["type"] for c in rows(run(desk, "DESCRIBE flights"))}
    assert query["window_start"] == "timestamp"
    assert query["carrier"] == "string"
    assert run(desk, "DESCRIBE nothing").status_code == 404
    assert run(desk, "DESCRIBE QUERY nothing").status_code == 404
    assert run(desk, "DESCRIBE flights", "/v1/sql?format=csv").text.startswith('"column","type"')


@pytest.mark.parametrize(
    ("text", "status", "field"),
    [
        ("", 422, "sql"),
        ("DESCRIBE flights; DROP MATERIALIZED VIEW flights", 422, "sql"),
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
    for body in ([], {"sql": 1}, {"sql": "DESCRIBE flights", "more": 1}):
        assert desk.ask("POST", "/v1/sql", json=body).json()["field"] == "sql"
    assert desk.ask("POST", "/v1/sql", content=b"\xff", headers=SQL).json()["field"] == "sql"
    assert run(desk, "DESCRIBE flights", headers={"Accept": "image/png"}).status_code == 406


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
    assert ask("editor", "DESCRIBE QUERY flights").status_code == 404
    assert ask("editor", "DESCRIBE QUERY mine_flights").status_code == 200
    assert ask("x", "DESCRIBE QUERY flights").status_code == 401
    assert desk.get("/v1/queries/flights").status_code == 200


def answered(desk: Desk, hours: int = 3) -> None:
    query = desk.register()
    desk.connect("ewr")
    desk.ledger_knows(query)
    for hour in range(hours):
        desk.report(query, "ewr", T0 + hour * HOUR, {"UA": 2 + hour, "AA": 1, None: 1})


def test_select_reads_answers_with_their_quality(desk: Desk) -> None:
    answered(desk)
    app = desk.app()
    read = rows(run(desk, "SELECT * FROM flights WHERE carrier = 'UA' ORDER BY window_start", app=app))
    assert [row["n"] for row in read] == [2, 3, 4]
    assert read[0]["window_start"] == "2013-01-01T00:00:00Z"
    assert (read[0]["phase"], read[0]["completeness"], read[0]["contract"]) == ("final", 1.0, "met")
    assert (read[0]["n_lower"], read[0]["n_upper"]) == (2, 2)
    described = [column["column"] for column in rows(run(desk, "DESCRIBE flights", app=app))]
    assert list(read[0]) == described
    total = "WITH h AS (SELECT window_start AS w, sum(n) AS n FROM Flights GROUP BY 1) SELECT max(n) AS most FROM h"
    assert rows(run(desk, total, app=app)) == [{"most": 6}]
    arrow = run(desk, "SELECT count(*) AS n FROM flights", "/v1/sql?format=arrow", app=app)
    assert pa.ipc.open_stream(arrow.content).read_all().to_pylist() == [{"n": 9}]


@pytest.mark.parametrize(
    ("where", "bounds"),
    [
        ("window_start >= '2013-01-01 01:00:00'", (T0 + HOUR, None)),
        ("window_start > '2013-01-01T01:00:00Z' AND n > 1", (T0 + HOUR, None)),
        ("window_start <= '2013-01-01T02:00:00+01:00' AND carrier = 'UA'", (None, T0 + HOUR + 1)),
        ("window_start < TIMESTAMP '2013-01-01 01:00:00.0005'", (None, T0 + HOUR + 1)),
        ("window_start >= '2013-01-01' AND window_start >= '2013-01-01T01:00Z'", (T0 + HOUR, None)),
        ("window_start >= '2013-01-01' OR carrier = 'UA'", (None, None)),
        ("window_start >= carrier", (None, None)),
        ("window_start >= 'tomorrow'", (None, None)),
    ],
)
def test_where_states_which_windows_are_read(where: str, bounds: tuple[int | None, int | None]) -> None:
    checked = check_select(f"SELECT * FROM flights WHERE {where}")
    assert (checked.start_ms, checked.end_ms) == bounds
    renamed = check_select(f"SELECT * FROM (SELECT window_end AS window_start FROM flights) WHERE {where}")
    assert (renamed.start_ms, renamed.end_ms) == (None, None)


def test_bounds_select_what_duckdb_selects(desk: Desk) -> None:
    answered(desk)
    app = desk.app()
    text = "SELECT DISTINCT hour(window_start) AS hour FROM flights WHERE {} ORDER BY 1"
    offset = text.format("window_start <= '2013-01-01T02:00:00+01:00'")
    assert [row["hour"] for row in rows(run(desk, offset, app=app))] == [0, 1]
    params = "?start=2013-01-01T01:00:00Z&end=2013-01-01T02:00:00Z"
    assert [row["hour"] for row in rows(run(desk, text.format("n > 0"), f"/v1/sql{params}", app=app))] == [1]


def test_a_query_without_answers_is_an_empty_table(desk: Desk) -> None:
    desk.register_over("ewr")
    assert rows(run(desk, "SELECT carrier || 'x' AS carrier, n + 1 AS n FROM flights")) == []


def test_too_many_rows_are_refused_and_not_cut(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(desk)
    app = desk.app()
    monkeypatch.setattr(app.state.services.costly, "limits", WorkLimits(cells=20))
    refused = run(desk, "SELECT count(*) FROM flights", app=app)
    assert refused.status_code == 422
    assert "window_start" in refused.json()["detail"]
    text = "SELECT count(*) AS n FROM flights WHERE window_start >= '2013-01-01 02:00:00'"
    assert rows(run(desk, text, app=app)) == [{"n": 3}]


@pytest.mark.parametrize(
    "text",
    [
        "SELECT repeat('x', 1000000000)",
        "SELECT * FROM range(1000000000)",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM 'passwd.csv'",
        "SELECT getenv('HOME')",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM query('SELECT 1')",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT * FROM information_schema.tables",
        "SELECT * FROM duckdb_settings()",
        "SELECT write_log('x')",
        "SELECT 'x'.repeat(1000000000)",
        "SELECT current_setting('home_directory')",
        "WITH RECURSIVE a AS (SELECT 1 UNION ALL SELECT 1 FROM a) SELECT * FROM a",
        "WITH a AS (DELETE FROM flights RETURNING *) SELECT * FROM a",
        "FROM flights SELECT 1; DROP TABLE flights",
        "SELECT * FROM nothing",
        "SELECT nothing FROM flights",
        "SELECT " + "(" * 5000 + "1",
    ],
    ids=lambda text: text[:40],
)
def test_hostile_selects_are_refused(desk: Desk, text: str) -> None:
    desk.register()
    refused = run(desk, text)
    assert refused.status_code in (404, 422)
    assert refused.json()["type"].endswith(("/invalid-query", "/not-found"))


def test_only_queries_that_the_caller_may_read_are_tables(desk: Desk) -> None:
    answered(desk)
    desk.register(name="secret")
    app = desk.app(principals={"reader": {"token": "r" * 32, "role": "reader", "queries": ["flights"]}})
    headers = {"Authorization": f"Bearer {'r' * 32}"}
    assert run(desk, "SELECT n FROM flights", app=app, headers=headers).status_code == 200
    for text in ("SELECT n FROM secret", "SELECT 1 FROM flights WHERE EXISTS (SELECT 1 FROM Secret)"):
        refused = run(desk, text, app=app, headers=headers)
        assert refused.status_code == 404
        assert "secret is not registered" in refused.json()["detail"]


@pytest.fixture(scope="module")
def guard() -> Iterator[SqlGuard]:
    guard = SqlGuard(timeout_s=2.0)  # a slow machine needs a second for one of the statements
    yield guard
    guard.close()


TABLE = {"q": pa.table({"a": range(1000)})}
FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("SELECT repeat('x', 1000000000)", "memory"),
        ("SELECT sum(a.a * b.a * c.a * d.a) FROM q a, q b, q c, q d", "takes at most"),
        ("SELECT a.a FROM q a, q b", "rows"),
        ("SELECT * FROM read_text('/proc/self/environ')", "a SELECT"),
        pytest.param("SELECT list(a.a ORDER BY b.a) FROM q a, q b, q c", "memory|takes at most", marks=FULL),
        pytest.param("WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT sum(n) FROM t",
                     "takes at most|memory", marks=FULL),
        pytest.param("COPY q TO '/tmp/written-by-a-statement.csv'", "a SELECT", marks=FULL),
        pytest.param("SELECT getenv('HOME')", "a SELECT", marks=FULL),
        pytest.param("SELECT * FROM connection", "a SELECT", marks=FULL),
        pytest.param("SET enable_external_access = true", "a SELECT", marks=FULL),
        pytest.param("INSTALL httpfs", "a SELECT", marks=FULL),
        pytest.param("ATTACH '/tmp/x.db'", "a SELECT", marks=FULL),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_the_child_stops_what_the_check_would_let_pass(guard: SqlGuard, text: str, accepted: str) -> None:
    with pytest.raises(InvalidQuery) as refused:
        guard.run(text, TABLE, JSON)
    assert re.search(accepted, refused.value.accepted)
    assert not Path("/tmp/written-by-a-statement.csv").exists()


def test_a_spare_child_that_was_killed_is_replaced(guard: SqlGuard) -> None:
    guard.run("SELECT 1", {}, JSON)
    (spare,) = guard._spares
    spare.kill()
    spare.wait()
    assert json.loads(guard.run("SELECT sum(a) AS s FROM q", TABLE, JSON))["rows"] == [[499500]]
