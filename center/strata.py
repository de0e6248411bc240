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
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from center.prediction import Outlook
from center.seats import reseated
from center.tallies import Tallies
from edgewater.accuracy import Accuracy, Clockwork
from edgewater.synopses.base import IntArray
from edgewater.synopses.intervals import normal_quantile
from edgewater.watermarks.estimate import Sampled, WindowModel
from edgewater.watermarks.stragglers import LEAST_EVENTS, Stragglers
from edgewater.watermarks.target import Target
from edgewater.watermarks.watermark import Answer, Policy, Verdict, Watermark

TOO_FEW = "too few records, or too few yet, to say how far the answer may be off"


@dataclass(frozen=True, slots=True)
class View:
    """A group's part of a window now.

    Attributes:
        promised: enough is known to state an interval.
        offset: slots since the window's end.
    """

    stratum: Stratum
    sampled: Sampled
    stragglers: Stragglers
    model: WindowModel
    promised: bool
    offset: int

    @property
    def is_sampled(self) -> bool:
        return bool((self.sampled.count < self.sampled.arrived).any())


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
        clock: Clockwork,
    ) -> None:  # fmt: skip
        self.key, self.number, self.base, self.heard = key, number, base, base
        self.mark = fresh(sources)
        self.tallies = Tallies(accuracy.kind, clock)
        self._fresh, self._accuracy, self._clock = fresh, accuracy, clock
        self._among = 0  # groups that the mark's confidence is for; 0: as it was made

    @property
    def slot(self) -> int:
        return self.base + self.mark.slot

    def has_seen(self, start_ms: int) -> bool:
        return self._clock.slot_at(start_ms) >= self.base

    # Changes

    def reseat(self, rows: Sequence[int | None]) -> None:
        self.mark = reseated(self.mark, rows, self._fresh)
        self._among = 0

    def come_back(self, source: int, rows: IntArray) -> None:
        """A source that stood still tells what it had: rows that begin with slot, lag and count."""
        behind = int(self.mark.triangle.behind[source])
        if behind:
            missed = np.zeros((behind, self._clock.grid.lags))
            at = np.maximum(rows[:, 0] - (self.slot - behind), 0)
            np.add.at(missed, (at, rows[:, 1]), rows[:, 2])
            self.mark.on_return(source, missed)

    def learn(self, start_ms: int, edges: Sequence[str], outlook: Outlook) -> None:
        """The window has been answered so."""
        sampled = self.tallies.sampled(start_ms, edges)
        if sampled.arrived.sum() <= 0 or not self.has_seen(start_ms):
            return
        o = outlook
        # Of a group without a promise it is learnt what its values are, and that its stragglers may be anything.
        widths = (o.estimate, o.sampling, o.straggler, o.expected) if o.promised else (1.0, 0.0, 1.0, o.expected)
        estimate, sampling, straggler, size = (np.array([x]) for x in widths)
        answer = Answer(estimate, sampling, straggler, size, o.met)
        self.mark.on_answered(sampled, answer, self.tallies.by_lag(start_ms, edges))

    def promise_among(self, groups: int) -> bool:
        """Sets the confidence to what each of so many groups needs for all to be right at once (Bonferroni).

        Returns:
            Whether it was another: what was asked of the stratum before is to be asked again.
        """
        if groups == self._among:
            return False
        self._among = groups
        scope = self._accuracy.scope or "each"
        confidence = Target(self._accuracy.error, self._accuracy.confidence, groups, scope).group_confidence
        policy = Policy()
        if scope == "all":
            policy = replace(policy, straggler_confidence=1 - (1 - policy.straggler_confidence) / groups)
        self.mark.target, self.mark.policy = Target(self._accuracy.error, confidence), policy
        self.mark.quantile = normal_quantile(1 - (1 - confidence) * policy.sampling_failures)
        return True

    # What it says

    def view(self, start_ms: int, edges: Sequence[str]) -> View:
        sampled = self.tallies.sampled(start_ms, edges)
        offset = max(self.slot - self._end_slot(start_ms), 0)
        stragglers, model = self.mark.window_model(offset, sampled)
        promised = self._accuracy.scope is None or (self.has_seen(start_ms) and self._is_known(stragglers, model))
        return View(self, sampled, stragglers, model, promised, offset)

    def _is_known(self, stragglers: Stragglers, model: WindowModel) -> bool:
        size = float(model.size[0])
        if not stragglers.known or size < max(LEAST_EVENTS, 1 / self._accuracy.error):
            return False
        seen, events = self.mark.triangle.remembered(), model.events[:, 0]
        if (events[seen <= 0] > 0.5).any():
            return False
        unseen = -math.log(1 - self._accuracy.confidence) * float((events / np.maximum(seen, 1e-9))[seen > 0].sum())
        return unseen <= self._accuracy.error * size

    def judge(self, start_ms: int, view: View) -> Verdict:
        return self.mark.judge(self._end_slot(start_ms) - self.base, view.sampled, (view.stragglers, view.model))

    def outlook(self, view: View, reason: str = "") -> Outlook:
        """What the group comes to. `reason`: why the answer is given though it may not be good enough."""
        arrived, count = (float(x.sum()) for x in (view.sampled.arrived, view.sampled.count))
        stragglers, model, nan = view.stragglers, view.model, math.nan
        size = float(model.size[0])
        if not view.promised:
            estimate = self._scaled(view.sampled) if view.is_sampled else nan
            return Outlook(self.key, False, False, estimate, nan, nan, nan, nan, nan, arrived, size, count, TOO_FEW)
        estimate, straggler = float(model.estimate[0]), float(model.straggler_width[0])
        sampling = float(model.sampling_width(view.sampled.count, self.mark.quantile)[0])
        behind, variance = self.mark.triangle.behind > 0, stragglers.deviation**2
        of_silent = float(variance[behind].sum() / variance.sum()) if variance.sum() > 0 else 0.0
        width = math.hypot(sampling, straggler)
        met = bool(stragglers.known and width <= self._accuracy.error * abs(estimate))
        lower = max(estimate - width, arrived) if self._accuracy.kind == "count" else estimate - width
        return Outlook(
            self.key, True, met, estimate, lower, estimate + width, sampling, straggler * math.sqrt(1 - of_silent),
            straggler * math.sqrt(of_silent), arrived, size, count,
            "" if met else reason or "the interval is wider than the error",
        )  # fmt: skip

    def _scaled(self, sampled: Sampled) -> float:
        """The measure of what has arrived, from the part of it that was processed."""
        rows = sampled.count > 0
        if not rows.any():
            return math.nan
        total = float((sampled.total[rows] / sampled.count[rows] * sampled.arrived[rows]).sum())
        return total / float(sampled.arrived[rows].sum()) if self._accuracy.kind == "mean" else total

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
    def from_state(cls, state: Any, fresh: Callable[[int], Watermark], accuracy: Accuracy, clock: Clockwork) -> Stratum:
        """Raises what damaged JSON or bytes raise."""
        result = cls(state["key"], state["number"], state["base"], 1, fresh, accuracy, clock)
        result.heard = state["heard"]
        result.mark = Watermark.from_state(base64.b64decode(state["mark"]))
        result.tallies.restore(state["tallies"])
        return result
