"""An error budget takes no more sends than exact results: the account of the exact query, and what it allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bench.budgets.workload import ZIPF_WINDOW_MS
from edge.cache import ErrorLimits, GroupHistory, SliceEntries
from edge.core.selection import PullContext, select_groups
from edge.core.slices import Slice
from edgewater.query import QuerySpec
from edgewater.synopses import GroupedAggregate, function_named
from edgewater.synopses.encoding.state import State
from sim.budgets.experiment import run
from sim.budgets.link import LinkModel
from sim.budgets.outcome import PolicyOutcome
from sim.budgets.trace import Trace, zipf

SLICE_MS = 1_000


def query(budget: dict[str, Any] | None = None) -> QuerySpec:
    measured: dict[str, Any] = {"name": "q", "from": "s", "group_by": ["key"], "measures": {"v": "sum(value)"}}
    return QuerySpec.from_mapping(
        {**measured, "window": {"tumbling": f"{SLICE_MS}ms"}, "budget": budget or {"error": {"v": 1}}}
    )


def empty_slice(function: str) -> Slice:
    made = function_named(function)
    assert made is not None
    stacks = {"v": made.make((), None if function == "count" else pa.float64())}
    return Slice(SliceEntries(GroupedAggregate({"key": pa.int64()}, stacks), ("v",)))


@dataclass
class Side:
    """A query whose slices are sent at given pulls."""

    function: str
    limits: ErrorLimits
    history: GroupHistory = field(default_factory=lambda: GroupHistory(("v",)))
    slice: Slice = field(init=False)

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.slice = empty_slice(self.function)

    def add(self, keys: np.ndarray[Any, Any], values: np.ndarray[Any, Any], batch: int, elapsed: float) -> None:
        argument = None if self.function == "count" else pa.array(values)
        times, parts = np.zeros(len(keys), np.int64), np.array([min(int(16 * elapsed), 15)])
        self.slice.entries.update([pa.array(keys)], {"v": argument}, len(keys), times, batch, None, elapsed, parts)

    def pull(self, now_ms: int, count: int, pressure: float, *, closed: bool = False) -> int:
        drained = round(now_ms + pressure * (SLICE_MS - now_ms))
        context = PullContext(0, SLICE_MS, closed, (now_ms, drained), count)
        groups = select_groups(self.slice, query(), self.history, self.limits, context, None).groups
        if len(groups):
            self.slice.entries.send(groups)
        return len(groups)

    @property
    def sends(self) -> int:
        return int(self.slice.entries.sends.sum())


@pytest.mark.parametrize(
    ("function", "relative", "signs"),
    [
        *((f, False, (1.0,)) for f in ("sum", "count", "max", "min", "mean")),
        ("sum", True, (1.0,)),
        ("sum", True, (1.0, -1.0)),
    ],
    ids=["sum", "count", "max", "min", "mean", "percentage of a sum", "percentage of sums of both signs"],
)
def test_a_budget_takes_no_more_sends_than_an_exact_query_with_the_same_pulls(
    function: str, relative: bool, signs: tuple[float, ...]
) -> None:
    totals = np.array([sends_of(function, relative, signs, seed) for seed in range(3)])
    budget, exact = totals.sum(axis=0)
    assert budget <= exact, totals


def sends_of(function: str, relative: bool, signs: tuple[float, ...], seed: int) -> tuple[int, int]:
    """The sends of drawn slices by a drawn budget, and by an exact query, which the account follows at each pull."""
    rng = np.random.default_rng([seed, len(function), relative])
    amount = float(rng.choice([0.01, 0.05, 0.3] if relative else [1.0, 3.0, 10.0, 40.0]))
    limits = ErrorLimits({}, {"v": amount}) if relative else ErrorLimits({"v": amount})
    budget, exact = Side(function, limits), Side(function, ErrorLimits({}))
    batch, totals = 0, (0, 0)
    for _ in range(4):
        steps, most = int(rng.integers(10, 40)), int(rng.choice([2, 5, 12, 40]))
        pressure = float(rng.random())
        for now_ms in np.sort(rng.integers(1, SLICE_MS, steps)).tolist():
            keys = rng.zipf(1.3, int(rng.integers(1, 30))) % 80
            values = rng.lognormal(1.0, 1.0, len(keys)) * np.resize(signs, 80)[keys]
            batch += 1
            for side in (budget, exact):
                side.add(keys, values, batch, now_ms / SLICE_MS)
            if rng.random() < 0.8:
                count = int(rng.integers(1, most + 1))
                exact.pull(now_ms, count, pressure)
                budget.pull(now_ms, count, pressure)
                assert budget.slice.exact_sends.sends == exact.sends
                assert np.array_equal(budget.slice.entries.unsent_if_exact, exact.slice.entries.has_pending)
            if rng.random() < 0.05:  # an edge that is restarted
                budget.slice = Slice.from_state(State.unpack(budget.slice.to_state().pack("slice"), "slice"), ("v",))
        for side in (budget, exact):
            while side.pull(SLICE_MS, 7, 1.0, closed=True):
                pass
        totals = totals[0] + budget.sends, totals[1] + exact.sends
        for side in (budget, exact):
            side.open()
    return totals


def test_a_share_that_comes_in_an_open_slice_counts_what_was_sent_before_for_both() -> None:
    side = Side("sum", ErrorLimits({}))
    side.add(np.arange(20), np.full(20, 5.0), 1, 0.5)
    assert side.pull(900, 12, 1.0) == 12
    side.limits = ErrorLimits({"v": 1.0})
    side.pull(950, 3, 1.0)
    assert side.slice.exact_sends.sends == 15
    assert side.sends == 15, "the eight that were left are above the limit"
    # Without a share everything is sent, also what the exact query would send later.
    side.limits = ErrorLimits({"v": 0.0})
    assert side.pull(960, 2, 1.0) == 2
    side.limits = ErrorLimits({"v": 1.0})
    assert side.pull(980, 9, 1.0) == 3
    assert side.slice.exact_sends.sends == side.sends == 20
    side.pull(SLICE_MS, 9, 1.0, closed=True)
    assert side.history.overspent == 0.0


def test_a_checkpoint_without_an_account_begins_one() -> None:
    side = Side("sum", ErrorLimits({"v": 1.0}))
    side.add(np.arange(10), np.full(10, 5.0), 1, 0.5)
    side.pull(900, 4, 1.0)
    sent = side.sends
    state = side.slice.to_state()
    entries = state.components["entries"]
    arrays = {name: array for name, array in entries.arrays.items() if name != "unsent_if_exact"}
    older = State(state.numbers, {}, {"entries": State(None, arrays), "send_queue": state.components["send_queue"]})
    side.slice = Slice.from_state(State.unpack(older.pack("slice"), "slice"), ("v",))
    assert side.pull(950, 4, 1.0) == 4
    assert side.slice.exact_sends.sends == side.sends == sent + 4


def test_what_earlier_slices_spent_beyond_exact_results_is_not_spent_again() -> None:
    def early(overspent: float, *totals: float) -> int:
        side = Side("sum", ErrorLimits({"v": 40.0}))
        side.history.overspent = overspent
        values = np.array(totals) / 100.0
        for batch in range(1, 101):
            side.add(np.arange(len(values)), values, batch, 0.009 * batch)
        return side.pull(900, len(values), 0.0)

    # All groups get a tenth more, under a limit of 40, so an exact query sends none yet.
    large, near, small = [500.0] * 20, [37.5] * 10, [0.1] * 10
    assert early(0.0, *large) == 0, "they would have to be sent again"
    assert early(0.0, *large, *near, *small) == 10
    assert early(20.0, *large, *near, *small) == 0


def test_sends_beyond_exact_results_are_remembered_until_they_are_made_up_for() -> None:
    history = GroupHistory(("v",))
    history.learn_overspent(130, 100)
    assert history.overspent == 30.0
    restored = GroupHistory.from_state(State.unpack(history.to_state().pack("history"), "history"))
    assert restored.overspent == history.overspent
    history.learn_overspent(90, 100)
    assert history.overspent == 20.0
    history.learn_overspent(4, 5)
    assert history.overspent == 19.0, "a small slice forgives no debt"
    for _ in range(60):
        history.learn_overspent(5, 5)
    assert history.overspent == 5.0, "but what small slices cannot make up for is forgotten in time"
    history.learn_overspent(0, 5)
    assert history.overspent == 0.0


def test_a_pull_without_room_sends_nothing_and_ranks_once() -> None:
    side = Side("sum", ErrorLimits({"v": 1.0}))
    side.add(np.arange(10), np.full(10, 5.0), 1, 0.5)
    assert side.pull(900, 0, 1.0) == 0
    assert side.pull(901, 0, 1.0) == 0
    assert side.slice.exact_sends.queue.ranked_ms == side.slice.send_queue.ranked_ms == 900
    assert side.pull(910, 5, 1.0) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "links"), [(4, 12), (5, 40), (4, 600)])
def test_small_traces_take_no_more_updates_than_exact_results(seed: int, links: float) -> None:
    trace = zipf(2, ZIPF_WINDOW_MS, records=3_000, groups=300, seed=seed)
    exact = simulated(trace, 0.0, links).updates
    assert max(simulated(trace, limit, links).updates for limit in (300.0, 30_000.0)) <= exact


@pytest.mark.slow
@pytest.mark.parametrize(("share", "staleness"), [(0.01, 0.25), (0.05, 0.02)])
def test_groups_with_records_until_the_end_are_sent_early_and_once(share: float, staleness: float) -> None:
    """Nearly all of them exceed the limit, so that a budget spares hardly a send."""
    trace = zipf(6, ZIPF_WINDOW_MS, records=6_000, groups=50, sigma=1.0, seed=1)
    largest = np.bincount(trace.codes, trace.values("value")).max() / 6
    links = 5.0 * 50 / (ZIPF_WINDOW_MS / 1000.0)
    exact, budget = (simulated(trace, limit, links) for limit in (0.0, share * largest))
    assert budget.updates <= exact.updates
    assert budget.staleness[2:].mean() < staleness * exact.staleness[2:].mean()


def simulated(trace: Trace, limit: float, links: float) -> PolicyOutcome:
    spec = QuerySpec.from_mapping(
        {
            "name": "q", "from": "trace", "group_by": list(trace.keys), "measures": {"value": "sum(value)"},
            "window": {"tumbling": f"{ZIPF_WINDOW_MS}ms"}, "budget": {"error": {"value": limit}},
        }
    )  # fmt: skip
    return run(trace, spec, LinkModel(links * 32.0, bytes_per_update=32.0))
