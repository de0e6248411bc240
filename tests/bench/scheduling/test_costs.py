from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.scheduling.costs import CostEstimate, Operator

PIPELINE = [Operator(1.0, 0.5), Operator(2.0, 0.0)]


def test_the_cost_of_a_record_weighs_each_operator_by_what_reaches_it() -> None:
    costs = CostEstimate(PIPELINE)
    assert costs.remaining_ms == [1.0 + 0.5 * 2.0, 2.0, 0.0]
    assert costs.kept == [1.0, 0.5, 0.0]


def test_measurements_replace_the_guess() -> None:
    costs = CostEstimate(PIPELINE)
    for _ in range(200):
        costs.observe(0, 100, 10, 500.0)
        costs.observe_firing(7.0)
    assert costs.remaining_ms[0] == pytest.approx(5.0 + 0.1 * 2.0)
    assert costs.firing_ms == pytest.approx(7.0, rel=0.01)


def test_one_pause_of_the_process_moves_a_cost_by_less_than_a_factor_of_two() -> None:
    costs = CostEstimate([Operator(1.0)])
    costs.observe(0, 1, 1, 50_000.0)
    assert costs.remaining_ms[0] < 2.0


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 3), st.booleans()), min_size=1, max_size=5),
    st.data(),
    st.floats(0.1, 1e4),
)
def test_a_reduction_never_exceeds_what_is_queued(
    operators: list[tuple[float, float, bool]], data: st.DataObject, budget_ms: float
) -> None:
    costs = CostEstimate([Operator(*each) for each in operators])
    queued = data.draw(st.lists(st.floats(0, 1e6), min_size=len(operators), max_size=len(operators)))
    reduction, through = costs.reduction(queued, budget_ms)
    grown = max(1.0, max(selectivity for _, selectivity, _ in operators)) ** len(operators)
    assert 0 <= reduction <= sum(queued) * grown * (1 + 1e-9)
    assert 1 <= through <= len(operators)


def test_a_filter_alone_is_run_where_the_join_behind_it_keeps_its_records() -> None:
    costs = CostEstimate([Operator(1.0, 0.2), Operator(10.0, 0.0, stores=True)])
    reduction, through = costs.reduction([100.0, 0.0], 1e6)
    assert (reduction, through) == (pytest.approx(80.0), 1)
    assert costs.reduction([0.0, 100.0], 1e6)[0] == 0, "what the filter has passed cannot be reduced any more"
