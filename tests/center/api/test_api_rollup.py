"""Roll-ups over HTTP: longer intervals from stored windows, and what they state."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import numpy as np
import pyarrow.csv
import pytest

from center.api.models import AnswerPage
from center.api.routers import rollup
from edgewater.wire import Withheld

HOUR = 3_600_000
T0 = 1_356_998_400_000
MEASURES = {"n": "count()", "d": "sum(dep_delay)", "most": "max(dep_delay)", "q": "quantiles(dep_delay)"}
FLIGHTS = [{"UA": 3, "AA": 1}, {"UA": 5}, {}, {"DL": 4, "AA": 2}, {"UA": 1}]
PATH = "/v1/queries/flights/rollup"


@pytest.fixture
def five_hours(desk):
    """One edge and five hours, complete."""
    query = desk.register_over("jfk", measures=MEASURES)
    for number, flights in enumerate(FLIGHTS):
        desk.report(query, "jfk", T0 + number * HOUR, flights, delay_from=10.0 * number)
    return desk, query


def page(desk, **params: Any) -> dict[str, Any]:
    response = desk.get(PATH, params=params)
    assert response.status_code == 200, response.text
    AnswerPage.model_validate(response.json())
    return dict(response.json())


def counts(answer: dict[str, Any]) -> dict[str, int]:
    return {row["group"]["carrier"]: row["n"]["estimate"] for row in answer["data"]}


def test_intervals_have_the_values_of_all_their_records(five_hours):
    desk, _ = five_hours
    answers = page(desk, every="3h")["answers"]
    assert [a["window"]["start"] for a in answers] == ["2013-01-01T00:00:00Z", "2013-01-01T03:00:00Z"]
    assert [counts(a) for a in answers] == [{"AA": 1, "UA": 8}, {"AA": 2, "DL": 4, "UA": 1}]
    first = {row["group"]["carrier"]: row for row in answers[0]["data"]}["UA"]
    delays = np.concatenate([np.arange(3), 10 + np.arange(5)])
    assert (first["d"]["estimate"], first["most"]["estimate"]) == (delays.sum(), delays.max())
    assert (first["d"]["lower"], first["d"]["upper"]) == (delays.sum(), delays.sum())
    median = first["q"]["quantiles"]["0.5"]
    assert median["lower"] <= np.quantile(delays, 0.5, method="lower") <= median["upper"]
    assert answers[0]["total"]["n"]["lower"] == 9
    assert answers[0]["quality"]["completeness"] == {
        "ratio": 1.0, "expected": 1, "reported": 1, "missing": [], "windows": 3,
    }  # fmt: skip
    assert answers[0]["contract"]["met"] is True


def test_an_interval_whose_windows_are_not_all_answered_has_no_upper_bounds(five_hours):
    desk, _ = five_hours
    last = page(desk, every="3h")["answers"][1]
    completeness = last["quality"]["completeness"]
    assert (completeness["windows"], completeness["unanswered"]) == (3, 1)
    assert not last["contract"]["met"] and [v["code"] for v in last["contract"]["violations"]] == ["unanswered-windows"]
    assert completeness["ratio"] == pytest.approx(2 / 3)
    row = last["data"][0]
    assert (row["n"]["lower"], row["n"]["upper"]) == (2, None)
    assert row["d"]["lower"] is row["d"]["upper"] is None
    assert last["total"]["n"]["upper"] is None
    assert desk.get(PATH, params={"every": "3h", "require": "complete"}).status_code == 409


def test_what_edges_withhold_adds_up(desk):
    query = desk.register_over("jfk", "lga", measures={"n": "count()"}, budget={"error": {"n": 4}})
    for number in range(2):
        withheld = (Withheld("n", 1.0, 0.0, 2, above_share=None, below_share=None),)
        desk.report(query, "jfk", T0 + number * HOUR, {"UA": 3}, withheld=withheld)
        desk.report(query, "lga", T0 + number * HOUR, {"UA": 2})
    (answer,) = page(desk, every="2h")["answers"]
    assert answer["quality"]["error"]["withheld"]["n"]["above"] == 2.0
    assert (answer["data"][0]["n"]["lower"], answer["data"][0]["n"]["upper"]) == (10, 12)
    assert answer["contract"]["requested"] == {"error": {"n": 4}} and not answer["contract"]["met"]
    assert [v["code"] for v in answer["contract"]["violations"]] == ["budget-per-window"]
    (alone, _) = page(desk, every="1h")["answers"]
    assert alone["contract"]["met"], "one window is what the budget is about"


def test_days_begin_at_midnight_of_their_zone(five_hours):
    desk, query = five_hours
    desk.report(query, "jfk", T0 + 40 * HOUR, {"UA": 7})
    for zone, begins in (
        ("UTC", ["2013-01-01T00:00:00Z", "2013-01-02T00:00:00Z"]),
        ("America/New_York", ["2012-12-31T05:00:00Z", "2013-01-02T05:00:00Z"]),
        ("Europe/Berlin", ["2012-12-31T23:00:00Z", "2013-01-01T23:00:00Z"]),
    ):
        answers = page(desk, every="day", zone=zone)["answers"]
        assert [a["window"]["start"] for a in answers] == begins
        assert answers[-1]["quality"]["completeness"]["windows"] == 24
        total = Counter[str]()
        for answer in answers:
            total.update(counts(answer))
        assert total == Counter({"UA": 16, "DL": 4, "AA": 3})
    for unit in ("week", "month", "quarter", "year"):
        assert sum(counts(a)["UA"] for a in page(desk, every=unit)["answers"]) == 16


def test_sliding_windows_are_merged_where_they_do_not_overlap(desk):
    query = desk.register_over("jfk", measures={"n": "count()"}, window={"sliding": "2h", "every": "1h"})
    for number, flights in enumerate(FLIGHTS):
        desk.report(query, "jfk", T0 + number * HOUR, flights)
    (answer,) = page(desk, every="4h", start=T0, end=T0 + 1)["answers"]
    assert counts(answer) == {"AA": 3, "DL": 4, "UA": 8}


def test_pages_and_ranges(five_hours):
    desk, _ = five_hours
    first = page(desk, every="1h", limit=2)
    assert [counts(a) for a in first["answers"]] == FLIGHTS[:2]
    second = page(desk, every="1h", limit=2, cursor=first["next_cursor"])
    assert [counts(a) for a in second["answers"]] == FLIGHTS[2:4]
    third = page(desk, every="1h", limit=2, cursor=second["next_cursor"])
    assert [counts(a) for a in third["answers"]] == FLIGHTS[4:] and third["next_cursor"] is None
    inside = page(desk, every="2h", start=T0 + HOUR + 1, end=T0 + 2 * HOUR)["answers"]
    assert [counts(a) for a in inside] == [{"AA": 1, "UA": 8}], "whole intervals"


def test_forms_filters_and_etags(five_hours):
    desk, query = five_hours
    response = desk.get(PATH, params={"every": "3h", "format": "csv", "group": "carrier:UA", "quantile": 0.5})
    table = pyarrow.csv.read_csv(io.BytesIO(response.content))
    assert table.column("n").to_pylist() == [8, 1] and "q_0.5" in table.column_names
    etag = desk.get(PATH, params={"every": "3h"}).headers["etag"]
    assert desk.get(PATH, params={"every": "3h"}, headers={"If-None-Match": etag}).status_code == 304
    assert desk.get(PATH, params={"every": "1h"}).headers["etag"] != etag
    desk.report(query, "jfk", T0 + 5 * HOUR, {"UA": 1})
    assert desk.get(PATH, params={"every": "3h"}, headers={"If-None-Match": etag}).status_code == 200


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({}, "every"),
        ({"every": "fortnight"}, "every"),
        ({"every": "90m"}, "every"),
        ({"every": "-1h"}, "every"),
        ({"every": "day", "zone": "Mars/Base"}, "zone"),
        ({"every": "day", "zone": "Asia/Kolkata"}, "every"),
        ({"every": "day", "start": "9999-99-99"}, "start"),
        ({"every": "1h", "start": T0, "end": T0 - 1}, "end"),
        ({"every": "1h", "limit": 0}, "limit"),
        ({"every": "1h", "group": "x:y"}, "group"),
    ],
)
def test_bad_requests_name_the_parameter(five_hours, params, field):
    desk, _ = five_hours
    response = desk.get(PATH, params=params)
    assert response.status_code == 422
    assert response.json()["field"] == field and response.json()["accepted"]


def test_sessions_are_refused(desk):
    desk.register_over("jfk", window={"session": "1h"})
    response = desk.get(PATH, params={"every": "1d"})
    assert response.status_code == 422 and response.json()["field"] == "every"


def test_a_request_merges_a_bounded_number_of_windows(five_hours, monkeypatch):
    desk, _ = five_hours
    monkeypatch.setattr(rollup, "MAX_WINDOWS", 3)
    response = desk.get(PATH, params={"every": "1d"})
    assert response.status_code == 422 and response.json()["field"] == "every"
    first = page(desk, every="2h")
    assert [counts(a) for a in first["answers"]] == [{"AA": 1, "UA": 8}]
    second = page(desk, every="2h", cursor=first["next_cursor"])["answers"]
    assert [counts(a) for a in second] == [{"AA": 2, "DL": 4}, {"UA": 1}]
