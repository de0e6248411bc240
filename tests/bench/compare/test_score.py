"""What `bench.compare` counts as an error, as a kept promise, and as late."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from bench.compare.score import SCRIPT_ENTRY_BYTES, WindowAnswer, best_that_fits, row
from bench.compare.ways import WAYS
from bench.compare.workload import Workload, prepare

FUNCTIONS = {"distinct": [{"DE": 3, "US": 100}, {"DE": 2}], "top": [{"DE,a": 9, "DE,b": 4, "US,a": 20}, {"DE,a": 1}]}
SUMS = [{"a,DE": (1000, 3), "b,US": (40, 1)}, {"a,DE": (500, 2)}]
SITE_SUMS = [[{"a,DE": 990, "b,US": 20}, {"a,DE": 500}], [{"a,DE": 10, "b,US": 20}, {}]]
LOAD = Workload([Path("site0.csv")], 0, 1000, 2, SUMS, 1000, FUNCTIONS, SITE_SUMS)
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


def test_functions_are_scored_by_their_stated_bounds() -> None:
    sums, bounds = {"DE": (3,), "US": (104,)}, {"DE": (3, 3), "US": (99, 109)}
    figures = row(WAYS["distinct"], LOAD, {0: WindowAnswer(0, 10.5, sums, True, bounds)}, ENDS)
    assert (figures["worst_error"], figures["contracts_kept"]) == (pytest.approx(0.04), 1)
    outside = {0: WindowAnswer(0, 10.5, sums, True, {**bounds, "US": (101, 109)})}
    assert row(WAYS["distinct"], LOAD, outside, ENDS)["contracts_kept"] == 0
    exact = {0: WindowAnswer(0, 10.5, {"DE": (3,), "US": (100,)}), 1: WindowAnswer(1, 20.5, {"DE": (1,)})}
    figures = row(WAYS["script-distinct"], LOAD, exact, ENDS)
    assert (figures["worst_error"], figures["contracts_kept"]) == (0.5, 1)


def test_a_missing_item_of_the_most_frequent_is_an_error_of_its_count() -> None:
    listed = {"DE,a": (8,), "US,a": (20,)}
    figures = row(WAYS["script-top"], LOAD, {0: WindowAnswer(0, 10.5, listed)}, ENDS)
    assert (figures["worst_error"], figures["contracts_kept"]) == (pytest.approx(0.2), 0)


def test_the_truth_of_functions_is_by_window_and_country(tmp_path: Path) -> None:
    columns = {"at_ms": [0, 1, 2, 1000], "package": ["a", "a", "b", "a"], "country": ["DE", "DE", "DE", "US"]}
    table = pa.table({**columns, "size": [5, 7, 6, 1], "client": [1, 1, 2, 1]})
    load = prepare(tmp_path, table, 2, 0, 1000, 2, 0.0)
    assert load.functions == {
        "distinct": [{"DE": 2}, {"US": 1}],
        "p99": [{"DE": 6}, {"US": 1}],
        "top": [{"DE,a": 2, "DE,b": 1}, {"US,a": 1}],
    }


@pytest.mark.parametrize(("entries", "error"), [(0, 1.0), (1, 0.02), (2, 0.0)])
def test_the_best_that_fits_has_the_largest_sums_of_each_site(entries: int, error: float) -> None:
    assert best_that_fits(LOAD, entries * SCRIPT_ENTRY_BYTES + 1) == pytest.approx(error)
    assert best_that_fits(LOAD, None) is None
