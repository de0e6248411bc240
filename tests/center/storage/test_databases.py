"""What the stores ask of a database, whichever it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, event

from center.catalog import Catalog, ComponentRegistry, IndexOutcome, UnindexedFrame
from center.results import ResultStore
from center.storage.database import open_engine, read_transaction, schema_transaction, write_transaction
from center.storage.frame_log import FrameLocation
from edgewater.base.errors import InvalidConfig, NotFound, ProtocolError, StorageError
from edgewater.base.streams import MAX_TIME_MS, EdgeId
from edgewater.model.edge_records import HeartbeatRecord, QueryStatusRecord
from tests.center.catalog_world import FLIGHTS, JFK, LGA, frame, hello, spec
from tests.center.results_world import MINUTE, REF, Job, total
from tests.insides import engine_of

MOST = (1 << 63) - 1
OpenCatalog = Callable[[], Catalog]


def index(catalog: Catalog, frames: Sequence[UnindexedFrame]) -> int:
    """Indexes frames as a gateway does, which tries until it may acknowledge; how often it was refused."""
    refused = 0
    while True:
        try:
            outcomes = catalog.frames.index(frames)
        except OSError:
            refused += 1
        else:
            assert outcomes == [IndexOutcome.NEW] * len(frames)
            return refused


@pytest.mark.slow
def test_positions_are_seen_in_order_and_without_gaps_whoever_commits_and_whoever_fails(
    open_catalog: OpenCatalog,
) -> None:
    gateways, batches, size = 4, 12, 3
    reader = open_catalog()
    ref = reader.queries.register(spec(), 1)[0].ref
    catalogs = [open_catalog() for _ in range(gateways)]
    edges = [EdgeId(f"edge-{n}") for n in range(gateways)]
    for edge in edges:
        hello(reader, edge)
    attempts = iter(range(1 << 20))

    def fail_now_and_then(_connection: Any) -> None:
        if next(attempts) % 4 == 1:
            raise OSError("killed with its positions given and nothing committed")

    event.listen(engine_of(catalogs[0]), "commit", fail_now_and_then)
    together = threading.Barrier(gateways)

    def send(number: int) -> int:
        together.wait(timeout=20)
        seqs = range(0, batches * size, size)
        sent = [[frame(ref, seq, edge=edges[number]) for seq in range(at, at + size)] for at in seqs]
        return sum(index(catalogs[number], batch) for batch in sent)

    seen = [0]
    with ThreadPoolExecutor(gateways) as pool:
        sending = [pool.submit(send, number) for number in range(gateways)]
        while seen[-1] < gateways * batches * size:
            last = reader.frames.last_positions()["miles@1"]
            entries = reader.frames.entries("miles@1", 0, last)
            assert [e.position for e in entries] == list(range(1, last + 1))
            seen.append(last)
            if all(s.done() for s in sending):
                assert reader.frames.last_positions()["miles@1"] == gateways * batches * size
        refused = [s.result() for s in sending]
    assert seen == sorted(seen)
    assert refused[0] > 0 and refused[1:] == [0] * (gateways - 1)
    for edge in edges:
        assert [e.seq for e in entries if e.edge == edge] == list(range(batches * size))


def test_one_reading_transaction_sees_one_state(url: str, catalog: Catalog) -> None:
    engine = open_engine(url)
    with read_transaction(engine) as connection:
        before = connection.exec_driver_sql("SELECT count(*) FROM queries").scalar_one()
        catalog.queries.register(spec(), 1)
        assert connection.exec_driver_sql("SELECT count(*) FROM queries").scalar_one() == before == 0
    with read_transaction(engine) as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM queries").scalar_one() == 1
    engine.dispose()


def test_gateways_that_note_the_same_edges_in_any_order_do_not_block_each_other(open_catalog: OpenCatalog) -> None:
    catalogs = [open_catalog(), open_catalog()]
    edges = [EdgeId(f"edge-{n}") for n in range(20)]
    for edge in edges:
        hello(catalogs[0], edge)
    beats = [HeartbeatRecord(edge, {}, {}, {}, 0, 0.0, 0.0, 0.0, 5_000) for edge in edges]
    together = threading.Barrier(2)

    def note(number: int) -> None:
        for _ in range(15):
            together.wait(timeout=20)
            catalogs[number].edges.record_heartbeats(beats if number == 0 else reversed(beats))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(note, range(2))) == [None, None]


def test_of_two_first_hellos_at_once_with_other_column_types_one_is_refused(
    catalog: Catalog, open_catalog: OpenCatalog
) -> None:
    other = open_catalog()
    floats = replace(FLIGHTS, columns={"distance": pa.float64()})
    waiting = [lambda: hello(other, LGA, streams=(floats,))]

    def meanwhile(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        # What a transaction that writes begins with, here on SQLite and on PostgreSQL.
        if waiting and (statement == "BEGIN IMMEDIATE" or "FROM counters" in statement):
            waiting.pop()()

    event.listen(engine_of(catalog), "before_cursor_execute", meanwhile)
    with pytest.raises(ProtocolError, match=r"flights\.distance is int64 at edge jfk and float64 at edge lga"):
        hello(catalog)
    assert not waiting
    assert [e.edge for e in catalog.edges.all()] == [LGA]


def test_a_column_with_a_default_is_added_to_a_table_of_an_older_release(url: str) -> None:
    def opened(*columns: Column[Any]) -> Table:
        table = Table("added_columns", MetaData(), Column("id", BigInteger, primary_key=True), *columns)
        engine = open_engine(url)
        with schema_transaction(engine, table.metadata) as connection:
            connection.execute(table.insert().values(id=len(columns)))
        engine.dispose()
        return table

    opened()
    table = opened(Column("work", BigInteger, nullable=False, server_default="7"))
    engine = open_engine(url)
    with read_transaction(engine) as connection:
        assert connection.execute(table.select().order_by(table.c.id)).all() == [(0, 7), (1, 7)]
    engine.dispose()


def test_names_are_ordered_as_python_orders_them(catalog: Catalog) -> None:
    names = ["b", "B", "a-2", "a1", "a_3", "A", "a.4"]
    ref = catalog.queries.register(spec(), 1)[0].ref
    for name in names:
        hello(catalog, EdgeId(name))
        catalog.queries.record_statuses([QueryStatusRecord(ref, EdgeId(name), True, "", "")])
    assert [e.edge for e in catalog.edges.all()] == sorted(names)
    assert list(catalog.queries.statuses(ref)) == sorted(names)


def test_the_largest_numbers_come_back_as_they_were(catalog: Catalog) -> None:
    ref = catalog.queries.register(spec(), MOST)[0].ref
    hello(catalog, oldest_seq=1 << 62, next_seq=1 << 62, now_ms=MOST)
    beat = HeartbeatRecord(JFK, {"flights": MAX_TIME_MS}, {"flights": MOST}, {}, 1 << 62, 1e300, 5e-324, -1e300, 7)
    catalog.edges.record_heartbeats([beat])
    location = FrameLocation("miles@1/w-1.frames", 1 << 61, 1 << 40)
    arrived = UnindexedFrame(ref, JFK, "i1", 1 << 62, (1 << 32) - 1, MOST, -MOST, location)
    assert catalog.frames.index([arrived]) == [IndexOutcome.NEW]
    (entry,) = catalog.frames.entries("miles@1", 0, MOST)
    assert (entry.seq, entry.crc32c, entry.offset, entry.length) == (1 << 62, (1 << 32) - 1, 1 << 61, 1 << 40)
    assert (entry.wire_bytes, entry.received_at_ms) == (MOST, -MOST)
    edge = catalog.edges.get(JFK)
    assert (edge.watermarks, edge.records) == ({"flights": MAX_TIME_MS}, {"flights": MOST})
    assert (edge.bandwidth_bytes_s, edge.rtt_ms, edge.clock_offset_ms) == (1e300, 5e-324, -1e300)


def test_answers_of_any_age_come_back_with_their_bytes(open_job: Callable[..., Job]) -> None:
    job, late_ms = open_job("a"), 1 << 62
    job.batch(job.frame("a", 0, **{f"m{-(10**9)}": 3}), job.frame("a", MAX_TIME_MS, **{f"m{10**9}": 4}), now_ms=late_ms)
    records, _ = job.store.windows(REF, None, None, 10)
    assert [(r.window_start_ms, total(r.synopsis)) for r in records] == [(-(10**9) * MINUTE, 3), (10**9 * MINUTE, 4)]
    assert [r.answered_at_ms for r in records] == [late_ms, late_ms]


def test_a_name_with_a_nul_is_not_found_and_a_text_with_one_is_kept_without_it(catalog: Catalog) -> None:
    with pytest.raises(NotFound):
        catalog.queries.get("miles\0")
    with pytest.raises(NotFound):
        catalog.edges.retire(EdgeId("jfk\0"))
    catalog.alarms.add("odd", "a\0b", JFK, 1)
    assert [a.message for a in catalog.alarms.latest()] == ["a\ufffdb"]


def test_the_drivers_own_errors_are_storage_errors_too(url: str) -> None:
    engine = open_engine(url)
    with pytest.raises(StorageError, match="nonsense"), write_transaction(engine) as connection:
        connection.connection.cursor().execute("nonsense")
    engine.dispose()


@pytest.mark.parametrize("store", [Catalog, ResultStore, ComponentRegistry])
def test_a_file_that_is_no_database_is_a_storage_error(tmp_path: Path, store: Callable[[str], object]) -> None:
    (tmp_path / "odd.db").write_bytes(b"no database at all\n" * 100)
    for path, told in (("odd.db", "not a database"), ("odd.db/below/c.db", "Not a directory")):
        with pytest.raises(StorageError, match=told):
            store(f"sqlite:///{tmp_path}/{path}")


@pytest.mark.parametrize("given", ["mysql://root:secret@h/db", "root:secret@h", "mongodb+srv://root:secret@h/db"])
def test_a_url_of_another_database_is_refused_and_its_password_not_told(given: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Catalog(given)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("url", ["u:top-secret@127.0.0.1:1/db", "u@127.0.0.1:1/db?password=top-secret"])
def test_a_message_shows_no_password_wherever_the_url_has_it(url: str) -> None:
    with pytest.raises(StorageError) as failed:
        Catalog(f"postgresql://{url}")
    assert "127.0.0.1" in failed.value.message and "top-secret" not in failed.value.message
