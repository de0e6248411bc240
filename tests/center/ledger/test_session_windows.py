"""Sessions over several edges: real edge cores, a real ledger and result store, against the definition."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from center.ledger import EdgesChanged, Emission, FramesMerged, FrameSummary, Ledger, QueryRegistered, TimeAdvanced
from center.ledger.sessionize import ObservedSession, connected_slices, session_windows
from center.results import AnswerRecord, ResultStore
from center.storage.delta_segments import Delta
from edgewater.answers import UNKNOWN, Cause, LateRecords, Phase, SessionFacts
from edgewater.answers.uniting import with_late
from edgewater.base.streams import EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.model.registered_query import RegisteredQuery, query_key
from edgewater.model.windows import SessionWindow
from edgewater.synopses import GroupedAggregate
from edgewater.wire import FrameBody, SliceClose
from tests.center.ledger.test_ledger import Center, told
from tests.center.results_world import Job, edge_record, total
from tests.center.session_world import GAP, REF, Edge, brute_force, spec
from tests.center.snapshots import snapshot
from tests.center.statement_world import missing, quality_of
from tests.examples import examples

SECONDS = SessionWindow("1s", "3s")


def extent(first_ms: int, last_ms: int, observed: int = 2, late: int = 0) -> SliceClose:
    return SliceClose(first_ms // GAP * GAP, observed, late, (), first_ms, last_ms)


def lone(time_ms: int) -> SliceClose:
    return extent(time_ms, time_ms, 1)


def spans(emissions: list[Emission]) -> list[tuple[int, int, int, str]]:
    return [(e.window_start_ms, e.window_end_ms, e.revision, e.phase.value) for e in emissions]


def center(*edges: str, **query: Any) -> Center:
    return Center(*edges, **{"window": {"session": "1s"}, **query})


# Geometry


@given(
    st.lists(st.integers(-20_000, 20_000), min_size=1, max_size=60), st.integers(1, 6), st.sampled_from([1, 7, 1000])
)
def test_sessions_of_slices_are_those_of_their_records(times: list[int], most: int, gap: int) -> None:
    window = SessionWindow(gap, gap * most)
    extents: dict[int, tuple[int, int]] = {}
    for time in times:
        first, last = extents.get(time // gap * gap, (time, time))
        extents[time // gap * gap] = (min(first, time), max(last, time))
    found: dict[tuple[int, int], ObservedSession] = {}
    left = set(extents)
    while left:
        run = connected_slices(min(left), extents, window)
        left -= set(run)
        found.update({(r.start_ms, r.end_ms): r for r in session_windows(run, extents, window)})
    assert sorted(found) == sorted(brute_force(times, window))
    assert all(r.to_ms - r.from_ms <= window.max_ms for r in found.values())


def test_a_record_exactly_a_gap_later_begins_another_session() -> None:
    for distance, sessions in ((GAP - 1, 1), (GAP, 2)):
        extents = {0: (500, 500), 1000: (500 + distance, 500 + distance)}
        assert (len(connected_slices(0, extents, SECONDS)) == 2) == (sessions == 1)


# When a session is answered


def test_a_session_is_answered_when_every_edge_has_closed_what_could_lengthen_it() -> None:
    c = center("a", "b")
    assert c.says("a", 3000, lone(500), extent(1200, 1300)) == []
    assert c.says("b", 2400, lone(700)) == [], "its next slice, which is open, may hold a record before 2300"
    (answer,) = c.says("b", 3000, now_ms=3100)
    assert spans([answer]) == [(500, 2300, 1, "final")]
    assert (answer.slices_from_ms, answer.slices_to_ms) == (0, 2000)
    assert answer.facts.observed == 4 and answer.facts.staleness_ms == 800
    stated = quality_of(answer)
    assert stated["session"] == {"cut": False, "cuts": 0} and "merged_into" not in stated


def test_a_complete_session_that_late_records_lengthen_is_answered_again_when_all_edges_have_closed_it() -> None:
    c = center("a", "b", lateness="1h")
    c.says("a", 3000, lone(500))
    (whole,) = c.says("b", 3000, lone(700))
    assert whole.phase is Phase.COMPLETE and missing(whole) == ()
    bridged = c.says("b", 4200, lone(1500), lone(2300), lone(3100), now_ms=60_000)
    assert [(e.phase, missing(e)) for e in bridged] == [(Phase.COMPLETE, ("a", "b"))]
    c.says("b", 6000, now_ms=60_000)
    (again,) = c.says("a", 6000, now_ms=60_000)
    assert (again.window_start_ms, again.phase, missing(again)) == (500, Phase.COMPLETE, ())


def test_with_lateness_a_session_is_complete_first() -> None:
    c = center("a", lateness="5s")
    assert spans(c.says("a", 2000, lone(500))) == [(500, 1500, 1, "complete")]
    assert spans(c.says("a", 7000)) == [(500, 1500, 2, "final")]


def test_after_a_session_with_late_records_an_answer_allows_for_an_unknown_number() -> None:
    c = center("a", lateness="1m")
    c.says("a", 9_000, lone(500))
    (revised,) = c.says("a", 9_500, extent(500, 900, 2, late=1), now_ms=60_000)
    (later,) = c.says("a", 29_000, lone(20_500))
    assert not revised.facts.by_cause(Cause.MAY_CHANGE), "its own late records are in it"
    (allowed,) = later.facts.by_cause(Cause.MAY_CHANGE)
    assert allowed.lacks == UNKNOWN and later.codes() == [Cause.MAY_CHANGE]
    assert with_late(later.facts, {"after-final": LateRecords(1)}).by_cause(Cause.MAY_CHANGE) == (allowed,)


def test_a_late_record_that_lengthens_a_session_revises_it_and_no_other() -> None:
    c = center("a", lateness="1m")
    assert len(c.says("a", 9000, lone(500), lone(4000))) == 2
    assert spans(c.says("a", 9000, lone(1100), now_ms=60_000)) == [(500, 2100, 2, "complete")]


def test_a_record_that_joins_two_sessions_redirects_the_second_to_the_first() -> None:
    c = center("a", lateness="1m")
    c.says("a", 9000, lone(500), lone(2100), lone(6000))
    first, second = c.says("a", 9000, lone(1300))
    assert spans([first, second]) == [(500, 3100, 2, "complete"), (2100, 2100, 2, "complete")]
    assert first.facts.observed == 3 and second.facts.observed == 0
    assert quality_of(second)["merged_into"] == rfc3339(500)
    assert [told([e]) for e in c.says("a", 90_000)] == [[(500, 3, "final")], [(6000, 2, "final")]]


def test_an_earlier_record_moves_a_sessions_start_and_redirects_the_old_one() -> None:
    c = center("a", lateness="1m")
    c.says("a", 9000, lone(1500))
    new, old = c.says("a", 9000, lone(800))
    assert spans([new, old]) == [(800, 2500, 1, "complete"), (1500, 1500, 2, "complete")]
    assert quality_of(old)["merged_into"] == rfc3339(800)


def test_an_early_answer_is_given_when_the_staleness_budget_ends() -> None:
    c = center("a", "b", budget={"staleness": "2s"})
    assert c.says("a", 9000, lone(500), now_ms=600) == []
    due = c.ledger.next_deadline()
    assert due == 1500 + 2000 - 200
    (answer,) = c.tick(due)
    assert spans([answer]) == [(500, 1500, 1, "early")] and missing(answer) == ("b",)
    assert answer.codes() == ["missing-edges"], "it is in time, and lacks an edge"
    later = c.says("b", 9000, lone(1400), now_ms=20_000)
    assert spans(later) == [(500, 2400, 2, "final")]
    assert quality_of(later[0])["contract"]["met"], "the first answer was in time"


def test_a_session_that_grows_is_due_by_its_new_end() -> None:
    c = center("a", "b", budget={"staleness": "2s"})
    c.says("a", 2000, lone(500), now_ms=600)
    c.says("a", 3000, lone(1400), now_ms=1500)
    assert c.tick(3300) == []
    assert spans(c.tick(4200)) == [(500, 2400, 1, "early")]


def test_a_session_that_absorbs_an_answered_one_is_answered_at_once() -> None:
    c = center("a", "b", budget={"staleness": "2s"})
    c.says("a", 9000, lone(1500), now_ms=1600)
    c.tick(4300)
    new, old = c.says("a", 9000, lone(800), lone(2300), now_ms=5000)
    assert spans([new, old]) == [(800, 3300, 1, "early"), (1500, 1500, 2, "early")]
    assert new.codes() == ["missing-edges"], "in time, by another name"


def test_without_data_there_is_no_session_and_no_deadline() -> None:
    c = center("a", "b", budget={"staleness": "2s"})
    c.says("a", 50_000)
    assert c.tick(10**9) == [] and c.ledger.next_deadline() is None


def test_an_edge_that_joined_late_is_missing_in_a_session_that_may_have_begun_earlier() -> None:
    c = center("a", "b")
    c.says("a", 9000, lone(2500), lone(6000))
    fact = FrameSummary(REF, 99, EdgeId("b"), 9000, (), (), 1, 0, "i1", since_ms=2000)
    first, second = c.reports(fact)
    assert (missing(first), missing(second)) == (("b",), ())


def test_records_after_the_lateness_are_counted_and_change_nothing() -> None:
    c = center("a")
    assert len(c.says("a", 9000, lone(500))) == 1
    assert c.says("a", 9000, extent(500, 900, 3)) == []
    assert c.says("a", 9000, lone(1100)) == []
    assert c.ledger.after_final(REF) == 3
    assert c.ledger.sealed_before(REF) == 8000


def test_a_record_after_the_lateness_belongs_to_the_session_that_is_still_open() -> None:
    c = center("a")
    c.says("a", 9000, lone(500), lone(8900))
    assert c.ledger.sealed_before(REF) == 7000
    assert c.says("a", 9000, lone(7950)) == []
    assert spans(c.says("a", 10_000)) == [(7950, 9900, 1, "final")]


# The greatest length


def test_a_session_is_cut_at_its_maximum_length_and_reports_it() -> None:
    c = center("a", window={"session": "1s", "max": "3s"})
    closes = [extent(s, s + 900) for s in range(0, 8000, 1000)]
    answers = c.says("a", 20_000, *closes)
    assert spans(answers) == [(0, 3000, 1, "final"), (3000, 6000, 1, "final"), (6000, 8900, 1, "final")]
    assert [quality_of(a)["session"] for a in answers] == [
        {"cut": True, "cuts": 0}, {"cut": True, "cuts": 1}, {"cut": False, "cuts": 2}]  # fmt: skip


def test_a_start_that_begins_a_session_again_continues_its_revisions() -> None:
    c = center("a", window={"session": "1s", "max": "2s"}, lateness="1m")
    closes = [extent(s, s + 900) for s in range(2000, 6000, 1000)]
    assert spans(c.says("a", 9000, *closes)) == [(2000, 4000, 1, "complete"), (4000, 5900 + GAP, 1, "complete")]
    moved = c.says("a", 9000, extent(1000, 1900))
    assert [(e.window_start_ms, e.revision) for e in moved] == [(1000, 1), (2000, 2), (3000, 1), (4000, 2), (5000, 1)]
    again = c.says("a", 9000, extent(0, 900))
    assert (2000, 4000, 3, "complete") in spans(again) and (4000, 6900, 3, "complete") in spans(again)


# A whole course, against the definition


def facts_of(edge: Edge, bodies: list[FrameBody], position: int) -> list[FrameSummary]:
    return [
        FrameSummary(
            REF, position + i, edge.id, b.through_ms, b.closes, tuple(sorted({p.slice_start_ms for p in b.partials})),
            1, 0, "i", b.since_ms,
        )
        for i, b in enumerate(bodies, 1)
    ]  # fmt: skip


STEP = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 2), st.lists(st.integers(-2500, 2500), min_size=1, max_size=6)),
    st.tuples(st.just("ship"), st.integers(0, 2), st.booleans(), st.integers(1, 3)),
    st.tuples(st.just("wait"), st.integers(0, 4000), st.booleans(), st.booleans()),
)


class Course:
    """Three edges, whose frames arrive when a test says so; at the center a restart at any time."""

    def __init__(self, **query: Any) -> None:
        self.spec = spec(**query)
        self.edges = [Edge(name, self.spec) for name in "abc"]
        self.ledger = Ledger()
        self.listed = EdgesChanged(tuple(map(edge_record, "abc")))
        self.ledger.handle(self.listed)
        self.ledger.handle(QueryRegistered(RegisteredQuery(REF, self.spec, 0, None)))
        self.base = [0, 0, 0]
        self.position = self.now_ms = 0
        self.taken: list[int] = []
        self.emissions: list[Emission] = []

    def step(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("read", number, offsets):
                self.base[number] += max(offsets)
                times = [self.base[number] + o for o in offsets]
                drops = self.edges[number].reads(*times)
                assert not drops, "within the lateness nothing is dropped"
                self.taken += times
            case ("ship", number, early, at_most):
                self.arrives(number, self.edges[number].ships(early=early, at_most=at_most, capacity=64))
            case ("wait", millis, restart, _):
                self.now_ms += millis
                self.hear(self.ledger.handle(TimeAdvanced(self.now_ms)))
                if restart:
                    state = snapshot(self.ledger, REF)
                    self.ledger = Ledger()
                    self.ledger.handle(self.listed)
                    self.ledger.restore(REF, state)
                    assert snapshot(self.ledger, REF) == state

    def arrives(self, number: int, bodies: list[FrameBody]) -> None:
        facts = facts_of(self.edges[number], bodies, self.position)
        self.position += len(facts)
        if facts:
            before = {REF: snapshot(self.ledger, REF)}
            try:
                with self.ledger.transaction():
                    self.ledger.handle(FramesMerged(tuple(facts), self.now_ms))
                    raise InterruptedError
            except InterruptedError:
                self.ledger.load(before)
            with self.ledger.transaction():
                self.hear(self.ledger.handle(FramesMerged(tuple(facts), self.now_ms)))

    def hear(self, emissions: list[Emission]) -> None:
        self.emissions += emissions

    def end(self) -> None:
        for number, edge in enumerate(self.edges):
            edge.ends()
            self.arrives(number, edge.ships())


@pytest.mark.slow
@given(st.sampled_from([{}, {"window": {"session": "1s", "max": "3s"}}]), st.booleans(), st.lists(STEP, max_size=25))
@examples(150)
def test_final_sessions_are_those_of_all_records_in_any_order_of_arrival(
    window: dict[str, Any], early: bool, steps: list[tuple[Any, ...]]
) -> None:
    course = Course(**window, lateness="10m", **({"budget": {"staleness": "2s"}} if early else {}))
    for step in steps:
        course.step(step)
    course.end()
    check(course)


@given(st.sampled_from([{}, {"window": {"session": "1s", "max": "3s"}}]), st.booleans(), st.lists(STEP, max_size=25))
@examples(100)
def test_without_lateness_edges_with_ordered_records_lose_nothing(
    window: dict[str, Any], early: bool, steps: list[tuple[Any, ...]]
) -> None:
    course = Course(**window, **({"budget": {"staleness": "2s"}} if early else {}))
    for step in steps:
        if step[0] == "read":
            later = sorted(abs(offset) for offset in step[2])
            course.base[step[1]] += later[-1]
            step = ("read", step[1], [offset - later[-1] for offset in later])
        course.step(step)
    course.end()
    check(course)


def check(course: Course) -> None:
    """What is final in the end are the sessions by the definition, and every revision was legal."""
    expected = brute_force(course.taken, course.spec.window)
    newest: dict[int, Emission] = {}
    for e in course.emissions:
        before = newest.get(e.window_start_ms)
        assert e.revision == (before.revision if before else 0) + 1
        assert before is None or (before.phase.rank <= e.phase.rank and before.phase is not Phase.FINAL)
        newest[e.window_start_ms] = e
    standing = {(e.window_start_ms, e.window_end_ms): e for e in newest.values() if e.window_end_ms > e.window_start_ms}
    assert {w: e.facts.observed for w, e in standing.items()} == {w: len(t) for w, t in expected.items()}
    assert all(e.phase is Phase.FINAL for e in standing.values())
    for gone in newest.values():
        into = gone.facts.session.merged_into_ms if gone.facts.session else None
        assert (into is not None) == (gone.window_end_ms == gone.window_start_ms)
        assert into is None or into in newest
    assert course.ledger.after_final(REF) == 0 and course.ledger.next_deadline() is None
    assert [e for e in json.loads(snapshot(course.ledger, REF))["entries"] if e[0] != "sealed"] == []


@given(st.lists(STEP, max_size=15), st.integers(0, 2), st.integers(-4000, 4000))
@example([("read", 0, [0]), ("read", 2, [-1, 1000]), ("ship", 2, False, 1), ("read", 2, [0])], 0, 0)
@examples(80)
def test_one_more_record_revises_only_the_sessions_it_touches(
    steps: list[tuple[Any, ...]], number: int, offset: int
) -> None:
    course = Course(lateness="10m")
    for step in steps:
        course.step(step)
    for i, edge in enumerate(course.edges):
        edge.reads(100_000)
        course.arrives(i, edge.ships())
    course.step(("wait", 60_000, False, None))
    before = brute_force([*course.taken, *[100_000] * 3], course.spec.window)
    course.emissions.clear()
    time = course.base[number] + offset
    course.edges[number].reads(time)
    course.arrives(number, course.edges[number].ships())
    course.step(("wait", 60_000, False, None))  # a correction soon after another waits for more
    near = {s for s, e in before if s - GAP < time < e}
    after = brute_force([*course.taken, time], course.spec.window)
    grown = {s for s, e in after if s <= time < e}
    assert {e.window_start_ms for e in course.emissions} == near | grown


# Data, store and what readers see


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(f"sqlite:///{tmp_path}/r.db", "a", "b", window={"session": "1s"}, lateness="1m")
    yield job
    job.store.close()


def ship(job: Job, edge: Edge, **how: Any) -> None:
    bodies = edge.ships(**how)
    facts = facts_of(edge, bodies, job.position)
    parts: defaultdict[int, list[bytes]] = defaultdict(list)
    for body in bodies:
        for partial in body.partials:
            parts[partial.slice_start_ms].append(partial.synopsis)
    job.position += len(facts)
    deltas = [Delta(query_key(REF), start, GroupedAggregate.merge_bytes(p)) for start, p in parts.items()]
    for _ in range(2):  # a batch that Spark runs again changes nothing
        job.store.apply(job.ledger, deltas, facts, {"q@1": job.position}, 0)
        deltas, facts = [], []


def shown(records: list[AnswerRecord]) -> list[tuple[int, int, int, int | None]]:
    return [(r.window_start_ms, r.window_end_ms, r.revision, total(r.synopsis)) for r in records]


def test_the_data_of_a_session_are_those_of_its_slices_only(job: Job) -> None:
    a, b = Edge("a", spec(lateness="1m")), Edge("b", spec(lateness="1m"))
    a.reads(500, 1200, 9000)  # its last window ends at 2200, inside the slice in which the next begins
    b.reads(2900, 9000)
    ship(job, a)
    ship(job, b)
    records, _ = job.store.windows(REF, None, None, 10)
    assert shown(records) == [(500, 2200, 1, 2), (2900, 3900, 1, 1)]
    assert shown(job.store.at(REF, 2199)) == [(500, 2200, 1, 2)] and job.store.at(REF, 2200) == []


def test_a_merged_session_is_found_by_its_start_only(job: Job) -> None:
    a, b = Edge("a", spec(lateness="1m")), Edge("b", spec(lateness="1m"))
    a.reads(500, 2100, 9000)
    b.reads(9000)
    ship(job, a)
    ship(job, b)
    latest = job.store.latest(REF)
    assert latest is not None and latest.window_start_ms == 2100
    a.reads(1300)
    ship(job, a)
    records, _ = job.store.windows(REF, None, None, 10)
    assert shown(records) == [(500, 3100, 2, 3)]
    latest = job.store.latest(REF)
    assert latest is not None and shown([latest]) == [(500, 3100, 2, 3)]
    assert shown(job.store.at(REF, 2500)) == [(500, 3100, 2, 3)], "also where only the old one had begun last"
    assert job.store.revisions(REF, 2100) == [1, 2]
    assert shown([job.store.answer(REF, 2100, 1)]) == [(2100, 3100, 1, 1)], "a revision never changes"
    gone = job.store.answer(REF, 2100, 2)
    assert gone.synopsis is None and gone.facts.session == SessionFacts(cut=False, cuts=0, merged_into_ms=500)


def test_the_slices_of_final_sessions_are_dropped(job: Job) -> None:
    from center.results import schema as t

    a, b = Edge("a", spec(lateness="1m")), Edge("b", spec(lateness="1m"))
    for edge in (a, b):
        edge.reads(500, 700, 1200)
        edge.ends()
        ship(job, edge)
    records, _ = job.store.windows(REF, None, None, 10)
    assert [(r.phase, *shown([r])[0]) for r in records] == [(Phase.FINAL, 500, 2200, 1, 6)]
    assert job.count(t.deltas) == 0


def test_a_loaded_ledger_continues_its_sessions(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/r.db"
    job = Job(url, "a", window={"session": "1s"}, lateness="1m")
    a = Edge("a", spec(lateness="1m"))
    a.reads(500, 2100, 9000)
    ship(job, a)
    a.reads(1300)
    ship(job, a)
    store, ledger = ResultStore(url), Ledger()
    store.load_ledger(ledger)
    assert snapshot(ledger, REF) == snapshot(job.ledger, REF)
    store.close()
    job.store.close()
