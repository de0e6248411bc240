"""What `bench.compare` counts as an error, as a kept promise, and as late."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.compare.score import WindowAnswer, row
from bench.compare.ways import WAYS
from bench.compare.workload import Workload

LOAD = Workload([Path("site0.csv")], 0, 1000, 2, [{"a,DE": (1000, 3), "b,US": (40, 1)}, {"a,DE": (500, 2)}], 1000)
ENDS = [10.0, 20.0]


def test_a_missing_group_and_an_invented_group_are_errors_of_their_whole_value() -> None:
    answers = {
        0: WindowAnswer(0, 10.5, {"a,DE": (1000, 3)}),
        1: WindowAnswer(1, 20.5, {"a,DE": (500, 2), "c,FR": (7, 1)}),
    }
    figures = row(WAYS["script-1%"], LOAD, answers, ENDS)
    assert figures["worst_error"] == pytest.approx(0.04)
    assert figures["contracts_kept"] == 1
    assert figures["p50_s"] == pytest.approx(0.5)


def test_a_promise_of_error_and_deadline_is_kept_only_if_both_are() -> None:
    sums = LOAD.sums
    in_time = {0: WindowAnswer(0, 12.04, sums[0], True), 1: WindowAnswer(1, 22.2, sums[1], True)}
    figures = row(WAYS["error-1%-2s"], LOAD, in_time, ENDS)
    assert (figures["contracts_kept"], figures["stated_met"]) == (1, 2)


def test_windows_without_an_answer_count_as_not_kept() -> None:
    figures = row(WAYS["exact"], LOAD, {}, ENDS)
    assert (figures["windows"], figures["contracts_kept"], figures["p95_s"]) == (0, 0, None)


def test_groups_by_country_are_compared_with_totals_of_countries() -> None:
    answers = {0: WindowAnswer(0, 10.1, {"DE": (990, 3), "US": (40, 1)}, True)}
    figures = row(WAYS["accuracy-5%"], LOAD, answers, ENDS)
    assert figures["worst_error"] == pytest.approx(0.01)
    assert figures["contracts_kept"] is None


def test_queries_have_the_budget_in_bytes_of_the_largest_group() -> None:
    query = WAYS["error-1%-2s"].query(2_170_177_997, ["site0"])
    assert query["budget"] == {"error": {"bytes": 21_701_779}, "staleness": "2s"}
    accuracy = WAYS["accuracy-5%"].query(1, [])["accuracy"]
    assert accuracy == {"error": "5%", "confidence": "95%", "measure": "bytes"}, "the query has two measures"
