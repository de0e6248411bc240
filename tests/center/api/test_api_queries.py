"""Queries over HTTP: registered once, refused with reasons, looked into, deleted."""

from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter

from center.api.bodies import MAX_BODY_BYTES
from center.api.models import EXAMPLE_SPEC, EXAMPLE_SPEC_YAML
from center.config import ColumnEntry
from edgewater.base.streams import EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.model.edge_records import QueryStatusRecord
from edgewater.model.link_forecast import LinkRecord
from edgewater.model.query import QuerySpec
from edgewater.model.replies import QueryDetail
from edgewater.model.sql import to_sql
from edgewater.wire import QueryRef
from tests.center.api.conftest import T0

SPEC = {"name": "n", "from": "flights", "measures": {"n": "count()"}, "window": {"tumbling": "1h"}}


def post(desk, body, content_type="application/json"):
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    return desk.ask("POST", "/v1/queries", content=content, headers={"Content-Type": content_type})


def test_a_query_is_registered_under_its_name_and_first_version(desk):
    made = post(desk, SPEC)
    assert made.status_code == 201
    assert made.headers["location"] == "/v1/queries/n"
    assert made.json()["version"] == 1
    assert QuerySpec.from_mapping(made.json()["spec"]) == QuerySpec.from_mapping(SPEC)
    assert [q["name"] for q in desk.get("/v1/queries").json()["queries"]] == ["n"]


@pytest.mark.parametrize("media_type", ["application/yaml", "application/x-yaml", "text/yaml; charset=utf-8"])
def test_a_query_may_be_written_in_yaml(desk, media_type):
    assert post(desk, EXAMPLE_SPEC_YAML, media_type).status_code == 201
    assert QuerySpec.from_mapping(EXAMPLE_SPEC).asks_for(desk.catalog.queries.get("flights_by_carrier").spec)


def test_registering_the_same_query_again_returns_the_existing_one(desk):
    first = post(desk, SPEC)
    again = post(desk, {**SPEC, "window": {"tumbling": "60m"}})
    assert again.status_code == 200
    assert again.json() == first.json()
    assert again.headers["location"] == "/v1/queries/n"


def test_the_answer_to_a_registration_says_what_a_relative_budget_does_not_save(desk):
    relative = post(desk, {**SPEC, "name": "relative", "budget": {"error": {"n": "1%"}}}).json()
    assert relative["notes"][0].startswith("budget.error.n: 1.0% of a group's own value withholds no group")
    assert "notes" not in post(desk, {**SPEC, "name": "exact"}).json()


def test_the_answer_to_a_registration_says_that_small_groups_are_withheld(desk):
    budget = {"error": {"n": 1000}}
    (note,) = post(desk, {**SPEC, "budget": budget}).json()["notes"]
    assert note.startswith("budget.error: edges withhold values below their shares of n 1,000")
    assert "notes" not in post(desk, {**SPEC, "name": "zero", "budget": {"error": {"n": 0}}}).json()
    sql = to_sql(QuerySpec.from_mapping({**SPEC, "name": "sql", "budget": budget}))
    made = desk.ask("POST", "/v1/sql", content=sql, headers={"Content-Type": "application/sql"})
    assert made.json()["notes"] == [note]
    assert desk.ask("POST", "/v1/queries?dry_run=true", json={**SPEC, "budget": budget}).json()["notes"] == [note]


def test_another_query_under_a_name_that_is_taken_is_a_conflict(desk):
    post(desk, SPEC)
    refused = post(desk, {**SPEC, "window": {"tumbling": "2h"}})
    assert refused.status_code == 409
    assert refused.json()["type"] == "https://edgewater.dev/problems/conflict"


def test_the_refusal_of_a_changed_query_says_what_differs_and_how_it_is_changed(desk):
    post(desk, SPEC)
    detail = post(desk, {**SPEC, "window": {"tumbling": "2h"}, "lateness": "1m"}).json()["detail"]
    for part in ("window", "lateness", "edgewater query put", f"PUT /v1/queries/{SPEC['name']}", "keep its answers"):
        assert part in detail
    assert "measures" not in detail


