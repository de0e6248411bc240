"""Evaluates a window for the groups of a query. `GroupEstimator` has the state of one group; `GroupBatch` evaluates
many groups together.

Each group has its own trigger, and so its own delays, rates, values and backtests. A group's accuracy equals the
accuracy of a query whose `where` selects the group.

A group with few records has no interval. Its windows are answered when they are complete. A group has an interval if
two conditions hold. First, enough events were observed that no relevant delay is unknown. If none of n events was later
than some lag, a share of -log(1 - confidence)/n of all events may still be later (the rule of three). Second, the group
has so many records that one record changes the value by less than the error.

A trigger has arrays of a few sources times some hundred lags. Evaluating hundreds of triggers one by one would take
longer than a window lasts. So `GroupBatch` updates and evaluates many triggers together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from center.early.trigger import (
    NEGLIGIBLE_FAILURES,
    SAMPLING_FAILURES,
    STRAGGLER_CONFIDENCE,
    AnswerNow,
    Decision,
    EarlyTrigger,
    TriggerBatch,
    Wait,
    window_models,
)
from center.early.window_prediction import TOO_WIDE, GroupPrediction
from edgewater.arrivals import ReportSchedule
from edgewater.arrivals.arrival_counts import ArrivalCounts, window_sample, window_sums
from edgewater.arrivals.report import ROUNDED_RANGE
from edgewater.arrivals.stragglers import MIN_EVENTS, Stragglers
from edgewater.arrivals.targets import COUNTS, EXTREMES, AccuracyTarget
from edgewater.arrivals.window_model import WindowModel, WindowSample
from edgewater.model.accuracy import Accuracy
from edgewater.synopses import BoolArray, FloatArray, IntArray, normal_quantile
from edgewater.synopses.encoding.state import State

BATCH_SIZE = 64
"""Groups per batch. With 64 groups, the time for calling NumPy is negligible. If a window waits for one group, the
batches after this group's batch are not evaluated."""
ZERO_MEAN_MIN_ARRIVED = 0.5
"""The share of a window's records that must have arrived before the trigger may decide that the mean may be zero.

If only a few records of a skewed distribution have arrived, one large record determines the mean. More such records
arrive with time."""
# Reasons why a prediction has no interval:
TOO_FEW = "too few records for an error bound"
TOO_YOUNG = "an edge has not been observed for longer than the longest delay"
UNKNOWN_LATE_VALUES = "no window has shown yet whether late records have other values than punctual records"
BEYOND_LAGS = "records come later than the longest lag that is resolved, so stragglers cannot be bounded"
UNKNOWN_CHANGE = "delays or rates have changed, and it is not known yet by how much"
UNKNOWN_SILENCE = "a silent edge has not been observed for long enough to bound its records"
UNKNOWN_RANGE = "the least and the greatest value of the records that were not sampled are not known"
LATE_EXTREMES = "it is not known yet, or not true, that late records are as rarely extreme as punctual records"
SILENT_EXTREMES = "a silent edge may have the extreme"
ZERO_ESTIMATE = "the estimate is zero, and no error is relative to zero"


