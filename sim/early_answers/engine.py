"""Production's early answers under a virtual clock: edges report a workload's arrivals, and the ledger answers windows.

What runs is production's: the edges' statistics and samples (`edges.py`), the `Ledger` with its `AccuracyLedger` and
book, and the rates that it asks the edges for. Simulated are time, the events, and what lies between the two sides:
reports take no time, and carry no partials. Time goes from point to point at which edges report, and to the ledger's
own deadlines. An answer is a window's first; that answers are revised later is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from center.catalog import EdgeRecord, RegisteredQuery, StreamRecord
from center.ledger import EdgesChanged, Emission, FramesMerged, FrameSummary, Ledger, QueryRegistered, TimeAdvanced
from center.ledger.quality import ACCURACY, Phase
from center.sampling import RATES_EVERY_MS, SamplingRequirement, rates_differ
from edgewater.accuracy import AccuracyTarget, MeasureKind, group_values, report_schedule
from edgewater.arrivals.schedule import HORIZON_WINDOWS
from edgewater.quantities import format_duration
from edgewater.query import QuerySpec
from edgewater.streams import LIVE, EdgeId
from edgewater.synopses import BoolArray, FloatArray, IntArray
from edgewater.wire.frames import QueryRef, SliceClose
from sim.early_answers.edges import SimulatedEdge
from sim.early_answers.workload import Events, Workload

Progress = Callable[[int], None]

REF = QueryRef("simulated", 1)
COLUMNS = {"value": pa.float64(), "key": pa.int64()}
HEARTBEAT_MS = 1_000
FIRST_WINDOW = 1_000
"""The window of the query's grid that is the workload's first: event time begins some way after the epoch."""


@dataclass(frozen=True, slots=True)
class WindowOutcome:
    """One window's answer and the truth. Arrays are per group.

    Attributes:
        truth: NaN of a group without events, and of one whose answer waits until the window is complete.
        latency_ms: from the window's end until the answer stands, processing included.
        processed: events that went through the query's operator; missed: those that came too late for the answer.
        half_width: NaN where the algorithm states none.
        promised: part of the groups with events that the answer has an interval for.
        met: whether the answer claims to keep the contract.
    """

    estimate: FloatArray
    truth: FloatArray
    half_width: FloatArray
    latency_ms: float
    processed: int
    missed: int
    events: int
    promised: float = 1.0
    met: bool = True


@dataclass(frozen=True, slots=True)
class SilentSource:
    """A source that cannot be heard in windows [first, last), though it goes on; its news come at the end."""

    source: int
    first: int
    last: int


def true_values(group: IntArray, value: FloatArray, measure: MeasureKind, groups: int) -> FloatArray:
    """The measure of all events, per group."""
    count = np.asarray(np.bincount(group, minlength=groups), np.float64)
    if measure == "count":
        return count
    total = np.asarray(np.bincount(group, weights=value, minlength=groups), np.float64)
    if measure == "sum":
        return total
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total / count, np.float64)


def queue_end_ms(arrivals_ms: FloatArray, cost_ms: float, until_ms: float) -> float:
    """When a server that takes `cost_ms` per event has finished those that arrived until `until_ms`."""
    at = np.sort(arrivals_ms[arrivals_ms <= until_ms])
    if not len(at):
        return until_ms
    # Lindley's recursion: finish_i = max over j ≤ i of arrival_j + (i - j + 1)·cost.
    return float((at - np.arange(len(at)) * cost_ms).max() + len(at) * cost_ms)


def query_spec(
    workload: Workload, target: AccuracyTarget, measure: MeasureKind, substream_ms: int, latest_ms: int | None
) -> QuerySpec:
    """The query that a user would write. Raises InvalidQuery for what production refuses."""
    horizon_ms = int(HORIZON_WINDOWS * workload.window_ms)
    given: dict[str, object] = {
        "name": REF.name,
        "from": "events",
        "measures": {"answer": "count()" if measure == "count" else f"{measure}(value)"},
        "window": {"sliding": f"{workload.window_ms}ms", "every": f"{workload.step_ms}ms"},
        "accuracy": {
            "error": f"{100 * target.error:.12g}%", "confidence": f"{100 * target.confidence:.12g}%",
            "measure": "answer",
            "substream": f"{substream_ms}ms",
        },
        "lateness": f"{horizon_ms}ms",
    }  # fmt: skip
    if workload.groups > 1:
        given |= {"group_by": ["key"], "accuracy": {**given["accuracy"], "scope": target.scope}}  # type: ignore[dict-item]
    if latest_ms is not None:
        given["budget"] = {"staleness": format_duration(latest_ms)}
    return QuerySpec.from_mapping(given)


@dataclass(slots=True)
class _Step:
    """Events born in one step. `arrived_ms`: when, in the query's event time; `kept`: those processed so far."""

    events: Events
    arrived_ms: IntArray
    kept: BoolArray