def test_an_invalid_query_is_refused_with_field_value_and_what_is_accepted(desk):
    refused = post(desk, {**SPEC, "window": {"tumbling": "soon"}})
    assert refused.status_code == 422
    assert refused.headers["content-type"] == "application/problem+json"
    problem = refused.json()
    assert problem["type"] == "https://edgewater.dev/problems/invalid-query"
    assert (problem["field"], problem["value"]) == ("window.tumbling", "soon")
    assert problem["accepted"].startswith("a duration such as")
    assert problem["instance"] == "/v1/queries"


@pytest.mark.parametrize("measure", ["count(distance >= 500)", "count(late)", "sum(late)", "mean(NOT late)"])
def test_a_number_of_a_condition_is_refused_by_every_door_and_what_is_offered_is_accepted(desk, measure):
    desk.catalog.streams.declare("flights", {"distance": ColumnEntry(type="int64"), "late": ColumnEntry(type="bool")})
    sql = {"content": f"CREATE MATERIALIZED VIEW n AS SELECT {measure} AS n FROM flights GROUP BY TUMBLE('1h')"}
    asked = [
        ("POST", "/v1/queries", {"json": {**SPEC, "measures": {"n": measure}}}),
        ("PUT", "/v1/queries/n", {"json": {**SPEC, "measures": {"n": measure}}}),
        ("POST", "/v1/queries?dry_run=true", {"json": {**SPEC, "measures": {"n": measure}}}),
        ("POST", "/v1/sql", {**sql, "headers": {"Content-Type": "application/sql"}}),
    ]
    for method, path, request in asked:
        refused = desk.ask(method, path, **request)
        assert (refused.status_code, refused.json()["field"]) == (422, "measures.n"), (path, refused.text)
    offered = refused.json()["accepted"].split(", or ")[0].replace("condition", "late")
    assert post(desk, {**SPEC, "measures": {"n": offered}}).status_code == 201


def test_a_registered_query_that_would_be_refused_now_is_served(desk):
    query = desk.register(name="old", measures={"n": "count(distance >= 500)"})
    assert desk.get("/v1/queries/old").json()["spec"]["measures"] == {"n": "count(distance >= 500)"}
    assert query in desk.catalog.queries.all()


def test_measures_that_together_fit_no_frame_are_refused_with_their_sizes(desk):
    many = desk.ask(
        "POST", "/v1/queries", json={**SPEC, "measures": {f"m{i}": "count_min(distance)" for i in range(4)}}
    )
    assert (many.status_code, many.json()["field"]) == (422, "measures")
    assert "m0 1.2 MiB, m1 1.2 MiB" in many.json()["value"]


def test_a_query_that_does_not_fit_a_known_stream_names_the_column(desk):
    desk.connect("jfk")
    refused = post(desk, {**SPEC, "group_by": ["airline"]})
    assert refused.status_code == 422
    assert refused.json()["value"] == "airline"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("{", "application/json"),
        ("name: n", "application/json"),
        ("a: [", "application/yaml"),
        (b"\xff", "application/yaml"),
        pytest.param("[" * 60_000, "application/json", id="deep JSON"),
        pytest.param("[" * 1_500, "application/yaml", id="deep YAML"),
        pytest.param('{"seed": ' + "9" * 5_000 + "}", "application/json", id="many digits in JSON"),
        pytest.param("seed: " + "9" * 5_000, "application/yaml", id="many digits in YAML"),
        pytest.param("seed: 0x" + "f" * 6_000, "application/yaml", id="many hexadecimal digits in YAML"),
        ("name: 2013-13-45", "application/yaml"),
        ("[]", "application/json"),
        ("", "application/yaml"),
    ],
)
def test_a_body_that_is_not_a_query_is_an_invalid_query(desk, body, content_type):
    refused = post(desk, body, content_type)
    assert refused.status_code == 422
    assert refused.json()["type"] == "https://edgewater.dev/problems/invalid-query"
    assert len(refused.content) < 2000


