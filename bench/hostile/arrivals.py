"""Targets: arrival statistics, which an edge ships beside its partials for queries with an accuracy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from bench.hostile.mutate import Mutator, mutated_bytes, mutated_synopsis
from bench.hostile.targets import Target, register
from edge.arrivals import SubstreamMonitor
from edgewater.arrivals import SlotGrid, encode_report, read_report

GRID = SlotGrid(10, 10, 64)


@dataclass
class Reports:
    """Reports with or without groups, of this release and of 0.3.0: read, merged with an honest one, and written."""

    grouped: bool
    honest: list[bytes] = field(default_factory=list)

    def corpus(self) -> list[bytes]:
        rng = np.random.default_rng(4)
        monitor = SubstreamMonitor(GRID, (pa.string(),), 12) if self.grouped else SubstreamMonitor(GRID)
        for at in range(4):
            arrival = 1_000 + 37 * at
            born, kept = arrival - rng.integers(-40, 900, 60), np.arange(0, 60, 2)
            values = rng.gamma(2.0, 5.0, len(kept))
            keys = [pa.array([f"g{i % 5}" for i in range(60)])] if self.grouped else []
            monitor.observe(born, arrival, keys, values, kept)
            statistics = monitor.take()
            self.honest += [encode_report(statistics, 2), *(each.to_state() for each in statistics)]
        return self.honest

    def run(self, data: bytes) -> None:
        reports = read_report(data, GRID, grouped=self.grouped)
        for report in reports:
            (other, *_) = read_report(self.honest[0], GRID, grouped=self.grouped)
            report.index = other.index
            report.merge(other)
            report.arrivals()
            report.arrival_counts()
            read_report(report.to_state(), GRID, grouped=self.grouped)
        read_report(encode_report(reports[:1]), GRID, grouped=self.grouped)


for _name, _grouped, _mutate in (("substream", False, mutated_bytes), ("grouped", True, mutated_synopsis)):
    _reports = Reports(_grouped)
    _change: Mutator = _mutate
    register(Target(f"arrivals/{_name}", _reports.corpus, _reports.run, _change))
