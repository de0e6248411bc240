"""Answers over HTTP: which windows, in what form, and what a cache may keep."""

from __future__ import annotations

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from pydantic import TypeAdapter
from sqlalchemy import update

from center.api.models import Answer, AnswerList, AnswerPage
from center.results.schema import answers as stored_answers
from edgewater.synopses import GroupedAggregate
from tests.center.rendered import render
from tests.insides import reading

HOUR = 3_600_000
T0 = 1_356_998_400_000
ARROW = "application/vnd.apache.arrow.stream"


def test_latest_is_the_newest_revision_of_the_last_window_as_it_is_rendered(two_hours):
    desk, query = two_hours
    answer = desk.get("/v1/queries/flights/latest")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == render(desk.results.latest(query.ref), query.spec)
    assert answer.json()["window"] == {"start": "2013-01-01T01:00:00Z", "end": "2013-01-01T02:00:00Z"}
    assert TypeAdapter(Answer).validate_python(answer.json())["quality"]["completeness"]["ratio"] == 1


def test_a_query_without_answers_differs_from_one_that_does_not_exist(desk):
    desk.register_over("jfk")
    assert "has no answer yet" in desk.get("/v1/queries/flights/latest").json()["detail"]
    assert "is not registered" in desk.get("/v1/queries/nothing/latest").json()["detail"]
    page = desk.get("/v1/queries/flights/windows").json()
    assert page["answers"] == []


@pytest.mark.parametrize(
    ("start", "end", "hours"),
    [
        ("2013-01-01T00:00:00Z", "2013-01-01T01:00:00Z", [0]),
        ("2013-01-01T01:00:00Z", "2013-01-01T02:00:00Z", [1]),
        (str(T0), str(T0 + 2 * HOUR), [0, 1]),
        ("2012-12-31T19:00:00-05:00", "2013-01-01T00:00:00.001Z", [0]),
        ("2013-01-01T01:00:00 01:00", "2013-01-01T02:00:00+01:00", [0]),  # a + that was not escaped
        (str(T0 + 1), str(T0 + HOUR), []),
    ],
)
def test_a_range_includes_its_start_and_excludes_its_end(desk, two_hours, start, end, hours):
    page = desk.get("/v1/queries/flights/windows", params={"start": start, "end": end}).json()
    AnswerPage.model_validate(page)
    assert [a["window"]["start"] for a in page["answers"]] == [f"2013-01-01T0{h}:00:00Z" for h in hours]


def test_the_effective_range_is_echoed(desk, two_hours):
    page = desk.get(f"/v1/queries/flights/windows?start={T0}&limit=7").json()
    assert page["range"] == {"start": "2013-01-01T00:00:00Z", "end": None, "limit": 7}


def test_pages_follow_one_another_by_cursor_and_by_link(desk, two_hours):
    first = desk.get("/v1/queries/flights/windows?limit=1")
    assert len(first.json()["answers"]) == 1
    cursor = first.json()["next_cursor"]
    assert first.links["next"]["url"].endswith(f"limit=1&cursor={cursor}")
    second = desk.get(first.links["next"]["url"])
    assert second.json()["answers"][0]["window"]["start"] == "2013-01-01T01:00:00Z"
    assert second.json()["next_cursor"] is None
    assert "link" not in second.headers


def test_at_gives_every_window_that_contains_a_moment(desk):
    query = desk.register_over("jfk", window={"sliding": "2h", "every": "1h"}, lateness="0s")
    desk.report(query, "jfk", T0, {"UA": 1})
    desk.report(query, "jfk", T0 + HOUR, {"UA": 2})
    answers = desk.get(f"/v1/queries/flights/at?time={T0 + HOUR - 1}").json()
    AnswerList.model_validate(answers)
    assert [a["window"]["start"] for a in answers["answers"]] == ["2012-12-31T23:00:00Z", "2013-01-01T00:00:00Z"]
    assert desk.get(f"/v1/queries/flights/at?time={T0 - 5 * HOUR}").json()["answers"] == []


