"""Questions over HTTP: which windows, which groups, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from center.api.routers.evaluate import MAX_BODY_BYTES
from center.serving.question_lines import MAX_QUESTIONS
from center.serving.stored_windows import StoredWindows
from center.serving.synopsis_cache import SynopsisCache
from edgewater.wire import Withheld

HOUR, T0 = 3_600_000, 1_356_998_400_000
PATH = "/v1/queries/flights/evaluate"
MEASURES = {
    "n": "count()", "miles": "count_min(distance, width=64)", "delays": "kll(dep_delay)",
    "carriers": "distinct(carrier)",
    "top": "top_k(carrier, 2)", "seen": "bloom(carrier)", "join": "fast_agms(distance, width=64)",
    "some": "reservoir(dep_delay, 10)",
}  # fmt: skip


@pytest.fixture
def asked(desk):
    """Three hours of two edges, and a function that puts lines to them."""
    query = desk.register_over("jfk", "lga", measures=MEASURES)
    for hour in range(3):
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 3 + hour, "AA": 1})
        desk.report(query, "lga", T0 + hour * HOUR, {"UA": 2, "DL": 7})

    def ask(*lines: Any, path: str = PATH) -> list[dict[str, Any]]:
        body = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        given = desk.ask("POST", path, content=body.encode(), headers={"Content-Type": "application/x-ndjson"})
        assert given.status_code == 200, given.text
        assert given.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in given.content.splitlines()]

    ask.desk = desk
    return ask


def test_a_group_is_asked_in_the_latest_window(asked):
    (line,) = asked({"id": "a", "latest": 1, "measure": "miles", "question": "frequency", "item": 100,
                     "group": {"carrier": "UA"}})  # fmt: skip
    assert line.pop("confidence") == pytest.approx(1 - 2.718281828**-5)
    assert line == {
        "id": "a", "query": "flights", "measure": "miles", "question": "frequency", "group": {"carrier": "UA"},
        "window": {"start": "2013-01-01T02:00:00Z", "end": "2013-01-01T03:00:00Z"}, "phase": "complete", "revision": 1,
        "completeness": {"ratio": 1.0, "expected": 2, "reported": 2, "missing": []},
        "estimate": 7, "lower": 7, "upper": 7, "basis": "count_min",
    }  # fmt: skip


def test_without_a_group_each_has_a_row_and_global_merges_them(asked):
    each, together = asked(
        {"latest": 1, "measure": "miles"}, {"latest": 1, "measure": "miles", "question": "count", "global": True}
    )
    assert [(r["group"]["carrier"], r["estimate"]) for r in each["data"]] == [("AA", 1), ("DL", 7), ("UA", 7)]
    assert (together["estimate"], together["lower"]) == (15, 15) and "data" not in together
    (distinct,) = asked({"latest": 1, "measure": "carriers", "global": True})
    assert distinct["estimate"] == pytest.approx(3, rel=0.01), "a merge of HyperLogLogs, not a sum"


@pytest.mark.slow
def test_the_last_windows_have_a_line_each_or_one_together(asked):
    lines = asked({"latest": 9, "measure": "n", "group": {"carrier": "UA"}})
    assert [line["estimate"] for line in lines] == [5, 6, 7]
    (merged,) = asked({"latest": 2, "measure": "n", "group": {"carrier": "UA"}, "merge": True})
    assert merged["estimate"] == 13
    assert merged["window"] == {"start": "2013-01-01T01:00:00Z", "end": "2013-01-01T03:00:00Z"}
    assert [w["revision"] for w in merged["windows"]] == [2, 1] and merged["phase"] == "complete"


def test_a_time_and_a_start_name_windows(asked):
    at, start = asked(
        {"at": "2013-01-01T01:30:00Z", "measure": "n", "global": True}, {"window": T0, "measure": "n", "global": True}
    )
    assert (at["estimate"], start["estimate"], start["phase"]) == (14, 13, "final")


def test_overlapping_windows_merge_only_idempotent_measures(desk):
    query = desk.register_over("jfk", window={"sliding": "2h", "every": "1h"}, measures=MEASURES)
    for hour in range(3):
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 3, "AA": 1})
    body = "".join(
        json.dumps({"id": m, "at": T0 + HOUR - 1, "measure": m, "global": True, "merge": True}) + "\n"
        for m in ("n", "carriers")
    )
    lines = [json.loads(line) for line in desk.ask("POST", PATH, content=body).content.splitlines()]
    assert "overlap" in lines[0]["error"]["reason"] and lines[0]["error"]["status"] == 422
    assert lines[1]["estimate"] == pytest.approx(2, rel=0.01)


def test_every_kind_of_question_has_an_answer(asked):
    lines = asked(
        {"id": "q", "latest": 1, "measure": "delays", "question": "quantile", "q": 0.5, "group": {"carrier": "DL"}},
        {"id": "r", "latest": 1, "measure": "delays", "question": "rank", "x": 3, "group": {"carrier": "DL"}},
        {"id": "t", "latest": 1, "measure": "top", "question": "top", "k": 1, "global": True},
        {"id": "c", "latest": 1, "measure": "seen", "question": "contains", "item": "ZZ", "global": True},
        {"id": "s", "latest": 1, "measure": "some", "question": "range", "lo": 0, "hi": 2, "group": {"carrier": "DL"}},
        {"id": "j", "latest": 1, "measure": "join", "question": "join_size", "global": True,
         "with": {"query": "flights", "measure": "join", "group": {"carrier": "DL"}}},
        {"id": "g", "latest": 1, "measure": "top", "question": "top"},
        {"id": "w", "latest": 1, "measure": "carriers", "global": True, "question": "distinct", "confidence": 0.5},
    )  # fmt: skip
    by_id = {line["id"]: line for line in lines}
    assert [line["id"] for line in lines] == list("qrtcsjgw"), "answers come in the order of the questions"
    assert not any("error" in line for line in lines), lines
    assert by_id["q"]["estimate"] == by_id["q"]["lower"] == 5
    assert by_id["r"]["lower"] <= by_id["r"]["estimate"] <= by_id["r"]["upper"]
    assert [e["estimate"] for e in by_id["t"]["top"]] == [7] and by_id["t"]["top"][0]["item"] in ("DL", "UA")
    assert by_id["c"]["estimate"] == 0
    assert by_id["s"]["estimate"] == 1, "the delays are 2 to 8, and the sample holds all of them"
    assert by_id["j"]["estimate"] == 15 * 7, "all flights go the same distance"
    assert [row["top"][0]["item"] for row in by_id["g"]["data"]] == ["AA", "DL", "UA"]
    assert by_id["w"]["confidence"] == 0.5


@pytest.mark.parametrize(
    ("measures", "withheld", "upper"),
    [
        ({"miles": "sum(distance)"}, ("miles",), None),
        # Of records of 0 miles nothing is stated.
        ({"miles": "sum(distance)"}, (), None),
        ({"miles": "sum(distance)", "n": "count()"}, ("n",), 5 + 9),
        ({"miles": "sum(distance)", "n": "count()"}, (), 5),
    ],
    ids=["stated", "of zeros", "of records", "nothing"],
)
def test_the_withheld_bound_of_a_sum_does_not_bound_the_number_of_missing_records(desk, measures, withheld, upper):
    query = desk.register_over("jfk", measures=measures, budget={"error": {"miles": 10}})
    stated = tuple(Withheld(name, 9.0, 0.0, 1) for name in withheld)
    desk.report(query, "jfk", T0, {"UA": 5}, withheld=stated)
    asked = [{"latest": 1, "measure": "miles", "question": q, "group": {"carrier": "UA"}} for q in ("sum", "count")]
    body = "\n".join(map(json.dumps, asked))
    total, count = map(json.loads, desk.ask("POST", PATH, content=body).content.splitlines())
    assert (total["estimate"], total["lower"]) == (500, 500)
    assert total["upper"] == (509 if "miles" in withheld else 500)
    assert (count["estimate"], count["lower"], count["upper"]) == (5, 5, upper)


@pytest.mark.slow
def test_the_cache_of_lookups_is_bounded_by_the_windows_in_it(asked, monkeypatch):
    desk = asked.desk
    monkeypatch.setattr("center.serving.stored_windows._CACHED_WINDOWS", 8)
    windows = StoredWindows(
        desk.results, desk.catalog.queries.get("flights"), SynopsisCache(1 << 20), desk.catalog.queries.get
    )
    for count in (1, 2, 3):
        assert len(windows.latest(count)) == count
        assert len(windows.at(T0 + count)) == 1
    assert sum(map(len, windows._lookups.values())) < 8
    monkeypatch.setattr("center.serving.stored_windows._CACHED_WINDOWS", 3)
    windows = StoredWindows(
        desk.results, desk.catalog.queries.get("flights"), SynopsisCache(1 << 20), desk.catalog.queries.get
    )
    assert len(windows.latest(3)) == 3, "more than can be remembered is given all the same"


BAD_LINES: list[tuple[Any, str, str]] = [
    ("[1]", "", "an object"),
    ({"measure": "n"}, "", "which windows"),
    ({"latest": 0, "measure": "n"}, "latest", "from 1 to 1000"),
    ({"latest": 1, "at": T0, "measure": "n"}, "", "which windows"),
    ({"at": "yesterday", "measure": "n"}, "at", "RFC 3339"),
    ({"latest": 1}, "measure", "one of n, miles"),
    ({"latest": 1, "measure": "delay"}, "measure", "one of n, miles"),
    ({"latest": 1, "measure": "n", "question": "median"}, "question", "unknown question"),
    ({"latest": 1, "measure": "n", "question": "quantile", "q": 0.5}, "question", "one of count"),
    ({"latest": 1, "measure": "delays", "question": "quantile"}, "q", "requires it"),
    ({"latest": 1, "measure": "delays", "question": "quantile", "q": 2}, "q", "rank from 0 to 1"),
    ({"latest": 1, "measure": "miles", "question": "frequency", "item": "far"}, "item", "type int64"),
    ({"latest": 1, "measure": "miles", "question": "frequency", "item": [1]}, "item", "type int64"),
    ({"latest": 1, "measure": "top", "question": "top", "k": 3}, "k", "from 1 to 2"),
    ({"latest": 1, "measure": "n", "group": {"airport": "JFK"}}, "group.airport", "columns carrier"),
    ({"latest": 1, "measure": "n", "group": {"carrier": 5}}, "group.carrier", "type string"),
    ({"latest": 1, "measure": "n", "group": {"carrier": "UA"}, "global": True}, "group", "not both"),
    ({"latest": 1, "measure": "n", "global": 1}, "global", "true or false"),
    ({"latest": 1, "measure": "n", "confidence": 1}, "confidence", "between 0 and 1"),
    ({"latest": 1, "measure": "delays", "confidence": 0.9999999999999999}, "confidence", "between 0 and 1"),
    ({"latest": 1, "measure": "miles", "question": "frequency", "item": 1, "confidence": 0.9999}, "confidence",
     "at most 0.993262"),
    ({"latest": 1, "measure": "n", "colour": "red"}, "colour", "unknown key"),
    ({"latest": 1, "measure": "join", "question": "join_size"}, "with", "about two"),
    ({"latest": 1, "measure": "join", "question": "join_size", "with": {"query": "flights", "measure": "miles"}},
     "with", "a measure with equal parameters"),
]  # fmt: skip


@pytest.mark.slow
def test_a_bad_line_is_answered_by_a_problem_and_the_others_go_on(asked):
    good = {"id": "good", "latest": 1, "measure": "n", "global": True}
    lines = [{"id": 7, **line} if isinstance(line, dict) else line for line, _, _ in BAD_LINES]
    answers = asked(*(each for line in lines for each in (line, good)))
    assert all(answer["id"] == "good" and answer["estimate"] == 15 for answer in answers[1::2])
    for (line, field, said), bad in zip(BAD_LINES, answers[::2], strict=True):
        assert set(bad) == {"id", "error"} and bad["id"] == (7 if isinstance(line, dict) else None), line
        problem = bad["error"]
        assert problem["type"] == "https://edgewater.dev/problems/invalid-request", line
        assert (problem["status"], problem["field"], problem["instance"]) == (422, field, PATH), line
        assert said in problem["detail"], line


@pytest.mark.slow
def test_missing_windows_are_reported_per_line_and_an_unknown_query_at_once(asked):
    lines = asked(
        {"window": 0, "measure": "n"},
        {"latest": 1, "measure": "n", "group": {"carrier": "ZZ"}},
        {"latest": 1, "measure": "join", "question": "join_size", "with": {"query": "nothing", "measure": "x"}},
    )
    assert [line["error"]["status"] for line in lines] == [404, 404, 404]
    assert asked.desk.ask("POST", "/v1/queries/nothing/evaluate").status_code == 404


@pytest.mark.parametrize(
    ("question", "field"),
    [
        ({"measure": "miles", "question": "frequency", "item": 10**400}, "item"),
        ({"measure": "delays", "question": "rank", "x": 10**400}, "x"),
        ({"measure": "delays", "question": "quantile", "q": 10**400}, "q"),
        ({"measure": "top", "question": "top", "k": 0}, "k"),
    ],
    ids=["item", "x", "q", "k"],
)
def test_a_number_out_of_range_is_refused_by_its_field_and_the_next_line_is_answered(asked, question, field):
    refused, answered = asked({"latest": 1, "global": True, **question}, {"latest": 1, "measure": "n", "global": True})
    assert (refused["error"]["status"], refused["error"]["field"]) == (422, field)
    assert answered["estimate"] == 15


QUESTION = '{"id": 5, "latest": 1, "measure": "n", "global": true}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", "line 2"),
        (r'{"id": "\ud800", "latest": 1, "measure": "n"}', "line 2"),
        (r'{"latest": 1, "measure": "n", "group": {"carrier": "\ud800"}}', "line 2"),
        ('{"id": 1e400, "latest": 1, "measure": "n"}', "1e400 is out of range"),
        ('{"latest": NaN}', "NaN is not JSON"),
        ('{"latest": 1, "latest": 2, "measure": "n"}', "duplicate key latest"),
        ("\n".join([QUESTION] * MAX_QUESTIONS), f"at most {MAX_QUESTIONS:,} questions"),
    ],
    ids=["syntax", "surrogate", "surrogate in a group", "range", "NaN", "twice", "many"],
)
def test_a_body_that_is_no_json_is_refused_with_its_line(asked, text, said):
    refused = asked.desk.ask("POST", PATH, content=f"{QUESTION}\n{text}")
    assert refused.status_code == 422 and said in refused.json()["detail"]


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [("x", "text/csv", 415), ("[", "application/json", 422), (" " * (MAX_BODY_BYTES + 1), "application/json", 413)],
    ids=["type", "syntax", "size"],
)
def test_other_bodies_are_refused(asked, content, kind, status):
    assert asked.desk.ask("POST", PATH, content=content, headers={"Content-Type": kind}).status_code == status


def test_json_has_one_question_or_a_list_and_the_answer_is_a_list(asked):
    question = json.loads(QUESTION)
    one, many = (asked.desk.ask("POST", PATH, json=asks) for asks in (question, [question, 1, {**question, "id": 6}]))
    assert [each.headers["content-type"] for each in (one, many)] == ["application/json"] * 2
    assert [(line["id"], line["estimate"]) for line in one.json()] == [(5, 15)]
    assert [(line["id"], line.get("estimate")) for line in many.json()] == [(5, 15), (None, None), (6, 15)]
    assert asked.desk.ask("POST", PATH, json=[]).json() == []
