"""Production's early answers under a virtual clock: edges report the arrivals of a workload, and the ledger answers.

The production code is the edges' statistics and samples (`edges.py`), the `Ledger` with its early-answer estimator, and
the sampling rates that it requests. Simulated are time, events, and the path between edges and center: reports arrive
immediately and have no partials. Time advances to each report slot and to each deadline of the ledger. A window's
answer is its first answer; revisions are not simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from center.early import RATES_EVERY_MS, SamplingPlan, SamplingRequirement, plans_differ
from center.early.window_prediction import GroupPrediction
from center.ledger import EdgesChanged, Emission, FramesMerged, FrameSummary, Ledger, QueryRegistered, TimeAdvanced
from edgewater.answers import Phase
from edgewater.answers.statement import ACCURACY
from edgewater.arrivals.schedule import HORIZON_WINDOWS
from edgewater.arrivals.targets import EXTREMES, AccuracyTarget, MeasureKind
from edgewater.base.errors import InvalidInput
from edgewater.base.quantities import format_duration
from edgewater.base.streams import LIVE, EdgeId
from edgewater.model.accuracy import group_values, report_schedule
from edgewater.model.edge_records import EdgeRecord, StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.synopses import BoolArray, FloatArray, IntArray
from edgewater.wire import QueryRef, SliceClose
from sim.early_answers.edges import SimulatedEdge
from sim.early_answers.workload import Events, Workload

Progress = Callable[[int], None]

REF, WATCHER = QueryRef("simulated", 1), QueryRef("watcher", 1)
COLUMNS = {"value": pa.float64(), "key": pa.int64()}
HEARTBEAT_MS = 1_000
FIRST_WINDOW = 1_000
"""Number of the workload's first window in the query's grid, so that event time starts after the epoch."""


@dataclass(frozen=True, slots=True)
class WindowOutcome:
    """The answer to one window, and the true values. Arrays have one value per group, float64.

    Attributes:
        truth: NaN for a group without events, and for a group that is not answered before the window is complete.
        half_width: half width of the interval; NaN if the algorithm states none, or only one bound.
        latency_ms: from the window's end until the answer is available, with processing.
        processed: number of events that the query's operator processed.
        missed: number of events that arrived too late for the answer.
        promised: fraction of the groups with events for which the answer has an interval.
        met: whether the answer states that the contract is met.
        early: whether it was given before the window was complete.
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
    early: bool = True


@dataclass(frozen=True, slots=True)
class SilentSource:
    """A source that is disconnected during windows [first, last) and reports all its events afterwards."""

    source: int
    first: int
    last: int


def true_values(group: IntArray, value: FloatArray, measure: MeasureKind, groups: int) -> FloatArray:
    """Returns the measure of all events per group. A mean or an extreme without events is NaN."""
    if measure in EXTREMES:
        extreme = np.full(groups, np.nan)
        (np.fmin if measure == "min" else np.fmax).at(extreme, group, value)
        return extreme
    count = np.asarray(np.bincount(group, minlength=groups), np.float64)
    if measure == "count":
        return count
    total = np.asarray(np.bincount(group, weights=value, minlength=groups), np.float64)
    if measure == "sum":
        return total
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total / count, np.float64)


def queue_end_ms(arrivals_ms: FloatArray, cost_ms: float, until_ms: float) -> float:
    """Returns when a server that needs `cost_ms` per event has processed the arrivals until `until_ms`."""
    at = np.sort(arrivals_ms[arrivals_ms <= until_ms])
    if not len(at):
        return until_ms
    # Lindley's recursion: finish_i = max over j ≤ i of arrival_j + (i - j + 1)·cost.
    return float((at - np.arange(len(at)) * cost_ms).max() + len(at) * cost_ms)