def test_each_revision_of_a_window_stays_what_it_was(two_hours):
    desk, query = two_hours
    path = f"/v1/queries/flights/windows/{T0 + HOUR}"
    before = desk.get(f"{path}?revision=1").content
    assert desk.get(path).content == before
    desk.now += HOUR
    desk.report(query, "lga", T0 + HOUR, {"UA": 7}, closed=False)  # a straggler within the lateness
    assert desk.get(f"{path}?revision=1").content == before
    assert desk.get(path).json()["revision"] == 2
    revisions = desk.get("/v1/queries/flights/windows/2013-01-01T01:00:00Z/revisions").json()
    assert revisions == {"query": "flights", "window_start": "2013-01-01T01:00:00Z", "revisions": [1, 2]}


def test_a_given_revision_may_be_cached_for_good_once_the_version_is_in_the_url(desk, two_hours):
    path = f"/v1/queries/flights/windows/{T0}"
    given = desk.get(f"{path}?revision=1&version=1")
    assert given.headers["cache-control"] == "private, max-age=31536000, immutable"
    assert given.headers["etag"].startswith('"')
    assert given.headers["vary"] == "Accept"
    # Without the version another query of the same name could be mistaken for this one: a minute only.
    assert desk.get(f"{path}?revision=1").headers["cache-control"] == "private, max-age=60, immutable"
    assert desk.get(path).headers["cache-control"] == "private, no-cache"
    assert desk.get(f"{path}?revision=1&version=2").status_code == 404


@pytest.mark.slow
def test_a_copy_that_is_current_is_not_sent_again(two_hours):
    desk, query = two_hours
    for path in (f"windows/{T0}?revision=1", f"windows/{T0}", "latest", "windows", f"at?time={T0}"):
        first = desk.get(f"/v1/queries/flights/{path}")
        again = desk.get(
            f"/v1/queries/flights/{path}", headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'}
        )
        assert (again.status_code, again.content) == (304, b""), path
        assert again.headers["etag"] == first.headers["etag"]
    etag = desk.get("/v1/queries/flights/latest").headers["etag"]
    desk.now += HOUR
    desk.report(query, "lga", T0 + HOUR, {"UA": 7}, closed=False)  # a straggler within the lateness
    changed = desk.get("/v1/queries/flights/latest", headers={"If-None-Match": etag})
    assert changed.status_code == 200


def test_every_form_and_every_question_has_an_entity_tag_of_its_own(desk, two_hours):
    path = f"/v1/queries/flights/windows/{T0}?revision=1"
    tags = {
        desk.get(path, headers={"Accept": form}).headers["etag"] for form in ("application/json", "text/csv", ARROW)
    }
    tags |= {desk.get(f"{path}&{asked}").headers["etag"] for asked in ("measure=n", "group=carrier:UA")}
    assert len(tags) == 5


def test_csv_has_a_row_per_group_that_states_its_window_and_completeness(desk, two_hours):
    given = desk.get("/v1/queries/flights/windows", headers={"Accept": "text/csv"})
    assert given.headers["content-type"].startswith("text/csv")
    rows = pyarrow.csv.read_csv(io.BytesIO(given.content)).to_pylist()
    assert [(r["carrier"], r["n"], r["miles_upper"]) for r in rows] == [
        ("AA", 1, 100), ("UA", 5, 500), ("DL", 4, 400), ("UA", 5, 500),
    ]  # fmt: skip
    assert {r["completeness"] for r in rows} == {1}
    assert given.text.splitlines()[1].startswith('"2013-01-01T00:00:00Z","2013-01-01T01:00:00Z","final",2,1,"2013')


DAMAGED = {
    "facts": {"quality": '{"format":2,"facts":{"expected":'},
    "newer format": {"quality": '{"format":3,"facts":{}}'},
    "text of late records": {"late": '{"late": "many"'},
    "late records": {"late": '["late"]'},
    "data": {"synopsis": b"no synopsis"},
    "an evaluator that fails": {"synopsis": b"an evaluator fails"},
}


