import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.synopses.quantiles.log_bins import ZERO, SignedBins, coarser, collapsed_accuracy, log_bins

ACCURACIES = [0.001, 0.0025, 0.01, 0.05, 0.2, 0.5]
each_accuracy = pytest.mark.parametrize("accuracy", ACCURACIES)
magnitudes = st.floats(min_value=5e-324, allow_infinity=False, allow_nan=False)


@each_accuracy
def test_every_boundary_belongs_to_the_bin_below_it(accuracy: float) -> None:
    bins = log_bins(accuracy)
    edges = bins.edges
    numbers = np.arange(bins.lowest, bins.highest + 1)
    np.testing.assert_array_equal(bins.find(edges), numbers)
    np.testing.assert_array_equal(bins.find(np.nextafter(edges[:-1], np.inf)), numbers[1:])
    np.testing.assert_array_equal(bins.find(np.nextafter(edges[1:], 0)), numbers[1:])


@each_accuracy
def test_bins_are_those_of_a_plain_search(accuracy: float) -> None:
    bins = log_bins(accuracy)
    values = np.random.default_rng(3).integers(1, 0x7FEFFFFFFFFFFFFF, 200_000).view(np.float64)
    np.testing.assert_array_equal(bins.find(values), np.searchsorted(bins.edges, values) + bins.lowest)


@each_accuracy
def test_boundaries_are_powers_of_gamma(accuracy: float) -> None:
    bins = log_bins(accuracy)
    gamma = Fraction(bins.gamma)
    for k in (-40, -7, -1, 0, 1, 2, 64, 200):
        exact = gamma**k
        assert abs(Fraction(float(bins.upper(np.array([k]), 0)[0])) / exact - 1) < Fraction(1, 10**12)


def test_boundaries_have_the_same_bits_on_every_platform() -> None:
    """With another rounding of multiplications, boundary values would fall into other bins."""
    edges = log_bins(0.01).edges
    assert (log_bins(0.01).lowest, log_bins(0.01).highest) == (-35418, 35488)
    shown = [edges[35418 + k].hex() for k in (-1000, -1, 1, 2, 1000)]
    assert shown == EDGES


EDGES = [
    "0x1.1b180ff0b19eep-29",
    "0x1.f5dc83cd4e931p-1",
    "0x1.052bf5a814afdp+0",
    "0x1.0a72aa752c609p+0",
    "0x1.ceff87e21fb1ap+28",
]


@given(magnitudes, st.sampled_from(ACCURACIES))
def test_the_center_is_within_the_accuracy_of_every_value_of_the_bin(value: float, accuracy: float) -> None:
    bins = log_bins(accuracy)
    number = bins.find(np.array([value])).astype(np.int64)
    for level in range(4):
        at = coarser(number, level)
        low, center, high = (float(f(at, level)[0]) for f in (bins.lower, bins.center, bins.upper))
        assert low < value <= high
        if value >= 2.0**-1000 and high < 1e308:
            assert abs(center - value) <= collapsed_accuracy(accuracy, level) * value * (1 + 1e-9)


@given(st.integers(-400_000, 400_000), st.integers(0, 10), st.integers(0, 10))
def test_collapses_add_up(number: int, first: int, then: int) -> None:
    one = coarser(coarser(np.array([number]), first), then)
    assert one[0] == coarser(np.array([number]), first + then)[0] == math.ceil(Fraction(number, 2 ** (first + then)))


def test_collapsed_accuracy_is_that_of_gamma_squared() -> None:
    gamma = 1.01 / 0.99
    for level in range(6):
        assert collapsed_accuracy(0.01, level) == pytest.approx((gamma**2**level - 1) / (gamma**2**level + 1))


def test_cells_are_in_the_order_of_the_values() -> None:
    bins = SignedBins(np.array([5, -3, 0, -3, 5]), np.array([-1, -1, 0, 1, 1]))
    cells = bins.coarsened(0)
    assert (np.diff(cells) > 0).all() and cells[2] == ZERO
    again = SignedBins.of(cells)
    assert again.sign.tolist() == [-1, -1, 0, 1, 1]
    assert again.number[[0, 1, 3, 4]].tolist() == [5, -3, -3, 5]
    low, center, high = again.edges(0.01, np.zeros(5, np.int64))
    assert (low[[0, 1, 3, 4]] < high[[0, 1, 3, 4]]).all() and low[2] == center[2] == high[2] == 0
    assert (np.diff(center) > 0).all()
