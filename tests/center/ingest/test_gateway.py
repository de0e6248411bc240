from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from pathlib import Path

import grpc
import pyarrow as pa
import pytest

from center.catalog import Catalog
from center.storage.frame_log import FrameLog
from center.storage.wake import SocketChannel, Topic, Waker
from edgewater.base.streams import EdgeId
from edgewater.model.lookups import digest_of
from edgewater.wire import Frame, QueryRef
from edgewater.wire import uplink_pb2 as pb
from tests.center.catalog_world import acked_through
from tests.center.gateway_world import JFK, MILES, RawEdge, center, eventually, frame, spec
from tests.center.kept_frames import read_frame, stored_frame
from tests.insides import reading


async def test_a_frame_is_acknowledged_once_it_is_durable_and_indexed_and_not_before(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port) as edge:
        c.catalog.gate = gate = asyncio.Event()
        await edge.hello()
        await edge.send(frame(0))
        await eventually(lambda: c.log.durable == [("jfk", 0)])
        await edge.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=5)))
        await edge.until("time_echo")
        assert "ack" not in [m.WhichOneof("message") for m in edge.received], "the index does not have it yet"
        gate.set()
        await edge.acked(0)
        assert c.entries() == [("jfk", 0)]
        (entry,) = c.catalog.frames.entries("miles@1", 0, 1)
        assert read_frame(c.log, entry.segment, entry.offset, entry.length) == stored_frame(frame(0))
        assert entry.received_at_ms == c.clock[0]


async def test_all_frames_that_wait_share_one_fsync_and_one_transaction(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port) as edge, RawEdge(c.port) as other:
        c.catalog.gate = gate = asyncio.Event()
        await edge.hello()
        await other.hello("lga")
        await edge.send(frame(0))
        await eventually(lambda: c.log.durable)
        await edge.send(*(frame(n) for n in range(1, 50)))
        await other.send(*(frame(n) for n in range(50)))
        sent_bytes = 2 * sum(frame(n).wire_bytes for n in range(50))
        await eventually(lambda: reading(c.gateway.metrics.bytes) >= sent_bytes)
        gate.set()
        await edge.acked(49)
        await other.acked(49)
        assert c.catalog.batches == [1, 99]
        assert c.log.segment_files.commits == 2