@pytest.mark.parametrize("damaged", DAMAGED)
def test_an_answer_that_cannot_be_read_costs_only_itself(desk, two_hours, damaged, monkeypatch):
    read = GroupedAggregate.from_bytes

    def faulty(data: bytes, **options: bool) -> GroupedAggregate:
        if data == b"an evaluator fails":
            raise ZeroDivisionError("no evaluator foresees this")
        return read(data, **options)

    monkeypatch.setattr(GroupedAggregate, "from_bytes", staticmethod(faulty))
    whole = desk.get("/v1/queries/flights/windows").json()["answers"]
    with desk.results.engine.begin() as connection:
        this = update(stored_answers).where(stored_answers.c.window_start_ms == T0)
        connection.execute(this.values(**DAMAGED[damaged]))
    app = desk.app()  # without the answers that were rendered before the damage
    first, second = desk.get("/v1/queries/flights/windows", app=app).json()["answers"]
    assert second == whole[1]
    assert [v["code"] for v in first["contract"]["violations"]][-1] == "unreadable-data"
    assert not first["contract"]["met"] and first["data"] == [] and first["total"] == {} == first["rest"]
    for form in ("csv", "arrow"):
        assert desk.get("/v1/queries/flights/windows", params={"format": form}, app=app).status_code == 200
    (rolled,) = desk.get("/v1/queries/flights/rollup?every=2h", app=app).json()["answers"]
    assert not rolled["contract"]["met"] and all(row["n"]["upper"] is None for row in rolled["data"])
    lines = [json.dumps({"id": 1, "latest": 2, "measure": "n"})]
    replies = desk.ask("POST", "/v1/queries/flights/evaluate", content="\n".join(lines), app=app)
    old, new = (json.loads(line) for line in replies.text.splitlines())
    assert old["data"] == [] and new["data"]
    selected = desk.ask("POST", "/v1/sql", json={"sql": "SELECT n, contract FROM flights"}, app=app)
    assert selected.status_code == 200
    assert sum("unreadable-data" in contract for _, contract in selected.json()["rows"]) == 1
    start, end = f"{T0 / 1000 + 3600:.0f}", f"{T0 / 1000 + 7200:.0f}"
    path = f"/prometheus/api/v1/query_range?query=flights:n&start={start}&end={end}&step=3600"
    assert desk.get(path, app=app).status_code == 200
    assert desk.get(f"/v1/queries/flights/windows/{T0 + HOUR}/explain", app=app).status_code == 200
    counts = desk.get("/metrics", app=app).text.splitlines()
    (count,) = (line for line in counts if line.startswith("edgewater_unreadable_answers_total"))
    assert float(count.split()[1]) >= 4


def test_arrow_is_a_stream_whose_schema_carries_each_answers_quality(desk, two_hours):
    given = desk.get("/v1/queries/flights/windows", headers={"Accept": ARROW})
    table = pa.ipc.open_stream(given.content).read_all()
    assert table.column("window_start").type == pa.timestamp("ms", "UTC")
    assert table.column("n").to_pylist() == [1, 5, 4, 5]
    stated = json.loads(table.schema.metadata[b"edgewater.answers"])
    assert [a["quality"]["completeness"]["ratio"] for a in stated] == [1, 1]
    assert "data" not in stated[0]


def test_no_answers_are_an_empty_table_in_any_form(desk):
    desk.register_over("jfk")
    for form in ("text/csv", ARROW):
        given = desk.get("/v1/queries/flights/windows", headers={"Accept": form})
        assert given.status_code == 200
    assert pa.ipc.open_stream(given.content).read_all().num_rows == 0


def test_columns_of_an_answer_give_way_to_a_measure_of_that_name(desk):
    query = desk.register_over("jfk", measures={"revision": "count()"})
    desk.report(query, "jfk", T0, {"UA": 3})
    (row,) = pyarrow.csv.read_csv(
        io.BytesIO(desk.get("/v1/queries/flights/latest", headers={"Accept": "text/csv"}).content)
    ).to_pylist()
    assert (row["revision"], row["answer_revision"]) == (3, 1)


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (None, "application/json"),
        ("*/*", "application/json"),
        ("text/*", "text/csv"),
        ("text/html, text/csv;q=0.5, application/json;q=0.4", "text/csv"),
        ("application/json;q=0, */*", "text/csv"),
        (f"{ARROW}, */*;q=0.1", ARROW),
    ],
)
def test_the_form_is_the_one_that_accept_prefers(desk, two_hours, accept, form):
    headers = {"Accept": accept} if accept else {}
    assert desk.get("/v1/queries/flights/latest", headers=headers).headers["content-type"].partition(";")[0] == form


def test_a_form_that_is_not_given_is_refused_by_name(desk, two_hours):
    refused = desk.get("/v1/queries/flights/latest", headers={"Accept": "text/html"})
    assert refused.status_code == 406
    assert refused.json()["type"] == "https://edgewater.dev/problems/not-acceptable"
    assert ARROW in refused.json()["detail"]


