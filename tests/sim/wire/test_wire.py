"""Edges behind modelled connections."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.budgets.traces import zipf
from edgewater.model.query import ErrorBudget, QuerySpec, StalenessBudget
from sim.budgets.link import SimulatedLink
from sim.budgets.outcome import PolicyOutcome, truth_per_window
from sim.budgets.trace import Trace
from sim.wire.center import CenterTimes
from sim.wire.experiment import WireSettings, run

WINDOW_MS, WINDOWS, EDGES = 5_000, 4, 2
TRACE = zipf(WINDOWS, WINDOW_MS, records=3_000, groups=1_500)
HOMES = np.random.default_rng(0).integers(0, EDGES, len(TRACE))
QUERY = QuerySpec.from_mapping({
    "name": "sums", "from": "trace", "group_by": ["key"], "measures": {"total": "sum(value)"},
    "window": {"tumbling": f"{WINDOW_MS}ms"},
})  # fmt: skip
NARROW, WIDE = SimulatedLink(4096.0, latency_ms=50), SimulatedLink(1e7, latency_ms=5)
FAST = CenterTimes(0.0, 0.0, 0.0, 0.0)
SHORT = zipf(2, WINDOW_MS, records=300, groups=150)


def outcome(query: QuerySpec, link: SimulatedLink, trace: Trace = TRACE, **settings: object) -> PolicyOutcome:
    parts = trace.split(HOMES[: len(trace)], EDGES)
    return run(trace, parts, query, link, WireSettings(**settings))  # type: ignore[arg-type]


def seconds(done: PolicyOutcome) -> float:
    return float(done.staleness.max() * WINDOW_MS / 1000)


@pytest.mark.nightly
def test_a_run_repeats_itself() -> None:
    first, second = outcome(QUERY, NARROW), outcome(QUERY, NARROW)
    assert first.bytes == second.bytes
    assert np.array_equal(first.staleness, second.staleness)


@pytest.mark.nightly
def test_exact_answers_are_exact_and_as_late_as_the_link_makes_them() -> None:
    narrow, wide = outcome(QUERY, NARROW), outcome(QUERY, WIDE)
    for done in (narrow, wide):
        assert done.error.max() == pytest.approx(0.0, abs=1e-6 * done.largest.max())
    assert seconds(wide) < 0.5 < seconds(narrow)
    # No link carries more than its rate, in both directions of each edge.
    span_s = (WINDOWS * WINDOW_MS) / 1000 + seconds(narrow) + WireSettings().lead_s + 1.0
    assert narrow.bytes < 2 * EDGES * 4096.0 * span_s


@pytest.mark.slow
def test_the_center_s_time_is_part_of_an_answer_s_delay() -> None:
    fast, slow = (outcome(QUERY, WIDE, SHORT, center=times) for times in (FAST, replace(FAST, answer_s=0.7)))
    assert seconds(slow) == pytest.approx(seconds(fast) + 0.7, abs=0.01)
    assert fast.error.max() == pytest.approx(0.0, abs=1e-6 * fast.largest.max())


@pytest.mark.slow
def test_edges_get_their_shares_of_an_error_budget_and_keep_them() -> None:
    limit = 0.1 * float(np.nanmax(truth_per_window(SHORT, QUERY)[0]))
    done = outcome(replace(QUERY, budget=ErrorBudget((("total", limit),))), WIDE, SHORT)
    assert 0.0 < done.error.max() <= limit and 0.0 < done.stated.max() <= limit


@pytest.mark.nightly
def test_an_error_budget_takes_fewer_bytes_and_holds() -> None:
    exact = outcome(QUERY, NARROW)
    limit = 0.02 * float(exact.largest.max())
    done = outcome(replace(QUERY, budget=ErrorBudget((("total", limit),))), NARROW)
    assert 0.0 < done.error.max() <= limit
    assert done.bytes < exact.bytes / 2
    assert done.stated.max() <= limit


@pytest.mark.nightly
@pytest.mark.parametrize("rate", [4_096.0, 65_536.0])
def test_the_first_window_is_hardly_later_than_the_others_although_the_link_is_unknown(rate: float) -> None:
    done = outcome(QUERY, SimulatedLink(rate, latency_ms=50))
    seconds_of = done.staleness * WINDOW_MS / 1000
    assert seconds_of[0] <= 1.5 * seconds_of[1:].max()
    # Without early sends the largest edge would need so long after the end of the first window.
    assert seconds_of[0] < 0.7 * done.bytes / WINDOWS / EDGES / rate + 0.5


@pytest.mark.nightly
def test_a_staleness_budget_is_kept_on_a_link_that_is_too_narrow_for_exact_answers() -> None:
    narrow = SimulatedLink(1024.0, latency_ms=50)
    exact, done = outcome(QUERY, narrow), outcome(replace(QUERY, budget=StalenessBudget(1_500)), narrow)
    assert done.staleness[-1] * WINDOW_MS <= 1_500, "the link is known by then"
    assert exact.staleness[-1] * WINDOW_MS > 1_500
    assert done.error[-1] > 0.0


@pytest.mark.nightly
def test_an_interrupted_link_delays_the_answers_and_loses_nothing() -> None:
    cut = replace(NARROW, trace=((9_000.0, 0.0), (17_000.0, 1.0)))
    done = outcome(QUERY, cut)
    assert done.error.max() == pytest.approx(0.0, abs=1e-6 * done.largest.max())
    assert seconds(done) > seconds(outcome(QUERY, NARROW))
