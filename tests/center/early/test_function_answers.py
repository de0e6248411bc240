from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from center.early.function_answers import FunctionEstimate, estimate_function, plan_rate
from edgewater.base.errors import InvalidInput, InvalidQuery
from edgewater.model.measure import Measure
from edgewater.synopses import FloatArray, Function, SampleFunction, function_named, sample_function
from tests.refusals import refused

CENTRES = np.array([[2.0, 3.0], [8.0, 3.5], [3.5, 9.0], [10.0, 10.0]])
ROWS = 8_000
WINDOWS = 40


def sample_of(name: str) -> SampleFunction:
    function = function_named(name)
    assert function is not None and function.sample is not None
    return function.sample


KMEANS, QUANTILE = sample_of("kmeans"), sample_of("exact_quantile")


def clustered(rng: np.random.Generator) -> FloatArray:
    return np.asarray(CENTRES[rng.integers(0, 4, ROWS)] + rng.normal(0, 1.2, (ROWS, 2)))


def estimate(
    function: SampleFunction, parameters: Mapping[str, Any], rows: FloatArray, rate: float, **more: Any
) -> FunctionEstimate:
    return estimate_function(function, parameters, rows, rate, np.random.default_rng(1), **more)


@pytest.mark.slow
def test_the_stated_error_of_kmeans_holds() -> None:
    held = 0
    for window in range(WINDOWS // 2):
        rng = np.random.default_rng([3, window])
        rows = clustered(rng)
        found = estimate(KMEANS, {"k": 4}, rows[rng.random(ROWS) < 0.2], 0.2)
        held += KMEANS.distance(found.value, KMEANS.fit(rows, {"k": 4}, None), {"k": 4}) <= found.error
    # At a true coverage of 95 %, fewer than 16 of 20 hold in one of 390 runs.
    assert held >= 16


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99])
def test_the_bounds_of_a_quantile_hold_for_skewed_values(q: float) -> None:
    held = 0
    for window in range(200):
        rng = np.random.default_rng([4, window])
        rows = rng.lognormal(0, 2, (ROWS, 1))
        found = estimate(QUANTILE, {"q": q}, rows[rng.random(ROWS) < 0.2], 0.2)
        held += found.lower[0] <= np.quantile(rows, q, method="inverted_cdf") <= found.upper[0]
    # At a true coverage of 95 %, fewer than 181 of 200 hold in one of 260 runs.
    assert held >= 181


def test_the_planned_rate_has_the_planned_error() -> None:
    rng = np.random.default_rng(5)
    rows = clustered(rng)
    planned = estimate(KMEANS, {"k": 4}, rows, 1.0, plan=True)
    rate = planned.rate_for(0.05)

    found = estimate(KMEANS, {"k": 4}, rows[rng.random(ROWS) < rate], rate)

    assert planned.error == 0, "the sample is complete"
    assert 0.02 < rate < 0.5
    assert found.error == pytest.approx(0.05, rel=0.35), "bootstrap of 100 resamples, on another sample"
    assert found.rate_for(0.05) == pytest.approx(rate, rel=0.7)


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99])
def test_a_plan_is_checked_on_a_sample_of_its_size(q: float) -> None:
    rows = np.random.default_rng(8).lognormal(0, 1, (ROWS, 1))
    rate = plan_rate(QUANTILE, {"q": q}, rows, 1.0, 0.1, np.random.default_rng(1))

    kept = estimate(QUANTILE, {"q": q}, rows[: int(np.ceil(rate * ROWS))], rate)

    assert kept.error <= 0.1
    assert 0.02 < rate < 1.0


def test_too_few_rows_or_a_function_that_raises_need_all_rows() -> None:
    assert plan_rate(KMEANS, {"k": 4}, np.zeros((3, 2)), 1.0, 0.05, np.random.default_rng(1)) == 1.0
    assert plan_rate(Broken(), {}, np.ones((10, 1)), 1.0, 0.05, np.random.default_rng(1)) == 1.0


def test_a_complete_sample_is_exact() -> None:
    rows = clustered(np.random.default_rng(6))

    found = estimate(KMEANS, {"k": 4}, rows, 1.0)

    assert found.error == 0
    assert np.array_equal(found.lower, found.upper)
    assert np.linalg.norm(found.value[:-1].reshape(4, 2) - CENTRES[[0, 2, 1, 3]], axis=1).max() < 0.2


def test_a_sample_without_spread_is_exact() -> None:
    found = estimate(QUANTILE, {"q": 0.5}, np.full((500, 1), 7.0), 0.1)

    assert (found.value[0], found.lower[0], found.upper[0], found.error) == (7.0, 7.0, 7.0, 0.0)


@pytest.mark.parametrize(("function", "parameters", "rows"), [
    (KMEANS, {"k": 4}, np.zeros((3, 2))), (QUANTILE, {"q": 0.5}, np.zeros((0, 1))),
])  # fmt: skip
def test_too_few_rows_have_no_value(function: SampleFunction, parameters: dict[str, Any], rows: FloatArray) -> None:
    found = estimate(function, parameters, rows, 0.5)

    assert np.isnan(found.value).all()
    assert found.error == np.inf
    assert found.rate_for(0.05) == 1.0
    assert estimate(function, parameters, rows, 1.0).error == 0, "the sample is complete"


