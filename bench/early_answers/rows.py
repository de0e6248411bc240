"""The studies of the bench: goals, recorded arrivals, and the papers' figures."""

from __future__ import annotations

from dataclasses import replace

from edgewater.arrivals.targets import MEASURES
from sim.early_answers.baseline_runs import BASELINES
from sim.early_answers.study import Study
from sim.early_answers.workload import DELAYS, SCENARIOS

ALGORITHMS = ("edgewater", *BASELINES)


def goal_rows() -> list[Study]:
    """Returns a study per scenario, delays and measure."""
    return [Study(scenario=s, delays=d, measure=m) for s in SCENARIOS for d in DELAYS for m in MEASURES]


def baseline_rows() -> list[Study]:
    """Returns studies of all algorithms on YSB (sums) and NYT (means), as in figures 6 to 11.

    EG also at five times the rate.
    """
    base = [Study(values="ysb", measure="sum"), Study(values="nyt", measure="mean")]
    rows = [replace(b, delays=d, algorithm=a) for b in base for d in DELAYS for a in ALGORITHMS]
    return rows + [replace(b, rate=25_000.0, algorithm=a) for b in base for a in ALGORITHMS]


def recorded_rows() -> list[Study]:
    """Returns studies of recorded downloads: one source, and a window per hour."""
    return [Study(scenario="recorded disorder", delays="log", values="downloads", edges=1, measure=m) for m in MEASURES]
