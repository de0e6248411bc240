"""A query without an answer says why, whom it waits for, since when and what to do."""

from __future__ import annotations

import pytest

from center.catalog import ComponentHeartbeat, SetAside
from edgewater.base.streams import MAX_TIME_MS, EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.model.edge_records import HeartbeatRecord, QueryStatusRecord
from tests.center.api.conftest import HOUR, T0
from tests.center.catalog_world import frame


def running(desk):
    """Gateway and job send heartbeats."""
    for component in ("gateway", "job"):
        desk.components.record(ComponentHeartbeat(component, "host:1", "", desk.now, desk.now))


def accept(desk, query, *edges, message=""):
    for edge in edges:
        code = "invalid-query" if message else ""
        desk.catalog.queries.record_statuses([QueryStatusRecord(query.ref, EdgeId(edge), not message, code, message)])


def asked(desk, watermark_ms=None, message="", **changes):
    """A query at a running center with one edge, jfk, which has accepted it (refused it, with a message)."""
    running(desk)
    desk.connect("jfk")
    if watermark_ms is not None:
        desk.beat("jfk", watermark_ms)
    query = desk.register(**changes)
    accept(desk, query, "jfk", message=message)
    return query


def status_of(desk, name="flights"):
    """The status; the 404 of `latest`, if there is no answer, says the same."""
    status = desk.get(f"/v1/queries/{name}/status").json()
    latest = desk.get(f"/v1/queries/{name}/latest")
    if status["latest_window"] is None:
        assert latest.status_code == 404
        problem = latest.json()
        assert problem["type"] == "https://edgewater.dev/problems/not-found"
        assert status["reason"] in problem["detail"]
        assert status["remedy"] in problem["detail"]
        for member in ("state", "reason", "remedy", "since", "waits_for", "edges"):
            assert problem[member] == status[member]
    else:
        assert latest.status_code == 200
    return status


def test_a_center_that_does_not_work_is_named_first(desk):
    desk.register()
    status = status_of(desk)
    assert status["state"] == "center_not_ready"
    assert status["reason"] == "gateway: has not started; job: has not started"


def test_a_stream_that_no_edge_serves_is_named_with_the_streams_that_there_are(desk):
    running(desk)
    query = desk.register_over("jfk", name="typo", **{"from": "flihgts"})
    status = status_of(desk, "typo")
    assert status["state"] == "no_edges"
    assert status["reason"] == "no edge serves stream flihgts; the edges serve flights"
    assert status["since"] == rfc3339(query.registered_at_ms)


def test_an_expected_edge_that_never_connected_is_named(desk):
    asked(desk, T0, edges=["jfk", "lga"])
    status = status_of(desk)
    assert (status["state"], status["waits_for"]) == ("waiting", ["lga"])
    assert status["reason"] == "lga has never connected"
    assert "start the edge" in status["remedy"]
    assert [e["cause"] for e in status["edges"]] == ["open", "never_connected"]


def test_an_edge_that_is_silent_is_named_with_the_time_since_when(desk):
    asked(desk, T0)
    silent_since = desk.now
    desk.now += 60_000
    running(desk)
    status = status_of(desk)
    assert status["since"] == rfc3339(silent_since)
    assert status["reason"] == f"jfk has been unreachable since {rfc3339(silent_since)}"


def test_a_query_that_every_edge_refuses_says_so_with_the_reason(desk):
    asked(desk, message="measures.n: no such column")
    status = status_of(desk)
    assert status["state"] == "refused"
    assert status["reason"] == "jfk refuses the query: measures.n: no such column"


def test_a_retired_edge_that_has_refused_the_query_is_retired(desk):
    asked(desk, message="measures.n: no such column", edges=["jfk"])
    assert desk.ask("DELETE", "/v1/edges/jfk").status_code == 204
    assert status_of(desk)["reason"] == "jfk is retired"


def test_an_edge_that_has_not_confirmed_or_not_read_is_named(desk):
    running(desk)
    query = desk.register_over("jfk")
    assert status_of(desk)["reason"] == "jfk has not confirmed the query yet"
    accept(desk, query, "jfk")
    assert status_of(desk)["reason"] == "jfk has read no record of flights"


def test_a_query_that_came_after_all_records_says_so(desk):
    """The tutorial's own trap: the second query is asked when the file has been read."""
    asked(desk, MAX_TIME_MS)
    status = status_of(desk)
    assert status["state"] == "no_records"
    assert status["waits_for"] == []
    assert status["reason"].endswith("jfk has read 7 records of flights to the end")
    assert "before the edges read" in status["remedy"]