def test_a_rank_beyond_the_sample_is_unknown() -> None:
    found = estimate(QUANTILE, {"q": 0.999}, np.random.default_rng(1).normal(5, 1, (50, 1)), 0.1)

    assert found.upper[0] == np.inf
    assert found.error == np.inf


class Spread(SampleFunction):
    """A user-defined function: the interquartile range and the median."""

    columns = (1, 1)

    def names(self, parameters: Mapping[str, Any], columns: int) -> Sequence[str]:
        return ("iqr", "median")

    def fit(self, rows: FloatArray, parameters: Mapping[str, Any], start: FloatArray | None) -> FloatArray:
        low, median, high = np.quantile(rows[:, 0], [0.25, 0.5, 0.75])
        return np.array([high - low, median])


class Broken(SampleFunction):
    def fit(self, rows: FloatArray, parameters: Mapping[str, Any], start: FloatArray | None) -> FloatArray:
        raise ZeroDivisionError("in user code")


class Wide(SampleFunction):
    def fit(self, rows: FloatArray, parameters: Mapping[str, Any], start: FloatArray | None) -> FloatArray:
        return np.zeros(3)


@pytest.mark.slow
def test_intervals_of_a_user_defined_function_hold() -> None:
    held = np.zeros(2)
    for window in range(WINDOWS):
        rng = np.random.default_rng([7, window])
        rows = rng.gamma(2.0, 3.0, (ROWS, 1))
        found = estimate(Spread(), {}, rows[rng.random(ROWS) < 0.1], 0.1)
        truth = Spread().fit(rows, {}, None)
        held += (found.lower <= truth) & (truth <= found.upper)
    assert (held >= 33).all(), held


def test_an_exception_of_a_user_defined_function_becomes_a_problem_of_the_estimate() -> None:
    rows = np.ones((10, 1))

    assert estimate(Broken(), {}, rows, 1.0).problem == "ZeroDivisionError: in user code"
    found = estimate(Wide(), {}, rows, 0.5)
    assert "returned an array of shape (3,)" in found.problem
    assert np.isnan(found.value).all() and found.error == np.inf


def test_a_function_is_called_with_its_parameters() -> None:
    function = sample_function("spread", Spread(), limit=50)
    assert isinstance(function, Function)
    assert function.read_parameters([], {}, "measures.m") == (("limit", 50),)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("kmeans(4)", "measures.m"),
        ("exact_quantile(x, y)", "measures.m"),
        ("exact_quantile(x, q=1.5)", "measures.m.q"),
        ("kmeans(x, limit=100000)", "measures.m.limit"),
        ("kmeans(x, k=0)", "measures.m.k"),
    ],
)
def test_invalid_arguments_are_refused(text: str, field: str) -> None:
    with refused(InvalidQuery, field):
        Measure.parse("m", text)


def test_a_target_is_above_zero() -> None:
    with pytest.raises(InvalidInput) as refused:
        estimate(QUANTILE, {"q": 0.5}, np.ones((5, 1)), 1.0).rate_for(0.0)
    assert (refused.value.field, refused.value.value) == ("target", 0.0)


class _Odd(SampleFunction):
    """Third-party code that modifies its input and returns NaN."""

    def fit(self, rows: FloatArray, parameters: Mapping[str, Any], start: FloatArray | None) -> FloatArray:
        rows.sort(axis=0)
        return np.array([math.nan if start is not None else rows[0, 0]])


def test_a_nan_error_is_unknown_and_the_callers_rows_are_not_modified() -> None:
    rows = np.random.default_rng(1).normal(size=(500, 1))
    before = rows.copy()

    found = estimate_function(_Odd(), {}, rows, 0.5, np.random.default_rng(0))

    assert found.error == math.inf
    assert np.array_equal(rows, before)


class _Mean(SampleFunction):
    def fit(self, rows: FloatArray, parameters: Mapping[str, Any], start: FloatArray | None) -> FloatArray:
        return np.asarray(rows.mean(axis=0))


def test_a_confidence_beyond_the_resamples_is_extrapolated() -> None:
    rows = np.random.default_rng(1).normal(100, 20, size=(1_000, 1))

    errors = [
        estimate_function(_Mean(), {}, rows, 0.01, np.random.default_rng(0), confidence=c).error
        for c in (0.95, 0.99, 0.9998)
    ]

    # 3.7 standard errors of 0.63 %; the largest of a hundred resamples is at about 2.6.
    assert errors[0] < errors[1] < errors[2]
    assert 0.020 < errors[2] < 0.030


def test_the_error_of_a_few_equal_rows_is_unknown() -> None:
    found = estimate_function(_Mean(), {}, np.ones((5, 1)), 0.1, np.random.default_rng(0))

    assert found.value == [1.0]
    assert (found.error, found.uncorrected_error) == (math.inf, math.inf)
    assert np.isnan(found.lower).all()


def test_clusters_do_not_depend_on_their_distance_from_the_origin() -> None:
    rows = clustered(np.random.default_rng(3))

    near, far = (KMEANS.fit(rows + shift, {"k": 4}, None) for shift in (0.0, 1e9))

    assert far[:-1] - 1e9 == pytest.approx(near[:-1], abs=1e-5)
    assert far[-1] == pytest.approx(near[-1], rel=1e-6)
