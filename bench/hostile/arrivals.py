"""Targets: arrival statistics, which an edge ships beside its partials for queries with an accuracy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from bench.hostile.mutate import Mutator, mutated_bytes, mutated_synopsis
from bench.hostile.targets import Target, register
from edge.arrivals import GroupMonitor, SubstreamMonitor
from edgewater.arrivals import GroupedSubstream, SlotGrid, SubstreamStatistics

GRID = SlotGrid(10, 10, 64)


@dataclass
class Reports:
    """Reports of one kind: read, merged with an honest one, and written."""

    kind: type[SubstreamStatistics] | type[GroupedSubstream]
    honest: list[bytes] = field(default_factory=list)

    def corpus(self) -> list[bytes]:
        rng = np.random.default_rng(4)
        monitor = SubstreamMonitor(GRID) if self.kind is SubstreamStatistics else GroupMonitor(GRID, (pa.string(),), 12)
        for at in range(4):
            arrival = 1_000 + 37 * at
            born, kept = arrival - rng.integers(-40, 900, 60), np.arange(0, 60, 2)
            values = rng.gamma(2.0, 5.0, len(kept))
            if isinstance(monitor, GroupMonitor):
                monitor.observe(born, arrival, [pa.array([f"g{i % 5}" for i in range(60)])], values, kept)
            else:
                monitor.observe(born, arrival, values, kept)
            self.honest += [report.to_state() for report in monitor.take()]
        return self.honest

    def run(self, data: bytes) -> None:
        report = self.kind.from_state(data, GRID)
        for honest in self.honest:
            other = self.kind.from_state(honest, GRID)
            report.index = other.index
            report.merge(other)  # type: ignore[arg-type]
            break
        report.arrivals()
        if isinstance(report, GroupedSubstream):
            report.arrival_counts()
        self.kind.from_state(report.to_state(), GRID)


for _name, _kind, _mutate in (
    ("substream", SubstreamStatistics, mutated_bytes),
    ("grouped", GroupedSubstream, mutated_synopsis),
):
    _reports = Reports(_kind)
    _change: Mutator = _mutate
    register(Target(f"arrivals/{_name}", _reports.corpus, _reports.run, _change))