def test_frames_that_the_job_cannot_merge_are_named(desk):
    query = asked(desk, T0)
    desk.catalog.frames.index([frame(query.ref, 0, incarnation="jfk-1")])
    assert (status_of(desk)["state"], status_of(desk)["reason"]) == ("merging", "1 frames wait for the job")
    desk.catalog.quarantine.set_query_aside(query.ref, SetAside.PAUSED, "no common schema", desk.now)
    status = status_of(desk)
    assert (status["state"], status["reason"]) == ("paused", "no common schema")
    assert desk.get("/v1/quarantine").json()["queries"][0]["state"] == "paused"
    desk.catalog.quarantine.end_pauses([query.ref])
    assert status_of(desk)["state"] == "merging"


@pytest.mark.slow
def test_a_query_that_is_set_aside_says_so_and_the_center_stays_ready(desk):
    query = asked(desk, T0)
    desk.catalog.quarantine.count_death(query.ref, desk.now)
    desk.catalog.quarantine.set_query_aside(query.ref, SetAside.QUARANTINED, "the job died 2 times", desk.now)
    status = status_of(desk)
    assert (status["state"], status["reason"]) == ("quarantined", "the job died 2 times")
    assert "edgewater center quarantine retry" in status["remedy"]
    assert desk.get("/readyz").json()["set_aside"] == {query.key: "quarantined"}
    (alarm,) = desk.get(f"/v1/queries/{query.ref.name}").json()["alarms"]
    assert (alarm["kind"], alarm["query"]) == ("query-quarantined", query.key)
    desk.catalog.quarantine.retry_query(query.ref.name)
    assert status_of(desk)["state"] != "quarantined" and desk.get("/readyz").json()["set_aside"] == {}


def test_a_window_that_has_not_ended_is_no_fault(desk):
    asked(desk, T0)
    status = status_of(desk)
    assert (status["state"], status["remedy"], status["waits_for"]) == ("waiting", "", [])
    assert "expects more from 2013-01-01T00:00:00Z on" in status["reason"]


@pytest.mark.parametrize("silent", [False, True])
def test_an_answered_query_names_those_without_whom_there_is_no_newer_answer(desk, silent):
    query = asked(desk)
    desk.report(query, "jfk", T0, {"UA": 3})
    desk.beat("jfk", T0 + HOUR)
    if silent:
        desk.now += 60_000
        running(desk)
    status = status_of(desk)
    assert (status["state"], status["latest_window"]) == ("answered", rfc3339(T0))
    assert status["waits_for"] == (["jfk"] if silent else [])


@pytest.mark.parametrize(
    ("rejected", "late", "named", "remedy"),
    [(5, 0, "rejected 5 records of flights (malformed)", "edgewater edge check"),
     (0, 4, "4 records came too late", "disorder"), (5, 4, "4 records came too late", "edgewater edge check")],
)  # fmt: skip
@pytest.mark.parametrize("watermark_ms", [None, T0, MAX_TIME_MS])
def test_records_that_an_edge_did_not_count_are_named_with_what_to_do(
    desk, watermark_ms, rejected, late, named, remedy
):
    asked(desk)
    marks = {} if watermark_ms is None else {"flights": watermark_ms}
    drops, sources = ({"too-late": late} if late else {}), {"flights": [("a.csv", "malformed", rejected)]}
    desk.catalog.edges.record_heartbeats(
        [
            HeartbeatRecord(
                EdgeId("jfk"), marks, {}, drops, 0, 0.0, 0.0, 0.0, desk.now, rejected=sources if rejected else {}
            )
        ]
    )
    status = status_of(desk)
    assert named in status["reason"] and remedy in status["remedy"]
    assert "whether its sources have input" not in status["remedy"]


@pytest.mark.parametrize("limit", ["1%", 100])
def test_a_relative_budget_that_saves_nothing_says_why(desk, limit):
    query = asked(desk, budget={"error": {"miles": limit}})
    desk.report(query, "jfk", T0, {"UA": 3})
    desk.beat("jfk", T0 + HOUR)
    assert ("relative to each group's own value" in status_of(desk)["budget"]) == (limit == "1%")


def test_before_its_first_record_an_edge_has_no_watermark(desk):
    """An agent states the least time there is; the catalog and the API state none."""
    from center.ingest.validation import Hello, read_heartbeat
    from edgewater.base.streams import MIN_TIME_MS
    from edgewater.wire import uplink_pb2 as pb

    progress = [pb.StreamProgress(stream="flights", watermark_ms=MIN_TIME_MS)]
    desk.connect("jfk")
    hello = Hello(EdgeId("jfk"), "i", {}, (), 0, 0, 0, 1)
    desk.catalog.edges.record_heartbeats([read_heartbeat(hello, pb.Heartbeat(streams=progress), desk.now)])
    (stream,) = desk.get("/v1/edges/jfk").json()["streams"]
    assert (stream["watermark"], stream["watermark_ms"], stream["ended"]) == (None, None, False)
