"""What the center remembers of one edge's shares of one query: what it may apply to which slice. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgewater.streams import MIN_TIME_MS

MAX_STEPS = 8


@dataclass(frozen=True, slots=True)
class Step:
    """From the slice that starts at `from_ms` on, at most these shares per measure."""

    from_ms: int
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Grant:
    """A word of the center: `shares` for slices from `from_ms` on, not for earlier ones."""

    version: int = 0
    from_ms: int = MIN_TIME_MS
    shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Holding:
    """One edge's shares.

    Attributes:
        version: of the last word that it confirmed, or says that it has heard.
        steps: ascending, from `MIN_TIME_MS` on: an upper bound of what it applies, but for `pending`.
        word: the last one to it.
        heard_ms: wall time of its last report; 0: none has come.
        update_bytes, drift: as in `BudgetReport`.
    """

    version: int = 0
    steps: tuple[Step, ...] = (Step(MIN_TIME_MS, {}),)
    word: Grant = Grant()
    heard_ms: int = 0
    update_bytes: float = 0.0
    drift: Mapping[str, float] = field(default_factory=dict)
    retired: bool = False

    @property
    def last(self) -> Step:
        return self.steps[-1]

    @property
    def is_rated(self) -> bool:
        return self.update_bytes > 0 and bool(self.drift)

    @property
    def pending(self) -> Grant | None:
        """A word that it may have heard and has not confirmed."""
        return self.word if self.word.version > self.version else None

    def bound(self, measure: str, slice_start_ms: int) -> float:
        """The most it may apply to a slice."""
        held = next(s for s in reversed(self.steps) if s.from_ms <= slice_start_ms or s is self.steps[0])
        most = held.shares.get(measure, 0.0)
        if self.pending is not None and self.pending.from_ms <= slice_start_ms:
            most = max(most, self.pending.shares.get(measure, 0.0))
        return most

    def most(self, measure: str, from_ms: int) -> float:
        """The most it may apply to any slice from `from_ms` on."""
        later = [s.shares.get(measure, 0.0) for s in self.steps if s.from_ms > from_ms]
        waiting = [self.pending.shares.get(measure, 0.0)] if self.pending is not None else []
        return max(self.bound(measure, from_ms), *later, *waiting, 0.0)

    def give(self, shares: Mapping[str, float], from_ms: int) -> Holding:
        """With a new word under way. Counts from now on, so it has to be written down before it is sent."""
        assert self.pending is None, "one word at a time"
        return replace(self, word=Grant(self.word.version + 1, from_ms, dict(shares)))

    def confirm(self, from_ms: int) -> Holding:
        """The edge applies the word under way to slices from `from_ms` on."""
        assert self.pending is not None and from_ms >= self.word.from_ms
        kept = tuple(s for s in self.steps if s.from_ms < from_ms)
        steps = _bounded((*kept, Step(from_ms, self.word.shares)))
        return replace(self, version=self.word.version, steps=steps, retired=False)

    def forget(self, version: int, claimed: Mapping[str, float], entitled: Mapping[str, float]) -> Holding:
        """What it has confirmed means nothing any more: whatever it was ever given, or claims, may be in
        force for any slice, until it confirms the word that is given to it now.

        Args:
            version: of the last word that it has heard, by its own account.
        """
        names = {m for s in self.steps for m in s.shares} | set(claimed) | set(entitled)
        most = {m: max(self.most(m, MIN_TIME_MS), claimed.get(m, 0.0)) for m in names}
        again = Grant(max(self.word.version, version) + 1, MIN_TIME_MS, dict(entitled))
        return replace(self, version=version, steps=(Step(MIN_TIME_MS, most),), word=again, retired=False)

    def retire(self, gone_from_ms: int) -> Holding:
        """It has closed no slice from `gone_from_ms` on, and never will."""
        names = {m for s in self.steps for m in s.shares} | set(self.word.shares)
        most = {m: self.most(m, MIN_TIME_MS) for m in names}
        steps = (Step(MIN_TIME_MS, most), Step(gone_from_ms, {}))
        return replace(self, version=self.word.version, steps=steps, retired=True)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "steps": [[s.from_ms, dict(s.shares)] for s in self.steps],
            "word": [self.word.version, self.word.from_ms, dict(self.word.shares)],
            "heard_ms": self.heard_ms,
            "update_bytes": self.update_bytes,
            "drift": dict(self.drift),
            "retired": self.retired,
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Holding:
        return cls(
            given["version"],
            tuple(Step(start, shares) for start, shares in given["steps"]),
            Grant(*given["word"]),
            given["heard_ms"],
            given["update_bytes"],
            given["drift"],
            given["retired"],
        )


def _bounded(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The oldest two as one, where there are too many: their slices then count with the larger share."""
    if len(steps) <= MAX_STEPS:
        return steps
    first, second, *rest = steps
    most = {m: max(first.shares.get(m, 0.0), second.shares.get(m, 0.0)) for m in {*first.shares, *second.shares}}
    return (Step(first.from_ms, most), *rest)


NOTHING = Holding()
"""An edge of which nothing has been heard: it applies no share."""
