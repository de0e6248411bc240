"""What edges may say without end costs the catalog no more than a fixed number of rows."""

from __future__ import annotations

import itertools

import pytest

from center.catalog import Catalog, IndexOutcome, edge_rows, query_rows
from center.catalog import schema as t
from center.catalog.alarms import MAX_LISTED, MAX_MESSAGES, MAX_OF_EDGE, add_alarm
from center.catalog.edge_rows import REMEMBER_MS
from center.catalog.query_rows import FORGET_AFTER_MS
from center.storage.database import write_transaction
from center.storage.frame_log import FrameLocation
from edgewater.base.errors import Conflict, InvalidQuery, LimitExceeded, ProtocolError
from edgewater.base.streams import EdgeId
from edgewater.model import windows
from edgewater.model.edge_records import QueryStatusRecord
from edgewater.wire import QueryRef
from tests.center.catalog_world import JFK, LGA, frame, hello, spec
from tests.insides import engine_of
from tests.refusals import refused


def test_what_an_edge_says_of_queries_that_do_not_live_is_not_noted(catalog: Catalog) -> None:
    ref = catalog.queries.register(spec(), 1)[0].ref
    unknown = [QueryRef("miles", 2), QueryRef("other", 1)]
    for each in (ref, *unknown):
        catalog.queries.record_statuses([QueryStatusRecord(each, JFK, True, "", "")])
    assert [bool(catalog.queries.statuses(each)) for each in (ref, *unknown)] == [True, False, False]
    catalog.queries.delete("miles", 2)
    assert catalog.queries.statuses(ref) == {}
    catalog.queries.record_statuses([QueryStatusRecord(ref, JFK, True, "", "")])
    assert catalog.queries.statuses(ref) == {}


def test_alarms_that_differ_in_a_number_take_a_bounded_number_of_rows_and_all_are_counted(catalog: Catalog) -> None:
    catalog.alarms.add("frame-damaged", "frame 1", LGA, 1)
    catalog.alarms.add("frames-lost", "frames 1 to 2", JFK, 1)
    for n in range(3 * MAX_MESSAGES):
        catalog.alarms.add("frame-damaged", f"frame {n}", JFK, 10 + n)
    others = [(a.kind, a.edge, a.times) for a in catalog.alarms.latest() if (a.kind, a.edge) != ("frame-damaged", JFK)]
    assert sorted(others) == [("frame-damaged", LGA, 1), ("frames-lost", JFK, 1)]
    mine = [a for a in catalog.alarms.latest() if (a.kind, a.edge) == ("frame-damaged", JFK)]
    assert [a.message for a in mine] == [f"frame {n}" for n in reversed(range(2 * MAX_MESSAGES, 3 * MAX_MESSAGES))]
    assert sum(a.times for a in mine) == 3 * MAX_MESSAGES
    assert (mine[0].first_at_ms, mine[0].last_at_ms) == (10 + MAX_MESSAGES - 1, 10 + 3 * MAX_MESSAGES - 1)


@pytest.mark.nightly
def test_hostile_edges_push_no_other_alarm_off_the_list(catalog: Catalog) -> None:
    catalog.alarms.add("input-lost", "a file was truncated", LGA, 1)
    catalog.alarms.add("query-paused", "query miles@1: odd", EdgeId(""), 2, "miles@1")
    catalog.alarms.add("query-memory", "query miles@1: edge lga", LGA, 3, "miles@1")
    with write_transaction(engine_of(catalog)) as connection:  # one, instead of 1,200
        for edge, kind, n in itertools.product(range(10), range(6), range(MAX_MESSAGES)):
            add_alarm(connection, f"kind-{kind}", f"frame {n}", EdgeId(f"evil-{edge}"), 100 + n)
    for n in range(2 * MAX_MESSAGES):
        catalog.alarms.add("query-failing", f"odd {n}", EdgeId(""), 200 + n, "evil@1")
    listed = catalog.alarms.latest()
    assert len(listed) == MAX_LISTED
    assert [a.message for a in listed if a.edge == LGA] == ["query miles@1: edge lga", "a file was truncated"]
    assert [a.kind for a in listed if a.query == "miles@1"] == ["query-memory", "query-paused"]
    assert [a.last_at_ms for a in listed] == sorted((a.last_at_ms for a in listed), reverse=True)
    assert [a.kind for a in catalog.alarms.latest(query="miles@1")] == ["query-memory", "query-paused"]
    assert {a.query for a in catalog.alarms.latest(query="evil@1")} == {"evil@1"}


