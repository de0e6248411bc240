"""Any course of events: edges speak, fall silent, join and retire; time passes; the process is restarted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from center.ledger import (
    EdgesChanged,
    Emission,
    FramesMerged,
    FrameSummary,
    Ledger,
    LedgerEvent,
    QueryRegistered,
    TimeAdvanced,
    answer_work,
)
from edgewater.answers import Phase
from edgewater.base.streams import LIVE, MAX_TIME_MS, EdgeId, StreamClock
from edgewater.model.edge_records import StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.wire import QueryRef, SliceClose, Withheld
from tests.center.results_world import edge_record
from tests.center.snapshots import snapshot
from tests.examples import examples
from tests.query_specs import query_spec

REF = QueryRef("q", 1)
NAMES = "abcd"
SLICE_MS = 1000

SPECS = st.builds(
    lambda window, rest: query_spec(rest, stream="events", window=window),
    st.sampled_from([{"tumbling": "1s"}, {"tumbling": "1s", "offset": "300ms"}, {"sliding": "3s", "every": "1s"}]),
    st.fixed_dictionaries(
        {"lateness": st.sampled_from(["0s", "1500ms", "4s"])},
        optional={"budget": st.just({"staleness": "2s"}), "edges": st.just(["a", "b"])},
    ),
)
FAST = StreamClock(event_origin_ms=2000, wall_origin_ms=500, speed=4.0)
CLOCKS = st.sampled_from([LIVE, FAST])
SAID = st.tuples(
    st.just("say"),
    st.sampled_from(NAMES),
    st.integers(0, 2500),  # how far its through moves on
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), max_size=3),  # slice, records, withholds
)
COURSE = st.lists(
    st.one_of(
        SAID,
        SAID,
        SAID,
        st.tuples(st.just("wait"), st.integers(0, 3000)),
        st.tuples(st.just("list"), st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES))),
    ),
    max_size=25,
)


STALENESS = query_spec(stream="events", budget={"staleness": "2s"})
MANY_DUE: list[tuple[Any, ...]] = [("wait", 8530), ("list", {"a"}, set()), ("wait", 270)]
"""26 windows become due at once."""


@dataclass
class World:
    """Edges whose counters and frontiers are consistent, as the protocol has them."""

    spec: QuerySpec
    clock: StreamClock

    def _edges(self) -> EdgesChanged:
        stream = StreamRecord("events", {"x": pa.int64()}, self.clock)
        return EdgesChanged(tuple(edge_record(name, stream, retired=r) for name, r in sorted(self.listed.items())))

    def __post_init__(self) -> None:
        self.now_ms = 0
        self.position = 0
        self.through: dict[str, int] = {}
        self.observed: dict[tuple[str, int], int] = {}
        self.listed: dict[str, bool] = {}

    def fact(self, edge: str, through_ms: int, seen: list[tuple[int, int, bool]]) -> FrameSummary:
        self.position += 1
        self.through[edge] = max(self.through.get(edge, 0), through_ms)
        closes, touched = [], set()
        for number, records, withholds in seen:
            start = number * SLICE_MS + self.spec.window.offset_ms
            self.observed[edge, start] = self.observed.get((edge, start), 0) + records
            kept = (Withheld("n", 1.0, 0.0, 1),) if withholds else ()
            closes.append(SliceClose(start, self.observed[edge, start], 0, kept))
            touched.update({start} if records else ())
        starts = tuple(sorted(touched))
        return FrameSummary(REF, self.position, EdgeId(edge), self.through[edge], tuple(closes), starts, 1, 0, "i")

    def event(self, step: tuple[Any, ...]) -> LedgerEvent:
        match step:
            case ("say", edge, further, seen):
                return FramesMerged((self.fact(edge, self.through.get(edge, 0) + further, seen),), self.now_ms)
            case ("wait", millis):
                self.now_ms += millis
                return TimeAdvanced(self.now_ms)
            case ("list", known, retired):
                self.listed.update(dict.fromkeys(known, False))
                self.listed.update({name: True for name in retired if name in self.listed})
                return self._edges()
        raise AssertionError(step)

    def ending(self) -> list[LedgerEvent]:
        """Every edge that is waited for comes to its end."""
        waited = {*self.through, *self.listed, *(self.spec.edges or ())}
        self.listed.update(dict.fromkeys(waited - self.listed.keys(), False))
        edges = self._edges()
        facts = tuple(self.fact(edge, MAX_TIME_MS, []) for edge in sorted(waited))
        return [edges, FramesMerged(facts, self.now_ms), TimeAdvanced(self.now_ms)]


def course(spec: QuerySpec, clock: StreamClock, steps: list[tuple[Any, ...]]) -> tuple[World, list[LedgerEvent]]:
    world = World(spec, clock)
    first = QueryRegistered(RegisteredQuery(REF, spec, 0, None))
    return world, [first, *(world.event(step) for step in steps), *world.ending()]


@given(SPECS, CLOCKS, COURSE)
@example(STALENESS, FAST, MANY_DUE)
@examples(100)
def test_a_restart_after_any_event_changes_no_answer(
    spec: QuerySpec, clock: StreamClock, steps: list[tuple[Any, ...]]
) -> None:
    steady, restarted = Ledger(), Ledger()
    listed: EdgesChanged | None = None
    for event in course(spec, clock, steps)[1]:
        assert restarted.handle(event) == steady.handle(event)
        listed = event if isinstance(event, EdgesChanged) else listed
        state = snapshot(restarted, REF)
        assert state == snapshot(steady, REF)
        restarted = Ledger()
        if listed is not None:
            restarted.handle(listed)
        restarted.restore(REF, state)
        restarted.weigh(REF, 0)


def test_a_ledger_that_does_not_know_the_sizes_of_slices_gives_fewer_answers_in_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_work, "MAX_WORK", 200)
    steady, restarted = Ledger(), Ledger()
    *before, tick = course(STALENESS, FAST, MANY_DUE)[1][:-3]
    for event in before:
        steady.handle(event)
    restarted.handle(before[-1])
    restarted.restore(REF, snapshot(steady, REF))
    first = restarted.handle(tick)
    deadline = restarted.next_deadline()
    answers = steady.handle(tick)
    assert len(first) < len(answers)
    assert isinstance(tick, TimeAdvanced) and deadline is not None and deadline <= tick.now_ms
    assert first + restarted.handle(tick) == answers
    assert snapshot(restarted, REF) == snapshot(steady, REF)


@given(SPECS, CLOCKS, COURSE)
@example(STALENESS, FAST, MANY_DUE)
@examples(100)
def test_a_failed_attempt_changes_no_answer(spec: QuerySpec, clock: StreamClock, steps: list[tuple[Any, ...]]) -> None:
    steady, shaken = Ledger(), Ledger()
    now_ms = 0
    for event in course(spec, clock, steps)[1]:
        before = {ref: snapshot(shaken, ref) for ref in shaken.queries()}
        wanted = steady.handle(event)
        try:
            with shaken.transaction():
                assert shaken.handle(event) == wanted
                shaken.handle(TimeAdvanced(20_000))
                raise InterruptedError
        except InterruptedError:
            shaken.load(before)
            for ref in before:
                shaken.weigh(ref, 0)
        with shaken.transaction():
            assert shaken.handle(event) == wanted
        # A loaded ledger examines all its windows at the next advance of time.
        now_ms = getattr(event, "now_ms", now_ms)
        assert shaken.handle(TimeAdvanced(now_ms)) == steady.handle(TimeAdvanced(now_ms))
        assert snapshot(shaken, REF) == snapshot(steady, REF)
        assert shaken.next_deadline() == steady.next_deadline()


@given(SPECS, CLOCKS, COURSE)
@examples(100)
def test_every_record_is_in_final_answers_or_counted_after_final(
    spec: QuerySpec, clock: StreamClock, steps: list[tuple[Any, ...]]
) -> None:
    world, events = course(spec, clock, steps)
    ledger = Ledger()
    emissions = [e for event in events for e in ledger.handle(event)]
    by_window: dict[int, list[Emission]] = {}
    for emission in emissions:
        by_window.setdefault(emission.window_start_ms, []).append(emission)
    for revisions in by_window.values():
        assert [e.revision for e in revisions] == list(range(1, len(revisions) + 1))
        ranks = [e.phase.rank for e in revisions]
        assert ranks == sorted(ranks)
        waited = [name for name in (spec.edges or sorted(world.through)) if not world.listed.get(name, False)]
        if waited:
            assert [e.phase for e in revisions if e.phase is Phase.FINAL] == [revisions[-1].phase]
    assert ledger.next_deadline() is None or spec.budget is not None
    final = {start: revisions[-1].facts.observed for start, revisions in by_window.items()}
    if spec.window.is_tumbling and all(r[-1].phase is Phase.FINAL for r in by_window.values()) and final:
        assert sum(final.values()) + ledger.after_final(REF) == sum(world.observed.values())


@given(SPECS, CLOCKS, COURSE)
@examples(100)
def test_a_tick_at_the_deadline_leaves_a_later_one(
    spec: QuerySpec, clock: StreamClock, steps: list[tuple[Any, ...]]
) -> None:
    ledger = Ledger()
    for event in course(replace(spec), clock, steps)[1][:-3]:
        ledger.handle(event)
        if (deadline := ledger.next_deadline()) is not None:
            ledger.handle(TimeAdvanced(deadline))
            after = ledger.next_deadline()
            assert after is None or after > deadline
