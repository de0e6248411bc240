"""Runs the baselines of `sim.early_answers.baselines` on a workload, window by window."""

from __future__ import annotations

import numpy as np

from edgewater.arrivals.targets import AccuracyTarget, MeasureKind
from edgewater.base.errors import InvalidConfig
from sim.early_answers.baselines import (
    AionAsPublished,
    AionMinus,
    AqKSlack,
    Baseline,
    KSlack,
    WaitForAll,
    WindowArrivals,
)
from sim.early_answers.engine import Progress, SilentSource, WindowOutcome, queue_end_ms, true_values
from sim.early_answers.workload import Workload

BASELINES = ("default", "k-slack", "aq-k-slack", "aion", "aion-minus")


def make_baseline(name: str, target: AccuracyTarget, measure: MeasureKind, substream_ms: float) -> Baseline:
    match name:
        case "default":
            return WaitForAll(target, measure)
        case "k-slack":
            return KSlack(target, measure)
        case "aq-k-slack":
            return AqKSlack(target, measure)
        case "aion":
            return AionAsPublished(target, measure, substream_ms)
        case "aion-minus":
            return AionMinus(target, measure)
    raise InvalidConfig("--algorithm", name, f"edgewater, {', '.join(BASELINES)} or all")


def run_baseline(
    workload: Workload,
    name: str,
    target: AccuracyTarget,
    measure: MeasureKind,
    event_cost_ms: float,
    *,
    substream_ms: float,
    silent: SilentSource | None = None,
    progress: Progress = lambda done: None,
) -> list[WindowOutcome]:
    results = []
    algorithm = make_baseline(name, target, measure, substream_ms)
    for index in range(workload.windows):
        if index and workload.restarts_before(index):
            algorithm = make_baseline(name, target, measure, substream_ms)
        events = workload.window(index)
        arrival = events.arrival_ms
        if silent and silent.first <= index < silent.last:
            back = silent.last * workload.step_ms
            arrival = np.where(events.source == silent.source, np.maximum(arrival, back), arrival)
        end = float(index * workload.step_ms + workload.window_ms)
        closing = algorithm.close(
            WindowArrivals(
                end - workload.window_ms,
                end,
                events.event_ms,
                arrival,
                events.value,
                events.group,
                workload.groups,
                events.mark,
            )
        )
        ready = queue_end_ms(arrival[closing.processed], event_cost_ms, closing.fire_ms)
        results.append(
            WindowOutcome(
                closing.estimate,
                true_values(events.group, events.value, measure, workload.groups),
                np.full(workload.groups, np.nan),
                max(ready, closing.fire_ms) - end,
                int(closing.processed.sum()),
                int((~closing.arrived).sum()),
                len(events),
            )
        )
        progress(index + 1)
    return results