class GroupEstimator:
    """The trigger and the counts of one group.

    Args:
        new_trigger: makes a trigger of the query with the given number of sources.

    Attributes:
        number: identifies the group in rows of arrivals.
        first_slot: the slot that is slot 0 of the trigger. The lags of events of earlier windows are not known.
        last_report_slot: the slot of the group's last arrival.
    """

    def __init__(
        self, key: str, number: int, first_slot: int, sources: int, new_trigger: Callable[[int], EarlyTrigger],
        accuracy: Accuracy, schedule: ReportSchedule,
    ) -> None:  # fmt: skip
        self.key, self.number, self.first_slot, self.last_report_slot = key, number, first_slot, first_slot
        self.trigger = new_trigger(sources)
        self.counts = ArrivalCounts(accuracy.early_kind, schedule)
        self._accuracy, self._schedule = accuracy, schedule
        self._simultaneous_groups = 0  # number of groups in the trigger's confidence; 0 if it was never set

    @property
    def slot(self) -> int:
        return self.first_slot + self.trigger.slot

    def has_observed(self, start_ms: int) -> bool:
        """Returns whether the lags of all events of the window are known."""
        return self._schedule.slot_at(start_ms) >= self.first_slot

    def take(self, sources: Sequence[int | None]) -> None:
        """Replaces the sources; see `EarlyTrigger.take`."""
        self.trigger.take(sources)
        self._simultaneous_groups = 0

    def set_simultaneous_confidence(self, groups: int) -> bool:
        """Sets the confidence of one group such that the intervals of all groups hold simultaneously (Bonferroni).

        Args:
            groups: number of groups with an interval.

        Returns:
            Whether the confidence has changed, so that earlier evaluations are invalid.
        """
        if groups == self._simultaneous_groups:
            return False
        self._simultaneous_groups = groups
        scope = self._accuracy.scope or "each"
        confidence = AccuracyTarget(self._accuracy.error, self._accuracy.confidence, groups, scope).group_confidence
        self.trigger.target = AccuracyTarget(self._accuracy.error, confidence)
        self.trigger.straggler_confidence = 1 - (1 - STRAGGLER_CONFIDENCE) / (groups if scope == "all" else 1)
        self.trigger.quantile = normal_quantile(1 - (1 - confidence) * SAMPLING_FAILURES)
        return True

    def offset(self, start_ms: int) -> int:
        """Returns the slots since the end of the window that starts at `start_ms`; 0 if the window has not ended."""
        return max(self.slot - self._end_slot(start_ms), 0)

    def decide(
        self, start_ms: int, sample: WindowSample, modelled: tuple[Stragglers, WindowModel], *, earned: bool
    ) -> Decision:
        """Decides whether a window is answered or waits; see `EarlyTrigger.decide`."""
        return self.trigger.decide(self._end_slot(start_ms) - self.first_slot, sample, modelled, earned=earned)

    def _end_slot(self, start_ms: int) -> int:
        return self._schedule.slot_at(start_ms) + self._schedule.window_slots

    def to_state(self) -> State:
        numbers = [self.key, self.number, self.first_slot, self.last_report_slot]
        return State(numbers, {}, {"trigger": self.trigger.to_state(), "counts": self.counts.to_state()})

    @classmethod
    def from_state(
        cls, state: State, new_trigger: Callable[[int], EarlyTrigger], accuracy: Accuracy, schedule: ReportSchedule
    ) -> GroupEstimator:
        """Returns the estimator from the result of `to_state`. A damaged state may raise any exception."""
        key, number, first_slot, last_report_slot = state.numbers
        result = cls(key, number, first_slot, 1, new_trigger, accuracy, schedule)
        result.last_report_slot = last_report_slot
        result.trigger = EarlyTrigger.from_state(state.components["trigger"])
        result.counts.restore(state.components["counts"])
        return result


