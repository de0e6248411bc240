import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRequest
from edgewater.synopses import DDSketch, EquiDepthHistogram, Quantile, Range, from_bytes
from edgewater.synopses.encoding import codec
from tests.examples import examples
from tests.refusals import refused

SEED = 15


def histogram_of(values: object, buckets: int = 10, accuracy: float = 0.01) -> EquiDepthHistogram:
    histogram = EquiDepthHistogram(buckets, accuracy=accuracy)
    histogram.update(values)
    return histogram


def test_boundaries_are_quantiles_within_the_accuracy_and_buckets_are_equally_full() -> None:
    values = np.sort(np.random.default_rng(SEED).lognormal(0, 1, 50_000))
    boundaries = histogram_of(values).boundaries()
    truths = values[np.floor(np.arange(11) / 10 * (len(values) - 1)).astype(int)]
    for boundary, truth in zip(boundaries, truths, strict=True):
        assert boundary.lower <= truth <= boundary.upper
        assert abs(boundary.value - truth) <= 0.01 * truth * (1 + 1e-9)
    depths = np.histogram(values, [b.value for b in boundaries])[0]
    assert np.abs(depths - 5000).max() < 2 * 0.01 * 50_000


numbers = st.floats(allow_nan=False) | st.sampled_from([0.0, 1.0, -1.0, 5e-324, math.inf, -math.inf, 1e308])


@examples(300)
@given(st.lists(numbers, max_size=40), numbers, numbers)
def test_counts_in_a_range_are_within_their_bounds(values: list[float], low: float, high: float) -> None:
    array = np.array(values, float)
    answer = histogram_of(array, accuracy=0.1).query(Range(low, high))
    assert answer.lower <= ((array >= low) & (array <= high)).sum() <= answer.upper
    assert answer.lower <= answer.value <= answer.upper


def test_the_error_of_a_range_is_that_of_the_bins_at_its_ends() -> None:
    values = np.random.default_rng(SEED).lognormal(0, 1, 50_000)
    answer = histogram_of(values).query(Range(0.5, 2.0))
    truth = ((values >= 0.5) & (values <= 2)).sum()
    assert abs(answer.value - truth) < 0.01 * len(values)
    assert answer.upper - answer.lower < 0.05 * len(values)


def test_its_bytes_have_a_kind_of_their_own() -> None:
    histogram = histogram_of([1.0, 2.0], buckets=7)
    again = from_bytes(histogram.to_bytes())
    assert isinstance(again, EquiDepthHistogram) and len(again.boundaries()) == 8
    with pytest.raises(CorruptSynopsis):
        DDSketch.from_bytes(histogram.to_bytes())
    message = codec.unseal(histogram.to_bytes())
    message.parameters = '{"accuracy":0.01}'
    with pytest.raises(CorruptSynopsis):
        from_bytes(codec.seal(message))


def test_bad_parameters_are_refused() -> None:
    with refused(InvalidRequest, "buckets"):
        EquiDepthHistogram(0)
    with refused(InvalidRequest, "lo"):
        EquiDepthHistogram().query(Range(math.nan, 1))
    with pytest.raises(IncompatibleSynopses):
        EquiDepthHistogram(4).merge_many([EquiDepthHistogram(5)])
    assert math.isnan(EquiDepthHistogram(2).query(Quantile(0.5)).value)
