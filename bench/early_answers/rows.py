"""The studies of the bench: goals, robustness, and the papers' figures."""

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


def robustness_rows() -> list[Study]:
    heavy = [Study(values=v, delays=d, measure=m) for v in ("lognormal2", "pareto2.2") for d in ("EG", "GG")
             for m in ("mean", "sum")]  # fmt: skip
    ten, hundred = ([Study(groups=g, scope=s, measure=m) for s in ("each", "all") for m in MEASURES] for g in (10, 100))
    silent = [Study(edges=10, silent_edge=True, measure=m) for m in MEASURES]
    correlated = ("correlated-source", "correlated-value")
    open_case = [Study(scenario=f"{a}+delay-shift", delays=d, measure=m) for a in correlated
                 for d in ("EG", "GG") for m in ("mean", "sum")]  # fmt: skip
    open_case += [Study(scenario="correlated-source+correlated-value+delay-shift", measure=m) for m in ("mean", "sum")]
    larger = [Study(rate=25_000.0, window_ms=w, measure=m, values=v) for w in (3000, 6000) for m in ("mean", "sum")
              for v in ("nyt", "ysb")]  # fmt: skip
    return heavy + ten + silent + open_case + larger + hundred


def unsampled_rows() -> list[Study]:
    """Returns studies in which edges process all events, as with a cheap measure."""
    return [Study(scenario=s, measure=m, sampling=False) for s in SCENARIOS for m in ("mean", "sum")]


def baseline_rows() -> list[Study]:
    """Returns studies of all algorithms on YSB (sums) and NYT (means), as in figures 6 to 11.

    EG also at five times the rate.
    """
    base = [Study(values="ysb", measure="sum"), Study(values="nyt", measure="mean")]
    rows = [replace(b, delays=d, algorithm=a) for b in base for d in DELAYS for a in ALGORITHMS]
    return rows + [replace(b, rate=25_000.0, algorithm=a) for b in base for a in ALGORITHMS]


def sliding_rows() -> list[Study]:
    """Returns studies of the mean distance (NYT) in sliding windows, of which five overlap, as in the paper."""
    sliding = [Study(delays=d, window_ms=w, every_ms=w // 5) for w in (3000, 6000) for d in DELAYS]
    return sliding + [Study(every_ms=600, algorithm=a) for a in BASELINES]


def recorded_rows() -> list[Study]:
    """Returns studies of recorded downloads: one source, and a window per hour."""
    return [Study(scenario="recorded disorder", delays="log", values="downloads", edges=1, measure=m) for m in MEASURES]
