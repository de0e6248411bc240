from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.core.core import EdgeCore
from edge.core.events import (
    Acked,
    BudgetSet,
    Configured,
    Dropped,
    Effect,
    FrameBuilt,
    Ingested,
    PullEvent,
    QueryAccepted,
    QueryRefused,
    SourceEnded,
    SourcesOpened,
    TickEvent,
)
from edge.core.streams import StreamSpec
from edgewater.base.errors import StorageError
from edgewater.base.streams import MAX_TIME_MS, TIME_COLUMN, StreamClock
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import FrameBody, QueryRef, Rest, Withheld
from tests.cores import drained, open_core, pulled
from tests.edge.recovery_world import BUDGETED, COLUMNS, EXACT, QUERIES, SHARE, flights, truth, values_of
from tests.examples import examples

EXACT_REF, BUDGETED_REF = QUERIES[0][0], QUERIES[1][0]
ALL_OPEN = {"flights": -(1 << 61)}


LATER = (
    QueryRef("later", 1),
    QuerySpec.from_mapping({**EXACT.to_mapping(), "name": "later", "window": {"tumbling": "10s"}}),
)
LRU = ((EXACT_REF, QuerySpec.from_mapping({**EXACT.to_mapping(), "cache": {"eviction": "lru"}})),)


def make_core(spec: StreamSpec | None = None, queries: tuple[Any, ...] = QUERIES) -> EdgeCore:
    return open_core(spec or StreamSpec(COLUMNS), *queries, stream="flights")


@pytest.fixture
def core() -> EdgeCore:
    return make_core()


def batch(*rows: tuple[str, int, int]) -> pa.RecordBatch:
    carriers, distances, times = zip(*rows, strict=True) if rows else ((), (), ())
    return pa.record_batch(
        {
            "carrier": pa.array(carriers, pa.string()),
            "distance": pa.array(distances, pa.int64()),
            TIME_COLUMN: pa.array(times, pa.int64()),
        }
    )


def ingest(
    core: EdgeCore, *rows: tuple[str, int, int], arrival_ms: int = 1 << 40, source: str = "file"
) -> list[Effect]:
    return core.handle(Ingested("flights", source, batch(*rows), arrival_ms))


def core_with(*rows: tuple[str, int, int]) -> EdgeCore:
    """A core that has read one batch."""
    core = make_core()
    ingest(core, *rows)
    return core


def pull_all(core: EdgeCore, capacity: int = 1 << 20, times_ms: dict[str, int] | None = None) -> list[Any]:
    """Every frame there is to be had now, as (query name, body)."""
    return [(frame.query.name, frame.unpack()) for frame in drained(core, PullEvent(capacity, times_ms or {}))]


def merged(bodies: list[tuple[str, FrameBody]]) -> dict[tuple[str, int], dict[Any, dict[str, float]]]:
    result: dict[tuple[str, int], GroupedAggregate] = {}
    for name, body in bodies:
        for partial in body.partials:
            part = GroupedAggregate.from_bytes(partial.synopsis)
            key = (name, partial.slice_start_ms)
            if key in result:
                result[key].merge(part)
            else:
                result[key] = part
    return {key: values_of(aggregate) for key, aggregate in result.items()}


def test_an_open_slice_stays_until_the_watermark_passes_its_end() -> None:
    core = core_with(("UA", 500, 1_000), ("UA", 700, 9_999))
    assert merged(pull_all(core)) == {}
    ingest(core, ("DL", 300, 10_000))
    bodies = dict(pull_all(core))
    assert [p.slice_start_ms for p in bodies["exact"].partials] == [0]
    assert bodies["exact"].through_ms == 10_000
    assert [(c.slice_start_ms, c.observed, c.late) for c in bodies["exact"].closes] == [(0, 2, 0)]


def test_a_late_record_causes_a_new_close_of_its_slice_only() -> None:
    core = core_with(("UA", 500, 1_000), ("UA", 1, 25_000))
    pull_all(core)
    ingest(core, ("UA", 700, 2_000))
    ((name, body),) = [b for b in pull_all(core) if b[0] == "exact"]
    assert name == "exact"
    assert [(c.slice_start_ms, c.observed, c.late) for c in body.closes] == [(0, 2, 1)]
    assert merged([(name, body)])[("exact", 0)]["UA"]["miles"] == 700
    assert body.through_ms == 25_000


