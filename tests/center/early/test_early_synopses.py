"""Early answers of synopses: their intervals contain what all records will give, and the contract says if one is too
wide. Production edge cores, ledger and rendering under a virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from center.ledger import Emission
from center.serving.explanation import explain_value
from center.serving.measures import NO_QUESTIONS, MeasureQuestions
from center.serving.rollup import Intervals, roll_up
from edgewater.answers import Phase
from edgewater.synopses import FloatArray
from tests.cells import at_night
from tests.center.accuracy_world import (
    BEGIN_MS,
    WINDOW_MS,
    DataWorld,
    Delays,
    Site,
    exponential,
    first_answers,
    gamma,
    spec,
    wait_ms,
)
from tests.center.early.test_early_promise import least_covered
from tests.center.rendered import render

MEASURES = {
    "total": "quantile(x, 0.5)", "p90": "quantile(x, 0.9)", "ranks": "kll(x, k=400)", "values": "distinct(x)",
    "top": "top_k(k, 4)", "n": "count()",
}  # fmt: skip
QUANTILES = {"total": 0.5, "p90": 0.9}
EXPONENTIAL = exponential(100.0)
SHARES = (8.0, 4.0, 2.0, 1.0)


def run(
    measure: str, *, windows: int, delays: Delays = EXPONENTIAL, measures: Mapping[str, str] = MEASURES, **parts: Any
) -> DataWorld:
    sites = [Site.make(f"e{i}", i, windows + 4, delays, rate=1000.0, shares=SHARES) for i in range(3)]
    accuracy = {"error": "5%", "measure": measure, "substream": "500ms", **parts.pop("accuracy", {})}
    world = DataWorld(spec(dict(measures), accuracy=accuracy, **parts), sites)
    world.run(windows + 3)
    return world


def values_of(world: DataWorld, start_ms: int, group: str | None = None) -> tuple[FloatArray, list[str]]:
    """Returns the values and the keys of all records of a window."""
    values, keys = [], []
    for site in world.sites:
        chosen = (site.born >= start_ms) & (site.born < start_ms + WINDOW_MS)
        chosen &= group is None or site.group == int((group or "g0")[1:])
        values.append(site.values[chosen])
        keys += [f"g{i}" for i in site.group[chosen].tolist()]
    return np.concatenate(values), keys


def holds(cell: Mapping[str, Any], true: float) -> bool:
    assert cell["lower"] is not None and cell["upper"] is not None, cell
    return bool(cell["lower"] <= true <= cell["upper"])


def early_answers(world: DataWorld) -> list[tuple[Emission, dict[str, Any]]]:
    """Returns the first answers with bounds, if they were given early."""
    firsts = {e.window_start_ms for e in first_answers(world.answers, 3)}
    return [
        (emission, answer)
        for emission, answer in zip(world.answers, world.stated, strict=True)
        if emission.phase is Phase.EARLY and emission.revision == 1 and emission.window_start_ms in firsts
    ]


def quantile_of(values: FloatArray, q: float) -> float:
    return float(np.quantile(values, q, method="lower"))


@pytest.mark.nightly
@pytest.mark.parametrize("measure", ["values", "p90", "top", *at_night("ranks", "total")])
@pytest.mark.parametrize("delays", [EXPONENTIAL, gamma(2.0, 200.0)], ids=["exponential", "gamma"])
def test_intervals_of_early_answers_contain_the_values_of_all_records(measure: str, delays: Delays) -> None:
    windows = 20
    kept = {"n": "count()", measure: MEASURES[measure]}
    world = run(measure, windows=windows, delays=delays, measures=kept)
    answers = early_answers(world)
    assert len(answers) >= windows - 5
    held = 0
    for emission, answer in answers:
        values, keys = values_of(world, emission.window_start_ms)
        (row,) = answer["data"]
        cell = row[measure]
        if measure in QUANTILES:
            held += holds(cell, quantile_of(values, QUANTILES[measure]))
        elif measure == "values":
            held += holds(cell, len(np.unique(values)))
        elif measure == "top":
            held += all(holds(each, keys.count(each["item"])) for each in cell["top"])
        else:
            held += holds(cell["quantiles"]["0.5"], quantile_of(values, 0.5))
        assert answer["confidence"] == pytest.approx(0.95)
        assert row["n"]["lower"] is None and row["n"]["upper"] is None, "nothing is promised of another measure"
    assert held >= least_covered(len(answers))
    met = [answer["contract"]["met"] for _, answer in answers]
    assert sum(met) >= 0.9 * len(met)
    complete = [e.answered_at_ms - e.window_end_ms for e in world.answers if e.phase is Phase.COMPLETE]
    assert np.mean([wait_ms(e) for e, _ in answers]) <= 0.55 * np.mean(complete)


@pytest.mark.nightly
def test_several_synopses_share_an_accuracy_and_each_interval_contains_the_value_of_all_records() -> None:
    """A histogram, frequencies, a sample, a quantile and distinct, in one query."""
    windows, bounds = 24, (2.0, 14.0)
    measures = {
        "buckets": "equi_width(x, 0, 40, 8)", "items": "count_min(k, width=1024)", "drawn": "reservoir(x, 400)",
        "p90": "quantile(x, 0.9)", "values": "distinct(x)", "n": "count()",
    }  # fmt: skip
    promised = [name for name in measures if name != "n"]
    world = run("p90", windows=windows, measures=measures, accuracy={"measure": promised})
    answers, held = early_answers(world), Counter[str]()
    assert len(answers) >= windows - 5
    for emission, answer in answers:
        values, keys = values_of(world, emission.window_start_ms)
        (row,), met = answer["data"], answer["contract"]["met"]
        assert answer["contract"]["requested"]["measure"] == promised and met
        assert answer["quality"]["prediction"].keys() == set(promised)
        true = np.histogram(values, np.linspace(0, 40, 9))[0]
        assert all(b["upper"] - b["lower"] <= 0.05 * len(values) for b in row["buckets"]["buckets"])
        held["buckets"] += all(holds(b, n) for b, n in zip(row["buckets"]["buckets"], true, strict=True))
        held["p90"] += holds(row["p90"], quantile_of(values, 0.9))
        held["values"] += holds(row["values"], len(np.unique(values)))
        assert row["drawn"]["mean"]["upper"] is None, "the values of the records that are out may be any"
        asked = MeasureQuestions(items=("g0",), ranges=(bounds,))
        of_asked = render(world.record(emission), world.query, asked)["data"][0]
        held["items"] += holds(of_asked["items"]["items"][0], keys.count("g0"))
        inside = float(((values >= bounds[0]) & (values <= bounds[1])).sum())
        held["drawn"] += holds(of_asked["drawn"]["ranges"]["2:14"], inside)
    assert min(held[name] for name in promised) >= least_covered(len(answers)), held


@pytest.fixture(scope="module")
def grouped() -> DataWorld:
    measures = {"total": "quantile(x, 0.5)", "n": "count()"}
    return run("total", windows=12, measures=measures, group_by=["k"], accuracy={"error": "10%"})


@pytest.mark.slow
def test_each_group_has_its_own_number_of_records_that_are_out(grouped: DataWorld) -> None:
    answers = early_answers(grouped)
    held = cells = 0
    for emission, answer in answers:
        assert "prediction" not in answer["quality"], "with groups it is in the rows"
        for row in answer["data"]:
            values, _ = values_of(grouped, emission.window_start_ms, row["group"]["k"])
            cells += 1
            held += holds(row["total"], quantile_of(values, 0.5))
    assert cells >= 4 * 7 and held >= least_covered(cells)


@pytest.mark.slow
def test_a_complete_answer_has_the_interval_of_the_synopsis_alone(grouped: DataWorld) -> None:
    later = [a for a in grouped.stated if a["phase"] != "early"]
    assert later and all(a["contract"]["met"] for a in later)
    for answer in later:
        for row in answer["data"]:
            cell = row["total"]
            assert cell["upper"] / cell["lower"] == pytest.approx(1.02, rel=2e-3), "the accuracy of a DDSketch"


@pytest.mark.slow
def test_another_question_and_another_confidence_have_their_own_interval(grouped: DataWorld) -> None:
    emission, _ = early_answers(grouped)[-1]
    record = grouped.record(emission)
    asked = render(record, grouped.query, MeasureQuestions(quantiles=(0.25,), ranks=(8.0,), confidence=0.99))
    for row in asked["data"]:
        values, _ = values_of(grouped, emission.window_start_ms, row["group"]["k"])
        assert holds(row["total"]["quantiles"]["0.25"], quantile_of(values, 0.25))
        assert holds(row["total"]["ranks"]["8"], float((values <= 8.0).mean()))
    assert asked["confidence"] == pytest.approx(0.95), "the confidence of the number of records"


@pytest.mark.slow
def test_an_explanation_says_how_much_the_records_that_are_out_widen_an_interval(grouped: DataWorld) -> None:
    emission, _ = early_answers(grouped)[-1]
    told = explain_value(grouped.record(emission), grouped.query, grouped.query.measures[0], NO_QUESTIONS)
    parts = {part["cause"]: part for part in told["parts"]}
    assert parts["sketch"]["above"] + parts["straggler"]["above"] == pytest.approx(told["upper"] - told["estimate"])
    assert parts["sketch"]["below"] + parts["straggler"]["below"] == pytest.approx(told["estimate"] - told["lower"])


@pytest.mark.nightly
def test_withheld_records_are_among_those_that_are_out() -> None:
    measures = {"total": "quantile(x, 0.5)", "n": "count()"}
    world = run("total", windows=14, measures=measures, budget={"error": {"total": "2%"}})
    answers = early_answers(world)
    assert len(answers) >= 9
    held = 0
    for emission, answer in answers:
        values, _ = values_of(world, emission.window_start_ms)
        held += holds(answer["data"][0]["total"], quantile_of(values, 0.5))
    assert held >= least_covered(len(answers))
    assert sum(answer["contract"]["met"] for _, answer in answers) >= 0.9 * len(answers)
    later = [a for a in world.stated if a["phase"] != "early"]
    assert any(a["quality"]["error"]["withheld"] for a in later) and all(a["contract"]["met"] for a in later)


@pytest.mark.slow
def test_a_roll_up_of_an_early_answer_has_no_bounds_and_does_not_meet_its_contract(grouped: DataWorld) -> None:
    emission, early = early_answers(grouped)[0]
    assert early["contract"]["met"]
    intervals = Intervals(grouped.query.window, f"{2 * WINDOW_MS}ms")
    (merged,) = roll_up([grouped.record(emission)], grouped.query, intervals)
    answer = render(merged, grouped.query)
    assert {row["total"]["upper"] for row in answer["data"]} == {None}
    assert {violation["code"] for violation in answer["contract"]["violations"]} == {"accuracy", "unanswered-windows"}


@pytest.mark.slow
def test_an_answer_whose_interval_is_wider_than_the_error_says_so() -> None:
    world = run("keys", windows=6, measures={"keys": "distinct(k)", "n": "count()"})
    answers: Sequence[tuple[Emission, dict[str, Any]]] = early_answers(world)
    assert answers
    for _, answer in answers:
        (cell,) = (row["keys"] for row in answer["data"])
        assert holds(cell, len(SHARES)) and cell["upper"] > 2 * len(SHARES)
        (violation,) = answer["contract"]["violations"]
        assert violation["code"] == "accuracy" and violation["message"].startswith("keys: a value may be off by")


@pytest.mark.nightly
def test_the_records_of_a_silent_edge_are_out_and_a_restart_of_the_job_changes_nothing() -> None:
    measures = {"values": "distinct(x)", "n": "count()"}
    sites = [Site.make(f"e{i}", i, 18, EXPONENTIAL, rate=1000.0, shares=SHARES) for i in range(3)]
    sites[1].cut = (BEGIN_MS + 8_000, BEGIN_MS + 11_500)
    accuracy = {"error": "5%", "measure": "values", "substream": "500ms"}
    world = DataWorld(spec(measures, accuracy=accuracy), sites)
    for _ in range(4):
        world.run(4)
        world.restart()
    stated = silent = 0
    for emission, answer in zip(world.answers, world.stated, strict=True):
        cell = answer["data"][0]["values"] if answer["data"] else {"upper": None}
        if answer["phase"] != "early" or cell["upper"] is None:
            continue
        values, _ = values_of(world, emission.window_start_ms)
        stated += 1
        assert holds(cell, len(np.unique(values))), answer
        if "e1" in answer["quality"]["accuracy"]["silent"]:
            silent += 1
            assert cell["upper"] > 1.3 * cell["estimate"] and not answer["contract"]["met"]
    assert stated > 10 and silent >= 3