async def test_a_session_cut_in_mid_stream_goes_on_where_the_center_is(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c:
        async with RawEdge(c.port) as edge:
            welcome = await edge.hello()
            assert not welcome.any_acked
            await edge.send(frame(0), frame(1), frame(2))
            await edge.acked(2)
        async with RawEdge(c.port) as edge:
            welcome = await edge.hello(oldest=0, following=4)
            assert (welcome.any_acked, welcome.acked_through) == (True, 2)
            await edge.deliver(frame(3))
        assert c.entries() == [("jfk", n) for n in range(4)]


async def test_a_re_delivered_frame_is_acknowledged_and_neither_written_nor_indexed_again(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c:
        async with RawEdge(c.port, greets=True) as edge:
            await edge.send(frame(0), frame(1))
            await edge.acked(1)
        async with RawEdge(c.port) as edge:
            await edge.hello(oldest=0, following=3)
            await edge.send(frame(0), frame(1), frame(2))
            await edge.acked(2)
        assert c.entries() == [("jfk", 0), ("jfk", 1), ("jfk", 2)]
        assert c.log.durable == [("jfk", 0), ("jfk", 1), ("jfk", 2)]


async def test_a_frame_of_an_unknown_or_deleted_query_is_acknowledged_counted_and_not_stored(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port, greets=True) as edge:
        await edge.send(frame(0), frame(1, QueryRef("unknown", 7)))
        await edge.acked(1)
        c.catalog.queries.delete("miles", 2)
        await edge.deliver(frame(2))
        assert c.log.durable[0] == ("jfk", 0)
        assert c.entries() == [("jfk", 0)]
        assert c.catalog.frames.last_positions() == {"miles@1": 1}
        assert reading(c.gateway.metrics.frames.labels("discarded")) == 2
        assert acked_through(c.catalog, JFK, "i1") == 2, "the edge has let go of them: they are not asked for again"


async def test_frames_of_a_query_known_to_be_deleted_are_not_written_to_the_log(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port, greets=True) as edge:
        await edge.until("queries", lambda told: told.queries)
        await edge.deliver(frame(0))
        c.catalog.queries.delete("miles", 2)
        await edge.until("queries", lambda told: not told.queries)
        await edge.deliver(frame(1))
        assert c.log.durable == [("jfk", 0)]


async def test_segments_that_nobody_will_ever_read_are_removed_at_the_start(tmp_path: Path) -> None:
    drained, ended = QueryRef("drained", 1), QueryRef("ended", 1)
    async with center(tmp_path, poll_ms=60_000) as c, RawEdge(c.port) as edge:
        for name in ("miles", "drained", "ended"):
            c.catalog.queries.register(spec(name), 1)
        await edge.hello()
        for sent in (frame(0), frame(1, drained), frame(2, ended)):
            await edge.send(sent)
            await edge.acked(sent.seq)
        assert c.catalog.frames.drop({"drained@1": 1}), "and then retention dies, before it has removed them"
        c.catalog.queries.delete("ended", 2)
        await edge.send(frame(3, ended))
        await edge.acked(3)
        c.catalog.refuse = True
        await edge.send(frame(4))
        await eventually(lambda: c.log.durable[-1] == ("jfk", 4))
    assert queries_on_disk(c.log) == ["drained@1", "ended@1", "ended@1", "miles@1", "miles@1"]
    (tmp_path / "log" / "commits" / "crashed-1.part").write_bytes(b"EWLG")
    async with center(tmp_path) as c:
        assert queries_on_disk(c.log) == ["ended@1", "miles@1", "miles@1"]
        assert list((tmp_path / "log").rglob("*.part")) == []
        for entry in (*c.catalog.frames.entries("ended@1", 0, 9), *c.catalog.frames.entries("miles@1", 0, 9)):
            assert read_frame(c.log, entry.segment, entry.offset, entry.length).seq == entry.seq


def queries_on_disk(log: FrameLog) -> list[str]:
    """Whose the log's segments are."""
    return sorted(query for segment in log.segments() for query in log.queries(segment))


async def test_a_query_registered_a_moment_ago_elsewhere_is_known_when_its_first_frame_comes(tmp_path: Path) -> None:
    async with center(tmp_path, poll_ms=60_000) as c, RawEdge(c.port, greets=True) as edge:
        c.catalog.queries.register(spec(), 1)
        await edge.deliver(frame(0))
        assert c.entries() == [("jfk", 0)]


async def test_a_gateway_that_is_woken_sends_a_query_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("center.ingest.gateway.POLL_S", 600.0)
    wakes = SocketChannel(tmp_path / "wake")
    async with center(tmp_path, wakes=wakes) as c, RawEdge(c.port, greets=True) as edge:
        api = Catalog(f"sqlite:///{tmp_path}/catalog.db", changed=Waker(wakes, Topic.CATALOG).wake)
        await asyncio.to_thread(api.queries.register, spec(), 1)
        await edge.until("queries", lambda queries: len(queries.queries) == 1)
        api.close()


@pytest.mark.slow
async def test_frames_of_many_queries_that_come_together_are_one_segment(tmp_path: Path) -> None:
    names = [f"q{n}" for n in range(40)]
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        for name in names:
            c.catalog.queries.register(spec(name), 1)
        await edge.hello()
        c.catalog.gate = gate = asyncio.Event()
        await edge.send(frame(0, QueryRef("q0", 1)))
        await eventually(lambda: c.log.durable)
        await edge.send(*(frame(n, QueryRef(f"q{n}", 1)) for n in range(1, 40)))
        await eventually(lambda: reading(c.gateway.metrics.bytes) >= sum(frame(n).wire_bytes for n in range(39)))
        gate.set()
        await edge.acked(39)
        assert len(c.log.segments()) <= 3
        entries = c.catalog.frames.entries_in({f"{name}@1": (0, 9) for name in names})
        assert {key: [e.seq for e in found] for key, found in entries.items()} == {f"q{n}@1": [n] for n in range(40)}
        dropped = c.catalog.frames.drop({f"{name}@1": 1 for name in names[:-1]})
        assert c.log.segments()[-1] not in dropped, "one frame in it is left"
        assert c.catalog.frames.drop({"q39@1": 1}) != []


async def test_a_query_registered_in_the_catalog_reaches_a_connected_edge(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port, greets=True) as edge:
        assert len((await edge.until("queries")).queries.queries) == 0
        began = asyncio.get_running_loop().time()
        await asyncio.to_thread(c.catalog.queries.register, spec(), 1)
        (query,) = (await edge.until("queries")).queries.queries
        assert asyncio.get_running_loop().time() - began < 1.0
        assert (query.name, query.version) == ("miles", 1)
        await asyncio.to_thread(c.catalog.queries.delete, "miles", 2)
        assert len((await edge.until("queries")).queries.queries) == 0


async def test_the_rows_of_a_table_are_sent_once_and_not_to_an_edge_that_has_them(tmp_path: Path) -> None:
    def put(name: str) -> None:
        c.catalog.tables.put("names", "carrier", pa.table({"carrier": ["UA"], "name": [name]}), c.clock[0])

    async def next_queries(count: int) -> list[set[int]]:
        """The digests of the next queries, with rows left out."""
        queries = (await edge.until("queries", lambda message: len(message.queries) == count)).queries.queries
        assert not any("rows" in lookup for q in queries for lookup in json.loads(q.spec)["lookup"].values())
        return [set(q.tables.values()) for q in queries]

    def sent() -> list[int]:
        return [digest_of(m.table.rows) for m in edge.received if m.HasField("table")]

    async with center(tmp_path) as c:
        put("United")
        wanted = [spec(name, lookup={"names": {"key": "carrier"}}, group_by=["name"]) for name in ("miles", "more")]
        await asyncio.to_thread(c.catalog.queries.register, wanted[0], 1)
        async with RawEdge(c.port, greets=True) as edge:
            (digests,) = await next_queries(1)
            assert sent() == [*digests]
            await asyncio.to_thread(c.catalog.queries.register, wanted[1], 1)
            assert await next_queries(2) == [digests, digests]
            assert sent() == [*digests], "the same rows for both queries"
        async with RawEdge(c.port) as edge:
            await edge.hello(tables=digests)
            assert await next_queries(2) == [digests, digests]
            assert sent() == []
            await asyncio.to_thread(put, "Unified")
            later = set.union(*await next_queries(4))
            assert sent() == [*(later - digests)] and digests < later
        async with RawEdge(c.port) as edge:
            await edge.hello(tables=[1, 2])
            await next_queries(4)
            assert {*sent()} == later, "another center may have given other tables"


async def test_an_edge_is_asked_only_what_expects_it(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec("mine", edges=["jfk"])]) as c, RawEdge(c.port) as edge:
        c.catalog.queries.register(spec("theirs", edges=["lga"]), 1)
        c.catalog.queries.register(spec("elsewhere", **{"from": "trains"}), 1)
        await edge.hello()
        queries = (await edge.until("queries")).queries.queries
        assert [q.name for q in queries] == ["mine"]


async def test_error_budgets_are_shared_by_the_edges_that_are_expected(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge, RawEdge(c.port) as other:
        c.catalog.queries.register(spec(budget={"error": {"miles": 1000, "farthest": 80}}), 1)
        await edge.hello()
        await edge.report_budget()
        assert dict((await edge.until("budget")).budget.shares) == {"miles": 1000, "farthest": 80}
        await edge.report_budget(through_ms=60_000)
        await other.hello("lga")
        await other.report_budget()
        less = (await edge.until("budget")).budget
        assert dict(less.shares) == {"miles": 500, "farthest": 80}
        assert dict((await other.until("budget")).budget.shares) == {"farthest": 80}, "nothing has been given back yet"
        await other.report_budget()
        await edge.report_budget(through_ms=120_000)
        more = (await other.until("budget")).budget
        assert (dict(more.shares), more.from_ms) == ({"miles": 500, "farthest": 80}, 120_000)
        await asyncio.to_thread(c.catalog.edges.retire, EdgeId("lga"))
        all_of_it = (await edge.until("budget")).budget
        assert dict(all_of_it.shares) == {"miles": 1000, "farthest": 80}
        assert all_of_it.from_ms > c.clock[0], "not for slices that lga may have closed"


async def test_grants_survive_the_gateway_and_are_sent_again(tmp_path: Path) -> None:
    async with (
        center(tmp_path, queries=[spec(budget={"error": {"miles": 1000}})]) as c,
        RawEdge(c.port, greets=True) as edge,
    ):
        await edge.report_budget()
        first = (await edge.until("budget")).budget
    async with center(tmp_path) as c, RawEdge(c.port, greets=True) as edge:
        assert (await edge.until("budget")).budget == first


async def test_a_grant_that_came_before_its_query_is_sent_again(tmp_path: Path) -> None:
    async with (
        center(tmp_path, queries=[spec(budget={"error": {"miles": 1000}})]) as c,
        RawEdge(c.port, greets=True) as edge,
    ):
        await edge.report_budget()
        first = (await edge.until("budget")).budget
        edge.budget = None
        await edge.report_budget()
        assert (await edge.until("budget")).budget == first


async def test_an_edge_with_a_share_it_was_not_given_is_cut_back_flagged_and_counted(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge, RawEdge(c.port) as other:
        c.catalog.queries.register(spec(budget={"error": {"miles": 1000}}), 1)
        for each, name in ((edge, "jfk"), (other, "lga")):
            await each.hello(name)
            await each.report_budget()
        await edge.until("budget")
        await edge.report_budget(shares={"miles": 5_000})
        cut = (await edge.until("budget", lambda b: b.version > 1)).budget
        assert cut.shares["miles"] <= 1000
        await eventually(lambda: c.catalog.alarms.latest())
        (alarm,) = c.catalog.alarms.latest()
        assert (alarm.kind, alarm.edge) == ("share-not-granted", JFK)
        assert "5000" in alarm.message
        assert reading(c.gateway.metrics.alarms.labels("share-not-granted")) == 1


async def test_two_gateways_divide_one_budget(tmp_path: Path) -> None:
    async with (
        center(tmp_path) as one,
        center(tmp_path, "log2") as two,
        RawEdge(one.port) as edge,
        RawEdge(two.port) as other,
    ):
        one.catalog.queries.register(spec(budget={"error": {"miles": 1000}}), 1)
        await edge.hello()
        await edge.report_budget()
        await edge.until("budget")
        await edge.report_budget(through_ms=60_000)
        await other.hello("lga")
        await other.report_budget()
        await edge.until("budget", lambda b: b.shares["miles"] == 500)
        await edge.report_budget(through_ms=60_000)
        await other.until("budget", lambda b: b.shares["miles"] == 500 and b.from_ms == 60_000)


async def test_a_budget_report_that_no_edge_can_mean_ends_the_session(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port, greets=True) as edge:
        await edge.call.write(pb.FromEdge(budget_report=pb.BudgetReport(query="Not A Name")))
        status, code, message = await edge.refusal()
        assert (status, code) == (grpc.StatusCode.FAILED_PRECONDITION, "protocol")
        assert "Not A Name" in message


async def test_the_processing_delay_is_sent_under_a_staleness_budget(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec(budget={"staleness": "2s"})]) as c, RawEdge(c.port, greets=True) as edge:
        await asyncio.to_thread(c.catalog.budgets.record_processing_delays, {MILES: 340}, 5)
        assert (await edge.until("budget")).budget.center_ms == 340


async def test_heartbeats_and_statuses_reach_the_catalog_and_each_heartbeat_is_echoed(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port, greets=True) as edge:
        await edge.until("queries", lambda told: told.queries)
        progress = [
            pb.StreamProgress(stream="flights", watermark_ms=77, records=5),
            pb.StreamProgress(stream="trains", watermark_ms=78, ended=True, records=6),
        ]
        beat = pb.Heartbeat(streams=progress, rtt_ms=40, drops={"late": 2}, sent_at_ms=c.clock[0] - 10)
        await edge.call.write(pb.FromEdge(heartbeat=beat))
        echo = (await edge.until("time_echo")).time_echo
        assert (echo.edge_sent_at_ms, echo.center_received_at_ms) == (c.clock[0] - 10, c.clock[0])
        refused = pb.QueryStatus(query="miles", query_version=1, code="invalid-query", message="no column")
        await edge.call.write(pb.FromEdge(query_status=refused))
        await eventually(lambda: c.catalog.queries.statuses(MILES) and c.catalog.edges.get(JFK).records)
        record = c.catalog.edges.get(JFK)
        assert record.watermarks == {"flights": 77, "trains": 1 << 62}
        assert (record.records, record.drops, record.clock_offset_ms) == ({"flights": 5, "trains": 6}, {"late": 2}, 10)
        assert c.catalog.queries.statuses(MILES)[JFK].message == "no column"
        refused.message = "lookup: {'halls': {'rows': 'eJ… is not accepted; unknown key; expected one of the keys name"
        await edge.call.write(pb.FromEdge(query_status=refused))
        await eventually(lambda: "0.3.0, which has no `lookup`" in c.catalog.queries.statuses(MILES)[JFK].message)
        assert record.connected
        await edge.call.write(pb.FromEdge(goodbye=pb.Goodbye(reason="done")))
        await eventually(lambda: not c.catalog.edges.get(JFK).connected)


async def test_what_sources_reject_and_columns_without_values_are_known_and_alarm(tmp_path: Path) -> None:
    def alarms() -> list[tuple[str, int]]:
        return sorted((a.kind, a.times) for a in c.catalog.alarms.latest())

    async def beat(records: int, *columns: str) -> None:
        progress = pb.StreamProgress(stream="flights")
        first = '{"carrier":"AA"}: distance: got \'far\'; expected int64 such as 42'
        progress.rejected.add(source="flights:http", reason="wrong-type", records=records, first=first)
        for column in columns:
            progress.null_columns.add(source="flights:http", column=column)
        await edge.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(streams=[progress], sent_at_ms=c.clock[0])))
        await edge.until("time_echo")
        expected = [("flights:http", "wrong-type", min(records, 1 << 62))]
        await eventually(lambda: list(map(tuple, c.catalog.edges.get(JFK).rejected.get("flights", ()))) == expected)

    async with center(tmp_path) as c, RawEdge(c.port, greets=True) as edge:
        await beat(0)
        assert alarms() == []
        await beat(3)
        await eventually(alarms)
        assert alarms() == [("records-rejected", 1)]
        await beat(3, "distance")
        await eventually(lambda: len(alarms()) == 2)
        assert alarms() == [("column-null", 1), ("records-rejected", 1)], "no further record was rejected"
        await beat((1 << 64) - 1, "distance")
        await eventually(lambda: alarms() == [("column-null", 1), ("records-rejected", 2)])
        alarm = next(a for a in c.catalog.alarms.latest() if a.kind == "records-rejected")
        assert alarm.edge == JFK and all(
            part in alarm.message for part in ("flights:http", "wrong-type", "AA", "distance: got 'far'")
        )
        assert list(map(tuple, c.catalog.edges.get(JFK).null_columns["flights"])) == [("flights:http", "distance")]