@pytest.mark.parametrize(
    ("body", "content_type", "field", "said"),
    [
        ({**SPEC, "where": "carrier = '\ud800'"}, "application/json", "where", "unpaired surrogate"),
        ({**SPEC, "name": "\ud800"}, "application/json", "name", "unpaired surrogate"),
        ({**SPEC, "\ud800": 1}, "application/json", "", "unpaired surrogate"),
        ('name: "\\ud800"', "application/yaml", "", "Unicode character escape"),
        ('{"\\ud800": 1, "\\ud800": 1}', "application/json", "", "duplicate key"),
        ('"\\ud800": 1\n"\\ud800": 1', "application/yaml", "", "Unicode character escape"),
        ('{"name": "n", "name": "m"}', "application/json", "", "duplicate key name"),
        ("name: n\nname: m", "application/yaml", "", "duplicate key name"),
        ("lateness: 2013-02-30", "application/yaml", "", "day is out of range"),
    ],
)
def test_values_that_cannot_be_stored_or_sent_are_refused_by_field(desk, body, content_type, field, said):
    refused = post(desk, body, content_type)
    assert (refused.status_code, refused.json()["field"]) == (422, field)
    assert said in refused.json()["detail"]
    assert desk.get("/v1/queries").json() == {"queries": []}


def test_yaml_aliases_cannot_expand_a_small_body(desk):
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(12)
    )
    refused = post(desk, bomb, "application/yaml")
    assert refused.status_code == 422
    assert "an alias (*a)" in refused.json()["detail"]


def test_a_body_that_is_too_large_or_of_another_type_is_refused(desk):
    assert post(desk, " " * (MAX_BODY_BYTES + 1)).status_code == 413
    refused = post(desk, SPEC, "text/plain")
    assert refused.status_code == 415
    assert refused.json()["type"] == "https://edgewater.dev/problems/unsupported-media-type"
    assert "application/yaml" in refused.headers["accept-post"]


def test_a_query_shows_what_each_edge_says_of_it(two_hours):
    desk, query = two_hours
    desk.connect("ewr")
    desk.beat("jfk", 1_357_000_000_000)
    desk.beat("lga", 1 << 62)
    desk.catalog.queries.record_statuses([QueryStatusRecord(query.ref, EdgeId("jfk"), True, "", "")])
    desk.catalog.queries.record_statuses(
        [QueryStatusRecord(query.ref, EdgeId("lga"), False, "invalid-query", "no column carrier")]
    )
    shown = desk.get("/v1/queries/flights").json()
    TypeAdapter(QueryDetail).validate_python(shown)
    edges = {e["edge"]: e for e in shown["edges"]}
    assert edges["jfk"]["accepted"] is True
    assert edges["jfk"]["watermark"] == "2013-01-01T00:26:40Z"
    assert (edges["lga"]["accepted"], edges["lga"]["message"]) == (False, "no column carrier")
    assert (edges["lga"]["ended"], edges["lga"]["watermark"]) == (True, None)
    assert (edges["ewr"]["accepted"], edges["ewr"]["state"]) == (None, "up")
    assert edges["jfk"]["shipped"] == {"frames": 2, "wire_bytes": 1000}
    assert edges["ewr"]["shipped"] == {"frames": 0, "wire_bytes": 0}
    assert shown["latest_window"] == "2013-01-01T01:00:00Z"
    assert shown["spec"]["lateness"] == "1h"


def test_an_edge_that_a_query_names_is_expected_before_it_ever_connects(desk):
    desk.register_over("jfk", edges=["jfk", "lga"])
    edges = {e["edge"]: e["state"] for e in desk.get("/v1/queries/flights").json()["edges"]}
    assert edges == {"jfk": "up", "lga": "never_connected"}


def test_an_edge_without_heartbeats_is_unreachable_and_one_without_events_is_up(desk):
    desk.register_over("jfk")
    assert desk.get("/v1/queries/flights").json()["edges"][0]["state"] == "up"
    desk.now += 60_000
    assert desk.get("/v1/queries/flights").json()["edges"][0]["state"] == "unreachable"


