"""Shares of an error budget: never more than E in force for any slice, whatever happens; and then the optimum."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from center.budgets import AllocationPolicy, BudgetAllocator, BudgetReport
from edgewater.base.streams import EdgeId
from tests.center.share_world import EAGER, SLICE_MS, ShareWorld
from tests.examples import examples

A, B, C = EdgeId("a"), EdgeId("b"), EdgeId("c")
E = 1000.0


def calm_world(drifts: dict[str, float], *policy: AllocationPolicy) -> ShareWorld:
    """Returns a world of edges with these drifts, after its network has delivered everything for some rounds."""
    world = ShareWorld(E, drifts, *policy)
    world.calm()
    return world


def optimum(world: ShareWorld, edges: set[str] | None = None) -> dict[str, float]:
    weights = {
        name: math.sqrt(e.update_bytes * e.drift) for name, e in world.edges.items() if edges is None or name in edges
    }
    return {name: world.limit * w / sum(weights.values()) for name, w in weights.items()}


def cost(world: ShareWorld, shares: dict[str, float]) -> float:
    """Bytes per second, as the model has it."""
    return sum(e.update_bytes * e.drift / shares[name] for name, e in world.edges.items())


def test_the_optimum_is_reached_where_messages_come_through() -> None:
    world = calm_world({"a": 1.0, "b": 100.0, "c": 10_000.0})
    assert world.shares() == pytest.approx(optimum(world), rel=1e-6)
    assert not world.flagged


def test_every_edge_gets_the_whole_budget_where_errors_do_not_add_up() -> None:
    world = calm_world({"a": 1.0, "b": 100.0})
    assert [e.schedule.last.shares["top"] for e in world.edges.values()] == [7.0, 7.0]


def test_a_new_edge_has_nothing_until_the_others_have_confirmed_that_they_shrank() -> None:
    world = calm_world({"a": 1.0})
    assert world.shares()["a"] == pytest.approx(E)
    world.join("b")
    world.allocator.set_members(frozenset(world.expected), {})
    world.allocator.report(B, world.edges[B].report(), world.now_ms)
    world.turn()
    grants = world.allocator.grants()
    assert grants[A].shares["bytes"] == pytest.approx(E / 2)
    assert grants[B].shares.get("bytes", 0.0) == 0.0
    shrunk_from = world.edges[A].through
    for edge in (A, B):
        world.edges[edge].hear(grants[edge])
        world.allocator.report(edge, world.edges[edge].report(), world.now_ms)
    world.turn()
    grant = world.allocator.grants()[B]
    assert grant.shares["bytes"] == pytest.approx(E / 2)
    assert grant.from_ms == shrunk_from, "not for slices that a closed under all of E"
    world.check()


def test_an_edge_that_lags_keeps_its_small_share_for_slices_that_others_closed_under_large_ones() -> None:
    world = calm_world({"a": 1.0, "b": 1.0})
    world.edges[A].close(50)  # far ahead of b, and it can take none of that back
    world.edges[A].drift, world.edges[B].drift = 0.01, 100.0
    world.calm(3)
    slow, border = world.edges[B], world.edges[A].schedule.last.from_ms
    assert slow.schedule.last.shares["bytes"] > 0.9 * E
    assert slow.schedule.at(border - SLICE_MS)["bytes"] == pytest.approx(E / 2)
    world.check()


def test_a_smaller_share_does_not_apply_before_the_slice_from_which_the_larger_one_did() -> None:
    """An edge that joins is behind the slice from which the others gave it a share. It is then granted less, because
    another edge joins."""
    world = calm_world({"a": 1.0})
    world.edges[A].close(20)  # under the whole budget
    for name in ("b", "c"):
        world.join(name)
        world.calm(4)  # checks each slice
    behind, border = world.edges[B], world.edges[A].schedule.steps.steps[1].from_ms
    assert behind.through < border == behind.schedule.last.from_ms
    assert behind.schedule.last.shares["bytes"] == pytest.approx(E / 3)


def test_an_edge_that_lost_its_state_gets_no_share_of_slices_that_others_closed_under_theirs() -> None:
    world = calm_world({"a": 1.0, "b": 1.0})
    world.edges[A].close(20)  # under half of the budget
    world.edges[B].close(20)
    world.edges[A].drift, world.edges[B].drift = 0.01, 100.0
    world.calm(4)
    assert world.edges[B].schedule.last.shares["bytes"] > 0.9 * E
    world.edges[B].lose_state()
    world.calm(3)
    assert world.edges[B].closed[0] == 0.0
    assert sum(world.shares().values()) == pytest.approx(E)


def test_a_silent_edge_keeps_its_share_and_the_others_divide_the_rest() -> None:
    world = calm_world({"a": 1.0, "b": 1.0, "c": 1.0})
    world.now_ms += EAGER.silence_timeout_ms
    world.edges[A].drift = 9.0
    world.calm(gone=frozenset({"c"}))
    assert world.shares() == pytest.approx({"a": E / 2, "b": E / 6, "c": E / 3}, rel=1e-6)


def test_a_retired_edges_share_is_recovered_for_slices_that_it_cannot_have_closed() -> None:
    world = calm_world({"a": 1.0, "b": 1.0})
    gone_from = world.edges[B].through
    world.expected.remove(B)
    world.retired = {B: gone_from}
    world.allocator.set_members(frozenset({A}), world.retired)
    world.allocator.report(A, world.edges[A].report(), world.now_ms)
    world.turn()
    grant = world.allocator.grants()[A]
    assert (grant.from_ms, grant.shares["bytes"]) == (gone_from, pytest.approx(E))


def test_a_retired_edge_that_comes_back_with_its_old_share_is_flagged_and_cut_back_to_nothing() -> None:
    world = calm_world({"a": 1.0, "b": 1.0})
    world.retired, world.expected = {B: world.edges[B].through}, {A}
    world.turn()
    world.expected, world.retired = {A, B}, {}
    world.turn()
    (flagged,) = world.allocator.report(B, world.edges[B].report(), world.now_ms)
    assert flagged.edge == B and "was granted 0" in flagged.message
    assert not world.allocator.grants()[B].shares
    world.calm()
    assert world.shares() == pytest.approx(optimum(world), rel=1e-6)


def test_an_edge_that_applies_more_than_it_was_granted_is_flagged_once_and_cut_back_to_nothing() -> None:
    world = calm_world({"a": 1.0, "b": 1.0})
    held = world.allocator.holdings[A]
    lie = BudgetReport(held.version, {"bytes": 0.9 * E}, held.last.from_ms)
    (flagged,) = world.allocator.report(A, lie, world.now_ms)
    assert flagged.edge == A and "900" in flagged.message
    grant = world.allocator.grants()[A]
    assert grant.version > held.version and not grant.shares
    assert world.allocator.report(A, lie, world.now_ms) == [], "the same again is the same"
    assert world.allocator.grants()[A] == grant
    assert world.allocator.in_force(1 << 40)["bytes"] == pytest.approx(1.4 * E), (
        "what it claims is counted against all growth"
    )
    world.calm()
    assert world.shares() == pytest.approx(optimum(world), rel=1e-6)


@pytest.mark.parametrize("shares", [{"bytes": math.nan}, {"bytes": -1.0}, {"bytes": math.inf}, {"flights": 1.0}])
def test_a_report_that_no_edge_can_mean_is_flagged(shares: dict[str, float]) -> None:
    world = calm_world({"a": 1.0})
    held = world.allocator.holdings[A]
    assert world.allocator.report(A, BudgetReport(held.version, shares, held.last.from_ms), 1)


@pytest.mark.parametrize("claim", [1.7e308, math.inf, math.nan, 5e-324, -1.0])
@pytest.mark.parametrize("limit", [E, 1.7e308])
def test_a_claim_counts_as_at_most_the_budget_so_the_sum_over_edges_is_a_number(claim: float, limit: float) -> None:
    allocator = BudgetAllocator({"bytes": limit}, {}, EAGER)
    edges = frozenset({A, B, EdgeId("c")})
    allocator.set_members(edges, {})
    for edge in (A, B):
        allocator.report(edge, BudgetReport(0, {"bytes": claim}, 0, claim, {"bytes": claim}), 1)
    allocator.report(EdgeId("c"), BudgetReport(0, {}, 0), 1)
    allocator.rebalance(2, 1 << 50)
    assert 0 <= allocator.in_force(1 << 40)["bytes"] <= 2 * limit
    json.dumps(allocator.to_state(), allow_nan=False)
    stored = allocator.to_state()
    for holding in stored["holdings"].values():  # 0.3.0 stored claims as they came
        holding["steps"] = [[0, {"bytes": 1.7e308}]]
    allocator.restore(json.loads(json.dumps(stored)))
    allocator.rebalance(60_000, 1 << 50)
    assert allocator.in_force(1 << 40)["bytes"] <= 3 * limit


def test_after_a_reset_nothing_is_granted_until_each_edge_has_confirmed_a_share_of_zero() -> None:
    world = calm_world({"a": 1.0, "b": 1.0})
    world.allocator.reset(frozenset({A, B}))
    assert world.allocator.in_force(1 << 40)["bytes"] == 2 * E
    world.calm()
    assert world.allocator.in_force(1 << 40)["bytes"] <= E * (1 + 1e-9)
    assert world.shares() == pytest.approx(optimum(world), rel=1e-6)


def test_a_grant_that_is_applied_to_earlier_slices_than_it_was_granted_for_is_flagged() -> None:
    allocator = BudgetAllocator({"bytes": E}, {}, EAGER)
    allocator.set_members(frozenset({A, B}), {})
    for edge in (A, B):
        allocator.report(edge, BudgetReport(0, {}, 0), 1)
    allocator.rebalance(2, 1 << 50)
    for edge in (A, B):
        allocator.report(edge, BudgetReport(1, allocator.grants()[edge].shares, 5_000), 2)
    allocator.holdings[A] = allocator.holdings[A].issue({"bytes": 1.0}, 9_000)
    (flagged,) = allocator.report(A, BudgetReport(2, {"bytes": 1.0}, 8_000), 3)
    assert "from 8000" in flagged.message


def test_an_edge_that_has_lost_its_state_counts_with_all_it_ever_had_until_it_confirms_anew() -> None:
    world = calm_world({"a": 1.0, "b": 9.0})
    before = world.allocator.holdings[B].last.shares["bytes"]
    world.edges |= ShareWorld(E, {"b": 9.0}).edges
    assert world.allocator.report(B, world.edges[B].report(), world.now_ms) == []
    assert world.allocator.in_force(0)["bytes"] <= E * (1 + 1e-9)
    assert world.allocator.holdings[B].max_share_at("bytes", 1 << 40) >= before
    world.calm()
    assert world.shares() == pytest.approx(optimum(world), rel=1e-6)


def test_small_changes_and_quick_ones_move_nothing() -> None:
    world = calm_world({"a": 1.0, "b": 1.0}, AllocationPolicy(min_gain=1.1, min_interval_ms=60_000))
    versions = {e: h.version for e, h in world.allocator.holdings.items()}
    world.now_ms += 60_000
    world.edges[A].drift = 1.5
    world.calm()
    assert {e: h.version for e, h in world.allocator.holdings.items()} == versions, "worth 2 % of the bytes"
    world.edges[A].drift = 50.0
    world.calm(2)
    moved = {e: h.version for e, h in world.allocator.holdings.items()}
    assert moved != versions
    world.calm(4)
    settled = world.shares()
    world.edges[A].drift = 0.01
    world.calm(4)
    assert world.shares() == settled, "not again within the interval"


@pytest.mark.parametrize("limit", [10.0, 1.7e308])
def test_an_edge_whose_rates_are_beyond_any_number_leaves_the_others_their_part(limit: float) -> None:
    world = ShareWorld(limit, {"a": 1.0, "b": 1.0, "c": 1.0})
    for edge in ("b", "c"):
        world.edges[EdgeId(edge)].drift = world.edges[EdgeId(edge)].update_bytes = 1e308
    world.calm()
    shares = world.shares()
    assert shares["b"] == pytest.approx(shares["c"]) and 0 < shares["a"] < shares["b"]
    assert sum(share / limit for share in shares.values()) == pytest.approx(1.0)


def test_a_budget_of_zero_grants_zero() -> None:
    world = ShareWorld(0.0, {"a": 1.0, "b": 1.0})
    world.calm()
    assert set(world.shares().values()) == {0.0}


@examples(60)
@given(drifts=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6), crash_at=st.integers(0, 12), sent=st.booleans())
def test_a_center_that_crashes_at_any_step_neither_exceeds_the_budget_nor_forgets_to_go_on(
    drifts: list[float], crash_at: int, sent: bool
) -> None:
    world = ShareWorld(E, {f"e{i}": d for i, d in enumerate(drifts)})
    for step in range(13):
        for name, edge in world.edges.items():
            world.allocator.report(name, edge.report(), world.now_ms)
        world.turn(crash_before_commit=step == crash_at and not sent, crash_before_send=step == crash_at and sent)
        for name, grant in world.down:
            world.edges[name].hear(grant)
        world.down = []
        for edge in world.edges.values():
            edge.close(1)
        world.check()
    world.calm()
    total = sum(world.shares().values())
    assert total == pytest.approx(E, rel=1e-6)


class Trouble(RuleBasedStateMachine):
    """Everything that can go wrong, in any order; the promise is looked at after each step."""

    @initialize(drifts=st.lists(st.sampled_from([0.01, 1.0, 30.0, 1e4]), min_size=2, max_size=4))
    def begin(self, drifts: list[float]) -> None:
        self.world = ShareWorld(E, {f"e{i}": d for i, d in enumerate(drifts)})

    def _pick(self, among: list[object], data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(among) - 1))

    def _edge(self, data: st.DataObject) -> EdgeId:
        return data.draw(st.sampled_from(sorted(self.world.edges)))

    @rule(data=st.data())
    def an_edge_reports(self, data: st.DataObject) -> None:
        name = self._edge(data)
        self.world.up.append((name, self.world.edges[name].report()))

    @rule(data=st.data(), keep=st.booleans())
    def a_report_arrives_early_late_or_twice(self, data: st.DataObject, keep: bool) -> None:
        if self.world.up:
            index = self._pick(self.world.up, data)
            self.world.receive(index)
            if not keep:
                del self.world.up[index]

    @rule(data=st.data(), keep=st.booleans())
    def a_grant_arrives_early_late_or_twice(self, data: st.DataObject, keep: bool) -> None:
        if self.world.down:
            index = self._pick(self.world.down, data)
            name, grant = self.world.down[index]
            self.world.edges[name].hear(grant)
            if not keep:
                del self.world.down[index]

    @rule(before=st.sampled_from(["", "commit", "send"]))
    def the_gateway_takes_a_turn(self, before: str) -> None:
        self.world.turn(crash_before_commit=before == "commit", crash_before_send=before == "send")

    @rule(data=st.data(), slices=st.integers(1, 5), durable=st.booleans())
    def an_edge_closes_slices(self, data: st.DataObject, slices: int, durable: bool) -> None:
        edge = self.world.edges[self._edge(data)]
        edge.close(slices)
        if durable:
            edge.sync()

    @rule(data=st.data())
    def an_edge_crashes(self, data: st.DataObject) -> None:
        self.world.edges[self._edge(data)].crash()

    @rule(data=st.data())
    def an_edge_loses_its_state(self, data: st.DataObject) -> None:
        self.world.edges[self._edge(data)].lose_state()

    @rule(drift=st.sampled_from([0.01, 1.0, 1e3]))
    def an_edge_joins(self, drift: float) -> None:
        if len(self.world.edges) < 6:
            self.world.join(f"e{len(self.world.edges)}", drift)

    @rule(data=st.data(), drift=st.sampled_from([0.01, 1.0, 1e3]))
    def load_moves(self, data: st.DataObject, drift: float) -> None:
        self.world.edges[self._edge(data)].drift = drift

    @rule()
    def messages_are_lost(self) -> None:
        self.world.up, self.world.down = [], []

    @rule()
    def a_long_time_passes(self) -> None:
        self.world.now_ms += EAGER.silence_timeout_ms

    @invariant()
    def no_slice_has_more_than_the_budget(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
            self.world.check_permitted()
            assert not self.world.flagged, "no edge here applies what it was not granted"

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.calm(20)
            assert sum(self.world.shares().values()) == pytest.approx(E, rel=0.03), "and in the end, the optimum"
            assert cost(self.world, self.world.shares()) <= 1.1 * cost(self.world, optimum(self.world))


TestTrouble = Trouble.TestCase
TestTrouble.settings = examples(60, stateful_step_count=40)
