import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import IncompatibleSynopses, InvalidRequest
from edgewater.synopses import Count, EquiWidthHistogram, Mean, Quantile, Range, Rank, Synopsis, from_bytes
from tests.examples import examples
from tests.refusals import refused

SEED = 14


def histogram_of(values: object, low: float = -2.0, high: float = 3.0, bins: int = 40) -> EquiWidthHistogram:
    histogram = EquiWidthHistogram(low, high, bins)
    histogram.update(values)
    return histogram


def test_bins_are_those_of_numpy_and_values_outside_are_counted() -> None:
    values = np.random.default_rng(SEED).normal(0, 2, 20_000)
    histogram = histogram_of(np.r_[values, math.nan, math.inf, -math.inf, 3.0])
    expected, edges = np.histogram(np.r_[values, 3.0], 40, (-2, 3))
    np.testing.assert_array_equal(histogram.counts, expected)
    np.testing.assert_array_equal(histogram.edges, edges)
    outside = {"below": (values < -2).sum() + 1, "above": (values > 3).sum() + 1, "nan": 1}
    assert histogram.outside == outside
    assert histogram.query(Count()).value == 20_003 and histogram.records == 20_004
    assert sum(histogram.outside.values()) + histogram.counts.sum() == histogram.records, "nothing is dropped"


ends = st.floats(-4, 5) | st.sampled_from([-math.inf, math.inf, -2.0, 3.0, 0.0, 1e308, -1e308])
numbers = st.floats() | st.floats(-2, 3) | st.sampled_from([-2.0, 3.0, 0.5, 2.9999999999999996, math.nan])


@examples(300)
@given(st.lists(numbers, max_size=40), ends, ends, st.sampled_from([1, 3, 8, 64]))
def test_ranges_ranks_and_quantiles_are_within_their_bounds(
    values: list[float], low: float, high: float, bins: int
) -> None:
    array = np.array(values, float)
    histogram = histogram_of(array, bins=bins)
    answer = histogram.query(Range(low, high))
    assert answer.lower <= ((array >= low) & (array <= high)).sum() <= answer.upper
    assert answer.lower <= answer.value <= answer.upper and answer.confidence == 1.0
    real = np.sort(array[~np.isnan(array)])
    if not len(real):
        assert math.isnan(histogram.query(Quantile(0.5)).value) and math.isnan(histogram.query(Rank(low)).value)
        return
    share = histogram.query(Rank(high))
    assert share.lower <= (real <= high).mean() + 1e-12 and (real <= high).mean() <= share.upper + 1e-12
    for q in (0.0, 0.3, 0.5, 1.0):
        found = histogram.query(Quantile(q))
        assert found.lower <= real[math.floor(q * (len(real) - 1))] <= found.upper
        assert found.lower <= found.value <= found.upper


def test_a_range_along_bin_edges_is_exact_but_for_values_on_the_upper_edge() -> None:
    histogram = histogram_of(np.linspace(-2, 3, 10_001), bins=50)
    answer = histogram.query(Range(-1.0, 1.0))
    assert answer.upper - answer.lower <= histogram.counts.max()
    assert histogram.query(Range(-2.0, 3.0)).lower == histogram.query(Range(-2.0, 3.0)).upper == 10_001


def test_values_on_an_edge_are_in_the_bin_above_it_for_every_range() -> None:
    for low, high, bins in ((0, 1, 10), (-0.3, 0.7, 7), (1e15, 1e15 + 3, 3), (-8e307, 8e307, 4), (0, 1e-300, 64)):
        histogram = EquiWidthHistogram(low, high, bins)
        edges = histogram.edges
        histogram.update(edges)
        expected = np.ones(bins, int)
        expected[-1] = 2
        np.testing.assert_array_equal(histogram.counts, expected)
        below = EquiWidthHistogram(low, high, bins)
        below.update(np.nextafter(edges[1:-1], -np.inf))
        assert below.counts.sum() == bins - 1 and below.counts.max() <= 1


def test_bad_ranges_and_questions_are_refused_by_name() -> None:
    for low, high in ((1, 1), (2, 1), (0, 5e-324), (1e16, 1e16 + 4), (-1e308, 1e308)):
        with refused(InvalidRequest, "high"):
            EquiWidthHistogram(low, high, 64)
    for low in (math.nan, -math.inf, True, "0"):
        with refused(InvalidRequest, "low"):
            EquiWidthHistogram(low, 1)  # type: ignore[arg-type]
    for bins in (0, 1.5, 1 << 21):
        with refused(InvalidRequest, "bins"):
            EquiWidthHistogram(0, 1, bins)  # type: ignore[arg-type]
    histogram = EquiWidthHistogram(0, 1)
    for question in (Range(math.nan, 1), Range(0, math.nan), Quantile(2.0), Mean()):
        with pytest.raises(InvalidRequest):
            histogram.query(question)
    with pytest.raises(IncompatibleSynopses):
        histogram.merge_many([EquiWidthHistogram(0, 2)])
    assert isinstance(histogram, Synopsis) and isinstance(from_bytes(histogram.to_bytes()), EquiWidthHistogram)


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-307, 1e-306, 1e-300, 1e290, 1e306, 1e308])
@pytest.mark.parametrize("low", [-1.0, 0.0, 0.5])
@pytest.mark.parametrize("bins", [1, 7, 64])
def test_a_range_is_refused_or_each_value_is_in_its_bin(scale: float, low: float, bins: int) -> None:
    try:
        histogram = EquiWidthHistogram(low * scale, scale, bins)
    except InvalidRequest as refused:
        assert refused.field == "high" and (scale < 1e-305 or scale > 1e307)
        return
    inside = np.random.default_rng(SEED).uniform(low, 1, 200) * scale
    edges = histogram.edges
    values = np.r_[inside, edges[:-1], np.nextafter(edges[1:], -np.inf)]
    histogram.update(values)
    np.testing.assert_array_equal(histogram.counts, np.histogram(values, edges)[0])
