"""Edges under a virtual clock: production statistics, sampling and heartbeats on the events of a workload.

They do not top up their samples.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from center.early import EdgeSamplingController, SamplingRequirement
from edge.arrivals import BernoulliSampler, SubstreamMonitor
from edgewater.arrivals import ReportSchedule, encode_report
from edgewater.model.accuracy import MAX_GROUPS
from edgewater.synopses import FloatArray, IntArray
from edgewater.wire import Arrivals, SamplingReason

UNLIMITED_BYTES_S = 1e12


class SimulatedEdge:
    """One edge, which counts and samples the events that it reads and reports arrival statistics.

    Args:
        number: number of the edge, the seed of its sample.
        grouped: whether to collect statistics per group.
        has_values: whether the measure has values; a count has none and is not sampled.
    """

    def __init__(self, number: int, schedule: ReportSchedule, *, grouped: bool, has_values: bool) -> None:
        types = (pa.int64(),) if grouped else ()
        self._monitor = SubstreamMonitor(schedule.grid, types, MAX_GROUPS if grouped else 1)
        self._schedule, self._has_values = schedule, has_values
        self._sampler = BernoulliSampler(number)
        self._sampling = EdgeSamplingController()
        self._read = 0
        self.rate = 1.0

    def read(self, event_ms: IntArray, arrived_ms: IntArray, value: FloatArray, group: IntArray) -> IntArray:
        """Reads events in order of arrival; returns the positions of the sampled events."""
        kept = np.zeros(0, np.int64)
        if self._has_values:
            kept = np.flatnonzero(self._sampler.marks(self._read, len(event_ms)) < self.rate)
        self._read += len(event_ms)
        # A batch has one arrival time.
        slot = arrived_ms // self._schedule.grid.slot_ms
        begins = np.flatnonzero(np.diff(slot, prepend=-1))
        ends = [*begins[1:].tolist(), len(slot)]
        cuts = np.searchsorted(kept, [*begins, len(slot)]).tolist()
        for i, (begin, end) in enumerate(zip(begins.tolist(), ends, strict=True)):
            mine = kept[cuts[i] : cuts[i + 1]]
            sampled = (value[mine], mine - begin, (value[begin:end],) * 2) if self._has_values else ()
            keys = [pa.array(group[begin:end])] if self._monitor.types else []
            self._monitor.observe(event_ms[begin:end], int(arrived_ms[begin]), keys, *sampled)
        return kept

    def report(self, through_ms: int) -> Arrivals:
        """Returns the arrival statistics since the last report."""
        reason = SamplingReason.MEASURE if self.rate < 1 else SamplingReason.NONE
        statistics = self._monitor.take()
        data = (encode_report(statistics, self._schedule.slice_substreams),) if statistics else ()
        return Arrivals(through_ms, data, reason)

    def heartbeat(self, requirement: SamplingRequirement) -> None:
        """Applies the gateway's reply to a heartbeat of an edge whose link and processor keep up."""
        for message in self._sampling.on_heartbeat(0, UNLIMITED_BYTES_S, 0.0, (requirement,)):
            self.rate = message.rate
