"""Live streams behind a real server: what a client is told first, next, when it is slow and when it comes back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from center.api.edge_progress import SharedProgress
from center.api.live_feed import AnswerPoller, LiveStream, SharedReads
from center.catalog import Change
from center.results import NewestAnswers
from center.results.schema import answers as stored
from center.serving.measures import MeasureQuestions
from center.storage.wake import Topic
from edgewater.base.errors import StorageError
from edgewater.runtime.tasks import Tasks
from edgewater.wire import QueryRef
from tests.center.rendered import render
from tests.center.results_world import answers_after
from tests.insides import engine_of

HOUR = 3_600_000
T0 = 1_356_998_400_000
WAIT_S = 30.0


class Events:
    """A client's side of a stream."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()
        self.seen: list[str] = []

    def next(self, *names: str) -> tuple[str, str | None, dict[str, Any]]:
        """The next event, or the next of one of these names: name, id, data."""
        event: dict[str, str] = {}
        for line in self._lines:
            if line:
                key, _, value = line.partition(": ")
                event[key] = value
            elif event:
                self.seen.append(event["event"])
                if not names or event["event"] in names:
                    return event["event"], event.get("id"), json.loads(event["data"])
                event = {}
        raise EOFError("the stream has ended")


@contextmanager
def streaming(url: str, **request: Any) -> Iterator[Events]:
    with httpx.stream("GET", url, timeout=WAIT_S, **request) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Events(response)


def test_a_new_client_begins_with_the_last_answer_and_then_gets_what_is_given(two_hours):
    desk, query = two_hours
    with desk.served() as url, streaming(f"{url}/v1/queries/flights/live") as events:
        name, answer_id, data = events.next()
        latest = desk.results.latest(query.ref)
        assert (name, answer_id) == ("answer", str(latest.answer_id))
        assert data == render(latest, query.spec)
        assert events.next()[0] == "progress"
        desk.report_both(query, T0 + 2 * HOUR, {"UA": 1})
        windows = {events.next("answer")[2]["window"]["start"] for _ in range(2)}
        assert windows == {"2013-01-01T01:00:00Z", "2013-01-01T02:00:00Z"}  # the one before became final


def test_questions_are_asked_of_live_answers_too(desk, two_hours):
    with desk.served() as url, streaming(f"{url}/v1/queries/flights/live?group=carrier:DL&measure=n") as events:
        assert events.next("answer")[2]["data"] == [
            {"group": {"carrier": "DL"}, "n": {"estimate": 4, "lower": 4, "upper": 4}}
        ]


def test_a_stream_of_several_queries_has_only_those_and_summaries_have_the_widest_groups(desk, two_hours):
    other = desk.register(name="other")
    desk.register(name="third")
    groups = {f"C{i:03}": 1 + (i > 13) for i in range(20)}  # all intervals are equally wide
    desk.report(other, "jfk", T0, groups)
    desk.report(other, "lga", T0, groups)
    with desk.served() as url:
        with streaming(f"{url}/v1/live?query=other&query=flights&summary=true") as events:
            answers = {a["query"]: a for a in (events.next("answer")[2] for _ in range(2))}
            assert {q["query"] for q in events.next("progress")[2]["queries"]} == {"other", "flights"}
        assert answers["other"]["groups"] == 20
        assert [row["group"]["carrier"] for row in answers["other"]["data"]] == [f"C{i:03}" for i in range(14, 19)]
        with streaming(f"{url}/v1/live?query=flights&min_phase=final") as events:
            assert events.next("answer")[2]["window"]["start"] == "2013-01-01T00:00:00Z"
        assert httpx.get(f"{url}/v1/live?query=flights&query=absent").status_code == 404


def test_progress_is_sent_without_data_too_and_reports_each_edge(desk):
    desk.register_over("jfk", "lga")
    desk.beat("jfk", T0 + HOUR)
    with desk.served(progress="100ms") as url, streaming(f"{url}/v1/queries/flights/live") as events:
        for _ in range(3):
            name, answer_id, data = events.next()
            assert (name, answer_id) == ("progress", None)
        edges = {e["edge"]: e for e in data["queries"][0]["edges"]}
        assert edges["jfk"]["watermark"] == "2013-01-01T01:00:00Z"
        assert (edges["lga"]["watermark"], edges["lga"]["state"]) == (None, "up")


