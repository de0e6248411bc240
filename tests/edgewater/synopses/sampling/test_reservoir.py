import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from edgewater.base.errors import IncompatibleSynopses, InvalidRecord, InvalidRequest
from edgewater.synopses import (
    BernoulliSample,
    Count,
    Distinct,
    Mean,
    Proportion,
    Quantile,
    Rank,
    ReservoirSample,
    SubsetCount,
    Sum,
    Synopsis,
    from_bytes,
)
from edgewater.synopses.sampling.bernoulli import BernoulliStack
from edgewater.synopses.sampling.reservoir import ReservoirStack
from tests.refusals import refused

pytestmark = pytest.mark.slow

SEED = 11


def sample_of(values: object, size: int = 200, **given: int) -> ReservoirSample:
    sample = ReservoirSample(size, **given)
    sample.update(values)
    return sample


def test_a_sample_of_all_records_is_exact() -> None:
    values = np.random.default_rng(SEED).normal(0, 1, 150)
    sample = sample_of(values)
    assert sorted(sample.items().to_pylist()) == sorted(values.tolist())
    for question, truth in (
        (Count(), 150),
        (Sum(), values.sum()),
        (Mean(), values.mean()),
        (Proportion(0, 9), (values >= 0).mean()),
        (SubsetCount(0, 9), (values >= 0).sum()),
        (Rank(0.0), (values <= 0).mean()),
        (Quantile(0.5), np.sort(values)[74]),
    ):
        answer = sample.query(question)
        assert answer.lower == answer.value == answer.upper == pytest.approx(truth)


def test_partials_of_one_source_with_different_records_are_refused() -> None:
    rng = np.random.default_rng(SEED)
    left, right = sample_of(rng.normal(0, 1, 500)), sample_of(rng.normal(0, 1, 500))
    with pytest.raises(IncompatibleSynopses):
        left.merge_many([right])


def test_record_numbers_continue_after_a_reset() -> None:
    stack, merged = ReservoirStack(1, size=500), ReservoirStack(1, size=500)
    for part in range(3):
        stack.update(np.zeros(100, np.int64), np.full(100, float(part)))
        merged.merge(stack, np.zeros(1, np.int64))
        stack.reset(np.zeros(1, np.int64))
    assert np.bincount(merged.estimator().values.astype(int)).tolist() == [100, 100, 100]


def test_strings_are_sampled_and_counted_but_not_averaged() -> None:
    sample = sample_of(pa.array([f"user-{i}" for i in range(5000)] + [None]), 10)
    assert len(set(sample.items().to_pylist())) == 10 and sample.records == 5000
    assert sample.query(Count()).lower <= 5000 <= sample.query(Count()).upper
    assert from_bytes(sample.to_bytes()).to_bytes() == sample.to_bytes()
    with refused(InvalidRequest, "question"):
        sample.query(Mean())
    with refused(InvalidRecord, "values"):
        sample.update([1.5])


def test_special_numbers_do_not_give_wrong_answers() -> None:
    sample = sample_of([math.nan, 1.0, math.inf])
    assert math.isnan(sample.query(Mean()).value) and sample.query(Count()).value == 3
    assert sample.query(Rank(5.0)).value == 1 / 3 and sample.query(Quantile(1.0)).value == math.inf
    few = sample_of(np.r_[np.full(500, math.inf), 1.0], 20).query(Mean())
    assert (few.lower, few.upper) == (-math.inf, math.inf)
    huge = sample_of(np.full(500, 1e300), 20).query(Sum())
    assert huge.lower <= 500 * 1e300 <= huge.upper < math.inf
    empty = ReservoirSample(5)
    assert math.isnan(empty.query(Mean()).value) and empty.query(Count()).upper == 0
    one = sample_of(np.arange(1000.0), 1)
    mean = one.query(Mean())
    assert 0 < mean.lower < 100 and 900 < mean.upper < 999, "one value and the range say little"
    median = one.query(Quantile(0.5))
    assert (median.lower, median.upper) == (0, 999), "the range of all records"


def test_for_error_gives_the_size_that_the_error_needs() -> None:
    assert ReservoirSample.for_error(0.05).stack.size == 385
    assert ReservoirSample.for_error(0.05, confidence=0.99).stack.size == 664
    with refused(InvalidRequest, "epsilon"):
        ReservoirSample.for_error(1e-5)