def test_a_record_later_than_the_lateness_is_dropped_and_counted_per_query() -> None:
    core = core_with(("UA", 500, 100_000))
    dropped = ingest(core, ("UA", 700, 2_000), ("UA", 700, 3_000))
    # exact: its last window ends at 30 s, 30 s late at 60 s; budgeted: ends at 10 s, no lateness.
    assert dropped == [Dropped(EXACT_REF, "too-late", 2), Dropped(BUDGETED_REF, "too-late", 2)]


def test_a_quiet_slice_still_moves_the_progress() -> None:
    core = core_with(("UA", 500, 1_000))
    ingest(core, ("UA", 500, 55_000))
    through = {name: body.through_ms for name, body in pull_all(core)}
    assert through == {"exact": 55_000, "budgeted": 55_000}
    assert pull_all(core) == []


def test_a_stream_waits_for_the_slowest_of_its_sources(core: EdgeCore) -> None:
    core.handle(SourcesOpened((("flights", "file"), ("flights", "second"))))
    ingest(core, ("UA", 500, 1_000), ("UA", 500, 50_000))
    assert pull_all(core) == []
    core.handle(SourceEnded("flights", "second"))
    assert {name for name, _ in pull_all(core)} == {"exact", "budgeted"}


def test_an_ended_stream_closes_everything() -> None:
    core = core_with(("UA", 500, 1_000), ("DL", 300, 59_000))
    core.handle(SourceEnded("flights", "file"))
    bodies = pull_all(core)
    assert {c.slice_start_ms for n, b in bodies if n == "exact" for c in b.closes} == {0, 50_000}
    assert core.streams["flights"].watermark_ms >= MAX_TIME_MS
    assert core.queries[EXACT_REF].store.slices == {}, "final slices are forgotten"


def test_an_idle_stream_follows_its_clock() -> None:
    core = make_core(StreamSpec(COLUMNS, idle_ms=5_000))
    ingest(core, ("UA", 500, 100_000), arrival_ms=100_000)
    core.handle(TickEvent(104_999))
    assert core.streams["flights"].watermark_ms == 100_000
    assert core.next_deadline() == 105_000
    core.handle(TickEvent(130_000))
    assert core.streams["flights"].watermark_ms == 125_000


IDLE = StreamSpec(COLUMNS, idle_ms=5_000)


def test_a_quiet_source_does_not_hold_back_a_busy_one() -> None:
    core = make_core(IDLE)
    core.handle(SourcesOpened((("flights", "file"), ("flights", "quiet"))))
    for now_ms in range(100_000, 120_000, 1_000):
        ingest(core, ("UA", 500, now_ms), arrival_ms=now_ms)
        core.handle(TickEvent(now_ms))
    assert core.streams["flights"].watermark_ms == 119_000 - 5_000


def test_records_of_a_source_that_was_not_read_are_not_late() -> None:
    core = make_core(IDLE)
    ingest(core, ("UA", 500, 100_000), arrival_ms=100_000)
    core.handle(SourcesOpened((("flights", "file"),)))  # it was down for a while
    core.handle(TickEvent(200_000))
    assert core.streams["flights"].watermark_ms == 100_000
    core.handle(TickEvent(206_000, unread=("file",)))
    assert core.streams["flights"].watermark_ms == 100_000
    assert core.next_deadline() == 211_000
    core.handle(TickEvent(211_000))
    assert core.streams["flights"].watermark_ms == 206_000


def test_a_source_that_is_being_read_is_idle_only_up_to_the_time_at_which_it_had_nothing_to_read() -> None:
    core = make_core(IDLE)
    core.handle(SourcesOpened((("flights", "file"),)))
    ingest(core, ("UA", 500, 100_000), arrival_ms=100_000)
    for now_ms in (106_000, 120_000, 180_000):  # one read takes all that time: the disk is slow
        core.handle(TickEvent(now_ms, empty_ms={"file": 100_200}))
        assert core.streams["flights"].watermark_ms == 100_000
    core.handle(TickEvent(200_000, empty_ms={"file": 107_000}))
    assert core.streams["flights"].watermark_ms == 102_000
    core.handle(TickEvent(200_000, empty_ms={"file": 300_000}))  # the wall clock was set back
    assert core.streams["flights"].watermark_ms == 195_000


def test_a_removed_source_does_not_hold_back_the_watermark() -> None:
    core = core_with(("UA", 500, 1_000))
    core.handle(SourcesOpened((("flights", "moved"),)))
    ingest(core, ("UA", 500, 50_000), source="moved")
    assert core.streams["flights"].watermark_ms == 50_000


