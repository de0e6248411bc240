"""`EarlyAnswerEstimator`: one query's arrivals at its edges, and the estimates of its windows.

Edges report arrivals up to *report slots* (`edgewater.arrivals.ReportSchedule`). Time advances from report slot to
report slot: to the last one that all edges have reported which are not silent, so that the counts of all edges are of
the same moment. An edge that has not reported for `silence_timeout_ms` is silent. Its state stops, the trigger expects
it to go on at its usual rate, and it catches up when it reports again.

Each group of a query has an estimator of its own; a query without groups has one. With more than `MAX_GROUPS` groups
all are removed, and for a while windows are answered when they are complete.

Every change of the state goes through `apply` as a list of JSON. The changes since a snapshot are the state's log:
applying them to the snapshot gives the same state, and therefore the same answers.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from center.early.alignment import next_report_slot
from center.early.arrival_counts import EdgeReport
from center.early.conformal import ConformalRecord
from center.early.group_batch import BatchEvaluation
from center.early.groups import Groups
from center.early.prediction import GroupPrediction, Prediction, combine_groups
from center.early.sampling_reasons import SamplingReasonHistory
from center.early.trigger import EarlyTrigger
from edgewater.arrivals import DEFAULT_MAX_SKEW_MS, GroupedSubstream, ReportSchedule, SubstreamStatistics
from edgewater.model.accuracy import Accuracy
from edgewater.synopses import IntArray
from edgewater.wire import SamplingReason

SILENCE_TIMEOUT_MS = 1_000
"""Wall time, besides a sub-stream of event time, after which an edge that has not reported is silent."""
MAX_SILENCE_LAGS, MAX_LEAP_LAGS = 8, 16
"""In longest lags: the silence after which an edge starts anew, and the leap of time after which the query does."""
COVERAGE_WINDOWS = 400
"""Windows over which coverage is measured."""
MAX_ERROR_RATIO = 10.0
"""Bound of recorded errors, in half-widths."""
REVISION_OFFSETS = tuple(5 << n for n in range(12))
"""Slots after a window's end at which an early answer of a query with groups is evaluated again."""

MORE_HAVE_COME = "more records have come than the estimate expects"
RETIRED_EDGES = "the window contains records from retired edges; the estimate excludes them"

Change = list[Any]

_Inherited = Sequence[Any]
"""`Delays`, with the sums as base64."""

_UNKNOWN_SLOT = -(1 << 62)


class Delays(NamedTuple):
    """What is known of the delays of an edge's records.

    Attributes:
        slots: for which they have been observed.
        sums: of the `ArrivalTriangle`, float32 [arrivals or at risk, memory, lag].
        late, uneven: of the `StragglerModel`, of all edges.
    """

    slots: int
    sums: NDArray[np.float32]
    late: float
    uneven: float


@dataclass(slots=True)
class _Edge:
    """What is known of an expected edge.

    Attributes:
        reports: reports that are not applied yet.
        future: (slot, lag, count, group number) of applied arrivals in slots that are still to come.
        known_from: lags are known of events born from this slot on.
        silent_slots: slots since its last report.
        applied: its last applied report slot; None: no report has been applied.
        unread: it may have had unread input at its last applied report.
        checked_from: events born before this slot may have waited for the edge, not for their source: declared delays
            say nothing of them.
        gap: slots between its last two reports; 0: there were no two.
    """

    reports: list[EdgeReport] = field(default_factory=list)
    future: list[list[int]] = field(default_factory=list)
    known_from: int = 0
    silent_slots: int = 0
    applied: int | None = None
    unread: bool = False
    checked_from: int = _UNKNOWN_SLOT
    gap: int = 0

    @property
    def reported_slots(self) -> list[int]:
        slots = [r.slot for r in self.reports]
        return slots if self.applied is None else [*slots, self.applied]


