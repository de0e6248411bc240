"""The offline optima against brute force over every schedule of tiny windows."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.budgets.optimal import Aggregate, WindowTrace, epe, least_error
from tests.examples import examples

WINDOWS = st.builds(
    lambda rows, aggregate: _window(rows, aggregate),
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=7),
    st.sampled_from(["sum", "count", "max"]),
)


def _window(rows: list[tuple[int, int, int]], aggregate: Aggregate) -> WindowTrace:
    times, groups, values = (np.array(c) for c in zip(*sorted(rows, key=lambda r: r[0]), strict=True))
    dense = np.unique(groups, return_inverse=True)[1].astype(np.int64)
    return WindowTrace(0.0, 100.0, times.astype(float), dense, values.astype(float), aggregate)


def _options(window: WindowTrace) -> list[list[tuple[float, float]]]:
    """Per group every (time from which it can leave, error that it then has); inf: omitted."""
    fold = {"sum": sum, "count": len, "max": max}[window.aggregate]
    result = []
    for group in range(window.count):
        rows = [(t, v) for t, g, v in zip(window.times_ms, window.groups, window.values, strict=True) if g == group]
        total = float(fold([v for _, v in rows]))
        options = [(np.inf, total)]
        for i, (t, _) in enumerate(rows):
            options.append((float(t), abs(total - float(fold([v for _, v in rows[: i + 1]])))))
        result.append(options)
    return result


def _schedules(window: WindowTrace, service: float, free: float) -> list[tuple[float, float]]:
    """(completion, error) of every schedule: which value of each group is sent, and in which order."""
    found = []
    for chosen in product(*_options(window)):
        error = max(e for _, e in chosen)
        times = [t for t, _ in chosen if np.isfinite(t)]
        done = min((_completion(order, service, free) for order in permutations(times)), default=free)
        found.append((done if times else 0.0, error))
    return found


def _completion(order: tuple[float, ...], service: float, free: float) -> float:
    at = free
    for release in order:
        at = max(at, release) + service
    return at


@examples(80)
@given(WINDOWS, st.integers(0, 12), st.sampled_from([1.0, 7.0, 30.0]), st.sampled_from([0.0, 40.0]))
def test_eager_prefix_error_has_the_least_staleness_of_all_schedules(
    window: WindowTrace, budget: int, service: float, free: float
) -> None:
    best = min(max(done - 100.0, 0.0) for done, error in _schedules(window, service, free) if error <= budget)
    result = epe(window, budget, service, free)
    assert result.staleness_ms == pytest.approx(best)
    assert result.error <= budget


@examples(80)
@given(WINDOWS, st.sampled_from([0.0, 5.0, 45.0]), st.sampled_from([7.0, 30.0]), st.sampled_from([0.0, 40.0]))
def test_the_least_error_under_a_deadline_is_that_of_brute_force(
    window: WindowTrace, deadline: float, service: float, free: float
) -> None:
    best = min(error for done, error in _schedules(window, service, free) if done <= 100.0 + deadline)
    assert least_error(window, deadline, service, free).error == pytest.approx(best)


def test_running_maxima_are_exact_across_groups_of_very_different_size() -> None:
    window = _window([(1, 0, 5), (2, 0, 3), (3, 1, 9), (4, 0, 7), (5, 1, 2)], "max")
    order, prefix, total = window.prefixes()
    assert prefix.tolist() == [5, 5, 7, 9, 9]
    assert total.tolist() == [7, 7, 7, 9, 9]
    assert window.groups[order].tolist() == [0, 0, 0, 1, 1]
