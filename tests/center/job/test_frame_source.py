"""The reader without Spark: it is called here as Spark calls it."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxFiles, ReadMinRows

from center.catalog import LastPositions, frame_index
from center.job.admission import BatchLimits
from center.job.coalescing import MANY_QUERIES
from center.job.frame_source import WARM_UP, WARM_UP_BATCHES, FramePartition, FrameReader, SourceOptions, divide
from center.job.ledger_writer import CatalogEvents, LedgerWriter
from center.job.metrics import JobMetrics
from center.job.rows import FrameRow, RowKind, from_table
from center.ledger import Ledger
from center.storage.frame_log import FrameEntry
from center.storage.query_partition import ALL_QUERIES, QueryPartition
from edgewater.model.errors import StorageError
from edgewater.model.registered_query import query_key
from edgewater.model.streams import EdgeId
from edgewater.wire import FrameBody, QueryRef


@pytest.fixture
def options(world: Any) -> SourceOptions:
    return SourceOptions(world.catalog_url, world.results_url, str(world.log_dir), retention_every_ms=0)


@pytest.fixture
def reader(options: SourceOptions) -> FrameReader:
    return FrameReader(options)


def read_all(reader: FrameReader, start: dict[str, int], end: dict[str, int]) -> list[FrameRow]:
    executor = pickle.loads(pickle.dumps(reader))
    partitions = [pickle.loads(pickle.dumps(p)) for p in reader.partitions(start, end)]
    return [row for p in partitions for batch in executor.read(p) for row in from_table(batch)]


def positions(rows: list[FrameRow]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in rows:
        if row.kind is RowKind.READ:
            found.setdefault(row.query, []).extend(range(row.position, row.last + 1))
    return found


def test_options_travel_as_text_and_names_that_spark_blacks_out() -> None:
    options = SourceOptions("postgresql://u:secret@h/d", "r", "l", BatchLimits(1, 2, 3, 4), 5, 6, 7, plans_ahead=True)

    text = options.to_options()

    assert SourceOptions.from_options(text) == options
    assert all("url" in name for name, value in text.items() if "secret" in value)


def test_a_stream_begins_at_the_positions_of_the_result_store(reader: FrameReader, world: Any) -> None:
    assert reader.initialOffset() == {}


@pytest.mark.slow
def test_all_frames_are_read_once_in_batches_of_any_size(world: Any, options: SourceOptions) -> None:
    refs = world.register("b", "a")
    for window in range(3):
        for ref in refs:
            world.ship_window(ref, window)
    reader, start, read = FrameReader(options), dict[str, int](), list[FrameRow]()
    while (end := reader.latestOffset(start, ReadMaxFiles(5))) != start:
        assert sum(end.values()) - sum(start.values()) <= 5
        read += read_all(reader, start, end)
        start = end

    assert start == world.catalog.frames.last_positions()
    assert positions(read) == {"a@1": list(range(1, 19)), "b@1": list(range(1, 19))}


def test_what_the_store_has_consumed_is_not_read_again(reader: FrameReader, world: Any) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    writer = LedgerWriter(Ledger(), world.store, CatalogEvents(world.catalog), JobMetrics(), now_ms=world.clock)
    writer.apply([], [], {"a@1": 4})

    assert positions(read_all(reader, {}, {"a@1": 6})) == {"a@1": [5, 6]}
    assert reader.partitions({}, {"a@1": 4}) == []


def test_a_batch_waits_a_moment_for_an_edge_that_spoke_before_and_then_goes_on_without(
    reader: FrameReader, world: Any
) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    first = reader.latestOffset({}, ReadMaxBytes(1 << 30))
    world.ship(world.edges[0], ref, FrameBody(5))

    assert reader.latestOffset(first, ReadMaxBytes(1 << 30)) == world.catalog.frames.last_positions()


@pytest.mark.slow
def test_the_next_group_commit_of_many_queries_that_close_together_is_in_the_same_batch(
    reader: FrameReader, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = world.register(*(f"q{n:02}" for n in range(MANY_QUERIES + 8)))
    commits, polled = [refs[:MANY_QUERIES], refs[MANY_QUERIES:]], reader._catalog.frames.last_positions_since

    def next_commit(known: LastPositions | None) -> LastPositions:
        for ref in commits.pop(0) if commits else ():
            world.ship(world.edges[0], ref, FrameBody(5))
        return polled(known)

    monkeypatch.setattr(reader._catalog.frames, "last_positions_since", next_commit)
    assert len(reader.latestOffset({}, ReadMaxBytes(1 << 30))) == len(refs)


def test_a_poll_without_news_reads_no_positions(
    reader: FrameReader, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    at = reader.latestOffset({}, ReadMaxBytes(1 << 30))
    read, reads = frame_index.select_last_positions, list[int]()

    def counted(connection: Any) -> dict[str, int]:
        reads.append(1)
        return read(connection)

    monkeypatch.setattr(frame_index, "select_last_positions", counted)
    assert [reader.latestOffset(at, ReadMaxBytes(1 << 30)) for _ in range(5)] == [at] * 5
    assert not reads
    world.ship_window(ref, 1)
    assert reader.latestOffset(at, ReadMaxBytes(1 << 30)) == world.catalog.frames.last_positions() != at


def test_an_offset_has_its_keys_in_order_whatever_comes_new(reader: FrameReader, world: Any) -> None:
    (b,) = world.register("b")
    world.ship_window(b, 0)
    first = reader.latestOffset({}, ReadMaxBytes(1 << 30))
    (a,) = world.register("a")
    world.ship_window(a, 0)
    second = reader.latestOffset(first, ReadMaxBytes(1 << 30))

    assert list(second) == ["a@1", "b@1"]
    assert json.dumps(reader.latestOffset(second, ReadMaxBytes(1 << 30))) == json.dumps(second)


def test_an_offset_never_goes_back(reader: FrameReader, world: Any) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    ahead = {"a@1": 1000, "gone@1": 5}

    assert reader.latestOffset(ahead, ReadAllAvailable()) == ahead
    assert reader.latestOffset(ahead, ReadMaxBytes(1)) == ahead


def test_the_limits_that_spark_gives_are_respected(world: Any) -> None:
    (ref,) = world.register("a")
    for window in range(2):
        world.ship_window(ref, window)
    last = world.positions_of(ref)
    tight = SourceOptions(world.catalog_url, world.results_url, str(world.log_dir), BatchLimits(frames=2))
    reader = FrameReader(tight)

    assert reader.getDefaultReadLimit() == ReadMaxBytes(BatchLimits().bytes)
    assert reader.latestOffset({}, reader.getDefaultReadLimit()) == {"a@1": 2}
    assert reader.latestOffset({}, ReadMaxBytes(1)) == {"a@1": 1}
    assert reader.latestOffset({}, ReadMinRows(50)) == {"a@1": 2}
    assert reader.latestOffset({}, ReadAllAvailable()) == {"a@1": last}


def test_available_now_stops_at_what_was_there_at_its_beginning(reader: FrameReader, world: Any) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    target = world.positions_of(ref)
    reader.prepareForTriggerAvailableNow()
    world.ship_window(ref, 1)

    end = reader.latestOffset({}, ReadMaxBytes(1 << 30))

    assert end == {"a@1": target}
    assert reader.latestOffset(end, ReadMaxBytes(1 << 30)) == end


def test_a_catalog_that_does_not_answer_gives_the_old_offset(
    reader: FrameReader, world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world.register("a")
    broken = FrameReader(SourceOptions(f"sqlite:///{world.log_dir}", world.results_url, str(world.log_dir)))
    world.log_dir.mkdir(exist_ok=True)  # a directory is no database

    offsets = [broken.latestOffset({"a@1": 3}, ReadAllAvailable()) for _ in range(4)]

    assert offsets == [{"a@1": 3}] * 4
    assert [r.args[1] for r in caplog.records if r.args] == [1, 2, 4], "told at each doubling"


def test_a_damaged_record_becomes_a_row_that_says_so(reader: FrameReader, world: Any) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    (victim,) = world.catalog.frames.entries("a@1", 2, 3)
    damage(world.log_dir / victim.segment, victim)

    rows = read_all(reader, {}, world.catalog.frames.last_positions())

    assert positions(rows) == {"a@1": [1, 2, 3, 4, 5, 6]}
    (damaged,) = [r for r in rows if r.kind is RowKind.DAMAGED]
    assert damaged.position == 3
    assert b"CRC32C" in damaged.payload


def test_a_body_that_does_not_unpack_becomes_a_row_that_says_so(reader: FrameReader, world: Any) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    (first, *_) = entries = world.catalog.frames.entries("a@1", 0, 6)
    other = FramePartition((("a@1", _swapped(first, entries[1])),))

    (batch,) = reader.read(other)

    (row,) = (row for row in from_table(batch) if row.kind is not RowKind.READ)
    assert row.kind is RowKind.DAMAGED
    assert b"the index says" in row.payload


def _swapped(entry: FrameEntry, other: FrameEntry) -> FrameEntry:
    """An entry that points at another frame's record."""
    from dataclasses import replace

    return replace(entry, segment=other.segment, offset=other.offset, length=other.length)


