"""Sessions as intervals that grow together; their states are merges of slices."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgewater.slicing.kernels import Kernel
from edgewater.slicing.merging import merged
from edgewater.slicing.results import WindowResult


@dataclass(slots=True, eq=False)
class OpenSession:
    """A session that may still change, from its first to its last record.

    Attributes:
        answered: (start, end) under which it, or what it grew out of, was answered.
    """

    first: int
    last: int
    revision: int = 0
    pending: bool = True
    answered: list[tuple[int, int]] = field(default_factory=list)


class SessionWindows:
    """The sessions of one gap: those that are not final, by time. They never overlap."""

    def __init__(self, index: int, gap: int) -> None:
        self.index, self.gap = index, gap
        self.open: list[OpenSession] = []

    def _near(self, first: int, last: int) -> slice:
        """The sessions that records from `first` to `last` belong to."""
        low = bisect_left(self.open, first - self.gap + 1, key=lambda one: one.last)
        high = bisect_left(self.open, last + self.gap, key=lambda one: one.first)
        return slice(low, max(low, high))

    def takes(self, first: int, last: int, open_ends: int) -> bool:
        """Whether records from `first` to `last` may still come: into an open session, or one of their own."""
        near = self._near(first, last)
        return last + self.gap > open_ends or near.stop > near.start

    def touch(self, first: int, last: int) -> None:
        """Records from `first` to `last` have come; sessions that they join are one from now on."""
        near = self._near(first, last)
        joined = self.open[near]
        if len(joined) == 1:
            one = joined[0]
            one.first, one.last, one.pending = min(one.first, first), max(one.last, last), True
            return
        one = OpenSession(first, last)
        for other in joined:
            one.first, one.last = min(one.first, other.first), max(one.last, other.last)
            one.revision = max(one.revision, other.revision)
            one.answered += other.answered
        self.open[near] = [one]

    def answer(
        self, watermark: int, slices: Callable[[int, int], Sequence[Any]], kernel: Kernel
    ) -> Iterator[WindowResult]:
        """Sessions that the watermark has ended and that need an answer, or a new one."""
        for one in self.open:
            end = one.last + self.gap
            if end > watermark:
                break
            if not one.pending:
                continue
            whole = merged(kernel, [part.partial() for part in slices(one.first, one.last)])
            one.revision, one.pending = one.revision + 1, False
            replaces = tuple(bounds for bounds in one.answered if bounds != (one.first, end))
            one.answered = [(one.first, end)]
            yield WindowResult(
                self.index, one.first, end, one.revision, whole.state, whole.records, one.first, one.last, replaces
            )

    def forget(self, open_ends: int) -> list[tuple[int, int]]:
        """(first, last) of the sessions that are final now."""
        count = 0
        while count < len(self.open) and self.open[count].last + self.gap <= open_ends:
            count += 1
        final, self.open = self.open[:count], self.open[count:]
        return [(one.first, one.last) for one in final]
