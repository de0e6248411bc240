from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bench.budgets.traces import zipf
from edge.core.events import BudgetSet
from edge.core.policies import PLANNED_SHARE
from edgewater.base.errors import InvalidRequest
from edgewater.model.caching import EVICTIONS, SIZINGS, CacheSpec
from edgewater.model.query import QuerySpec
from edgewater.synopses import CountStack, GroupedAggregate
from edgewater.wire import FrameBody
from sim.budgets import edges as edges_module
from sim.budgets import experiment
from sim.budgets.center import MergingCenter
from sim.budgets.edges import TicketCodec
from sim.budgets.experiment import SimulatedPolicy
from sim.budgets.link import LinkSimulation, SimulatedLink
from sim.budgets.trace import Trace
from tests.cells import at_night
from tests.query_specs import query_spec
from tests.refusals import refused

pytestmark = pytest.mark.slow

WINDOW_MS = 10_000
TRACE = zipf(3, WINDOW_MS, records=3000, groups=400, seed=4)
NUMBERS = dict(zip(TRACE.batch.column("key").to_pylist(), TRACE.codes.tolist(), strict=True))
FAST, SLOW = 600.0, 12.0
"""Updates per second; about 300 groups appear in a window of 10 s."""


def run(
    trace: Trace, asked: QuerySpec, link: SimulatedLink, policy: SimulatedPolicy | None = None, edges: int = 1
) -> Any:
    """Runs edges that have the records of a trace at random, so that each edge has every group."""
    homes = np.random.default_rng(0).integers(0, edges, len(trace))
    return experiment.run(trace, trace.split(homes, edges), asked, link, policy)


def query(measure: str = "sum(value)", **budget: Any) -> QuerySpec:
    return query_spec(
        {"budget": budget} if budget else {}, group_by=["key"], measures={"v": measure}, window={"tumbling": "10s"}
    )


def link(updates_s: float, **more: Any) -> SimulatedLink:
    return SimulatedLink(updates_s * 32, bytes_per_update=32.0, **more)


@pytest.mark.nightly
@pytest.mark.parametrize("eviction", [*EVICTIONS[:2], *at_night(*EVICTIONS[2:])])
@pytest.mark.parametrize("measure,budget", [("sum(value)", 300_000.0), ("count()", 12.0), ("max(value)", 40_000.0)])
def test_under_an_error_budget_the_center_is_within_it_and_what_is_withheld_is_stated(
    eviction: str, measure: str, budget: float
) -> None:
    out = run(TRACE, query(measure, error={"v": budget}), link(SLOW), SimulatedPolicy(cache=CacheSpec(eviction)))
    assert (out.error <= budget * (1 + 1e-9)).all()
    assert (out.error > 0).any(), "a budget that withholds nothing tests nothing"
    np.testing.assert_allclose(out.stated, out.error, rtol=1e-9)


@pytest.mark.nightly
def test_a_combined_budget_takes_the_fewest_updates_that_keep_both_limits() -> None:
    budget = 300_000.0
    fewest = run(TRACE, query(error={"v": budget}), link(FAST), SimulatedPolicy("optimal")).updates
    alone = run(TRACE, query(error={"v": budget}), link(4 * SLOW))
    for updates_s in (FAST, 4 * SLOW):
        out = run(TRACE, query(error={"v": budget}, staleness="1s"), link(updates_s))
        assert (out.error <= budget * (1 + 1e-9)).all()
        np.testing.assert_allclose(out.stated, out.error, rtol=1e-9)
        assert (out.staleness[1:] <= 0.1).all()
        assert fewest <= out.updates <= alone.updates
        if updates_s == FAST:
            assert out.updates == fewest


@pytest.mark.nightly
@pytest.mark.parametrize("updates_s", [SLOW, *at_night(FAST)])
def test_no_budget_costs_more_updates_than_exact_results(updates_s: float) -> None:
    short = TRACE.rows(np.flatnonzero(TRACE.times_ms < 2 * WINDOW_MS))
    exact = run(short, query(), link(updates_s)).updates
    for budget in (1.0, 30_000.0, "1%"):
        assert run(short, query(error={"v": budget}), link(updates_s)).updates <= 1.02 * exact, "in expectation"


