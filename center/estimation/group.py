"""One group of a query's records (all of them, where there are no groups): a watermark, and sums by sub-stream. Pure.

Each group has a watermark of its own, so each has delays, rates and values of its own, and a record of what its
predictions have been worth. A promise about it is the one about a query with a `where` for the group.

Of groups with few records there is no promise. An interval is stated if what the watermark has seen could not have
missed delays that matter: if none of n events was late by more than some lag, a part of -log(1 - confidence)/n may be
all the same (the rule of three). And a group has to have so many records that one of them matters less than the error.
Others wait until their windows are complete.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from center.early_trigger.estimate import Sampled, WindowModel
from center.early_trigger.stragglers import Stragglers
from center.early_trigger.trigger import Policy, Verdict, Watermark
from center.estimation.arrival_counts import Tallies
from center.estimation.source_remap import Seats
from edgewater.accuracy import Accuracy, AccuracyTarget
from edgewater.arrivals import ReportSchedule
from edgewater.synopses import normal_quantile

TOO_FEW = "too few records, or too few yet, to say how far the answer may be off"


class Stratum:
    """One group's.

    Args:
        fresh: makes the query's watermark of so many sources.

    Attributes:
        number: by which rows of arrivals name it.
        base: the watermark's slot 0; of windows that began before it nothing is known.
        heard: the slot in which it was last heard of.
    """

    def __init__(
        self, key: str, number: int, base: int, sources: int, fresh: Callable[[int], Watermark], accuracy: Accuracy,
        clock: ReportSchedule,
    ) -> None:  # fmt: skip
        self.key, self.number, self.base, self.heard = key, number, base, base
        self.mark = fresh(sources)
        self.tallies = Tallies(accuracy.early_kind, clock)
        self._accuracy, self._clock = accuracy, clock
        self._among = 0  # groups that the mark's confidence is for; 0: as it was made

    @property
    def slot(self) -> int:
        return self.base + self.mark.slot

    def has_seen(self, start_ms: int) -> bool:
        return self._clock.slot_at(start_ms) >= self.base

    # Changes

    def reseat(self, seats: Seats) -> None:
        self.mark = seats.reseated(self.mark)
        self._among = 0

    def promise_among(self, groups: int) -> bool:
        """Sets the confidence to what each of so many groups needs for all to be right at once (Bonferroni).

        Returns:
            Whether it was another: what was asked of the stratum before is to be asked again.
        """
        if groups == self._among:
            return False
        self._among = groups
        scope = self._accuracy.scope or "each"
        confidence = AccuracyTarget(self._accuracy.error, self._accuracy.confidence, groups, scope).group_confidence
        policy = Policy()
        if scope == "all":
            policy = replace(policy, straggler_confidence=1 - (1 - policy.straggler_confidence) / groups)
        self.mark.target, self.mark.policy = AccuracyTarget(self._accuracy.error, confidence), policy
        self.mark.quantile = normal_quantile(1 - (1 - confidence) * policy.sampling_failures)
        return True

    # What it says

    def offset(self, start_ms: int) -> int:
        """Slots since the end of the window that starts there."""
        return max(self.slot - self._end_slot(start_ms), 0)

    def judge(self, start_ms: int, sampled: Sampled, modelled: tuple[Stragglers, WindowModel]) -> Verdict:
        return self.mark.judge(self._end_slot(start_ms) - self.base, sampled, modelled)

    def _end_slot(self, start_ms: int) -> int:
        return self._clock.slot_at(start_ms) + self._clock.window_slots

    # Snapshots

    def to_state(self) -> dict[str, Any]:
        """JSON."""
        return {
            "key": self.key, "number": self.number, "base": self.base, "heard": self.heard,
            "mark": base64.b64encode(self.mark.to_state()).decode(), "tallies": self.tallies.to_state(),
        }  # fmt: skip

    @classmethod
    def from_state(
        cls, state: Any, fresh: Callable[[int], Watermark], accuracy: Accuracy, clock: ReportSchedule
    ) -> Stratum:
        """Raises what damaged JSON or bytes raise."""
        result = cls(state["key"], state["number"], state["base"], 1, fresh, accuracy, clock)
        result.heard = state["heard"]
        result.mark = Watermark.from_state(base64.b64decode(state["mark"]))
        result.tallies.restore(state["tallies"])
        return result
