"""How often the early answer of an extreme has both bounds, and contains the extreme of all records:
`python -m bench.early_answers.extremes [--function max] [--delays lognormal] [--windows 420] [--seed 12]`.

Three edges have 600 records/s each. Windows are 1 s long, and values are lognormal. With `--delays dependent`, delays
are lognormal, and the records with the greatest fiftieth of the values have delays four times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import click
import numpy as np

from center.early import Prediction
from center.ledger import Emission
from edgewater.answers import Phase
from edgewater.arrivals.targets import AccuracyTarget, MeasureKind
from edgewater.synopses import FloatArray
from sim.early_answers.engine import EarlyAnswerSimulation, WindowOutcome
from sim.early_answers.workload import Events

RATE = 600.0
DELAYS = ("lognormal", "pareto", "dependent")


@dataclass(slots=True)
class ExtremesWorkload:
    """Windows of 1 s at three sources."""

    delays: str
    windows: int
    seed: int
    sources: int = 3
    groups: int = 1
    window_ms: int = 1_000
    step_ms: int = 1_000

    def restarts_before(self, index: int) -> bool:
        return False

    def window(self, index: int) -> Events:
        return self.step(index)

    def step(self, index: int) -> Events:
        rng, columns = np.random.default_rng([self.seed, index]), []
        for source in range(self.sources):
            count = rng.poisson(RATE)
            born = np.sort(rng.uniform(0, self.step_ms, count)) + index * self.step_ms
            values = np.exp(rng.normal(2, 1.5, count))
            is_pareto = self.delays == "pareto"
            delays = 40 * (rng.pareto(2.1, count) + 1) if is_pareto else 60 * np.exp(rng.normal(0, 0.9, count))
            if self.delays == "dependent":
                delays = np.where(values > np.exp(2 + 1.5 * 2.05), 4 * delays, delays)
            columns.append((np.full(count, source), born, delays, values))
        sources, born, delays, values = (np.concatenate(each) for each in zip(*columns, strict=True))
        return Events(sources, born, delays, values, np.zeros(len(born), np.int64), rng.random(len(born)))


@dataclass(slots=True)
class Tally:
    """What the first answers of all windows were.

    Attributes:
        windows: number of windows.
        early: number of windows that were answered before all records had arrived.
        stated: number of early answers with both bounds.
        contained: number of these answers whose bounds contain the extreme of all records.
        waited_ms: sum of the times from the windows' ends until these answers.
    """

    windows: int = 0
    early: int = 0
    stated: int = 0
    contained: int = 0
    waited_ms: int = 0

    def add(self, emission: Emission, prediction: Prediction | None, truth: float) -> None:
        self.windows += 1
        if prediction is None or emission.phase is not Phase.EARLY:
            return
        self.early += 1
        if prediction.bounded and np.isfinite([prediction.lower, prediction.upper]).all():
            self.stated += 1
            self.contained += prediction.lower <= truth <= prediction.upper
            self.waited_ms += emission.answered_at_ms - emission.window_end_ms


class ExtremesSimulation(EarlyAnswerSimulation):
    """Compares the first answers with the extremes of all records."""

    def __init__(self, workload: ExtremesWorkload, function: MeasureKind) -> None:
        self.tally = Tally()
        target = AccuracyTarget(0.05, 0.95)
        super().__init__(workload, target, function, 0.0, substream_ms=500, sampling=False, disorder_ms=2_000)

    def _outcome(self, measure: MeasureKind, window: int, emission: Emission) -> WindowOutcome:
        values: FloatArray = self._steps[window].events.value
        truth = float(values.max() if measure == "max" else values.min())
        self.tally.add(emission, emission.prediction, truth)
        return WindowOutcome(np.array([truth]), np.array([truth]), np.zeros(1), 0.0, 0, 0, len(values))


@click.command()
@click.option("--function", type=click.Choice(["max", "min"]), default="max", show_default=True)
@click.option("--delays", type=click.Choice(DELAYS), default="lognormal", show_default=True)
@click.option("--windows", default=420, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=12, show_default=True, type=click.IntRange(0))
def main(function: MeasureKind, delays: str, windows: int, seed: int) -> None:
    """Measure the early answers of an extreme."""
    simulation = ExtremesSimulation(ExtremesWorkload(delays, windows, seed), function)
    simulation.run()
    tally = simulation.tally
    click.echo(f"{function}, {delays}: {tally.windows} windows, {tally.early} early, {tally.stated} with both bounds")
    click.echo(f"of these, {tally.contained} held; mean wait {tally.waited_ms / max(tally.stated, 1):.0f} ms")


if __name__ == "__main__":
    main()
