from __future__ import annotations

import numpy as np
import pytest

from bench.early_answers_e2e.edges import PushSchedule
from bench.truth import processes
from bench.truth.arrivals import SOURCES, LateRecords
from bench.truth.cases import Case, Tallies, Tally, band, is_below, is_fault, rows
from bench.truth.page import BEGIN, END, render, written


def case(state: str = "steady", listed: str = "") -> Case:
    named = {"mean": listed} if listed else {}
    return Case("a", "normal, n = 5", state, "estimator", lambda seed, trials: {}, listed=named)  # type: ignore[arg-type]


def tallies(held: int, confidence: float = 0.95) -> Tallies:
    return {("mean", confidence): Tally(1200, 1000, held)}


def test_the_band_is_that_of_the_binomial_distribution() -> None:
    low, high = band(0.95, 1000)
    assert (low, high) == pytest.approx((0.925, 0.971), abs=0.002)
    assert band(1.0, 1000) == (1, 1) and band(0.5, 1) == (0, 1)


def test_a_coverage_below_its_band_is_a_fault_unless_a_page_lists_it() -> None:
    (fine,), (below,), (listed,), (certain,) = (
        rows(case(), tallies(930)), rows(case(), tallies(910)), rows(case(listed="docs/a.md"), tallies(910)),
        rows(case(), tallies(999, 1.0)),
    )  # fmt: skip
    assert (fine["coverage"], fine["trials"], fine["unstated"]) == (0.93, 1000, 200) and not is_below(fine)
    assert is_fault(below) and is_fault(certain)
    assert is_below(listed) and not is_fault(listed)


def test_unknown_bounds_state_nothing() -> None:
    tally = Tally()
    for lower, upper in ((None, None), (float("nan"), float("inf")), (1.0, None), (3.0, 4.0)):
        tally.note(lower, upper, 2.0)
    assert (tally.trials, tally.stated, tally.held) == (4, 2, 1)


def test_a_page_gets_new_tables_and_keeps_those_of_other_states() -> None:
    page = f"# Head\n\n{BEGIN}\n\n{render(rows(case('cold'), tallies(940)))}\n\n{END}\n"
    page = written(page, rows(case(), tallies(910)))
    assert page.index("### Estimator, cold") < page.index("| mean | 94 |") < page.index("### Estimator, steady")
    assert "| mean | **91** |" in page and "| mean | normal, n = 5 | 0.95 | 0.910 |" in page
    assert written(page, rows(case(), tallies(960))).count("###") == 2


def test_answers_of_processes_are_counted_by_what_was_pushed_where_they_are_early() -> None:
    def answer(phase: str, lower: float | None, met: bool = True) -> tuple[float, dict[str, object]]:
        cell = {"estimate": 10.0, "lower": lower, "upper": lower and lower + 2.0}
        return 0.0, {"phase": phase, "data": [{"total": cell}], "contract": {"met": met}}

    seen = {
        ("q", 0, 2): answer("final", 9.0), ("q", 0, 1): answer("early", 9.0), ("q", 1_000, 1): answer("early", 11.0),
        ("q", 2_000, 1): answer("early", None, met=False), ("q", 3_000, 1): answer("complete", 9.0),
        ("p", 4_000, 1): answer("early", 9.0),
    }  # fmt: skip
    pushed = [PushSchedule(np.array([t, t + 999]), np.zeros(2), np.array([4.0, 6.0])) for t in (0, 1_000, 2_000, 3_000)]
    tallies: Tallies = {}
    processes.count(tallies, seen, "q", range(0, 6_000, 1_000), "sum", 0.95, pushed)
    assert tallies["early sum", 0.95] == Tally(3, 2, 1) and tallies["early sum, met", 0.95] == Tally(2, 2, 2)


def test_processes_get_the_records_of_the_production_cores() -> None:
    window = LateRecords("exponential", windows=1, seed=3, rate=processes.RATE).window(0)
    pushed = processes.schedules("exponential", 3, 1, 5_000)
    assert len(pushed) == SOURCES and sum(len(s.values) for s in pushed) == len(window)
    assert sum(s.truth(5_000, 6_000) for s in pushed) == pytest.approx(window.value.sum())
    assert all((np.diff(s.arrival) >= 0).all() and (s.arrival >= s.event_ms).all() for s in pushed)