def test_a_journal_with_records_of_a_removed_stream_is_refused(core: EdgeCore) -> None:
    with pytest.raises(StorageError):
        core.handle(SourcesOpened((("weather", "file"),)))


def test_a_refusal_ends_with_the_configuration_that_caused_it() -> None:
    wide = (("q", 1), {**EXACT.to_mapping(), "name": "q", "group_by": ["tail"]})
    query = (QueryRef(*wide[0]), QuerySpec.from_mapping(wide[1]))
    core = make_core(queries=(query,))
    assert list(core.refused) == [query[0]]
    core.streams["flights"].spec = StreamSpec({**COLUMNS, "tail": pa.string()})
    core.handle(SourcesOpened((("flights", "file"),)))
    assert core.handle(Configured((query,))) == [QueryAccepted(query[0])]


def test_a_device_whose_clock_is_ahead_closes_no_window(core: EdgeCore) -> None:
    ingest(core, ("UA", 1, 9_000_000), arrival_ms=20_000)
    assert core.streams["flights"].watermark_ms == 20_000
    assert core.handle(Configured((*QUERIES, LATER))) == [QueryAccepted(LATER[0])]
    assert core.queries[LATER[0]].store.since_ms == 30_000, "and no query waits for its time to come"


def test_a_watermark_never_goes_back() -> None:
    core = core_with(("UA", 1, 50_000))
    ingest(core, ("UA", 1, 20_000))
    assert core.streams["flights"].watermark_ms == 50_000


def test_a_later_query_starts_with_a_complete_slice() -> None:
    core = make_core(queries=QUERIES[:1])
    ingest(core, ("UA", 500, 13_000))
    assert core.handle(Configured(QUERIES)) == [QueryAccepted(BUDGETED_REF)]
    assert Dropped(BUDGETED_REF, "before-query", 1) in ingest(core, ("UA", 500, 14_000), ("UA", 500, 21_000))
    core.handle(SourceEnded("flights", "file"))
    bodies = pull_all(core)
    assert {body.since_ms for name, body in bodies if name == "budgeted"} == {20_000}
    assert {body.since_ms for name, body in bodies if name == "exact"} == {None}
    assert merged(bodies)[("budgeted", 20_000)] == {"UA": {"miles": 500}}


def test_a_query_that_does_not_match_is_refused_and_the_others_continue() -> None:
    stray = QuerySpec.from_mapping({**EXACT.to_mapping(), "name": "stray", "from": "boats"})
    wrong = QuerySpec.from_mapping({**EXACT.to_mapping(), "name": "wrong", "measures": {"x": "sum(carrier)"}})
    core = EdgeCore({"flights": StreamSpec(COLUMNS)})
    effects = core.handle(Configured((*QUERIES, (QueryRef("stray", 1), stray), (QueryRef("wrong", 1), wrong))))
    refused = {e.query.name: e.message for e in effects if isinstance(e, QueryRefused)}
    assert set(refused) == {"stray", "wrong"}
    assert "boats" in refused["stray"] and "flights" in refused["stray"]
    assert "carrier" in refused["wrong"] or "string" in refused["wrong"]
    assert set(core.queries) == {EXACT_REF, BUDGETED_REF}


def test_a_query_that_is_not_in_the_new_set_ends() -> None:
    core = core_with(("UA", 500, 1_000))
    core.handle(Configured(QUERIES[:1]))
    core.handle(SourceEnded("flights", "file"))
    assert {name for name, _ in pull_all(core)} == {"exact"}


def test_without_a_share_a_budgeted_query_is_exact() -> None:
    core = core_with(("UA", 500, 1_000), ("UA", 500, 11_000))
    (body,) = [b for n, b in pull_all(core) if n == "budgeted"]
    assert merged([("budgeted", body)]) == {("budgeted", 0): {"UA": {"miles": 500}}}
    assert body.closes[0].withheld == ()


def test_entries_are_in_the_order_of_their_keys() -> None:
    core = core_with(("UA", 1, 1_000), ("AA", 1, 2_000), ("DL", 1, 3_000), ("AA", 1, 10_000))
    partials = [p for name, body in pull_all(core) if name == "exact" for p in body.partials]
    assert [GroupedAggregate.from_bytes(p.synopsis).rows()[0].to_pylist() for p in partials] == [["AA", "DL", "UA"]]


