"""Live streams of the client: answers, progress and gaps, over restarts of the center; and what notebooks show."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import pytest

from edgewater.client import Answer, Answers, AsyncCenter, Center, Gap, Progress
from edgewater.client.answers import from_json
from edgewater.model.errors import NotFound
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
        for edge in ("jfk", "lga"):
            desk.report(query, edge, T0 + 2 * HOUR, {"UA": 1})
        assert {a.start.hour for a in answers(events, 2)} == {1, 2}


@pytest.mark.slow
def test_it_resumes_after_the_last_answer_when_the_center_has_restarted(two_hours, monkeypatch):
    desk, query = two_hours
    monkeypatch.setattr("edgewater.client.connection.RECONNECT", lambda state: 0.02)
    address = free_address()
    served = desk.served(address=address)
    url = served.__enter__()
    with Center(url) as center:
        events = center.query("flights").live(group={"carrier": "UA"})
        assert answers(events, 1)[0].start.hour == 1
        served.__exit__(None, None, None)
        for hour in (2, 3):
            for edge in ("jfk", "lga"):
                desk.report(query, edge, T0 + hour * HOUR, {"UA": 1})
        with desk.served(address=address, progress="100ms"):
            # The newest revision of each window: 1 and 2 are final by now, 3 is complete.
            seen = answers(events, 3)
            assert {(a.start.hour, a.phase) for a in seen} == {(1, "final"), (2, "final"), (3, "complete")}
            center.query("flights").delete()
            with pytest.raises(NotFound):
                list(events)


def test_a_client_with_the_answers_of_another_store_gets_a_gap(two_hours):
    desk, _ = two_hours
    with desk.served() as url, Center(url) as center:
        gap = next(center.query("flights").live(after=999_999))
        assert isinstance(gap, Gap)
        assert gap.after == 999_999


def test_the_asynchronous_stream_is_the_same_and_ends_when_the_query_is_deleted(two_hours, monkeypatch):
    desk, _ = two_hours
    monkeypatch.setattr("edgewater.client.connection.RECONNECT", lambda state: 0.02)

    async def followed(url: str) -> list[type]:
        kinds: list[type] = []
        async with AsyncCenter(url) as center:
            query = await center.query("flights")
            with pytest.raises(NotFound):
                async for event in query.live():
                    kinds.append(type(event))
                    if len(kinds) == 2:
                        await query.delete()
        return kinds

    with desk.served(progress="100ms") as url:
        assert asyncio.run(followed(url))[:2] == [Answer, Progress]


@pytest.mark.slow
def test_several_queries_share_a_connection_until_one_of_them_is_deleted(two_hours, monkeypatch):
    desk, _ = two_hours
    monkeypatch.setattr("edgewater.client.connection.RECONNECT", lambda state: 0.02)
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
        with pytest.raises(NotFound, match="other"):
            list(events)
        with pytest.raises(NotFound, match="other"):
            next(center.live("flights", "other"))


def test_a_stream_of_changes_gives_whole_answers(desk):
    desk.connect("jfk")
    query = desk.register(measures=EVERY_KIND, lateness="5h")
    desk.report(query, "jfk", T0, {"UA": 30, "AA": 1, "DL": 2})
    with desk.served() as url, Center(url) as center:
        asked = center.query("flights")
        for stream in (asked.live(changes=True), center.live("flights", changes=True)):
            sizes = [len(answers(stream, 1)[0].table)]
            for more in ({"DL": 1}, {"AA": 2, "B6": 3}):
                desk.now += HOUR
                desk.report(query, "jfk", T0, more, closed=False)
                (live,) = answers(stream, 1)
                fetched = asked.latest()
                assert live.table.sort_by("carrier").to_pydict() == fetched.table.sort_by("carrier").to_pydict()
                assert live.members == fetched.members
                sizes.append(len(live.table))
            assert sizes[-1] == 4
        summary = answers(asked.live(summary=True), 1)[0]
        assert (len(summary.table), summary.members["groups"]) == (4, 4)


def test_a_live_answer_has_the_columns_and_values_that_the_arrow_form_has(desk):
    desk.connect("jfk")
    query = desk.register(measures=EVERY_KIND, lateness="0s")
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


def test_a_notebook_shows_a_table_and_a_band_and_escapes_what_comes_from_the_field(desk):
    desk.connect("jfk", "lga")
    query = desk.register(budget={"staleness": "2s"})
    for hour in range(3):
        desk.report(query, "jfk", T0 + hour * HOUR, {"<script>alert(1)</script>": 2 + hour, "UA": 1})
        desk.report(query, "lga", T0 + hour * HOUR, {"UA": 4})
    with desk.served() as url, Center(url) as center:
        windows = center.query("flights").windows()
        for shown in (windows[0]._repr_html_(), windows._repr_html_()):
            assert "<script>" not in shown
            ElementTree.fromstring(shown)  # well formed
        assert "&lt;script&gt;" in windows[0]._repr_html_()
        assert windows._repr_html_().count('class="band"') == 2
        assert "no answers" in center.query("flights").windows("2030-01-01T00:00:00Z")._repr_html_()


def test_a_band_breaks_where_a_bound_is_unknown():
    def answer(hour: int, lower: float | None) -> Answer:
        cell = {"estimate": -5.0 * hour, "lower": lower, "upper": 1.0}
        head = {"query": "q", "phase": "early", "revision": 1, "confidence": 0.9, "data": [{"group": {}, "n": cell}]}
        window = {"start": f"2013-01-01T0{hour}:00:00Z", "end": f"2013-01-01T0{hour + 1}:00:00Z"}
        quality = {"completeness": {"ratio": None, "missing": ["jfk"]}}
        contract = {"met": False, "violations": [{"code": "missing-edges"}]}
        return from_json(
            {**head, "window": window, "quality": quality, "contract": contract}, {"measures": {"n": ""}}, None
        )

    each = tuple(answer(h, None if h == 2 else -20.0) for h in range(5))
    html = Answers(each[0].table, each)._repr_html_()
    assert html.count('class="band"') == 2  # windows 0, 1 and 3, 4
    assert "[?, 1]" in html
    assert "missing-edges" in each[0]._repr_html_()


@pytest.mark.slow
def test_the_client_loads_neither_center_nor_spark():
    heavy = ("center", "edge", "sim", "pyspark", "pandas", "polars")
    code = f"import sys, edgewater.client; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