class GroupBatch:
    """Groups over the same edges. The batch is valid until a group's sources change or a group joins another batch."""

    def __init__(self, groups: Sequence[GroupEstimator], accuracy: Accuracy) -> None:
        self.groups, self.accuracy = list(groups), accuracy
        self.triggers = TriggerBatch([g.trigger for g in groups])

    def advance(self, slot: int, target: int, rows: IntArray, reporting: BoolArray) -> None:
        """Advances time from `slot` to `target`.

        Args:
            rows: arrivals as (slot, source, lag, count, index of the group in the batch), ascending by slot.
            reporting: mask of the sources that have reported up to `target`.
        """
        cuts = np.searchsorted(rows[:, 0], np.arange(slot, target + 1)).tolist()
        shape, reporting_rows = self.triggers.triangle.seen.shape, np.tile(reporting, len(self.groups))
        cells, count = (rows[:, 4] * len(reporting) + rows[:, 1]) * shape[1] + rows[:, 2], rows[:, 3]
        for begin, end in pairwise(cuts):
            self.triggers.advance(_summed(cells[begin:end], count[begin:end], shape), reporting_rows)

    def catch_up(self, source: int, rows: IntArray) -> None:
        """Adds the arrivals of one source during its silence. Called when the source reports again.

        Args:
            rows: arrivals as (slot, lag, count, index of the group in the batch).
        """
        triangle, sources = self.triggers.triangle, self.triggers.triggers[0].triangle.sources
        silent = triangle.silent_slots[source::sources]
        for slots in np.unique(silent[silent > 0]).tolist():  # a group may be younger than the silence
            indices = np.flatnonzero(silent == slots)
            position = np.full(len(silent), -1)
            position[indices] = np.arange(len(indices))
            late = rows[position[rows[:, 3]] >= 0]
            at = np.maximum(late[:, 0] - (self.groups[0].slot - slots), 0)
            late, at = late[np.argsort(at, kind="stable")], np.sort(at)
            cuts = np.searchsorted(at, np.arange(slots + 1)).tolist()
            cells = position[late[:, 3]] * triangle.grid.lags + late[:, 1]
            shape = (len(indices), triangle.grid.lags)
            arrived = (_summed(cells[begin:end], late[begin:end, 2], shape) for begin, end in pairwise(cuts))
            triangle.catch_up(indices * sources + source, arrived)

    def learn(self, start_ms: int, edges: Sequence[str], predictions: Mapping[str, GroupPrediction]) -> None:
        """Updates the triggers from an answered window, for the groups in `predictions`."""
        indices = [i for i, g in enumerate(self.groups) if g.key in predictions and g.has_observed(start_ms)]
        if not indices:
            return
        arrived = window_sample([self.groups[i].counts for i in indices], start_ms, edges).arrived.sum(axis=0)
        indices = [i for i, events in zip(indices, arrived.tolist(), strict=True) if events > 0]
        if not indices:
            return
        counts = [self.groups[i].counts for i in indices]
        _, sums, _ = window_sums(counts, start_ms, edges)
        count, total, squares = sums.transpose(2, 0, 1, 3).reshape(3, -1, sums.shape[3])
        # A group without an interval learns its values. Its stragglers may have any size.
        answers = [predictions[self.groups[i].key] for i in indices]
        with np.errstate(divide="ignore", invalid="ignore"):
            straggler = np.array([p.straggler if p.eligible else 1.0 for p in answers])
            shares = straggler / np.abs(np.array([p.estimate if p.eligible else 1.0 for p in answers]))
        self.triggers.on_answered(indices, window_sample(counts, start_ms, edges), (count, total, squares), shares)

    def evaluate(
        self, start_ms: int, edges: Sequence[str], *, complete: bool = False, widening: float = 1.0
    ) -> BatchEvaluation:
        """Evaluates a window at the current slot.

        Args:
            complete: whether all events of the window have arrived.
            widening: factor of the half-widths of groups whose arrived events were all processed. If it is above 1, the
                arrived records of an extreme do not bound the records that are out.
        """
        sample = window_sample([g.counts for g in self.groups], start_ms, edges)
        stragglers, model = window_models(
            self.triggers.triggers, self.triggers.model, self.groups[0].offset(start_ms), sample
        )
        if complete:
            arrived = sample.arrived
            model = replace(model, population=arrived, events=arrived, straggler_width=np.zeros(len(self.groups)))
        else:
            beyond = self.triggers.triangle.beyond_longest(1 - self.accuracy.confidence)
            beyond = beyond.reshape(3, len(self.groups), -1).transpose(0, 2, 1)
            share = beyond[1] + beyond[0] * self._missing_beyond_lags(start_ms)
            # A young source has few records that show how many records are late. The interval contains every share of
            # late records that these few records do not exclude.
            young = self.triggers.triangle.is_young(self.groups[0].trigger.window_slots).reshape(len(self.groups), -1).T
            share = share + np.where(young & np.isfinite(beyond[2]), beyond[2], 0.0)
            if self.accuracy.scope is None:
                # After a change, a tail of delays may be longer than any that was seen.
                group = self.groups[0]
                arguments = group.offset(start_ms), group.trigger.steady_slots, 1 - self.accuracy.confidence
                share = np.maximum(share, self.triggers.triangle.unseen_beyond(*arguments)[:, None])
            unmodelled = (share * model.events).sum(axis=0) / np.maximum(model.size, 1e-9) * np.abs(model.estimate)
            rounding = model.rounding(sample)
            model = replace(model, straggler_width=model.straggler_width + unmodelled + rounding)
        sampling = model.sampling_width(sample.count, np.array([g.trigger.quantile for g in self.groups]))
        ranged = np.isfinite(sampling)
        is_extreme = self.accuracy.kind in EXTREMES
        if widening > 1 and not complete and not is_extreme:
            factor = np.where((sample.count >= sample.arrived).all(axis=0), widening, 1.0)
            sampling, model = sampling * factor, replace(model, straggler_width=model.straggler_width * factor)
        silent = self.triggers.triangle.silent_slots.reshape(len(self.groups), -1).T > 0
        if complete:
            stragglers = replace(stragglers, known=np.ones(len(self.groups), bool))
            enough = sample.count.sum(axis=0) > 1
            without_interval = np.select([~enough, ~ranged], [TOO_FEW, UNKNOWN_RANGE], "").tolist()
        else:
            without_interval = self._without_interval(start_ms, stragglers, model, silent, beyond, ranged)
        return BatchEvaluation(
            self, start_ms, sample, stragglers, model, sampling, without_interval, np.asarray(silent),
            LATE_EXTREMES if is_extreme and widening > 1 else SILENT_EXTREMES if is_extreme and silent.any() else "",
        )  # fmt: skip

    def _missing_beyond_lags(self, start_ms: int) -> float:
        """Returns the greatest share that may be missing of a window's events with the longest lag.

        The model treats these events as if they arrive at that lag. By the assumption of
        `ArrivalTriangle.beyond_longest`, at most a share of (longest lag)/age of them arrives after an age.
        """
        trigger, offset = self.groups[0].trigger, self.groups[0].offset(start_ms)
        age, longest = offset + np.arange(trigger.window_slots), trigger.grid.lags - 1
        return float(np.where(age >= longest, longest / np.maximum(age, 1), 0.0).mean())

    def _without_interval(
        self,
        start_ms: int,
        stragglers: Stragglers,
        model: WindowModel,
        silent: BoolArray,
        beyond: FloatArray,
        ranged: BoolArray,
    ) -> list[str]:
        """Returns per group why the group has no interval, or '' if it has one. The module's docstring states the
        conditions.
        """
        observed = np.array([g.has_observed(start_ms) for g in self.groups])
        error, size, events = self.accuracy.error, model.size, model.events
        seen, hidden, unseen = beyond
        late = np.where(events > 0, unseen, 0.0) * events
        enough = late.sum(axis=0) <= error * size
        offset, alarms = self.groups[0].offset(start_ms), zip(self.groups, stragglers.alarm.tolist(), strict=True)
        calibrated = np.ones(len(self.groups), bool)
        if self.accuracy.scope is None:
            calibrated[0] = not self.groups[0].trigger.is_unprecedented(offset, float(stragglers.alarm[0]))
            # Backtests show how well all sources together are predicted. They show nothing about a source that has just
            # begun to send, because the source has had fewer events than a window has.
            new = (events > MIN_EVENTS) & (late > -math.log(1 - self.accuracy.confidence))
            tested = np.array([g.trigger.calibration.is_tested(offset, alarm) for g, alarm in alarms])
            enough |= tested & (np.where(new, late, 0.0).sum(axis=0) <= error * size)
            enough &= size >= 1 / error
        else:
            enough &= size >= max(MIN_EVENTS, 1 / error)
        has_history = ~(np.isinf(unseen) & (events > 0.5)).any(axis=0)
        resolved = ((seen + hidden) * events).sum(axis=0) <= error * size
        comparable = self._knows_late_values(stragglers.expected)
        eligible = observed & stragglers.known & has_history & resolved & enough & ranged & comparable & calibrated
        eligible &= np.abs(model.estimate) > 0
        causes = {
            "": eligible,
            UNKNOWN_SILENCE: ~stragglers.known & silent.any(axis=0),
            TOO_YOUNG: ~stragglers.known,
            BEYOND_LAGS: ~resolved,
            UNKNOWN_LATE_VALUES: ~comparable,
            UNKNOWN_RANGE: has_history & enough & ~ranged,
            ZERO_ESTIMATE: has_history & (model.estimate == 0),
            UNKNOWN_CHANGE: has_history & enough & ~calibrated,
        }
        reasons: list[str] = np.select(list(causes.values()), list(causes), TOO_FEW).tolist()
        return reasons

    def _knows_late_values(self, expected: FloatArray) -> BoolArray:
        """Returns per group whether mean values by lag are known well enough.

        They are not needed for a count, and not needed if no stragglers are expected.
        """
        if self.accuracy.kind in COUNTS:
            return np.ones(len(self.groups), bool)
        learnt = np.array([g.trigger.late.count.any() for g in self.groups])
        return np.asarray(
            learnt
            | (
                expected.reshape(len(self.groups), -1).sum(axis=1)
                < NEGLIGIBLE_FAILURES * (1 - self.accuracy.confidence)
            )
        )


