"""The cache's parts, and the state of a core in the middle of its work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from edge.cache.entries import SliceEntries
from edge.cache.error_limits import ErrorLimits, primary_mask
from edge.cache.forecast import Forecast
from edge.cache.history import MAX_HISTORY_GROUPS, GroupHistory
from edge.cache.send_ranking import EVICTION_POLICIES, SliceView
from edge.cache.sizing import SendSlots, linear, nth_largest, prev_window, pure_pess
from edge.cache.withheld import withheld_of
from edge.core.core import EdgeCore
from edge.core.events import Acked, BudgetSet, Configured, Ingested, PullEvent, SourcesOpened
from edge.core.streams import StreamSpec
from edgewater.base.errors import InvalidQuery
from edgewater.base.streams import TIME_COLUMN
from edgewater.model.caching import EVICTIONS, SIZINGS, CacheSpec
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate, function_named
from edgewater.wire import QueryRef, Rest
from tests.cells import at_night
from tests.cores import pulled
from tests.query_specs import query_spec
from tests.refusals import refused

COLUMNS = {"key": pa.int64(), "value": pa.float64()}


def entries_of(records: list[tuple[int, float]], function: str = "sum") -> SliceEntries:
    made = function_named(function)
    assert made is not None
    stack = made.make((), pa.float64())
    held = SliceEntries(GroupedAggregate({"key": pa.int64()}, {"v": stack}), ("v",))
    for batch_number, (key, value) in enumerate(records):
        held.update([pa.array([key])], {"v": pa.array([value])}, 1, np.zeros(1, np.int64), batch_number)
    return held


def view(
    held: SliceEntries, limits: ErrorLimits, elapsed: float = 0.5, history: GroupHistory | None = None
) -> SliceView:
    return SliceView(held, limits, history or GroupHistory(("v",)), elapsed)


def order(policy: str, seen: SliceView, groups: int) -> list[int]:
    ranks = EVICTION_POLICIES[policy](seen, np.arange(groups))
    return np.argsort(ranks, kind="stable").tolist()


def test_entries_above_an_absolute_or_relative_limit_are_promoted() -> None:
    held = entries_of([(0, 100.0), (1, 10.0), (0, 1.0), (1, 1.0)])
    held.send(held.shipment(np.array([0, 1])))
    held.update([pa.array([0, 1])], {"v": pa.array([2.0, 2.0])}, 2, np.zeros(2, np.int64), 9)
    assert primary_mask(held, ErrorLimits({"v": 1.9})).tolist() == [True, True]
    assert primary_mask(held, ErrorLimits({"v": 2.0})).tolist() == [False, False]
    assert primary_mask(held, ErrorLimits({}, {"v": 0.05})).tolist() == [False, True]
    assert primary_mask(held, ErrorLimits({"v": 0.0})).tolist() == [True, True], "no limit is exact"


def test_a_measure_without_an_error_function_counts_the_records_that_were_not_sent() -> None:
    held = entries_of([(0, 5.0), (0, 7.0), (1, 1.0)], "mean")
    assert held.accumulated_error("v").tolist() == [2.0, 1.0]
    held.send(held.shipment(np.array([0])))
    assert held.accumulated_error("v").tolist() == [0.0, 1.0]
    assert held.total("v").tolist() == [2.0, 1.0]
    (stated,) = withheld_of(held)
    assert (stated.largest_above, stated.groups, stated.rest) == (1.0, 1, Rest(1, (1.0,)))


@pytest.mark.parametrize(("function", "column"), [("sum", pa.float64()), ("sum", pa.int64()), ("count", None)])
def test_errors_and_totals_follow_the_groups_that_change(function: str, column: pa.DataType | None) -> None:
    made, rng = function_named(function), np.random.default_rng(1)
    assert made is not None
    stacks = {"v": made.make((), column)}
    held = SliceEntries(GroupedAggregate({"key": pa.int64()}, stacks), ("v",))
    pending, sent = np.zeros(2000), np.zeros(2000)
    row_of: dict[int, int] = {}  # key -> group
    for number in range(120):
        # Now and then a batch of most groups, of none that is new, or of one key.
        keys = rng.integers(0, 20 + 15 * number, (600, 40, 1)[number % 3 if number % 30 else 0])
        values = rng.integers(-9, 9, len(keys))
        argument = None if column is None else pa.array(values).cast(column)
        held.update([pa.array(keys)], {"v": argument}, len(keys), np.zeros(len(keys), np.int64), number)
        np.add.at(pending, keys, 1 if column is None else values)
        row_of = {key: row for row, key in enumerate(held.pending.rows()[0].to_pylist())}
        order = np.array(list(row_of))
        if number % 4:  # otherwise several batches come before a look
            assert np.array_equal(held.accumulated_error("v"), pending[order])
            assert np.array_equal(held.total("v"), (sent + pending)[order])
        leaving = np.sort(rng.choice(len(held), min(len(held), 7), replace=False))
        assert np.array_equal(held.accumulated_error("v", leaving), pending[order[leaving]])
        held.send(held.shipment(leaving))
        sent[order[leaving]] += pending[order[leaving]]
        pending[order[leaving]] = 0.0
    restored = SliceEntries.from_state(held.to_state(), ("v",))
    assert np.array_equal(restored.accumulated_error("v"), held.accumulated_error("v"))
    assert np.array_equal(restored.total("v"), (sent + pending)[order])


def test_the_papers_policies_rank_as_in_the_paper() -> None:
    held = entries_of([(0, 50.0), (1, 90.0), (2, 20.0), (0, 1.0)])
    history = GroupHistory(("v",))
    history.learn(entries_of([(0, 60.0), (1, 200.0), (2, 20.0)]))
    seen = view(held, ErrorLimits({"v": 10.0}), history=history)
    assert order("lru", seen, 3) == [1, 2, 0], "touched longest ago first"
    assert order("mae", seen, 3) == [1, 0, 2], "largest pending error first"
    assert order("spe", seen, 3) == [2, 0, 1], "nearest to the value of earlier slices first"
    assert order("rate", seen, 3) == [2, 0, 1], "least still to come first"


def test_gain_prefers_a_settled_group_and_defers_a_busy_one() -> None:
    busy = [(0, 30.0)] * 40
    held = entries_of([*busy, (1, 30.0), (2, 9.0), (3, 1.0)])
    seen = view(held, ErrorLimits({"v": 10.0}))
    gains = -EVICTION_POLICIES["gain"](seen, np.arange(4))
    assert gains[1] > gains[0], "sent now, the busy group would only have to be sent again"
    assert gains[2] > gains[3], "what is near its limit is likelier to exceed it"
    assert ((gains >= -1e-9) & (gains <= 1.0)).all()
    late = -EVICTION_POLICIES["gain"](view(held, ErrorLimits({"v": 10.0}), elapsed=1.0), np.arange(4))
    assert late.tolist() == [1.0, 1.0, 0.0, 0.0], "at the end it is known what must be sent"


def test_the_tail_of_the_forecast_agrees_with_simulation() -> None:
    rng = np.random.default_rng(3)
    counts = rng.poisson(3.0, 40_000)
    sums = np.array([rng.exponential(10.0, n).sum() for n in counts])
    coming = Forecast(np.array([3.0]), {"v": np.array([10.0])}, {"v": np.array([200.0])}, np.array([5.0]), frozenset())
    for room in (5.0, 20.0, 40.0, 80.0):
        # 40,000 draws: the standard error is below 0.0025; the lognormal itself is off by up to 0.08.
        assert coming.exceeds("v", np.array([room]))[0][0] == pytest.approx((sums > room).mean(), abs=0.09)
    assert coming.exceeds("v", np.array([0.0]))[0][0] == pytest.approx(1 - np.exp(-3.0))


def test_sizes_reserve_sends_for_groups_that_have_not_appeared() -> None:
    held = entries_of([(k, 1.0) for k in range(10)])
    history = GroupHistory(("v",))
    history.learn(entries_of([(k, 1.0) for k in range(40)]))
    history.learn_curve(np.linspace(0, 0.99, 40).astype(np.float32))
    slots = SendSlots(remaining=100.0, total=200.0)
    assert linear(held, history, 0.25, slots) == 100.0 - 40 * 0.75, "the sign is the corrected one: f falls with time"
    assert linear(held, history, 1.0, slots) == 100.0
    assert prev_window(held, history, 0.5, slots) == pytest.approx(100.0 - 20, abs=1)
    assert pure_pess(held, history, 1.0, slots) == 100.0
    assert nth_largest(np.array([5.0, 9.0, 1.0]), 1) == 5.0
    assert nth_largest(np.array([5.0]), 7) == 0.0


def test_history_is_bounded_and_keeps_the_groups_with_most_records() -> None:
    history = GroupHistory(())
    keys = np.repeat(np.arange(MAX_HISTORY_GROUPS + 5000), 1)
    busy = np.repeat(np.arange(100), 5)
    aggregate = GroupedAggregate({"key": pa.int64()}, {})
    held = SliceEntries(aggregate)
    both = pa.array(np.concatenate([keys, busy]))
    held.update([both], {}, len(both), np.zeros(len(both), np.int64), 1)
    history.learn(held)
    assert history.nbytes < 20 * MAX_HISTORY_GROUPS
    assert (history.averages_of(held, np.arange(100)).arrivals == 6.0).all()


def query(**changes: Any) -> QuerySpec:
    return query_spec(changes, group_by=["key"], measures={"v": "sum(value)"})


CASES = [
    *({"budget": {"error": {"v": 40}}, "cache": {"eviction": e}} for e in EVICTIONS),
    *({"budget": {"staleness": "100ms"}, "cache": {"sizing": s, "estimate": "explicit"}} for s in SIZINGS),
    {"budget": {"error": {"v": "3%"}}},
    {"measures": {"v": "max(value)"}, "budget": {"error": {"v": 4}}},
    {},
]


def step(core: EdgeCore, number: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(number)
    now = 170 * (number + 1)
    times = np.sort(rng.integers(now - 170, now, 60))
    keys = pa.array(rng.integers(0, 25, 60))
    batch = pa.record_batch({"key": keys, "value": pa.array(rng.exponential(20.0, 60)), TIME_COLUMN: pa.array(times)})
    core.handle(Ingested("s", "file", batch, now))
    frames = []
    for _ in range(2):
        between = {"s": now}
        frames += pulled(core, PullEvent(250, between, 3000.0, 5))
    core.handle(Acked(core.next_seq - 2))
    return [(f.seq, f.crc32c) for f in frames]


def fresh() -> EdgeCore:
    return EdgeCore({"s": StreamSpec(COLUMNS)})


@pytest.mark.parametrize("changes", [*CASES[::3], *at_night(*CASES[1::3], *CASES[2::3])], ids=str)
def test_a_restored_core_builds_the_same_frames(changes: dict[str, Any]) -> None:
    core = fresh()
    core.handle(SourcesOpened((("s", "file"),)))
    core.handle(Configured(((QueryRef("q", 1), query(**changes)),)))
    core.handle(BudgetSet(QueryRef("q", 1), {"v": 40.0}))
    built = [f for number in range(13) for f in step(core, number)]
    assert built
    other = fresh()
    other.restore(core.to_state())
    assert other.to_state() == core.to_state()
    for number in range(13, 25):
        assert step(other, number) == step(core, number)
    assert other.to_state() == core.to_state()


@pytest.mark.parametrize(
    "cache,field",
    [
        ({"eviction": "fifo"}, "cache.eviction"),
        ({"sizing": 3}, "cache.sizing"),
        ({"estimate": None}, "cache.estimate"),
        ({"eager": "150%"}, "cache.eager"),
        ({"size": 3}, "cache.size"),
        ("lru", "cache"),
    ],
)
def test_an_unknown_cache_option_is_refused_with_its_field(cache: Any, field: str) -> None:
    with refused(InvalidQuery, field):
        query(cache=cache)


@pytest.mark.parametrize("share", ["1%", "0.07%", "3.3%", "29.3%", "99.9%"])
def test_cache_options_and_relative_budgets_round_trip(share: str) -> None:
    spec = query(cache={"eviction": "spe", "sizing": "linear", "eager": 0.25}, budget={"error": {"v": share}})
    assert spec.cache == CacheSpec("spe", "linear", "acc", 0.25)
    assert QuerySpec.from_mapping(spec.to_mapping()) == spec


def test_a_relative_budget_outside_0_to_100_percent_is_refused() -> None:
    for share in ("100%", "-1%"):
        with refused(InvalidQuery, "budget.error.v"):
            query(budget={"error": {"v": share}})
