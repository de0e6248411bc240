"""A query whose open windows take too much memory loses records, says so, and costs the others nothing."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from edge.core.core import EdgeCore
from edge.core.events import Configured, Ingested, MemoryLimited, SourcesOpened
from edge.core.memory import MAX_STARTS, FullSlices, MemoryAction, SliceMemoryLimits, next_limit
from edge.core.streams import StreamSpec
from edgewater.base.streams import TIME_COLUMN
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import FrameBody, InputLoss, QueryRef
from tests.cells import at_night
from tests.edge.core.test_core import pull_all

COLUMNS = {"id": pa.int64(), "x": pa.int64()}
HOUR_MS = 3_600_000
LIMITS = SliceMemoryLimits(query_bytes=64 << 10, all_bytes=256 << 10)
HOSTILE, HONEST = QueryRef("hostile", 1), QueryRef("honest", 1)


def query(name: str, group_by: str | None, window: str, **more: Any) -> QuerySpec:
    keys = {"group_by": [group_by]} if group_by else {}
    return QuerySpec.from_mapping(
        {"name": name, "from": "s", "measures": {"n": "count()", "total": "sum(x)"}, "window": {"tumbling": window}}
        | keys
        | more
    )


def core_of(*queries: QuerySpec, state_bytes: int | None = None) -> EdgeCore:
    core = EdgeCore({"s": StreamSpec(COLUMNS)})
    core.handle(SourcesOpened((("s", "file"),), (), state_bytes))
    core.handle(Configured(tuple((QueryRef(q.name, 1), q) for q in queries)))
    return core


def ingest(
    core: EdgeCore, first: int, count: int, at_ms: int, limits: SliceMemoryLimits | None = LIMITS
) -> dict[str, int]:
    """Records with new ids, as the shell ingests them; returns the drops of the hostile query."""
    ids = pa.array(np.arange(first, first + count))
    columns = {"id": ids, "x": ids, TIME_COLUMN: pa.array(np.full(count, at_ms))}
    drops = {e.reason: e.count for e in core.handle(Ingested("s", "file", pa.record_batch(columns), 1 << 50))}  # type: ignore[union-attr]
    while limits is not None and (found := next_limit(core.held_memory(), limits)) is not None:
        core.handle(MemoryLimited(*found))
    return drops


def losses(bodies: list[tuple[str, FrameBody]]) -> dict[str, list[InputLoss]]:
    found: dict[str, list[InputLoss]] = {}
    for name, body in bodies:
        if body.losses:
            found.setdefault(name, []).extend(body.losses)
    return found


def observed(bodies: list[tuple[str, FrameBody]], name: str) -> int:
    return sum(close.observed for query, body in bodies if query == name for close in body.closes)


def shipped(bodies: list[tuple[str, FrameBody]]) -> int:
    partials = [GroupedAggregate.from_bytes(p.synopsis) for _, body in bodies for p in body.partials]
    return round(sum(p.query("n").value.sum() for p in partials))


def lost(from_ms: int, to_ms: int) -> InputLoss:
    return InputLoss("memory", "query-memory", from_ms, to_ms)


def test_a_query_that_groups_by_something_unique_stops_alone_and_states_it_once() -> None:
    core = core_of(query("hostile", "id", "3650d"), query("honest", None, "1h"))
    year, dropped = 3650 * 24 * HOUR_MS, 0
    for i in range(50):
        dropped += ingest(core, 1000 * i, 1000, i * 1000).get("query-memory", 0)
        assert core.pending_bytes < LIMITS.all_bytes
    assert 0 < dropped < 50_000
    ingest(core, 0, 1, HOUR_MS)
    bodies = pull_all(core)
    assert losses(bodies) == {"hostile": [lost(0, year)]}, "one statement, however many records follow"
    assert observed(bodies, "honest") == 50_000
    ingest(core, 0, 1, year)  # its window closes, and it goes on
    bodies = pull_all(core)
    assert observed(bodies, "hostile") + dropped + 1 == 50_001
    assert ingest(core, 0, 100, year + 1) == {} and losses(pull_all(core)) == {}


def test_windows_that_follow_are_complete_again() -> None:
    core = core_of(query("hostile", "id", "1h"))
    for hour in range(3):
        for i in range(10 if hour == 1 else 1):
            ingest(core, 500 * i, 500, hour * HOUR_MS + i)
    bodies = pull_all(core)
    assert losses(bodies) == {"hostile": [lost(HOUR_MS, 2 * HOUR_MS)]}
    assert not core.queries[HOSTILE].store.full.suspended & {2 * HOUR_MS}


def test_a_window_that_began_beside_a_full_one_resumes_when_that_is_gone() -> None:
    core = core_of(query("hostile", "id", "1h"))
    core.streams["s"].spec = StreamSpec(COLUMNS, disorder_ms=60_000)  # type: ignore[misc]
    for i in range(5):
        ingest(core, 1000 * i, 1000, HOUR_MS - 5 + i)
    ingest(core, 0, 10, HOUR_MS + 1)  # counted; beside the full window it is suspended too
    assert core.queries[HOSTILE].store.full.suspended == {0, HOUR_MS}
    assert ingest(core, 10, 10, HOUR_MS + 2) == {"query-memory": 10}
    ingest(core, 20, 1, HOUR_MS + 60_001)  # closes the first hour
    assert not core.queries[HOSTILE].store.full.suspended
    assert ingest(core, 21, 10, HOUR_MS + 60_002) == {}
    ingest(core, 0, 1, 3 * HOUR_MS)
    assert losses(pull_all(core)) == {"hostile": [lost(0, 2 * HOUR_MS)]}


@pytest.mark.slow
def test_closed_slices_that_wait_for_the_link_are_never_limited() -> None:
    core = core_of(query("hostile", "id", "1s"))
    for second in range(200):
        assert ingest(core, 500 * second, 500, 1000 * second) == {}
    assert core.pending_bytes > 4 * LIMITS.all_bytes, "which is for backpressure to bound"
    ingest(core, 0, 1, 300_000)
    bodies = pull_all(core)
    assert observed(bodies, "hostile") == 100_000 and losses(bodies) == {}


def test_of_many_queries_together_the_largest_is_dropped_and_a_small_one_never() -> None:
    names = [f"h{i}" for i in range(6)]
    core = core_of(*(query(name, "id", "3650d") for name in names), query("honest", "x", "1h", where="x < 100"))
    for i in range(30):
        ingest(core, 1000 * i, 1000, i)
        assert sum(m.nbytes for m in core.held_memory().values()) <= LIMITS.all_bytes
    ingest(core, 0, 1, HOUR_MS)
    bodies = pull_all(core)
    assert observed(bodies, "honest") == 100
    assert set(losses(bodies)) == set(names)


def test_what_a_discarded_slice_has_sent_stays_counted() -> None:
    core = core_of(query("hostile", "id", "1h", cache={"eviction": "lru"}))
    ingest(core, 0, 300, 1)
    sent = pull_all(core, 1000, {"s": 0})
    assert sum(len(body.partials) for _, body in sent) > 0
    ingest(core, 1000, 20, 2)
    core.handle(MemoryLimited(HOSTILE, MemoryAction.DISCARD))
    assert core.held_memory()[HOSTILE].nbytes == 0
    ingest(core, 0, 5, 2)
    ingest(core, 0, 1, 2 * HOUR_MS)
    bodies = pull_all(core)
    closes = [close for _, body in bodies for close in body.closes if close.slice_start_ms == 0]
    assert [close.observed for close in closes] == [shipped(sent)]
    assert losses(sent + bodies) == {"hostile": [lost(0, HOUR_MS)]}


@pytest.mark.slow
def test_withheld_groups_of_closed_windows_are_dropped_last_and_late_records_state_it() -> None:
    spec = query("hostile", "id", "1s", budget={"error": {"total": 1e9, "n": 1e9}}, lateness="3650d")
    core = core_of(spec)
    for second in range(60):
        pull_all(core)
        assert ingest(core, 0, 200, 1000 * second) == {}
        assert core.held_memory()[HOSTILE].nbytes <= LIMITS.query_bytes
    assert core.queries[HOSTILE].store.full.floor_ms > 1000
    assert losses(pull_all(core)) == {}, "what is withheld is reported; nothing is lost"
    assert ingest(core, 0, 5, 500) == {"query-memory": 5}
    assert losses(pull_all(core)) == {"hostile": [lost(0, 1000)]}


FINE = {"window": "1ms", "lateness": "3650d"}


def at(core: EdgeCore, times_ms: list[int], limits: SliceMemoryLimits = LIMITS) -> dict[str, int]:
    """Ingests a record at each of these event times; returns the drops by reason."""
    columns = {"id": pa.array([1] * len(times_ms)), "x": pa.array([1] * len(times_ms)), TIME_COLUMN: pa.array(times_ms)}
    effects = core.handle(Ingested("s", "file", pa.record_batch(columns), 1 << 50))
    while (found := next_limit(core.held_memory(), limits)) is not None:
        core.handle(MemoryLimited(*found))
    drops: dict[str, int] = {}
    for effect in effects:
        drops[effect.reason] = drops.get(effect.reason, 0) + effect.count  # type: ignore[union-attr]
    return drops


@pytest.mark.parametrize("budget", [None, *at_night({"error": {"total": 1e9, "n": 1e9}})], ids=["exact", "budget"])
def test_finished_slices_are_counted_and_the_oldest_are_given_up_for_a_stated_loss(
    budget: dict[str, Any] | None,
) -> None:
    core = core_of(query("hostile", None, **FINE, **({"budget": budget} if budget else {})))
    pipeline, limits = core.queries[HOSTILE], SliceMemoryLimits(30 << 10, 1 << 20)
    for batch in range(100):
        assert at(core, [10 * batch], limits) == {}
        assert core.held_memory()[HOSTILE].nbytes <= limits.query_bytes
        pull_all(core)
    floor_ms = pipeline.store.full.floor_ms
    assert 300 < floor_ms <= 980 and len(pipeline.store.finished.starts()) < 70
    assert losses(pull_all(core)) == {}, "to forget a slice loses nothing as long as nothing comes for it"
    assert at(core, [5, 5, 7, floor_ms - 1, 980, 995]) == {"query-memory": 4}
    bodies = pull_all(core)
    (first, *rest) = losses(bodies)["hostile"]
    assert (first, rest) == (lost(5, 6), [lost(7, 8), lost(floor_ms - 1, floor_ms)])
    counts = {c.slice_start_ms: (c.observed, c.late) for _, body in bodies for c in body.closes}
    assert counts[980] == (2, 1), "what the slice had counted before is continued"


def test_the_counters_of_a_slice_that_takes_no_more_records_are_not_kept() -> None:
    store = core_of(query("hostile", None, **FINE)).queries[HOSTILE].store
    store.full.raise_floor(500)
    for start in (10, 510):
        store.finish(start, (1, 0, start, start))
    assert (store.finished.get(10), store.finished.get(510)) == (None, (1, 0, 510, 510))


@pytest.mark.slow
def test_what_a_slice_is_counted_with_is_what_it_takes() -> None:
    """Most of a slice with few groups are the objects around its arrays."""
    core = core_of(query("hostile", None, **FINE))
    at(core, [*range(100)])
    tracemalloc.start()
    before, counted = tracemalloc.get_traced_memory()[0], core.queries[HOSTILE].nbytes
    columns = {"id": np.arange(300), "x": np.arange(300), TIME_COLUMN: 1000 + np.arange(300)}
    core.handle(Ingested("s", "file", pa.record_batch(columns), 1 << 50))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.6 * taken < core.queries[HOSTILE].nbytes - counted < 1.6 * taken


@pytest.mark.parametrize("starts", [[*range(0, 60_000, 2)], [*range(60_000, 0, -2)]], ids=["ascending", "descending"])
def test_full_slices_are_remembered_in_bounded_memory(starts: list[int]) -> None:
    full, stated = FullSlices(), set[int]()
    for start in starts:
        full.discard(start)
        span = full.state(start)
        if span is not None:
            stated.update(range(span[0], span[1] + 1))
        assert full.state(start) is None
        assert len(full.discarded) <= MAX_STARTS and len(full.stated) <= MAX_STARTS
    assert stated.issuperset(starts)
    assert all(full.refuses(start, is_open=True) for start in starts)
    assert FullSlices.from_state(full.to_state()) == full


def test_states_that_one_batch_would_make_too_large_are_refused_before_they_are_made() -> None:
    heavy = {"measures": {"n": "count()", "c": "count_min(x, width=65536, depth=5)"}}
    core = core_of(query("hostile", "id", "1h", **heavy), query("honest", None, "1h"), state_bytes=32 << 20)
    assert ingest(core, 0, 20_000, 0, None) == {"query-memory": 20_000}
    assert core.pending_bytes < 1 << 20
    assert ingest(core, 0, 5, 0, None) == {} and ingest(core, 0, 5, 1, None) == {}, "few groups are counted"
    ids = pa.array(np.arange(20_000) % 5)
    again = pa.record_batch({"id": ids, "x": ids, TIME_COLUMN: pa.array(np.full(20_000, 2))})
    assert core.handle(Ingested("s", "file", again, 1 << 50)) == [], "and as many records of theirs as there are"
    ingest(core, 0, 1, HOUR_MS, None)
    bodies = pull_all(core)
    assert observed(bodies, "honest") == 40_010
    assert losses(bodies) == {"hostile": [lost(0, HOUR_MS)]}


@pytest.mark.parametrize("action", MemoryAction)
def test_limits_are_part_of_the_state(action: MemoryAction) -> None:
    core = core_of(query("hostile", "id", "1h"), state_bytes=1 << 20)
    ingest(core, 0, 5000, 0)
    core.handle(MemoryLimited(HOSTILE, action))
    ingest(core, 0, 5, 1)
    again = EdgeCore({"s": StreamSpec(COLUMNS)})
    again.restore(core.to_state())
    assert again.to_state() == core.to_state()
    for one in (core, again):
        ingest(one, 0, 5, 2, None)
        ingest(one, 0, 1, HOUR_MS, None)
    assert pull_all(again) == pull_all(core)
