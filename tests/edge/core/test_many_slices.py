"""A query with many slices: what a batch has of each slice, and which slices are due."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from edge.core.core import EdgeCore
from edge.core.events import Acked, Configured, FrameBuilt, Ingested, PullEvent
from edge.core.shared_batch import BatchRecords, Reading
from edge.core.shipper import MOST_LEARNED
from edge.core.streams import StreamSpec
from edgewater.base.streams import LIVE, TIME_COLUMN
from edgewater.model.query import QuerySpec
from edgewater.synopses import EncodedKeys, GroupedAggregate
from edgewater.wire import QueryRef

COLUMNS = {"k": pa.string(), "x": pa.int64()}
REF = QueryRef("q", 1)
SECOND = 1_000


def spec(**parts: object) -> QuerySpec:
    given = {"name": "q", "from": "s", "measures": {"n": "count()", "t": "sum(x)"}, "window": {"tumbling": "1s"}}
    return QuerySpec.from_mapping({"group_by": ["k"], **given, **parts})


def batch(times: list[int], keys: list[str | None] | None = None) -> pa.RecordBatch:
    texts = ["a"] * len(times) if keys is None else keys
    columns = {"k": pa.array(texts, pa.string()), "x": pa.array(range(len(times))), TIME_COLUMN: pa.array(times)}
    return pa.record_batch(columns)


def edge_with(query: QuerySpec) -> EdgeCore:
    edge = EdgeCore({"s": StreamSpec(COLUMNS, LIVE, 0)})
    edge.handle(Configured(((REF, query),)))
    return edge


def pulled(edge: EdgeCore, now_ms: int, capacity: int = 1 << 30) -> list[int]:
    """Pulls one frame; returns the slices that it closes."""
    effects = edge.handle(PullEvent(capacity, edge.pulls.event_times(now_ms), 1e9))
    closed = [start for effect in effects if isinstance(effect, FrameBuilt) for start in effect.closed]
    edge.handle(Acked(edge.next_seq - 1))
    return closed


@pytest.mark.parametrize("columns", [["k"], ["k", "x"], []])
def test_a_slice_of_a_batch_has_the_records_and_keys_that_it_would_have_alone(columns: list[str]) -> None:
    rng = np.random.default_rng(2)
    times = (rng.integers(0, 20, 300) * SECOND + rng.integers(0, SECOND, 300)).tolist()
    given = batch(times, [None if n == 0 else f"k{n}" for n in rng.integers(0, 9, 300).tolist()])
    query = spec(group_by=columns) if columns else spec(group_by=[])
    bound = query.bind(COLUMNS)
    reading, starts = Reading.of(bound, REF), np.array(times) // SECOND * SECOND
    slices = BatchRecords.numbered(given, 100).by_slice(query.window, reading)
    assert [start for start, _ in slices] == sorted(set(starts.tolist()))
    for start, records in slices:
        rows = np.flatnonzero(starts == start)
        alone = given.take(pa.array(rows))
        assert records.batch.equals(alone.select(records.batch.schema.names))
        assert records.ids.tolist() == (100 + rows).tolist()
        assert records.times.tolist() == np.array(times)[rows].tolist()
        assert records.extent == (min(records.times), max(records.times))
        keys, expected = records.keys(bound, reading), bound.encoded_keys(alone)
        assert keys.inverse.tolist() == expected.inverse.tolist()
        assert [column.to_pylist() for column in keys.distinct] == [c.to_pylist() for c in expected.distinct]
        assert keys.counts.tolist() == expected.counts.tolist()


def test_encoded_keys_split_into_runs_of_one_row_and_of_all_rows() -> None:
    keys = EncodedKeys.of([pa.array(["b", "a", "b"])], 3)
    assert [k.distinct[0].to_pylist() for k in keys.split(np.array([0, 1, 2]))] == [["b"], ["a"], ["b"]]
    (whole,) = keys.split(np.array([0]))
    assert whole.inverse.tolist() == [0, 1, 0] and whole.counts.tolist() == [2, 1]


def test_slices_close_in_order_whatever_the_order_in_which_they_opened() -> None:
    edge = edge_with(spec(lateness="100s"))
    edge.handle(Ingested("s", "f", batch([5 * SECOND, SECOND, 3 * SECOND, 9 * SECOND]), 9 * SECOND))
    edge.handle(Ingested("s", "f", batch([4 * SECOND, 9 * SECOND + 1]), 9 * SECOND + 1))
    assert pulled(edge, 9 * SECOND + 1) == [SECOND, 3 * SECOND, 4 * SECOND, 5 * SECOND]
    assert edge.pulls.next_pull_ms(1e9, 9 * SECOND + 1) is None or pulled(edge, 9 * SECOND + 1) == []


@pytest.mark.parametrize("budget", [{}, {"budget": {"error": {"t": 10}}}])
def test_a_late_record_closes_a_slice_again_and_final_slices_leave_the_memory(budget: dict[str, object]) -> None:
    edge = edge_with(spec(lateness="5s", **budget))
    store = edge.queries[REF].store
    edge.handle(Ingested("s", "f", batch([0, SECOND, 3 * SECOND]), 3 * SECOND))
    assert pulled(edge, 3 * SECOND) == [0, SECOND]
    edge.handle(Ingested("s", "f", batch([10, 3 * SECOND + 1]), 3 * SECOND + 1))
    assert pulled(edge, 3 * SECOND + 1) == [0]
    assert pulled(edge, 3 * SECOND + 1) == []
    edge.handle(Ingested("s", "f", batch([30 * SECOND]), 30 * SECOND))
    assert pulled(edge, 30 * SECOND) == [3 * SECOND]
    assert set(store.slices) == {30 * SECOND}
    fresh = edge_with(spec(lateness="5s", **budget))
    fresh.restore(edge.to_state())
    assert fresh.queries[REF].store.nbytes == pytest.approx(store.nbytes, rel=0.5)


def test_a_restored_core_closes_the_slices_that_are_still_due() -> None:
    edge = edge_with(spec(lateness="100s", budget={"error": {"t": 2}}))
    edge.handle(Ingested("s", "f", batch([n * SECOND for n in range(6)]), 6 * SECOND))
    closed = pulled(edge, 6 * SECOND, 1)
    restored = EdgeCore({"s": StreamSpec(COLUMNS, LIVE, 0)})
    restored.restore(edge.to_state())
    while more := pulled(restored, 6 * SECOND, 1):
        closed += more
    assert closed == [n * SECOND for n in range(5)]


def test_only_the_newest_of_many_closed_slices_change_the_history() -> None:
    count = 3 * MOST_LEARNED
    edge = edge_with(spec())
    edge.handle(Ingested("s", "f", batch([n * SECOND for n in range(count + 1)]), count * SECOND))
    assert len(pulled(edge, count * SECOND)) == count
    assert edge.queries[REF].shipper.history.slices == MOST_LEARNED


def test_the_totals_of_many_slices_are_exact() -> None:
    edge = edge_with(spec())
    times = [n * 100 for n in range(2_000)]
    edge.handle(Ingested("s", "f", batch(times, [f"k{n % 3}" for n in range(2_000)]), 200 * SECOND))
    effects = edge.handle(PullEvent(1 << 30, edge.pulls.event_times(200 * SECOND), 1e9))
    totals = {
        partial.slice_start_ms: GroupedAggregate.from_bytes(partial.synopsis).measures["t"].query().value.tolist()
        for effect in effects
        if isinstance(effect, FrameBuilt)
        for partial in effect.frame.unpack().partials
    }
    assert {start: sum(each) for start, each in totals.items()} == {
        start: sum(n for n, at in enumerate(times) if start <= at < start + SECOND) for start in totals
    }
    assert len(totals) == 199
