"""An accuracy with groups, on production edge cores and ledger under a virtual clock. Seeds are fixed.

Coverage: if each of n intervals holds with 95 %, fewer than `least_covered(n)` hold in one run of 200. Intervals of one
window are independent: each group has its own records, delays and values.
"""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest

from center.early import EarlyAnswerEstimator, GroupPrediction, Prediction, SamplingPlan
from center.early import groups as group_module
from center.ledger import EdgesChanged, Emission, TimeAdvanced
from edge.core.events import SamplingSet
from edgewater.answers import Phase
from edgewater.answers.statement import requested
from edgewater.model.accuracy import MAX_GROUPS, group_values
from edgewater.model.query import QuerySpec
from tests.center.accuracy_world import (
    BEGIN_MS,
    DISORDER_MS,
    REF,
    WINDOW_MS,
    Site,
    World,
    exponential,
    first_answers,
    record_of,
    spec,
    wait_ms,
)
from tests.center.early.test_early_promise import least_covered
from tests.center.statement_world import quality_of, violations

pytestmark = pytest.mark.slow


def grouped(measure: str = "sum(x)", scope: str = "each", error: str = "5%", **parts: Any) -> QuerySpec:
    accuracy = {"error": error, "measure": "total", "substream": "500ms", "scope": scope}
    return spec({"total": measure}, group_by=["k"], accuracy=accuracy, **parts)


def sites(count: int = 2, seconds: float = 16, **more: Any) -> list[Site]:
    defaults = {"rate": 600.0, "shares": (1.0, 1.0, 1.0), "slower": (0.5, 1.0, 2.0), **more}
    return [Site.make(f"e{i}", i, seconds, exponential(60.0), scale=1 + 0.5 * i, **defaults) for i in range(count)]


def prediction(emission: Emission) -> Prediction:
    assert emission.prediction is not None
    return emission.prediction


def number(group: GroupPrediction) -> int:
    (name,) = group_values(group.key)
    assert isinstance(name, str)
    return int(name[1:])


def of_group(emission: Emission, group: int) -> GroupPrediction:
    return next(o for o in prediction(emission).by_group if number(o) == group)


def early(world: World) -> list[Emission]:
    return [a for a in first_answers(world.answers) if a.phase is Phase.EARLY]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("measure", "scope", "error"),
    [
        ("sum(x)", "each", "8%"),
        pytest.param("count()", "all", "5%", marks=pytest.mark.full),
        pytest.param("mean(x)", "each", "5%", marks=pytest.mark.full),
    ],
    ids=["sum-each", "count-all", "mean-each"],
)
def test_intervals_of_groups_with_delays_of_their_own_hold_within_the_binomial_band(
    measure: str, scope: str, error: str
) -> None:
    windows, kind = 20, measure.partition("(")[0]
    world = World(grouped(measure, scope, error), sites(2, windows + 4, rate=700.0))
    world.run(windows + 3)
    answers = early(world)
    assert len(answers) >= windows - 2
    held, within = [], []
    for answer in answers:
        eligible = [o for o in prediction(answer).by_group if o.eligible]
        assert prediction(answer).met == (bool(eligible) and all(o.met for o in eligible))
        truths = [world.truth(answer.window_start_ms, kind, number(o)) for o in eligible]
        held.append([o.lower - 1e-6 <= t <= o.upper + 1e-6 for o, t in zip(eligible, truths, strict=True)])
        within.append(
            [abs(o.estimate - t) <= float(error[:-1]) / 100 * t for o, t in zip(eligible, truths, strict=True)]
        )
    for outcomes in (held, within):
        each = [all(o) for o in outcomes] if scope == "all" else [h for o in outcomes for h in o]
        assert sum(each) >= least_covered(len(each))
    assert sum(len(h) for h in held) >= 3 * (windows - 4), "only the first windows have groups without an interval"
    waits = np.array([wait_ms(a) for a in answers])
    assert waits.mean() < 0.25 * DISORDER_MS


