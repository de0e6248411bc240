"""The bounds of means and variances contain the values with any further records whose amounts are known."""

from __future__ import annotations

import numpy as np
import pytest

from edgewater.synopses.base import Stack
from edgewater.synopses.exact.aggregates import MeanStack, VarianceStack
from edgewater.synopses.late_values import means_with, variances_with


def stack_of(kind: type[Stack], values: np.ndarray) -> Stack:
    stack = kind(1)
    stack.update(np.zeros(len(values), np.int64), values)
    return stack


@pytest.mark.parametrize("seed", range(25))
def test_further_values_stay_within_the_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scale, shift = 10.0 ** rng.integers(-3, 9), rng.choice([0.0, -5.0, 1e6])
    values = rng.normal(shift, 1.0, rng.integers(2, 30)) * scale
    late = rng.choice([-1.0, 1.0, 1.0], rng.integers(0, 8)) * rng.exponential(10.0, 1)[0] * scale + shift * scale
    most = np.array([float(len(late) + rng.integers(0, 3))])
    both = np.concatenate((values, late))
    mean, var = stack_of(MeanStack, values), stack_of(VarianceStack, values)
    above, below = late[late > 0].sum(), -late[late < 0].sum()
    bounds = {
        "mean": (means_with(mean.query(), mean, above, below, most), both.mean(), np.abs(both).mean()),
        "var": (variances_with(var.query(), var, float((late**2).sum()), most), both.var(ddof=1), both.var(ddof=1)),
    }
    for name, ((lower, upper), true, size) in bounds.items():
        rounding = 1e-12 * size  # numpy's
        assert lower[0] - rounding <= true <= upper[0] + rounding, name
    single = means_with(mean.query(), mean, late[0], 0.0, np.ones(1)) if len(late) and late[0] > 0 else None
    if single is not None and shift == 0.0 and late[0] > abs(values.mean()):
        assert single[1][0] == pytest.approx(np.append(values, late[0]).mean(), rel=1e-9), "the bound is attained"


def test_values_without_bounds_and_unknown_amounts_stay_unknown() -> None:
    mean, var = stack_of(MeanStack, np.array([1.0, np.nan])), stack_of(VarianceStack, np.array([1.0]))
    assert np.isnan(means_with(mean.query(), mean, 1.0, 0.0, np.ones(1))).all()
    assert np.isnan(variances_with(var.query(), var, 1.0, np.ones(1))).all()
    finite = stack_of(MeanStack, np.array([1.0, 3.0]))
    lower, upper = means_with(finite.query(), finite, np.inf, 0.0, np.ones(1))
    assert (lower[0] < 2.0, upper[0]) == (True, np.inf)