def test_a_bernoulli_sample_keeps_its_rate_until_it_is_full() -> None:
    values = np.random.default_rng(SEED).normal(0, 1, 40_000)
    sample = BernoulliSample(0.1, source=1)
    sample.update(values)
    assert sample.rate == 0.1 and abs(len(sample.items()) - 4000) < 300
    bounded = BernoulliSample(0.1, limit=1000, source=1)
    bounded.update(values)
    assert bounded.rate == 0.0125 and len(bounded.items()) <= 1000
    assert set(bounded.items().to_pylist()) <= set(sample.items().to_pylist())
    halves = [BernoulliSample(0.1, limit=1000, source=1) for _ in range(2)]
    for half, at in zip(halves, (slice(0, 20_000), slice(20_000, None)), strict=True):
        half.update(values[at], ids=np.arange(40_000)[at])
    assert halves[0].merge_many([halves[1]]).items() == bounded.items()
    whole = BernoulliSample(1.0)
    whole.update(values[:100])
    assert whole.query(Mean()).lower == whole.query(Mean()).upper == pytest.approx(values[:100].mean())


def test_bad_parameters_and_batches_are_refused_by_name() -> None:
    for size in (0, -1, 1.5, True, 1 << 25):
        with refused(InvalidRequest, "size"):
            ReservoirSample(size)  # type: ignore[arg-type]
    for source in (-1, 1 << 64, 0.5):
        with refused(InvalidRequest, "source"):
            ReservoirSample(source=source)  # type: ignore[arg-type]
    for rate in (0, 1.1, 1e-12, math.nan, True):
        with refused(InvalidRequest, "rate"):
            BernoulliSample(rate)
    with refused(InvalidRecord, "ids"):
        ReservoirSample().update([1, 2, 3], ids=[1, 2])
    with refused(InvalidRecord, "times"):
        ReservoirStack(1).update(np.zeros(2, np.int64), np.zeros(2), times=np.zeros(3, np.int64))
    with pytest.raises(IncompatibleSynopses):
        ReservoirSample(5).merge_many([ReservoirSample(6)])
    with pytest.raises(IncompatibleSynopses):
        BernoulliSample(0.5).merge_many([BernoulliSample(0.25)])
    with refused(InvalidRequest, "question"):
        ReservoirSample().query(Distinct())
    for question in (Quantile(1.5), Proportion(math.nan, 1), Mean(1.0)):
        with pytest.raises(InvalidRequest):
            sample_of([1.0, 2.0]).query(question)
    assert isinstance(ReservoirSample(), Synopsis) and isinstance(BernoulliSample(0.1), Synopsis)
    assert isinstance(from_bytes(BernoulliSample(0.1).to_bytes()), BernoulliSample)
    assert BernoulliStack(0, rate=0.5).rates().shape == (0,)


@pytest.mark.parametrize("exponent", [-900, -540, 600, 1000])
@pytest.mark.parametrize("kind", [ReservoirSample, BernoulliSample])
def test_intervals_scale_with_the_values_where_squares_underflow_or_overflow(kind: Any, exponent: int) -> None:
    values = np.random.default_rng(SEED).normal(3, 1, 400)
    scaled, plain = ((kind(50) if kind is ReservoirSample else kind(0.1)) for _ in range(2))
    plain.update(values)
    scaled.update(np.ldexp(values, exponent))
    for question in (Mean(0.95), Sum(0.95)):
        expected, found = plain.query(question), scaled.query(question)
        for end in ("value", "lower", "upper"):
            assert getattr(found, end) == np.ldexp(getattr(expected, end), exponent)


def test_a_share_is_of_the_values_that_the_count_counts() -> None:
    sample = sample_of([math.nan] * 5 + [1.0] * 3 + [2.0] * 2)
    count = sample.query(Count()).value
    for question, inside in ((Proportion(0, 1), 3), (Rank(1), 3), (Rank(math.inf), 5)):
        share = sample.query(question)
        assert share.value * count == pytest.approx(inside) and share.lower <= share.value <= share.upper
    assert math.isnan(sample_of([]).query(Rank(1)).value) and sample_of([math.nan]).query(Rank(1)).value == 0
