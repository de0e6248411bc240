"""Pushed batches that are pushed again: how long they are remembered, and that a crash forgets none that is counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from edge.core.core import EdgeCore
from edge.core.events import Configured, Ingested, SourcesOpened
from edge.core.streams import StreamSpec
from edge.durability import DurableCore
from edge.durability.pushes import MAX_REMEMBERED, REMEMBERED_MS, CountedPushes
from edge.records import PushId
from edge.series import Points, SeriesMemory
from edgewater.base.errors import InvalidRequest
from edgewater.base.streams import TIME_COLUMN
from tests.refusals import refused

AT_MS = 1_700_000_000_000


def push_id(number: int, body: int | None = None) -> PushId:
    return PushId(
        number.to_bytes(16, "little"), (number if body is None else body).to_bytes(16, "little"), f"key {number}"
    )


def test_a_batch_is_remembered_for_ten_minutes() -> None:
    pushes = CountedPushes()
    assert pushes.records_of(push_id(1), AT_MS) is None
    pushes.add(push_id(1), AT_MS, 7)
    assert pushes.records_of(push_id(1), AT_MS + REMEMBERED_MS) == 7
    assert pushes.records_of(push_id(1), AT_MS + REMEMBERED_MS + 1) is None
    pushes.add(push_id(2), AT_MS + REMEMBERED_MS + 1, 1)
    assert len(pushes) == 1, "what is too old takes no memory"


def test_the_memory_is_bounded_and_the_oldest_batches_leave_first() -> None:
    pushes = CountedPushes()
    for number in range(MAX_REMEMBERED + 5):
        pushes.add(push_id(number), AT_MS, 1)
    assert len(pushes) == MAX_REMEMBERED
    assert [pushes.records_of(push_id(n), AT_MS) for n in (4, 5)] == [None, 1]


def test_a_key_with_another_body_is_refused() -> None:
    pushes = CountedPushes()
    pushes.add(push_id(1), AT_MS, 7)
    with refused(InvalidRequest, "Idempotency-Key", "key 1"):
        pushes.records_of(push_id(1, body=2), AT_MS)
    assert pushes.records_of(push_id(1, body=2), AT_MS + REMEMBERED_MS + 1) is None


def opened(directory: Path) -> DurableCore:
    def reread(*_: object) -> pa.RecordBatch:
        raise AssertionError("pushes are in the journal")

    return DurableCore(directory, lambda: EdgeCore({"events": StreamSpec({"x": pa.int64()})}), reread, "first")


def push(core: DurableCore, number: int) -> None:
    batch = pa.RecordBatch.from_pydict({"x": [number], TIME_COLUMN: pa.array([AT_MS], pa.int64())})
    core.ingest_payload(Ingested("events", "events:http", batch, AT_MS + number), push_id(number))


def known(core: DurableCore) -> list[int]:
    return [n for n in range(4) if core.state.pushes.records_of(push_id(n), AT_MS) is not None]


@pytest.mark.parametrize("crash", ["before the checkpoint", "after it", "with a damaged checkpoint"])
def test_a_crash_forgets_exactly_the_batches_that_it_has_not_counted(tmp_path: Path, crash: str) -> None:
    core = opened(tmp_path)
    core.handle(Configured(()))
    core.handle(SourcesOpened((("events", "events:http"),)))
    push(core, 0)
    core.checkpoint()
    push(core, 1)
    if crash != "before the checkpoint":
        core.checkpoint()
    push(core, 2)
    core.sync()
    push(core, 3)  # not synced: neither the records nor their identity survive
    assert known(core) == [0, 1, 2, 3]
    core.close()
    if crash == "with a damaged checkpoint":
        newest = max(tmp_path.glob("checkpoint-*.ckpt"))
        newest.write_bytes(newest.read_bytes()[:-1])
    again = opened(tmp_path)
    assert (known(again), again.core.streams["events"].records) == ([0, 1, 2], 3)
    assert again.state.pushes.to_bytes() == opened(tmp_path).state.pushes.to_bytes(), "a replay is deterministic"
    again.close()


@pytest.mark.parametrize("crash", ["before the checkpoint", "after it", "with a damaged checkpoint"])
def test_a_crash_leaves_the_last_point_of_a_series_and_its_increment_or_neither(tmp_path: Path, crash: str) -> None:
    def count(total: int) -> int:
        """Ingests the increment of a total; returns the increment."""
        point = (np.array([n], np.int64) for n in (150, 200 + total, total))
        given = Points([b"s" * 16], *point, np.array([True]), np.zeros(1))
        result = core.state.series_of("events:otlp").increments(given, 0, 10)
        batch = pa.RecordBatch.from_pydict({"x": result.added.bits[:1], TIME_COLUMN: pa.array([AT_MS], pa.int64())})
        core.ingest_payload(Ingested("events", "events:otlp", batch, AT_MS), series=result.update)
        return int(result.added.bits[0])

    core = opened(tmp_path)
    core.handle(Configured(()))
    core.handle(SourcesOpened((("events", "events:otlp"),)))
    core.state.series["events:otlp"] = SeriesMemory(100)
    assert count(5) == 5
    core.checkpoint()
    assert count(7) == 2
    if crash != "before the checkpoint":
        core.checkpoint()
        assert count(8) == 1
    core.sync()
    assert count(20) > 0, "it is not on disk, so it is sent again"
    core.close()
    if crash == "with a damaged checkpoint":
        newest = max(tmp_path.glob("checkpoint-*.ckpt"))
        newest.write_bytes(newest.read_bytes()[:-1])
    core = opened(tmp_path)
    assert count(20) == (13 if crash == "before the checkpoint" else 12)
    core.close()
