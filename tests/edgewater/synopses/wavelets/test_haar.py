import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRecord, InvalidRequest, SynopsisError
from edgewater.synopses import Count, HaarWavelet, Mean, Point, Quantile, RangeSum, Sum, Synopsis, from_bytes
from edgewater.synopses.encoding import codec
from tests.examples import examples
from tests.refusals import refused

SEED = 17
LENGTHS = (1, 2, 3, 7, 64, 100, 1000, 4096, 5001)


def wavelet_of(values: object, coefficients: int = 32) -> HaarWavelet:
    wavelet = HaarWavelet(coefficients)
    wavelet.update(values)
    return wavelet


def walk(n: int, seed: int = SEED) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).normal(0, 1, n))


def assert_holds(wavelet: HaarWavelet, signal: np.ndarray, seed: int = 0) -> None:
    """Checks the L2 bound, and the bounds of points and ranges."""
    assert np.linalg.norm(wavelet.signal() - signal) <= wavelet.error * (1 + 1e-9) + 1e-9
    rng = np.random.default_rng(seed)
    n = len(signal)
    ranges = [(0, n - 1), (0, 0), (n - 1, n - 1), *(sorted(rng.integers(0, n, 2)) for _ in range(40))]
    for first, last in ranges:
        answer = wavelet.query(RangeSum(int(first), int(last)))
        assert answer.lower <= math.fsum(signal[first : last + 1]) <= answer.upper
        assert answer.value == pytest.approx(wavelet.signal()[first : last + 1].sum(), abs=1e-6)
    for index in rng.integers(0, n, 20).tolist():
        answer = wavelet.query(Point(index))
        assert answer.lower <= signal[index] <= answer.upper and answer.confidence == 1.0


def haar_energies(signal: np.ndarray) -> np.ndarray:
    """Computes the orthonormal coefficients of each dyadic block of a signal by the definition."""
    found, start = [], 0
    for level in range(len(signal).bit_length() - 1, -1, -1):
        if len(signal) >> level & 1:
            block = signal[start : start + (1 << level)]
            start += 1 << level
            while len(block) > 1:
                found.append((block[0::2] - block[1::2]) / math.sqrt(2))
                block = (block[0::2] + block[1::2]) / math.sqrt(2)
    return np.concatenate([np.zeros(0), *found]) ** 2


@pytest.mark.parametrize("n", LENGTHS)
def test_one_pass_keeps_the_best_coefficients_for_any_length(n: int) -> None:
    signal = walk(n)
    wavelet = wavelet_of(signal)
    lost = np.sort(haar_energies(signal))[::-1][32:]
    assert wavelet.error == pytest.approx(math.sqrt(lost.sum()), abs=1e-9)
    assert np.linalg.norm(wavelet.signal() - signal) == pytest.approx(wavelet.error, abs=1e-9)
    assert wavelet.records == n == wavelet.query(Count()).value
    assert_holds(wavelet, signal)


@pytest.mark.parametrize("n", LENGTHS)
def test_batches_of_any_size_give_what_one_batch_gives(n: int) -> None:
    signal, pieces = walk(n), HaarWavelet(32)
    rng = np.random.default_rng(SEED)
    at = 0
    while at < n:
        size = int(rng.integers(1, 40))
        pieces.update(signal[at : at + size])
        at += size
    np.testing.assert_array_equal(pieces.signal(), wavelet_of(signal).signal())
    assert pieces.error == pytest.approx(wavelet_of(signal).error, rel=1e-9)


def test_a_signal_with_few_coefficients_is_exact() -> None:
    steps = np.repeat([3.0, 8.0, -1.0, 8.0], 256)
    wavelet = wavelet_of(steps, 8)
    assert wavelet.error == 0 and len(wavelet.to_bytes()) < 600
    np.testing.assert_array_equal(wavelet.signal(), steps)
    answer = wavelet.query(RangeSum(100, 700))
    assert answer.value == steps[100:701].sum() and answer.upper - answer.lower < 1e-9


def test_queries_do_not_change_the_state() -> None:
    signal = walk(777)
    asked, quiet = HaarWavelet(16), HaarWavelet(16)
    for part in np.array_split(signal, 50):
        asked.update(part)
        quiet.update(part)
        before = asked.to_bytes()
        for question in (Point(0), RangeSum(0, asked.records - 1), Sum(), Mean(), Count()):
            asked.query(question)
        asked.signal()
        assert asked.to_bytes() == before
    np.testing.assert_array_equal(asked.signal(), quiet.signal())


