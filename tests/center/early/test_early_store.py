"""Early answers in the result store and as clients receive them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from center.job.batch_applier import to_batch
from center.job.metrics import JobMetrics
from center.serving.evaluator import Evaluator
from center.serving.measures import MeasureQuestions
from center.serving.question_lines import read_question
from center.serving.stored_windows import StoredWindows
from center.serving.synopsis_cache import SynopsisCache
from center.storage.frame_log import FrameEntry
from edgewater.answers import Phase
from edgewater.base.streams import EdgeId
from edgewater.model.registered_query import RegisteredQuery
from edgewater.wire import Arrivals, FrameBody, Partial
from tests.center.accuracy_world import BEGIN_MS, REF, spec
from tests.center.kept_frames import facts_of_frame, partials_of_frame
from tests.center.rendered import render, to_table
from tests.center.stored_world import KEY, Stored, stored

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    world = stored(tmp_path_factory.mktemp("store"))
    world.run(8)
    return world


def shown(world: Stored, window: int, revision: int) -> dict[str, Any]:
    return render(world.store.answer(REF, BEGIN_MS + window * 1_000, revision), world.query)


def test_an_early_answers_number_is_the_predicted_one_with_its_interval_and_causes(world: Stored) -> None:
    answer = shown(world, 4, 1)
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    assert (answer["phase"], answer["confidence"]) == ("early", 0.95)
    (row,) = answer["data"]
    cell, truth = row["total"], world.truth(BEGIN_MS + 4_000)
    assert cell["lower"] < cell["estimate"] < cell["upper"]
    assert abs(cell["estimate"] - truth) / truth < 0.05
    assert row["n"]["estimate"] > 0 and row["n"]["lower"] is None, "of the others the stragglers are not known"
    assert answer["contract"] == {
        "requested": {"error": 0.05, "confidence": 0.95, "measure": "total"}, "met": True, "violations": [],
        "uncovered": ["n"],
    }  # fmt: skip
    quality = answer["quality"]
    causes = quality["error"]
    assert set(causes) == {"rounding", "sketch", "sampling", "straggler", "withheld", "missing"}
    assert causes["straggler"]["total"] > 0 and causes["missing"]["total"] == 0
    assert causes["sampling"]["n"] is causes["straggler"]["n"] is causes["missing"]["n"] is None
    half = (causes["sampling"]["total"] ** 2 + causes["straggler"]["total"] ** 2) ** 0.5
    assert cell["upper"] - cell["estimate"] == pytest.approx(half)
    assert quality["records"]["observed"] < quality["records"]["expected"]
    assert quality["records"]["sampled"] == quality["records"]["observed"]
    accuracy = quality["accuracy"]
    assert set(accuracy) == {"measure", "sampling", "waited_ms", "coverage", "covered", "straggler_share", "silent"}
    assert 0 < accuracy["straggler_share"] < 0.3 and accuracy["silent"] == []
    assert accuracy["sampling"].startswith("not sampled")


def test_the_same_answer_as_a_table_has_the_predicted_numbers(world: Stored) -> None:
    record = world.store.answer(REF, BEGIN_MS + 4_000, 1)
    cell = shown(world, 4, 1)["data"][0]["total"]
    row = to_table(record, world.query).to_pylist()[0]
    assert [row["total"], row["total_lower"], row["total_upper"]] == [cell["estimate"], cell["lower"], cell["upper"]]
    assert row["n_lower"] is None


def test_questions_about_an_early_answer_have_its_interval_or_none(
    world: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [RegisteredQuery(REF, world.query, 0, None)]
    windows = StoredWindows(world.store, found[0], SynopsisCache(1 << 20), lambda name: found[0])
    early = [windows._take(world.store.answer(REF, BEGIN_MS + n * 1_000, 1)) for n in (4, 5)]
    monkeypatch.setattr(StoredWindows, "latest", lambda self, count: early[:count])

    def ask(**line: Any) -> dict[str, Any]:
        (answer,) = Evaluator(windows, SynopsisCache(1 << 20)).answer(read_question(line))
        return answer

    cell = shown(world, 4, 1)["data"][0]["total"]
    answer = ask(latest=1, measure="total")
    assert {n: answer[n] for n in cell} == cell and answer["confidence"] == 0.95
    for unknown in (
        ask(latest=1, measure="n"), ask(latest=1, measure="total", question="count"),
        ask(latest=2, measure="total", merge=True),
    ):  # fmt: skip
        assert unknown["estimate"] > 0 and unknown["lower"] is unknown["upper"] is None


def test_the_final_answer_is_the_data_and_says_whether_the_early_one_held(world: Stored) -> None:
    last = max(world.store.revisions(REF, BEGIN_MS + 3_000))
    answer = shown(world, 3, last)
    assert answer["phase"] == "final"
    cell, truth = answer["data"][0]["total"], world.truth(BEGIN_MS + 3_000)
    assert cell["estimate"] == cell["lower"] == cell["upper"] == pytest.approx(truth)
    assert "prediction" not in answer["quality"]
    assert answer["quality"]["accuracy"]["covered"] is True


@pytest.mark.nightly
def test_a_job_that_crashes_and_reads_its_store_gives_the_answers_of_one_that_does_not(
    world: Stored, tmp_path: Path
) -> None:
    cut = stored(tmp_path)
    for _ in range(8):
        cut.run(1.0)
        cut.crash(tmp_path)
    assert cut.answers == world.answers
    assert [e.phase for e in cut.answers].count(Phase.FINAL) >= 3


def test_each_group_of_an_early_answer_has_its_own_interval_and_a_rare_one_none(tmp_path: Path) -> None:
    accuracy = {"error": "20%", "measure": "total", "substream": "500ms"}
    measures = {"total": "sum(x)", "n": "count()", "each": "total / n", "double": "2 * total"}
    query = spec(measures, group_by=["k"], accuracy=accuracy)
    world = stored(tmp_path, query, shares=(1.0, 1.0, 0.02))
    for _ in range(4):
        world.run(2.0)
        world.crash(tmp_path)
    answer, rare = shown(world, 5, 1), 0
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    assert (answer["phase"], answer["confidence"]) == ("early", 0.95)
    assert answer["contract"]["met"] and answer["contract"]["requested"]["scope"] == "each"
    for row in answer["data"]:
        group, cell = int(row["group"]["k"][1:]), row["total"]
        assert row["each"]["estimate"] is None, "all of the sum is estimated, and only a part has been counted"
        assert row["double"]["estimate"] == 2 * cell["estimate"]
        assert (row["double"]["lower"] is None) == (cell["lower"] is None)
        if group == 2:
            rare += 1
            assert cell["estimate"] > 0 and cell["lower"] is None and cell["upper"] is None
            continue
        truth = world.truth(BEGIN_MS + 5_000, "sum", group)
        assert cell["lower"] < cell["estimate"] < cell["upper"] and abs(cell["estimate"] - truth) / truth < 0.2
    assert rare == 1 and answer["quality"]["accuracy"]["groups"] == {"eligible": 2, "met": 2, "waiting": 1}
    record = world.store.answer(REF, BEGIN_MS + 5_000, 1)
    table = {row["k"]: row for row in to_table(record, query).to_pylist()}
    for row in answer["data"]:
        columns = table[row["group"]["k"]]
        assert [columns["total"], columns["total_lower"], columns["total_upper"]] == list(row["total"].values())
    asked = render(record, query, MeasureQuestions(groups=(("k", ("g1",)),)))
    assert asked["data"] == [row for row in answer["data"] if row["group"]["k"] == "g1"]
    last = shown(world, 3, max(world.store.revisions(REF, BEGIN_MS + 3_000)))
    assert last["phase"] == "final" and "groups" not in last["quality"]["accuracy"]
    for row in last["data"]:
        truth = world.truth(BEGIN_MS + 3_000, "sum", int(row["group"]["k"][1:]))
        assert row["total"]["lower"] == row["total"]["upper"] == pytest.approx(truth)
        assert row["each"]["estimate"] == pytest.approx(truth / row["n"]["estimate"])


@pytest.mark.nightly
def test_an_early_answer_of_a_synopsis_is_the_same_as_json_as_a_table_and_to_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracy = {"error": "10%", "measure": "users", "substream": "500ms"}
    query = spec({"users": "distinct(x)", "n": "count()"}, group_by=["k"], accuracy=accuracy)
    world = stored(tmp_path, query, shares=(1.0, 1.0))
    world.run(8.0)
    answer, record = shown(world, 5, 1), world.store.answer(REF, BEGIN_MS + 5_000, 1)
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    assert (answer["phase"], answer["contract"]["met"]) == ("early", True)
    assert answer["confidence"] == pytest.approx(0.95)
    assert answer["quality"]["error"]["straggler"]["users"] > 0 and answer["quality"]["error"]["sketch"]["users"] > 0
    table = {row["k"]: row for row in to_table(record, query).to_pylist()}
    found = RegisteredQuery(REF, query, 0, None)
    windows = StoredWindows(world.store, found, SynopsisCache(1 << 20), lambda name: found)
    monkeypatch.setattr(StoredWindows, "latest", lambda self, count: [windows._take(record)])

    def ask(**line: Any) -> dict[str, Any]:
        question = read_question({"latest": 1, "measure": "users", **line})
        (answered,) = Evaluator(windows, SynopsisCache(1 << 20)).answer(question)
        return answered

    assert len(answer["data"]) == 2
    for row in answer["data"]:
        cell, columns = row["users"], table[row["group"]["k"]]
        truth = world.truth(BEGIN_MS + 5_000, "count", int(row["group"]["k"][1:]))  # all values differ
        assert cell["lower"] <= truth <= cell["upper"]
        assert [columns["users"], columns["users_lower"], columns["users_upper"]] == list(cell.values())
        asked = ask(group=row["group"], confidence=0.975)
        assert {name: asked[name] for name in cell} == cell and asked["confidence"] == pytest.approx(0.95)
    merged = ask(**{"global": True})
    assert merged["estimate"] > 0 and merged["lower"] is merged["upper"] is None


def test_a_group_that_is_expected_and_has_not_come_has_a_row(world: Stored, tmp_path: Path) -> None:
    query = spec(group_by=["k"], accuracy={"error": "30%", "measure": "total", "substream": "500ms"})
    silent = stored(tmp_path, query, shares=(1.0, 1.0))
    silent.sites[0].group[:] = 0
    silent.sites[1].group[:] = 1
    silent.sites[1].cut = (BEGIN_MS + 5_000, BEGIN_MS + 9_000)
    silent.run(8.5)
    answer = shown(silent, 6, 1)
    (row,) = [row for row in answer["data"] if row["group"]["k"] == "g1"]
    assert answer["quality"]["accuracy"]["silent"] == ["e1"]
    truth, cell = silent.truth(BEGIN_MS + 6_000, "sum", 1), row["total"]
    assert cell["lower"] < truth < cell["upper"] and abs(cell["estimate"] - truth) / truth < 0.3


def test_the_jobs_metrics_say_what_intervals_and_waits_have_been(world: Stored) -> None:
    metrics = JobMetrics()
    for emission in world.answers:
        metrics.observe_accuracy(emission)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"edgewater_job_{name}", {"query": "q", **labels})

    finals = [e.facts.accuracy for e in world.answers if e.phase is Phase.FINAL]
    covered = [said.covered for said in finals if said is not None and said.covered is not None]
    assert value("verified_intervals_total", held="yes") == sum(covered) > 0
    coverage = value("interval_coverage_ratio")
    assert coverage is not None and 0 < coverage <= 1
    first_early = [e for e in world.answers if e.revision == 1 and e.phase is Phase.EARLY]
    assert value("chosen_wait_seconds_count") == len(first_early)
    share = value("straggler_share")
    assert share is not None and 0 <= share < 0.3


def test_arrivals_reach_the_driver_with_the_facts_of_the_frame() -> None:
    body = FrameBody(7, (Partial(0, b"synopsis"),), arrivals=Arrivals(5, (b"a", b"bc")))
    entry = FrameEntry(REF, 1, EdgeId("e"), "i", 1, 0, "segment", 0, 9, 9, BEGIN_MS)
    batch = to_batch([(KEY, entry)], partials_of_frame(entry, body), [], {KEY: {1: facts_of_frame(body)}})
    assert [s.arrivals for s in batch.summaries] == [body.arrivals]