def test_groups_and_measures_are_given_as_asked(desk, two_hours):
    path = f"/v1/queries/flights/windows/{T0}"
    ua = desk.get(f"{path}?group=carrier:UA&measure=miles&measure=n").json()["data"]
    assert ua == [
        {
            "group": {"carrier": "UA"},
            "n": {"estimate": 5, "lower": 5, "upper": 5},
            "miles": {"estimate": 500, "lower": 500, "upper": 500},
        }
    ]
    assert len(desk.get(f"{path}?group=carrier:UA&group=carrier:AA").json()["data"]) == 2
    assert desk.get(f"{path}?group=carrier:XX").json()["data"] == []
    csv = desk.get(f"{path}?group=carrier:UA&measure=n", headers={"Accept": "text/csv"}).text.splitlines()
    own = [
        "window_start",
        "window_end",
        "phase",
        "revision",
        "completeness",
        "given_at",
        "contract",
        "withheld",
        "version",
    ]
    assert csv[0] == ",".join(f'"{name}"' for name in (*own, "carrier", "n", "n_lower", "n_upper"))
    assert len(csv) == 2


def test_a_missing_group_value_is_asked_for_as_null(desk):
    query = desk.register_over("jfk")
    desk.report(query, "jfk", T0, {None: 2, "UA": 1})
    for form in ("application/json", ARROW):
        given = desk.get("/v1/queries/flights/latest?group=carrier:null&measure=n", headers={"Accept": form})
        if form == ARROW:
            assert pa.ipc.open_stream(given.content).read_all().column("n").to_pylist() == [2]
        else:
            assert [row["n"]["estimate"] for row in given.json()["data"]] == [2]


@pytest.mark.parametrize(
    ("asked", "field", "said"),
    [
        ("group=UA", "group", "one of the columns carrier"),
        ("group=airport:JFK", "group", "one of the columns carrier"),
        ("measure=delays", "measure", "one of n, miles, delay"),
        ("quantile=2", "quantile", "a rank from 0 to 1"),
        ("quantile=nan", "quantile", "a rank from 0 to 1"),
        ("confidence=1.5", "confidence", "less than 1"),
        ("confidence=0.9999999999999999", "confidence", "between 0 and 1"),
        ("qantile=0.5", "qantile", "no such parameter"),
        ("limit=0", "limit", "greater than or equal to 1"),
        ("start=yesterday", "start", "RFC 3339"),
        ("start=2013-01-01T00:00:00", "start", "with an offset"),
        ("start=99999999999999999", "start", "RFC 3339"),
        (f"start={T0}&end={T0 - 1}", "end", "not before start"),
        ("cursor=x", "cursor", "cursor"),
        ("compute=n / miles", "compute", "name: expression"),
        ("compute=each: miles / m", "compute", "unknown number m"),
        ("having=n >", "having", "SQL expression"),
        ("having=m > 1", "having", "unknown column"),
        ("order=-m", "order", "unknown column m"),
        ("limit_groups=0", "limit_groups", "greater than or equal to 1"),
    ],
)
def test_a_wrong_parameter_is_named_with_what_is_accepted(desk, two_hours, asked, field, said):
    refused = desk.get(f"/v1/queries/flights/windows?{asked}")
    assert refused.status_code == 422
    assert refused.headers["content-type"] == "application/problem+json"
    problem = refused.json()
    assert problem["type"] == "https://edgewater.dev/problems/invalid-request"
    assert problem["field"] == field
    assert said in problem["detail"]


def test_unanswerable_questions_are_refused_and_exact_measures_accept_any_confidence(desk, two_hours):
    refused = desk.get("/v1/queries/flights/latest?quantile=0.5&quantile=0.99")
    assert refused.status_code == 422 and refused.json()["field"] == "quantile"
    assert "n: count; miles: count, sum" in refused.json()["accepted"]
    assert desk.get("/v1/queries/flights/latest?confidence=0.99").json()["confidence"] == 1


