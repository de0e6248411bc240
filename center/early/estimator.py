"""`EarlyAnswerEstimator`: the estimates of one query's windows, from its arrivals and from the errors of past answers.

`ObservedArrivals` has the reports of edges, and `PastAnswers` has the errors of past answers. Each group of a query has
its own estimator; a query without groups has one estimator. If there are more than `MAX_GROUPS` groups, all estimators
are removed, and for some time windows are answered only when they are complete.

Every change of the state goes through `apply` as a list of JSON. The changes since a snapshot are the state's log. If
they are applied to the snapshot, the state is the same, and therefore the answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from center.early.evaluation import BatchEvaluation
from center.early.observed_arrivals import Delays, ObservedArrivals, from_base64, to_base64
from center.early.past_answers import PastAnswers
from center.early.window_prediction import GroupPrediction, Prediction, combine_groups
from edgewater.arrivals import ReportSchedule
from edgewater.model.accuracy import Accuracy
from edgewater.wire import SamplingReason

REVISION_OFFSETS = tuple(5 << n for n in range(12))
"""Slots after a window's end at which an early answer of a query with groups is evaluated again."""

MORE_HAVE_COME = "more records have come than the estimate expects"
RETIRED_EDGES = "the window contains records from retired edges; the estimate excludes them"

Change = list[Any]


class EarlyAnswerEstimator:
    """Estimates the windows of one query. Slots are those of the report schedule.

    Args:
        max_wait_slots: slots after a window's end at which it is answered at the latest; None: no limit.
        speed: event ms per wall ms; `observed.speed` may be set when the stream's clock becomes known.

    Attributes:
        log: the changes since the log was last emptied.
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
        """Applies a change and appends it to `log`. Only `add_report` changes the logged state in the same way."""
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
        """Sets the expected edges."""
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
        """Adds an edge's report, `edgewater.wire.Arrivals`.

        Raises:
            SynopsisError: the statistics cannot be read; nothing is changed.
        """
        states = list(substreams)
        facts = int(reason), unread, self.observed.resumes(edge, through_ms)
        self.observed.add_report(edge, through_ms, states, *facts)
        self.log.append(["report", edge, through_ms, to_base64(states), *facts])

    def inherit(self, delays: Mapping[str, Delays]) -> None:
        """Copies the delays from another query that counts the same records of the same edges in the same slots.

        The delays apply to an edge from its first report on.
        """
        if delays:
            self.apply(["inherit", {edge: each.to_list() for edge, each in delays.items()}])

    def advance(self, now_ms: int, *, force: bool = False) -> None:
        """Advances event time to `now_ms`.

        Args:
            force: do not wait for edges that have not reported the latest report slot.
        """
        self.observed.now_ms = max(self.observed.now_ms, now_ms)
        target, reporting = self.observed.next_slot(force=force)
        if target is not None:
            self.apply(["advance", target, reporting])

    def on_answered(self, start_ms: int, prediction: Prediction, *, early: bool) -> None:
        """Records an answer. Not early: the window was answered when it was complete."""
        self.apply(["answered", start_ms, early, *prediction.to_list()])

    def settle(self, start_ms: int) -> None:
        """Records the errors of a window's first early answer when the window is complete.

        Late records may still come: `finalize` corrects the errors.
        """
        first = self.answers.first_early(start_ms)
        if first is not None and not self.answers.is_settled(start_ms):
            self.apply(["settled", start_ms, self._compare(start_ms, first)[1], first.widening])

    def finalize(self, start_ms: int) -> bool | None:
        """Records that a window is final.

        Returns:
            Whether the intervals of its first early answer contain the true values; None: not known.
        """
        first = self.answers.first_early(start_ms)
        contained, ratios = ([], []) if first is None else self._compare(start_ms, first)
        if self.answers.knows(start_ms):
            widening = 1.0 if first is None else first.widening
            self.apply(["final", start_ms, self.answers.covered_share(contained), ratios, widening])
        return all(contained) if contained else None

    def forget_before(self, start_ms: int) -> None:
        """Drops the state that only final windows need. These windows start before an event time."""
        if idle := self.observed.forget_before(start_ms):
            self.apply(["remove", idle])

    # Estimates

    def decide(self, start_ms: int) -> Prediction | None:
        """Returns the answer to an ended window, or None if it waits.

        It is answered when each group with an interval meets the accuracy or cannot meet it by waiting.
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
        """Returns the current estimate of a window, whether it meets the accuracy or not."""
        observed, widening = self.observed, self.answers.widening
        evaluations = observed.groups.evaluate(start_ms, observed.edges, widening=widening)
        return self._prediction(start_ms, evaluations, {}, observed.unread, widening)

    def predict_complete(self, start_ms: int) -> tuple[Prediction | None, dict[str, frozenset[SamplingReason]]]:
        """Returns the estimate of a complete window that edges sampled, and `ObservedArrivals.sampling_reasons`.

        Without sampling the estimate is None, because the answer's data are exact. The whole window has been reported,
        but possibly in report slots that not all edges have reached. So the window may end after the current slot
        (because sources may end within the window). It may also have begun before lags were known (such as after a long
        silence).
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
        """Whether an early answer should be evaluated again.

        With groups, an answer is evaluated again at increasing intervals, because each group is evaluated. It is not
        evaluated again while a silent edge may have events older than the longest lag, because no model covers them.
        """
        observed = self.observed
        if observed.waits_for_readers:
            return False
        silent_slots = max(observed.silent.values(), default=0)
        if min(silent_slots, observed.slot - self.schedule.slot_at(start_ms)) > self.schedule.grid.lags:
            return False
        return self.accuracy.scope is None or observed.has_reached(start_ms, REVISION_OFFSETS)

    def rates(self) -> dict[str, float]:
        """Returns per edge the sampling rate that the next window needs; empty while there are no estimates."""
        observed = self.observed
        if not len(observed.groups):
            return dict.fromkeys(observed.edges, 1.0) if observed.has_too_many_groups else {}
        last = self.answers.newest()
        rates = observed.groups.rates({p.key for p in last.by_group if p.eligible} if last is not None else set())
        return dict(zip(observed.edges, rates, strict=True)) if rates else dict.fromkeys(observed.edges, 1.0)

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
        """Whether more records have come than expected, by more than the error; not all reports may be applied yet."""
        with self.observed.including_all_reports():
            arrived = self.observed.groups.arrived(start_ms, self.observed.edges)
        most = 1 + self.accuracy.error
        return any(g.eligible and arrived[g.key] > most * g.expected for g in groups)

    def _compare(self, start_ms: int, first: Prediction) -> tuple[list[bool], list[float]]:
        """Returns `PastAnswers.compare` with the reports of all records so far."""
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

    def to_state(self) -> dict[str, Any]:
        """Returns JSON of the whole state, except for `log`."""
        return {**self.observed.to_state(), **self.answers.to_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `to_state` into a new estimator; damaged JSON or bytes raise any exception."""
        self.observed.restore(state)
        self.answers.restore(state)
