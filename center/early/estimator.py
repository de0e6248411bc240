"""`EarlyAnswerEstimator` estimates one query's windows from the arrivals and from the errors of past answers.

`ObservedArrivals` stores the reports of the edges, and `PastAnswers` stores the errors of past answers. Each group of a
query has its own estimator. A query without groups has one estimator. If there are more than `MAX_GROUPS` groups, all
estimators are removed. For some time, windows are then answered only when they are complete.

Every change of the state is a JSON list in the log. The log has the changes since the last snapshot. The snapshot and
the log together restore the same state, and therefore the same answers.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from center.early.evaluation import BatchEvaluation
from center.early.observed_arrivals import Delays, ObservedArrivals, from_base64, to_base64
from center.early.past_answers import PastAnswers
from center.early.sampling import SamplingPlan
from center.early.window_prediction import GroupPrediction, Prediction, combine_groups
from edgewater.arrivals import ReportSchedule
from edgewater.model.accuracy import Accuracy
from edgewater.synopses.encoding.state import State
from edgewater.wire import SamplingReason

REVISION_OFFSETS = tuple(5 << n for n in range(12))
"""Slots after a window's end at which an early answer is evaluated again, for a query with groups."""

STATE_KIND = "early-answers"
MORE_HAVE_COME = "more records have come than the estimate expects"
RETIRED_EDGES = "the window contains records from retired edges; the estimate excludes them"

Change = list[Any]


