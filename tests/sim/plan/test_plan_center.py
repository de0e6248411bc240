"""`edgewater plan center`: its costs are stated by the cited pages, its sums by docs/explanation/scale.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgewater.__main__ import main
from edgewater.model.errors import InvalidConfig
from sim.plan.center import COSTS, Queries, Workload, cores, plan_center

ROOT = Path(__file__).resolve().parents[3]
STATED = {
    "frame": "| 0.78 ms |", "session": "10,000 idle edges take 0.25 of a core", "session_memory": "| 75 kB |",
    "join": "| 2.4 ms |", "row": "| catalog, row of a frame | 31 µs |", "merge": "103 + 95 + 220 µs",
    "merge_kb": "| 200 KB, of 8 edges | 224 | 45 | 6,900 |", "facts": "1.2 cores", "jvm": "103 + 95 + 220 µs",
    "ledger": "| 30 µs, 111 B |", "answer": "| 1.2 ms |", "takeover": "25 µs", "idle_bytes": "57 B/s at rest",
}  # fmt: skip
"""How the cited page states each cost."""
MILLION_PAIRS = Workload(10_000, (Queries(1000, 60_000),), 1000)


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", "center", *arguments])


@pytest.mark.parametrize("name", COSTS)
def test_each_cost_is_stated_by_the_page_that_it_cites(name: str) -> None:
    page = ROOT / COSTS[name].source.partition(":")[0]
    assert STATED[name] in page.read_text()


def test_a_million_pairs_need_what_the_page_on_scale_says() -> None:
    frames = MILLION_PAIRS.frames_s
    assert (MILLION_PAIRS.pairs, round(frames, -2)) == (1_000_000, 16_700)
    assert round(cores(frames, "frame")) == 13
    assert round(cores(frames, "row"), 1) == 0.5
    assert round(cores(frames, "merge"), 1) == 3.7
    assert round(cores(frames, "facts"), 1) == 1.2
    assert round(cores(frames, "jvm"), 1) == 1.6
    assert round(cores(frames, "ledger"), 1) == 0.5
    assert round(cores(MILLION_PAIRS.answers_s, "answer"), 2) == 0.02
    assert cores(MILLION_PAIRS.pairs, "takeover") == 25
    assert plan_center(MILLION_PAIRS).settings["spark.drivers"] == 5, "a takeover within 5 s wants five"


def test_more_of_anything_needs_no_less() -> None:
    small = Workload(100, (Queries(10, 60_000),), 100)
    for large in (
        Workload(100_000, (Queries(10, 60_000),), 100_000),
        Workload(100, (Queries(10_000, 60_000),), 100),
        Workload(100, (Queries(10, 1_000),), 100),
        Workload(100, (Queries(10, 60_000),), 100, partial_bytes=200_000),
    ):
        less, more = plan_center(small), plan_center(large)
        assert all(a.pods <= b.pods for a, b in zip(less.pods, more.pods, strict=True))
        assert less.bytes_per_day["from_edges"] < more.bytes_per_day["from_edges"]


def test_a_small_center_has_pods_that_one_node_may_lose() -> None:
    pods = {each.part: each for each in plan_center(Workload(3, (Queries(1, 60_000),), 3)).pods}
    assert {part: each.pods for part, each in pods.items()} == {"gateway": 2, "job": 2, "executor": 2, "api": 2}


def test_windows_of_all_lengths_count_and_json_has_every_cost() -> None:
    shown = json.loads(plan("--edges", "60", "--queries", "10@1m", "--queries", "6@1h", "--json").stdout)
    assert shown["rates"]["frames_s"] == pytest.approx(60 * (10 / 60 + 6 / 3600))
    assert shown["bytes_per_day"]["from_edges"] == (60 * (10 * 1440 + 6 * 24) * 3600) + 60 * 57 * 86_400
    assert {cost["source"] for cost in shown["costs"]} == {cost.source for cost in COSTS.values()}


def test_the_text_shows_pods_settings_and_costs_and_notes_what_is_beyond_the_measurements() -> None:
    shown = plan("--edges", "10000", "--queries", "1000@1m")
    assert shown.exit_code == 0
    for expected in (
        "gateway",
        "spark.drivers",
        "31 µs",
        "note: 166,667 rows of frames a second",
        "300 ms in its driver",
    ):
        assert expected in shown.stdout, expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--queries", "200"), "COUNT@WINDOW"),
        (("--queries", "0@1m"), "COUNT@WINDOW"),
        (("--queries", "2@soon"), "a duration such as"),
        (("--queries", "2@1m", "--edges-per-query", "101"), "1 to the 100 of --edges"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_value_that_is_right(
    arguments: tuple[str, ...], message: str
) -> None:
    refused = plan("--edges", "100", *arguments)
    assert refused.exit_code == 2 and message in refused.output


def test_a_number_of_queries_is_read() -> None:
    assert Queries.parse("200@1m") == Queries(200, 60_000)
    with pytest.raises(InvalidConfig):
        Queries.parse("x@1m")