async def test_after_goodbye_all_that_was_sent_is_acknowledged(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port, greets=True) as edge:
        await edge.send(*(frame(n) for n in range(20)))
        await edge.call.write(pb.FromEdge(goodbye=pb.Goodbye(reason="done")))
        await edge.acked(19)
        while await edge.call.read() is not grpc.aio.EOF:
            pass
        assert await edge.call.code() == grpc.StatusCode.OK


async def test_a_gateway_that_stops_acknowledges_what_it_has_read(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port) as edge:
        c.catalog.gate = gate = asyncio.Event()
        await edge.hello()
        await edge.send(frame(0))
        await eventually(lambda: c.log.durable)
        stopping = asyncio.create_task(c.gateway.stop())
        gate.set()
        await edge.acked(0)
        await stopping


@pytest.mark.slow
async def test_an_edge_that_sends_more_than_its_credit_is_read_no_further(tmp_path: Path) -> None:
    large = [frame(n, content=os.urandom(8_000)) for n in range(150)]
    async with center(tmp_path, credit_bytes=20_000, queries=[spec()]) as c, RawEdge(c.port) as edge:
        welcome = await edge.hello()
        assert welcome.credit_bytes == 20_000
        c.log.segment_files.refuse_append = True
        sending = asyncio.create_task(edge.send(*large))
        await edge.until("throttle", lambda throttle: throttle.retry_after_ms > 0)
        for _ in range(20):
            await edge.until("throttle", lambda throttle: throttle.retry_after_ms > 0)
        most = (2 * 20_000 // large[0].wire_bytes + 1) * large[0].raw_bytes
        assert reading(c.gateway.metrics.pending) <= most, "by bytes before compression"
        c.log.segment_files.refuse_append = False
        await edge.acked(149)
        await sending
        assert c.entries() == [("jfk", n) for n in range(150)]


def many(seqs: Iterable[int]) -> list[Frame]:
    return [frame(n) for n in seqs]


async def test_two_gateways_over_one_catalog_and_log_count_each_frame_once(tmp_path: Path, url: str) -> None:
    async with center(tmp_path, url=url) as a, center(tmp_path, url=url) as b:
        a.catalog.queries.register(spec(), 1)
        async with RawEdge(a.port) as first, RawEdge(b.port) as second:
            await first.hello()
            await second.hello(following=30)
            await asyncio.gather(first.send(*many(range(20))), second.send(*many(range(30))))
            await asyncio.gather(first.acked(19), second.acked(29))
        assert b.entries() == [("jfk", n) for n in range(30)]
        assert [e.position for e in a.catalog.frames.entries("miles@1", 0, 99)] == list(range(1, 31))
        for entry in a.catalog.frames.entries("miles@1", 0, 99):
            assert read_frame(a.log, entry.segment, entry.offset, entry.length) == stored_frame(frame(entry.seq))
        kinds = [reading(c.gateway.metrics.frames.labels("new")) for c in (a, b)]
        assert sum(kinds) == 30


async def test_edges_that_name_one_link_get_equal_shares_of_it(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port) as first, RawEdge(c.port) as second:
        for name, edge in (("a", first), ("b", second)):
            await edge.hello(name, link="ship-42")
            load = pb.LinkReport.QueryLoad(query="miles", query_version=1, sent_bytes=100)
            report = pb.LinkReport(low_bytes_s=4_000, high_bytes_s=5_000, queries=[load])
            await edge.call.write(pb.FromEdge(link_report=report))
        for edge in (first, second):
            await edge.until("link_share", lambda share: share.bytes_s == 2_000)
        stored = c.catalog.links.of([EdgeId("a")])[EdgeId("a")]
        assert stored.low_bytes_s == 4_000 and stored.loads == {MILES: (100.0, 0.0)}
