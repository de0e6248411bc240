"""How often the early answer of an extreme has both bounds, and contains the extreme of all records:
`python -m bench.early_answers.extremes [--function max] [--delays lognormal] [--windows 420] [--seed 12]`.

Three edges have 600 records/s each. Windows are 1 s long, and values are lognormal. With `--delays dependent`, delays
are lognormal, and the records with the greatest fiftieth of the values have delays four times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from edgewater.arrivals.targets import AccuracyTarget, MeasureKind
from sim.early_answers.engine import EarlyAnswerSimulation
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


@click.command()
@click.option("--function", type=click.Choice(["max", "min"]), default="max", show_default=True)
@click.option("--delays", type=click.Choice(DELAYS), default="lognormal", show_default=True)
@click.option("--windows", default=420, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=12, show_default=True, type=click.IntRange(0))
def main(function: MeasureKind, delays: str, windows: int, seed: int) -> None:
    """Measure the early answers of an extreme."""
    workload, target = ExtremesWorkload(delays, windows, seed), AccuracyTarget(0.05, 0.95)
    options: dict[str, Any] = {"substream_ms": 500, "sampling": False, "disorder_ms": 2_000}
    outcomes = EarlyAnswerSimulation(workload, target, function, 0.0, **options).run()
    early = [o for o in outcomes if o.early]
    stated = [o for o in early if np.isfinite(o.half_width[0])]
    contained = sum(abs(o.estimate[0] - o.truth[0]) <= o.half_width[0] for o in stated)
    wait_ms = np.mean([o.latency_ms for o in stated]) if stated else 0.0
    click.echo(f"{function}, {delays}: {len(outcomes)} windows, {len(early)} early, {len(stated)} with both bounds")
    click.echo(f"of these, {contained} contain the extreme of all records; mean wait {wait_ms:.0f} ms")


if __name__ == "__main__":
    main()