@dataclass(frozen=True, slots=True)
class BatchEvaluation:
    """The evaluation of a window for a batch of groups. Arrays have the shape [group] or [source, group].

    Attributes:
        sampling: half-width due to sampling.
        without_interval: why the group has no interval; empty if it has one.
        silent: mask of the sources that do not report.
        one_sided: why the arrived records bound an extreme on one side only; empty if they bound both sides.
    """

    batch: GroupBatch
    start_ms: int
    sample: WindowSample
    stragglers: Stragglers
    model: WindowModel
    sampling: FloatArray
    without_interval: list[str]
    silent: BoolArray
    one_sided: str = ""

    @property
    def eligible(self) -> BoolArray:
        """Mask of the groups with an interval."""
        return np.array([not reason for reason in self.without_interval], bool)

    @property
    def met(self) -> BoolArray:
        """Mask of the groups whose interval is within the error."""
        return np.asarray(self.stragglers.known & self.model.is_within(self.batch.accuracy.error, self.sampling))

    def decide(self) -> tuple[dict[str, str], int | None]:
        """Decides whether the window can be answered. Groups without an interval are ignored if the query has groups.

        Returns:
            Two values. The first is, per group key, the reason why the group is answered although its accuracy is not
            met; the reason is empty if the accuracy is met. The second is the slot until which a group waits, or None.
            If one group waits, the whole window waits, so the groups after this group are not evaluated.
        """
        reasons: dict[str, str] = {}
        decided = self.eligible if self.batch.accuracy.scope is not None else np.ones_like(self.eligible)
        met = self.eligible & self.met
        for i in np.flatnonzero(decided).tolist():
            group = self.batch.groups[i]
            if met[i]:
                reasons[group.key] = ""
                continue
            sample, earned = self.sample.of(i), bool(self.eligible[i])
            decision = group.decide(self.start_ms, sample, (self.stragglers.of(i), self.model.of(i)), earned=earned)
            if isinstance(decision, AnswerNow) and decision.met:
                # The model's interval is within the error, but the widened interval is not. The widened interval may be
                # within the error after the next report.
                return reasons, group.slot + 1
            if not isinstance(decision, Wait):
                reasons[group.key] = decision.reason
            # Waiting does not make an interval small relative to zero.
            elif (
                earned
                and self._has_mostly_arrived(i)
                and (zero_mean := group.counts.zero_mean_reason(sample, self.batch.accuracy.measure))
            ):
                reasons[group.key] = zero_mean
            else:
                return reasons, group.first_slot + decision.until
        return reasons, None

    def _has_mostly_arrived(self, group: int) -> bool:
        return float(self.sample.arrived[:, group].sum()) >= ZERO_MEAN_MIN_ARRIVED * float(self.model.size[group])

    def predictions(self, reasons: Mapping[str, str]) -> list[GroupPrediction]:
        """Returns the predictions of groups with arrived or expected records. For a query without groups, returns one
        prediction.

        Args:
            reasons: per group key, why the group is answered although the accuracy may not be met.
        """
        numbers, met, nan = self._numbers(), self.met.tolist(), math.nan
        result: list[GroupPrediction] = []
        for i, (arrived, size) in enumerate(zip(self.sample.arrived.sum(axis=0), self.model.size, strict=True)):
            if self.batch.accuracy.scope is not None and arrived <= 0 and size <= 0.5:
                continue
            key, reason, values = self.batch.groups[i].key, self.without_interval[i], numbers[i]
            eligible = not reason
            if eligible:
                reason = self.one_sided if met[i] else reasons.get(key) or TOO_WIDE
            else:
                values = [self._scaled_up(i), *(nan,) * 5, *values[6:]]
            estimate, lower, upper, sampling, straggler, missing, come, expected, sampled = values
            result.append(
                GroupPrediction(key, eligible, not reason, estimate, lower, upper, sampling, straggler,
                                missing, come, expected, sampled, reason)
            )  # fmt: skip
        return result

    def _numbers(self) -> list[list[float]]:
        """Returns, per group, the fields of `GroupPrediction` from `estimate` to `sampled`."""
        model, size = self.model, self.model.size
        variance = self.stragglers.deviation.reshape(len(size), -1).T ** 2
        total = variance.sum(axis=0)
        of_silent = np.where(self.silent, variance, 0.0).sum(axis=0)
        silent_share = np.where(total > 0, of_silent / np.where(total > 0, total, 1.0), 0.0)
        width = np.hypot(self.sampling, model.straggler_width)
        arrived = self.sample.arrived.sum(axis=0)
        if (extremes := self.sample.extremes(model.measure)) is not None:
            return self._extremes(extremes, arrived)
        least, greatest = model.certain_bounds(self.sample)
        lower, upper = np.maximum(model.estimate - width, least), np.minimum(model.estimate + width, greatest)
        straggler, missing = (model.straggler_width * np.sqrt(share) for share in (1 - silent_share, silent_share))
        columns = (
            model.estimate, lower, upper, self.sampling, straggler, missing, arrived, size,
            self.sample.count.sum(axis=0),
        )  # fmt: skip
        table: list[list[float]] = np.stack(columns, axis=1).tolist()
        return table

    def _extremes(self, extremes: FloatArray, arrived: FloatArray) -> list[list[float]]:
        """Returns `_numbers` of an extreme: the extreme of the arrived events, which reports round outwards.

        The extreme itself bounds one side. The other side is bounded if few enough records are out. An infinite
        half-width keeps an answer out of the record of errors.
        """
        sign, zero = 1.0 if self.model.measure == "max" else -1.0, np.zeros(len(extremes))
        inner = extremes - sign * 2 * ROUNDED_RANGE * np.abs(extremes)
        outer = np.where(self.met & (not self.one_sided), extremes, sign * math.inf)
        lower, upper = np.minimum(inner, outer), np.maximum(inner, outer)
        straggler = np.where(self.met & (self.one_sided != SILENT_EXTREMES), 0.0, math.inf)
        columns = (extremes, lower, upper, zero, straggler, zero, arrived, self.model.size, arrived)
        table: list[list[float]] = np.stack(columns, axis=1).tolist()
        return table

    def _scaled_up(self, group: int) -> float:
        """Returns the measure of the arrived events, scaled up from the processed events; NaN if all events were
        processed.
        """
        arrived, count, total = (x[:, group] for x in (self.sample.arrived, self.sample.count, self.sample.total))
        rows = count > 0
        if not (count < arrived).any() or not rows.any():
            return math.nan
        scaled = float((total[rows] / count[rows] * arrived[rows]).sum())
        return scaled / float(arrived[rows].sum()) if self.batch.accuracy.kind == "mean" else scaled


def _summed(cells: IntArray, counts: IntArray, shape: tuple[int, ...]) -> FloatArray:
    """Returns an array of `shape` with the sum of `counts` per cell. `cells` are indices into the flat array."""
    result = np.zeros(shape)
    np.add.at(result.reshape(-1), cells, counts.astype(np.float64))
    return result
