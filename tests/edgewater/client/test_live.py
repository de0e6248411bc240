"""Live streams of the client: answers, progress and gaps, over restarts of the center; and what notebooks show."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from edgewater.base.errors import NotFound
from edgewater.client import Answer, Center, Gap, Progress
from edgewater.client.answers import from_json
from sim.demo.ports import free_address
from tests.center.api.conftest import HOUR, T0

EVERY_KIND = {
    "n": "count()", "miles": "sum(distance)", "delay": "mean(dep_delay)", "users": "distinct(carrier)",
    "delays": "quantiles(dep_delay)", "carriers": "top_k(carrier, 5)", "seen": "bloom(carrier)",
    "sample": "reservoir(dep_delay, size=10)", "spread": "equi_width(dep_delay, lo=0, hi=10, buckets=4)",
}  # fmt: skip


def answers(events: Iterator[Any], count: int) -> list[Answer]:
    found: list[Answer] = []
    for event in events:
        if isinstance(event, Answer):
            found.append(event)
            if len(found) == count:
                break
    return found


def test_a_live_stream_gives_the_latest_answer_then_progress_then_what_is_given(two_hours):
    desk, query = two_hours
    with desk.served(progress="100ms") as url, Center(url) as center:
        events = center.query("flights").live(measure="n")
        first, progress = next(events), next(events)
        assert (first.start.hour, first["n"]["DL"] == 4, first.measures) == (1, True, ["n"])
        assert isinstance(progress, Progress)
        assert progress.edges["jfk"]["state"] == "up"
        desk.report_both(query, T0 + 2 * HOUR, {"UA": 1})
        assert {a.start.hour for a in answers(events, 2)} == {1, 2}


@pytest.mark.slow
def test_it_resumes_after_the_last_answer_when_the_center_has_restarted(two_hours, monkeypatch):
    desk, query = two_hours
    monkeypatch.setattr("edgewater.client.center.RECONNECT", lambda state: 0.02)
    address = free_address()
    served = desk.served(address=address)
    url = served.__enter__()
    with Center(url) as center:
        events = center.query("flights").live(group={"carrier": "UA"})
        assert answers(events, 1)[0].start.hour == 1
        served.__exit__(None, None, None)
        for hour in (2, 3):
            desk.report_both(query, T0 + hour * HOUR, {"UA": 1})
        with desk.served(address=address, progress="100ms"):
            # The newest revision of each window: 1 and 2 are final by now, 3 is complete.
            seen = answers(events, 3)
            assert {(a.start.hour, a.phase) for a in seen} == {(1, "final"), (2, "final"), (3, "complete")}
            center.query("flights").delete()
            with pytest.raises(NotFound):
                list(events)


def test_a_client_with_the_answers_of_another_store_gets_a_gap(desk, two_hours):
    with desk.served() as url, Center(url) as center:
        gap = next(center.query("flights").live(after=999_999))
        assert isinstance(gap, Gap)
        assert gap.after == 999_999


def test_a_stream_ends_when_its_query_is_deleted(desk, two_hours, monkeypatch):
    monkeypatch.setattr("edgewater.client.center.RECONNECT", lambda state: 0.02)
    kinds: list[type] = []
    with desk.served(progress="100ms") as url, Center(url) as center:
        query = center.query("flights")
        with pytest.raises(NotFound):
            for event in query.live():
                kinds.append(type(event))
                if len(kinds) == 2:
                    query.delete()
    assert kinds[:2] == [Answer, Progress]


@pytest.mark.slow
def test_several_queries_share_a_connection_until_one_of_them_is_deleted(desk, two_hours, monkeypatch):
    monkeypatch.setattr("edgewater.client.center.RECONNECT", lambda state: 0.02)
    other = desk.register(name="other", measures={"flights": "count()"}, edges=["jfk"])
    desk.report(other, "jfk", T0, {"UA": 2})
    with desk.served(progress="100ms") as url, Center(url) as center:
        assert {a.query: a.measures for a in answers(center.live(), 2)} == {
            "flights": ["n", "miles", "delay"],
            "other": ["flights"],
        }
        events = center.live("other")
        (answer,) = answers(events, 1)
        assert answer.explain("flights")["query"] == "other"
        center.query("other").delete()
        with pytest.raises(NotFound):
            list(events)
        with pytest.raises(NotFound):
            next(center.live("flights", "other"))


def test_a_summary_has_some_groups_and_their_number(desk):
    query = desk.register_over("jfk", measures=EVERY_KIND, lateness="5h")
    desk.report(query, "jfk", T0, {"UA": 30, "AA": 1, "DL": 2})
    with desk.served() as url, Center(url) as center:
        for stream in (center.query("flights").live(summary=True), center.live("flights", summary=True)):
            summary = answers(stream, 1)[0]
            assert (len(summary.table), summary.members["groups"]) == (3, 3)


def test_a_live_answer_has_the_columns_and_values_that_the_arrow_form_has(desk):
    query = desk.register_over("jfk", measures=EVERY_KIND, lateness="0s")
    desk.report(query, "jfk", T0, {"UA": 30, "AA": 1, "DL": 2})
    questions: dict[str, Any] = {"rank": [3], "range": ["0:5"], "item": ["UA"]}
    with desk.served() as url, Center(url) as center:
        for asked in ({}, questions):
            fetched = center.query("flights").latest(**asked)
            live = answers(center.query("flights").live(**asked), 1)[0]
            assert live.table.column_names == fetched.table.column_names
            assert live.table.to_pydict() == fetched.table.to_pydict()
            assert live.to_arrow().to_pydict() == fetched.to_arrow().to_pydict()
            assert live.members == fetched.members
        answer = center.query("flights").latest()
        assert answer["delays"].quantile(0.5)["UA"] < 20
        assert answer["sample"].member("mean")["AA"].estimate == 30
        assert answer["carriers"].values[2][0]["item"] == "UA"


def test_a_total_has_the_confidence_with_which_no_more_late_records_come():
    for stated, confidence in (({}, 1.0), ({"confidence": 0.98}, 0.98)):
        of_all = {"estimate": 6, "lower": 6, "upper": 8, **stated}
        answer: Any = {"data": [], "total": {"n": of_all}, "quality": {"completeness": {}}}
        total = from_json(answer, {"measures": {"n": "count()"}}, None).total["n"]
        assert (total.upper, total.confidence) == (8, confidence)


@pytest.mark.slow
def test_the_client_loads_neither_center_nor_spark():
    heavy = ("center", "edge", "sim", "pyspark", "pandas", "polars")
    code = f"import sys, edgewater.client; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
