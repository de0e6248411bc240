import math

import numpy as np
import pytest

from edgewater.base.errors import IncompatibleSynopses, InvalidRequest
from edgewater.synopses import Count, Distinct, FastAgms, Frequency, JoinSize, SelfJoinSize, from_bytes
from edgewater.synopses.frequency.fast_agms import FastAgmsStack, deviations, polynomial
from edgewater.synopses.testing import least_hits
from tests.cells import at_night
from tests.refusals import refused

SEED = 12
PRIME = (1 << 61) - 1


def sketch_of(values: object, width: int = 1024, depth: int = 5) -> FastAgms:
    sketch = FastAgms(width, depth)
    sketch.update(values)
    return sketch


def test_polynomials_are_exact_modulo_the_prime() -> None:
    rng = np.random.default_rng(SEED)
    edges = np.array([0, 1, PRIME - 1, PRIME, PRIME + 1, (1 << 64) - 1, 1 << 63, (1 << 32) - 1], np.uint64)
    words = np.concatenate([edges, rng.integers(0, 1 << 63, 300, dtype=np.uint64) * np.uint64(2)])
    for coefficients in ([PRIME - 1] * 4, [0, 0, 0, 5], rng.integers(0, PRIME, 4).tolist()):
        expected = []
        for x in words.tolist():
            value = 0
            for c in coefficients:
                value = (value * x + c) % PRIME
            expected.append(value)
        assert polynomial(words, [np.uint64(c) for c in coefficients]).tolist() == expected


def test_signs_are_4_wise_independent() -> None:
    """The mean of the product of four keys' signs over 4000 random polynomials is 0 ± 0.016; beyond 5 sd: 6e-7 each."""
    rng = np.random.default_rng(SEED)
    keys = np.array([1, 2, 3, 4, 1 << 40, (1 << 40) + 1, PRIME - 1], np.uint64)
    signs = np.array(
        [
            (polynomial(keys, list(rng.integers(0, PRIME, 4, dtype=np.uint64))) & np.uint64(1)).astype(int) * 2 - 1
            for _ in range(4000)
        ]
    )
    for chosen in ([0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 4, 5, 6], [0, 2, 4, 6]):
        assert abs(signs[:, chosen].prod(axis=1).mean()) < 5 / math.sqrt(4000), chosen


def test_a_story_of_two_relations() -> None:
    orders, lines = sketch_of(["ann", "ann", "bob"]), sketch_of(["ann", "cy", "bob", "bob"])
    assert orders.query().value == orders.query(SelfJoinSize()).value == 5
    join = orders.query(JoinSize(lines))
    assert join.value == 4 and join.lower <= 4 <= join.upper and join.basis == "fast_agms"
    assert lines.query(JoinSize(orders)) == join
    assert orders.query(Frequency("ann")).value == 2 and orders.query(Count()).value == 3
    both = orders.merge_many([lines])
    assert both.query().value == 9 + 9 + 1
    assert from_bytes(both.to_bytes()).query(JoinSize(lines)) == both.query(JoinSize(lines))
    assert FastAgms().query(JoinSize(orders)).upper == 0 == FastAgms().query().upper


def test_the_error_is_that_of_the_paper() -> None:
    """The RMS of the median of 5 rows is 0.54 times that of one row, √(2/w), if normal; twice that: at most 1e-9."""
    rng = np.random.default_rng(SEED)
    stack = FastAgmsStack(200, width=1024, depth=5)
    stack.update(np.repeat(np.arange(200), 2000), rng.integers(0, 1 << 60, 400_000))
    errors = stack.query().value / 2000 - 1
    assert np.sqrt(np.mean(errors**2)) < 0.75 * math.sqrt(2 / 1024)
    assert abs(errors.mean()) < 5 * 0.54 * math.sqrt(2 / 1024 / 200)