def test_streams_end_at_once_and_without_a_fault_when_the_server_stops(desk, two_hours, monkeypatch, caplog):
    monkeypatch.setattr("center.api.server.GRACE_S", 3600)  # a stream that stays would outlive the test
    with ExitStack() as clients:
        with desk.served(progress="1h") as url:
            paths = ("/v1/live", "/v1/live?query=flights", "/v1/queries/flights/live")
            streams = [clients.enter_context(streaming(url + path)) for path in paths]
            for events in streams:
                events.next("progress")
        for events in streams:
            with pytest.raises(EOFError):
                events.next()
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


@pytest.mark.parametrize("changes", [False, True])
def test_a_correction_of_a_final_answer_is_an_event(desk, changes):
    query = desk.register_over("jfk", lateness="0s")
    desk.report(query, "jfk", T0, {"UA": 1})
    path = f"/v1/queries/flights/live?changes={str(changes).lower()}"
    with desk.served() as url, streaming(url + path) as events:
        _, first_id, first = events.next("answer")
        assert (first["phase"], first["revision"]) == ("final", 1) and "data_of" not in first
        desk.report(query, "jfk", T0, {"UA": 3}, closed=False)
        desk.results.correct(desk.now)
        _, answer_id, later = events.next("answer")
        assert (later["phase"], later["revision"], later["data_of"]) == ("final", 2, 1)
        assert int(answer_id) > int(first_id) and later["quality"]["records"]["after_final"] == 2
        (row,) = later["data"]
        assert (row["n"]["lower"], row["n"]["upper"]) == (1, 3)


def test_a_client_that_reconnects_continues_after_its_last_answer(desk, two_hours):
    first = answers_after(desk.results, 0, 1)[0]
    headers = {"Last-Event-ID": str(first.answer_id)}
    with desk.served() as url, streaming(f"{url}/v1/queries/flights/live", headers=headers) as events:
        ids = [int(events.next("answer")[1]) for _ in range(2)]
        assert ids == [r.answer_id for r in desk.results.changes_after(first.answer_id, 99).records]


def test_a_client_with_answers_of_another_store_gets_a_gap(desk, two_hours):
    headers = {"Last-Event-ID": "999999"}
    with desk.served() as url, streaming(f"{url}/v1/queries/flights/live", headers=headers) as events:
        name, answer_id, data = events.next()
        assert (name, answer_id, data["after"]) == ("gap", None, 999999)
        assert events.next()[0] == "answer"


def test_a_client_that_was_slow_gets_the_newest_revision_of_each_window_and_no_queue(two_hours):
    desk, query = two_hours
    stream = LiveStream(desk.app().state.services.feed, query)
    stream.begin()
    for flights in range(1, 6):  # five revisions while nobody reads
        desk.now += HOUR
        desk.report(query, "lga", T0 + HOUR, {"UA": flights}, closed=False)
    (event,) = stream.newer(desk.results.last_answer_id())
    answer = json.loads(event.data)
    assert (answer["revision"], answer["skipped"]) == (6, 4)
    assert stream.newer(desk.results.last_answer_id()) == []


