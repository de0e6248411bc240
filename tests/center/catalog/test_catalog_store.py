from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from center.catalog import Catalog, IndexOutcome, SessionStart, SetAside
from center.catalog.query_rows import _log_once, _read_spec
from center.config import ColumnEntry
from center.storage.frame_log import FrameLocation
from edgewater.base.errors import Conflict, InvalidQuery, NotFound, ProtocolError, StorageError
from edgewater.base.streams import LIVE, EdgeId, StreamClock
from edgewater.model.edge_records import HeartbeatRecord, QueryStatusRecord, StreamRecord, expected_edges
from edgewater.model.lookups import decode_rows
from edgewater.model.registered_query import query_from_key, query_key
from edgewater.synopses import registry
from edgewater.wire import QueryRef
from tests.center.catalog_world import FLIGHTS, JFK, LGA, acked_through, frame, hello, known_query, spec
from tests.examples import examples
from tests.refusals import refused

NOW = 60_000_000


def test_a_registered_query_comes_back_as_it_was_given(catalog: Catalog) -> None:
    registered = catalog.queries.register(spec(), 42)[0]
    assert registered.ref == QueryRef("miles", 1)
    assert catalog.queries.get("miles") == registered
    assert catalog.queries.all() == [registered]
    assert registered.spec == spec()