def test_a_deleted_query_is_gone_and_its_name_is_free_for_the_next_version(desk, two_hours):
    deleted = desk.ask("DELETE", "/v1/queries/flights")
    assert (deleted.status_code, deleted.content) == (204, b"")
    for path in ("", "/latest", "/windows"):
        assert desk.get(f"/v1/queries/flights{path}").status_code == 404
    assert desk.ask("DELETE", "/v1/queries/flights").status_code == 404
    assert post(desk, {**SPEC, "name": "flights"}).json()["version"] == 2


def test_the_name_of_a_stream_that_no_edge_serves_and_is_like_one_is_noted(desk):
    desk.connect("jfk")
    noted = post(desk, {**SPEC, "from": "fligths"})
    assert (noted.status_code, "did you mean flights" in noted.json()["notes"][0]) == (201, True)
    tried = desk.ask("POST", "/v1/queries?dry_run=true", json={**SPEC, "name": "other", "from": "fligths"})
    assert "did you mean flights" in tried.json()["notes"][0]
    for stream in ("flights", "turbines"):
        assert "notes" not in post(desk, {**SPEC, "name": stream, "from": stream}).json()


def test_a_forecast_names_its_edges_and_is_unknown_while_one_of_them_is_silent(desk):
    budget = {"budget": {"staleness": "2s"}}
    desk.connect("jfk", "lga")
    tried = desk.ask("POST", "/v1/queries?dry_run=true", json={**SPEC, **budget}).json()["forecast"]
    assert (tried["in_time"], tried["bytes_per_window"]) == ("unknown", None)
    new = post(desk, {**SPEC, **budget}).json()["forecast"]
    assert {(e["edge"], e["in_time"], e["stated_at"]) for e in new["edges"]} == {
        ("jfk", "unknown", None), ("lga", "unknown", None),
    }  # fmt: skip
    ref, stated = QueryRef("n", 1), {}

    def state(edge, sent, omitted=0.0, link="", low=4_000.0):
        loads = {ref: (sent, omitted)}
        stated[edge] = LinkRecord(EdgeId(edge), link, desk.now + 10_000, low, low, low, loads, desk.now)
        desk.catalog.links.record(list(stated.values()), desk.now)
        for each in ("jfk", "lga"):
            desk.beat(each, T0)

    def forecast(name="n"):
        detail = desk.get(f"/v1/queries/{name}").json()
        TypeAdapter(QueryDetail).validate_python(detail)
        return detail["forecast"]

    state("jfk", 4_000.0)
    desk.now += 3_000
    first = forecast()
    assert (first["in_time"], first["bytes_per_window"]) == ("unknown", 4_000), "nothing is known of the other edge"
    (jfk,) = (e for e in first["edges"] if e["edge"] == "jfk")
    assert (jfk["in_time"], jfk["age_ms"], jfk["least_bytes_s"]) == ("yes", 3_000, 4_000.0)
    assert jfk["link_share"] == pytest.approx(4_000 / 3_600 / 4_000)
    state("lga", 2_000.0)
    assert (forecast()["in_time"], forecast()["since"], forecast()["bytes_per_window"]) == ("yes", None, 6_000)
    state("jfk", 4_000.0, link="one")
    state("lga", 2_000.0, link="one")
    shared = {e["edge"]: (e["in_time"], e["least_bytes_s"]) for e in forecast()["edges"]}
    assert shared == {"jfk": ("unknown", 2_000.0), "lga": ("yes", 2_000.0)}, "each has half of the link"
    state("lga", 2_000.0, omitted=100.0)
    assert forecast()["in_time"] == "no"
    state("lga", 2_000.0)
    state("jfk", 4_000.0)
    post(desk, {**SPEC, "name": "other"})
    assert forecast()["in_time"] == "unknown", "another query takes nobody knows how much"
    seen = desk.now
    desk.now += 60_000
    late = forecast()
    assert (late["in_time"], late["since"]) == ("unknown", rfc3339(seen)), "both edges are silent"
