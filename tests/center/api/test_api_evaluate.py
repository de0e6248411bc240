"""A stream of questions over HTTP: which windows, which groups, what is refused, and how it streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from center.api.evaluate_stream import MAX_LINE_BYTES, LineSplitter, OversizedLine
from center.serving.evaluator import Evaluator
from center.serving.question_lines import WindowQuestion
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
    desk.connect("jfk", "lga")
    query = desk.register(measures=MEASURES)
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
    desk.connect("jfk")
    query = desk.register(window={"sliding": "2h", "every": "1h"}, measures=MEASURES)
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
    desk.connect("jfk")
    query = desk.register(measures=measures, budget={"error": {"miles": 10}})
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
    ("{not json", "", "a line of JSON"),
    (r'{"id": "\ud800", "latest": 1, "measure": "n"}', "", "a line of JSON"),
    (r'{"latest": 1, "measure": "n", "group": {"carrier": "\ud800"}}', "", "a line of JSON"),
    ('{"id": 1e400, "latest": 1, "measure": "n"}', "", "1e400 is out of range"),
    ("[1]", "", "an object"),
    ('{"latest": NaN}', "", "a line of JSON"),
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
    ({"latest": 1, "measure": "n", "colour": "red"}, "colour", "unknown field"),
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
    refused = asked.desk.ask("POST", PATH, content="x", headers={"Content-Type": "text/csv"})
    assert refused.status_code == 415


def test_a_line_that_is_too_long_is_refused_without_being_kept(asked):
    long = json.dumps({"id": "x" * MAX_LINE_BYTES})
    bad, good = asked(long, {"id": 2, "latest": 1, "measure": "n", "global": True})
    assert f"at most {MAX_LINE_BYTES} bytes" in bad["error"]["detail"] and good["id"] == 2
    lines = LineSplitter()
    for _ in range(100):
        assert list(lines.feed(b"y" * 10_000)) == []
        assert len(lines._rest) <= MAX_LINE_BYTES + 1
    (found,) = lines.feed(b"\n")
    assert isinstance(found, OversizedLine)
    assert list(lines.feed(b'{"id":\r\n\n 1}\n')) == [b'{"id":\r\n', b" 1}\n"]


def test_new_answers_are_seen_by_a_stream_that_is_open(asked):
    """The second part of the body is sent only when the first has been answered: both streams at once."""
    desk, app = asked.desk, asked.desk.app()
    question = b'{"latest":1,"measure":"n","global":true}\n'
    sent: list[dict[str, Any]] = []
    received: list[int] = []

    async def exchange() -> None:
        answered = asyncio.Event()

        async def receive() -> dict[str, Any]:
            received.append(1)
            if len(received) > 2:
                await asyncio.Event().wait()
            if len(received) == 2:
                await answered.wait()
            return {"type": "http.request", "body": question, "more_body": len(received) == 1}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if message["type"] == "http.response.body" and message["body"] and not answered.is_set():
                query = desk.catalog.queries.get("flights")
                desk.now += HOUR
                desk.report(query, "jfk", T0 + 2 * HOUR, {"UA": 100})
                answered.set()

        await app(_scope(), receive, send)

    def bodies() -> list[dict[str, Any]]:
        return [json.loads(m["body"]) for m in sent if m["type"] == "http.response.body" and m["body"]]

    asyncio.run(asyncio.wait_for(exchange(), 30))
    assert [(b["estimate"], b["revision"]) for b in bodies()] == [(15, 1), (115, 2)]


@pytest.mark.slow
def test_a_client_that_leaves_stops_the_work(asked):
    app = asked.desk.app()
    line = b'{"latest":3,"measure":"n"}\n'
    received = 0

    async def exchange() -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            nonlocal received
            received += 1
            if received > 3:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": line * 2000, "more_body": True}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await app(_scope(), receive, send)
        return sent

    sent = asyncio.run(asyncio.wait_for(exchange(), 60))
    answered = sum(m["body"].count(b"\n") for m in sent if m["type"] == "http.response.body")
    assert received == 4, "nothing is received after the client has left"
    assert answered < 3 * 2000 * 3, "what was still waiting is not evaluated"


def _scope() -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": PATH, "raw_path": PATH.encode(), "query_string": b"", "root_path": "", "headers": [],
        "client": ("test", 1), "server": ("center", 80),
    }  # fmt: skip


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


def test_an_internal_error_fails_its_own_line_only(asked, monkeypatch, caplog):
    answer = Evaluator.answer

    def faulty(self: Evaluator, line: WindowQuestion) -> Iterator[dict[str, Any]]:
        assert line.id != "bad", "a fault"
        return answer(self, line)

    monkeypatch.setattr(Evaluator, "answer", faulty)
    first, second = asked(*({"id": i, "latest": 1, "measure": "n", "global": True} for i in ("bad", "good")))
    assert (first["id"], first["error"]["status"]) == ("bad", 500)
    assert second["estimate"] == 15
    assert "a fault" in caplog.text
