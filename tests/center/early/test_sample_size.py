import numpy as np
import pytest

from edgewater.arrivals.sample_size import neyman_sizes
from edgewater.arrivals.targets import AccuracyTarget, check_relative
from edgewater.base.errors import InvalidQuery
from tests.refusals import refused


def test_neyman_meets_the_width_with_fewer_values_than_equal_rates():
    sizes, deviations = np.array([1000.0, 1000.0, 1000.0]), np.array([1.0, 5.0, 20.0])
    half, z = 1000.0, 1.96
    drawn = neyman_sizes(sizes, deviations, half, z, sizes)
    width = z * np.sqrt(((sizes * deviations) ** 2 * (1 / drawn - 1 / sizes)).sum())
    assert width == pytest.approx(half, rel=1e-6)
    weight = (sizes * deviations**2).sum()
    equal = sizes * weight / ((half / z) ** 2 + weight)
    assert np.allclose(z * np.sqrt(((sizes * deviations) ** 2 * (1 / equal - 1 / sizes)).sum()), half, rtol=1e-6)
    assert drawn.sum() < 0.8 * equal.sum()


def test_neyman_takes_small_strata_completely_and_the_rest_from_the_others():
    available = np.array([20.0, 1000.0])
    drawn = neyman_sizes(available, np.array([50.0, 1.0]), 60.0, 1.96, available)
    assert drawn[0] == 20
    assert 1.96 * np.sqrt((1000.0**2) * (1 / drawn[1] - 1 / 1000)) == pytest.approx(60.0, rel=1e-6)


@pytest.mark.parametrize("confidence", [0, 1, 1.5, -0.1, True, "95"])
def test_a_confidence_outside_of_0_and_1_is_refused(confidence):
    with refused(InvalidQuery, "confidence"):
        AccuracyTarget(0.05, confidence)


@pytest.mark.parametrize(("field", "value"), [("error", 0), ("error", 1.0), ("groups", 0), ("scope", "some")])
def test_other_parts_of_a_target_are_checked(field, value):
    with refused(InvalidQuery, field):
        AccuracyTarget(**{field: value})


def test_a_relative_error_is_refused_where_the_mean_may_be_zero():
    with pytest.raises(InvalidQuery) as refused:
        check_relative(0.01, 1.0, 100, "accuracy.error")
    assert refused.value.field == "accuracy.error"
    check_relative(1.0, 1.0, 100, "accuracy.error")
    check_relative(0.0, 0.0, 100, "accuracy.error")  # all zero: exact


def test_all_groups_together_need_bonferronis_confidence():
    assert AccuracyTarget(groups=10, scope="all").group_confidence == pytest.approx(0.995)
    assert AccuracyTarget(groups=10).group_confidence == 0.95