def test_a_query_that_cannot_be_read_here_costs_only_itself(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the package that brought its function is not installed any more."""
    well = catalog.queries.register(spec("well"), 1)[0]
    catalog.queries.register(spec("odd", measures={"miles": "max(distance)"}), 2)
    _read_spec.cache_clear()
    _log_once.cache_clear()
    monkeypatch.delitem(registry._FUNCTIONS, "max")

    assert catalog.queries.all() == [well]
    assert "query odd@1 in the catalog cannot be read here: measures.miles" in caplog.text
    with pytest.raises(StorageError):
        catalog.queries.get("odd")


def test_the_same_query_registered_again_is_the_one_that_is_there(catalog: Catalog) -> None:
    first = catalog.queries.register(spec(), 1)[0]
    version = catalog.version()
    assert catalog.queries.register(spec(), 2)[0] == first
    assert catalog.version() == version


def test_another_query_under_a_live_name_is_refused(catalog: Catalog) -> None:
    catalog.queries.register(spec(), 1)
    with pytest.raises(Conflict):
        catalog.queries.register(spec(lateness="5s"), 2)


def test_a_version_is_never_given_to_another_query_of_that_name(catalog: Catalog) -> None:
    catalog.queries.register(spec(), 1)
    catalog.queries.delete("miles", 2)
    assert catalog.queries.register(spec(lateness="5s"), 3)[0].ref == QueryRef("miles", 2)
    assert [(q.ref.version, q.deleted_at_ms) for q in catalog.queries.all(deleted=True)] == [(1, 2), (2, None)]


def test_rows_of_a_table_go_with_each_version_of_a_query_and_leave_with_the_last_one(catalog: Catalog) -> None:
    tables, wanted = catalog.tables, spec(lookup={"names": {"key": "carrier"}}, group_by=["name"])
    for name in ("United", "United", "Unified"):
        tables.put("names", "carrier", pa.table({"carrier": ["UA"], "name": [name]}), NOW, at_ms=None)
        catalog.queries.register(wanted, NOW)
    delivered = tables.with_rows(catalog.queries.all())
    assert [decode_rows(query.spec.lookups[0].rows)["name"].to_pylist() for query in delivered] == [
        ["United"],
        ["Unified"],
    ]
    assert [(table.version, table.queries) for table in tables.all()] == [(2, ("miles",))]
    with pytest.raises(Conflict):
        tables.delete("names")
    catalog.queries.delete("miles", NOW)
    tables.delete("names")
    with pytest.raises(NotFound):
        tables.get("names")
    assert tables.put("names", "carrier", pa.table({"carrier": ["UA"], "name": ["U"]}), NOW)[0].version == 3


def test_a_query_that_is_not_there_is_not_found(catalog: Catalog) -> None:
    with pytest.raises(NotFound):
        catalog.queries.get("miles")
    with pytest.raises(NotFound):
        catalog.queries.delete("miles", 1)


def test_a_query_is_checked_against_the_streams_of_known_edges(catalog: Catalog) -> None:
    hello(catalog)
    with refused(InvalidQuery, "group_by.0"):
        catalog.queries.register(spec(group_by=["airline"]), 1)
    assert catalog.queries.all() == []


DISTANCE = {"carrier": "string", "distance": "int64"}


def test_the_version_rises_with_queries_and_with_who_is_expected(catalog: Catalog) -> None:
    versions = [catalog.version()]
    for change in (
        lambda: catalog.queries.register(spec(), 1),
        lambda: hello(catalog),
        lambda: hello(catalog, streams=()),
        lambda: catalog.edges.retire(JFK),
        lambda: catalog.edges.reinstate(JFK),
        lambda: catalog.streams.declare("flights", {n: ColumnEntry(type=k) for n, k in DISTANCE.items()}),
        lambda: catalog.streams.undeclare("flights"),
        lambda: catalog.queries.delete("miles", 2),
    ):
        change()
        versions.append(catalog.version())
    assert versions == sorted(set(versions))
    hello(catalog, streams=())
    assert catalog.version() == versions[-1]


def test_an_edge_is_what_its_hello_and_its_last_heartbeat_say(catalog: Catalog) -> None:
    clock = StreamClock(5, 6, 7.5)
    hello(catalog, streams=(replace(FLIGHTS, clock=clock),), now_ms=1_000)
    beat = HeartbeatRecord(
        JFK, {"flights": 99}, {"flights": 12}, {"late": 3}, 11, 2e6, 4.5, -2.0, 1_500, release="9.1.0"
    )
    catalog.edges.record_heartbeats([beat])
    record = catalog.edges.get(JFK)
    assert (record.first_seen_ms, record.last_seen_ms, record.connected) == (1_000, 1_500, True)
    assert (record.watermarks, record.records, record.drops) == ({"flights": 99}, {"flights": 12}, {"late": 3})
    assert (record.backlog_bytes, record.bandwidth_bytes_s, record.rtt_ms, record.clock_offset_ms) == (11, 2e6, 4.5, -2)
    assert record.streams == (StreamRecord("flights", FLIGHTS.columns, clock),)
    assert (record.labels, record.release) == ({"city": "New York"}, "9.1.0")
    assert record.reachable(2_000) and not record.reachable(10_000)


def test_a_new_incarnation_starts_its_counts_anew(catalog: Catalog) -> None:
    hello(catalog)
    catalog.edges.record_heartbeats(
        [HeartbeatRecord(JFK, {"flights": 99}, {"flights": 12}, {}, 11, 2e6, 4.5, 0, 1_500)]
    )
    hello(catalog, incarnation="i2", now_ms=2_000)
    record = catalog.edges.get(JFK)
    assert (record.incarnation, record.incarnations, record.records, record.watermarks) == ("i2", 2, {}, {})
    assert (record.first_seen_ms, record.last_seen_ms) == (1_000, 2_000)


def test_the_end_of_an_old_session_does_not_disconnect_a_newer_one(catalog: Catalog) -> None:
    hello(catalog, session="old")
    hello(catalog, session="new")
    catalog.edges.end_sessions({JFK: ("old", 3_000)})
    assert catalog.edges.get(JFK).connected
    catalog.edges.end_sessions({JFK: ("new", 4_000)})
    assert not catalog.edges.get(JFK).connected


def test_expected_are_the_edges_a_query_names_or_those_that_serve_its_stream(catalog: Catalog) -> None:
    hello(catalog, LGA)
    hello(catalog, JFK)
    hello(catalog, EdgeId("ewr"), streams=())
    assert expected_edges(spec(), catalog.edges.all()) == ["jfk", "lga"]
    assert expected_edges(spec(edges=["ewr", "bos"]), catalog.edges.all()) == ["bos", "ewr"]
    catalog.edges.retire(LGA)
    assert expected_edges(spec(), catalog.edges.all()) == ["jfk"]
    with pytest.raises(NotFound):
        catalog.edges.retire(EdgeId("bos"))


def test_known_edges_are_read_again_if_they_have_changed_their_streams_or_are_retired(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    ewr, bos = EdgeId("ewr"), EdgeId("bos")
    for most in (500, 1):  # few changed edges are read by name, many with all others
        monkeypatch.setattr("center.catalog.edge_rows.MAX_NAMED", most)
        for edge in (JFK, LGA, ewr):
            hello(catalog, edge, incarnation=f"i{most}")
        known = {edge.edge: edge for edge in catalog.edges.all()}
        watermark_ms = {"flights": 99 + most}
        for edge in (JFK, LGA):
            catalog.edges.record_heartbeats([HeartbeatRecord(edge, watermark_ms, {}, {}, 0, 0, 0, 0, 1_500)])
        catalog.edges.retire(LGA)
        hello(catalog, ewr, streams=())
        hello(catalog, bos)
        again = {edge.edge: edge for edge in catalog.edges.all(known)}
        fresh = {edge.edge: edge for edge in catalog.edges.all()}
        assert list(again) == [bos, ewr, JFK, LGA]
        assert {edge for edge in again if again[edge] == fresh[edge]} >= {bos, ewr, LGA}
        assert (again[JFK] is known[JFK]) == (most == 500) and again[JFK].streams == fresh[JFK].streams
        catalog.edges.record_heartbeats([HeartbeatRecord(LGA, {"flights": 7}, {}, {}, 0, 0, 0, 0, 1_600)])
        assert catalog.edges.all(again)[3].watermarks == {"flights": 7}, "a retired edge is always read"
        catalog.edges.reinstate(LGA)
        assert not catalog.edges.all(again)[3].retired


def test_the_last_word_of_an_edge_on_a_query_stands(catalog: Catalog) -> None:
    ref = catalog.queries.register(spec(), 1)[0].ref
    catalog.queries.record_statuses([QueryStatusRecord(ref, JFK, False, "invalid-query", "no such column")])
    catalog.queries.record_statuses([QueryStatusRecord(ref, JFK, True, "", "")])
    catalog.queries.record_statuses([QueryStatusRecord(ref, LGA, False, "invalid-query", "no such column")])
    statuses = catalog.queries.statuses(ref)
    assert (statuses[JFK].accepted, statuses[LGA].accepted, statuses[LGA].message) == (True, False, "no such column")


def test_positions_of_a_query_have_no_gaps_whoever_sent_the_frames(catalog: Catalog) -> None:
    ref = catalog.queries.register(spec(), 1)[0].ref
    hello(catalog, JFK)
    hello(catalog, LGA)
    assert catalog.frames.index([frame(ref, 0), frame(ref, 0, edge=LGA), frame(ref, 1)]) == [IndexOutcome.NEW] * 3
    assert catalog.frames.last_positions() == {"miles@1": 3}
    assert [(e.position, e.edge, e.seq) for e in catalog.frames.entries("miles@1", 0, 3)] == [
        (1, "jfk", 0),
        (2, "lga", 0),
        (3, "jfk", 1),
    ]
    assert [e.position for e in catalog.frames.entries("miles@1", 1, 2)] == [2]
    assert (acked_through(catalog, JFK, "i1"), acked_through(catalog, LGA, "i1")) == (1, 0)


def test_positions_are_the_known_ones_until_a_frame_comes_or_the_live_queries_change(catalog: Catalog) -> None:
    ref = known_query(catalog)
    known = catalog.frames.last_positions_since(None)
    assert known.by_key == {"miles@1": 0} and catalog.frames.last_positions_since(known) is known
    changes: list[Callable[[], object]] = [
        lambda: catalog.frames.index([frame(ref, 0)]),
        lambda: catalog.queries.register(spec("other"), 2),
        lambda: catalog.queries.delete("other", 3),
        lambda: catalog.frames.index([frame(ref, 1)]),
    ]
    for change in changes:
        change()
        after = catalog.frames.last_positions_since(known)
        assert after is not known and after.by_key == catalog.frames.last_positions()
        assert catalog.frames.last_positions_since(after) is after
        known = after


def test_a_re_delivery_is_acknowledged_and_not_indexed(catalog: Catalog) -> None:
    ref = known_query(catalog)
    assert catalog.frames.index([frame(ref, 0), frame(ref, 0)]) == [IndexOutcome.NEW, IndexOutcome.DUPLICATE]
    assert catalog.frames.index([frame(ref, 0)]) == [IndexOutcome.DUPLICATE]
    assert catalog.frames.last_positions() == {"miles@1": 1}


def test_the_same_identity_with_another_checksum_is_a_conflict_and_stops_the_edge(catalog: Catalog) -> None:
    ref = catalog.queries.register(spec(), 1)[0].ref
    hello(catalog, JFK)
    hello(catalog, LGA)
    catalog.frames.index([frame(ref, 0)])
    outcomes = catalog.frames.index([frame(ref, 0, crc32c=8), frame(ref, 1), frame(ref, 0, edge=LGA)])
    assert outcomes == [IndexOutcome.CONFLICT, IndexOutcome.OUT_OF_SEQUENCE, IndexOutcome.NEW]
    assert catalog.frames.last_positions() == {"miles@1": 2}
    assert acked_through(catalog, JFK, "i1") == 0


def test_a_frame_after_a_gap_is_refused(catalog: Catalog) -> None:
    ref = known_query(catalog)
    assert catalog.frames.index([frame(ref, 0), frame(ref, 2), frame(ref, 3)]) == [
        IndexOutcome.NEW,
        *[IndexOutcome.OUT_OF_SEQUENCE] * 2,
    ]


def test_a_frame_of_an_unknown_or_deleted_query_moves_the_acknowledgement_and_nothing_else(catalog: Catalog) -> None:
    ref = known_query(catalog)
    catalog.frames.index([frame(ref, 0)])
    catalog.queries.delete("miles", 2)
    outcomes = catalog.frames.index([frame(ref, 1), frame(QueryRef("other", 1), 2, location=None)])
    assert outcomes == [IndexOutcome.DISCARDED, IndexOutcome.DISCARDED]
    assert acked_through(catalog, JFK, "i1") == 2
    assert catalog.frames.last_positions() == {"miles@1": 1}, (
        "what was there before it was deleted is still to be drained"
    )


def test_a_frame_that_is_not_in_the_log_is_never_counted_as_there(catalog: Catalog) -> None:
    ref = known_query(catalog)
    assert catalog.frames.index([frame(ref, 0, location=None)]) == [IndexOutcome.OUT_OF_SEQUENCE]
    assert acked_through(catalog, JFK, "i1") is None


def test_an_incarnation_continues_where_the_center_has_acknowledged_it(catalog: Catalog) -> None:
    ref = catalog.queries.register(spec(), 1)[0].ref
    assert hello(catalog, oldest_seq=5, next_seq=9) is None
    catalog.frames.index([frame(ref, 5), frame(ref, 6)])
    assert hello(catalog, oldest_seq=5, next_seq=9) == 6
    assert hello(catalog, incarnation="i2") is None


def test_an_edge_whose_state_is_older_than_what_it_sent_is_refused_and_alarmed(catalog: Catalog) -> None:
    ref = known_query(catalog)
    catalog.frames.index([frame(ref, n) for n in range(4)])
    for now_ms in (10, 20):
        with pytest.raises(ProtocolError):
            hello(catalog, oldest_seq=2, next_seq=2, now_ms=now_ms)
    (alarm,) = catalog.alarms.latest()
    assert (alarm.kind, alarm.edge, alarm.first_at_ms, alarm.last_at_ms, alarm.times) == (
        "edge-state-behind", "jfk", 10, 20, 2,
    )  # fmt: skip


def test_frames_that_a_center_set_back_has_lost_are_an_alarm_and_the_rest_is_taken(catalog: Catalog) -> None:
    ref = known_query(catalog)
    catalog.frames.index([frame(ref, 0)])
    assert hello(catalog, oldest_seq=4, next_seq=6) == 3
    assert catalog.frames.index([frame(ref, 4)]) == [IndexOutcome.NEW]
    assert [a.message for a in catalog.alarms.latest()] == ["edge jfk: frames 1 to 3 of incarnation i1 are lost"]


def test_forgetting_returns_the_segments_that_nothing_points_to(catalog: Catalog) -> None:
    ref = known_query(catalog)
    segments = ["miles@1/a", "miles@1/a", "miles@1/b"]
    catalog.frames.index([frame(ref, n, location=FrameLocation(s, n, 1)) for n, s in enumerate(segments)])
    assert catalog.frames.drop({"miles@1": 1}) == []
    assert catalog.frames.drop({"miles@1": 2}) == ["miles@1/a"]
    assert catalog.frames.last_positions() == {"miles@1": 3}
    assert [e.position for e in catalog.frames.entries("miles@1", 0, 3)] == [3]
    assert catalog.frames.drop({"miles@1": 2}) == [], "it may be called again"
    assert catalog.frames.index([frame(ref, 0)]) == [IndexOutcome.DUPLICATE], "a forgotten frame is a re-delivery still"


def test_a_deleted_query_leaves_the_positions_once_it_is_drained(catalog: Catalog) -> None:
    ref = known_query(catalog)
    catalog.frames.index([frame(ref, 0)])
    catalog.queries.delete("miles", 2)
    assert catalog.frames.drop({"miles@1": 1}) == ["miles@1/w-1.frames"]
    assert catalog.frames.last_positions() == {}


def test_a_key_is_read_back_and_a_foreign_one_refused() -> None:
    ref = QueryRef("miles", 12)
    assert query_from_key(query_key(ref)) == ref
    with pytest.raises(StorageError):
        query_from_key("miles")


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sent=st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=8))
def test_whatever_is_re_sent_each_frame_is_indexed_once_and_in_order(
    new_database: Callable[[], str], sent: list[list[int]]
) -> None:
    catalog = Catalog(new_database())
    ref = known_query(catalog)
    acknowledged: set[int] = set()
    for batch in sent:
        outcomes = catalog.frames.index([frame(ref, seq, crc32c=seq) for seq in batch])
        acknowledged |= {seq for seq, outcome in zip(batch, outcomes, strict=True) if outcome.acknowledged}
    entries = catalog.frames.entries("miles@1", 0, 100)
    assert [e.seq for e in entries] == sorted(acknowledged) == list(range(len(acknowledged)))
    assert [e.position for e in entries] == list(range(1, len(entries) + 1))
    catalog.close()


def test_threads_that_index_the_same_frames_at_once_index_each_of_them_once(catalog: Catalog) -> None:
    ref = known_query(catalog)
    batches = [[frame(ref, n, crc32c=n) for n in range(b * 5, b * 5 + 5)] for b in range(8)]

    def send(_thread: int) -> list[IndexOutcome]:
        return [outcome for batch in batches for outcome in catalog.frames.index(batch)]

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(send, range(4)))
    assert all(o in (IndexOutcome.NEW, IndexOutcome.DUPLICATE) for each in outcomes for o in each)
    assert sum(o is IndexOutcome.NEW for each in outcomes for o in each) == 40
    assert [e.seq for e in catalog.frames.entries("miles@1", 0, 100)] == list(range(40))


def _register(url: str, number: int) -> int:
    catalog = Catalog(url)
    try:
        return catalog.queries.register(spec(f"miles_{number % 2}"), number)[0].ref.version
    finally:
        catalog.close()


@pytest.mark.slow
def test_processes_that_open_a_new_catalog_at_once_agree(url: str) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["center.catalog"])
    with processes.Pool(4) as pool:
        assert pool.starmap(_register, [(url, n) for n in range(8)]) == [1] * 8
    catalog = Catalog(url)
    assert [q.ref.name for q in catalog.queries.all()] == ["miles_0", "miles_1"]
    catalog.close()


def test_a_column_has_one_type_at_all_edges_of_a_stream(catalog: Catalog) -> None:
    def greet(edge: str, kind: pa.DataType) -> None:
        stream = StreamRecord("flights", {"carrier": pa.string(), "distance": kind}, LIVE)
        hello(catalog, EdgeId(edge), streams=(stream,), oldest_seq=1, next_seq=1)

    greet("jfk", pa.int64())
    with pytest.raises(ProtocolError):
        greet("lga", pa.float64())
    assert [e.edge for e in catalog.edges.all()] == ["jfk"]
    greet("lga", pa.int64())
    catalog.edges.retire(EdgeId("jfk"))
    catalog.edges.retire(EdgeId("lga"))
    greet("ewr", pa.float64())


def test_hellos_of_one_transaction_see_each_other_and_each_has_its_outcome(catalog: Catalog) -> None:
    """As one after the other, on both databases."""

    def start(edge: str, kind: pa.DataType | None = None, incarnation: str = "i1", oldest: int = 1) -> SessionStart:
        stream = StreamRecord("flights", {"carrier": pa.string(), "distance": kind or pa.int64()}, LIVE)
        return SessionStart(EdgeId(edge), incarnation, {}, [stream], oldest, oldest, 1, f"s-{edge}")

    for edge in ("gone", "jfk", "lga"):
        catalog.edges.begin_sessions([start(edge)])
    catalog.edges.retire(EdgeId("gone"))
    version = catalog.version()
    float64 = pa.float64()
    outcomes = catalog.edges.begin_sessions(
        [start("new", float64), start("gone"), start("jfk"), start("lga", incarnation="i2"), start("sea", oldest=4)]
    )
    kinds = [type(outcome).__name__ for outcome in outcomes]
    assert kinds == ["ProtocolError", "Retired", "NoneType", "NoneType", "NoneType"]
    assert catalog.version() > version
    assert [(e.edge, e.incarnation, e.incarnations) for e in catalog.edges.all()] == [
        ("gone", "i1", 1), ("jfk", "i1", 1), ("lga", "i2", 2), ("sea", "i1", 1)
    ]  # fmt: skip
    assert catalog.edges.get("lga").state_lost_at_ms == 1 and catalog.edges.get("jfk").state_lost_at_ms is None
    # Nobody here has acknowledged the first frames of the edge that begins with its fourth.
    assert sorted(a.kind for a in catalog.alarms.latest()) == ["columns-differ", "frames-lost", "state-lost"]
    # The last edges with int64 take up float64, one after the other in one transaction: only the last one may.
    for edge in ("lga", "sea"):
        catalog.edges.retire(EdgeId(edge))
    outcomes = catalog.edges.begin_sessions([start("ewr", float64), start("jfk", float64), start("pdx", float64)])
    assert [type(outcome).__name__ for outcome in outcomes] == ["ProtocolError", "NoneType", "NoneType"]
    unchanged = catalog.version()
    catalog.edges.begin_sessions([start("jfk", float64), start("pdx", float64)])
    assert catalog.version() == unchanged


def test_the_job_ends_a_pause_and_only_an_operator_ends_a_quarantine(catalog: Catalog) -> None:
    paused, quarantined = (catalog.queries.register(spec(name), 1)[0].ref for name in ("a", "b"))
    catalog.quarantine.set_query_aside(paused, SetAside.PAUSED, "no common schema", 5)
    catalog.quarantine.set_query_aside(quarantined, SetAside.QUARANTINED, "the job died", 6)
    listed = catalog.quarantine.queries()
    assert [(q.state, q.deaths, q.since_ms) for q in listed.values()] == [("paused", 0, 5), ("quarantined", 0, 6)]
    assert sorted(a.kind for a in catalog.alarms.latest()) == ["query-paused", "query-quarantined"]
    catalog.quarantine.end_pauses(list(listed))
    assert list(catalog.quarantine.queries()) == [quarantined]
    assert [a.kind for a in catalog.alarms.latest()] == ["query-quarantined"]
    with pytest.raises(NotFound):
        catalog.quarantine.retry_query("a")
    catalog.quarantine.retry_query("b")
    assert catalog.quarantine.queries() == {} and catalog.alarms.latest() == []


def test_a_registration_says_whether_it_created_the_query_and_asks_before_it_does(catalog: Catalog) -> None:
    asked: list[str] = []
    first, created = catalog.queries.register(spec(), 1, before_new=lambda: asked.append("new"))
    again, created_again = catalog.queries.register(spec(), 2, before_new=lambda: asked.append("again"))
    assert (created, created_again, again, asked) == (True, False, first, ["new"])

    def refuse() -> None:
        raise NotFound("not now")

    with pytest.raises(NotFound):
        catalog.queries.register(spec("other"), 3, before_new=refuse)
    assert [q.ref.name for q in catalog.queries.all()] == ["miles"]
