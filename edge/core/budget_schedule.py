"""This edge's shares of a query's error budget: each slice has one, and keeps it. Pure.

A share that changes does so from some slice on, never for slices that have been closed. So what "from
here on I hold back less" means does not depend on what is still under way: every statement about a later
slice will be made under the new share, and every statement about an earlier one stands. That is why an
edge may confirm a smaller share as soon as it is in its journal, and why nothing that was closed has to
be sent again (`docs/explanation/shares.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgewater.streams import MIN_TIME_MS

MAX_STEPS = 64


@dataclass(frozen=True, slots=True)
class Step:
    """From the slice that starts at `from_ms` on, these shares per measure and window."""

    from_ms: int
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ShareSchedule:
    """The shares of all slices.

    Attributes:
        version: of the center's last word that was taken in; 0: none.
        steps: ascending; before the first one, and of a measure that is not named, the share is 0,
            which means exact.
    """

    version: int = 0
    steps: tuple[Step, ...] = field(default=())

    def at(self, slice_start_ms: int) -> Mapping[str, float]:
        """The shares of a slice."""
        for step in reversed(self.steps):
            if step.from_ms <= slice_start_ms:
                return step.shares
        return {}

    @property
    def last(self) -> Step:
        """What holds for slices to come."""
        return self.steps[-1] if self.steps else Step(MIN_TIME_MS, {})

    def take(self, version: int, shares: Mapping[str, float], from_ms: int, open_from_ms: int) -> ShareSchedule:
        """The schedule after a word of the center; itself if it has heard that or a later one.

        Args:
            from_ms: the center allows the shares from this slice on, and not earlier.
            open_from_ms: no slice from here on has been closed.
        """
        if version <= self.version:
            return self
        start = max(from_ms, open_from_ms)
        kept = tuple(s for s in self.steps if s.from_ms < start)
        steps = (*kept, Step(start, dict(shares)))
        if len(steps) > MAX_STEPS:
            # Of two steps become one, a slice gets the smaller share: less is held back than might be.
            first, second = steps[0].shares, steps[1].shares
            least = {m: min(first.get(m, 0.0), second.get(m, 0.0)) for m in second}
            steps = (Step(steps[0].from_ms, least), *steps[2:])
        return ShareSchedule(version, steps)

    @classmethod
    def always(cls, shares: Mapping[str, float]) -> ShareSchedule:
        """The same for every slice: what a center that does not count versions says."""
        return cls(0, (Step(MIN_TIME_MS, dict(shares)),))

    def without_before(self, slice_start_ms: int) -> ShareSchedule:
        """The schedule without what only slices before this one need."""
        needed = [i for i, s in enumerate(self.steps) if s.from_ms <= slice_start_ms]
        return ShareSchedule(self.version, self.steps[needed[-1] :]) if len(needed) > 1 else self

    def to_json(self) -> dict[str, Any]:
        return {"version": self.version, "steps": [[s.from_ms, dict(s.shares)] for s in self.steps]}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> ShareSchedule:
        """Reads what `to_json` wrote."""
        return cls(given["version"], tuple(Step(start, shares) for start, shares in given["steps"]))
