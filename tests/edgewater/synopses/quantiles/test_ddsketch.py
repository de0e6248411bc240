import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import IncompatibleSynopses, InvalidRecord, InvalidRequest
from edgewater.synopses import (
    Count,
    DDSketch,
    Distinct,
    Maximum,
    Mean,
    Minimum,
    Quantile,
    Rank,
    Sum,
    Synopsis,
    from_bytes,
)
from edgewater.synopses.quantiles.ddsketch import MAX_BINS
from edgewater.synopses.quantiles.log_bins import collapsed_accuracy
from tests.examples import examples
from tests.refusals import refused

SEED = 5
QS = (0.0, 0.001, 0.25, 0.5, 0.9, 0.99, 0.9999, 1.0)


def sketch_of(values: object, accuracy: float = 0.01) -> DDSketch:
    sketch = DDSketch(accuracy)
    sketch.update(values)
    return sketch


def true_quantile(values: np.ndarray, q: float) -> float:
    ordered = np.sort(values[~np.isnan(values)])
    return float(ordered[math.floor(q * (len(ordered) - 1))])


DATA = {
    "lognormal": np.random.default_rng(SEED).lognormal(0, 3, 20_000),
    "normal": np.random.default_rng(SEED).normal(0, 1, 20_000),
    "negative": -np.random.default_rng(SEED).pareto(1.1, 5000),
    "integers": np.random.default_rng(SEED).integers(-50, 50, 5000).astype(float),
    "constant": np.full(100, 3.3),
    "zeros": np.zeros(10),
    "wide": np.concatenate([s * 10 ** np.random.default_rng(SEED).uniform(-290, 290, 6000) for s in (1, -1)]),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("accuracy", [0.001, 0.01, 0.1])
def test_quantiles_are_within_the_accuracy_and_their_bounds(name: str, accuracy: float) -> None:
    values, sketch = DATA[name], sketch_of(DATA[name], accuracy)
    for q in QS:
        truth, answer = true_quantile(values, q), sketch.query(Quantile(q))
        assert answer.lower <= truth <= answer.upper
        assert abs(answer.value - truth) <= sketch.current_accuracy * abs(truth) * (1 + 1e-9)
        assert answer.confidence == 1.0 and answer.basis == "ddsketch"
    assert sketch.query(Quantile(0)).value == values.min() and sketch.query(Quantile(1)).value == values.max()


@pytest.mark.parametrize("name", DATA)
def test_ranks_are_between_their_bounds(name: str) -> None:
    values, sketch = DATA[name], sketch_of(DATA[name])
    probes = [*np.quantile(values, [0.01, 0.3, 0.5, 0.8]), *values[:20], 0.0, -0.0, 1.0, -1.0, 1e308, -1e308, 5e-324]
    for x in [*probes, math.inf, -math.inf]:
        answer, truth = sketch.query(Rank(float(x))), float((values <= x).mean())
        assert answer.lower - 1e-12 <= truth <= answer.upper + 1e-12, x
        assert answer.lower <= answer.value <= answer.upper


finite = st.floats(allow_nan=False, allow_infinity=False)


@examples(200)
@given(st.lists(finite | st.sampled_from([0.0, -0.0, 1.0, 5e-324, 1e308]), min_size=1, max_size=60), st.floats(0, 1))
def test_any_values_lie_within_bounds(values: list[float], q: float) -> None:
    array, sketch = np.array(values), sketch_of(np.array(values))
    answer, truth = sketch.query(Quantile(q)), true_quantile(array, q)
    assert answer.lower <= truth <= answer.upper
    assert answer.lower <= answer.value <= answer.upper
    share, exact = sketch.query(Rank(values[0])), float((array <= values[0]).mean())
    assert share.lower - 1e-12 <= exact <= share.upper + 1e-12


def test_count_sum_mean_and_extremes_are_exact() -> None:
    values = DATA["integers"]
    sketch = sketch_of(values)
    assert sketch.query(Count()).value == len(values)
    assert sketch.query(Sum()).value == values.sum()
    assert sketch.query(Mean()).value == pytest.approx(values.mean())
    assert sketch.query(Minimum()).value == values.min() and sketch.query(Maximum()).value == values.max()
    assert sketch.query() == sketch.query(Quantile(0.5))


def test_nan_has_no_rank_and_infinities_have_one() -> None:
    sketch = sketch_of(np.array([math.nan, -math.inf, 1.0, 2.0, math.inf, math.nan]))
    assert sketch.query(Count()).value == 4
    shown = [sketch.query(Quantile(q)).value for q in (0, 0.34, 0.67, 1)]
    assert shown[0] == -math.inf and shown[3] == math.inf
    assert shown[1] == pytest.approx(1, rel=0.01) and shown[2] == pytest.approx(2, rel=0.01)
    assert math.isnan(sketch.query(Sum()).value)
    assert sketch.query(Minimum()).value == -math.inf and sketch.query(Maximum()).value == math.inf
    assert sketch.query(Rank(1.5)).value == 0.5 and sketch.query(Rank(-math.inf)).value == 0.25
    assert sketch_of([1.0, math.inf]).query(Sum()).value == math.inf
    assert sketch_of([-math.inf]).query(Quantile(0.3)).value == -math.inf


def test_an_empty_sketch_has_no_quantile() -> None:
    for sketch in (DDSketch(), sketch_of([math.nan])):
        for question in (Quantile(0.5), Rank(1.0), Mean(), Sum(), Minimum()):
            assert math.isnan(sketch.query(question).value)
        assert sketch.query(Count()).value == 0


def test_a_sketch_collapses_evenly_when_it_has_too_many_bins() -> None:
    values = DATA["wide"]
    sketch = sketch_of(values)
    assert len(sketch.stack.consolidate()[0]) <= MAX_BINS
    level = int(sketch.stack._view("level")[0])
    assert level > 0
    assert sketch.current_accuracy == pytest.approx(collapsed_accuracy(0.01, level))
    # Low quantiles are as accurate as high ones: the collapse is uniform.
    for q in np.linspace(0, 1, 101):
        truth = true_quantile(values, q)
        assert abs(sketch.query(Quantile(q)).value - truth) <= sketch.current_accuracy * abs(truth) * (1 + 1e-9)


def test_sketches_of_different_levels_merge_to_the_sketch_of_one_pass() -> None:
    wide, narrow = DATA["wide"], DATA["integers"]
    both = sketch_of(narrow).merge_many([sketch_of(wide)])
    assert both.to_bytes() == sketch_of(wide).merge_many([sketch_of(narrow)]).to_bytes()
    straight = sketch_of(np.concatenate([wide, narrow]))
    np.testing.assert_array_equal(both.stack.consolidate(), straight.stack.consolidate())
    late = sketch_of(wide)
    late.update(narrow)
    np.testing.assert_array_equal(late.stack.consolidate(), straight.stack.consolidate())


def test_a_story_of_one_sketch() -> None:
    sketch = DDSketch(0.02)
    assert isinstance(sketch, Synopsis)
    sketch.update(pa.array([1, None, 2, 3], pa.int32()))
    sketch.update([4.5, 5.5])
    assert sketch.records == 5 and sketch.query(Maximum()).value == 5.5
    again = from_bytes(sketch.to_bytes())
    assert isinstance(again, DDSketch) and again.query() == sketch.query() and again.records == 5
    assert DDSketch.from_bytes(again.to_bytes()).to_bytes() == sketch.to_bytes()


def test_a_sketch_of_small_integers_is_small() -> None:
    assert len(sketch_of(DATA["integers"]).to_bytes()) < 900


def test_bad_parameters_values_and_questions_are_refused_by_name() -> None:
    for accuracy in (0, 0.0009, 0.6, math.nan, True, "1%"):
        with refused(InvalidRequest, "accuracy"):
            DDSketch(accuracy)  # type: ignore[arg-type]
    with refused(InvalidRecord, "values"):
        DDSketch().update(["a"])
    with refused(InvalidRecord, "values"):
        DDSketch().update(np.array([1 << 63], np.uint64))
    for q in (-0.1, 1.1, math.nan):
        with refused(InvalidRequest, "q"):
            DDSketch().query(Quantile(q))
    with refused(InvalidRequest, "x"):
        DDSketch().query(Rank(math.nan))
    with refused(InvalidRequest, "question"):
        DDSketch().query(Distinct())
    with pytest.raises(IncompatibleSynopses):
        DDSketch(0.01).merge_many([DDSketch(0.02)])


def test_a_sum_beyond_float64_is_infinite_and_quantiles_are_unaffected() -> None:
    sketch = sketch_of(np.full(10, 1.7e308))
    assert sketch.query(Sum()).value == math.inf
    assert sketch.query(Quantile(0.5)).value == pytest.approx(1.7e308, rel=0.01)
    assert sketch.merge_many([sketch]).query(Count()).value == 20