def test_values_within_the_share_are_withheld_and_reported(core: EdgeCore) -> None:
    core.handle(BudgetSet(BUDGETED_REF, {"miles": SHARE}))
    ingest(core, ("UA", 1_500, 1_000), ("UA", 501, 2_000), ("DL", 1_999, 3_000), ("AA", 300, 4_000), ("AA", 1, 10_000))
    (body,) = [b for n, b in pull_all(core) if n == "budgeted"]
    assert merged([("budgeted", body)]) == {("budgeted", 0): {"UA": {"miles": 1_984}}}  # rounded to 64
    assert body.closes[0].withheld == (Withheld("miles", 1_999, 0, 3, rest=Rest(2, (2_316.0,))),)


def test_values_above_a_smaller_share_are_sent(core: EdgeCore) -> None:
    core.handle(BudgetSet(BUDGETED_REF, {"miles": SHARE}))
    late = QuerySpec.from_mapping({**BUDGETED.to_mapping(), "lateness": "1h"})
    core.handle(Configured(()))
    core.handle(Configured(((BUDGETED_REF, late),)))
    core.handle(BudgetSet(BUDGETED_REF, {"miles": SHARE}))
    ingest(core, ("UA", 1_500, 1_000), ("DL", 300, 1_000), ("AA", 1, 10_000))
    assert merged(pull_all(core)) == {}
    core.handle(BudgetSet(BUDGETED_REF, {"miles": 400.0}))
    bodies = pull_all(core)
    assert merged(bodies) == {("budgeted", 0): {"UA": {"miles": 1_488}}}  # rounded to 16
    assert bodies[-1][1].closes[0].withheld == (Withheld("miles", 300, 0, 2, rest=Rest(1, (312.0,))),)


def test_a_narrow_link_sends_from_open_slices_least_recently_used_first() -> None:
    core = make_core(queries=LRU)
    for i, carrier in enumerate(["UA", "DL", "AA", "UA"]):
        ingest(core, (carrier, 100, 1_000 + i))
    (effect,) = core.handle(PullEvent(1, {"flights": 1_004}))
    assert isinstance(effect, FrameBuilt)
    assert list(merged([("exact", effect.frame.unpack())])[("exact", 0)]) == ["DL"]


def test_open_slices_are_sent_early_only_if_draining_them_takes_long() -> None:
    core = make_core(StreamSpec(COLUMNS, clock=StreamClock(0, 1_000_000, 1.0)), QUERIES[:1])
    rng = np.random.default_rng(0)
    rows = [(f"c{int(k)}", 100, 1_000) for k in rng.integers(0, 1000, 3000)]
    ingest(core, *rows, arrival_ms=1_001_000)
    assert merged(pull_all(core)) == {}
    slow, fast = core.pulls.next_pull_ms(100_000.0, 1_001_000), core.pulls.next_pull_ms(1e9, 1_001_000)
    assert fast is None, "a fast link waits until the slice has closed"
    assert slow is not None and 1_002_000 < slow < 1_007_000, "a slow link starts early, but not at once"


def test_an_empty_pull_is_repeated_later() -> None:
    core = make_core(StreamSpec(COLUMNS, clock=StreamClock(0, 1_000_000, 1.0)), QUERIES[:1])
    ingest(core, *[(f"c{i}", 100, 9_500) for i in range(1000)], arrival_ms=1_009_500)
    pull_all(core, times_ms={"flights": 9_500})
    assert core.pulls.next_pull_ms(20_000.0, 1_009_500) == 1_009_500 + 20


def test_an_open_slice_that_the_clock_has_passed_waits_for_its_records() -> None:
    backfill = make_core(StreamSpec(COLUMNS, clock=StreamClock(0, 0, 1.0)), QUERIES[:1])
    ingest(backfill, ("UA", 1, 1_000))
    pull_all(backfill)
    assert backfill.pulls.next_pull_ms(1.0, now_ms=60_000) is None
    assert pull_all(backfill, times_ms=backfill.pulls.event_times(60_000)) == []


def test_under_a_staleness_budget_a_slice_that_should_have_closed_is_sent() -> None:
    stale = QuerySpec.from_mapping({**EXACT.to_mapping(), "budget": {"staleness": "2s"}})
    core = make_core(StreamSpec(COLUMNS, clock=StreamClock(0, 0, 1.0)), ((EXACT_REF, stale),))
    ingest(core, ("UA", 1, 1_000))
    pull_all(core)
    due = core.pulls.next_pull_ms(1e9, now_ms=60_000)
    assert due is not None and due <= 60_000
    assert merged(pull_all(core, times_ms=core.pulls.event_times(60_000))) != {}


