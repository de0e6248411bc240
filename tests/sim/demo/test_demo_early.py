"""The demo's landings, and how its early answers are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgewater.base.errors import InvalidRequest
from edgewater.base.quantities import duration_ms
from sim.demo.compare import compare_early
from sim.demo.data import AIRPORTS, TIME, load
from sim.demo.landings import DISORDER, landings
from sim.demo.queries import SPECS

SPEC = next(spec for spec in SPECS if "accuracy" in spec)


def answer(day: int, phase: str, second: int, estimate: float, lower: float | None, upper: float | None) -> Any:
    return {
        "window": {"start": f"2013-10-{day:02}T00:00:00Z"},
        "phase": phase,
        "contract": {"met": estimate != 150},
        "given_at": f"2026-01-01T00:{day:02}:{second:02}Z",
        "data": [{"group": {}, "miles": {"estimate": estimate, "lower": lower, "upper": upper}}],
    }


def test_no_landing_is_late_for_the_declared_disorder_and_a_shorter_one_would_lose_some() -> None:
    table = landings(load())
    declared = duration_ms(DISORDER, "disorder", InvalidRequest)
    behind = 0
    for airport in AIRPORTS:
        times = np.asarray(table[TIME])[np.asarray(table["origin"]) == airport]
        behind = max(behind, int((np.maximum.accumulate(times) - times).max()))
    assert declared - 2 * 3_600_000 < behind < declared


@pytest.mark.parametrize(("misses", "met"), [(0, True), (2, True), (12, False)])
def test_the_comparison_counts_intervals_that_held_and_fails_if_too_many_missed(misses: int, met: bool) -> None:
    days = range(1, 15)
    firsts = [answer(d, "early", 1, 104 if d > misses else 150, 95 if d > misses else 140, 160) for d in days]
    finals = [answer(d, "final", 4, 100, 100, 100) for d in days]
    report = compare_early(SPEC, firsts, finals)
    assert (report.early, report.stated, report.held) == (14, 14, 14 - misses)
    assert (report.promised, report.within) == (14 - misses, 14 - misses)
    assert report.error_max == (0.5 if misses else 0.04)
    assert (report.earlier_ms_p50, report.contract_met) == (3000, met)
    assert bool(report.problems) == (not met)


def test_answers_without_an_interval_promise_nothing_and_first_answers_that_are_complete_are_not_early() -> None:
    firsts = [answer(1, "early", 1, 5, None, None), answer(2, "complete", 1, 100, 100, 100)]
    report = compare_early(SPEC, firsts, [answer(d, "final", 4, 100, 100, 100) for d in (1, 2)])
    assert (report.windows, report.early, report.stated, report.error_p50, report.contract_met) == (2, 1, 0, None, True)
