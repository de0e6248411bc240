"""A worker that processes turns item by item; the time is what the test says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.scheduling.costs import Operator
from bench.scheduling.memory import QueueLimits
from bench.scheduling.policies import POLICIES
from bench.scheduling.queries import Item, QueryProfile
from bench.scheduling.scheduler import Scheduler, WorkerTurn

COST_MS = 0.01


def profile(name: str, period_ms: float = 1_000, *, offset_ms: float = 0, inputs: int = 1) -> QueryProfile:
    return QueryProfile(name, [Operator(COST_MS, 0.0)], period_ms, offset_ms, inputs)


def work(scheduler: Scheduler, turn: WorkerTurn, now_ms: float, per_record_ms: float = COST_MS) -> float:
    """Runs a turn; returns the time it took."""
    spent_ms = 0.0
    for item in turn.items():
        spent_ms += item.records * per_record_ms
        scheduler.complete(turn.query, item, turn.through)
        if spent_ms >= turn.limit_ms:
            break
    scheduler.ran(turn, now_ms + spent_ms)
    return spent_ms


def order(scheduler: Scheduler, now_ms: float, limit: int = 1_000) -> list[str]:
    """The queries in the order of their turns until nothing is queued."""
    names = []
    while (turn := scheduler.next(now_ms)) is not None and len(names) < limit:
        names.append(turn.query.profile.name)
        now_ms += work(scheduler, turn, now_ms)
    return names


def klink(**options: object) -> Scheduler:
    return Scheduler(POLICIES["klink"], **options)  # type: ignore[arg-type]


def test_the_query_whose_window_ends_first_runs_first() -> None:
    scheduler = klink()
    late, soon = scheduler.add(profile("late", 10_000), 0), scheduler.add(profile("soon", 500), 0)
    scheduler.offer(late, 100, 1)
    scheduler.offer(soon, 100, 2)
    assert order(scheduler, 3) == ["soon", "late"]


def test_a_query_with_more_queued_work_has_less_slack() -> None:
    scheduler = klink()
    light, heavy = scheduler.add(profile("light"), 0), scheduler.add(profile("heavy"), 0)
    scheduler.offer(light, 100, 1)
    scheduler.offer(heavy, 200, 1)
    assert heavy.slack_ms(1) == light.slack_ms(1) - 100 * COST_MS
    assert order(scheduler, 2) == ["heavy", "light"]


def test_a_queued_watermark_comes_before_all_that_is_only_expected() -> None:
    scheduler = klink()
    due, expected = scheduler.add(profile("due"), 0), scheduler.add(profile("expected"), 0)
    scheduler.offer(expected, 1_000_000, 1)  # 10 s of work: a slack far below zero
    assert scheduler.watermark(due, 1_000, 1_005)
    assert order(scheduler, 1_006)[0] == "due"


def test_past_delays_move_the_slack() -> None:
    scheduler = klink()
    slow = scheduler.add(profile("slow"), 0)
    for epoch in range(1, 20):
        scheduler.watermark(slow, epoch * 1_000, epoch * 1_000 + 400)
        order(scheduler, epoch * 1_000 + 400)
    assert slow.slack_ms(19_500) == pytest.approx(20_000 + 400 - 19_500)


def test_a_join_is_due_when_the_first_of_the_missing_watermarks_is_expected() -> None:
    scheduler = klink()
    join = scheduler.add(profile("join", inputs=2), 0)
    for epoch in range(1, 20):
        now_ms = epoch * 1_000
        assert not scheduler.watermark(join, now_ms, now_ms + 100, 0), "the other input is missing"
        assert scheduler.watermark(join, now_ms, now_ms + 600, 1)
        order(scheduler, now_ms + 600)
    assert join.expected_ingestion_ms(19_900) == pytest.approx(20_100), "the minimum over inputs"
    scheduler.watermark(join, 20_000, 20_100, 0)
    assert join.expected_ingestion_ms(20_100) == pytest.approx(20_600), "the one that is missing"


FIRST: dict[str, str] = {
    "klink": "soon", "fair": "first", "fcfs": "oldest", "hr": "productive", "streambox": "soon",
    "edgewise": "long", "edf": "soon", "srpt": "short",
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_has_its_own_first_query(policy: str) -> None:
    scheduler = Scheduler(POLICIES[policy])
    operators = {"productive": [Operator(COST_MS / 10, 1.0)], "soon": [Operator(COST_MS, 0.0)]}
    records = {"first": 50, "oldest": 50, "productive": 60, "soon": 50, "long": 90, "short": 20}
    periods = {"soon": 500.0}
    states = {
        name: scheduler.add(
            QueryProfile(name, operators.get(name, [Operator(COST_MS * (1 + (name == "long")), 0.0)]),
                         periods.get(name, 9_000.0)), 0)
        for name in records
    }  # fmt: skip
    if policy == "srpt":
        records["productive"] = 900
    for name in ("oldest", "first", "productive", "soon", "long", "short"):
        scheduler.offer(states[name], records[name], 1 + (name != "oldest"))
    turn = scheduler.next(3)
    assert turn is not None and turn.query.profile.name == FIRST[policy]


def test_streambox_keeps_a_query_until_its_watermark_is_processed() -> None:
    scheduler = Scheduler(POLICIES["streambox"], cycle_ms=1)
    one, other = scheduler.add(profile("one"), 0), scheduler.add(profile("other", offset_ms=1), 0)
    for state in (one, other):
        for _ in range(3):
            scheduler.offer(state, 200, 1)
    scheduler.watermark(other, 1, 2)
    assert order(scheduler, 3)[:5] == ["other"] * 4 + ["one"], "three batches and the watermark"


@given(
    st.sampled_from(list(POLICIES)),
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 300), st.booleans(), st.floats(0, 400)), min_size=1, max_size=60
    ),
    st.booleans(),
)
def test_everything_that_is_queued_is_processed_once_and_in_order(
    policy: str, events: list[tuple[int, int, bool, float]], capped: bool
) -> None:
    """No item is lost, overtaken or processed twice, and memory stays under its cap."""
    memory = QueueLimits(40_000, 100) if capped else None
    scheduler = Scheduler(POLICIES[policy], memory=memory, cycle_ms=5)
    states = [scheduler.add(profile(f"q{i}", 100 * (i + 1)), 0) for i in range(6)]
    queued: dict[str, list[Item]] = {state.profile.name: [] for state in states}
    done: dict[str, list[Item]] = {state.profile.name: [] for state in states}
    now_ms = 0.0

    def run(turns: int) -> None:
        nonlocal now_ms
        while turns and (turn := scheduler.next(now_ms)) is not None:
            turns -= 1
            spent_ms = 0.0
            for item in turn.items():
                if item.end_ms is None:
                    done[turn.query.profile.name].append(item)
                spent_ms += item.records * COST_MS
                scheduler.complete(turn.query, item, turn.through)
                if spent_ms >= turn.limit_ms:
                    break
            now_ms += spent_ms
            scheduler.ran(turn, now_ms)

    for number, (which, records, is_watermark, step_ms) in enumerate(events):
        now_ms += step_ms
        state = states[which]
        if is_watermark:
            scheduler.watermark(state, now_ms, now_ms)
        elif scheduler.offer(state, records, now_ms):
            queued[state.profile.name].append(state.queue[-1])
        assert scheduler.memory.used * 100 <= 40_000 or not capped
        run(number % 3)
    run(10_000)
    assert {name: [*map(id, items)] for name, items in done.items()} == {
        name: [*map(id, items)] for name, items in queued.items()
    }
    assert scheduler.next(now_ms) is None
    assert scheduler.memory.used == pytest.approx(0, abs=1e-6)
    assert all(state.records == state.queued_ms == 0 and not state.sweeps for state in states)


def test_a_queue_at_its_cap_refuses_records_and_takes_watermarks() -> None:
    scheduler = klink(memory=QueueLimits(1_000, 100))
    state = scheduler.add(profile("q"), 0)
    assert scheduler.offer(state, 10, 1)
    assert not scheduler.offer(state, 1, 1), "its source keeps it"
    assert scheduler.watermark(state, 1_000, 1_001), "without it the window could not fire"
    order(scheduler, 1_002)
    assert scheduler.offer(state, 10, 2_000)
    assert not scheduler.offer(state, 11, 2_000), "larger than the cap: never"
    assert scheduler.memory.peak == 10


def test_room_under_the_cap_goes_to_the_least_slack_and_without_management_to_the_longest_held() -> None:
    far, due, overdue, swept = (profile(name, period) for name, period in
                                (("far", 60_000), ("due", 900), ("overdue", 800), ("swept", 700)))  # fmt: skip
    orders = {}
    for manages in (True, False):
        scheduler = klink(memory=QueueLimits(100_000, 100), manage_memory=manages)
        states = [scheduler.add(each, 0) for each in (far, due, overdue, swept)]
        scheduler.offer(states[3], 10, 1)
        assert scheduler.watermark(states[3], 700, 750)
        held = dict(zip(states, (1.0, 3.0, 4.0, 2.0), strict=True))
        orders[manages] = [state.profile.name for state in scheduler.by_room(held, 1_000)]
    assert orders[True] == ["swept", "overdue", "due", "far"]
    assert orders[False] == ["far", "swept", "due", "overdue"]


def test_as_in_the_thesis_memory_management_runs_the_largest_reduction_and_then_the_least_slack() -> None:
    scheduler = klink(memory=QueueLimits(100_000, 100, 0.5, 0.1, reduction_first=True), cycle_ms=1)
    soon = scheduler.add(QueryProfile("soon", [Operator(COST_MS * 100, 0.0)], 100), 0)
    cheap = scheduler.add(QueryProfile("cheap", [Operator(COST_MS, 0.0)], 1e6), 0)
    alike = scheduler.add(QueryProfile("alike", [Operator(COST_MS, 0.0)], 1e5), 0)
    for state in (soon, cheap, alike):
        scheduler.offer(state, 200, 1)
    turn = scheduler.next(2)
    assert turn is not None and turn.query is alike, "as cheap as the other one, and due earlier"
    assert scheduler.memory.activations == 1


def test_a_managed_turn_runs_a_filter_and_leaves_the_join_for_later() -> None:
    scheduler = klink(memory=QueueLimits(20_000, 100, 0.5, 0.1, reduction_first=True))
    join = QueryProfile("join", [Operator(COST_MS, 0.25), Operator(COST_MS, 0.0, stores=True)], 1_000)
    state = scheduler.add(join, 0)
    scheduler.offer(state, 60, 1)
    scheduler.offer(state, 60, 1)
    turn = scheduler.next(2)
    assert turn is not None and turn.through == 1
    work(scheduler, turn, 2)
    assert state.records == pytest.approx(30) == scheduler.memory.used
    assert [item.stage for item in state.queue] == [1, 1]
    assert order(scheduler, 5) == ["join"]
    assert scheduler.memory.used == 0


def test_an_answer_is_due_since_its_watermark_came_even_if_its_source_was_held_back() -> None:
    scheduler = klink()
    held, fresh = scheduler.add(profile("held"), 0), scheduler.add(profile("fresh"), 0)
    for each in (fresh, held):
        scheduler.offer(each, 100, 1)
    scheduler.watermark(fresh, 1_000, 5_000)
    scheduler.watermark(held, 1_000, 6_000, arrived_ms=1_100)
    assert order(scheduler, 6_001) == ["held", "fresh"]
