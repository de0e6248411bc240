"""The shares of an error budget as a step function over slices. The code is pure.

An edge stores the shares that it applies. The center stores an upper bound of these shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from edgewater.base.streams import MIN_TIME_MS


@dataclass(frozen=True, slots=True)
class ShareStep:
    """The shares per measure for the slices that start at `from_ms` or later, until the next step."""

    from_ms: int
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ShareSteps:
    """The shares of all slices. Steps are ascending. A share is 0 before the first step, and for a measure without an
    entry.
    """

    steps: tuple[ShareStep, ...] = ()

    @classmethod
    def constant(cls, shares: Mapping[str, float]) -> ShareSteps:
        """Returns the same shares for all slices."""
        return cls((ShareStep(MIN_TIME_MS, dict(shares)),))

    @property
    def last(self) -> ShareStep:
        """The step that applies to future slices."""
        return self.steps[-1] if self.steps else ShareStep(MIN_TIME_MS, {})

    def __iter__(self) -> Iterator[ShareStep]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, slice_start_ms: int) -> Mapping[str, float]:
        """Returns the shares of a slice."""
        return next((step.shares for step in reversed(self.steps) if step.from_ms <= slice_start_ms), {})

    def replaced_from(
        self, from_ms: int, shares: Mapping[str, float], *, max_steps: int, combine: Callable[[float, float], float]
    ) -> ShareSteps:
        """Returns the step function with these shares from `from_ms` on.

        Args:
            max_steps: the largest number of steps. Beyond it, the oldest two steps become one.
            combine: `min` or `max`, which computes the share of the merged step from the two shares.
        """
        kept = tuple(step for step in self if step.from_ms < from_ms)
        steps = (*kept, ShareStep(from_ms, dict(shares)))
        if len(steps) > max_steps:
            first, second = steps[0].shares, steps[1].shares
            merged = {m: combine(first.get(m, 0.0), second.get(m, 0.0)) for m in {*first, *second}}
            steps = (ShareStep(steps[0].from_ms, merged), *steps[2:])
        return ShareSteps(steps)

    def without_before(self, slice_start_ms: int) -> ShareSteps:
        """Returns the step function without the steps that no slice at or after `slice_start_ms` needs."""
        needed = [i for i, step in enumerate(self.steps) if step.from_ms <= slice_start_ms]
        return ShareSteps(self.steps[needed[-1] :]) if len(needed) > 1 else self

    def to_state(self) -> list[list[object]]:
        return [[step.from_ms, dict(step.shares)] for step in self.steps]

    @classmethod
    def from_state(cls, document: list[list[object]]) -> ShareSteps:
        return cls(tuple(ShareStep(start, shares) for start, shares in document))  # type: ignore[arg-type]