class EarlyAnswerEstimator:
    """Estimates the windows of one query. All slots are slots of the report schedule.

    Args:
        max_wait_slots: slots after a window's end at which the window is answered at the latest; None if there is no
            limit.
        speed: event ms per wall ms. `observed.speed` may be set when the speed of the stream's clock becomes known.

    Attributes:
        log: the changes since the caller last emptied the log.
    """

    def __init__(
        self, accuracy: Accuracy, schedule: ReportSchedule, max_wait_slots: int | None, speed: float = 1.0
    ) -> None:
        self.accuracy, self.schedule = accuracy, schedule
        self.observed = ObservedArrivals(accuracy, schedule, max_wait_slots, speed)
        self.answers = PastAnswers(accuracy)
        self.log: list[Change] = []

    # Input

    def apply(self, change: Change) -> None:
        """Applies a change and appends the change to `log`. Only `add_report` changes the logged state without
        `apply`.
        """
        kind, *arguments = change
        handlers: dict[str, Callable[..., Any]] = {
            "expect": self.observed.expect,
            "report": self._add_report,
            "advance": self._advance,
            "wait": self.answers.wait,
            "answered": self._add_answer,
            "settled": self.answers.settle,
            "final": self.answers.finalize,
            "remove": self.observed.groups.remove,
            "inherit": self.observed.inherit,
        }
        handlers[kind](*arguments)
        self.log.append(change)

    def expect(self, edges: Iterable[str]) -> None:
        """Sets the expected edges. The index of an edge becomes the number of its source."""
        if list(edges) != self.observed.edges:
            self.apply(["expect", list(edges)])

    def add_report(
        self,
        edge: str,
        through_ms: int,
        substreams: Iterable[bytes],
        reason: SamplingReason = SamplingReason.NONE,
        unread: bool = False,
    ) -> None:
        """Adds an edge's report of arrivals, as in `edgewater.wire.Arrivals`.

        Args:
            through_ms: event time up to which the edge reports arrivals.
            substreams: statistics of arrivals, in encodings that `read_report` reads.
            reason: why the edge samples.
            unread: whether the edge may have unread input.

        Raises:
            SynopsisError: the statistics cannot be read; nothing is changed.
        """
        states = list(substreams)
        facts = int(reason), unread, self.observed.resumes(edge, through_ms)
        self.observed.add_report(edge, through_ms, states, *facts)
        self.log.append(["report", edge, through_ms, to_base64(states), *facts])

    def inherit(self, delays: Mapping[str, Delays]) -> None:
        """Copies the delays that another query has observed.

        The other query must count the same records of the same edges in the same slots. The delays of an edge apply
        from the edge's first report on.
        """
        if delays:
            self.apply(["inherit", {edge: each.to_list() for edge, each in delays.items()}])

    def advance(self, now_ms: int, *, force: bool = False) -> None:
        """Advances event time to `now_ms`.

        Args:
            force: whether to go on without the edges that have not reported the latest report slot.
        """
        self.observed.now_ms = max(self.observed.now_ms, now_ms)
        target, reporting = self.observed.next_slot(force=force)
        if target is not None:
            self.apply(["advance", target, reporting])

    def on_answered(self, start_ms: int, prediction: Prediction, *, early: bool) -> None:
        """Records an answer to a window. `early` is false if the window was complete when it was answered."""
        self.apply(["answered", start_ms, early, *prediction.to_list()])

    def settle(self, start_ms: int) -> None:
        """Records the errors of a window's first early answer. Called when the window is complete.

        If late records come afterwards, `finalize` corrects the errors.
        """
        first = self.answers.first_early(start_ms)
        if first is not None and not self.answers.is_settled(start_ms):
            self.apply(["settled", start_ms, self._compare(start_ms, first)[1], first.widening])

    def finalize(self, start_ms: int) -> bool | None:
        """Records that a window is final.

        Returns:
            Whether the intervals of the first early answer contain the true values; None if this is not known.
        """
        first = self.answers.first_early(start_ms)
        contained, ratios = ([], []) if first is None else self._compare(start_ms, first)
        if self.answers.knows(start_ms):
            widening = 1.0 if first is None else first.widening
            self.apply(["final", start_ms, self.answers.covered_share(contained), ratios, widening])
        return all(contained) if contained else None

    def forget_before(self, start_ms: int) -> None:
        """Drops the state of windows that start before `start_ms`. All these windows must be final."""
        if idle := self.observed.forget_before(start_ms):
            self.apply(["remove", idle])

    # Estimates

    def decide(self, start_ms: int) -> Prediction | None:
        """Returns the answer to an ended window, or None if the window waits.

        The window is answered when each group with an interval meets the accuracy, or when waiting does not help the
        group.
        """
        observed = self.observed
        if not observed.has_observed(start_ms) or not observed.has_ended(start_ms) or observed.waits_for_readers:
            return None
        if self.answers.waits(start_ms, observed.slot):
            return None
        widening = self.answers.widening
        evaluations, reasons, until = observed.groups.decide(start_ms, observed.edges, widening)
        if until is not None:
            self.apply(["wait", start_ms, until])
        if not reasons or until is not None:
            return None
        return self._prediction(start_ms, evaluations, reasons, observed.unread, widening)

    def predict(self, start_ms: int) -> Prediction:
        """Returns the current estimate of a window, even if the estimate does not meet the accuracy."""
        observed, widening = self.observed, self.answers.widening
        evaluations = observed.groups.evaluate(start_ms, observed.edges, widening=widening)
        return self._prediction(start_ms, evaluations, {}, observed.unread, widening)

    def predict_complete(self, start_ms: int) -> tuple[Prediction | None, dict[str, frozenset[SamplingReason]]]:
        """Returns the estimate of a complete window, and `ObservedArrivals.sampling_reasons`.

        The estimate is None if no edge sampled the window, because the answer's data are then exact.

        Edges have reported all records of the window, but possibly in report slots that not all edges have reached. So
        the window may end after the current slot, because sources may end within the window. It may also have begun
        before lags were known, such as after a long silence.
        """
        observed = self.observed
        if not observed.has_counted(start_ms):
            return None, {}
        with observed.including_all_reports():
            reasons = observed.sampling_reasons(start_ms)
            if not reasons:
                return None, {}
            evaluations = observed.groups.evaluate(start_ms, observed.edges, complete=True)
            return self._prediction(start_ms, evaluations, {}, complete=True), reasons

    def is_revision_due(self, start_ms: int) -> bool:
        """Returns whether an early answer should be evaluated again.

        With groups, the intervals between evaluations increase, because each evaluation computes every group. An answer
        is not evaluated again while a silent edge may have events older than the longest lag, because no model covers
        such events.
        """
        observed = self.observed
        if observed.waits_for_readers:
            return False
        silent_slots = max(observed.silent.values(), default=0)
        if min(silent_slots, observed.slot - self.schedule.slot_at(start_ms)) > self.schedule.grid.lags:
            return False
        return self.accuracy.scope is None or observed.has_reached(start_ms, REVISION_OFFSETS)

    def rates(self) -> dict[str, SamplingPlan]:
        """Returns per edge the sampling that the next window needs. The result is empty while there are no
        estimates.
        """
        observed = self.observed
        if not len(observed.groups):
            return dict.fromkeys(observed.edges, SamplingPlan()) if observed.has_too_many_groups else {}
        last = self.answers.newest()
        rates = observed.groups.rates({p.key for p in last.by_group if p.eligible} if last is not None else set())
        return dict(zip(observed.edges, rates or [SamplingPlan()] * len(observed.edges), strict=True))

    def _prediction(
        self,
        start_ms: int,
        evaluations: Sequence[BatchEvaluation],
        reasons: Mapping[str, str],
        unread: Sequence[str] = (),
        widening: float = 1.0,
        *,
        complete: bool = False,
    ) -> Prediction:
        observed = self.observed
        groups = [prediction for evaluation in evaluations for prediction in evaluation.predictions(reasons)]
        never_reported = [] if complete else observed.never_reported
        waited = max(observed.slot - self.schedule.slot_at(start_ms) - self.schedule.window_slots, 0)
        is_grouped = self.accuracy.scope is not None
        result = combine_groups(groups, is_grouped, never_reported, tuple(observed.silent), waited, unread, widening)
        if not complete and result.bounded and self._is_refuted(start_ms, groups):
            result = result.without_bounds(MORE_HAVE_COME)
        has_others, _ = observed.groups.from_other_edges(start_ms, observed.edges)
        return result.without_bounds(result.reason or RETIRED_EDGES) if has_others else result

    def _is_refuted(self, start_ms: int, groups: Iterable[GroupPrediction]) -> bool:
        """Returns whether more records have arrived in a group than expected, by more than the relative error.

        The arrivals also include reports that are not applied yet.
        """
        with self.observed.including_all_reports():
            arrived = self.observed.groups.arrived(start_ms, self.observed.edges)
        most = 1 + self.accuracy.error
        return any(g.eligible and arrived[g.key] > most * g.expected for g in groups)

    def _compare(self, start_ms: int, first: Prediction) -> tuple[list[bool], list[float]]:
        """Returns `PastAnswers.compare` of the first answer with the true values. The true values include all reports
        so far.
        """
        observed = self.observed
        if observed.groups.from_other_edges(start_ms, observed.edges)[0]:
            return [], []
        with observed.including_all_reports():
            truths = observed.groups.true_values(start_ms, observed.edges)
        return self.answers.compare(first, truths)

    # Changes

    def _advance(self, target: int, reporting: Sequence[str]) -> None:
        if self.observed.advance(target, reporting):
            self.answers.clear()

    def _add_report(self, edge: str, through_ms: int, substreams: Sequence[str], *facts: Any) -> None:
        self.observed.add_report(edge, through_ms, from_base64(substreams), *facts)

    def _add_answer(self, start_ms: int, early: bool, *values: Any) -> None:
        prediction, observed = Prediction.from_list(values), self.observed
        if self.answers.add(start_ms, prediction, early) and observed.has_begun:
            observed.groups.learn(start_ms, observed.edges, prediction.by_group)

    # Snapshots

    def to_text(self) -> str:
        """Returns the state, without `log`, as JSON."""
        # Predictions have NaN, which numbers of a state must not have.
        answers = json.dumps(self.answers.to_state(), separators=(",", ":")).encode()
        state = State(None, {"answers": answers}, {"observed": self.observed.to_state()})
        return json.dumps(base64.b64encode(state.pack(STATE_KIND)).decode())

    def restore(self, text: str) -> None:
        """Sets the state of a new estimator from the result of `to_text`.

        Raises:
            CorruptSynopsis, UnsupportedVersion: the text cannot be read. Some damaged texts raise other exceptions.
        """
        state = State.unpack(base64.b64decode(json.loads(text)), STATE_KIND)
        self.observed.restore(state.components["observed"])
        self.answers.restore(json.loads(state.arrays["answers"]))
