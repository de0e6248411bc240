"""Samples that edges top up: production edge cores and ledger. `score` is an expensive function. Seeds are fixed."""

from __future__ import annotations

import pytest

from center.early.trigger import SAMPLE_TOO_SMALL
from edge.core.events import SamplingSet
from edgewater.answers import Phase
from edgewater.wire import SamplingReason
from tests.center.accuracy_world import REF, WINDOW_MS, Site, World, exponential, first_answers, spec
from tests.center.early.test_early_promise import least_covered
from tests.edgewater.functions_world import Counting, install_functions

RATE, EXPECTED = 0.2, 3_000
CAME = 1_000  # a second and a window


def world(monkeypatch: pytest.MonkeyPatch, expected: int, seconds: int, keys: list[str], kind: str = "mean") -> World:
    """A world whose edges get a third of the records that their rate was planned for."""
    install_functions(monkeypatch, Counting(lambda x: x).named("score"))
    sites = [Site.make(f"e{i}", i, seconds + 4, exponential(80.0), rate=CAME, shares=(1, 1)) for i in range(2)]
    greatest = max(float(site.values.max()) for site in sites)
    scope = {"scope": "each"} if keys else {}
    accuracy = {"error": "8%" if keys else "5.5%", "measure": "total", "substream": "500ms", "range": [0, greatest]}
    query = spec({"total": f"{kind}(score(x))"}, accuracy=accuracy | scope, group_by=keys)
    result = World(query, sites)
    for site in sites:
        site.core.handle(SamplingSet(REF, RATE, 0.0, SamplingReason.MEASURE, expected))
    result.run(seconds)
    return result


@pytest.mark.parametrize("keys", [[], ["k"]])
def test_a_window_with_a_third_of_the_expected_records_meets_its_accuracy(
    monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    for expected in (EXPECTED, 0):
        result = world(monkeypatch, expected, 9, keys)
        plans = result.ledger.needed_plans()[REF]
        assert all(0.7 * CAME < plan.records < 1.1 * CAME for plan in plans.values())
        answers = first_answers(result.answers, 4)
        early = [a.prediction for a in answers if a.phase is Phase.EARLY and a.prediction is not None]
        assert len(early) >= 3
        for prediction in early:
            reasons = {group.reason for group in prediction.by_group}
            if expected:
                assert prediction.met and reasons == {""}
                assert 0 <= prediction.sampled - 2 * RATE * EXPECTED < 0.05 * prediction.sampled  # late ones, too
            else:
                assert SAMPLE_TOO_SMALL in reasons


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_intervals_of_topped_up_windows_hold(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    result = world(monkeypatch, EXPECTED, 64, [], kind)
    early = [a for a in first_answers(result.answers, 2) if a.phase is Phase.EARLY and a.prediction is not None]
    assert len(early) >= 55
    containing = 0
    for answer in early:
        assert answer.prediction is not None
        truth = result.truth(answer.window_start_ms, kind, window_ms=WINDOW_MS)
        containing += answer.prediction.lower <= truth <= answer.prediction.upper
    assert containing >= least_covered(len(early))
