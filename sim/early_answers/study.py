"""One run of the watermark harness: what was asked, what came out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from edgewater.accuracy import AccuracyTarget, MeasureKind
from edgewater.errors import InvalidConfig
from sim.early_answers.baseline_runs import run_baseline
from sim.early_answers.engine import EarlyAnswerSimulation, Progress, SilentSource, WindowOutcome
from sim.early_answers.sliding import SlidingWorkload
from sim.early_answers.summary import oracle_rate, summarise
from sim.early_answers.values import ValueSource
from sim.early_answers.workload import SyntheticWorkload, Workload, WorkloadSpec


@dataclass(frozen=True, slots=True)
class Study:
    """The inputs of a run, as they appear in its output.

    Attributes:
        every_ms: a window begins so often; None: they tumble.
        sampling: of ours, whether edges sample, as of an expensive measure; else they process all they read.
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
    fixed_ms: float = 1000.0
    latest_ms: int | None = None
    sampling: bool = True
    seed: int = 1

    @property
    def overlap(self) -> int:
        """How many windows an event is in: errors of so many in a row hang together."""
        return self.window_ms // (self.every_ms or self.window_ms)

    @property
    def target(self) -> AccuracyTarget:
        return AccuracyTarget(self.error, self.confidence, self.groups, self.scope)

    @property
    def silence(self) -> SilentSource | None:
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
            raise InvalidConfig("--every", f"{step_ms} ms", f"a divisor of the window, {self.window_ms} ms, and no "
                                "silent edge")  # fmt: skip
        steps = self.windows + self.window_ms // step_ms - 1
        made = SyntheticWorkload(
            WorkloadSpec(self.delays, self.scenario, self.rate, self.edges, self.groups, step_ms, steps, self.seed),
            values,
        )
        return (made if step_ms == self.window_ms else SlidingWorkload(made, self.window_ms)), values


def run_study(study: Study, progress: Progress = lambda done: None) -> tuple[dict[str, Any], list[WindowOutcome]]:
    """Runs it. The row holds the inputs, the summary and the oracle's rate; the outcomes come window by window."""
    workload, values = study.workload()
    outcomes = run_workload(study, workload, progress)
    again, _ = study.workload()
    row = asdict(study) | {"values_used": values.source} | summarise(outcomes, study.target)
    row["oracle_rate"] = oracle_rate(again, study.measure, study.target, study.windows)
    return row, outcomes


def run_workload(study: Study, workload: Workload, progress: Progress = lambda done: None) -> list[WindowOutcome]:
    """The study's algorithm on a workload of any origin."""
    if study.algorithm != "edgewater":
        return run_baseline(
            workload, study.algorithm, study.target, study.measure, study.event_cost_ms,
            substream_ms=study.substream_ms, fixed_ms=study.fixed_ms, silence=study.silence, progress=progress,
        )  # fmt: skip
    engine = EarlyAnswerSimulation(
        workload, study.target, study.measure, study.event_cost_ms, substream_ms=study.substream_ms,
        silence=study.silence, latest_ms=study.latest_ms, sampling=study.sampling,
    )  # fmt: skip
    return engine.run(progress)