@pytest.mark.nightly
def test_a_relative_budget_is_kept_by_every_group_over_all_edges() -> None:
    out = _values(query(error={"v": "5%"}), edges=3)
    for sent, true in out:
        seen = np.isfinite(true)
        assert (np.abs(true - np.nan_to_num(sent))[seen] <= 0.05 * np.abs(true[seen]) * (1 + 1e-9)).all()


def _values(asked: QuerySpec, edges: int) -> list[tuple[Any, Any]]:
    """(at the center, true) per window."""
    held: list[tuple[Any, Any]] = []

    class Keeping(MergingCenter):
        def outcome(self, truth: Any, *rest: Any) -> Any:
            held.extend((self.values(start), truth[start]) for start in truth)
            return super().outcome(truth, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges_module, "MergingCenter", Keeping)
        run(TRACE, asked, link(SLOW), edges=edges)
    return held


def test_without_a_budget_the_center_has_the_truth() -> None:
    out = run(TRACE, query(), link(FAST))
    np.testing.assert_allclose(out.error, 0.0, atol=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("sizing", SIZINGS)
@pytest.mark.parametrize("estimate", ["acc", *at_night("explicit")])
def test_under_a_staleness_budget_the_deadline_is_kept_and_what_is_omitted_is_stated(
    sizing: str, estimate: str
) -> None:
    cache = CacheSpec("gain", sizing, estimate)
    out = run(TRACE, query(staleness="1s"), link(SLOW), SimulatedPolicy(cache=cache))
    assert (out.staleness <= 0.1 + 2e-3).all()
    np.testing.assert_allclose(out.stated, out.error, rtol=1e-9)


def by_error(trace: Trace, updates_s: float, deadline_ms: float) -> tuple[int, float]:
    """The reference of TR 16-003, section 5.3, without a primary cache: each slot sends the largest accumulated error.

    Returns the number of sends, and the largest error at the deadline, of the first window.
    """
    pending, sends, at = np.zeros(trace.codes.max() + 1), 0, 0
    first = trace.rows(np.flatnonzero(trace.times_ms < WINDOW_MS))
    values = first.batch.column("value").to_numpy()
    for slot_ms in np.arange(1000.0 / updates_s, WINDOW_MS + deadline_ms, 1000.0 / updates_s):
        until = int(np.searchsorted(first.times_ms, slot_ms))
        np.add.at(pending, first.codes[at:until], values[at:until])
        at, largest = until, int(pending.argmax())
        sends += pending[largest] > 0
        pending[largest] = 0.0
    return sends, float(pending.max())


@pytest.mark.parametrize("eviction", ["lru", "gain"])
def test_pure_pess_on_a_narrow_link_is_about_as_good_as_the_reference(eviction: str) -> None:
    narrow = 4.0
    short = zipf(1, WINDOW_MS, records=1000, groups=300, seed=4)
    sends, error = by_error(short, narrow, 1_000.0)
    out = run(short, query(staleness="1s"), link(narrow), SimulatedPolicy(cache=CacheSpec(eviction, "pure_pess")))
    assert out.updates >= 0.8 * PLANNED_SHARE * sends
    assert out.error[0] <= 1.5 * error
    np.testing.assert_allclose(out.stated, out.error, rtol=1e-9)


@pytest.mark.parametrize("updates_s", [1.1, 0.8])
def test_a_deadline_of_about_one_send_is_kept(updates_s: float) -> None:
    out = run(TRACE, query(staleness="1s"), link(updates_s))
    assert (out.staleness <= 0.1 + 2e-3).all()
    np.testing.assert_allclose(out.stated, out.error, rtol=1e-9)


@pytest.mark.nightly
def test_the_same_run_twice_is_the_same_run() -> None:
    first, second = (run(TRACE, query(staleness="1s"), link(SLOW, jitter_ms=20.0)) for _ in range(2))
    assert first.staleness.tolist() == second.staleness.tolist()
    assert (first.error.tolist(), first.updates, first.bytes) == (second.error.tolist(), second.updates, second.bytes)


@pytest.mark.nightly
def test_the_fast_center_equals_the_merge_of_production() -> None:
    frames: dict[int, list[bytes]] = {}

    class Recording(MergingCenter):
        def receive(self, edge: int, body: FrameBody, parts: Any, arrival_ms: float) -> None:
            for start, part in parts:
                frames.setdefault(start, []).append(part.to_bytes())
            super().receive(edge, body, parts, arrival_ms)

        def outcome(self, *given: Any) -> Any:
            for start, parts in frames.items():
                merged = GroupedAggregate.from_bytes(GroupedAggregate.merge_bytes(parts))
                codes = [NUMBERS[key] for key in merged.rows()[0].to_pylist()]
                np.testing.assert_allclose(self.values(start)[codes], merged.query("v").value)
                assert int(np.isfinite(self.values(start)).sum()) == len(merged)
            return super().outcome(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges_module, "MergingCenter", Recording)
        run(TRACE, query(error={"v": 100_000.0}), link(SLOW), edges=3)
    assert len(frames) == 3


def test_a_ticket_costs_what_its_updates_cost_and_is_good_for_the_partial_once() -> None:
    office = TicketCodec(32.0)
    part = GroupedAggregate({"key": pa.int64()}, {"v": CountStack()})
    part.update([pa.array([1, 2, 3])], {"v": None}, 3)
    data = office.encode(part)
    assert len(data) == 3 * 32
    assert office.decode(data) is part
    with pytest.raises(KeyError):
        office.decode(data)


def test_no_policy_is_faster_than_the_optimum_and_the_default_is_faster_than_batching() -> None:
    asked = query(error={"v": 300_000.0})
    stale = {name: run(TRACE, asked, link(SLOW), SimulatedPolicy(name)).staleness for name in
             ("optimal", "caching", "streaming", "batching", "random")}  # fmt: skip
    for name, staleness in stale.items():
        assert (staleness[:1] >= stale["optimal"][:1] - 1e-3).all(), name
    assert stale["caching"].mean() < stale["batching"].mean()


def test_a_window_that_is_late_delays_the_next_one() -> None:
    out = run(TRACE, query(), link(SLOW), SimulatedPolicy("batching"))
    assert out.staleness[0] < out.staleness[1] < out.staleness[2]


@pytest.mark.nightly
def test_a_hook_that_hands_out_shares_reaches_the_edges() -> None:
    heard: list[int] = []

    def rebalance(window: int, runs: list[edges_module.EdgeSimulation]) -> None:
        heard.append(window)
        for each in runs:
            each.core.handle(BudgetSet(each.ref, {"v": 0.0}))

    parts = [TRACE.rows(np.arange(half, len(TRACE), 2)) for half in range(2)]
    out = edges_module.simulate(TRACE, parts, query(error={"v": 300_000.0}), link(FAST), rebalance)
    assert heard[:2] == [0, 1]
    assert out.error[-1] == pytest.approx(0.0, abs=1e-3)


def test_real_bytes_count_frames_and_keys() -> None:
    out = run(TRACE, query(error={"v": 300_000.0}), SimulatedLink(2_000.0))
    assert out.bytes > 8 * out.updates
    assert (out.error <= 300_000.0 * (1 + 1e-9)).all()


def test_a_frame_waits_for_an_outage_to_end_and_frames_do_not_overtake_each_other() -> None:
    wire = LinkSimulation(SimulatedLink(1000.0, latency_ms=5.0, jitter_ms=50.0, trace=((100.0, 0.0), (300.0, 1.0))), 0)
    arrivals = [wire.transmit(80.0, 0.0), wire.transmit(80.0, wire.free_ms)]
    assert wire.free_ms == pytest.approx(360.0)
    assert arrivals == sorted(arrivals)


def test_a_trace_of_unequal_columns_is_refused_with_the_column_named() -> None:
    with refused(InvalidRequest, "value"):
        Trace.from_columns([1, 2], {"key": ["a", "b"]}, {"value": [1.0]})
    with refused(InvalidRequest, "policy"):
        SimulatedPolicy("best")  # type: ignore[arg-type]