def test_computed_values_and_the_selection_of_groups_are_part_of_every_answer(desk):
    query = desk.register_over("jfk")
    desk.report(query, "jfk", T0, {"UA": 4, "AA": 1, "DL": 3})
    asked = "compute=per_flight: miles / n&having=n_lower >= 3&order=-n&limit_groups=1&measure=n"
    (row,) = desk.get(f"/v1/queries/flights/latest?{asked}").json()["data"]
    assert row["group"] == {"carrier": "UA"} and set(row) == {"group", "n", "per_flight"}
    page = desk.get(f"/v1/queries/flights/windows?{asked}").json()
    assert page["answers"][0]["data"] == [row]
    csv = desk.get(f"/v1/queries/flights/latest?{asked}", headers={"Accept": "text/csv"}).text.splitlines()
    assert csv[0].endswith('"per_flight","per_flight_lower","per_flight_upper"') and len(csv) == 2
    hour = desk.get(f"/v1/queries/flights/rollup?every=2h&{asked}").json()
    assert [r["group"] for r in hour["answers"][0]["data"]] == [{"carrier": "UA"}]


def test_quantiles_are_given_at_the_ranks_that_are_asked_for(desk):
    query = desk.register_over("jfk", measures={"delay": "quantiles(dep_delay)", "delay_most": "max(dep_delay)"})
    desk.report(query, "jfk", T0, {"UA": 101})
    path = "/v1/queries/flights/latest"
    assert set(desk.get(path).json()["data"][0]["delay"]["quantiles"]) == {"0.5", "0.9", "0.95", "0.99"}
    asked = desk.get(f"{path}?quantile=0.25&quantile=0.5").json()["data"][0]
    assert set(asked["delay"]["quantiles"]) == {"0.25", "0.5"}
    assert asked["delay"]["quantiles"]["0.5"]["estimate"] == pytest.approx(50, rel=0.02)
    csv = desk.get(f"{path}?quantile=0.5&measure=delay", headers={"Accept": "text/csv"}).text.splitlines()
    assert csv[0].endswith('"carrier","delay_0.5","delay_0.5_lower","delay_0.5_upper"')


def test_intervals_are_made_for_any_confidence_where_that_can_be_done_and_refused_by_name_where_not(desk):
    desk.connect("jfk")
    measures = {"delays": "distinct(dep_delay, precision=8)", "miles": "count_min(distance, width=64, depth=2)"}
    desk.report(desk.register(measures=measures), "jfk", T0, {"UA": 3000})
    path = "/v1/queries/flights/windows?measure=delays&confidence="
    widths = []
    for confidence in (0.5, 0.999):
        (answer,) = desk.get(f"{path}{confidence}").json()["answers"]
        assert answer["confidence"] == confidence
        cell = answer["data"][0]["delays"]
        widths.append(cell["upper"] - cell["lower"])
    assert widths[0] < widths[1]
    asked = "/v1/queries/flights/latest?measure=miles&item=100&confidence="
    assert desk.get(f"{asked}0.8").json()["confidence"] == pytest.approx(1 - np.exp(-2))
    refused = desk.get(f"{asked}0.9")
    assert refused.status_code == 422
    assert "miles is given at 0.864665" in refused.json()["reason"]


def test_a_page_of_large_answers_ends_early_and_the_next_one_goes_on(desk, two_hours, monkeypatch):
    monkeypatch.setattr("center.api.routers.answers.PAGE_BYTES", 1)
    first = desk.get("/v1/queries/flights/windows?limit=100").json()
    assert len(first["answers"]) == 1
    second = desk.get(f"/v1/queries/flights/windows?limit=100&cursor={first['next_cursor']}").json()
    assert (len(second["answers"]), second["next_cursor"]) == (1, None)


def test_a_window_that_has_no_answer_is_not_found_by_its_time(desk, two_hours):
    missing = desk.get(f"/v1/queries/flights/windows/{T0 + 9 * HOUR}")
    assert missing.status_code == 404
    assert "2013-01-01T09:00:00Z" in missing.json()["detail"]
    assert desk.get("/v1/queries/flights/windows/soon").status_code == 422


def test_an_answer_is_rendered_once_for_all_who_ask_the_same(desk, two_hours):
    app = desk.app()
    for _ in range(3):
        desk.get("/v1/queries/flights/windows", app=app)
    renderings = app.state.services.metrics.renderings
    assert reading(renderings.labels("no")) == 2
    assert reading(renderings.labels("yes")) == 4
