"""How long a source has been observed: since its first report, whatever it may have counted before."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from center.early import EarlyAnswerEstimator
from edge.arrivals import SubstreamMonitor
from edgewater.model.accuracy import report_schedule
from edgewater.model.query import QuerySpec
from tests.center.accuracy_world import spec

QUERY = spec(window={"tumbling": "1s"})  # sub-streams of 500 ms


def estimator(query: QuerySpec = QUERY) -> EarlyAnswerEstimator:
    schedule = report_schedule(query.window, query.accuracy, query.lateness_ms)
    assert schedule is not None and query.accuracy is not None
    return EarlyAnswerEstimator(query.accuracy, schedule, None)


def ages_ms(of: EarlyAnswerEstimator) -> list[int]:
    (group,) = of.observed.groups
    return [int(age) * of.schedule.grid.slot_ms for age in group.trigger.triangle.age]


def report(to: EarlyAnswerEstimator, through_ms: int, *edges: str) -> None:
    for edge in edges:
        to.add_report(edge, through_ms, [])
    to.advance(through_ms)


@pytest.mark.parametrize("first_ms", [10_000, 10_080])
def test_the_first_sources_are_observed_since_their_first_report(first_ms: int) -> None:
    one = estimator()
    one.expect(["a", "b"])
    report(one, first_ms, "a", "b")
    assert ages_ms(one) == [0, 0]
    report(one, 10_500, "a", "b")
    assert ages_ms(one) == [10_500 - first_ms] * 2


def test_a_source_that_joins_is_observed_since_its_first_report() -> None:
    one = estimator()
    one.expect(["a"])
    for through_ms in (10_000, 10_500, 11_000):
        report(one, through_ms, "a")
    one.expect(["a", "b"])
    report(one, 11_500, "a")
    # It began to count somewhere in these 500 ms.
    report(one, 12_000, "a", "b")
    assert ages_ms(one) == [2_000, 0]
    report(one, 12_500, "a", "b")
    assert ages_ms(one) == [2_500, 500]


def test_a_new_group_is_not_older_at_a_source_than_the_source() -> None:
    one = estimator(spec(window={"tumbling": "1s"}, group_by=["k"]))
    one.expect(["a"])
    report(one, 10_000, "a")
    one.expect(["a", "b"])
    report(one, 10_080, "a", "b")
    monitor = SubstreamMonitor(one.schedule.grid, (pa.string(),), 8)
    monitor.observe(np.array([10_090]), 10_095, [pa.array(["g"])], np.ones(1), np.arange(1))
    one.add_report("a", 10_100, [s.to_state() for s in monitor.take()])
    report(one, 10_100, "b")
    assert ages_ms(one) == [100, 20]


@pytest.mark.parametrize("force", [False, True])
def test_a_report_of_a_clock_that_is_a_day_ahead_advances_no_other_edge(force: bool) -> None:
    one = estimator()
    one.expect(["a", "b"])
    one.add_report("b", 10_000 + 86_400_000, [])
    one.add_report("a", 10_000, [])
    one.advance(10_000, force=force)
    assert one.observed.slot == one.schedule.slot_at(10_000)
    assert one.observed.never_reported == ["b"]