def test_a_group_with_few_records_has_no_interval_and_delays_no_other_group() -> None:
    world = World(grouped(), sites(shares=(1.0, 1.0, 0.01), slower=()))
    world.run(10)
    answers = early(world)[2:]
    assert len(answers) >= 6
    seen = 0
    for answer in answers:
        stated = {number(o): o for o in prediction(answer).by_group}
        assert stated[0].eligible and stated[1].eligible and prediction(answer).met
        if 2 in stated:
            seen += 1
            rare = stated[2]
            assert not rare.eligible and not rare.met and np.isnan([rare.lower, rare.upper]).all()
            quality = quality_of(answer)
            assert quality["accuracy"]["groups"] == {"eligible": 2, "met": 2, "waiting": 1}
            predicted = answer.facts.predicted
            assert predicted is not None and (predicted.groups or {})['["g2"]'] == (None, None, None)
            assert json.loads(json.dumps(quality, allow_nan=False)) == quality
    assert seen >= 3
    assert all(wait_ms(a) < DISORDER_MS / 2 for a in answers)


def test_a_new_group_has_no_interval_in_its_first_window() -> None:
    world = World(grouped(error="10%"), sites(slower=()))
    begins = BEGIN_MS + 6_300
    for site in world.sites:
        site.group[(site.group == 2) & (site.born < begins)] = 1
    world.run(14)
    by_start = {a.window_start_ms - BEGIN_MS: a for a in early(world)}
    assert not of_group(by_start[6_000], 2).eligible
    assert of_group(by_start[6_000], 1).eligible, "other groups do not wait for it"
    later = [of_group(by_start[start], 2) for start in range(9_000, 12_000, 1_000)]
    assert all(o.eligible and o.met for o in later)


@pytest.mark.nightly
def test_a_group_that_ends_delays_no_answer_and_is_removed() -> None:
    world = World(grouped(error="10%"), sites(seconds=24, slower=()))
    for site in world.sites:
        site.group[(site.group == 2) & (site.born >= BEGIN_MS + 5_000)] = 1
    world.run(22)
    assert len(world.estimator().observed.groups) == 2
    after = [a for a in early(world) if a.window_start_ms >= BEGIN_MS + 6_000]
    assert len(after) >= 14
    assert all(wait_ms(a) < DISORDER_MS / 2 and prediction(a).met for a in after)


@pytest.mark.nightly
def test_a_silent_edge_widens_the_intervals_of_its_groups() -> None:
    world = World(grouped(error="20%"), sites(3, 18, slower=()))
    for site in world.sites[:2]:
        site.group[:] = np.minimum(site.group, 1)  # only the last edge has group 2
    world.sites[2].group[:] = np.maximum(world.sites[2].group, 1)  # and it has nothing of group 0
    silent_from = BEGIN_MS + 10_000
    world.sites[2].cut = (silent_from, silent_from + 5_000)
    world.run(18)
    during = [a for a in early(world) if silent_from + 3_000 <= a.window_end_ms < silent_from + 5_000]
    assert during
    for answer in during:
        assert prediction(answer).silent == ("e2",)
        assert wait_ms(answer) <= 1_700
        without, some, only = (of_group(answer, g) for g in (0, 1, 2))
        assert without.missing < 0.01 * without.estimate
        assert np.isfinite([only.lower, only.upper]).all()
        assert some.missing > 0
        assert only.eligible and only.arrived == 0, "the estimate is its usual rate"
        assert only.missing / only.estimate > some.missing / some.estimate > without.missing / without.estimate
        for group in (without, some, only):
            truth = world.truth(answer.window_start_ms, "sum", number(group))
            assert abs(group.estimate - truth) / truth < 0.3
            assert group.lower < truth < group.upper


