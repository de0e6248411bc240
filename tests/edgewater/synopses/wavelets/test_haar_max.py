import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses
from edgewater.synopses import HaarWavelet, MaxErrorWavelet, Point, RangeSum, from_bytes
from tests.examples import examples

SEED = 19


def wavelet_of(values: object, coefficients: int = 16, batch: int = 1 << 20) -> MaxErrorWavelet:
    wavelet, signal = MaxErrorWavelet(coefficients), np.asarray(values, float)
    for at in range(0, len(signal), batch):
        wavelet.update(signal[at : at + batch])
        wavelet.consolidate()
    return wavelet


def assert_holds(wavelet: MaxErrorWavelet, signal: np.ndarray) -> None:
    slack = 1e-9 * (1 + np.abs(signal).max())
    assert np.abs(wavelet.signal() - signal).max() <= wavelet.max_error + slack
    assert np.linalg.norm(wavelet.signal() - signal) <= wavelet.error * (1 + 1e-9) + slack * len(signal)
    for index in range(0, len(signal), max(len(signal) // 20, 1)):
        answer = wavelet.query(Point(index))
        assert answer.lower - slack <= signal[index] <= answer.upper + slack
    answer = wavelet.query(RangeSum(len(signal) // 3, len(signal) - 1))
    assert answer.lower - slack * len(signal) <= signal[len(signal) // 3 :].sum() <= answer.upper + slack * len(signal)


numbers = st.lists(st.one_of(st.integers(-3, 3).map(float), st.floats(-1e6, 1e6)), min_size=1, max_size=70)


@examples(60)
@given(numbers, numbers, st.integers(1, 12), st.integers(1, 20))
def test_the_tracked_bound_of_the_maximum_error_holds(one, two, coefficients, batch) -> None:
    left, right = wavelet_of(one, coefficients, batch), wavelet_of(two, coefficients, batch)
    assert_holds(left, np.array(one))
    total = np.zeros(max(len(one), len(two)))
    total[: len(one)] += one
    total[: len(two)] += two
    merged = left.merge_many([right])
    assert_holds(merged, total)
    merged.update(two)
    assert_holds(merged, np.r_[total, two])
    left.update(two)
    assert_holds(left, np.array([*one, *two]))
    again = from_bytes(left.to_bytes())
    assert isinstance(again, MaxErrorWavelet) and again.to_bytes() == left.to_bytes()
    assert again.max_error == left.max_error
    again.update(one)
    assert_holds(again, np.array([*one, *two, *one]))


@pytest.mark.parametrize("batch", [64, 1000, 1 << 20])
def test_single_spikes_are_kept_that_the_l2_norm_drops(batch: int) -> None:
    rng = np.random.default_rng(SEED)
    signal = np.repeat(rng.normal(0, 3, 64), 64)
    signal[rng.integers(0, 4096, 3)] += 12
    most, least = wavelet_of(signal, 72, batch), HaarWavelet(72)
    least.update(signal)
    error, by_norm = (np.abs(w.signal() - signal).max() for w in (most, least))
    assert error < 0.7 * by_norm
    assert error <= most.max_error <= 4 * error, "the bound is of use"
    assert_holds(most, signal)


def test_few_coefficients_are_exact_and_kinds_do_not_mix() -> None:
    steps = np.repeat([3.0, 8.0, -1.0, 8.0], 256)
    wavelet = wavelet_of(steps, 8)
    assert wavelet.max_error == 0
    np.testing.assert_array_equal(wavelet.signal(), steps)
    with pytest.raises(IncompatibleSynopses):
        wavelet.merge_many([HaarWavelet(8)])
    data = wavelet.to_bytes()
    for at in range(len(data)):
        with pytest.raises(CorruptSynopsis):
            MaxErrorWavelet.from_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
