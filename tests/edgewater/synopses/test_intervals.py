import numpy as np
import pytest

from edgewater.errors import InvalidRequest
from edgewater.synopses.intervals import around, normal_quantile, student_t, thinned_count, wilson

# Abramowitz and Stegun, table 26.10, and the usual tables of Student's t.
T_TABLE = {
    0.5: {3: 0.764892, 10: 0.699812},
    0.95: {1: 12.706205, 2: 4.302653, 3: 3.182446, 5: 2.570582, 10: 2.228139, 30: 2.042272, 1000: 1.962339},
    0.99: {1: 63.656741, 2: 9.924843, 3: 5.840909, 5: 4.032143, 30: 2.749996},
    0.999: {3: 12.923979, 10: 4.586894},
}


@pytest.mark.parametrize("confidence", T_TABLE)
def test_students_t_is_that_of_the_tables(confidence: float) -> None:
    freedom, expected = (np.array(x, float) for x in zip(*T_TABLE[confidence].items(), strict=True))
    np.testing.assert_allclose(student_t(confidence, freedom), expected, rtol=1e-5)
    assert student_t(confidence, np.array([0.0, -1.0])).tolist() == [np.inf, np.inf]
    assert student_t(confidence, np.array([1e9]))[0] == pytest.approx(normal_quantile(confidence))


def test_wilsons_interval_is_exact_for_a_whole_population_and_0_to_1_for_none() -> None:
    hits, drawn, share = np.array([3.0, 0.0, 0.0]), np.array([10.0, 0.0, 10.0]), np.array([1.0, 0.5, 1.0])
    lower, upper = wilson(hits, drawn, share, 1.96)
    assert lower.tolist() == [0.3, 0, 0] and upper.tolist() == [0.3, 1, 0]


def exact_coverage(draws: int, p: float, z: float) -> float:
    hits = np.arange(draws + 1.0)
    lower, upper = wilson(hits, np.full(draws + 1, float(draws)), np.zeros(draws + 1), z)
    steps = np.concatenate([[0.0], np.log(np.arange(draws, 0, -1)) - np.log(np.arange(1, draws + 1))])
    weights = np.exp(np.cumsum(steps) + hits * np.log(p) + (draws - hits) * np.log1p(-p))
    return float(weights[(lower <= p) & (p <= upper)].sum())


@pytest.mark.parametrize("draws", [5, 40, 1000])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_wilsons_interval_covers_every_proportion_also_rare_ones(draws: int, confidence: float) -> None:
    """The coverage is computed, not sampled. Without continuity correction, 0.95 falls to 0.84 here."""
    z = normal_quantile(confidence)
    worst = min(exact_coverage(draws, p, z) for p in (1e-4, 1e-3, 0.01, 0.05, 0.13, 0.2, 0.37, 0.5, 0.9, 0.999))
    assert worst >= confidence - 0.01


def test_a_thinned_count_is_at_least_the_sampled_count() -> None:
    hits, share = np.array([0.0, 1.0, 50.0, 7.0]), np.array([0.5, 0.01, 0.999, 1.0])
    lower, upper = thinned_count(hits, share, 2.0)
    assert (lower >= hits).all() and (upper >= hits / share).all()
    assert (lower[3], upper[3]) == (7, 7)


def test_an_interval_of_unknown_width_is_infinite() -> None:
    lower, upper = around(np.array([1.0, np.inf, np.nan, 2.0]), np.array([np.nan, 1.0, 1.0, 0.5]))
    assert lower.tolist()[:2] == [-np.inf, -np.inf] and upper.tolist()[:2] == [np.inf, np.inf]
    assert np.isnan(lower[2]) and (lower[3], upper[3]) == (1.5, 2.5)


@pytest.mark.parametrize("confidence", [0, 1, -0.5, float("nan"), True, "95"])
def test_a_confidence_is_a_number_between_0_and_1(confidence: object) -> None:
    with pytest.raises(InvalidRequest, match="confidence: "):
        normal_quantile(confidence)  # type: ignore[arg-type]
