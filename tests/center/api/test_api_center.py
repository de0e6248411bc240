"""What is not about one query: edges, alarms, health, metrics, tokens, problems, the OpenAPI document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter
from sqlalchemy import Connection, event, insert

from center.api.app import ROUTERS
from center.api.models import ProblemDetails, Readiness
from center.api.problems import HTTP_PROBLEMS, PROBLEMS, install
from center.catalog import ComponentHeartbeat, UnindexedFrame
from center.results.schema import late_records
from center.storage.frame_log import FrameEntry, FrameLocation
from edgewater.base import errors
from edgewater.base.errors import StorageError
from edgewater.base.streams import MAX_TIME_MS, EdgeId
from edgewater.model.replies import Edge
from edgewater.wire import QueryRef
from tests.insides import engine_of

T0 = 1_356_998_400_000
HOUR = 3_600_000


def beat(desk, *components, at=None, problem=""):
    for component in components:
        desk.components.record(
            ComponentHeartbeat(component, "host:1", "127.0.0.1:1", 0, desk.now if at is None else at, problem)
        )


def test_an_application_does_not_build_the_models_of_its_routes_again(desk):
    routes = set(map(id, desk.app().routes))
    assert all(id(route) in routes for router in ROUTERS for route in router.routes)


def test_an_edge_is_shown_as_its_hello_and_heartbeat_described_it(desk):
    desk.connect("jfk")
    desk.beat("jfk", T0, late=3)
    shown = desk.get("/v1/edges/jfk").json()
    TypeAdapter(Edge).validate_python(shown)
    assert shown["state"] == "up"
    assert shown["labels"] == {"city": "jfk"}
    assert shown["drops"] == {"late": 3}
    (stream,) = shown["streams"]
    assert (stream["watermark"], stream["watermark_ms"], stream["ended"]) == ("2013-01-01T00:00:00Z", T0, False)
    assert stream["records"] == 7
    assert {"name": "distance", "type": "int64"} in stream["columns"]
    assert desk.get("/v1/edges").json()["edges"] == [shown]


def test_an_edge_can_be_retired_and_one_that_never_came_is_not_found(desk):
    desk.connect("jfk")
    assert desk.ask("DELETE", "/v1/edges/jfk").status_code == 204
    assert desk.get("/v1/edges/jfk").json()["state"] == "retired"
    assert desk.get("/v1/edges/lga").status_code == 404
    assert desk.ask("DELETE", "/v1/edges/lga").json()["type"] == "https://edgewater.dev/problems/not-found"


def test_alarms_are_given_the_latest_first(desk):
    desk.catalog.alarms.add("frame-conflict", "frame 3 has two contents", EdgeId("jfk"), T0)
    desk.catalog.alarms.add("frames-lost", "frames 1 to 2", EdgeId("lga"), T0 + 1000)
    alarms = desk.get("/v1/alarms").json()["alarms"]
    assert [a["kind"] for a in alarms] == ["frames-lost", "frame-conflict"]
    assert alarms[0]["last_at"] == "2013-01-01T00:00:01Z"


def test_frames_in_quarantine_are_listed_and_found_by_query_and_position(desk):
    entry = FrameEntry(QueryRef("q", 1), 7, EdgeId("jfk"), "i1", 3, 9, "q@1/s.frames", 0, 10, 123, T0)
    desk.catalog.quarantine.add_frame(entry, "ValueError: odd", T0 + 1000)
    (frame,) = desk.get("/v1/quarantine").json()["frames"]
    assert (frame["query"], frame["position"], frame["edge"], frame["seq"]) == ("q@1", 7, "jfk", 3)
    assert (frame["reason"], frame["quarantined_at"]) == ("ValueError: odd", "2013-01-01T00:00:01Z")
    assert desk.get("/v1/quarantine/q@1/7").json() == frame
    for missing in ("q@1/8", "q@2/7", "q/7", "q@x/7", f"q@{10**30}/7"):
        assert desk.get(f"/v1/quarantine/{missing}").status_code == 404
    assert desk.get(f"/v1/quarantine/q@1/{1 << 70}").status_code == 422


def test_a_process_that_answers_is_alive_whatever_the_others_do(desk):
    assert desk.get("/livez").json() == {"live": True}


def test_the_center_is_ready_when_all_components_send_heartbeats(desk):
    beat(desk, "gateway", "job", "api")
    ready = desk.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["missing"] == []
    assert ready.json()["components"]["gateway"]["address"] == "127.0.0.1:1"


def test_a_missing_component_is_named_with_the_reason(desk):
    beat(desk, "api")
    beat(desk, "job", at=desk.now - 12_000)
    beat(desk, "gateway", problem="frames cannot be made durable: the disk is full")
    unready = desk.get("/readyz")
    assert unready.status_code == 503
    Readiness.model_validate(unready.json())
    assert unready.json()["missing"] == [
        "gateway: frames cannot be made durable: the disk is full",
        "job: no heartbeat for 12 s",
    ]
    desk.components.remove("gateway", "host:1")
    assert "gateway: has not started" in desk.get("/readyz").json()["missing"]


def test_a_full_disk_is_named_beside_the_heartbeats_that_it_does_not_store(desk):
    @event.listens_for(engine_of(desk.components), "begin")
    def fill(connection: Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")

    with pytest.raises(StorageError):
        for number in range(1_000):
            desk.components.record(ComponentHeartbeat("job", f"host:{number}", "", 0, desk.now, "x" * 2_000))
    assert any(m.startswith("catalog: ") and "disk is full" in m for m in desk.get("/readyz").json()["missing"])
    event.remove(engine_of(desk.components), "begin", fill)
    desk.components.close()
    beat(desk, "gateway", "job", "api")
    assert not any("full" in m for m in desk.get("/readyz").json()["missing"])


def test_a_store_out_of_reach_is_missing_too(desk, tmp_path: Path):
    for file in tmp_path.glob("results.db*"):
        file.unlink()
    desk.results.close()
    tmp_path.joinpath("results.db").write_text("no database")
    missing = desk.get("/readyz").json()["missing"]
    assert any(m.startswith("results: ") for m in missing)


def test_metrics_report_requests_by_route_and_the_centers_state(desk):
    desk.register_over("jfk")
    desk.beat("jfk", desk.now - 2000)
    beat(desk, "gateway")
    app = desk.app()
    for name in ("flights", "nothing"):
        desk.get(f"/v1/queries/{name}", app=app)
    desk.get("/no/such/path", app=app)
    text = desk.get("/metrics", app=app).text
    for line in (
        'edgewater_api_requests_total{method="GET",route="/v1/queries/{name}",status="200"} 1.0',
        'edgewater_api_requests_total{method="GET",route="/v1/queries/{name}",status="404"} 1.0',
        'edgewater_api_requests_total{method="GET",route="(none)",status="404"} 1.0',
        'edgewater_component_ready{component="gateway"} 1.0',
        'edgewater_component_ready{component="job"} 0.0',
        'edgewater_edges{state="up"} 1.0',
        'edgewater_edge_watermark_lag_seconds{edge="jfk",stream="flights"} 2.0',
        "edgewater_queries 1.0",
        "edgewater_last_answer_id 0.0",
    ):
        assert line in text.splitlines()


def test_with_a_token_everything_under_v1_requires_it_and_health_does_not(desk):
    app = desk.app(token="secret")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
        for path in ("/v1/queries", "/v1/queries/x/latest", "/v1/edges", "/v1/alarms", "/v1/live"):
            refused = desk.get(path, app=app, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["type"] == "https://edgewater.dev/problems/unauthenticated"
    assert desk.get("/v1/queries", app=app, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert desk.get("/livez", app=app).status_code == 200
    assert desk.get("/metrics", app=app).status_code == 401


def test_every_code_of_the_error_tree_has_its_problem_and_no_other():
    codes = {c.code for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.EdgewaterError)}
    assert set(PROBLEMS) == codes
    assert not set(PROBLEMS) & set(HTTP_PROBLEMS)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not-found"),
        ("PUT", "/v1/queries", 405, "method-not-allowed"),
        ("GET", "/v1/queries/nothing", 404, "not-found"),
        ("GET", "/v1/queries/n/windows?limit=many", 422, "invalid-request"),
    ],
)
def test_every_error_is_a_problem_with_a_stable_type(desk, method, path, status, code):
    given = desk.ask(method, path)
    assert given.status_code == status
    assert given.headers["content-type"] == "application/problem+json"
    problem = ProblemDetails.model_validate(given.json())
    assert problem.type == f"https://edgewater.dev/problems/{code}"
    assert problem.status == status
    assert problem.instance == path.partition("?")[0]


def test_the_methods_that_are_possible_are_named(desk):
    assert set(desk.ask("PUT", "/v1/queries").headers["allow"].replace(" ", "").split(",")) >= {"GET"}


def test_an_internal_error_is_a_problem_without_details(desk):
    app = FastAPI()
    install(app)

    @app.get("/fault")
    def fault() -> None:
        raise RuntimeError("the secret is 42")

    given = desk.get("/fault", app=app)
    assert given.status_code == 500
    assert given.json()["type"] == "https://edgewater.dev/problems/internal"
    assert "42" not in given.text


@pytest.mark.slow
def test_openapi_describes_every_endpoint_with_a_summary_and_problems_only(desk):
    document = desk.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/queries", "/v1/queries/{name}", "/v1/queries/{name}/windows", "/v1/queries/{name}/latest",
        "/v1/queries/{name}/at", "/v1/queries/{name}/windows/{start}", "/v1/queries/{name}/windows/{start}/revisions",
        "/v1/queries/{name}/windows/{start}/explain", "/v1/queries/{name}/completeness", "/v1/queries/{name}/budget",
        "/v1/queries/{name}/status", "/v1/queries/{name}/evaluate", "/v1/queries/{name}/rollup",
        "/v1/functions", "/v1/sql",
            "/v1/queries/{name}/live", "/v1/live", "/v1/edges", "/v1/edges/{edge}", "/v1/edges/{edge}/reinstate",
        "/v1/streams", "/v1/streams/{stream}/columns",
        "/v1/load", "/v1/tables", "/v1/tables/{name}",
        "/v1/alarms", "/v1/sinks", "/v1/sinks/{name}", "/v1/sinks/{name}/pause", "/v1/sinks/{name}/resume",
        "/v1/sinks/{name}/replay", "/v1/alerts", "/v1/alerts/rules", "/v1/alerts/check",
        "/v1/quarantine", "/v1/quarantine/{query}/{position}", "/livez", "/readyz", "/metrics",
    }  # fmt: skip
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["summary"]
    body = document["paths"]["/v1/queries"]["post"]["requestBody"]["content"]
    assert body["application/yaml"]["example"].startswith("name: flights_by_carrier")
    assert "HTTPValidationError" not in str(document)
    define, remove = (document["paths"]["/v1/sinks/{name}"][method]["responses"] for method in ("put", "delete"))
    assert {"403", "408", "409", "413", "415", "422", "default"} <= set(define) and "404" not in define
    assert {"403", "404", "default"} <= set(remove) and "413" not in remove
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert references <= set(document["components"]["schemas"])
    answer = document["paths"]["/v1/queries/{name}/latest"]["get"]["responses"]["200"]["content"]
    assert {"application/json", "text/csv", "application/vnd.apache.arrow.stream"} <= set(answer)


def test_methods_that_clients_invent_are_one_series(desk):
    app = desk.app()
    for n in range(5):
        assert desk.ask(f"MADEUP{n}", "/v1/queries", app=app).status_code == 405
    series = [line for line in desk.get("/metrics", app=app).text.splitlines() if "requests_total{" in line]
    assert not any("MADEUP" in line for line in series) and any('method="other"' in line for line in series)


def test_the_load_has_the_queries_by_slack_with_what_waits_and_what_it_costs(desk):
    desk.connect("jfk", "lga")
    behind, quiet = desk.register(name="behind"), desk.register(name="quiet")
    locations = [FrameLocation("segment", 0, 10)]
    frames = [
        UnindexedFrame(behind.ref, EdgeId("jfk"), "jfk-1", seq, 1, 10, desk.now - 4_000 + seq, locations[0])
        for seq in range(3)
    ]
    desk.catalog.frames.index(frames)
    desk.catalog.budgets.record_processing_delays({behind.ref: 300, quiet.ref: 250}, desk.now)
    late, early = desk.get("/v1/load").json()["queries"]
    assert late == {
        "query": "behind", "version": 1, "slack_ms": -4_300.0, "frames": 3, "late_ms": 4_000, "cost_ms": 300,
        "set_aside": None,
    }  # fmt: skip
    # The clock of the test is at the beginning of an hour.
    assert (early["slack_ms"], early["frames"], early["late_ms"]) == (HOUR - 250, 0, 0)
    for edge in ("jfk", "lga"):
        desk.beat(edge, MAX_TIME_MS)
    assert desk.get("/v1/load").json()["queries"][1]["slack_ms"] is None, "the streams have ended"
    desk.catalog.queries.delete("quiet", desk.now)
    assert [q["query"] for q in desk.get("/v1/load").json()["queries"]] == ["behind"]


def test_counts_of_a_query_are_one_series_over_its_versions_and_end_with_the_query(desk):
    desk.connect("jfk")

    def late() -> list[str]:
        text = desk.get("/metrics", app=desk.app()).text
        return [line for line in text.splitlines() if line.startswith("edgewater_after_final_records_total{")]

    for _ in range(2):
        row = {"query": desk.register().key, "edge": "jfk", "reason": "after-final", "records": 3}
        with desk.results.engine.begin() as connection:
            connection.execute(insert(late_records), [row])
        assert late() == ['edgewater_after_final_records_total{edge="jfk",query="flights",reason="after-final"} 3.0']
        assert desk.ask("DELETE", "/v1/queries/flights").status_code == 204
        assert late() == []


def test_an_outage_is_logged_once_and_its_end_with_the_number_of_requests(desk, caplog, monkeypatch):
    app = desk.app()

    def away(*_: object) -> None:
        raise StorageError("the store is away")

    with monkeypatch.context() as broken:
        broken.setattr(desk.catalog.queries, "versions", away)
        for name in ("a", "b", "c"):
            assert desk.get(f"/v1/queries/{name}/live", app=app).status_code == 503
    app.state.services.outage.end()
    lines = [record.getMessage() for record in caplog.records if "the store is away" in record.getMessage()]
    assert len(lines) == 2 and "/queries/a/live" in lines[0]
    assert "3 requests" in lines[1] and "/queries/c/live" in lines[1]
    assert app.state.services.outage.count == 0
