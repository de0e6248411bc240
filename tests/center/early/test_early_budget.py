"""An error budget beside an accuracy: predictions are the same, edges send less, and later answers keep both."""

from __future__ import annotations

from typing import Any

import pytest

from edge.core.events import SamplingSet
from edgewater.answers import Phase
from edgewater.answers.statement import requested
from edgewater.wire import SamplingReason
from tests.center.accuracy_world import (
    REF,
    STEP_MS,
    DataWorld,
    Delays,
    Site,
    exponential,
    first_answers,
    spec,
    wait_ms,
    without_times,
)
from tests.center.early.test_early_promise import ERROR, least_covered

pytestmark = pytest.mark.slow

WINDOWS = 8
EXPONENTIAL = exponential(100.0)
SHARES = (8.0, 4.0, 2.0, 1.0)
"""Of the records, by group: each group has enough records for an interval."""
BUDGET = {"error": {"total": "5%"}}


def run(
    budget: dict[str, Any] | None,
    *,
    windows: int = WINDOWS,
    delays: Delays = EXPONENTIAL,
    rate: float = 1.0,
    measures: dict[str, str] | None = None,
    step_ms: int = STEP_MS,
) -> DataWorld:
    sites = [Site.make(f"e{i}", i, windows + 4, delays, rate=1200.0, shares=SHARES) for i in range(3)]
    parts: dict[str, Any] = {} if budget is None else {"budget": budget}
    world = DataWorld(spec({"total": "sum(x)", **(measures or {})}, group_by=["k"], **parts), sites, step_ms=step_ms)
    if rate < 1:
        for site in sites:
            site.core.handle(SamplingSet(REF, rate, 0.0, SamplingReason.PROCESSOR))
    world.run(windows + 3)
    return world


@pytest.fixture(scope="module")
def exact() -> DataWorld:
    return run(None)


@pytest.fixture(scope="module")
def percentage() -> DataWorld:
    return run(BUDGET)


def true_sums(world: DataWorld, start_ms: int) -> dict[str, float]:
    return {f"g{i}": world.truth(start_ms, "sum", i) for i in range(len(SHARES))}


def complete(world: DataWorld) -> list[dict[str, Any]]:
    return [a for a in world.stated if a["phase"] != "early"]


@pytest.mark.nightly
def test_withheld_values_change_no_prediction(exact: DataWorld, percentage: DataWorld) -> None:
    def predictions(world: DataWorld) -> list[Any]:
        early = [without_times(e) for e in world.answers if e.phase is Phase.EARLY]
        return [(e.window_start_ms, e.revision, e.facts.accuracy) for e in early]

    assert len(predictions(exact)) >= WINDOWS
    assert predictions(percentage) == predictions(exact)


def test_early_answers_are_covered_and_later_answers_are_within_the_budget_for_certain(percentage: DataWorld) -> None:
    firsts = {e.window_start_ms for e in first_answers(percentage.answers, 4)}
    held = cells = 0
    for emission, answer in zip(percentage.answers, percentage.stated, strict=True):
        truth = true_sums(percentage, emission.window_start_ms)
        if emission.phase is Phase.EARLY and (emission.revision > 1 or emission.window_start_ms not in firsts):
            continue
        for row in answer["data"]:
            true, cell = truth[row["group"]["k"]], row["total"]
            is_within = abs(cell["estimate"] - true) <= ERROR * true * (1 + 1e-9)
            if emission.phase is Phase.EARLY:
                cells += 1
                held += is_within and cell["lower"] <= true <= cell["upper"]
            else:
                assert is_within and cell["lower"] <= true * (1 + 1e-9) and true <= cell["upper"] * (1 + 1e-9), answer
    assert held >= least_covered(cells) and cells >= 4 * (WINDOWS - 4)


def test_the_contract_states_both_and_later_answers_keep_both(percentage: DataWorld) -> None:
    later = complete(percentage)
    assert len(later) > WINDOWS and all(a["contract"]["met"] for a in later)
    assert any(a["quality"]["error"]["withheld"] for a in later)
    for answer in percentage.stated:
        requested = answer["contract"]["requested"]
        assert requested["error"] == ERROR and requested["error_budget"] == {"total": "5.0%"}
    early = [a for a in percentage.stated if a["phase"] == "early" and a["revision"] == 1][4:]
    assert sum(a["contract"]["met"] for a in early) > len(early) / 2


def test_stragglers_are_not_sent_again_for_a_small_change(exact: DataWorld, percentage: DataWorld) -> None:
    assert percentage.value_bytes < 0.75 * exact.value_bytes, percentage.value_bytes / exact.value_bytes
    assert percentage.bytes < exact.bytes


@pytest.mark.nightly
def test_with_a_staleness_budget_too_the_early_answer_is_in_time_and_the_complete_one_within_the_error() -> None:
    world = run({**BUDGET, "staleness": "300ms"}, windows=6, delays=exponential(600.0))
    firsts = first_answers(world.answers, 1)
    assert max(map(wait_ms, firsts)) <= 300 and {e.phase for e in firsts} == {Phase.EARLY}
    assert requested(firsts[0].spec)["staleness_ms"] == 300
    later = complete(world)
    assert len(later) >= 6 and all(a["contract"]["met"] for a in later if a["phase"] == Phase.FINAL)
    # Recent windows had late records, and too few windows are known to bound how many may follow.
    assert all(a["contract"]["met"] or "may_change" in a["quality"]["completeness"] for a in later)


def test_the_contract_of_a_later_answer_is_about_the_withheld_records_of_each_measure() -> None:
    world = run(BUDGET, windows=6, measures={"average": "mean(x)"})
    later = [a for a in complete(world) if a["quality"]["error"]["withheld"]]
    assert later
    for answer in later:
        assert {v["code"] for v in answer["contract"]["violations"]} == {"withheld"}
        assert all(row["average"]["lower"] is None for row in answer["data"])
    early = [a for a in world.stated if a["phase"] == "early" and not a["quality"]["error"]["withheld"]]
    assert any(a["contract"]["met"] for a in early)


@pytest.mark.nightly
def test_what_edges_withhold_of_a_sample_changes_no_answer() -> None:
    exact, world = (run(budget, windows=5, rate=0.7) for budget in (None, BUDGET))
    later = complete(world)
    assert [a["data"] for a in later] == [a["data"] for a in complete(exact)]
    held = [
        row["total"]["lower"] <= true_sums(world, e.window_start_ms)[row["group"]["k"]] <= row["total"]["upper"]
        for e, a in zip(world.answers, world.stated, strict=True)
        if a["phase"] == "complete"
        for row in a["data"]
    ]
    assert sum(held) >= least_covered(len(held)) and len(held) >= 4 * 3
    assert all(v["code"] == "accuracy" for a in later for v in a["contract"]["violations"])
    assert world.value_bytes < exact.value_bytes