@pytest.mark.parametrize("speed", [1.0, 1_000.0])
def test_a_staleness_budget_is_wall_time_at_any_speed(speed: float) -> None:
    """At 1 kB/s two seconds carry 2 kB: some twenty of the groups. The rest is reported as withheld."""
    stale = QuerySpec.from_mapping({**EXACT.to_mapping(), "budget": {"staleness": "2s"}})
    clock = StreamClock(0, 0, speed)
    core = make_core(StreamSpec(COLUMNS, clock=clock), ((EXACT_REF, stale),))
    rows = [(f"c{k}", 1 + k, 1_000) for k in range(1_000)]
    ingest(core, *rows, ("next", 1, 10_000), arrival_ms=clock.to_wall_ms(10_000))
    sent, closes = 0, []
    for wall_ms in range(0, 3_000, 100):
        now_ms = clock.to_event_ms(clock.to_wall_ms(10_000) + wall_ms)
        for effect in core.handle(PullEvent(100, {"flights": now_ms}, 1_000.0)):
            if isinstance(effect, FrameBuilt):
                body = effect.frame.unpack()
                sent += sum(len(GroupedAggregate.from_bytes(p.synopsis)) for p in body.partials)
                closes += [c for c in body.closes if c.slice_start_ms == 0]
    assert 10 <= sent <= 50
    assert closes[-1].observed == 1_000
    assert {w.measure for w in closes[-1].withheld} >= {"flights", "miles"}


def test_acknowledged_frames_are_dropped_and_the_others_kept() -> None:
    core = core_with(("UA", 500, 1_000), ("UA", 500, 25_000))
    pull_all(core)
    assert [f.seq for f in core.unacked] == [1, 2]
    core.handle(Acked(1))
    assert [f.seq for f in core.unacked] == [2]


@pytest.mark.nightly
@examples(60)
@given(
    seed=st.integers(0, 1000),
    steps=st.lists(st.tuples(st.sampled_from(["ingest", "pull", "early", "tick"]), st.integers(1, 60)), max_size=30),
)
def test_for_any_pulls_the_center_gets_the_truth_less_the_withheld_error(
    seed: int, steps: list[tuple[str, int]]
) -> None:
    data = flights(200, seed)
    core = make_core(StreamSpec(COLUMNS, disorder_ms=4_000))
    core.handle(BudgetSet(BUDGETED_REF, {"miles": SHARE}))
    bodies: list[tuple[str, FrameBody]] = []
    row = newest_ms = 0
    for step, amount in [*steps, ("ingest", data.num_rows)]:
        if step == "ingest":
            core.handle(Ingested("flights", "file", data.slice(row, amount), (1 << 40) + row))
            row = min(row + amount, data.num_rows)
            newest_ms = int(data.column(TIME_COLUMN)[max(row - 1, 0)].as_py())
        elif step == "tick":
            core.handle(TickEvent((1 << 40) + row))
        else:
            now_ms = newest_ms + 100 * amount
            early = PullEvent(amount * 10, {"flights": now_ms}, 500.0)
            frames = pulled(core, early if step == "early" else PullEvent(amount * 10))
            bodies += [(frame.query.name, frame.unpack()) for frame in frames]
    core.handle(SourceEnded("flights", "file"))
    bodies += pull_all(core, 500)
    center = merged(bodies)
    assert {k: v for k, v in center.items() if k[0] == "exact"} == truth(data, EXACT)
    stated = {c.slice_start_ms: c.withheld for n, b in bodies if n == "budgeted" for c in b.closes}
    for key, groups in truth(data, BUDGETED).items():
        sent = center.get(key, {})
        missing = [v["miles"] - sent.get(g, {"miles": 0.0})["miles"] for g, v in groups.items()]
        kept = [m for m in missing if m]
        assert all(0 < m <= SHARE for m in kept)
        amounts = [(w.measure, w.largest_above, w.largest_below, w.groups) for w in stated[key[1]]]
        assert amounts == ([("miles", max(kept), 0.0, len(kept))] if kept else [])
        assert sum(sum(w.rest.parts) for w in stated[key[1]] if w.rest is not None) == sum(kept)


@pytest.mark.parametrize("cls", [dict, int])
def test_an_unknown_event_is_a_type_error(cls: type) -> None:
    with pytest.raises(TypeError, match="not an event of the edge"):
        make_core().handle(cls())
