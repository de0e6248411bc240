import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRequest, SynopsisError
from edgewater.synopses import (
    Count,
    CountMin,
    Estimate,
    GeneralManager,
    HaarWavelet,
    Mean,
    Point,
    Quantile,
    RangeSum,
    SliceManager,
    Sum,
    Synopsis,
    from_bytes,
)
from edgewater.synopses.encoding import codec
from tests.examples import examples
from tests.refusals import refused

SEED = 23


def wavelet_of(values: object, coefficients: int = 16) -> HaarWavelet:
    wavelet = HaarWavelet(coefficients)
    wavelet.update(values)
    return wavelet


def walk(n: int, seed: int = SEED) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).normal(0, 1, n))


def dealt(signal: np.ndarray, partitions: int, block: int = 1, coefficients: int = 16) -> GeneralManager:
    owner = np.arange(len(signal)) // block % partitions
    parts = [(p, wavelet_of(signal[owner == p], coefficients)) for p in range(partitions)]
    return GeneralManager(partitions, block, parts)


def assert_holds(manager: GeneralManager | SliceManager, signal: np.ndarray) -> None:
    n = len(signal)
    assert manager.records == n
    for index in range(n):
        answer = manager.query(Point(index))
        assert answer.lower <= signal[index] <= answer.upper and answer.confidence == 1.0
    rng = np.random.default_rng(n)
    for first, last in [(0, n - 1), *(sorted(rng.integers(0, n, 2).tolist()) for _ in range(8))]:
        answer = manager.query(RangeSum(first, last))
        assert answer.lower <= math.fsum(signal[first : last + 1]) <= answer.upper


@examples(30)
@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 5), st.integers(1, 40))
def test_a_partitioned_signal_answers_as_a_whole(n: int, partitions: int, block: int, coefficients: int) -> None:
    signal = walk(n)
    manager = dealt(signal, partitions, block, coefficients)
    assert_holds(manager, signal)
    exact = dealt(signal, partitions, block, 128)
    assert [exact.query(Point(i)).value for i in range(n)] == pytest.approx(signal.tolist())
    assert exact.query(Sum()).value == pytest.approx(signal.sum())


def test_the_example_of_the_paper_is_routed_as_in_the_paper() -> None:
    """Condor, figure 6: two partitions, the range 2 to 6."""
    manager = dealt(np.arange(8.0), 2)
    assert list(manager._routed(2, 7)) == [(0, 1, 3), (1, 1, 2)]
    assert manager.query(RangeSum(2, 6)).value == 20


@examples(30)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any))
def test_slices_are_one_signal_in_the_order_of_their_keys(lengths: list[int]) -> None:
    signal = walk(sum(lengths))
    borders = np.cumsum([0, *lengths])
    parts = [(10 * k, wavelet_of(signal[a:b])) for k, (a, b) in enumerate(pairwise(borders))]
    assert_holds(SliceManager(parts[::-1]), signal)
    halves = SliceManager(parts[::2]).merge_many([SliceManager(parts[1::2])])
    assert halves.to_bytes() == SliceManager(parts).to_bytes()


def test_managers_merge_as_sets_of_partials() -> None:
    signal = walk(100)
    whole = dealt(signal, 4)
    singles = [GeneralManager(4, 1, [(p, whole.partials[p])]) for p in range(4)]
    merged = singles[2].merge_many([singles[0], singles[3], singles[1], singles[0]])
    assert merged.to_bytes() == whole.to_bytes() and singles[2].missing == [0, 1, 3]
    merged.update([1.0])
    assert whole.records == 100, "parts are copies"
    with pytest.raises(IncompatibleSynopses):
        whole.merge_many([merged])
    with pytest.raises(IncompatibleSynopses):
        whole.merge_many([dealt(signal, 3)])