@pytest.mark.nightly
def test_with_too_many_groups_windows_are_answered_when_complete() -> None:
    many = MAX_GROUPS + 40
    world = World(grouped("count()"), sites(seconds=22, rate=2500.0, shares=(1.0,) * many, slower=()))
    ends = BEGIN_MS + 8_000
    for site in world.sites:
        site.group[site.born >= ends] %= 2
    world.run(21)
    assert not [a for a in early(world) if a.window_start_ms < ends - WINDOW_MS]
    overflowed = [a for a in first_answers(world.answers) if a.window_end_ms <= ends]
    assert len(overflowed) >= 6
    for answer in overflowed:
        assert answer.phase is Phase.COMPLETE and not answer.codes()
        said = quality_of(answer)["accuracy"]["groups"]
        assert said["limit"] == MAX_GROUPS and f"more than {MAX_GROUPS} groups" in said["reason"]
    again = [a for a in early(world) if a.window_start_ms >= ends]
    assert len(again) >= 3 and all(prediction(a).met for a in again[1:])
    assert len(world.estimator().observed.groups) == 2


def test_the_limit_of_groups_is_for_all_edges_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "MAX_GROUPS", 4)
    world = World(grouped("count()"), sites(slower=()))
    world.sites[1].group += 3  # three groups at each edge
    world.run(6)
    assert not early(world) and world.estimator().observed.has_too_many_groups


@pytest.mark.nightly
@pytest.mark.parametrize("scope", ["each", pytest.param("all", marks=pytest.mark.full)])
def test_the_batch_size_changes_no_answer(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[Emission]] = []
    for size in (group_module.BATCH_SIZE, 2):  # of five groups, so the last batch has one
        monkeypatch.setattr(group_module, "BATCH_SIZE", size)
        parts = sites(seconds=10, shares=(1, 1, 0.05, 1, 0.5), slower=(0.5, 1, 2, 1, 3))
        world = World(grouped(scope=scope), parts)
        for site in world.sites:  # a group that appears late
            site.group[(site.group == 3) & (site.born < BEGIN_MS + 3_300)] = 0
        world.sites[1].cut = (BEGIN_MS + 5_000, BEGIN_MS + 7_500)
        runs.append(world.run(9.6))
    for others in runs[1:]:
        assert [(e.window_start_ms, e.revision, e.answered_at_ms, e.phase) for e in others] == [
            (e.window_start_ms, e.revision, e.answered_at_ms, e.phase) for e in runs[0]
        ]
        for mine, theirs in zip(runs[0], others, strict=True):
            if mine.phase is not Phase.EARLY:
                continue
            for one, other in zip(prediction(mine).by_group, prediction(theirs).by_group, strict=True):
                numbers, expected = (np.array(astuple(o)[3:12]) for o in (other, one))
                np.testing.assert_allclose(numbers, expected, rtol=1e-9, atol=1e-9)
                assert (one.key, one.eligible, one.met, one.reason) == (
                    other.key, other.eligible, other.met, other.reason,
                )  # fmt: skip
    assert sum(e.phase is Phase.EARLY for e in runs[0]) >= 8


@pytest.mark.nightly
def test_a_staleness_budget_limits_the_wait_and_the_reason_names_groups_beyond_the_error() -> None:
    world = World(grouped(error="1%", budget={"staleness": "300ms"}), sites(slower=()))
    world.run(10)
    answers = early(world)[7:]
    assert answers
    for answer in answers:
        assert wait_ms(answer) <= 300 and not prediction(answer).met
        (violation,) = violations(answer)
        assert violation.code == "accuracy" and "of 3 groups are not within the error" in violation.message
        assert requested(answer.spec)["scope"] == "each"