@dataclass(frozen=True, slots=True)
class _Answered:
    """The first and the last answer to a window.

    Attributes:
        early: the first was given before the window was complete.
        settled: the error of the first is recorded, since the window is complete.
    """

    first: Prediction
    last: Prediction
    early: bool
    settled: bool = False


class EarlyAnswerEstimator:
    """Estimates the windows of one query. Slots are those of the report schedule.

    Args:
        max_wait_slots: slots after a window's end at which it is answered at the latest; None: no limit.
        speed: event ms per wall ms; it may be set when the stream's clock becomes known.
    """

    # Attributes that are JSON themselves, for snapshots.
    _PLAIN = ("_slot", "_previous_slot", "_known_from", "_counted_from", "_sampled_before", "now_ms")

    def __init__(
        self, accuracy: Accuracy, schedule: ReportSchedule, max_wait_slots: int | None, speed: float = 1.0
    ) -> None:
        self.accuracy, self.schedule, self._max_wait_slots = accuracy, schedule, max_wait_slots
        self.speed = speed
        self._edges: dict[str, _Edge] = {}
        self._slot: int | None = None  # None: no time is known yet
        self._previous_slot = 0
        self._known_from = 0  # lags are known of events born from this slot on
        self._counted_from = _UNKNOWN_SLOT  # events born from this slot on are counted
        self._sampled_before = _UNKNOWN_SLOT  # uncounted events born before this slot may have been sampled
        self._groups = Groups(self._new_trigger, accuracy, schedule)
        self._reasons = SamplingReasonHistory()
        self._intervals = ConformalRecord(accuracy.confidence, accuracy.scope)
        self._waits: dict[int, int] = {}  # by start of the window, the slot until which it waits
        self._answers: dict[int, _Answered] = {}
        self._covered: deque[float] = deque(maxlen=COVERAGE_WINDOWS)
        self._exceeding: dict[str, int] = {}  # by edge, the records that came later than the declared delays
        self._inherited: dict[str, _Inherited] = {}  # by edge whose first report is not applied
        self.now_ms = 0
        self.log: list[Change] = []

    # Input

    def apply(self, change: Change) -> None:
        """Applies a change and appends it to `log`. No other method modifies the logged state."""
        kind, *arguments = change
        handlers: dict[str, Callable[..., None]] = {
            "expect": self._expect, "report": self._add_report, "advance": self._advance, "wait": self._wait,
            "answered": self._add_answer, "settled": self._settle, "final": self._finalize,
            "remove": self._groups.remove, "inherit": self._inherit,
        }  # fmt: skip
        handlers[kind](*arguments)
        self.log.append(change)

    def expect(self, edges: Iterable[str]) -> None:
        """Sets the expected edges."""
        if list(edges) != self.edges:
            self.apply(["expect", list(edges)])

    def add_report(
        self, edge: str, through_ms: int, substreams: Iterable[bytes], reason: SamplingReason = SamplingReason.NONE,
        unread: bool = False,
    ) -> None:  # fmt: skip
        """Adds an edge's report, `edgewater.wire.Arrivals`.

        Raises:
            SynopsisError: the statistics cannot be read; nothing is changed.
        """
        encoded = _to_base64(substreams)
        self.apply(["report", edge, through_ms, encoded, int(reason), unread, self._resumes(edge, through_ms)])

    def _resumes(self, name: str, through_ms: int) -> bool:
        """Whether a report ends a silence that is no habit of the edge: it may have been down, and read nothing."""
        edge = self._edges.get(name)
        if edge is None or not edge.gap:
            return False
        gap = self.schedule.slot_at(through_ms) - max(edge.reported_slots)
        return gap * self.schedule.grid.slot_ms > self.silence_timeout_ms and gap > 2 * edge.gap

    def delays(self) -> dict[str, Delays]:
        """Returns what is known of the delays of edges that report now; nothing with groups."""
        if self.accuracy.scope is not None or not len(self._groups):
            return {}
        trigger = next(iter(self._groups)).trigger
        observed, sums, model = trigger.triangle.observed.tolist(), trigger.triangle.sums, trigger.model
        return {
            name: Delays(observed[i], np.asarray(sums[:, :, i]), float(model.late[0]), float(model.uneven[0]))
            for i, (name, edge) in enumerate(self._edges.items())
            if edge.applied is not None and not edge.silent_slots and not edge.unread
        }

    def inherit(self, delays: Mapping[str, Delays]) -> None:
        """Takes over `delays` of another query that counts the same records of the same edges in the same slots.

        It counts from an edge's first report on.
        """
        if delays:
            encoded = {e: [d.slots, *_to_base64([d.sums.tobytes()]), d.late, d.uneven] for e, d in delays.items()}
            self.apply(["inherit", encoded])

    def advance(self, now_ms: int, *, force: bool = False) -> None:
        """Advances event time to `now_ms`.

        Args:
            force: do not wait for edges that have not reported the latest report slot.
        """
        self.now_ms = max(self.now_ms, now_ms)
        target, reporting = next_report_slot(
            self.schedule,
            {name: edge.reported_slots for name, edge in self._edges.items()},
            {name: edge.silent_slots for name, edge in self._edges.items()},
            self._slot,
            self.now_ms,
            self.silence_timeout_ms,
            force=force,
        )
        if target is not None:
            self.apply(["advance", target, reporting])

    def on_answered(self, start_ms: int, prediction: Prediction, *, early: bool) -> None:
        """Records an answer. Not early: the window was answered when it was complete."""
        self.apply(["answered", start_ms, early, *prediction.to_list()])

    def settle(self, start_ms: int) -> None:
        """Records the errors of a window's first early answer when the window is complete.

        Late records may still come: `finalize` corrects the errors.
        """
        answered = self._answers.get(start_ms)
        if answered is not None and answered.early and not answered.settled:
            self.apply(["settled", start_ms, self._compared(start_ms, answered.first)[1], answered.first.widening])

    def finalize(self, start_ms: int) -> bool | None:
        """Records that a window is final.

        Returns:
            Whether the intervals of its first early answer contain the true values; None: not known.
        """
        answered = self._answers.get(start_ms)
        held: list[bool] = []
        ratios: list[float] = []
        widening = 1.0
        if answered is not None and answered.early:
            held, ratios = self._compared(start_ms, answered.first)
            widening = answered.first.widening
        if answered is not None or start_ms in self._waits:
            self.apply(["final", start_ms, self._coverage(held), ratios, widening])
        return all(held) if held else None

    def _compared(self, start_ms: int, first: Prediction) -> tuple[list[bool], list[float]]:
        """Compares an answer with the reports of all records so far.

        Returns:
            By group, whether its interval contains the true value, and its error in half-widths of the model; empty if
            the true values are not known, and without errors if no interval was promised.
        """
        if self._groups.from_other_edges(start_ms, self.edges)[0]:
            return [], []
        predicted = [p for p in first.by_group if p.eligible]
        with self._groups.including(self._unapplied_reports(), self.slot, len(self._edges)):
            truths = self._groups.true_values(start_ms, self.edges)
        known = [(p, truth) for p in predicted if (truth := truths.get(p.key)) is not None]
        if len(known) < len(predicted):
            return [], []
        ratios = [_error_ratio(p, truth, first.widening) for p, truth in known] if first.bounded else []
        return [_contains(p, truth) for p, truth in known], ratios

    def forget_before(self, start_ms: int) -> None:
        """Drops sub-streams that belong to final windows only. Not logged: it follows from the ledger's state."""
        self._groups.forget_before(start_ms)
        self._reasons.forget_before(self.schedule.slot_at(start_ms))
        if idle := self._groups.idle(self.slot):
            self.apply(["remove", idle])

    # State

    @property
    def silence_timeout_ms(self) -> int:
        """Event time after which an edge that has not reported is silent."""
        return self.schedule.grid.substream_ms + round(SILENCE_TIMEOUT_MS * self.speed)

    @property
    def edges(self) -> list[str]:
        """The expected edges; an edge's index is the number of its source."""
        return list(self._edges)

    @property
    def slot(self) -> int:
        """The current slot: estimates use the arrivals before it."""
        return self._slot if self._slot is not None else _UNKNOWN_SLOT

    @property
    def coverage(self) -> float | None:
        """The share of intervals (scope "each"), or else of windows, that contained the true values."""
        return sum(self._covered) / len(self._covered) if self._covered else None

    @property
    def has_too_many_groups(self) -> bool:
        """Whether there are more groups than `MAX_GROUPS`, or were until recently."""
        return self._groups.overflow_until is not None

    @property
    def group_count(self) -> int:
        return len(self._groups)

    @property
    def has_lost_sample(self) -> bool:
        """Whether an unknown number of records may have been sampled out when there were too many groups."""
        return self._groups.lost_sample

    @property
    def unread(self) -> list[str]:
        """The edges that may have unread input: their reports do not cover all arrivals."""
        return [name for name, edge in self._edges.items() if edge.unread]

    @property
    def exceeding(self) -> Mapping[str, int]:
        """By edge, the records that came later than the declared delays: since the first, nothing is declared."""
        return self._exceeding

    def has_observed(self, start_ms: int) -> bool:
        """Whether the lags of all events of the window are known."""
        began = self.schedule.slot_at(start_ms)
        return self._slot is not None and not self.has_too_many_groups and began >= self._known_from

    def has_ended(self, start_ms: int) -> bool:
        return self.schedule.slot_at(start_ms) + self.schedule.window_slots <= self.slot

    def is_revision_due(self, start_ms: int) -> bool:
        """Whether an early answer should be evaluated again.

        With groups this is at increasing intervals, since each group is evaluated. It is not while a silent edge may
        have events older than the longest lag, which no model covers.
        """
        began = self.schedule.slot_at(start_ms)
        if self._waits_for_readers:
            return False
        silent_slots = max((edge.silent_slots for edge in self._edges.values()), default=0)
        if min(silent_slots, self.slot - began) > self.schedule.grid.lags:
            return False
        end = began + self.schedule.window_slots
        return self.accuracy.scope is None or any(self._previous_slot < end + o <= self.slot for o in REVISION_OFFSETS)

    def last_answer(self, start_ms: int) -> Prediction | None:
        answered = self._answers.get(start_ms)
        return answered.last if answered else None

    def has_unknown_sample(self, start_ms: int) -> bool:
        """Whether records may have been sampled out that are not counted, or a retired edge sampled the window."""
        lost = self.has_lost_sample or self.schedule.slot_at(start_ms) < self._sampled_before
        return lost or self._groups.from_other_edges(start_ms, self.edges)[1]

    def sampling_reasons(self, start_ms: int) -> dict[str, frozenset[SamplingReason]]:
        """Returns, per edge that sampled the window, the reasons that it reported."""
        began = self.schedule.slot_at(start_ms)
        sampled = self._groups.sampled_edges(start_ms, self.edges)
        return self._reasons.in_window(sampled, began, began + self.schedule.window_slots)

    # Estimates

    def decide(self, start_ms: int) -> Prediction | None:
        """Returns the answer to an ended window, or None if it waits.

        It is answered when each group with an interval meets the accuracy or cannot meet it by waiting.
        """
        if not self.has_observed(start_ms) or not self.has_ended(start_ms) or self._waits_for_readers:
            return None
        if self._waits.get(start_ms, 0) > self.slot:
            return None
        evaluations, reasons, until = self._groups.decide(start_ms, self.edges, self._intervals.widening)
        if until is not None:
            self.apply(["wait", start_ms, until])
        if not reasons or until is not None:
            return None
        return self._prediction(start_ms, evaluations, reasons, self.unread, self._intervals.widening)

    def predict(self, start_ms: int) -> Prediction:
        """Returns the current estimate of a window, whether it meets the accuracy or not."""
        widening = self._intervals.widening
        evaluations = self._groups.evaluate(start_ms, self.edges, widening=widening)
        return self._prediction(start_ms, evaluations, {}, self.unread, widening)

    def predict_complete(self, start_ms: int) -> tuple[Prediction | None, dict[str, frozenset[SamplingReason]]]:
        """Returns the estimate of a complete window of which edges sampled, and `sampling_reasons`.

        Without sampling it is None, since the answer's data are exact. All of the window has been reported, though
        possibly in report slots that not all edges have reached. So the window need not have ended by the current slot
        (sources may end within it), nor have begun after lags became known (as after a long silence).
        """
        if self._slot is None or self.has_too_many_groups or self.schedule.slot_at(start_ms) < self._counted_from:
            return None, {}
        with self._groups.including(self._unapplied_reports(), self.slot, len(self._edges)):
            reasons = self.sampling_reasons(start_ms)
            if not reasons:
                return None, {}
            evaluations = self._groups.evaluate(start_ms, self.edges, complete=True)
            return self._prediction(start_ms, evaluations, {}, complete=True), reasons

    def rates(self) -> dict[str, float]:
        """Returns per edge the sampling rate that the next window needs; empty while there are no estimates."""
        if not len(self._groups):
            return dict.fromkeys(self.edges, 1.0) if self.has_too_many_groups else {}
        last = self._answers[max(self._answers)].last if self._answers else None
        rates = self._groups.rates({p.key for p in last.by_group if p.eligible} if last is not None else set())
        return dict(zip(self.edges, rates, strict=True)) if rates else dict.fromkeys(self.edges, 1.0)

    @property
    def _waits_for_readers(self) -> bool:
        """Whether an edge that reports has unread input, so that more arrivals will be reported."""
        return any(edge.unread and not edge.silent_slots for edge in self._edges.values())

    def _unapplied_reports(self) -> Iterator[tuple[str, SubstreamStatistics | GroupedSubstream]]:
        for name, edge in self._edges.items():
            yield from ((name, statistics) for report in edge.reports for statistics in report.substreams)

    def _prediction(
        self, start_ms: int, evaluations: Sequence[BatchEvaluation], reasons: Mapping[str, str],
        unread: Sequence[str] = (), widening: float = 1.0, *, complete: bool = False,
    ) -> Prediction:  # fmt: skip
        groups = [prediction for evaluation in evaluations for prediction in evaluation.predictions(reasons)]
        silent = tuple(name for name, edge in self._edges.items() if edge.silent_slots)
        never_reported = [n for n, edge in self._edges.items() if edge.applied is None] if not complete else []
        waited = max(self.slot - self.schedule.slot_at(start_ms) - self.schedule.window_slots, 0)
        is_grouped = self.accuracy.scope is not None
        result = combine_groups(groups, is_grouped, never_reported, silent, waited, unread, widening)
        if not complete and result.bounded and self._is_refuted(start_ms, groups):
            result = result.without_bounds(MORE_HAVE_COME)
        has_others, _ = self._groups.from_other_edges(start_ms, self.edges)
        return result.without_bounds(result.reason or RETIRED_EDGES) if has_others else result

    def _is_refuted(self, start_ms: int, groups: Iterable[GroupPrediction]) -> bool:
        """Whether more records have come than expected, by more than the error; not all reports may be applied yet."""
        with self._groups.including(self._unapplied_reports(), self.slot, len(self._edges)):
            arrived = self._groups.arrived(start_ms, self.edges)
        most = 1 + self.accuracy.error
        return any(g.eligible and arrived[g.key] > most * g.expected for g in groups)

    def _coverage(self, held: Sequence[bool]) -> float | None:
        """The window's contribution to the measured coverage."""
        if not held:
            return None
        return float(all(held)) if self.accuracy.scope == "all" else sum(held) / len(held)

    # Changes

    def _expect(self, edges: Sequence[str]) -> None:
        before, old = self.edges, self._edges
        for name in [name for name in old if name not in edges]:
            for statistics in (s for report in old[name].reports for s in report.substreams):
                self._groups.add_counts(name, statistics)
        self._edges = {name: old.get(name) or _Edge() for name in edges}
        self._reasons.keep(edges)
        if not edges:
            self._stop_counting(self.slot)
            self._slot = None
            self._groups.clear()
        elif self._slot is not None:
            self._remap_sources([before.index(name) if name in before else None for name in edges])

    def _remap_sources(self, rows: Sequence[int | None]) -> None:
        """Source i becomes what was source `rows[i]`; None: it starts empty."""
        self._groups.remap_sources(rows)
        for edge, row in zip(self._edges.values(), rows, strict=True):
            if row is None:
                edge.known_from, edge.silent_slots = self.slot, 0

    def _new_trigger(self, sources: int) -> EarlyTrigger:
        schedule, accuracy = self.schedule, self.accuracy
        return EarlyTrigger(
            sources, schedule.grid, schedule.window_slots, accuracy.target, accuracy.early_kind,
            max_wait_slots=self._max_wait_slots, horizon=None if self._exceeding else self._declared_lags,
        )  # fmt: skip

    @property
    def _declared_lags(self) -> int | None:
        """The number of lags that the declared delays allow: a delay may begin and end anywhere within its slots."""
        delays_ms = self.accuracy.delays_ms
        return None if delays_ms is None else -(-delays_ms // self.schedule.grid.slot_ms) + 1

    def _inherit(self, delays: Mapping[str, _Inherited]) -> None:
        self._inherited = dict(delays)

    def _add_report(
        self, edge: str, through_ms: int, substreams: Sequence[str], reason: int, unread: bool, resumed: bool = False
    ) -> None:
        report = EdgeReport(self.schedule.slot_at(through_ms), self._decode(substreams), unread)
        if edge in self._edges:
            reports, state = self._edges[edge].reports, self._edges[edge]
            if unread or resumed or (reports[-1].unread if reports else state.unread):
                state.checked_from = max(state.checked_from, report.slot)
            if state.reported_slots:
                state.gap = report.slot - max(state.reported_slots)
            self._check_delays(edge, report)
            self._edges[edge].reports.append(report)
            self._reasons.add(edge, report.slot, SamplingReason.from_number(reason))

    def _check_delays(self, name: str, report: EdgeReport) -> None:
        """Withdraws the declared delays if records have come later.

        Nothing is stated of records that have waited for the edge: those born before its first report, before its
        first report after a silence, and before one with unread input or the next.
        """
        edge, allowed = self._edges[name], self._declared_lags
        if allowed is None or edge.applied is None:
            return
        for statistics in report.substreams:
            arrivals = statistics.arrivals()
            slots, lags, counts = arrivals if isinstance(arrivals, tuple) else arrivals.T[:3]
            checked = slots - lags >= max(edge.known_from, edge.checked_from)
            count = int(counts[(lags >= allowed) & checked].sum())
            if count:
                if not self._exceeding:
                    self._groups.undeclare()
                self._exceeding[name] = self._exceeding.get(name, 0) + count

    def _decode(self, substreams: Sequence[str]) -> list[SubstreamStatistics | GroupedSubstream]:
        kind = SubstreamStatistics if self.accuracy.scope is None else GroupedSubstream
        return [kind.from_state(base64.b64decode(s), self.schedule.grid) for s in substreams]

    def _advance(self, target: int, reporting: Sequence[str]) -> None:
        if self._slot is None or target - self._slot > MAX_LEAP_LAGS * self.schedule.grid.lags:
            self._begin(target, reporting)
        slot = self.slot
        joining = [name for name in reporting if self._edges[name].applied is None]
        arrived = [self._arrivals(i, name, target) for i, name in enumerate(self._edges) if name in reporting]
        rows = np.concatenate(arrived) if arrived else np.zeros((0, 5), np.int64)
        self._groups.advance(slot, target, rows, np.array([name in reporting for name in self._edges]))
        for name, edge in self._edges.items():
            edge.silent_slots = 0 if name in reporting else edge.silent_slots + target - slot
        self._previous_slot, self._slot = slot, target
        if joining:
            # When an edge began to count before its first report is not known: it is observed from then on.
            self._remap_sources([None if name in joining else i for i, name in enumerate(self._edges)])
            for i, name in enumerate(self._edges):
                if name in joining and name in self._inherited:
                    slots, sums, late, uneven = self._inherited.pop(name)
                    self._groups.inherit(i, np.frombuffer(base64.b64decode(sums), np.float32), slots, late, uneven)
        if self._groups.overflow_until is not None and target >= self._groups.overflow_until:
            self._stop_counting(target)
            self._groups.clear()
            self._known_from = self._counted_from
            for edge in self._edges.values():
                edge.known_from = self._known_from

    def _begin(self, target: int, reporting: Sequence[str]) -> None:
        """Starts at `target`, or starts anew after a time of which nothing is known."""
        self._slot = self._known_from = self._substream_border(target)
        # Lags of earlier arrivals are not learnt from: the other arrivals of their time are not known.
        for edge in self._edges.values():
            edge.known_from, edge.silent_slots, edge.applied = self._known_from, 0, None
        if self.has_too_many_groups:
            self._stop_counting(self._slot)
        self._groups.begin(self._slot, len(self._edges))
        self._answers, self._waits = {}, {}

    def _stop_counting(self, slot: int) -> None:
        """Drops the counts of events born before a slot."""
        if self._slot is None:
            return
        self._counted_from = self._substream_border(slot + DEFAULT_MAX_SKEW_MS // self.schedule.grid.slot_ms, up=True)
        if self._groups.lost_sample or self._groups.is_sampled:
            self._sampled_before = self._counted_from

    def _substream_border(self, slot: int, *, up: bool = False) -> int:
        """The border of sub-streams at or before a slot; with `up`, at or after it."""
        slots = self.schedule.grid.substream_slots
        return -(-slot // slots) * slots if up else slot // slots * slots

    def _arrivals(self, source: int, name: str, target: int) -> IntArray:
        """Applies an edge's reports up to `target`; arrivals before the current slot catch up on its silence.

        Returns:
            (slot, source, lag, count, group number) of arrivals from the current slot to `target`.
        """
        edge, slot, lags = self._edges[name], self.slot, self.schedule.grid.lags
        applied = [r for r in edge.reports if r.slot <= target]
        edge.reports = [r for r in edge.reports if r.slot > target]
        if applied:
            edge.unread = applied[-1].unread
        parts = [np.array(edge.future, np.int64).reshape(-1, 4)]
        reporting = np.array([not e.silent_slots for e in self._edges.values()])
        since = np.array([e.known_from for e in self._edges.values()])
        parts += [
            self._groups.add_report(name, s, slot, reporting, since) for report in applied for s in report.substreams
        ]
        rows = np.concatenate(parts)
        rows = rows[rows[:, 0] - rows[:, 1] >= edge.known_from]
        is_future = rows[:, 0] >= target
        edge.future = rows[is_future].tolist()
        rows = rows[~is_future]
        if edge.applied is None:  # what it missed was not silence: nobody counted
            edge.silent_slots = 0
            rows = rows[:0]
        elif edge.silent_slots > MAX_SILENCE_LAGS * lags:
            self._remap_sources([None if i == source else i for i in range(len(self._edges))])
            rows = rows[rows[:, 0] - rows[:, 1] >= slot]
        elif edge.silent_slots:
            self._groups.catch_up(source, rows[rows[:, 0] < slot], slot)
            edge.silent_slots = 0  # so that groups that other edges report next take it as reporting
            rows = rows[rows[:, 0] >= slot]
        edge.applied = target
        # A lag beyond the longest was cut to it: the arrival is now, whatever slot that gives.
        rows[:, 0] = np.maximum(rows[:, 0], slot)
        return np.insert(rows, 1, source, axis=1)

    def _wait(self, start_ms: int, until: int) -> None:
        self._waits[start_ms] = until

    def _add_answer(self, start_ms: int, early: bool, *values: Any) -> None:
        prediction, answered = Prediction.from_list(values), self._answers.get(start_ms)
        self._waits.pop(start_ms, None)
        if answered:
            self._answers[start_ms] = replace(answered, last=prediction)
            return
        self._answers[start_ms] = _Answered(prediction, prediction, early)
        if self._slot is not None:
            self._groups.learn(start_ms, self.edges, prediction.by_group)

    def _settle(self, start_ms: int, ratios: Sequence[float], widening: float) -> None:
        self._intervals.add(start_ms, ratios, widening)
        self._answers[start_ms] = replace(self._answers[start_ms], settled=True)

    def _finalize(self, start_ms: int, covered: float | None, ratios: Sequence[float], widening: float) -> None:
        self._intervals.add(start_ms, ratios, widening)
        self._waits.pop(start_ms, None)
        if self._answers.pop(start_ms, None) is not None and covered is not None:
            self._covered.append(covered)

    # Snapshots

    def to_state(self) -> dict[str, Any]:
        """JSON of the whole state, except for `log`."""
        return {
            **{name.strip("_"): getattr(self, name) for name in self._PLAIN},
            "edges": [[name, self._edge_to_list(edge)] for name, edge in self._edges.items()],
            "groups": self._groups.to_state(), "reasons": self._reasons.to_state(),
            "intervals": self._intervals.to_state(), "waits": list(self._waits.items()),
            "covered": list(self._covered), "exceeding": self._exceeding, "inherited": self._inherited,
            "answers": [
                [s, a.first.to_list(), a.last.to_list(), a.early, a.settled] for s, a in self._answers.items()
            ],
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `to_state` into a new estimator; damaged JSON or bytes raise any exception."""
        for name in self._PLAIN:
            setattr(self, name, state[name.strip("_")])
        self._exceeding = dict(state["exceeding"])
        self._inherited = dict(state["inherited"])
        self._edges = {name: self._edge_from_list(values) for name, values in state["edges"]}
        self._groups.restore(state["groups"])
        self._reasons.restore(state["reasons"])
        self._intervals.restore(state["intervals"])
        self._waits = dict(map(tuple, state["waits"]))
        self._covered.extend(state["covered"])
        for start_ms, first, last, *facts in state["answers"]:
            self._answers[start_ms] = _Answered(Prediction.from_list(first), Prediction.from_list(last), *facts)

    def _edge_to_list(self, edge: _Edge) -> list[Any]:
        reports = [[r.slot, _to_base64(s.to_state() for s in r.substreams), r.unread] for r in edge.reports]
        return [
            reports, edge.future, edge.known_from, edge.silent_slots, edge.applied, edge.unread, edge.checked_from,
            edge.gap,
        ]  # fmt: skip

    def _edge_from_list(self, values: Sequence[Any]) -> _Edge:
        reports, *rest = values
        return _Edge([EdgeReport(slot, self._decode(each), unread) for slot, each, unread in reports], *rest)


def _contains(prediction: GroupPrediction, truth: float) -> bool:
    tolerance = 1e-9 * abs(truth)
    return bool(prediction.lower - tolerance <= truth <= prediction.upper + tolerance)


def _error_ratio(prediction: GroupPrediction, truth: float, widening: float) -> float:
    """The error of the estimate in half-widths of the model (without widening); rounded, because it is logged."""
    error, half_width = abs(prediction.estimate - truth), prediction.half_width / widening
    if error <= 1e-9 * abs(truth):
        return 0.0
    return round(min(error / half_width, MAX_ERROR_RATIO), 3) if half_width > 0 else MAX_ERROR_RATIO


def _to_base64(states: Iterable[bytes]) -> list[str]:
    return [base64.b64encode(state).decode() for state in states]