def patched(whole: dict[str, Any], change: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a whole answer after a change, by group."""
    assert change["base"] == whole["revision"]
    gone = change["removed"] + [row["group"] for row in change["data"]]
    kept = [row for row in whole["data"] if row["group"] not in gone]
    assert len(kept) + len(change["data"]) == change["groups"]
    return sorted([*kept, *change["data"]], key=lambda row: str(row["group"]["carrier"]))


def test_a_stream_of_changes_has_only_the_groups_that_differ_from_what_its_client_has(two_hours):
    desk, query = two_hours
    with desk.served() as url, streaming(f"{url}/v1/queries/flights/live?changes=true") as events:
        first = events.next("answer")[2]
        assert "base" not in first
        desk.now += HOUR
        desk.report(query, "lga", T0 + HOUR, {"DL": 1, "B6": 2}, closed=False)
        change = events.next("answer")[2]
        assert [row["group"]["carrier"] for row in change["data"]] == ["B6", "DL"]
        latest = render(desk.results.latest(query.ref), query.spec)
        assert patched(first, change) == latest["data"]
        assert {name: change[name] for name in ("revision", "quality", "contract")} == {
            name: latest[name] for name in ("revision", "quality", "contract")
        }
        desk.report_both(query, T0 + 2 * HOUR, {"UA": 1})
        another = {a["window"]["start"]: a for a in (events.next("answer")[2] for _ in range(2))}
        assert "base" not in another["2013-01-01T02:00:00Z"]
        assert another["2013-01-01T01:00:00Z"]["data"] == [], "it became final with the same values"


def test_changes_since_a_revision_that_was_trimmed_are_a_whole_answer(two_hours):
    desk, query = two_hours
    stream = LiveStream(desk.app().state.services.feed, query, changes=True)
    stream.begin()
    desk.report(query, "lga", T0 + HOUR, {"UA": 1}, closed=False)
    with engine_of(desk.results).begin() as connection:
        connection.execute(stored.delete().where((stored.c.query == query.key) & (stored.c.revision == 1)))
    desk.now += HOUR
    desk.report(query, "lga", T0 + HOUR, {"UA": 2}, closed=False)
    answer = json.loads(stream.newer(desk.results.last_answer_id())[0].data)
    assert "base" not in answer
    assert len(answer["data"]) == 2


def test_a_summary_without_changes_is_asked_for_and_not_both(desk, two_hours):
    for path in ("/v1/live", "/v1/queries/flights/live"):
        refused = desk.get(f"{path}?summary=true&changes=true")
        assert (refused.status_code, refused.json()["field"]) == (422, "changes")


def test_streams_with_small_events_do_not_wait_for_those_with_large_ones(desk, monkeypatch):
    monkeypatch.setattr("center.api.live_feed.LARGE_BYTES", 4_000)
    desk.connect("jfk")
    large, small = (desk.register(name=name, edges=["jfk"], lateness="5h") for name in ("large", "small"))
    desk.report(large, "jfk", T0, {f"C{i:05}": 1 for i in range(100)})
    desk.report(small, "jfk", T0, {"UA": 1})
    app = desk.app()
    feed = app.state.services.feed
    rendering, seen = threading.Event(), threading.Event()
    answer = feed.renderer.answer

    def slow(record: Any, *args: Any, **options: Any) -> bytes:
        if record.query == large.ref and record.revision > 1:
            rendering.set()
            assert seen.wait(WAIT_S)
        return answer(record, *args, **options)

    monkeypatch.setattr(feed.renderer, "answer", slow)

    async def answer_of(stream: AsyncIterator[bytes], revision: int) -> None:
        async for events in stream:
            if b'"revision":%d' % revision in events:
                return

    async def both() -> None:
        polling = asyncio.create_task(feed.changes.run())
        questions = [MeasureQuestions(confidence=0.5 + i / 200) for i in range(50)]  # more than there are threads
        streams = [LiveStream(feed, large, q).events() for q in questions]
        quick = LiveStream(feed, small).events()
        for stream in (*streams, quick):
            await answer_of(stream, 1)
        desk.now += HOUR
        desk.report(large, "jfk", T0, {"C00007": 1}, closed=False)
        waiting = [asyncio.create_task(answer_of(s, 2)) for s in streams]
        while not rendering.is_set():
            await asyncio.sleep(0.005)
        desk.report(small, "jfk", T0, {"UA": 1}, closed=False)
        await asyncio.wait_for(answer_of(quick, 2), WAIT_S)
        seen.set()
        await asyncio.gather(*waiting)
        polling.cancel()

    asyncio.run(both())


def test_clients_that_ask_the_same_share_one_read_one_rendering_and_one_encoding(two_hours):
    desk, query = two_hours
    app = desk.app()
    feed = app.state.services.feed
    reads: list[int] = []
    changes_after = desk.results.changes_after

    def counted(*args: Any) -> Any:
        reads.append(1)
        return changes_after(*args)

    # The clock stands: what is shared for a moment may otherwise be read again when the next moment begins.
    feed = replace(feed, monotonic=lambda: 0.0, results=SimpleNamespace(
        last_answer_id=desk.results.last_answer_id, changes_after=counted, latest=desk.results.latest))  # fmt: skip

    async def many() -> list[list[bytes]]:
        polling = asyncio.create_task(feed.changes.run())
        streams = [LiveStream(feed, query).events() for _ in range(120)]
        first = [await anext(s) for s in streams]
        progress = [await anext(s) for s in streams]
        waiting = [asyncio.create_task(anext(s)) for s in streams]  # type: ignore[arg-type]
        desk.report_both(query, T0 + 2 * HOUR, {"UA": 1})
        after = list(await asyncio.gather(*waiting))
        polling.cancel()
        return [first, progress, after]

    for sent in asyncio.run(many()):
        assert len({id(events) for events in sent}) == 1
        assert sent[0].startswith(b"id: ") or sent[0].startswith(b"event: progress")
    assert len(reads) == 1


def test_what_a_shared_read_raises_is_raised_for_all_and_tried_again():
    async def many() -> None:
        shared, failed = SharedReads(), 0

        def fail() -> None:
            nonlocal failed
            failed += 1
            raise StorageError("the store is away")

        for attempt in (1, 2):
            results = await asyncio.gather(*(shared.read("k", fail) for _ in range(50)), return_exceptions=True)
            assert all(isinstance(r, StorageError) for r in results)
            assert failed == attempt
        assert await shared.read("k", lambda: (b"7",)) == (b"7",)

    asyncio.run(many())


def test_a_client_that_is_too_far_behind_gets_a_gap_and_the_newest(two_hours, monkeypatch):
    desk, query = two_hours
    monkeypatch.setattr("center.api.live_feed.PAGE", 2)
    monkeypatch.setattr("center.api.live_feed.MAX_PAGES", 1)
    stream = LiveStream(desk.app().state.services.feed, query, after=0)
    assert stream.begin() == []
    for _ in range(4):
        desk.now += HOUR
        desk.report(query, "lga", T0 + HOUR, {"UA": 1}, closed=False)
    assert [e.event for e in stream.newer(desk.results.last_answer_id())] == [
        "answer"
    ]  # a page of two revisions of one window
    gap, answer = stream.newer(desk.results.last_answer_id())
    assert gap.event == "gap"
    assert json.loads(gap.data)["through"] == desk.results.last_answer_id()
    assert answer.id == str(desk.results.latest(query.ref).answer_id)
    assert stream.newer(desk.results.last_answer_id()) == []


def test_a_client_far_behind_reads_page_after_page_and_misses_no_window(two_hours, monkeypatch):
    desk, query = two_hours
    monkeypatch.setattr("center.api.live_feed.PAGE", 2)
    for hour in range(2, 6):
        desk.report_both(query, T0 + hour * HOUR, {"UA": 1})
    with desk.served() as url:
        request = {"headers": {"Last-Event-ID": "0"}}
        with streaming(f"{url}/v1/queries/flights/live", **request) as events:
            last: dict[str, int] = {}
            while len(last) < 6 or last["2013-01-01T04:00:00Z"] < 2:
                answer = events.next("answer")[2]
                last[answer["window"]["start"]] = answer["revision"]
    newest = desk.results.windows(query.ref, None, None, 99)[0]
    assert list(last.values()) == [r.revision for r in newest]


def test_one_stream_covers_all_queries_but_deleted_ones(desk, two_hours):
    other = desk.register(name="others")
    desk.report_both(other, T0, {"UA": 1})
    gone = desk.register(name="gone")
    desk.report_both(gone, T0, {"UA": 1})
    desk.catalog.queries.delete("gone", desk.now)
    with desk.served() as url, streaming(f"{url}/v1/live") as events:
        assert {events.next("answer")[2]["query"] for _ in range(2)} == {"flights", "others"}
        progress = events.next("progress")[2]
        assert [q["query"] for q in progress["queries"]] == ["flights", "others"]
        assert events.seen == ["answer", "answer", "progress"]


def test_the_stream_of_all_queries_includes_one_younger_than_its_catalog_view(desk, two_hours):
    feed = desk.app().state.services.feed
    feed = replace(feed, progress=SharedProgress(desk.catalog, lambda: desk.now, fresh_s=3600.0))
    stream = LiveStream(feed)
    assert len(stream.begin()) == 1
    young = desk.register(name="young")
    desk.report_both(young, T0, {"UA": 1})
    assert [json.loads(event.data)["query"] for event in stream.newer(desk.results.last_answer_id())] == ["young"]
    assert feed.progress.view().queries == tuple(desk.catalog.queries.all()), "and others need not read it again"
    other = desk.register(name="other")
    desk.report_both(other, T0, {"UA": 1})
    begun = [json.loads(event.data)["query"] for event in LiveStream(feed).begin()]
    assert begun == ["flights", "young", "other"]


def test_the_stream_of_a_changed_query_goes_over_with_the_first_answer_of_the_new_version(two_hours):
    desk, query = two_hours
    border = desk.now + HOUR
    spec = replace(query.spec, lateness_ms=0)
    changed, _ = desk.catalog.queries.register(spec, desk.now, change=Change(border))
    desk.ledger_knows(changed)
    with desk.served() as url, streaming(f"{url}/v1/queries/flights/live") as events:
        assert events.next("answer")[2]["version"] == 1
        (stated,) = events.next("progress")[2]["queries"]
        assert (stated["first_version"], stated["version"]) == (1, 1)
        desk.report_both(changed, changed.windows.from_ms, {"UA": 1})
        assert events.next("answer")[2]["version"] == 2
        (stated,) = events.next("progress")[2]["queries"]
        assert (stated["first_version"], stated["version"]) == (1, 2)


def test_the_stream_of_a_query_ends_when_it_is_deleted(desk, two_hours):
    with desk.served(progress="100ms") as url:
        with streaming(f"{url}/v1/queries/flights/live") as events:
            events.next("progress")
            desk.catalog.queries.delete("flights", desk.now)
            with pytest.raises(EOFError):
                while True:
                    events.next("progress")
        assert httpx.get(f"{url}/v1/queries/flights/live").status_code == 404


def test_streams_are_counted_while_they_are_open(desk, two_hours):
    with desk.served() as url, streaming(f"{url}/v1/live") as events:
        events.next()
        assert "edgewater_api_live_clients 1.0" in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize("last", ["x", "-1", "1" * 30])
def test_an_invalid_last_event_id_is_refused(desk, two_hours, last):
    refused = desk.get("/v1/queries/flights/live", headers={"Last-Event-ID": last})
    assert refused.status_code == 422
    assert refused.json()["field"] == "Last-Event-ID"


def test_a_new_answer_wakes_the_streams_of_its_query_and_the_store_is_polled_only_meanwhile():
    asked: list[int] = []
    newest = [NewestAnswers(0)]
    one, other = QueryRef("one", 1), QueryRef("other", 1)

    def read(after: int) -> NewestAnswers:
        asked.append(after)
        return newest[0]

    async def scenario() -> None:
        changes = AnswerPoller(read, Tasks(), poll_s=0.001)
        polling = asyncio.create_task(changes.run())
        await changes.wait(0, 0.01)  # nothing is new: it ends by its time
        assert changes.newest == 0
        waiting = asyncio.create_task(changes.wait(0, WAIT_S, one))
        newest[0] = NewestAnswers(7)  # of any query
        await asyncio.wait_for(waiting, WAIT_S)
        assert changes.newest == changes.newest_of(one) == 7
        await changes.wait(6, WAIT_S)  # known already: returns at once
        waits = [asyncio.create_task(changes.wait(7, WAIT_S, query)) for query in (one, other, None)]
        await asyncio.sleep(0)
        newest[0] = NewestAnswers(9, {other: 9})
        await asyncio.wait_for(asyncio.gather(*waits[1:]), WAIT_S)
        assert not waits[0].done()
        assert [changes.newest_of(query) for query in (one, other, None)] == [7, 9, 9]
        newest[0] = NewestAnswers(3, {other: 3})  # another store
        await asyncio.wait_for(waits[0], WAIT_S)
        assert [changes.newest_of(query) for query in (one, other, None)] == [3, 3, 3]
        polling.cancel()

    asyncio.run(scenario())
    assert asked[0] == 0 and asked[-1] in (7, 9, 3)


def test_a_poller_that_is_woken_reads_at_once_and_logs_an_outage_once(caplog):
    asked: list[int] = []
    newest, fails = [NewestAnswers(1)], [False]

    def read(after: int) -> NewestAnswers:
        asked.append(after)
        if fails[0]:
            raise StorageError("away")
        return newest[0]

    class Wakes:
        heard = staticmethod(lambda _: None)

        @contextmanager
        def listen(self, topic, heard, tasks):
            assert topic is Topic.ANSWERS
            self.heard = heard
            yield

        def send(self, topic, data):
            raise AssertionError("the API has no answers")

    async def scenario() -> None:
        wakes = Wakes()
        changes = AnswerPoller(read, Tasks(), wakes, poll_s=WAIT_S)
        polling = asyncio.create_task(changes.run())
        await changes.wait(0, WAIT_S)
        waiting = asyncio.create_task(changes.wait(1, WAIT_S))
        newest[0] = NewestAnswers(2)
        wakes.heard(True)
        await asyncio.wait_for(waiting, WAIT_S)
        fails[0] = True
        waiting = asyncio.create_task(changes.wait(2, WAIT_S))
        while asked.count(2) < 4:
            wakes.heard(True)
            await asyncio.sleep(0)
        fails[0], newest[0] = False, NewestAnswers(3)
        wakes.heard(True)
        await asyncio.wait_for(waiting, WAIT_S)
        polling.cancel()

    asyncio.run(scenario())
    assert caplog.text.count("cannot poll for new answers") == 1
