"""A query is changed over HTTP: no answer is deleted, and readers read over the border."""

from __future__ import annotations

import json

import pytest

from center.catalog import Change
from edgewater.base.streams import EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.model.edge_records import QueryStatusRecord
from edgewater.model.query import QuerySpec
from tests.center.api.conftest import HOUR, SPEC, T0
from tests.center.api.test_query_status import running

PATH = "/v1/queries/flights"
BORDER = T0 + 2 * HOUR


def put(desk, spec, path=PATH, headers=None, **params):
    given = {"Content-Type": "application/json", **(headers or {})}
    return desk.ask("PUT", path, params=params, content=json.dumps(spec), headers=given)


@pytest.fixture
def changed(desk):
    """Version 1 has answered 0 and 1 o'clock, version 2 with other measures and groups 2 and 3 o'clock."""
    desk.now = T0
    desk.register_over("jfk", lateness="0s")
    measures = {"n": "count()", "longest": "max(distance)"}
    spec = {**SPEC, "measures": measures, "group_by": [], "lateness": "0s"}
    assert put(desk, spec, at=rfc3339(BORDER)).status_code == 201
    first, second = desk.catalog.queries.versions("flights")
    desk.ledger_knows(first)
    desk.ledger_knows(second)
    for number in range(4):
        desk.report(first, "jfk", T0 + number * HOUR, {"UA": 1 + number})
        desk.report(second, "jfk", T0 + number * HOUR, {"UA": 1 + number})
    desk.now = T0 + 4 * HOUR
    return desk


def test_a_change_makes_the_next_version_and_names_its_border(desk):
    desk.now = T0
    desk.register()
    shown = desk.get(PATH)
    assert shown.headers["etag"] == '"1"'
    made = put(desk, {**SPEC, "lateness": "5m"}, headers={"If-Match": '"1"'}, at=rfc3339(BORDER - 1))
    assert made.status_code == 201
    assert made.headers["etag"] == '"2"'
    assert (made.json()["version"], made.json()["begins"]) == (2, rfc3339(BORDER))
    detail = desk.get(PATH).json()
    assert [(v["version"], v["begins"], v["until"]) for v in detail["versions"]] == [
        (1, None, rfc3339(BORDER)),
        (2, rfc3339(BORDER), None),
    ]
    assert desk.get(PATH, params={"version": 1}).json()["spec"]["lateness"] == "1h"
    assert [q["version"] for q in desk.get("/v1/queries").json()["queries"]] == [2]


def test_the_same_query_changes_nothing_and_a_new_name_is_registered(desk):
    assert put(desk, SPEC).status_code == 201
    assert put(desk, {k: v for k, v in SPEC.items() if k != "name"}).status_code == 200
    assert desk.catalog.queries.get("flights").ref.version == 1
    refused = put(desk, {**SPEC, "name": "other"})
    assert (refused.status_code, refused.json()["field"]) == (422, "name")


def test_a_change_of_what_somebody_else_has_changed_is_refused(desk):
    desk.register()
    assert put(desk, {**SPEC, "lateness": "5m"}, headers={"If-Match": '"1"'}).status_code == 201
    refused = put(desk, {**SPEC, "lateness": "9m"}, headers={"If-Match": '"1"'})
    assert refused.status_code == 412
    assert "version 2 is the newest now, not version 1" in refused.json()["detail"]
    assert put(desk, {**SPEC, "lateness": "9m"}, headers={"If-Match": "old"}).status_code == 422
    assert put(desk, {**SPEC, "lateness": "9m"}).status_code == 201, "without If-Match any version is changed"


def test_a_border_in_the_past_or_at_an_answered_window_is_refused(changed):
    refused = put(changed, SPEC, at=rfc3339(T0 + HOUR))
    assert (refused.status_code, refused.json()["field"]) == (422, "at")
    changed.now = T0
    refused = put(changed, SPEC, at=rfc3339(T0 + 3 * HOUR))
    assert "version 2 has answered the window" in refused.json()["detail"]


def test_a_dry_run_says_the_same_and_changes_nothing(desk):
    desk.register()
    tried = put(desk, {**SPEC, "lateness": "5m"}, dry_run=True, at=rfc3339(desk.now + HOUR)).json()
    assert (tried["registered"], tried["begins"], tried["until"]) == (False, rfc3339(desk.now + HOUR), None)
    assert put(desk, SPEC, dry_run=True).json()["registered"] is True
    assert put(desk, SPEC, dry_run=True, at=rfc3339(T0), headers={"If-Match": '"7"'}).status_code == 412
    assert desk.catalog.queries.get("flights").ref.version == 1


