"""Upper bounds of the shares that one edge may apply to each slice of one query. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.share_steps import ShareStep, ShareSteps

MAX_STEPS = 8  # limit: rows of an edge's history


@dataclass(frozen=True, slots=True)
class Grant:
    """A message to an edge: the edge may apply `shares` to slices that start at or after `from_ms`, and not to earlier
    slices.
    """

    version: int = 0
    from_ms: int = MIN_TIME_MS
    shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Holding:
    """The shares of one edge.

    Attributes:
        version: version of the last grant that the edge confirmed or reported as received.
        steps: an upper bound of the shares in force, without the pending grant.
        grant: the last grant to the edge.
        reported_at_ms: wall time of the edge's last report; 0 if it has not reported.
        update_bytes, drift: the same as in `BudgetReport`.
        retired: whether the edge is retired.
    """

    version: int = 0
    steps: ShareSteps = field(default_factory=ShareSteps)
    grant: Grant = Grant()
    reported_at_ms: int = 0
    update_bytes: float = 0.0
    drift: Mapping[str, float] = field(default_factory=dict)
    retired: bool = False

    @property
    def last(self) -> ShareStep:
        return self.steps.last

    @property
    def is_rated(self) -> bool:
        return self.update_bytes > 0 and bool(self.drift)

    @property
    def pending(self) -> Grant | None:
        """The grant that the edge may have received but has not confirmed; None if there is no such grant."""
        return self.grant if self.grant.version > self.version else None

    def max_share_at(self, measure: str, slice_start_ms: int) -> float:
        """Returns the largest share that the edge may apply to a slice."""
        largest = self.steps.at(slice_start_ms).get(measure, 0.0)
        if self.pending is not None and self.pending.from_ms <= slice_start_ms:
            largest = max(largest, self.pending.shares.get(measure, 0.0))
        return largest

    def max_share_from(self, measure: str, from_ms: int) -> float:
        """Returns the largest share that the edge may apply to any slice that starts at or after `from_ms`."""
        later = [s.shares.get(measure, 0.0) for s in self.steps if s.from_ms > from_ms]
        pending = [self.pending.shares.get(measure, 0.0)] if self.pending is not None else []
        return max(self.max_share_at(measure, from_ms), *later, *pending, 0.0)

    def issue(self, shares: Mapping[str, float], from_ms: int) -> Holding:
        """Returns the holding with a new pending grant. The grant counts from now on, so store the holding before the
        grant is sent.

        It never applies to slices before the last confirmed step: the edge may be behind that step, and other edges may
        have more of the earlier slices.
        """
        assert self.pending is None, "one pending grant at a time"
        return replace(self, grant=Grant(self.grant.version + 1, max(from_ms, self.last.from_ms), dict(shares)))

    def confirm(self, from_ms: int) -> Holding:
        """Returns the holding after the edge applied the pending grant to slices from `from_ms` on."""
        assert self.pending is not None and from_ms >= self.grant.from_ms
        # The slices of merged steps count with the larger share.
        steps = self.steps.replaced_from(from_ms, self.grant.shares, max_steps=MAX_STEPS, combine=max)
        return replace(self, version=self.grant.version, steps=steps, retired=False)

    def revoke(self, version: int, claimed: Mapping[str, float]) -> Holding:
        """Returns the holding with a grant of nothing, for an edge whose confirmations are void.

        Until the edge confirms it, its share of a slice counts as the largest share that was ever granted or that it
        claims. After that, it is a new edge and its share grows from 0. The center does not know which slices the edge
        has closed, and other edges may have used its last share in earlier slices.

        Args:
            version: version of the last grant that the edge has reported as received.
            claimed: the shares that the edge reports to apply.
        """
        names = {m for s in (*self.steps, self.grant) for m in s.shares} | set(claimed)
        largest = {m: max(self.max_share_from(m, MIN_TIME_MS), claimed.get(m, 0.0)) for m in names}
        grant = Grant(max(self.grant.version, version) + 1)
        return replace(self, version=version, steps=ShareSteps.constant(largest), grant=grant, retired=False)

    def retire(self, gone_from_ms: int) -> Holding:
        """Returns the holding of an edge that has closed no slice from `gone_from_ms` on and will never close one."""
        names = {m for s in self.steps for m in s.shares} | set(self.grant.shares)
        largest = {m: self.max_share_from(m, MIN_TIME_MS) for m in names}
        steps = ShareSteps((ShareStep(MIN_TIME_MS, largest), ShareStep(gone_from_ms, {})))
        return replace(self, version=self.grant.version, steps=steps, retired=True)

    def to_state(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "steps": self.steps.to_state(),
            "grant": [self.grant.version, self.grant.from_ms, dict(self.grant.shares)],
            "reported_at_ms": self.reported_at_ms,
            "update_bytes": self.update_bytes,
            "drift": dict(self.drift),
            "retired": self.retired,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Holding:
        return cls(
            state["version"],
            ShareSteps.from_state(state["steps"]),
            Grant(*state["grant"]),
            state["reported_at_ms"],
            state["update_bytes"],
            state["drift"],
            state["retired"],
        )


NO_HOLDING = Holding()
"""The holding of an edge that has not reported: it applies no share."""