@pytest.mark.slow
def test_a_query_displaces_no_alarm_of_another_at_the_same_edge(catalog: Catalog) -> None:
    catalog.alarms.add("query-memory", "miles", JFK, 1, "miles@1")
    for query in range(MAX_OF_EDGE // 2):
        for n in range(4):
            catalog.alarms.add("query-memory", f"{query}, {n}", JFK, 10 + n, f"evil-{query}@1")
    held = catalog.alarms.latest()
    assert len(held) == MAX_OF_EDGE and [a.message for a in catalog.alarms.latest(query="miles@1")] == ["miles"]
    assert len({a.query for a in held}) == 1 + MAX_OF_EDGE // 2, "each query has its share"


def test_an_edge_with_many_newer_alarms_pushes_none_of_another_edge_off_the_list(catalog: Catalog) -> None:
    catalog.alarms.add("input-lost", "a file was truncated", LGA, 1)
    for n in range(4):
        catalog.alarms.add(f"kind-{n}", "odd", JFK, 10 + n)
    assert [(a.edge, a.kind) for a in catalog.alarms.latest(2)] == [(JFK, "kind-3"), (LGA, "input-lost")]


def test_no_more_alarms_are_read_than_asked_for(catalog: Catalog) -> None:
    for n in range(5):
        catalog.alarms.add(f"kind-{n}", "odd", JFK, n)
    assert [a.kind for a in catalog.alarms.latest(2)] == ["kind-4", "kind-3"]


def test_spent_are_segments_given_up_and_those_of_deleted_queries_that_are_drained(catalog: Catalog) -> None:
    miles, ended = (catalog.queries.register(spec(name), 1)[0].ref for name in ("miles", "ended"))
    hello(catalog)
    kept, late, forgotten, both = (f"commits/a-{n}.frames" for n in range(4))
    catalog.frames.index(
        [frame(ended, 0, location=FrameLocation(kept, 0, 1)), frame(miles, 1, location=FrameLocation(forgotten, 0, 1))]
    )
    catalog.frames.drop({"miles@1": 1})
    held = {late: {"ended@1"}, both: {"ended@1", "miles@1"}, "commits/u.frames": {"unknown@1"}}

    def removable() -> list[str]:
        return catalog.frames.removable_segments(sorted({kept, forgotten, *held}), held.__getitem__)

    assert removable() == [forgotten]
    catalog.queries.delete("ended", 2)
    assert removable() == [late, forgotten]
    catalog.frames.drop({"ended@1": 1})
    assert removable() == [kept, late, forgotten]
    catalog.frames.forget_segments([kept, forgotten])
    catalog.queries.delete("miles", 3)
    held |= {kept: {"ended@1"}, forgotten: {"miles@1"}}
    assert removable() == [kept, late, forgotten, both], "they are found again by what they hold"


def test_a_query_whose_records_belong_to_too_many_windows_is_refused_with_what_is_allowed(catalog: Catalog) -> None:
    with refused(InvalidQuery, "window.every"):
        catalog.queries.register(spec(window={"sliding": "10s", "every": "1ms"}), 1)
    catalog.queries.register(spec(window={"sliding": "10s", "every": "20ms"}), 1)


def test_a_query_that_was_registered_before_the_limit_is_read_and_found_again(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    costly = spec(window={"sliding": "10s", "every": "1ms"})
    with monkeypatch.context() as patch:
        patch.setattr(windows, "MAX_WINDOWS_PER_SLICE", 10_000)
        registered = catalog.queries.register(costly, 1)[0]
    assert catalog.queries.all() == [registered]
    assert catalog.queries.register(costly, 2)[0] == registered


def test_deleted_queries_do_not_use_up_the_names_for_ever(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_rows, "MAX_QUERIES", 4)
    hello(catalog)
    kept = catalog.queries.register(spec("kept"), 1)[0].ref
    catalog.frames.index([frame(kept, 0)])
    catalog.queries.delete("kept", 2)
    catalog.queries.register(spec("live"), 1)
    for _ in range(2):
        catalog.queries.register(spec(), 1)
        catalog.queries.delete("miles", 2)
    with pytest.raises(Conflict):
        catalog.queries.register(spec("other"), 2 + FORGET_AFTER_MS)
    # Later they are forgotten, but for what has frames; no version comes twice.
    later_ms = 3 + FORGET_AFTER_MS
    assert catalog.queries.register(spec("other"), later_ms)[0].ref == QueryRef("other", 3)
    assert catalog.queries.register(spec(), later_ms)[0].ref == QueryRef("miles", 3)
    assert sorted(q.ref.name for q in catalog.queries.all(deleted=True)) == ["kept", "live", "miles", "other"]
    assert catalog.frames.last_positions()["kept@1"] == 1
    with pytest.raises(Conflict):
        catalog.queries.register(spec("more"), later_ms)


def test_ten_thousand_incarnations_of_one_edge_are_forgotten_but_the_last(catalog: Catalog) -> None:
    query = catalog.queries.register(spec(), 1)[0].ref
    hello(catalog, incarnation="last", now_ms=1_000)
    rows = [
        {"edge": JFK, "incarnation": f"i{n}", "first_seq": 0, "awaited_seq": 1, "hello_at_ms": 0} for n in range(10_000)
    ]
    with engine_of(catalog).begin() as connection:
        connection.execute(t.incarnations.insert(), rows)
    assert hello(catalog, incarnation="new", now_ms=REMEMBER_MS + 500) is None
    assert catalog.edges.get(JFK).incarnations == 2
    assert catalog.frames.index([frame(query, 0, incarnation="last")]) == [IndexOutcome.NEW], (
        "its session may still be open"
    )


def test_an_edge_that_makes_incarnations_in_a_loop_is_refused_and_another_is_not(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_rows, "MAX_INCARNATIONS", 5)
    query = catalog.queries.register(spec(), 1)[0].ref
    for n in range(20):
        hello(catalog, incarnation=f"unused{n}")
    assert catalog.edges.get(JFK).incarnations <= 5, "those that never sent a frame go at once"
    refused = 0
    for n in range(20):
        try:
            hello(catalog, incarnation=f"i{n}", now_ms=2_000)
            catalog.frames.index([frame(query, 0, incarnation=f"i{n}")])
        except LimitExceeded as exc:
            refused += 1
            assert "5 incarnations have sent frames within 24 h" in exc.message
    assert (refused, catalog.edges.get(JFK).incarnations, catalog.edges.get(JFK).incarnation) == (15, 5, "i4")
    assert sum(a.times for a in catalog.alarms.latest() if a.kind == "too-many-incarnations") == 15
    hello(catalog, LGA, incarnation="honest", now_ms=2_000)
    assert hello(catalog, incarnation="i2", next_seq=1, now_ms=2_000) == 0, "one that is remembered may go on"
    hello(catalog, incarnation="tomorrow", now_ms=2_001 + REMEMBER_MS)
    assert catalog.edges.get(JFK).incarnations == 2


def test_an_incarnation_that_was_forgotten_does_not_send_frames_that_would_count_twice(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_rows, "MAX_INCARNATIONS", 3)
    query = catalog.queries.register(spec(), 1)[0].ref
    for n in range(3):
        hello(catalog, incarnation=f"i{n}", oldest_seq=1, next_seq=1, now_ms=n)
        frames = [frame(query, seq, incarnation=f"i{n}") for seq in (1, 2)]
        assert catalog.frames.index(frames) == [IndexOutcome.NEW] * 2
    hello(catalog, incarnation="new", oldest_seq=1, next_seq=9, now_ms=2_000 + REMEMBER_MS)  # built nine offline
    # The acknowledgement of its second frame was lost, and retention has dropped both from the index.
    catalog.frames.drop({"miles@1": 6})
    with pytest.raises(ProtocolError):
        hello(catalog, incarnation="i0", oldest_seq=2, next_seq=3, now_ms=2_001 + REMEMBER_MS)
    assert [a.kind for a in catalog.alarms.latest() if a.kind == "incarnation-forgotten"] == ["incarnation-forgotten"]
    assert catalog.edges.get(JFK).incarnation == "new"
    hello(catalog, LGA, incarnation="restored", oldest_seq=57, next_seq=60)  # of another edge nothing was forgotten
