"""Intervals contain the true value at least as often as their confidence states, for many data sets and, in the lane
`data`, real columns; for single synopses, for those merged from 256 partials, and for windows of slices.

Trials differ in the seed of the hash or of the coins, never in the data. Each question is counted separately. For a
coverage that equals the stated confidence, one question in `ALARM` = 100,000 fails by chance; with about 2,000
questions, the file fails by chance for one choice of seeds in fifty.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from edgewater.synopses.base import Count, Distinct, Estimates, Mean, Quantile, Question, Rank, Sum
from edgewater.synopses.distinct.hyperloglog import HyperLogLogStack
from edgewater.synopses.frequency.count_min import CountMinStack
from edgewater.synopses.frequency.fast_agms import FastAgmsStack
from edgewater.synopses.membership.bloom import BloomStack
from edgewater.synopses.membership.cuckoo import CuckooStack
from edgewater.synopses.quantiles.kll import KllStack
from edgewater.synopses.questions import Frequency, Proportion, SelfJoinSize, SubsetCount
from edgewater.synopses.sampling.bernoulli import BernoulliStack
from edgewater.synopses.sampling.reservoir import ReservoirStack
from edgewater.synopses.sampling.sample_stack import SampleStack
from edgewater.synopses.testing.subject import pick, to_bytes
from tests.edgewater.synopses import real_data
from tests.edgewater.synopses.interval_coverage import LEFT_OUT, least_hits, zoo

pytestmark = pytest.mark.slow

N, PARTIALS, SLICES = 12_000, 256, 24
WINDOW = slice(6, 18)
TRIALS, MERGED_TRIALS = 60, 15
NIGHTLY = pytest.mark.nightly
MERGED_DATA = ("sizes", "packages", "adversarial duplicates")
"""Data sets of merged synopses that run each time."""

Truths = list[tuple[Question, float]]


@dataclass(frozen=True)
class Kind:
    """A synopsis, and a function that returns questions with their true answers for a data set."""

    name: str
    make: Callable[[int], Any]
    truths: Callable[[Any], Truths]

    def __str__(self) -> str:
        return self.name


def ranks_and_quantiles(values: np.ndarray) -> Truths:
    held = np.sort(values)
    truths: Truths = [(Quantile(q), held[int(q * (len(held) - 1))]) for q in (0.05, 0.5, 0.9, 0.99)]
    return truths + [(Rank(x), float(np.mean(values <= x))) for x in held[[len(held) // 10, len(held) // 2]]]


def means_and_proportions(values: np.ndarray) -> Truths:
    low, high = np.quantile(values, [0.3, 0.6])
    inside = float(np.mean((values >= low) & (values <= high)))
    return [(Mean(), float(values.mean())), (Proportion(low, high), inside)]


def of_uniform_samples(values: np.ndarray) -> Truths:
    truths = ranks_and_quantiles(values) + means_and_proportions(values)
    proportion = truths[-1][0]
    assert isinstance(proportion, Proportion)
    inside = SubsetCount(proportion.lo, proportion.hi)
    return [*truths, (Sum(), float(values.sum())), (inside, truths[-1][1] * len(values))]


def of_bernoulli_samples(values: np.ndarray) -> Truths:
    return [*of_uniform_samples(values), (Count(), float(len(values)))]


def distinct(values: Any) -> Truths:
    different = float(len(pa.array(values).unique()))
    return [(Distinct(0.9), different), (Distinct(0.99), different)]


def frequencies(values: Any) -> Truths:
    counts = pa.array(values).value_counts().flatten()
    order = np.argsort(-counts[1].to_numpy(), kind="stable")
    chosen = order[[0, len(order) // 10, len(order) // 2, -1]]
    return [(Frequency(counts[0][i].as_py()), float(counts[1][i].as_py())) for i in chosen.tolist()]


def join_sizes(values: Any) -> Truths:
    counts = pa.array(values).value_counts().flatten()[1].to_numpy().astype(float)
    return [(SelfJoinSize(), float((counts**2).sum())), *frequencies(values)]


ON_NUMBERS = (
    Kind("kll", lambda seed: KllStack(k=64, seed=seed), ranks_and_quantiles),
    Kind("reservoir", lambda seed: ReservoirStack(size=400, seed=seed), of_uniform_samples),
    Kind("bernoulli", lambda seed: BernoulliStack(rate=0.03, seed=seed), of_bernoulli_samples),
)
ON_ITEMS = (
    Kind("hyperloglog", lambda seed: HyperLogLogStack(precision=8, seed=seed), distinct),
    Kind("bloom", lambda seed: BloomStack(bits=1 << 14, hashes=4, seed=seed), distinct),
    Kind("cuckoo", lambda seed: CuckooStack(buckets=4096, seed=seed), distinct),
    Kind("count_min", lambda seed: CountMinStack(width=256, depth=3, seed=seed), frequencies),
    Kind("fast_agms", lambda seed: FastAgmsStack(width=256, depth=5, seed=seed), join_sizes),
)


def number_sets() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    made = zoo(rng, N)
    # Similar to the columns of the lane `data`: sizes of a few hundred files, and fares in half dollars with refunds.
    sizes = np.round(rng.lognormal(12, 2, 400))[rng.zipf(1.4, N) % 400]
    fares = np.round(rng.lognormal(2.5, 0.6, N) * 2) / 2 * np.where(rng.random(N) < 0.02, -1, 1)
    return {**made, "sizes": sizes, "fares": fares}


def item_sets() -> dict[str, Any]:
    rng = np.random.default_rng(12)
    made: dict[str, Any] = {name: (values * 1000).astype(np.int64) for name, values in zoo(rng, N).items()}
    del made["reversed"]  # for sketches of items, in any order the same as `sorted`
    # The worst case for collisions: a few frequent items, and a tail of items that occur once.
    made["adversarial duplicates"] = np.concatenate([np.repeat(np.arange(10), N // 20), np.arange(N // 2) + 10**6])
    made["packages"] = pa.array([f"package-{i}" for i in np.minimum(rng.zipf(1.3, N), 5000).tolist()])
    return made


def marks(name: str, real: Container[str]) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.data,) if name in real else (pytest.mark.full,) if name in LEFT_OUT else ()


CASES = [
    pytest.param(kind, values, id=f"{kind}-{name}", marks=marks(name, real))
    for kinds, made, real in ((ON_NUMBERS, number_sets(), real_data.NUMBERS), (ON_ITEMS, item_sets(), real_data.ITEMS))
    for kind in kinds
    for name, values in {**made, **real}.items()
]
each_case = pytest.mark.parametrize(("kind", "values"), CASES, indirect=["values"])
# Merging is proved by a few data sets; the others repeat what a single synopsis shows.
few_cases = pytest.mark.parametrize(
    ("kind", "values"),
    [
        case if case.id.endswith(MERGED_DATA) else pytest.param(*case.values, id=case.id, marks=(*case.marks, NIGHTLY))
        for case in CASES
    ],
    indirect=["values"],
)


@pytest.fixture
def values(request: pytest.FixtureRequest) -> Any:
    data = request.param
    return pick(data.read(), np.arange(N)) if isinstance(data, real_data.Column) else data


def built(kind: Kind, seed: int, codes: np.ndarray, values: Any, groups: int) -> Any:
    stack = kind.make(seed)
    stack.grow(groups)
    if isinstance(stack, SampleStack):
        # Explicit record numbers, so that partials and the whole sample the same records.
        stack.update(codes, values, ids=np.arange(len(values)))
    else:
        stack.update(codes, values)
    return stack


def merged(kind: Kind, seed: int, partials: Any, chosen: range) -> Any:
    whole = kind.make(seed)
    whole.grow(1)
    for group in chosen:
        whole.merge(partials.take(np.array([group])), np.zeros(1, np.int64))
    return whole


def assert_covers(kind: Kind, make: Callable[[int], Any], truths: Truths, trials: int) -> None:
    hits, stated = np.zeros(len(truths), np.int64), np.zeros(len(truths))
    for seed in range(trials):
        stack = make(seed)
        for i, (question, truth) in enumerate(truths):
            answer = stack.query(question)[0]
            slack = 1e-9 * abs(truth)  # rounding of sums in another order
            hits[i] += answer.lower - slack <= truth <= answer.upper + slack
            stated[i] = max(stated[i], answer.confidence)
    short = [
        f"{question!r} = {truth:g}: {h} of {trials} intervals at {c:.3f}"
        for (question, truth), h, c in zip(truths, hits.tolist(), stated.tolist(), strict=True)
        if h < least_hits(trials, c)
    ]
    assert not short, f"{kind}: " + "; ".join(short)


def test_intervals_that_are_too_narrow_are_detected() -> None:
    class Narrow(HyperLogLogStack):
        def query(self, question: Question | None = None) -> Estimates:
            wide = super().query(question)
            return replace(wide, lower=(wide.lower + wide.value) / 2, upper=(wide.upper + wide.value) / 2)

    kind = Kind("narrow", lambda seed: Narrow(precision=8, seed=seed), distinct)
    values = np.arange(N)
    with pytest.raises(
        AssertionError, match=rf"narrow: Distinct\(confidence=0.9\) = 12000: \d+ of {TRIALS} intervals at 0.9"
    ):
        assert_covers(kind, lambda seed: built(kind, seed, values * 0, values, 1), distinct(values), TRIALS)


@each_case
def test_a_single_synopsis_covers(kind: Kind, values: Any) -> None:
    codes = np.zeros(len(values), np.int64)
    assert_covers(kind, lambda seed: built(kind, seed, codes, values, 1), kind.truths(values), TRIALS)


@few_cases
def test_a_synopsis_merged_from_256_partials_covers(kind: Kind, values: Any) -> None:
    codes = np.random.default_rng(13).integers(0, PARTIALS, len(values))

    def one(seed: int) -> Any:
        return merged(kind, seed, built(kind, seed, codes, values, PARTIALS), range(PARTIALS))

    single = built(kind, 1, np.zeros(len(values), np.int64), values, 1)
    if single.properties.commutative:
        assert to_bytes(one(1)) == to_bytes(single), "equal bytes, so the coverage is that of a single synopsis"
        return
    assert_covers(kind, one, kind.truths(values), MERGED_TRIALS)


@few_cases
def test_a_window_of_slices_covers(kind: Kind, values: Any) -> None:
    codes = np.arange(len(values)) * SLICES // len(values)
    chosen = range(WINDOW.start, WINDOW.stop)
    inside = np.flatnonzero((codes >= WINDOW.start) & (codes < WINDOW.stop))
    assert_covers(
        kind,
        lambda seed: merged(kind, seed, built(kind, seed, codes, values, SLICES), chosen),
        kind.truths(pick(values, inside)),
        MERGED_TRIALS,
    )
