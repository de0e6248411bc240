"""Estimator of one group of a query, or of all records of a query without groups: a trigger and arrival counts.

Each group has a trigger of its own, so each has its own delays, rates, values and backtests. The accuracy of a group is
that of a query with a `where` for the group.

A group with few records has no interval: its windows are answered when they are complete. An interval needs enough
observed events that relevant delays cannot have been missed: if none of n events was later than some lag, a share of
-log(1 - confidence)/n may still be (the rule of three). And the group needs so many records that a single one matters
less than the error.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from center.early.arrival_counts import ArrivalCounts
from center.early.estimate import WindowModel, WindowSample
from center.early.source_remap import SourceRemap
from center.early.stragglers import Stragglers
from center.early.trigger import Decision, EarlyTrigger, TriggerPolicy
from edgewater.arrivals import ReportSchedule
from edgewater.model.accuracy import Accuracy, AccuracyTarget
from edgewater.synopses import normal_quantile


class GroupEstimator:
    """One group.

    Args:
        new_trigger: makes a trigger of the query with the given number of sources.

    Attributes:
        number: identifies the group in rows of arrivals.
        first_slot: slot 0 of the trigger; the lags of earlier windows' events are not known.
        last_report_slot: the slot of the last arrival.
    """

    def __init__(
        self, key: str, number: int, first_slot: int, sources: int, new_trigger: Callable[[int], EarlyTrigger],
        accuracy: Accuracy, schedule: ReportSchedule,
    ) -> None:  # fmt: skip
        self.key, self.number, self.first_slot, self.last_report_slot = key, number, first_slot, first_slot
        self.trigger = new_trigger(sources)
        self.counts = ArrivalCounts(accuracy.early_kind, schedule)
        self._accuracy, self._schedule = accuracy, schedule
        self._simultaneous_groups = 0  # that the trigger's confidence is for; 0: as it was made

    @property
    def slot(self) -> int:
        return self.first_slot + self.trigger.slot

    def has_observed(self, start_ms: int) -> bool:
        """Whether the lags of all events of the window are known."""
        return self._schedule.slot_at(start_ms) >= self.first_slot

    def remap_sources(self, remap: SourceRemap) -> None:
        self.trigger = remap.apply(self.trigger)
        self._simultaneous_groups = 0

    def set_simultaneous_confidence(self, groups: int) -> bool:
        """Sets the confidence that each of so many groups needs for all intervals to hold simultaneously (Bonferroni).

        Returns:
            Whether it has changed, so that earlier evaluations are out of date.
        """
        if groups == self._simultaneous_groups:
            return False
        self._simultaneous_groups = groups
        scope = self._accuracy.scope or "each"
        confidence = AccuracyTarget(self._accuracy.error, self._accuracy.confidence, groups, scope).group_confidence
        policy = TriggerPolicy()
        if scope == "all":
            policy = replace(policy, straggler_confidence=1 - (1 - policy.straggler_confidence) / groups)
        self.trigger.target, self.trigger.policy = AccuracyTarget(self._accuracy.error, confidence), policy
        self.trigger.quantile = normal_quantile(1 - (1 - confidence) * policy.sampling_failures)
        return True

    def offset(self, start_ms: int) -> int:
        """Returns the slots since the end of the window that starts at `start_ms`."""
        return max(self.slot - self._end_slot(start_ms), 0)

    def decide(
        self, start_ms: int, sample: WindowSample, modelled: tuple[Stragglers, WindowModel], *, earned: bool
    ) -> Decision:
        """Decides about a window; see `EarlyTrigger.decide`."""
        return self.trigger.decide(self._end_slot(start_ms) - self.first_slot, sample, modelled, earned=earned)

    def _end_slot(self, start_ms: int) -> int:
        return self._schedule.slot_at(start_ms) + self._schedule.window_slots

    def to_state(self) -> dict[str, Any]:
        """JSON."""
        return {
            "key": self.key, "number": self.number, "first_slot": self.first_slot,
            "last_report_slot": self.last_report_slot, "counts": self.counts.to_state(),
            "trigger": base64.b64encode(self.trigger.to_state()).decode(),
        }  # fmt: skip

    @classmethod
    def from_state(
        cls, state: Any, new_trigger: Callable[[int], EarlyTrigger], accuracy: Accuracy, schedule: ReportSchedule
    ) -> GroupEstimator:
        """Returns the estimator whose `to_state` this is; damaged JSON or bytes raise any exception."""
        result = cls(state["key"], state["number"], state["first_slot"], 1, new_trigger, accuracy, schedule)
        result.last_report_slot = state["last_report_slot"]
        result.trigger = EarlyTrigger.from_state(base64.b64decode(state["trigger"]))
        result.counts.restore(state["counts"])
        return result
