"""The schedule of this edge's shares of a query's error budget, by slice. Pure.

Each slice has one share and keeps it: a new share applies from some slice on, never to slices that have been closed. So
a smaller share needs no coordination with messages in flight: every later slice will be closed under the new share, and
the reports of earlier slices stay valid. Therefore an edge may confirm a smaller share as soon as it is in its journal,
and nothing that was closed has to be sent again (`docs/explanation/shares.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgewater.streams import MIN_TIME_MS

MAX_STEPS = 64


@dataclass(frozen=True, slots=True)
class ShareStep:
    """The shares, per measure and window, of slices from the one that starts at `from_ms` on."""

    from_ms: int
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ShareSchedule:
    """The shares of all slices.

    Attributes:
        version: version of the last update from the center; 0: none.
        steps: ascending. Before the first step, and for a measure without an entry, the share is 0, which means
            exact.
    """

    version: int = 0
    steps: tuple[ShareStep, ...] = field(default=())

    def at(self, slice_start_ms: int) -> Mapping[str, float]:
        """Returns the shares of a slice."""
        for step in reversed(self.steps):
            if step.from_ms <= slice_start_ms:
                return step.shares
        return {}

    @property
    def last(self) -> ShareStep:
        """The step that applies to future slices."""
        return self.steps[-1] if self.steps else ShareStep(MIN_TIME_MS, {})

    def updated(self, version: int, shares: Mapping[str, float], from_ms: int, open_from_ms: int) -> ShareSchedule:
        """Returns the schedule after an update from the center; itself if the version is not newer.

        Args:
            from_ms: the first slice to which the center allows the shares to apply.
            open_from_ms: no slice that starts at or after this has been closed.
        """
        if version <= self.version:
            return self
        start = max(from_ms, open_from_ms)
        kept = tuple(s for s in self.steps if s.from_ms < start)
        steps = (*kept, ShareStep(start, dict(shares)))
        if len(steps) > MAX_STEPS:
            # Two steps are merged with the smaller shares, so that slices withhold less than they may.
            first, second = steps[0].shares, steps[1].shares
            least = {m: min(first.get(m, 0.0), second.get(m, 0.0)) for m in second}
            steps = (ShareStep(steps[0].from_ms, least), *steps[2:])
        return ShareSchedule(version, steps)

    @classmethod
    def uniform(cls, shares: Mapping[str, float]) -> ShareSchedule:
        """Returns an unversioned schedule with the same shares for all slices."""
        return cls(0, (ShareStep(MIN_TIME_MS, dict(shares)),))

    def without_before(self, slice_start_ms: int) -> ShareSchedule:
        """Returns the schedule without the steps that only slices before this one need."""
        needed = [i for i, s in enumerate(self.steps) if s.from_ms <= slice_start_ms]
        return ShareSchedule(self.version, self.steps[needed[-1] :]) if len(needed) > 1 else self

    def to_state(self) -> dict[str, Any]:
        return {"version": self.version, "steps": [[s.from_ms, dict(s.shares)] for s in self.steps]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ShareSchedule:
        return cls(state["version"], tuple(ShareStep(start, shares) for start, shares in state["steps"]))
