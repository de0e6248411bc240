"""Error, confidence and waits of early answers, on production edge cores and ledger under a virtual clock.

If each of n windows is covered with 95 %, the number of covered windows is below the binomial's 0.5 % quantile,
`least_covered`, in one run of 200. Seeds are fixed. By default one mixture runs for 50 windows; `full` runs are of 200.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from center.ledger import Emission
from edgewater.answers import Phase
from edgewater.answers.statement import requested
from tests.center.accuracy_world import (
    DISORDER_MS,
    STEP_MS,
    Delays,
    Site,
    World,
    exponential,
    first_answers,
    gamma,
    phases,
    spec,
    wait_ms,
)
from tests.center.statement_world import violations

pytestmark = pytest.mark.slow

MIXED = (gamma(2.0, 60.0), exponential(150.0), gamma(2.0, 200.0))
ERROR = 0.05


def least_covered(windows: int, confidence: float = 0.95, false_alarm: float = 0.005) -> int:
    """Returns the binomial quantile, by summation."""
    chances = np.zeros(windows + 1)
    chances[0] = 1.0
    for _ in range(windows):
        chances[1:] = chances[1:] * (1 - confidence) + chances[:-1] * confidence
        chances[0] *= 1 - confidence
    return int(np.searchsorted(np.cumsum(chances), false_alarm))


def run(
    windows: int, delays: Sequence[Delays], measure: str = "sum(x)", step_ms: int = STEP_MS, **query: object
) -> World:
    sites = [Site.make(f"e{i}", i, windows + 4, d, scale=1 + 0.5 * i) for i, d in enumerate(delays)]
    world = World(spec({"total": measure}, **query), sites, step_ms=step_ms)
    world.run(windows + 3)
    return world


def relative_errors(world: World, answers: Sequence[Emission], kind: str) -> np.ndarray:
    errors = []
    for answer in answers:
        prediction, truth = answer.prediction, world.truth(answer.window_start_ms, kind)
        assert prediction is not None
        errors.append(abs(prediction.estimate - truth) / truth)
    return np.array(errors)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("delays", "measure", "kind", "windows"),
    [
        pytest.param((exponential(100.0),) * 3, "sum(x)", "sum", 200, marks=pytest.mark.full),
        (MIXED, "sum(x)", "sum", 50),
        pytest.param(MIXED, "sum(x)", "sum", 200, marks=pytest.mark.full),
        pytest.param((gamma(2.0, 200.0),) * 3, "count()", "count", 200, marks=pytest.mark.full),
    ],
    ids=["exponential-sum", "mixed-sum", "mixed-sum-long", "gamma-count"],
)
def test_early_answers_keep_error_and_confidence_within_the_binomial_band(
    delays: Sequence[Delays], measure: str, kind: str, windows: int
) -> None:
    world = run(windows, delays, measure, step_ms=40)  # the waits are compared with those of complete answers
    answers = [a for a in first_answers(world.answers) if a.phase is Phase.EARLY][:windows]
    assert len(answers) >= windows - 3
    errors = relative_errors(world, answers, kind)
    assert int((errors <= ERROR).sum()) >= least_covered(len(answers))
    held = 0
    for answer in answers:
        prediction = answer.prediction
        assert prediction is not None
        held += prediction.lower <= world.truth(answer.window_start_ms, kind) <= prediction.upper
    assert held >= least_covered(len(answers))
    waits = np.array([wait_ms(a) for a in answers])
    assert np.percentile(waits, 95) <= 300  # including 30 ms of the network
    complete = [e.answered_at_ms - e.window_end_ms for e in world.answers if e.phase is Phase.COMPLETE]
    assert waits.mean() < 0.1 * np.mean(complete)
    assert np.mean(complete) >= DISORDER_MS


@pytest.fixture(scope="module")
def world() -> World:
    return run(12, (exponential(100.0), exponential(100.0)), "mean(x)")


def test_a_window_is_answered_early_then_complete_then_final(world: World) -> None:
    for answer in first_answers(world.answers)[1:8]:
        given = phases(world.answers, answer.window_start_ms)
        assert given == sorted(given, key=lambda p: p.rank)
        assert given[0] is Phase.EARLY and given[-1] is Phase.FINAL and given.count(Phase.COMPLETE) == 1


def test_answers_are_revised_only_for_a_quarter_of_the_interval(world: World) -> None:
    early = [e for e in world.answers if e.phase is Phase.EARLY]
    for before, after in pairwise(early):
        if before.window_start_ms != after.window_start_ms:
            continue
        was, now = before.prediction, after.prediction
        assert was is not None and now is not None
        assert was.met != now.met or abs(now.estimate - was.estimate) > 0.25 * was.half_width
    assert len(early) <= 8 * len(first_answers(world.answers))


def test_complete_answers_are_exact_and_need_no_prediction(world: World) -> None:
    complete = [e for e in world.answers if e.phase is not Phase.EARLY]
    assert complete
    for answer in complete:
        accuracy = answer.facts.accuracy
        assert accuracy is not None and answer.prediction is answer.facts.predicted is None
        assert not answer.codes()
        assert accuracy.sampling.startswith("not sampled")


def test_the_center_measures_its_own_coverage(world: World) -> None:
    finals = [e for e in world.answers if e.phase is Phase.FINAL]
    said = [e.facts.accuracy.covered for e in finals if e.facts.accuracy]
    assert len(said) == len(finals) and all(covered is not None for covered in said[1:])
    for answer, covered in zip(finals, said, strict=True):
        first = next(e for e in first_answers(world.answers) if e.window_start_ms == answer.window_start_ms)
        prediction = first.prediction
        if prediction is not None and covered is not None:
            truth = world.truth(answer.window_start_ms, "mean")
            assert covered == (prediction.lower <= truth * (1 + 1e-12) and truth * (1 - 1e-12) <= prediction.upper)
    assert world.estimator().answers.coverage == pytest.approx(np.mean([c for c in said if c is not None]))


def test_a_measure_whose_mean_may_be_zero_does_not_meet_the_accuracy() -> None:
    sites = [Site.make("e0", 1, 8, exponential(100.0))]
    sites[0].values -= sites[0].values.mean()
    world = World(spec(), sites)
    world.run(7)
    answers = first_answers(world.answers)[4:6]
    assert answers
    for answer in answers:
        (violation,) = violations(answer)
        assert violation.code == "accuracy"
        assert answer.phase is Phase.EARLY and wait_ms(answer) < DISORDER_MS
    reasons = [v.message for a in answers for v in violations(a)]
    assert any("may be zero" in reason for reason in reasons)


@pytest.mark.nightly
def test_a_staleness_budget_limits_the_wait() -> None:
    world = run(10, (gamma(1.0, 1_500.0), gamma(1.0, 1_500.0)), budget={"staleness": "300ms"}, lateness="5s")
    answers = first_answers(world.answers)[1:9]
    assert answers
    assert max(wait_ms(a) for a in answers) <= 300
    assert {a.phase for a in answers} == {Phase.EARLY}
    for answer in answers:
        assert requested(answer.spec)["staleness_ms"] == 300
