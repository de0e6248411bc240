"""The estimators of groups, from reports that are made by hand: batches, groups that end, and too many groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from center.early import EarlyAnswerEstimator, SamplingPlan
from center.early import groups as group_module
from center.early.evaluation import SILENT_EXTREMES
from edge.arrivals import SubstreamMonitor
from edgewater.arrivals.arrival_counts import window_sample
from edgewater.model.accuracy import report_schedule
from tests.center.accuracy_world import spec

STEP_MS = 500
EDGES = "a", "b"


class Reports:
    """An estimator of a query with groups, and the monitors of its edges."""

    def __init__(self, measure: str = "sum(x)", group_by: Sequence[str] = ("k",)) -> None:
        query = spec({"total": measure}, group_by=[*group_by])
        schedule = report_schedule(query.window, query.accuracy, query.lateness_ms)
        assert schedule is not None and query.accuracy is not None
        self.estimator = EarlyAnswerEstimator(query.accuracy, schedule, None)
        self.estimator.expect(EDGES)
        types = [pa.string()] * len(group_by)
        self.monitors = {edge: SubstreamMonitor(schedule.grid, types, 8 if types else 1) for edge in EDGES}
        self.now_ms, self.rng = 10_000, np.random.default_rng(3)

    def step(self, groups: Sequence[str], *, every: int = 1, edges: Sequence[str] = EDGES) -> None:
        """Edges report records of these groups in a step, of which they have processed each `every`-th."""
        count, self.now_ms = 40, self.now_ms + STEP_MS
        for edge in edges:
            monitor, kept = self.monitors[edge], np.arange(0, count, every)
            born = self.now_ms - STEP_MS + np.sort(self.rng.integers(0, STEP_MS - 100, count))
            keys = [pa.array([groups[n] for n in self.rng.integers(0, len(groups), count)])] if groups else []
            values = self.rng.gamma(2.0, 5.0, count)
            monitor.observe(born, self.now_ms - 90, keys, values[kept], kept, (values, values))
            self.estimator.add_report(edge, self.now_ms, [s.to_state() for s in monitor.take()])
        self.estimator.advance(self.now_ms)
        self.estimator.forget_before(self.now_ms - 4 * STEP_MS)

    def sampled(self, start_ms: int) -> dict[str, float]:
        """The number of sampled records of edge a by group, in the window of these two sub-streams."""
        groups = self.estimator.observed.groups
        return {g.key: float(window_sample([g.counts], start_ms, ["a"]).count.sum()) for g in groups}

    @property
    def groups(self) -> list[str]:
        return [group.key for group in self.estimator.observed.groups]


def test_the_size_of_batches_changes_no_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[str] = []
    for size in (64, 2):  # the last batch has one group
        monkeypatch.setattr(group_module, "BATCH_SIZE", size)
        reports = Reports()
        for step in range(8):
            reports.step("vwxyz"[: 3 + step // 2])
        assert len(reports.groups) == 5
        states.append(reports.estimator.to_text())
    assert states[0] == states[1]


def test_values_that_come_after_the_counts_of_their_group_are_added() -> None:
    """An edge tops up its sample: the report has values of y, and records of x alone."""
    reports = Reports()
    reports.step("xy", every=2)
    start, monitor = reports.now_ms - STEP_MS, reports.monitors["a"]
    before = reports.sampled(start)
    ones = np.ones(5)
    born = np.full(5, start + 7)
    monitor.observe(born, reports.now_ms + 10, [pa.array(["x"] * 5)], ones, np.arange(5), (ones, ones))
    monitor.add_values(born, born + 90, [pa.array(["y"] * 5)], ones, (ones, ones))
    reports.estimator.add_report("a", reports.now_ms + 20, [s.to_state() for s in monitor.take()])
    reports.estimator.add_report("b", reports.now_ms + 20, [])
    reports.estimator.advance(reports.now_ms + 20)
    assert reports.sampled(start) == {key: count + 5 for key, count in before.items()}


def test_a_group_without_records_is_removed_in_time() -> None:
    reports = Reports()
    reports.step("xy")
    grid = reports.estimator.schedule.grid
    idle_steps = group_module.IDLE_LAGS * grid.lags * grid.slot_ms // STEP_MS
    for _ in range(idle_steps):
        reports.step("x")
    assert len(reports.groups) == 2
    for _ in range(3):
        reports.step("x")
    assert reports.groups == ['["x"]']


def test_after_too_many_groups_all_records_are_needed_and_a_lost_sample_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports = Reports()
    for _ in range(2):
        reports.step("xy", every=2)
    monkeypatch.setattr(group_module, "MAX_GROUPS", 2)
    reports.step("xyz", every=2)
    estimator = reports.estimator
    assert estimator.observed.has_too_many_groups and reports.groups == []
    assert estimator.rates() == dict.fromkeys(EDGES, SamplingPlan()), "edges process all records"
    restored = EarlyAnswerEstimator(estimator.accuracy, estimator.schedule, None)
    restored.restore(estimator.to_text())
    for each in (estimator, restored):
        assert each.observed.has_unknown_sample(reports.now_ms - 1_000)


def test_a_silent_edge_may_have_the_extreme() -> None:
    reports, stated = Reports("max(x)", group_by=()), list[str]()
    for edges in (EDGES, EDGES[:1]):
        for _ in range(8):
            reports.step("", edges=edges)
        observed = reports.estimator.observed
        (evaluation,) = observed.groups.evaluate(reports.now_ms - 2 * STEP_MS, observed.edges)
        stated.append(evaluation.one_sided)
    assert stated == ["", SILENT_EXTREMES]