class EarlyAnswerSimulation:
    """Runs one query on a workload.

    Args:
        sampling: edges process no more than the contract needs, as of an expensive measure; else all they read.
        latest_ms: staleness budget.
    """

    def __init__(
        self, workload: Workload, target: AccuracyTarget, measure: MeasureKind, event_cost_ms: float, *,
        substream_ms: int, silence: SilentSource | None = None, latest_ms: int | None = None, sampling: bool = True,
    ) -> None:  # fmt: skip
        self.workload, self.measure, self.event_cost_ms = workload, measure, event_cost_ms
        self.silence, self.sampling = silence, sampling
        self.spec = query_spec(workload, target, measure, substream_ms, latest_ms)
        clock = report_schedule(self.spec.window, self.spec.accuracy, self.spec.lateness_ms)
        assert clock is not None
        self.clock = clock
        self.edges = [EdgeId(f"edge{i:03}") for i in range(workload.sources)]
        self._origin_ms = FIRST_WINDOW * workload.window_ms
        self._disorder_ms = clock.grid.lags * clock.grid.slot_ms  # for so long an edge keeps a slice open
        self._per_window = workload.window_ms // workload.step_ms
        self._steps: dict[int, _Step] = {}
        self._processed: list[int] = []  # by step, and by step and edge
        self._counts: list[list[int]] = []
        self._outcomes: dict[int, WindowOutcome] = {}
        self._begin(0)

    def run(self, progress: Progress = lambda done: None) -> list[WindowOutcome]:
        """The outcomes, window by window."""
        for index in range(self.workload.windows + self._per_window - 1):
            if index and self.workload.restarts_before(index):
                self._drain()
                self._begin(index)
            self._add(index)
            self._pass(self._start(index + 1))
            if index >= self._per_window - 1:
                progress(index - self._per_window + 2)
        self._drain()
        return [replace(self._outcomes[i], processed=self._processed_in(i)) for i in sorted(self._outcomes)]

    # Time

    def _start(self, step: int) -> int:
        """Event time at which a step begins."""
        return self._origin_ms + step * self.workload.step_ms

    def _begin(self, step: int) -> None:
        """The query is registered as the step begins; nothing is known of what was before."""
        self._first, self.now_ms = step, self._start(step)
        has_values, grouped = self.measure != "count", self.workload.groups > 1
        self._readers = [
            SimulatedEdge(i + 1, self.clock.grid, grouped=grouped, has_values=has_values)
            for i in range(len(self.edges))
        ]
        self._waiting = [np.zeros(0, dtype) for dtype in (np.int64, np.int64, np.int64, float, np.int64, np.int64)]
        self._places = np.zeros(0, np.int64)
        self._closed = [step] * len(self.edges)  # by edge: the first step of which it has not closed the slice
        self._seen: list[set[int]] = [set() for _ in self.edges]  # by edge: steps it has read events of
        self._touched: list[set[int]] = [set() for _ in self.edges]  # and those whose partial it has shipped
        self._open: dict[int, int] = {}
        self._frames = 0
        self._rates: dict[EdgeId, float] = {}
        self._rates_at_ms = self._beat_at_ms = -(1 << 62)
        self.ledger = Ledger()
        self.ledger.handle(EdgesChanged(tuple(map(_record, self.edges))))
        self.ledger.handle(QueryRegistered(RegisteredQuery(REF, self.spec, self.now_ms - 1, None)))
        self._report()

    def _pass(self, until_ms: int) -> None:
        """Time goes on, from point to point."""
        while True:
            point_ms = self.clock.starts_at(self.clock.next_report_slot(self.clock.slot_at(self.now_ms)))
            if point_ms > until_ms:
                return
            tick_ms = self.now_ms
            while (due_ms := self.ledger.next_deadline()) is not None and max(due_ms, tick_ms + 1) < point_ms:
                tick_ms = max(due_ms, tick_ms + 1)
                self._answer(self.ledger.handle(TimeAdvanced(tick_ms)))
            self.now_ms = point_ms
            self._read(point_ms)
            self._report()

    def _drain(self) -> None:
        """Time goes on without new events until all windows are answered."""
        while self._open:
            self._pass(self.now_ms + self.clock.grid.substream_ms)
        self._read(1 << 62)

    # Edges

    def _add(self, index: int) -> None:
        """The events of a step, in the order in which they will arrive."""
        events = self.workload.step(index)
        born = np.floor(events.event_ms).astype(np.int64) + self._origin_ms
        came = np.maximum(np.floor(events.arrival_ms).astype(np.int64) + self._origin_ms, born)
        self._steps[index] = _Step(events, came, np.zeros(len(events), bool))
        self._processed.append(0)
        self._counts.append(np.bincount(events.source, minlength=len(self.edges)).tolist())
        columns = (came, born, events.source, events.value, events.group, np.full(len(events), index))
        merged = [np.concatenate(pair) for pair in zip(self._waiting, columns, strict=True)]
        places = np.concatenate([self._places, np.arange(len(events))])
        order = np.argsort(merged[0], kind="stable")
        self._waiting, self._places = [column[order] for column in merged], places[order]
        if (window := index - self._per_window + 1) >= self._first:
            self._open[self._start(window)] = window

    def _read(self, before_ms: int) -> None:
        """Edges read what arrives before a time."""
        cut = int(np.searchsorted(self._waiting[0], before_ms))
        came, born, source, value, group, step = (column[:cut] for column in self._waiting)
        places, self._places = self._places[:cut], self._places[cut:]
        self._waiting = [column[cut:] for column in self._waiting]
        order = np.argsort(source, kind="stable")
        cuts = np.searchsorted(source[order], np.arange(len(self.edges) + 1)).tolist()
        for i, reader in enumerate(self._readers):
            mine = order[cuts[i] : cuts[i + 1]]
            if not len(mine):
                continue
            kept = reader.read(born[mine], came[mine], value[mine], group[mine])
            self._note_read(i, step[mine], places[mine], kept)

    def _note_read(self, edge: int, step: IntArray, places: IntArray, kept: IntArray) -> None:
        for index in np.unique(step).tolist():
            self._seen[edge].add(index)
            chosen = places[kept[step[kept] == index]]
            self._processed[index] += len(chosen)
            if index in self._steps:
                self._steps[index].kept[chosen] = True

    def _report(self) -> None:
        """All edges that can be heard report up to now, and hear at which rate to sample."""
        heard = [i for i in range(len(self.edges)) if not self._is_silent(i)]
        facts = tuple(self._fact(i) for i in heard)
        self._answer(self.ledger.handle(FramesMerged(facts, self.now_ms)))
        if not self.sampling:
            return
        if self.now_ms - self._rates_at_ms >= RATES_EVERY_MS:
            self._rates_at_ms, rates = self.now_ms, self.ledger.needed_rates()[REF]
            self._rates = rates if rates_differ(self._rates, rates) else self._rates
        if self.now_ms - self._beat_at_ms >= HEARTBEAT_MS:
            self._beat_at_ms = self.now_ms
            for i in heard:
                order = SamplingRequirement(REF, self._rates.get(self.edges[i], 1.0), always=True)
                self._readers[i].heartbeat(order)

    def _is_silent(self, edge: int) -> bool:
        silence = self.silence
        if silence is None or edge != silence.source:
            return False
        return self._start(silence.first) < self.now_ms <= self._start(silence.last)

    def _fact(self, edge: int) -> FrameSummary:
        """The frame that the edge ships now."""
        width = self.workload.step_ms
        through = max((self.now_ms - self._disorder_ms - self._origin_ms) // width, self._first)
        closes = [
            SliceClose(self._start(i), self._counts[i][edge], 0)
            for i in range(self._closed[edge], min(through, len(self._counts)))
        ]
        self._closed[edge] = through
        ended = {i for i in self._seen[edge] - self._touched[edge] if self._start(i + 1) <= self.now_ms}
        self._touched[edge] |= ended
        self._frames += 1
        return FrameSummary(
            REF, self._frames, self.edges[edge], self._start(through), tuple(closes),
            tuple(map(self._start, sorted(ended))), 0, self.now_ms, "i", None, self._readers[edge].report(self.now_ms),
        )  # fmt: skip

    # Answers

    def _answer(self, emissions: Sequence[Emission]) -> None:
        for emission in emissions:
            window = self._open.pop(emission.window_start_ms, None)
            if window is not None:
                self._outcomes[window] = self._outcome(window, emission)
        if emissions:
            oldest = min(self._open.values(), default=len(self._counts) - self._per_window + 1)
            for index in [i for i in self._steps if i < oldest]:
                del self._steps[index]

    def _outcome(self, window: int, emission: Emission) -> WindowOutcome:
        """The window's first answer; what will have been processed of it is added at the end."""
        steps = [self._steps[i] for i in range(window, window + self._per_window)]
        group, value = (np.concatenate([getattr(s.events, name) for s in steps]) for name in ("group", "value"))
        came, kept = np.concatenate([s.arrived_ms for s in steps]), np.concatenate([s.kept for s in steps])
        groups = self.workload.groups
        truth = true_values(group, value, self.measure, groups)
        events, end_ms, given_ms = len(came), emission.window_end_ms, emission.answered_at_ms
        ready_ms = queue_end_ms(came[kept] - end_ms, self.event_cost_ms, given_ms - end_ms)
        assert emission.quality.accuracy is not None
        prediction = emission.quality.accuracy.prediction
        estimate, half = np.full(groups, np.nan), np.full(groups, np.nan)
        if prediction is None:  # the answer is what has come
            here = came < given_ms
            arrived, promised = int(here.sum()), 1.0
            estimate = true_values(group[here], value[here], self.measure, groups)
            if emission.phase is not Phase.EARLY:
                half = np.zeros(groups)
        else:
            arrived = round(prediction.arrived)
            told = [o for o in prediction.outlooks if o.promised]
            at = [int(str(group_values(o.key)[0])) if o.key else 0 for o in told]
            estimate[at], half[at] = [o.estimate for o in told], [o.half_width for o in told]
            truth = np.where(np.isin(np.arange(groups), at), truth, np.nan)
            promised = len(told) / max(len(np.unique(group)), 1)
        met = all(v.code != ACCURACY for v in emission.quality.violations)
        latency_ms = max(ready_ms, given_ms - end_ms)
        return WindowOutcome(estimate, truth, half, latency_ms, 0, max(events - arrived, 0), events, promised, met)

    def _processed_in(self, window: int) -> int:
        return sum(self._processed[window : window + self._per_window])


def _record(edge: EdgeId) -> EdgeRecord:
    return EdgeRecord(
        edge=edge, incarnation="i", labels={}, streams=(StreamRecord("events", COLUMNS, LIVE),), first_seen_ms=0,
        last_seen_ms=0, connected=True, watermarks={}, records={}, drops={}, backlog_bytes=0, bandwidth_bytes_s=0.0,
        rtt_ms=0.0, clock_offset_ms=0.0, retired=False, incarnations=1,
    )  # fmt: skip