def test_eight_sites_add_up_within_the_tracked_bound() -> None:
    """N = 4096, B = 128."""
    sites = [walk(4096, seed) for seed in range(8)]
    total = np.sum(sites, axis=0)
    wavelets = [wavelet_of(s, 128) for s in sites]
    merged = wavelets[0].merge_many(wavelets[1:])
    assert_holds(merged, total)
    best = wavelet_of(total, 128).error
    error = np.linalg.norm(merged.signal() - total)
    assert best <= error <= merged.error
    assert merged.error <= 2 * sum(w.error for w in wavelets)
    backwards = wavelets[7].merge_many(wavelets[6::-1])
    assert_holds(backwards, total)
    tree = wavelets[0].merge_many(wavelets[1:4]).merge_many([wavelets[4].merge_many(wavelets[5:])])
    assert_holds(tree, total)
    assert [w.error for w in wavelets] == [wavelet_of(s, 128).error for s in sites], "the parts are as they were"


def test_shorter_signals_are_extended_by_zeros_in_a_sum() -> None:
    one, two = walk(1000), walk(300, 5)
    merged = wavelet_of(two).merge_many([wavelet_of(one)])
    assert_holds(merged, one + np.r_[two, np.zeros(700)])
    merged.update(walk(500, 6))
    assert_holds(merged, np.r_[one + np.r_[two, np.zeros(700)], walk(500, 6)])


values = st.floats(-1e6, 1e6)


@examples(150)
@given(st.lists(values, min_size=1, max_size=70), st.lists(values, min_size=1, max_size=70), st.integers(1, 12))
def test_bounds_hold_for_any_signals(one: list[float], two: list[float], coefficients: int) -> None:
    left, right = wavelet_of(one, coefficients), wavelet_of(two, coefficients)
    length = max(len(one), len(two))
    total = np.zeros(length)
    total[: len(one)] += one
    total[: len(two)] += two
    merged = left.merge_many([right])
    norm = np.linalg.norm(merged.signal() - total)
    assert norm <= merged.error * (1 + 1e-9) + 1e-6
    for index in range(length):
        answer = merged.query(Point(index))
        assert answer.lower - 1e-6 <= total[index] <= answer.upper + 1e-6
    answer = merged.query(RangeSum(length // 3, length - 1))
    assert answer.lower - 1e-6 <= total[length // 3 :].sum() <= answer.upper + 1e-6


def test_a_wavelet_read_from_bytes_behaves_as_the_original() -> None:
    for n in (0, 1, 13, 5001):
        wavelet = wavelet_of(walk(n))
        again = from_bytes(wavelet.to_bytes())
        assert isinstance(again, HaarWavelet) and isinstance(again, Synopsis)
        assert again.to_bytes() == wavelet.to_bytes()
        again.update(walk(99, 2))
        wavelet.update(walk(99, 2))
        np.testing.assert_array_equal(again.signal(), wavelet.signal())


def test_damaged_bytes_are_corrupt_or_harmless() -> None:
    data = wavelet_of(walk(300)).to_bytes()
    for at in range(len(data)):
        with pytest.raises(CorruptSynopsis):
            HaarWavelet.from_bytes(data[:at])
        with pytest.raises(CorruptSynopsis):
            HaarWavelet.from_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
    rng = np.random.default_rng(SEED)
    message = codec.unseal(data)
    for _ in range(400):
        damaged = type(message)()
        damaged.CopyFrom(message)
        array = damaged.arrays[int(rng.integers(8))]
        if rng.random() < 0.7:
            held = bytearray(array.data)
            held[int(rng.integers(len(held)))] = int(rng.integers(256))
            array.data = bytes(held)
        elif rng.random() < 0.5:
            array.type = str(rng.choice(["<f8", "|u1", "<i8", "|S9"]))
        else:
            array.shape[:] = [int(rng.integers(5))]
        with np.errstate(all="ignore"):
            try:
                HaarWavelet.from_message(damaged).query(Sum())
            except SynopsisError:
                continue


def test_invalid_values_are_refused_and_nothing_is_added() -> None:
    wavelet = wavelet_of([1, 2, 3])
    for bad in ([1.0, math.nan], [math.inf], [1e200], pa.array([1, None]), ["a"], [True]):
        with refused(InvalidRecord, "values"):
            wavelet.update(bad)
    assert wavelet.records == 3
    asked = {Point(3): "index", Point(-1): "index", RangeSum(2, 1): "first", RangeSum(0, 3): "last"}
    for question, field in asked.items():
        with refused(InvalidRequest, field):
            wavelet.query(question)
    with refused(InvalidRequest, "question"):
        wavelet.query(Quantile(0.5))
    with pytest.raises(IncompatibleSynopses):
        wavelet.merge_many([HaarWavelet(16)])
    assert math.isnan(HaarWavelet().query(Sum()).value)
    assert wavelet.query(Mean()).value == 2


def test_the_error_of_values_whose_squares_underflow_is_not_zero() -> None:
    values = np.random.default_rng(5).random(256) * 1e-170
    wavelet = HaarWavelet(8)
    wavelet.update(values)
    approximation = np.array([wavelet.query(RangeSum(i, i)).value for i in range(256)])
    assert wavelet.error >= np.sqrt(np.square((values - approximation) * 1e170).sum()) * 1e-170 > 0
