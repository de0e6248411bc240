"""Functions of a sample, from production edges to what a reader gets: k-means and exact quantiles under an accuracy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from center.job.function_rates import FunctionRates
from center.results import AnswerRecord
from center.serving.evaluator import Evaluator
from center.serving.measures import MeasureQuestions
from center.serving.question_lines import read_question
from center.serving.stored_windows import StoredWindows
from center.serving.synopsis_cache import SynopsisCache
from edge.core.core import EdgeCore
from edge.core.events import SamplingSet
from edge.core.streams import StreamSpec
from edgewater.answers import Phase, WithheldBound
from edgewater.base.streams import LIVE
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.synopses import function_named
from tests.center.accuracy_world import BEGIN_MS, COLUMNS, DISORDER_MS, REF, WINDOW_MS, spec
from tests.center.rendered import render, to_table
from tests.center.stored_world import Stored, stored

pytestmark = pytest.mark.slow

TARGET = 0.05
RATE = 4_000.0


def quantile_spec(**parts: Any) -> QuerySpec:
    accuracy = {"error": "5%", "confidence": "95%"}
    return spec({"p": "exact_quantile(x, q=0.5)"}, accuracy=accuracy, **parts)


def told(world: Stored, rate: float) -> None:
    for site in world.sites:
        site.core.handle(SamplingSet(REF, rate, 0.0))


def run_planned(world: Stored, seconds: int) -> list[float]:
    """Runs, and after each second tells the edges what the newest answer says is needed. The rates told."""
    plan, rates = FunctionRates(), [1.0]
    for _ in range(seconds):
        world.run(1)
        record = world.store.latest(REF)
        if record is None or plan.has_seen(record):
            continue
        plan.add(record, world.query)
        rates.append(plan.rate)
        told(world, plan.rate)
    return rates


def answers(world: Stored) -> list[tuple[AnswerRecord, dict[str, Any]]]:
    records, _ = world.store.windows(REF, None, None, 100, None)
    return [(r, render(r, world.query)) for r in records if r.phase is not Phase.EARLY]


def values_of(world: Stored, start_ms: int) -> np.ndarray[Any, Any]:
    inside = [s.values[(s.born >= start_ms) & (s.born < start_ms + WINDOW_MS)] for s in world.sites]
    return np.concatenate(inside)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stored, list[float]]:
    world = stored(tmp_path_factory.mktemp("functions"), quantile_spec(), rate=RATE, seconds=26)
    return world, run_planned(world, 25)


@pytest.mark.nightly
def test_edges_sample_what_the_contract_needs_and_answers_keep_it(planned: tuple[Stored, list[float]]) -> None:
    world, rates = planned
    given = answers(world)
    assert len(given) >= 20

    held = close = 0
    for record, answer in given:
        truth = float(np.quantile(values_of(world, record.window_start_ms), 0.5, method="inverted_cdf"))
        (row,) = answer["data"]
        cell = row["p"]
        held += cell["lower"] <= truth <= cell["upper"]
        close += abs(cell["estimate"] - truth) <= TARGET * truth
        assert answer["contract"]["met"] == (cell["error"] <= TARGET), answer["contract"]
    # P(fewer than 18 of 20) is 1.6 % at 95 % each; here nearly all, as bounds are values of the sample.
    assert held >= len(given) - 2
    assert close >= len(given) - 2
    assert rates[-1] < 0.5, "a sample is enough"
    assert sum(a["contract"]["met"] for _, a in given) >= len(given) - 2


def test_all_rows_are_shipped_until_the_needed_rate_is_known(planned: tuple[Stored, list[float]]) -> None:
    world, _ = planned
    first, last = answers(world)[0][1], answers(world)[-1][1]

    assert first["data"][0]["p"]["rate"] == 1.0
    assert first["data"][0]["p"]["error"] == 0
    assert first["quality"]["accuracy"]["sampling"].startswith("not sampled")
    assert last["quality"]["accuracy"]["sampling"] == "sampled: the measure is expensive"
    assert last["quality"]["records"]["sampled"] < last["quality"]["records"]["observed"]
    assert last["contract"]["requested"] == {"error": 0.05, "confidence": 0.95, "measure": "p"}


def test_a_sample_that_is_too_small_violates_the_contract(tmp_path: Path) -> None:
    world = stored(tmp_path, quantile_spec(), rate=RATE, seconds=9)
    told(world, 0.01)
    world.run(8)

    answer = answers(world)[-1][1]

    assert not answer["contract"]["met"]
    (violation,) = answer["contract"]["violations"]
    assert violation["code"] == "accuracy"
    assert "the target is 5 %" in violation["message"]


@pytest.mark.nightly
def test_the_contract_covers_the_whole_answer_whatever_part_is_requested(tmp_path: Path) -> None:
    query = quantile_spec(group_by=["k"])
    world = stored(tmp_path, query, rate=RATE, seconds=9, shares=(20.0, 1.0))
    told(world, 0.2)
    world.run(8)
    record, answer = answers(world)[-1]
    assert not answer["contract"]["met"], "the smaller group has too few"

    asked = [
        MeasureQuestions(groups=(("k", ("g0",)),)), MeasureQuestions(confidence=0.1), MeasureQuestions(values=True),
    ]  # fmt: skip
    rendered = [render(record, query, each) for each in asked]

    assert [r["contract"] for r in rendered] == [answer["contract"]] * 3
    assert [r["quality"] for r in rendered] == [answer["quality"]] * 3
    assert rendered[0]["data"] == answer["data"][:1]


def test_a_revised_window_replaces_its_own_plan_only(tmp_path: Path) -> None:
    query = quantile_spec()
    world = stored(tmp_path, query, rate=RATE, seconds=9)
    world.run(8)
    (first, _), (second, _), *_ = answers(world)
    plan = FunctionRates()
    plan.add(first, query)
    alone = plan.rate

    plan.add(replace(second, synopsis=None), query)
    plan.add(replace(second, revision=second.revision + 1), query)

    assert plan.rate >= alone


@pytest.mark.nightly
def test_groups_have_a_value_and_a_sample_each(tmp_path: Path) -> None:
    query = quantile_spec(group_by=["k"])
    world = stored(tmp_path, query, rate=RATE, seconds=9, shares=(5.0, 1.0))
    told(world, 0.3)
    world.run(8)

    record, answer = answers(world)[-1]

    assert [row["group"] for row in answer["data"]] == [{"k": "g0"}, {"k": "g1"}]
    sizes = [row["p"]["size"] for row in answer["data"]]
    assert sizes[0] > 3 * sizes[1]
    assert to_table(record, query).column_names == ["k", "p", "p_lower", "p_upper", "p.error", "p.size", "p.rate"]


@pytest.mark.nightly
def test_kmeans_gives_named_numbers_and_a_stream_of_questions_gets_them_too(tmp_path: Path) -> None:
    query = spec({"c": "kmeans(x, x * x, k=2)"}, accuracy={"error": "20%", "measure": "c"})
    world = stored(tmp_path, query, rate=RATE, seconds=9)
    told(world, 0.5)
    world.run(8)
    record, answer = answers(world)[-1]

    cell = answer["data"][0]["c"]
    decoded = SynopsisCache(1 << 20)
    registered = RegisteredQuery(REF, query, 0, None)
    asked = Evaluator(StoredWindows(world.store, registered, decoded, lambda name: registered), decoded)
    (line,) = asked.answer(read_question({"id": 1, "window": record.window_start_ms}))

    names = [value["name"] for value in cell["values"]]
    assert names == ["centroids[0][0]", "centroids[0][1]", "centroids[1][0]", "centroids[1][1]", "inertia"]
    function = function_named("kmeans")
    assert function is not None and function.sample is not None
    x = values_of(world, record.window_start_ms)
    truth = function.sample.fit(np.column_stack([x, x * x]), {"k": 2}, None)
    assert [v["estimate"] for v in cell["values"]] == pytest.approx(truth, rel=0.2)
    assert line["values"] == cell["values"]
    assert line["confidence"] == 0.95
    assert to_table(record, query, MeasureQuestions()).num_columns == 5 * 3 + 3


def test_with_other_measures_nothing_is_sampled(tmp_path: Path) -> None:
    query = spec({"p": "exact_quantile(x)", "n": "count()"}, accuracy={"error": "5%", "measure": "p"})
    world = stored(tmp_path, query, rate=300.0, seconds=9)
    world.run(8)

    _, answer = answers(world)[-1]

    assert answer["quality"]["accuracy"]["sampling"].endswith("which sampling would distort")
    assert answer["contract"]["met"]


def test_an_edge_that_recovers_goes_on_at_its_rate(tmp_path: Path) -> None:
    query = quantile_spec(window={"tumbling": "1h"})
    one = stored(tmp_path / "one", query, rate=RATE, seconds=9)
    other = stored(tmp_path / "other", query, rate=RATE, seconds=9)
    for world in (one, other):
        world.run(2)
        told(world, 0.25)
        world.run(2)
    for site in other.sites:
        core = EdgeCore({"s": StreamSpec(COLUMNS, LIVE, DISORDER_MS, 3_000)}, source=0)
        core.restore(site.core.to_state())
        site.core = core
    for world in (one, other):
        told(world, 1.0)  # too late for the slice that has begun
        world.run(2)

    held = [s.core.to_state() for w in (one, other) for s in w.sites]

    assert held[:2] == held[2:]


def test_a_plan_is_for_the_neediest_of_the_last_windows(planned: tuple[Stored, list[float]]) -> None:
    world, _ = planned
    records, _ = world.store.windows(REF, BEGIN_MS, None, 12, None)
    alone = []
    for record in records:
        plan = FunctionRates()
        plan.add(record, world.query)
        alone.append(plan.rate)
    plan = FunctionRates()
    assert plan.rate == 1.0

    for record in records:
        plan.add(record, world.query)
        assert plan.has_seen(record)

    assert plan.rate == pytest.approx(max(alone[-5:]))


def test_withheld_rows_make_the_bounds_unknown(tmp_path: Path) -> None:
    query = spec({"p": "exact_quantile(x)"}, accuracy=None, budget={"error": {"p": 50}})
    world = stored(tmp_path, query, rate=300.0, seconds=9)
    world.run(8)
    record, _ = answers(world)[-1]
    facts = replace(record.facts, withheld={"p": WithheldBound(20.0, 20.0)})

    cell = render(replace(record, facts=facts), query)["data"][0]["p"]

    assert cell["estimate"] is not None
    assert (cell["lower"], cell["upper"], cell["error"]) == (None, None, None)


@pytest.mark.nightly
def test_a_value_is_computed_once_for_all_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = spec({"c": "kmeans(x, k=2)"}, accuracy={"error": "20%", "measure": "c"})
    world = stored(tmp_path, query, rate=300.0, seconds=9)
    told(world, 0.5)
    world.run(8)
    (record, first), *_ = reversed(answers(world))
    function = function_named("kmeans")
    assert function is not None and function.sample is not None
    calls: list[int] = []
    fit = type(function.sample).fit
    monkeypatch.setattr(
        type(function.sample), "fit", lambda self, rows, *rest: calls.append(len(rows)) or fit(self, rows, *rest)
    )

    assert render(record, query) == first
    assert to_table(record, query).num_rows == 1
    assert not calls

    render(record, query, MeasureQuestions(confidence=0.8))
    assert calls, "another confidence is another interval"
