"""The schedule of this edge's shares of a query's error budget, by slice. Pure.

Each slice has one share and keeps it: a new share applies from some slice on, never to closed slices. So a smaller
share needs no coordination with messages in flight. Later slices close under the new share, and the reports of earlier
slices stay valid. Therefore an edge may confirm a smaller share as soon as the share is in its journal. No closed slice
is sent again (`docs/explanation/shares.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgewater.model.share_steps import ShareStep, ShareSteps

MAX_STEPS = 64  # limit: memory of a schedule


@dataclass(frozen=True, slots=True)
class ShareSchedule:
    """The shares of all slices.

    Attributes:
        version: version of the last update from the center; 0: none.
        steps: a share of 0 means exact.
    """

    version: int = 0
    steps: ShareSteps = field(default_factory=ShareSteps)

    def at(self, slice_start_ms: int) -> Mapping[str, float]:
        """Returns the shares of a slice."""
        return self.steps.at(slice_start_ms)

    @property
    def last(self) -> ShareStep:
        """The step that applies to future slices."""
        return self.steps.last

    def updated(self, version: int, shares: Mapping[str, float], from_ms: int, open_from_ms: int) -> ShareSchedule:
        """Returns the schedule after an update from the center; itself if the version is not newer.

        Args:
            from_ms: the first slice to which the center allows the shares to apply.
            open_from_ms: every slice that starts at or after this event time is still open.
        """
        if version <= self.version:
            return self
        start_ms = max(from_ms, open_from_ms)
        # Merged steps get the smaller shares, so that slices withhold less than allowed, never more.
        return ShareSchedule(version, self.steps.replaced_from(start_ms, shares, max_steps=MAX_STEPS, combine=min))

    @classmethod
    def uniform(cls, shares: Mapping[str, float]) -> ShareSchedule:
        """Returns an unversioned schedule with the same shares for all slices."""
        return cls(0, ShareSteps.constant(shares))

    def without_before(self, slice_start_ms: int) -> ShareSchedule:
        """Returns the schedule without the steps that only slices before this slice need."""
        return ShareSchedule(self.version, self.steps.without_before(slice_start_ms))

    def to_state(self) -> dict[str, Any]:
        return {"version": self.version, "steps": self.steps.to_state()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ShareSchedule:
        return cls(state["version"], ShareSteps.from_state(state["steps"]))