def test_a_range_spans_versions_and_each_page_has_one(changed):
    page = changed.get(f"{PATH}/windows").json()
    assert (page["version"], [a["version"] for a in page["answers"]]) == (1, [1, 1])
    assert {"miles", "n"} <= set(page["answers"][0]["data"][0])
    rest = changed.get(f"{PATH}/windows", params={"cursor": page["next_cursor"]}).json()
    assert (rest["version"], rest["next_cursor"]) == (2, None)
    assert [a["window"]["start"] for a in rest["answers"]] == [rfc3339(BORDER), rfc3339(BORDER + HOUR)]
    assert set(rest["answers"][0]["data"][0]) == {"group", "n", "longest"}
    one = changed.get(f"{PATH}/windows", params={"version": 2, "start": rfc3339(T0)}).json()
    assert [a["version"] for a in one["answers"]] == [2, 2]
    csv = changed.get(f"{PATH}/windows", params={"format": "csv", "start": rfc3339(BORDER)}).text.splitlines()
    assert csv[0].split(",")[8] == '"version"'
    assert csv[1].split(",")[8] == "2"


def test_versions_that_lack_a_measure_are_left_out(changed):
    page = changed.get(f"{PATH}/windows", params={"measure": "longest"}).json()
    assert (page["version"], len(page["answers"])) == (2, 2)
    refused = changed.get(f"{PATH}/windows", params={"measure": "miles"})
    assert (refused.status_code, refused.json()["field"]) == (422, "measure")
    assert len(changed.get(f"{PATH}/windows", params={"measure": "miles", "version": 1}).json()["answers"]) == 2


def test_the_status_says_that_a_version_begins_later_or_has_ended(changed):
    assert put(changed, {**SPEC, "lateness": "9m"}).status_code == 201
    changed.beat("jfk", changed.now)
    running(changed)
    begins = changed.get(PATH).json()["begins"]
    query = changed.catalog.queries.get("flights")
    changed.catalog.queries.record_statuses([QueryStatusRecord(query.ref, EdgeId("jfk"), True, "", "")])
    status = changed.get(f"{PATH}/status").json()
    assert f"its windows begin at {begins}" in status["reason"], status
    made = changed.ask("POST", "/v1/queries", params={"for": "1h"}, json={**SPEC, "name": "short"}).json()
    changed.catalog.queries.end(changed.catalog.queries.get("short").ref, changed.now)
    assert (
        f"windows that start before {made['until']} are final"
        in changed.get("/v1/queries/short/status").json()["reason"]
    )


def test_one_window_is_read_in_the_version_that_has_it(changed):
    for start, version in ((T0 + HOUR, 1), (BORDER, 2)):
        assert changed.get(f"{PATH}/windows/{rfc3339(start)}").json()["version"] == version
        assert changed.get(f"{PATH}/at", params={"time": rfc3339(start + 1)}).json()["version"] == version
        assert changed.get(f"{PATH}/windows/{rfc3339(start)}/explain").status_code == 200
    missing = changed.get(f"{PATH}/latest", params={"version": 9})
    assert "version 9 is not known; it has versions 1 to 2" in missing.json()["detail"]


def test_the_latest_answer_is_of_the_version_before_until_the_new_one_has_an_answer(changed):
    assert changed.get(f"{PATH}/latest").json()["version"] == 2
    assert put(changed, {**SPEC, "lateness": "9m"}).status_code == 201
    latest = changed.get(f"{PATH}/latest").json()
    assert (latest["version"], latest["window"]["start"]) == (2, rfc3339(BORDER + HOUR))


def test_a_rollup_stays_within_a_version(changed):
    params = {"every": "2h", "start": rfc3339(T0), "end": rfc3339(BORDER)}
    (merged,) = changed.get(f"{PATH}/rollup", params=params).json()["answers"]
    assert merged["total"]["n"]["estimate"] == 3
    refused = changed.get(f"{PATH}/rollup", params={**params, "end": rfc3339(BORDER + HOUR)})
    assert (refused.status_code, "version 1 ends at" in refused.json()["detail"]) == (422, True)


def test_sql_reads_all_versions_with_nulls_where_one_has_no_column(changed):
    ask = {"sql": "SELECT version, sum(n) AS n, sum(miles) AS miles FROM flights GROUP BY version ORDER BY version"}
    rows = changed.ask("POST", "/v1/sql", json=ask).json()["rows"]
    assert rows == [[1, 3, 300], [2, 7, None]]


