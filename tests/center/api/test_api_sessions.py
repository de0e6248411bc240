"""Session windows over HTTP: registered, answered, and one that has become part of another."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from center.api.models import Answer
from center.ledger import FrameSummary
from center.storage.delta_segments import Delta
from edgewater.base.streams import EdgeId
from edgewater.synopses import GroupedAggregate
from edgewater.wire import SliceClose

MINUTE = 60_000
T0 = 1_356_998_400_000  # 2013-01-01T00:00:00Z
SESSIONS = {"name": "flights", "from": "flights", "measures": {"n": "count()"}, "window": {"session": "1m"},
            "lateness": "1h"}  # fmt: skip


def ship(desk, query, position, *times_s, before=()):
    """One record at each time, and what the edge says of their slices, in which there were those of `before`."""
    measure = query.spec.measures[0]
    times = [T0 + 1000 * second for second in times_s]
    closes, deltas = [], []
    for start in sorted({t // MINUTE * MINUTE for t in times}):
        inside = [t for t in times if start <= t < start + MINUTE]
        part = GroupedAggregate({}, {"n": measure.function.make((), None)})
        part.update([], {"n": None}, len(inside))
        deltas.append(Delta(query.key, start, part.to_bytes()))
        inside += [T0 + 1000 * second for second in before if start <= T0 + 1000 * second < start + MINUTE]
        closes.append(SliceClose(start, len(inside), 0, (), min(inside), max(inside)))
    touched = tuple(c.slice_start_ms for c in closes)
    through = T0 + 30 * MINUTE
    fact = FrameSummary(query.ref, position, EdgeId("jfk"), through, tuple(closes), touched, 10, desk.now, "jfk-1")
    desk.results.apply(desk.ledger, deltas, [fact], {query.key: position}, desk.now)


@pytest.fixture
def two_sessions(desk):
    query = desk.register_over("jfk", group_by=[], measures=SESSIONS["measures"], window=SESSIONS["window"])
    ship(desk, query, 1, 10, 65, 135, 600)  # seconds 10 and 65 are one; 135 another, 70 s later
    return desk, query


def windows(answers):
    return [
        (a["window"]["start"][14:19], a["window"]["end"][14:19], [r["n"]["estimate"] for r in a["data"]])
        for a in answers
    ]


def test_sessions_are_listed_found_at_a_time_and_the_last_is_the_latest(two_sessions):
    desk, _ = two_sessions
    page = desk.get("/v1/queries/flights/windows").json()
    assert windows(page["answers"]) == [("00:10", "02:05", [2]), ("02:15", "03:15", [1]), ("10:00", "11:00", [1])]
    assert page["answers"][0]["quality"]["session"] == {"cut": False, "cuts": 0}
    at = desk.get("/v1/queries/flights/at", params={"time": "2013-01-01T00:02:20Z"}).json()
    assert windows(at["answers"]) == [("02:15", "03:15", [1])]
    between = desk.get("/v1/queries/flights/at", params={"time": "2013-01-01T00:02:10Z"}).json()
    assert between["answers"] == []
    assert windows([desk.get("/v1/queries/flights/latest").json()]) == [("10:00", "11:00", [1])]


def test_a_merged_session_names_its_successor_and_is_in_no_list(two_sessions):
    desk, query = two_sessions
    ship(desk, query, 2, 100, before=[65])
    page = desk.get("/v1/queries/flights/windows").json()
    assert windows(page["answers"]) == [("00:10", "03:15", [4]), ("10:00", "11:00", [1])]
    gone = desk.get("/v1/queries/flights/windows/2013-01-01T00:02:15Z").json()
    assert TypeAdapter(Answer).validate_python(gone)["revision"] == 2
    assert gone["quality"]["merged_into"] == "2013-01-01T00:00:10Z" and gone["data"] == []
    assert gone["window"]["start"] == gone["window"]["end"]
    first = desk.get("/v1/queries/flights/windows/2013-01-01T00:02:15Z", params={"revision": 1}).json()
    assert windows([first]) == [("02:15", "03:15", [1])] and "merged_into" not in first["quality"]


def test_impossible_session_queries_are_refused_at_registration(desk):
    for window, field in (({"count": 1000}, "window.count"), ({"session": "1m", "max": "30s"}, "window.max")):
        answer = desk.ask("POST", "/v1/queries", json={**SESSIONS, "window": window})
        assert answer.status_code == 422 and answer.json()["field"] == field
        assert answer.json()["accepted"]
    assert desk.ask("POST", "/v1/queries", json=SESSIONS).json()["spec"]["window"] == {"session": "1m", "max": "1d"}


def test_rows_of_a_session_come_as_csv_too(two_sessions):
    desk, _ = two_sessions
    table = desk.get("/v1/queries/flights/windows", headers={"Accept": "text/csv"}).text.splitlines()
    assert len(table) == 4
