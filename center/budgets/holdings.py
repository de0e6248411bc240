"""Upper bounds of the shares that one edge may apply to each slice of one query. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgewater.model.share_steps import ShareStep, ShareSteps
from edgewater.model.streams import MIN_TIME_MS

MAX_STEPS = 8


@dataclass(frozen=True, slots=True)
class Grant:
    """A budget message to an edge: `shares` for slices that start at or after `from_ms`, not for earlier ones."""

    version: int = 0
    from_ms: int = MIN_TIME_MS
    shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Holding:
    """One edge's shares.

    Attributes:
        version: of the last grant that the edge confirmed, or says that it has received.
        steps: an upper bound of the shares in force, `pending` excluded.
        grant: the last one issued to the edge.
        reported_at_ms: wall time of its last report; 0: it has not reported.
        update_bytes, drift: as in `BudgetReport`.
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
        """A grant that the edge may have received but has not confirmed."""
        return self.grant if self.grant.version > self.version else None

    def max_share_at(self, measure: str, slice_start_ms: int) -> float:
        """The largest share that the edge may apply to a slice."""
        largest = self.steps.at(slice_start_ms).get(measure, 0.0)
        if self.pending is not None and self.pending.from_ms <= slice_start_ms:
            largest = max(largest, self.pending.shares.get(measure, 0.0))
        return largest

    def max_share_from(self, measure: str, from_ms: int) -> float:
        """The largest share that the edge may apply to any slice from `from_ms` on."""
        later = [s.shares.get(measure, 0.0) for s in self.steps if s.from_ms > from_ms]
        pending = [self.pending.shares.get(measure, 0.0)] if self.pending is not None else []
        return max(self.max_share_at(measure, from_ms), *later, *pending, 0.0)

    def issue(self, shares: Mapping[str, float], from_ms: int) -> Holding:
        """Returns the holding with a new pending grant. It counts from now on: store it before it is sent."""
        assert self.pending is None, "one pending grant at a time"
        return replace(self, grant=Grant(self.grant.version + 1, from_ms, dict(shares)))

    def confirm(self, from_ms: int) -> Holding:
        """Returns the holding after the edge applied the pending grant to slices from `from_ms` on."""
        assert self.pending is not None and from_ms >= self.grant.from_ms
        # The slices of merged steps count with the larger share.
        steps = self.steps.replaced_from(from_ms, self.grant.shares, max_steps=MAX_STEPS, combine=max)
        return replace(self, version=self.grant.version, steps=steps, retired=False)

    def reissue(self, version: int, claimed: Mapping[str, float], entitled: Mapping[str, float]) -> Holding:
        """Returns the holding of an edge whose confirmations are void, with a new grant of what it is entitled to.

        Until the edge confirms that grant, any share that it was ever granted, or claims, counts for every slice.

        Args:
            version: of the last grant that the edge says it has received.
        """
        names = {m for s in self.steps for m in s.shares} | set(claimed) | set(entitled)
        largest = {m: max(self.max_share_from(m, MIN_TIME_MS), claimed.get(m, 0.0)) for m in names}
        grant = Grant(max(self.grant.version, version) + 1, MIN_TIME_MS, dict(entitled))
        return replace(self, version=version, steps=ShareSteps.constant(largest), grant=grant, retired=False)

    def retire(self, gone_from_ms: int) -> Holding:
        """Returns the holding of an edge that closed no slice from `gone_from_ms` on and never will."""
        names = {m for s in self.steps for m in s.shares} | set(self.grant.shares)
        largest = {m: self.max_share_from(m, MIN_TIME_MS) for m in names}
        steps = ShareSteps((ShareStep(MIN_TIME_MS, largest), ShareStep(gone_from_ms, {})))
        return replace(self, version=self.grant.version, steps=steps, retired=True)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "steps": self.steps.to_json(),
            "grant": [self.grant.version, self.grant.from_ms, dict(self.grant.shares)],
            "reported_at_ms": self.reported_at_ms,
            "update_bytes": self.update_bytes,
            "drift": dict(self.drift),
            "retired": self.retired,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Holding:
        return cls(
            state["version"],
            ShareSteps.from_json(state["steps"]),
            Grant(*state["grant"]),
            state["reported_at_ms"],
            state["update_bytes"],
            state["drift"],
            state["retired"],
        )


NO_HOLDING = Holding()
"""The holding of an edge that has not reported: it applies no share."""