def test_sql_replaces_a_query_without_deleting_its_answers(changed):
    select = "SELECT count(*) AS n FROM flights GROUP BY TUMBLE(INTERVAL '1 hour')"
    text = f"CREATE OR REPLACE MATERIALIZED VIEW flights AS {select}"
    made = changed.ask("POST", "/v1/sql", content=text, headers={"Content-Type": "application/sql"})
    assert made.json().get("version") == 3, made.text
    assert len(changed.get(f"{PATH}/windows").json()["answers"]) == 2


def test_a_key_that_changes_its_type_is_refused_in_sql_with_the_border(changed):
    changed.now = T0
    spec = {**SPEC, "group_by": [{"n": "distance > 5"}], "measures": {"m": "count()"}}
    made = put(changed, spec, at=rfc3339(T0 + 9 * HOUR))
    assert made.status_code == 201, made.text
    changed.now = T0 + 9 * HOUR
    refused = changed.ask("POST", "/v1/sql", json={"sql": "SELECT n FROM flights"})
    assert refused.status_code == 422, refused.text
    assert "columns of other types" in refused.json()["detail"]


def test_a_series_of_prometheus_goes_on_in_the_next_version(changed):
    params = {
        "query": "flights:n",
        "start": str((T0 + HOUR) // 1000),
        "end": str((T0 + 4 * HOUR) // 1000),
        "step": "3600",
    }
    found = changed.get("/prometheus/api/v1/query_range", params=params).json()["data"]["result"]
    series = {json.dumps(each["metric"]): [value for _, value in each["values"]] for each in found}
    assert series == {'{"__name__": "flights:n", "carrier": "UA"}': ["1", "2"], '{"__name__": "flights:n"}': ["3", "4"]}


def test_a_query_for_an_hour_states_its_end_in_its_spec(desk):
    desk.now = T0
    made = desk.ask("POST", "/v1/queries", params={"for": "1h"}, json=SPEC)
    assert (made.status_code, made.json()["until"]) == (201, rfc3339(T0 + HOUR))
    assert made.json()["spec"]["until"] == rfc3339(T0 + HOUR)
    assert "until = '2013-01-01T01:00:00Z'" in desk.get(PATH, params={"format": "sql"}).text
    refused = desk.ask("POST", "/v1/queries", params={"for": "soon"}, json={**SPEC, "name": "other"})
    assert (refused.status_code, refused.json()["field"]) == (422, "for")


def test_progress_names_the_first_version_that_is_known(changed):
    progress = changed.app().state.services.progress
    (stated,) = progress.event_data(None, lambda name: True)["queries"]
    assert (stated["first_version"], stated["version"]) == (1, 2)
    first, second = changed.catalog.queries.versions("flights")
    assert progress.newer(first) == second
    assert progress.newer(second) is None


def test_the_completeness_of_a_range_before_a_border_is_that_of_the_earlier_version(desk):
    desk.now = T0 + HOUR
    old = desk.register_over("jfk", name="changed", edges=["jfk"])
    desk.report(old, "jfk", T0, {"UA": 1})
    desk.report(old, "jfk", T0 + HOUR, {"UA": 1})
    spec = QuerySpec.from_mapping({**SPEC, "name": "changed", "edges": ["jfk"], "where": "distance > 0"})
    new, _ = desk.catalog.queries.register(spec, desk.now, change=Change(T0 + 2 * HOUR, None))
    desk.ledger_knows(new)
    starts = [rfc3339(T0 + hour * HOUR) for hour in range(3)]
    assert desk.get("/v1/queries/changed/completeness").json()["windows"] == starts[:2]
    desk.report(new, "jfk", T0 + 2 * HOUR, {"UA": 1})
    whole = desk.get("/v1/queries/changed/completeness").json()
    assert (whole["windows"], whole["phases"], whole["edges"], whole["earlier"]) == (
        starts,
        "fcc",
        {"jfk": "ccc"},
        False,
    )
    for params, shown, earlier in (
        ({"end": starts[2]}, starts[:2], False),
        ({"limit": 2}, starts[1:], True),
        ({"start": starts[2]}, starts[2:], False),
        ({"end": starts[2], "limit": 1}, starts[1:2], True),
        ({"limit": 1}, starts[2:], True),
    ):
        part = desk.get("/v1/queries/changed/completeness", params=params).json()
        assert (part["windows"], part["earlier"]) == (shown, earlier), params
    rolled = desk.get("/v1/queries/changed/rollup", params={"every": "2h", "end": starts[2]}).json()
    assert [a["window"]["start"] for a in rolled["answers"]] == starts[:1]