def query_spec(
    workload: Workload,
    target: AccuracyTarget,
    measure: MeasureKind,
    substream_ms: int,
    latest_ms: int | None,
    lateness_ms: int | None = None,
    delays_ms: int | None = None,
    ref: QueryRef = REF,
) -> QuerySpec:
    """Returns the query of a study. Raises InvalidQuery for a query that production refuses."""
    given: dict[str, object] = {
        "name": ref.name,
        "from": "events",
        "measures": {"answer": "count()" if measure == "count" else f"{measure}(value)"},
        "window": {"sliding": f"{workload.window_ms}ms", "every": f"{workload.step_ms}ms"},
        "accuracy": {
            "error": f"{100 * target.error:.12g}%",
            "confidence": f"{100 * target.confidence:.12g}%",
            "measure": "answer",
            "substream": f"{substream_ms}ms",
        },
        "lateness": f"{lateness_ms or int(HORIZON_WINDOWS * workload.window_ms)}ms",
    }
    more = {"delays": f"{delays_ms}ms"} if delays_ms is not None else {}
    if workload.groups > 1:
        given["group_by"], more["scope"] = ["key"], target.scope
    given["accuracy"] = {**given["accuracy"], **more}  # type: ignore[dict-item]
    if latest_ms is not None:
        given["budget"] = {"staleness": format_duration(latest_ms)}
    return QuerySpec.from_mapping(given)


@dataclass(slots=True)
class _Step:
    """The events of one step.

    Attributes:
        arrival_ms: arrival times by the query's clock.
        kept: mask of the events processed so far.
    """

    events: Events
    arrival_ms: IntArray
    kept: BoolArray


class _Answers:
    """The answers to one query: its ledger, and the outcome of each window."""

    def __init__(self, spec: QuerySpec, measure: MeasureKind, watcher: QuerySpec) -> None:
        self.spec, self.measure, self.watcher = spec, measure, watcher
        self.open: dict[int, int] = {}
        self.outcomes: dict[int, WindowOutcome] = {}
        self.ledger = Ledger()

    def begin(self, edges: Sequence[EdgeId], now_ms: int, ref: QueryRef, *, afresh: bool = True) -> None:
        """Registers the query or its watcher; with `afresh`, without history."""
        self.open, self.outcomes = {}, self.outcomes if afresh else {}
        if afresh:
            self.ledger = Ledger()
            self.ledger.handle(EdgesChanged(tuple(map(_record, edges))))
        spec = self.spec if ref == REF else self.watcher
        self.ledger.handle(QueryRegistered(RegisteredQuery(ref, spec, now_ms - 1, None)))

    def due_before(self, now_ms: int, until_ms: int) -> int | None:
        """Returns the next time after `now_ms` and before `until_ms` at which a deadline is due."""
        due_ms = self.ledger.next_deadline()
        at_ms = None if due_ms is None else max(due_ms, now_ms + 1)
        return at_ms if at_ms is not None and at_ms < until_ms else None