@pytest.mark.nightly
def test_an_overloaded_edge_samples_all_groups() -> None:
    world = World(grouped(error="20%"), sites(seconds=12, slower=()))
    world.run(4)
    for site in world.sites:
        site.core.handle(SamplingSet(REF, 0.5, 0.0))
    world.run(7)
    sampled = [a for a in world.answers if a.window_start_ms >= BEGIN_MS + 5_000]
    assert {a.phase for a in sampled} == {Phase.EARLY, Phase.COMPLETE, Phase.FINAL}
    for answer in sampled:
        for group in prediction(answer).by_group:
            assert group.eligible and group.sampling > 0 and 0.3 < group.sampled / group.arrived < 0.7
            truth = world.truth(answer.window_start_ms, "sum", number(group))
            assert abs(group.estimate - truth) / truth < 0.3


@pytest.mark.nightly
def test_all_records_are_needed_while_a_group_has_no_interval() -> None:
    known, rare = (World(grouped(error="20%"), sites(slower=(), shares=s)) for s in ((1, 1, 1), (1, 1, 0.01)))
    for world in (known, rare):
        world.run(8)
    assert all(plan.rate < 1 for plan in known.estimator().rates().values())
    assert set(rare.estimator().rates().values()) == {SamplingPlan()}


def test_coverage_counts_intervals_with_scope_each_and_windows_with_scope_all() -> None:
    for scope in ("each", "all"):
        world = World(grouped(scope=scope), sites(seconds=12))
        world.run(11)
        finals = [e for e in world.answers if e.phase is Phase.FINAL]
        firsts = {a.window_start_ms: a for a in first_answers(world.answers)}
        shares: list[float] = []
        for final in finals:
            first = firsts[final.window_start_ms]
            said = final.facts.accuracy.covered if final.facts.accuracy else None
            eligible = [o for o in prediction(first).by_group if o.eligible] if first.phase is Phase.EARLY else []
            truths = [world.truth(final.window_start_ms, "sum", number(o)) for o in eligible]
            held = [o.lower - 1e-6 <= t <= o.upper + 1e-6 for o, t in zip(eligible, truths, strict=True)]
            assert said == (all(held) if held else None)
            if held:
                shares.append(float(all(held)) if scope == "all" else float(np.mean(held)))
        assert len(shares) >= 5
        assert world.estimator().answers.coverage == pytest.approx(np.mean(shares))


@pytest.mark.nightly
def test_after_too_many_groups_while_edges_sample_no_answer_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(grouped(error="20%"), sites(seconds=12, slower=()))
    for site in world.sites:
        site.core.handle(SamplingSet(REF, 0.5, 0.0))
    world.run(5)
    monkeypatch.setattr(group_module, "MAX_GROUPS", 2)
    world.run(5)
    estimator = world.estimator()
    assert estimator.observed.has_too_many_groups and estimator.observed.groups.lost_sample
    assert set(estimator.rates().values()) == {SamplingPlan()}, "edges process all records"
    restored = EarlyAnswerEstimator(estimator.accuracy, estimator.schedule, None)
    restored.restore(estimator.to_text())
    assert restored.observed.groups.lost_sample
    done = [a for a in world.answers if a.window_start_ms >= BEGIN_MS + 6_000 and a.phase is not Phase.EARLY]
    assert done
    for answer in done:
        assert answer.codes() == ["accuracy"]
        stated = quality_of(answer)
        assert stated["accuracy"]["sampling"].startswith("unknown"), "what was sampled out is not counted"
        assert stated["records"]["sampled"] is stated["error"]["sampling"]["total"] is None
        assert stated["prediction"]["total"]["lower"] is stated["prediction"]["total"]["upper"] is None


@pytest.mark.nightly
def test_when_the_last_edge_is_retired_no_rates_are_needed() -> None:
    world = World(grouped(error="20%"), sites(slower=()))
    world.run(6)
    world.ledger.handle(EdgesChanged(tuple(replace(record_of(s.name), retired=True) for s in world.sites)))
    world.ledger.handle(TimeAdvanced(world.now_ms))
    assert world.estimator().rates() == {} and world.ledger.needed_plans() == {REF: {}}
