"""`EarlyAnswerBook` answers windows of a query with an accuracy as soon as their estimate meets the accuracy.

The rules of `TimeWindowBook` apply. The accuracy changes neither the phases ``complete`` and ``final`` nor the deadline
of a staleness budget. It adds early answers. At each report and each deadline, the ledger advances the query's
`EarlyAnswerEstimator`. The estimator then decides about each ended window without an answer. An early answer is revised
when its estimate changes by a quarter of its interval.

The estimator is stored as a log. Each transaction adds its changes as one entry of the ledger's state. From time to
time, a snapshot replaces all entries. So a transaction writes only its own changes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from center.budgets.processing_delay import AnswerMargin
from center.early import Delays, EarlyAnswerEstimator, Prediction, SamplingPlan, needed_plan
from center.ledger.accuracy_facts import with_accuracy, without_false_bounds
from center.ledger.events import Emission, FrameSummary
from center.ledger.losses import MAX_AHEAD_MS, Losses
from center.ledger.state import EstimatorLogEntry, QueryState, StateEntry, StateTable, WindowState
from center.ledger.time_windows import TimeWindowBook
from edgewater.answers import Phase
from edgewater.base.streams import EdgeId
from edgewater.model.accuracy import report_schedule
from edgewater.model.edge_records import EdgeRecord
from edgewater.model.query import QuerySpec
from edgewater.wire import SamplingReason

SNAPSHOT = -1  # format: of the log
"""The number of the log entry that is a snapshot."""
COMPACT_BYTES = 1 << 18  # limit: size of a log
"""Size in bytes from which a snapshot replaces the log. The log must also be four times as large as the last
snapshot."""


class EarlyAnswerBook(TimeWindowBook):
    """The windows of a query with an accuracy."""

    def __init__(self, state: QueryState, entries: Iterable[tuple[str, int, StateEntry]], margin: AnswerMargin) -> None:
        self._log: StateTable[EstimatorLogEntry] = StateTable()
        others: list[tuple[str, int, StateEntry]] = []
        for kind, number, entry in entries:
            if isinstance(entry, EstimatorLogEntry):
                self._log.put(number, entry)
            else:
                others.append((kind, number, entry))
        super().__init__(state, others, margin)
        self._estimator = self._restore_estimator()
        self._withdraws = False  # whether all open windows with an early answer are answered again

    def _restore_estimator(self) -> EarlyAnswerEstimator:
        accuracy = self._spec.early_accuracy
        schedule = report_schedule(self._spec.window, accuracy, self._spec.lateness_ms)
        assert accuracy is not None and schedule is not None
        max_wait_slots = None if self._due_after_ms is None else self._due_after_ms // schedule.grid.slot_ms
        estimator = EarlyAnswerEstimator(accuracy, schedule, max_wait_slots, self._state.running_clock.speed)
        self._log_bytes = 0
        if (snapshot := self._log.get(SNAPSHOT)) is not None and snapshot.text.startswith("{"):
            self._forget_old_log(estimator, snapshot)
        for number, entry in sorted(self._log.items()):
            if number == SNAPSHOT:
                estimator.restore(entry.text)
                continue
            self._log_bytes += len(entry.text)
            for change in json.loads(entry.text):
                estimator.apply(change)
        estimator.log = []
        return estimator

    def _forget_old_log(self, estimator: EarlyAnswerEstimator, snapshot: EstimatorLogEntry) -> None:
        """Drops a snapshot of release 0.3.0 with its log. The estimator begins without history, as for a new query."""
        stored = json.loads(snapshot.text)
        changes = [change for n, e in self._log.items() if n != SNAPSHOT for change in json.loads(e.text)]
        slots = [slot for kind, slot, *_ in changes if kind == "advance"]
        for number in list(self._log):
            self._log.drop(number)
        if stored["reasons"]["spans"]:
            estimator.observed.lose_sample_before(max([stored["slot"] or 0, *slots]))

    @property
    def estimator(self) -> EarlyAnswerEstimator:
        return self._estimator

    def needed_plans(self) -> dict[EdgeId, SamplingPlan]:
        """Returns, per edge, the sampling that the accuracy needs."""
        return {EdgeId(e): needed_plan(self._spec, plan) for e, plan in self._estimator.rates().items()}

    def edges_changed(self, edges: Sequence[EdgeRecord]) -> None:
        super().edges_changed(edges)
        self._estimator.observed.speed = self._state.running_clock.speed

    def inherit_delays(self, others: Iterable[EarlyAnswerBook]) -> None:
        """Copies the delays that other queries have observed for the same records.

        The delays of an edge come from the query that has observed them for the longest time.
        """
        known: dict[str, Delays] = {}
        for other in others:
            if other is not self and _counted(other._spec) == _counted(self._spec):
                for edge, delays in other._estimator.observed.delays().items():
                    known[edge] = max(known.get(edge, delays), delays, key=lambda each: each.slots)
        self._estimator.inherit(known)
        self._write_log()

    # Transactions

    def _tables(self) -> list[tuple[str, StateTable[Any]]]:
        return [*super()._tables(), ("estimator", self._log)]

    def _write_log(self) -> None:
        """Adds the estimator's changes to the log as an entry. If the log is large, a snapshot replaces all entries."""
        if not self._estimator.log:
            return
        text = json.dumps(self._estimator.log, separators=(",", ":"))
        self._estimator.log = []
        self._log_bytes += len(text)
        snapshot = self._log.get(SNAPSHOT)
        if self._log_bytes > max(COMPACT_BYTES, 4 * len(snapshot.text) if snapshot else 0):
            for number in list(self._log):
                self._log.drop(number)
            text = self._estimator.to_text()
            self._log.put(SNAPSHOT, EstimatorLogEntry(text))
            self._log_bytes = 0
            return
        self._log.put(max((n for n in self._log), default=SNAPSHOT) + 1, EstimatorLogEntry(text))

    # Frames

    def _apply_frames(self, frames: Iterable[FrameSummary], unlisted: Collection[EdgeId]) -> list[int]:
        frames = sorted(frames, key=lambda f: f.position)
        changed = super()._apply_frames(frames, unlisted)
        self._estimator.expect(self._state.expected)
        had_declared_delays = not self._estimator.observed.exceeding
        for frame in frames:
            if frame.arrivals is not None:
                # If an edge's clock is far ahead, it must not advance the query's time.
                latest_ms = self._state.running_clock.to_event_ms(frame.received_at_ms + MAX_AHEAD_MS)
                report, through_ms = frame.arrivals, min(frame.arrivals.through_ms, latest_ms)
                self._estimator.add_report(frame.edge, through_ms, report.substreams, report.sampled, report.unread)
        self._withdraws = had_declared_delays and bool(self._estimator.observed.exceeding)
        return changed

    def deadline(self) -> int | None:
        """Returns the deadline of `TimeWindowBook`, or an earlier time at which an edge becomes silent.

        The time at which an edge becomes silent counts only while an ended window has no answer.
        """
        due_ms = super().deadline()
        ends = [self._end(start) for start, state in self.windows.items() if self._is_open(start, state.is_answered)]
        if not ends:
            return due_ms
        observed = self._estimator.observed
        silent_at_ms = min(ends) + observed.silence_timeout_ms
        if silent_at_ms <= observed.now_ms:
            silent_at_ms = observed.now_ms + observed.silence_timeout_ms
        wall_ms = self._state.running_clock.to_wall_ms(silent_at_ms) + 1
        return wall_ms if due_ms is None else min(due_ms, wall_ms)

    def _is_observed(self, start_ms: int) -> bool:
        """Returns whether the window can be estimated: it has ended, and the lags of its events are known."""
        observed = self._estimator.observed
        return observed.has_observed(start_ms) and observed.has_ended(start_ms)

    def _is_open(self, start_ms: int, answered: bool) -> bool:
        return not answered and self._estimator.observed.has_observed(start_ms)

    # Answers

    def _gets_answer(self, start_ms: int, state: WindowState) -> bool:
        return True  # the estimator decides

    def emit_due(self, now_ms: int, dirty: AbstractSet[int] = frozenset()) -> list[Emission]:
        estimator = self._estimator
        estimator.expect(self._state.expected)
        estimator.advance(self._state.running_clock.to_event_ms(now_ms))
        ended = {
            start
            for start, state in self.windows.items()
            if self._is_open(start, state.is_answered) and estimator.observed.has_ended(start)
        }
        if self._withdraws:
            dirty = dirty | self.deadlines.without_wait(
                {start for start, state in self.windows.items() if state.is_answered}
            )
        emissions = super().emit_due(now_ms, dirty | ended)
        self._withdraws = False
        estimator.forget_before(self.sealed_before())
        self._write_log()
        return emissions

    def _answer_window(self, start_ms: int, dirty: bool, due: bool, now_ms: int) -> Emission | None:
        state, estimator = self.windows.get(start_ms), self._estimator
        if state is None and not due:
            return None
        reached = self._phase(start_ms)
        phase = reached if state is None else max(reached, state.phase, key=lambda p: p.rank)
        if due:
            estimator.advance(self._state.running_clock.to_event_ms(now_ms), force=True)
        if phase is Phase.EARLY:
            is_answered = state is not None and state.is_answered
            return self._answer_early(start_ms, is_answered, dirty, due, now_ms)
        prediction, reasons = estimator.predict_complete(start_ms)
        if (
            self._is_observed(start_ms) and estimator.answers.last(start_ms) is None
        ):  # the estimator learns from every window
            estimator.on_answered(start_ms, prediction or estimator.predict(start_ms), early=False)
        estimator.settle(start_ms)
        emission = super()._answer_window(start_ms, dirty, due, now_ms)
        return emission and self._with_prediction(emission, prediction, reasons)

    def _answer_early(self, start_ms: int, is_answered: bool, dirty: bool, due: bool, now_ms: int) -> Emission | None:
        """Returns the early answer to a window or a revision of it; None if the window gets no answer now."""
        estimator = self._estimator
        observed = self._is_observed(start_ms)
        prediction: Prediction | None
        if is_answered:
            if not dirty or not observed or not (self._withdraws or estimator.is_revision_due(start_ms)):
                return None
            revision, last = estimator.predict(start_ms), estimator.answers.last(start_ms)
            if Losses(self._state).concern(self._required_span(start_ms)):
                revision = replace(revision, met=False)
            if last is not None and not revision.differs_from(last):
                return None
            prediction = revision
        elif due:
            prediction = estimator.predict(start_ms) if observed else None
        else:
            prediction = estimator.decide(start_ms)
            if prediction is None:
                return None
        emission = super()._answer_window(start_ms, dirty, True, now_ms)
        if emission is None:
            return None
        reasons = estimator.observed.sampling_reasons(start_ms) if prediction is not None else {}
        if prediction is not None:
            estimator.on_answered(start_ms, prediction, early=True)
        return self._with_prediction(emission, prediction, reasons)

    def _with_prediction(
        self, emission: Emission, prediction: Prediction | None, reasons: Mapping[str, frozenset[SamplingReason]]
    ) -> Emission:
        """Adds the prediction and the measured coverage to the facts of an answer."""
        start_ms, estimator = emission.window_start_ms, self._estimator
        is_final = emission.phase is Phase.FINAL
        unknown_sample = estimator.observed.has_unknown_sample(start_ms)
        prediction = without_false_bounds(prediction, emission.facts)
        facts = with_accuracy(
            emission.facts, self._spec, prediction, early=self._phase(start_ms) is Phase.EARLY or unknown_sample,
            covered=estimator.finalize(start_ms) if is_final else None, coverage=estimator.answers.coverage,
            slot_ms=estimator.schedule.grid.slot_ms, too_many_groups=estimator.observed.has_too_many_groups,
            sampled_because=reasons, unknown_sample=unknown_sample, exceeding=estimator.observed.exceeding,
        )  # fmt: skip
        return replace(emission, facts=facts, prediction=prediction)


def _counted(spec: QuerySpec) -> tuple[object, ...]:
    """Returns the parts of a spec that decide which records edges count, and in which slots.

    Queries with equal parts have the same delays. If values may be missing, the argument of the measure is one of the
    parts. Records of another condition or group have other delays. With other windows or a shorter lateness, other
    records are dropped.
    """
    assert spec.accuracy is not None
    measure = next(m for m in spec.measures if m.name == spec.accuracy.measure)
    schedule = report_schedule(spec.window, spec.accuracy, spec.lateness_ms)
    counted = None if spec.accuracy.early_kind == "records" else measure.argument
    return spec.stream, spec.lookups, spec.where, counted, tuple(spec.group_by), schedule, spec.lateness_ms