def test_a_lost_segment_is_damage_but_a_log_that_is_not_there_is_not(reader: FrameReader, world: Any) -> None:
    refs = world.register("a", "b")
    for ref in refs:
        world.ship_window(ref, 0)
    for segment in {e.segment for e in world.catalog.frames.entries("a@1", 0, 6)}:
        (world.log_dir / segment).unlink()

    rows = read_all(reader, {}, world.catalog.frames.last_positions())

    assert {r.query for r in rows if r.kind is RowKind.DAMAGED} == {"a@1"}
    world.log_dir.rename(world.path / "unmounted")
    with pytest.raises(StorageError, match="cannot be read"):
        read_all(reader, {}, world.catalog.frames.last_positions())


def damage(path: Path, entry: FrameEntry) -> None:
    data = bytearray(path.read_bytes())
    data[entry.offset + entry.length // 2] ^= 0xFF
    path.write_bytes(data)


def frames_of(*sizes: int) -> list[tuple[str, FrameEntry]]:
    ref = QueryRef("a", 1)
    return [("a@1", FrameEntry(ref, i, EdgeId("e"), "i1", i, 0, "s", 0, n, n, 0)) for i, n in enumerate(sizes, 1)]


def test_a_small_batch_is_one_task() -> None:
    assert [len(part) for part in divide(frames_of(*[1000] * 50), 8)] == [50]


def test_a_large_batch_is_cut_into_runs_of_about_equal_bytes() -> None:
    frames = frames_of(*[1 << 20] * 40)

    parts = divide(frames, 4)

    assert [len(part) for part in parts] == [10, 10, 10, 10]
    assert [frame for part in parts for frame in part] == frames


def test_a_batch_is_cut_by_the_work_of_its_frames_however_small_they_are_on_disk() -> None:
    small = frames_of(*[1000] * 8)
    compressed = [(key, replace(entry, plain_bytes=1 << 20)) for key, entry in small]
    costly = [(key, replace(entry, work=2_048)) for key, entry in small]

    for frames in (compressed, costly):
        assert [len(part) for part in divide(frames, 4)] == [2, 2, 2, 2]


def test_an_empty_range_has_no_partitions(reader: FrameReader, world: Any) -> None:
    (ref,) = world.register("a")
    world.ship(world.edges[0], ref, FrameBody(5))

    assert reader.partitions({"a@1": 1}, {"a@1": 1}) == []
    assert divide([], 4) == []


def test_the_stream_of_a_standby_reads_nothing_and_goes_on_where_the_last_leader_stopped(
    world: Any, options: SourceOptions, tmp_path: Path
) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    leads = tmp_path / "leads"
    reader = FrameReader(replace(options, leads=str(leads)))
    start = reader.initialOffset()
    for batch in range(1, WARM_UP_BATCHES + 1):
        warm = reader.latestOffset(start, ReadMaxBytes(1 << 20))
        assert warm == {WARM_UP: batch}
        assert read_all(reader, start, warm) == []
        assert len(reader.partitions(start, warm)) == 1, "a task, so that Spark starts its workers"
        start = warm
    assert reader.latestOffset(start, ReadMaxBytes(1 << 20)) == start

    # Another driver applies the first window, and its frames leave the log. Then this one leads.
    writer = LedgerWriter(Ledger(), world.store, CatalogEvents(world.catalog), JobMetrics(), now_ms=world.clock)
    applied = world.positions_of(ref)
    writer.apply([], [], {"a@1": applied})
    writer.close()
    world.ship_window(ref, 1)
    leads.write_text(str(ALL_QUERIES))
    end = reader.latestOffset(start, ReadMaxBytes(1 << 20))
    assert end == {WARM_UP: WARM_UP_BATCHES, "a@1": world.positions_of(ref)}
    assert set(positions(read_all(reader, start, end))["a@1"]) == set(range(applied + 1, end["a@1"] + 1))

    leads.unlink()
    world.ship_window(ref, 2)
    assert reader.latestOffset(end, ReadMaxBytes(1 << 20)) == end


def test_the_stream_of_a_driver_reads_the_queries_of_its_partition_and_another_one_as_far_as_it_was_not_applied(
    world: Any, options: SourceOptions, tmp_path: Path
) -> None:
    first, second = QueryPartition.all(2)
    refs = world.register(*(next(f"q{n}" for n in range(9) if f"q{n}@1" in half) for half in (first, second)))
    for ref in refs:
        world.ship_window(ref, 0)
    leads = tmp_path / "leads"
    leads.write_text(str(first))
    reader = FrameReader(replace(options, leads=str(leads)))
    start = reader.latestOffset(reader.initialOffset(), ReadMaxBytes(1 << 20))
    assert start == {query_key(refs[0]): world.positions_of(refs[0])}

    # The driver of the second partition applies its frames and dies; this one, which has lost its own, takes over.
    writer = LedgerWriter(Ledger(), world.store, CatalogEvents(world.catalog), JobMetrics(), now_ms=world.clock)
    writer.apply([], [], {query_key(refs[1]): (applied := world.positions_of(refs[1]))})
    writer.close()
    for ref in refs:
        world.ship_window(ref, 1)
    leads.write_text(str(second))
    end = reader.latestOffset(start, ReadMaxBytes(1 << 20))
    read = positions(read_all(reader, start, end))
    assert list(read) == [query_key(refs[1])]
    assert set(read[query_key(refs[1])]) == set(range(applied + 1, world.positions_of(refs[1]) + 1))

    leads.write_text("")  # names no partition: the stream is parked
    world.ship_window(refs[1], 2)
    assert reader.latestOffset(end, ReadMaxBytes(1 << 20)) == {WARM_UP: 1, **end}