@pytest.mark.parametrize("depth", [3, 5, 9])
@pytest.mark.parametrize("confidence", [0.68, 0.95, 0.99])
def test_deviations_hold_for_the_rows_that_cantellis_inequality_permits(depth: int, confidence: float) -> None:
    """Rows have two values: t with the probability 1/(1 + t²), otherwise -1/t. No rows deviate upwards more often."""
    t = deviations(depth, confidence)

    def failures(t: float, sides: float) -> float:
        p = sides / (1 + t * t)
        off = range((depth + 1) // 2, depth + 1)
        return sum(math.comb(depth, i) * p**i * (1 - p) ** (depth - i) for i in off)

    assert failures(t, 1) <= 1 - confidence + 1e-9
    chebyshev = next(x for x in np.arange(1, 100, 0.001) if failures(x, (1 + x * x) / (x * x)) <= 1 - confidence)
    assert 0.7 * chebyshev < t < 0.98 * chebyshev
    assert deviations(depth, confidence, sides=1) <= t


def test_intervals_of_fast_agms_are_at_least_a_tenth_narrower_than_with_chebyshevs_inequality() -> None:
    """At 95 % with 5 rows, Chebyshev's inequality and equal parts of the failures gave 2.98 √(F2/width)."""
    items = np.random.default_rng(SEED).integers(0, 500, 20_000)
    sketch, moment = sketch_of(items, 256), float((np.bincount(items).astype(float) ** 2).sum())
    answer = sketch.query(Frequency(7, 0.95))
    assert (answer.upper - answer.lower) / 2 < 2.7 * math.sqrt(moment / 256)


@pytest.mark.slow
@pytest.mark.parametrize("confidence", [0.5, 0.99, *at_night(0.68, 0.9)])
@pytest.mark.parametrize("data", ["equal", "two heavy", "tail", "one"])
def test_intervals_of_fast_agms_cover_at_each_confidence(data: str, confidence: float) -> None:
    """Each of three questions fails by chance for one of 100,000 choices of seeds."""
    items = {
        "equal": np.arange(600) % 60,
        "two heavy": np.repeat(np.arange(52), [300, 250, *[1] * 50]),
        "tail": np.r_[np.repeat(np.arange(5), 40), np.arange(100, 500)],
        "one": np.zeros(100, np.int64),
    }[data]
    counts, trials = np.bincount(items).astype(float), 100
    moment = float((counts**2).sum())
    held = {"frequency": 0, "moment": 0, "join": 0}
    for seed in range(trials):
        sketch, other = (FastAgms(16, 5, seed=seed) for _ in range(2))
        sketch.update(items)
        other.update(items[::2])
        joined = float(counts @ np.bincount(items[::2], minlength=len(counts)))
        for name, question, truth in (
            ("frequency", Frequency(0, confidence), counts[0]),
            ("moment", SelfJoinSize(confidence), moment),
            ("join", JoinSize(other, confidence), joined),
        ):
            answer = sketch.query(question)
            assert answer.lower <= answer.value <= answer.upper
            held[name] += answer.lower <= truth <= answer.upper
    assert min(held.values()) >= least_hits(trials, confidence), held


def test_a_sketch_too_narrow_for_a_confidence_has_infinite_bounds() -> None:
    sketch = sketch_of(np.arange(100), 16, 1)
    answer = sketch.query(SelfJoinSize(0.999))
    assert answer.upper == math.inf and answer.lower <= 100
    join = sketch.query(JoinSize(sketch, 0.999))
    assert (join.lower, join.upper) == (-math.inf, math.inf)


def test_for_error_returns_a_sketch_with_this_error() -> None:
    sketch = FastAgms.for_error(0.1, 0.05)
    sketch.update(np.arange(5000))
    answer = sketch.query(SelfJoinSize(0.95))
    assert answer.upper / answer.value - 1 <= 0.101 and 1 - answer.lower / answer.value <= 0.1
    for epsilon, delta, field in ((0, 0.1, "epsilon"), (1e-6, 0.1, "epsilon"), (0.1, 0, "delta")):
        with refused(InvalidRequest, field):
            FastAgms.for_error(epsilon, delta)


def test_only_sketches_of_equal_parameters_join() -> None:
    with pytest.raises(IncompatibleSynopses):
        FastAgms(64).query(JoinSize(FastAgms(128)))
    with pytest.raises(IncompatibleSynopses):
        FastAgms(seed=1).query(JoinSize(FastAgms(seed=2)))
    with pytest.raises(IncompatibleSynopses):
        FastAgms().query(JoinSize("not one"))
    with pytest.raises(IncompatibleSynopses):
        sketch_of([1]).query(JoinSize(sketch_of(["1"])))
    with refused(InvalidRequest, "other"):
        FastAgmsStack(2, width=64, depth=3).query(JoinSize(FastAgmsStack(3, width=64, depth=3)))
    with refused(InvalidRequest, "confidence"):
        FastAgms().query(SelfJoinSize(1.5))
    with refused(InvalidRequest, "question"):
        FastAgms().query(Distinct())