class EarlyAnswerSimulation:
    """Runs one query on a workload, or several over the same edges.

    Args:
        others: accuracies and measures of further queries. They share the edges' statistics and samples. So all have
            values or none, and their accuracies determine no rate.
        sampling: whether edges sample, as for an expensive measure, or process all events.
        fixed_rate: the rate at which edges sample, whatever the accuracy needs; None: the rate that it needs.
        latest_ms: staleness budget.
        disorder_ms: the edges' watermark delay, before which no window is complete, and the query's lateness. None: the
            longest lag.
        delays_ms: declared delays.
        watched: for the workload's first `watched` windows, an equal query is registered instead. It is not deleted.
    """

    def __init__(
        self,
        workload: Workload,
        target: AccuracyTarget,
        measure: MeasureKind,
        event_cost_ms: float,
        *,
        substream_ms: int,
        silent: SilentSource | None = None,
        latest_ms: int | None = None,
        sampling: bool = True,
        disorder_ms: int | None = None,
        fixed_rate: float | None = None,
        delays_ms: int | None = None,
        watched: int = 0,
        others: Sequence[tuple[AccuracyTarget, MeasureKind]] = (),
    ) -> None:
        has_values = [kind != "count" for _, kind in ((target, measure), *others)]
        if others and (len(set(has_values)) > 1 or (sampling and fixed_rate is None)):
            raise InvalidInput("others", len(others), "queries that need the same reports and no rate of their own")
        self.workload, self.measure, self.event_cost_ms = workload, measure, event_cost_ms
        self.silent, self.sampling, self.fixed_rate = silent, sampling, fixed_rate
        self._watched, self._ref = watched, WATCHER if watched else REF
        queries = [
            (workload, each, kind, substream_ms, latest_ms, disorder_ms) for each, kind in ((target, measure), *others)
        ]
        self._queries = [
            _Answers(query_spec(*each, delays_ms), each[2], query_spec(*each, ref=WATCHER)) for each in queries
        ]
        spec = self._queries[0].spec
        schedule = report_schedule(spec.window, spec.accuracy, spec.lateness_ms)
        assert schedule is not None
        self.schedule = schedule
        self.edges = [EdgeId(f"edge{i:03}") for i in range(workload.sources)]
        self._origin_ms = FIRST_WINDOW * workload.window_ms
        self._disorder_ms = disorder_ms or schedule.grid.lags * schedule.grid.slot_ms
        self._per_window = workload.window_ms // workload.step_ms
        self._steps: dict[int, _Step] = {}
        self._processed: list[int] = []  # number of processed events per step; _counts: per step and edge
        self._counts: list[list[int]] = []
        self._begin(0)

    def run(self, progress: Progress = lambda done: None) -> list[WindowOutcome]:
        """Returns the outcomes of all windows, in order."""
        return self.run_each(progress)[0]

    def run_each(self, progress: Progress = lambda done: None) -> list[list[WindowOutcome]]:
        """Returns the result of `run` for the query, and for each of the others."""
        for index in range(self.workload.windows + self._per_window - 1):
            if index and self.workload.restarts_before(index):
                self._drain()
                self._begin(index)
            if index and index == self._watched:
                self._ref = REF
                self._begin(index, afresh=False)
            self._add(index)
            self._advance(self._start(index + 1))
            if index >= self._per_window - 1:
                progress(index - self._per_window + 2)
        self._drain()
        return [
            [replace(query.outcomes[i], processed=self._processed_in(i)) for i in sorted(query.outcomes)]
            for query in self._queries
        ]

    def _start(self, step: int) -> int:
        """Returns the event time at which a step starts."""
        return self._origin_ms + step * self.workload.step_ms

    def _begin(self, step: int, *, afresh: bool = True) -> None:
        """Registers the query at the start of a step, with new edges; with `afresh`, a new ledger."""
        self._first, self.now_ms = step, self._start(step)
        has_values, grouped = self.measure != "count", self.workload.groups > 1
        self._readers = [
            SimulatedEdge(i + 1, self.schedule, grouped=grouped, has_values=has_values) for i in range(len(self.edges))
        ]
        if self.fixed_rate is not None:
            for reader in self._readers:
                reader.rate = self.fixed_rate
        self._pending = [np.zeros(0, dtype) for dtype in (np.int64, np.int64, np.int64, float, np.int64, np.int64)]
        self._positions = np.zeros(0, np.int64)
        self._closed = [step] * len(self.edges)  # per edge: the first step whose slice is open
        self._observed: list[set[int]] = [set() for _ in self.edges]  # per edge: steps whose events it has read
        self._shipped: list[set[int]] = [set() for _ in self.edges]  # per edge: steps whose partial it has shipped
        self._frames = 0
        self._plans: dict[EdgeId, SamplingPlan] = {}
        self._rates_at_ms = self._beat_at_ms = -(1 << 62)
        for query in self._queries:
            query.begin(self.edges, self.now_ms, self._ref, afresh=afresh)
        self._report()

    def _advance(self, until_ms: int) -> None:
        """Advances time to `until_ms`, from report slot to report slot."""
        while True:
            report_ms = self.schedule.starts_at(self.schedule.next_report_slot(self.schedule.slot_at(self.now_ms)))
            if report_ms > until_ms:
                return
            for query in self._queries:
                tick_ms = self.now_ms
                while (due_ms := query.due_before(tick_ms, report_ms)) is not None:
                    tick_ms = due_ms
                    self._answer(query, query.ledger.handle(TimeAdvanced(tick_ms)))
            self._forget()
            self.now_ms = report_ms
            self._read(report_ms)
            self._report()

    def _drain(self) -> None:
        """Advances time without new events until all windows are answered."""
        while any(query.open for query in self._queries):
            self._advance(self.now_ms + self.schedule.grid.substream_ms)
        self._read(1 << 62)

    def _add(self, index: int) -> None:
        """Queues the events of a step in order of arrival."""
        events = self.workload.step(index)
        event_ms = np.floor(events.event_ms).astype(np.int64) + self._origin_ms
        arrival_ms = np.maximum(np.floor(events.arrival_ms).astype(np.int64) + self._origin_ms, event_ms)
        self._steps[index] = _Step(events, arrival_ms, np.zeros(len(events), bool))
        self._processed.append(0)
        self._counts.append(np.bincount(events.source, minlength=len(self.edges)).tolist())
        columns = (arrival_ms, event_ms, events.source, events.value, events.group, np.full(len(events), index))
        merged = [np.concatenate(pair) for pair in zip(self._pending, columns, strict=True)]
        positions = np.concatenate([self._positions, np.arange(len(events))])
        order = np.argsort(merged[0], kind="stable")
        self._pending, self._positions = [column[order] for column in merged], positions[order]
        if (window := index - self._per_window + 1) >= self._first:
            for query in self._queries:
                query.open[self._start(window)] = window

    def _read(self, before_ms: int) -> None:
        """Makes edges read the events that arrive before a time."""
        cut = int(np.searchsorted(self._pending[0], before_ms))
        arrival_ms, event_ms, source, value, group, step = (column[:cut] for column in self._pending)
        positions, self._positions = self._positions[:cut], self._positions[cut:]
        self._pending = [column[cut:] for column in self._pending]
        order = np.argsort(source, kind="stable")
        cuts = np.searchsorted(source[order], np.arange(len(self.edges) + 1)).tolist()
        for i, reader in enumerate(self._readers):
            mine = order[cuts[i] : cuts[i + 1]]
            if not len(mine):
                continue
            kept = reader.read(event_ms[mine], arrival_ms[mine], value[mine], group[mine])
            self._note_read(i, step[mine], positions[mine], kept)

    def _note_read(self, edge: int, step: IntArray, positions: IntArray, kept: IntArray) -> None:
        for index in np.unique(step).tolist():
            self._observed[edge].add(index)
            chosen = positions[kept[step[kept] == index]]
            self._processed[index] += len(chosen)
            if index in self._steps:
                self._steps[index].kept[chosen] = True

    def _report(self) -> None:
        """Merges the reports of all connected edges and sends them their sampling rates."""
        connected = [i for i in range(len(self.edges)) if not self._is_silent(i)]
        facts = tuple(self._fact(i) for i in connected)
        for query in self._queries:
            self._answer(query, query.ledger.handle(FramesMerged(facts, self.now_ms)))
        self._forget()
        if not self.sampling or self.fixed_rate is not None:
            return
        if self.now_ms - self._rates_at_ms >= RATES_EVERY_MS:
            self._rates_at_ms, plans = self.now_ms, self._queries[0].ledger.needed_plans()[REF]
            self._plans = plans if plans_differ(self._plans, plans) else self._plans
        if self.now_ms - self._beat_at_ms >= HEARTBEAT_MS:
            self._beat_at_ms = self.now_ms
            for i in connected:
                plan = self._plans.get(self.edges[i], SamplingPlan())
                requirement = SamplingRequirement(REF, plan.rate, always=True)
                self._readers[i].heartbeat(requirement)

    def _is_silent(self, edge: int) -> bool:
        silent = self.silent
        if silent is None or edge != silent.source:
            return False
        return self._start(silent.first) < self.now_ms <= self._start(silent.last)

    def _fact(self, edge: int) -> FrameSummary:
        """Returns the summary of the frame that the edge ships now."""
        width = self.workload.step_ms
        through = max((self.now_ms - self._disorder_ms - self._origin_ms) // width, self._first)
        closes = [
            SliceClose(self._start(i), self._counts[i][edge], 0)
            for i in range(self._closed[edge], min(through, len(self._counts)))
        ]
        self._closed[edge] = through
        ended = {i for i in self._observed[edge] - self._shipped[edge] if self._start(i + 1) <= self.now_ms}
        self._shipped[edge] |= ended
        self._frames += 1
        return FrameSummary(
            self._ref,
            self._frames,
            self.edges[edge],
            self._start(through),
            tuple(closes),
            tuple(map(self._start, sorted(ended))),
            0,
            self.now_ms,
            "i",
            None,
            self._readers[edge].report(self.now_ms),
        )

    def _answer(self, query: _Answers, emissions: Sequence[Emission]) -> None:
        for emission in emissions:
            if emission.query != self._ref:
                continue
            window = query.open.pop(emission.window_start_ms, None)
            if window is not None:
                query.outcomes[window] = self._outcome(query.measure, window, emission)

    def _forget(self) -> None:
        """Drops the steps whose windows all queries have answered."""
        first_without = len(self._counts) - self._per_window + 1
        oldest = min((w for query in self._queries for w in query.open.values()), default=first_without)
        for index in [i for i in self._steps if i < oldest]:
            del self._steps[index]

    def _outcome(self, measure: MeasureKind, window: int, emission: Emission) -> WindowOutcome:
        """Returns the outcome of the window's first answer; `processed` is set at the end."""
        steps = [self._steps[i] for i in range(window, window + self._per_window)]
        group, value = (np.concatenate([getattr(s.events, name) for s in steps]) for name in ("group", "value"))
        arrival_ms, kept = np.concatenate([s.arrival_ms for s in steps]), np.concatenate([s.kept for s in steps])
        groups = self.workload.groups
        truth = true_values(group, value, measure, groups)
        events, end_ms, answered_ms = len(arrival_ms), emission.window_end_ms, emission.answered_at_ms
        ready_ms = queue_end_ms(arrival_ms[kept] - end_ms, self.event_cost_ms, answered_ms - end_ms)
        prediction = emission.prediction
        estimate, half = np.full(groups, np.nan), np.full(groups, np.nan)
        if prediction is None:  # the answer consists of the events that arrived
            present = arrival_ms < answered_ms
            arrived, promised = int(present.sum()), 1.0
            estimate = true_values(group[present], value[present], measure, groups)
            if emission.phase is not Phase.EARLY:
                half = np.zeros(groups)
        else:
            arrived = round(prediction.arrived)
            answered = [o for o in prediction.by_group if o.eligible]
            at = [int(str(group_values(o.key)[0])) if o.key else 0 for o in answered]
            for i, each in zip(at, answered, strict=True):
                estimate[i], half[i] = _interval(each, measure)
            truth = np.where(np.isin(np.arange(groups), at), truth, np.nan)
            promised = len(answered) / max(len(np.unique(group)), 1)
        met = ACCURACY not in emission.codes()
        latency_ms = max(ready_ms, answered_ms - end_ms)
        early = emission.phase is Phase.EARLY
        return WindowOutcome(
            estimate, truth, half, latency_ms, 0, max(events - arrived, 0), events, promised, met, early
        )

    def _processed_in(self, window: int) -> int:
        return sum(self._processed[window : window + self._per_window])


def _interval(prediction: GroupPrediction, measure: MeasureKind) -> tuple[float, float]:
    """Returns estimate and half-width of an answer. The half-width is NaN for an extreme with one bound."""
    lower, upper = prediction.lower, prediction.upper
    if measure not in EXTREMES:
        return prediction.estimate, prediction.half_width
    if not math.isfinite(upper - lower):
        return prediction.estimate, math.nan
    return (lower + upper) / 2, (upper - lower) / 2


def _record(edge: EdgeId) -> EdgeRecord:
    return EdgeRecord(
        edge=edge,
        incarnation="i",
        labels={},
        streams=(StreamRecord("events", COLUMNS, LIVE),),
        first_seen_ms=0,
        last_seen_ms=0,
        connected=True,
        watermarks={},
        records={},
        drops={},
        backlog_bytes=0,
        bandwidth_bytes_s=0.0,
        rtt_ms=0.0,
        clock_offset_ms=0.0,
        retired=False,
        incarnations=1,
    )