def test_a_general_manager_holds_slice_managers() -> None:
    signal = walk(120)
    parts = []
    for p in range(3):
        mine = signal[p::3]
        parts.append((p, SliceManager([(0, wavelet_of(mine[:13])), (1, wavelet_of(mine[13:]))])))
    manager = GeneralManager(3, 1, parts)
    assert_holds(manager, signal)
    again = from_bytes(manager.to_bytes())
    assert isinstance(again, GeneralManager) and isinstance(again, Synopsis)
    assert again.to_bytes() == manager.to_bytes()
    assert_holds(again, signal)


def test_updates_continue_the_round_robin_of_the_signal() -> None:
    signal = walk(200)
    manager = GeneralManager(3, 4, [(p, HaarWavelet(16)) for p in range(3)])
    for part in np.array_split(signal, 23):
        manager.update(part)
    assert_holds(manager, signal)
    at_once = dealt(signal, 3, 4)
    assert all(manager.query(Point(i)).value == at_once.query(Point(i)).value for i in range(200))
    slices = SliceManager([(0, wavelet_of(signal[:50])), (1, HaarWavelet(16))])
    slices.update(signal[50:])
    assert_holds(slices, signal)


def test_bounds_and_error_probabilities_of_partials_add_up() -> None:
    class Doubtful(HaarWavelet):
        def query(self, question: object = None) -> Estimate:
            return Estimate(1.0, 0.5, 2.0, 0.99)

    part = Doubtful()
    part.update([1.0])
    answer = GeneralManager(3, 1, [(p, part) for p in range(3)]).query(Sum())
    assert (answer.value, answer.lower, answer.upper) == (3.0, pytest.approx(1.5), pytest.approx(6.0))
    assert answer.confidence == pytest.approx(0.97) and answer.lower < 1.5


def test_missing_partials_and_indices_are_refused() -> None:
    signal = walk(40)
    manager = GeneralManager(4, 1, [(p, wavelet_of(signal[p::4])) for p in (0, 1, 3)])
    assert manager.query(Point(4)).lower <= signal[4] <= manager.query(Point(4)).upper
    for question in (Point(2), RangeSum(0, 3), Sum(), Mean()):
        with refused(InvalidRequest, "partition"):
            manager.query(question)
    assert manager.query(Count()).value == 30
    for bad, field in ((Point(40), "index"), (RangeSum(3, 2), "first"), (Quantile(0.5), "question")):
        with refused(InvalidRequest, field):
            dealt(signal, 4).query(bad)
    uneven = GeneralManager(2, 1, [(0, wavelet_of(signal[:30])), (1, wavelet_of(signal[30:]))])
    with refused(InvalidRequest, "partition"):
        uneven.query(Sum())
    assert math.isnan(SliceManager().query(Sum()).value)
    for make in (lambda: GeneralManager(0), lambda: GeneralManager(2, 0), lambda: manager.register(4, HaarWavelet())):
        with pytest.raises(InvalidRequest):
            make()
    with refused(InvalidRequest, "partial"):
        manager.register(2, CountMin())
    with refused(InvalidRequest, "partition"):
        manager.update([1.0])


def test_damaged_bytes_are_corrupt() -> None:
    data = dealt(walk(50), 2).to_bytes()
    for at in range(0, len(data), 3):
        with pytest.raises(CorruptSynopsis):
            GeneralManager.from_bytes(data[:at])
        with pytest.raises(CorruptSynopsis):
            GeneralManager.from_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    for damage in ("keys", "kind", "parameters", "unknown"):
        message = codec.unseal(data)
        if damage == "keys":
            message.arrays[0].CopyFrom(codec.encode(np.array([1, 0])))
        elif damage == "kind":
            message.parts[0].CopyFrom(codec.unseal(CountMin().to_bytes()))
        elif damage == "parameters":
            message.parameters = '{"partitions":0}'
        else:
            message.parameters = '{"parts":3}'
        with pytest.raises(SynopsisError):
            GeneralManager.from_message(message)
