"""`UplinkOutbox` against a real gateway: shares are journaled before they are confirmed, and the center's processing
delay shortens the edge's deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from center.budgets import Grant
from center.catalog import Catalog
from center.ingest.budget_sync import grants_of
from edge.core.arrival_reports import SamplingSettings
from edge.core.core import EdgeCore
from edge.core.events import Ingested, SourceEnded, SourcesOpened
from edge.core.streams import StreamSpec
from edge.durability import DurableCore, JournalGroupCommit
from edge.records import RejectedRecords
from edge.uplink import Input, UplinkOutbox
from edge.uplink.link_reports import LinkReports
from edge.uplink.ports import Workload
from edgewater.base.errors import StorageError
from edgewater.base.streams import LIVE, TIME_COLUMN, EdgeId
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef, SamplingReason
from edgewater.wire import uplink_pb2 as pb
from tests.edge.uplink_world import gateway, uplink

REF = QueryRef("q", 1)
COLUMNS = {"k": pa.string(), "x": pa.int64()}


def spec(**budget: object) -> QuerySpec:
    parts = {"group_by": ["k"], "measures": {"s": "sum(x)"}, "window": {"tumbling": "1s"}, "budget": budget}
    return QuerySpec.from_mapping({"name": "q", "from": "events", **parts})


@dataclass(slots=True)
class Edge:
    durable: DurableCore
    outbox: UplinkOutbox

    def ingest(self, *times_ms: int) -> None:
        columns = {"k": ["p"] * len(times_ms), "x": [10] * len(times_ms), TIME_COLUMN: list(times_ms)}
        batch = pa.record_batch(columns, pa.schema({**COLUMNS, TIME_COLUMN: pa.int64()}))
        self.durable.ingest_payload(Ingested("events", "f", batch, 1 << 40))
        self.outbox.changed.set()

    @property
    def shares(self) -> dict[str, float]:
        pipeline = self.durable.core.queries.get(REF)
        return dict(pipeline.store.shares) if pipeline is not None else {}


@asynccontextmanager
async def edge(path: Path, port: int, name: str = "jfk") -> AsyncIterator[Edge]:
    durable = DurableCore(path / name, lambda: EdgeCore({"events": StreamSpec(COLUMNS)}), _no_ranges, f"i-{name}")
    durable.handle(SourcesOpened((("events", "f"),)))
    commit = JournalGroupCommit(durable)
    outbox = UplinkOutbox(name, {}, durable, commit, lambda: 1_000)
    tasks = [asyncio.create_task(commit.run()), asyncio.create_task(uplink(port, outbox).run())]
    try:
        yield Edge(durable, outbox)
    finally:
        for task in reversed(tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        durable.close()


def _no_ranges(*_: object) -> pa.RecordBatch:
    raise AssertionError("no source here can be read again")


async def until(test: object) -> None:
    while not test():  # type: ignore[operator]
        await asyncio.sleep(0.01)


def word(catalog: Catalog, name: str) -> Grant:
    books = catalog.budgets.states(-1)
    return grants_of(books[REF]).get(EdgeId(name), Grant()) if REF in books else Grant()


@pytest.mark.parametrize("turns", range(4))
async def test_a_take_that_is_cancelled_just_as_something_changes_ends(tmp_path: Path, turns: int) -> None:
    durable = DurableCore(tmp_path, lambda: EdgeCore({"events": StreamSpec(COLUMNS)}), _no_ranges, "i")
    outbox = UplinkOutbox("jfk", {}, durable, JournalGroupCommit(durable), lambda: 1_000)
    durable.core.pulls.next_pull_ms = lambda *_: 2_000  # type: ignore[method-assign]
    task = asyncio.create_task(outbox.take(1 << 16))
    await asyncio.sleep(0)
    outbox.changed.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=1.0)
    assert done and task.cancelled()
    durable.close()


async def test_a_budget_moves_from_one_edge_to_two_by_confirmations(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (port, catalog), edge(tmp_path, port) as jfk:
        catalog.queries.register(spec(error={"s": 100}), 1)
        await until(lambda: jfk.shares == {"s": 100.0})
        jfk.ingest(500, 1_500, 2_500)
        await until(lambda: jfk.durable.core.queries[REF].through_ms >= 2_500)
        async with edge(tmp_path, port, "lga") as lga:
            await until(lambda: lga.shares == {"s": 50.0})
            assert jfk.shares == {"s": 50.0}
            assert lga.durable.core.queries[REF].store.schedule.last.from_ms == 2_000, "jfk closed two slices under 100"


async def test_a_share_survives_a_restart_and_is_confirmed_without_a_new_message(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (port, catalog):
        catalog.queries.register(spec(error={"s": 100}), 1)
        async with edge(tmp_path, port) as jfk:
            await until(lambda: jfk.shares == {"s": 100.0} and jfk.durable.unsynced_bytes == 0)
            before = word(catalog, "jfk")
        async with edge(tmp_path, port) as jfk:
            assert jfk.shares == {"s": 100.0}
            await until(lambda: jfk.outbox._reported_ms)
            assert word(catalog, "jfk") == before


async def test_a_share_is_confirmed_only_once_it_is_in_the_journal(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (port, catalog), edge(tmp_path, port) as jfk:
        await until(jfk.outbox.configured.is_set)
        refusing = jfk.durable.sync

        def refuse() -> None:
            raise StorageError("no space left on device")

        jfk.durable.sync = refuse  # type: ignore[method-assign]
        catalog.queries.register(spec(error={"s": 100}), 1)
        await until(lambda: jfk.outbox._reported_ms)  # and now it waits for the disk
        confirmed = asyncio.create_task(until(lambda: word(catalog, "jfk") != Grant()))
        done, _ = await asyncio.wait([confirmed], timeout=0.2)
        assert not done, "not even that it applies nothing"
        jfk.durable.sync = refusing  # type: ignore[method-assign]
        await confirmed
        await until(lambda: jfk.shares == {"s": 100.0})


async def test_the_edge_learns_the_processing_delay_of_each_query(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (port, catalog), edge(tmp_path, port) as jfk:
        catalog.queries.register(spec(staleness="2s"), 1)
        await until(lambda: REF in jfk.durable.core.queries)
        catalog.budgets.record_processing_delays({REF: 340}, 5)
        await until(lambda: jfk.outbox.processing_ms == {REF: 340})


def budget(shares: dict[str, float], version: int, delay_ms: int) -> pb.Budget:
    names = {"query": REF.name, "query_version": REF.version}
    return pb.Budget(**names, shares=shares, version=version, center_ms=delay_ms)


async def test_only_shares_are_confirmed_not_a_new_processing_delay(tmp_path: Path) -> None:
    durable = DurableCore(tmp_path, lambda: EdgeCore({"events": StreamSpec(COLUMNS)}), _no_ranges, "i")
    commit = JournalGroupCommit(durable)
    outbox = UplinkOutbox("jfk", {}, durable, commit, lambda: 1_000)
    outbox.on_queries([(REF, spec(error={"s": 100}))])
    writing = asyncio.create_task(commit.run())
    reported = [
        [(r.version, dict(r.shares)) for r in await outbox.budget_reports(all_queries=False)]
        for shares, version, delay_ms in (({"s": 50.0}, 1, 0), ({"s": 50.0}, 1, 340), ({"s": 50.0}, 1, 340))
        if outbox.on_budget(budget(shares, version, delay_ms)) is None
    ]
    stated = [(1, {"s": 50.0})]
    assert reported == [stated, [], stated], "the center repeats a message if no report has reached it"
    writing.cancel()
    durable.close()


def test_a_sampling_message_sets_rate_offset_reason_and_expected_records(tmp_path: Path) -> None:
    durable = DurableCore(tmp_path, lambda: EdgeCore({"events": StreamSpec(COLUMNS, LIVE)}), _no_ranges, "i")
    outbox = UplinkOutbox("jfk", {}, durable, JournalGroupCommit(durable), lambda: 1_000)
    mapping = {"name": "q", "from": "events", "measures": {"s": "sum(x)"}, "window": {"tumbling": "1s"}}
    outbox.on_queries([(REF, QuerySpec.from_mapping({**mapping, "accuracy": {"error": "5%"}}))])
    names = {"query": REF.name, "query_version": REF.version}
    reason = pb.Sampling.MEASURE
    outbox.on_sampling(pb.Sampling(**names, rate=1.5, clock_offset_ms=3.0, reason=reason, expected_records=400))
    monitor = durable.core.queries[REF].monitor
    assert monitor is not None and monitor.sampling == SamplingSettings(1.0, 3, SamplingReason.MEASURE, 400)
    durable.close()


def test_a_heartbeat_is_due_at_once_only_with_news(tmp_path: Path) -> None:
    durable = DurableCore(tmp_path, lambda: EdgeCore({"events": StreamSpec(COLUMNS)}), _no_ranges, "i")
    durable.handle(SourcesOpened((("events", "f"),)))
    busy = [0.0]
    outbox = UplinkOutbox("jfk", {}, durable, JournalGroupCommit(durable), lambda: 1_000)
    outbox.workload = Workload(lambda: busy[0])
    jfk = Edge(durable, outbox)

    def says(heartbeat: pb.Heartbeat) -> pb.Heartbeat:
        assert not outbox.has_news()
        return heartbeat

    assert outbox.has_news()
    says(outbox.heartbeat())
    jfk.ingest(500, 1_500)
    assert not outbox.has_news(), "records and a watermark: they come with frames, and with the next heartbeat"
    outbox.inputs = (Input("events", "f", (7,)),)
    assert outbox.has_news()
    assert says(outbox.heartbeat()).inputs[0].fingerprints == [7]
    outbox.inputs = ()
    assert outbox.has_news()
    assert [i.stream for i in says(outbox.heartbeat()).inputs] == [""], "no file is read any more"
    rejected = RejectedRecords("malformed", 3, None, None)
    durable.ingest_payload(Ingested("events", "f", _no_records(), 1 << 40, rejected=(rejected,)))
    assert outbox.has_news()
    assert says(outbox.heartbeat()).streams[0].rejected[0].records == 3
    durable.ingest_payload(Ingested("events", "f", _no_records(), 1 << 40, rejected=(rejected,)))
    assert not outbox.has_news(), "more of the same"
    durable.handle(SourceEnded("events", "f"))
    assert outbox.has_news()
    assert says(outbox.heartbeat()).streams[0].ended
    busy[0] = 0.95
    outbox.heartbeat()
    assert outbox.has_news(), "the center may have to lower a sampling rate"
    busy[0] = 0.1
    says(outbox.heartbeat())
    durable.close()


def _no_records() -> pa.RecordBatch:
    schema = pa.schema({**COLUMNS, TIME_COLUMN: pa.int64()})
    return pa.record_batch({name: [] for name in schema.names}, schema)


def test_a_link_report_has_what_has_changed_by_a_fifth_and_comes_at_most_every_five_seconds() -> None:
    reports, first, second = LinkReports(), QueryRef("a", 1), QueryRef("b", 2)
    assert reports.due(0.0, 0.0, {}, 0) is None, "nothing is known"
    report = reports.due(4_000.0, 5_000.0, {first: (100.0, 0.0), second: (10.0, 5.0)}, 1_000)
    assert report is not None
    assert [(q.query, q.query_version, q.sent_bytes, q.omitted_bytes) for q in report.queries] == [
        ("a", 1, 100, 0), ("b", 2, 10, 5),
    ]  # fmt: skip
    assert reports.due(8_000.0, 9_000.0, {first: (500.0, 0.0)}, 5_000) is None, "too soon"
    assert reports.due(4_500.0, 5_500.0, {first: (110.0, 0.0), second: (11.0, 5.0)}, 60_000) is None
    changed = reports.due(4_500.0, 5_500.0, {first: (110.0, 2.0), second: (11.0, 5.0)}, 60_000)
    assert changed is not None and [q.query for q in changed.queries] == ["a"], "it now omits values"
    assert (changed.low_bytes_s, changed.high_bytes_s) == (4_500, 5_500)
    assert reports.due(2_000.0, 5_500.0, {first: (110.0, 2.0)}, 70_000) is not None, "the link has become slower"
    assert reports.due(1_000.0, 5_500.0, {}, 60_000) is not None, "the clock was set back"
