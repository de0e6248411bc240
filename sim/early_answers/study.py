"""Studies: the parameters of one simulation, and its results as a row."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from edgewater.arrivals.targets import AccuracyTarget, MeasureKind
from edgewater.base.errors import InvalidConfig
from sim.early_answers.baseline_runs import run_baseline
from sim.early_answers.engine import EarlyAnswerSimulation, Progress, SilentSource, WindowOutcome
from sim.early_answers.summary import oracle_rate, summarise
from sim.early_answers.values import ValueSource
from sim.early_answers.workload import SlidingWorkload, SyntheticWorkload, Workload, WorkloadSpec


@dataclass(frozen=True, slots=True)
class Study:
    """The parameters of a simulation, which are part of its output.

    Attributes:
        every_ms: step of sliding windows; None: tumbling windows.
        sampling: for the algorithm `edgewater`: whether edges sample, as for an expensive measure.
    """

    algorithm: str = "edgewater"
    delays: str = "EG"
    scenario: str = "stationary"
    measure: MeasureKind = "mean"
    values: str = "nyt"
    rate: float = 5000.0
    windows: int = 400
    window_ms: int = 3000
    every_ms: int | None = None
    substream_ms: int = 600
    error: float = 0.05
    confidence: float = 0.95
    groups: int = 1
    scope: Any = "each"
    edges: int = 5
    silent_edge: bool = False
    event_cost_ms: float = 0.02
    latest_ms: int | None = None
    sampling: bool = True
    seed: int = 1

    @property
    def overlap(self) -> int:
        """The number of windows that contain an event: the errors of as many consecutive windows are dependent."""
        return self.window_ms // (self.every_ms or self.window_ms)

    @property
    def target(self) -> AccuracyTarget:
        return AccuracyTarget(self.error, self.confidence, self.groups, self.scope)

    @property
    def silent(self) -> SilentSource | None:
        if not self.silent_edge:
            return None
        if self.edges < 2 or self.windows < 10:
            raise InvalidConfig("--silent-edge", (self.edges, self.windows), "at least 2 edges and 10 windows")
        first = self.windows * 45 // 100
        return SilentSource(self.edges // 2, first, first + max(1, self.windows // 10))

    def workload(self) -> tuple[Workload, ValueSource]:
        values = ValueSource.named(self.values)
        step_ms = self.every_ms or self.window_ms
        if self.window_ms % step_ms or (self.silent_edge and step_ms != self.window_ms):
            raise InvalidConfig(
                "--every", f"{step_ms} ms", f"a divisor of the window, {self.window_ms} ms, and no silent edge"
            )
        steps = self.windows + self.window_ms // step_ms - 1
        synthetic = SyntheticWorkload(
            WorkloadSpec(self.delays, self.scenario, self.rate, self.edges, self.groups, step_ms, steps, self.seed),
            values,
        )
        return (synthetic if step_ms == self.window_ms else SlidingWorkload(synthetic, self.window_ms)), values


def run_study(study: Study, progress: Progress = lambda done: None) -> tuple[dict[str, Any], list[WindowOutcome]]:
    """Runs a study; returns a row with parameters, summary and oracle rate, and the outcomes per window."""
    workload, values = study.workload()
    outcomes = run_workload(study, workload, progress)
    again, _ = study.workload()
    row = asdict(study) | {"values_used": values.source} | summarise(outcomes, study.target)
    row["oracle_rate"] = oracle_rate(again, study.measure, study.target, study.windows)
    return row, outcomes


def run_workload(study: Study, workload: Workload, progress: Progress = lambda done: None) -> list[WindowOutcome]:
    """Runs the study's algorithm on a given workload."""
    if study.algorithm != "edgewater":
        return run_baseline(
            workload,
            study.algorithm,
            study.target,
            study.measure,
            study.event_cost_ms,
            substream_ms=study.substream_ms,
            silent=study.silent,
            progress=progress,
        )
    simulation = EarlyAnswerSimulation(
        workload,
        study.target,
        study.measure,
        study.event_cost_ms,
        substream_ms=study.substream_ms,
        silent=study.silent,
        latest_ms=study.latest_ms,
        sampling=study.sampling,
    )
    return simulation.run(progress)
