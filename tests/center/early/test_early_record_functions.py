"""Early answers on a user-defined record function that is evaluated for a sample of the records.

Production edge cores that process a tenth of their records, and the production ledger. If each of n intervals contains
the true value with 95 %, fewer than `least_covered` do in one run of 200. Seeds are fixed.
"""

from __future__ import annotations

import numpy as np
import pytest

from center.early.evaluation import UNKNOWN_RANGE
from edge.core.events import SamplingSet
from edgewater.answers import Phase
from tests.center.accuracy_world import FINE_MS, REF, WINDOW_MS, Site, World, exponential, first_answers, spec
from tests.center.early.test_early_promise import least_covered
from tests.edgewater.functions_world import Counting, install_functions

pytestmark = pytest.mark.nightly

WINDOWS, RATE = 20, 0.1


def scored(values: np.ndarray) -> np.ndarray:
    """The function on arrays: a fifth of the records have no score."""
    return np.where((values * 1e6).astype(np.int64) % 5 == 0, np.nan, values * values)


@pytest.mark.parametrize("kind", ["sum", pytest.param("mean", marks=pytest.mark.full)])
def test_estimates_are_unbiased_and_intervals_hold(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    score = Counting(lambda x: None if int(x * 1e6) % 5 == 0 else x * x)
    install_functions(monkeypatch, score.named("score"))
    sites = [Site.make(f"e{i}", i, WINDOWS + 4, exponential(80.0), rate=1_000.0, scale=1 + i) for i in range(2)]
    greatest = max(float(site.values.max()) for site in sites) ** 2
    accuracy = {"error": "5%", "measure": "total", "substream": "500ms", "range": [0, greatest]}
    world = World(spec({"total": f"{kind}(score(x))"}, accuracy=accuracy), sites, step_ms=FINE_MS)
    for site in sites:
        site.core.handle(SamplingSet(REF, RATE))
    world.run(WINDOWS + 3)
    came = sum(site.at for site in sites)
    assert abs(len(score.seen) - RATE * came) <= 5 * np.sqrt(RATE * came), "the function is called for the sample only"
    answers = [a for a in first_answers(world.answers, 2) if a.phase is Phase.EARLY]
    assert len(answers) >= WINDOWS - 5
    errors, held = [], 0
    for answer in answers:
        prediction = answer.prediction
        assert prediction is not None
        start = answer.window_start_ms
        mine = [s.values[(s.born >= start) & (s.born < start + WINDOW_MS)] for s in sites]
        scores = scored(np.concatenate(mine))
        truth = float(np.nansum(scores) if kind == "sum" else np.nanmean(scores))
        errors.append(prediction.estimate / truth - 1)
        held += prediction.lower <= truth <= prediction.upper
    assert held >= least_covered(len(answers))
    # Unbiased: the mean error is within 4 standard errors (false alarm: once in 15,000).
    assert abs(np.mean(errors)) <= 4 * np.std(errors, ddof=1) / np.sqrt(len(errors))


@pytest.mark.parametrize("declared", [None, [0, 0.5]])
def test_without_a_range_that_holds_a_sample_has_an_estimate_and_no_interval(
    monkeypatch: pytest.MonkeyPatch, declared: list[float] | None
) -> None:
    install_functions(monkeypatch, Counting(lambda x: x * x).named("score"))
    sites = [Site.make("e0", 0, 14, exponential(80.0), rate=1_000.0)]
    accuracy = {"error": "5%", "measure": "total", "substream": "500ms"} | ({"range": declared} if declared else {})
    world = World(spec({"total": "sum(score(x))"}, accuracy=accuracy), sites, step_ms=FINE_MS)
    sites[0].core.handle(SamplingSet(REF, RATE))
    world.run(12)
    answers = [a for a in first_answers(world.answers, 4) if a.phase is Phase.EARLY]
    assert answers
    for answer in answers:
        prediction = answer.prediction
        assert prediction is not None and np.isnan([prediction.lower, prediction.upper]).all()
        assert not prediction.met and prediction.reason == UNKNOWN_RANGE
        assert prediction.estimate > 0
