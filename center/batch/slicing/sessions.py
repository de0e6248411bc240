"""Sessions as runs of records. The states of sessions are merges of slices.

A run is a sequence of records with gaps shorter than the session gap. A run is one session. If the run exceeds the
maximum length, it is cut into several sessions. The cuts are on the grid of the gap, counted from the beginning of the
run, as at the center (`center.ledger.sessionize`). When a cut-off session is final, it does not change, and the rest of
the run begins at the cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from center.batch.slicing.kernels import Kernel
from center.batch.slicing.merging import merged
from center.batch.slicing.results import WindowResult
from center.batch.slicing.watermarks import NO_WATERMARK
from edgewater.model.windows import SessionWindow

Slices = Callable[[int, int], Sequence[Any]]
"""A function that returns a family's slices, ascending. They belong to open sessions, and their first records are in
[first, last]."""


@dataclass(slots=True, eq=False)
class OpenRun:
    """A run that may still change.

    Attributes:
        first, last: event times of the first and the last record.
        changed: starts of the parts of the run that have records in no answer. The parts are cells of the grid of the
            gap.
        answered: revision by (start, end) of the answers to the run's sessions, including answers that will be
            replaced.
    """

    first: int
    last: int
    changed: set[int] = field(default_factory=set)
    answered: dict[tuple[int, int], int] = field(default_factory=dict)


class SessionTracker:
    """The runs of one family that are not final, ascending and disjoint.

    Attributes:
        sealed: the end of the last final session that was cut off. Earlier records are dropped.
    """

    def __init__(self, index: int, family: SessionWindow) -> None:
        self.index, self.gap = index, family.gap_ms
        self._family = family
        self.open: list[OpenRun] = []
        self.sealed = NO_WATERMARK

    def _near(self, first: int, last: int) -> slice:
        """Returns the range of the open runs that are connected to records from `first` to `last`."""
        low = bisect_left(self.open, first - self.gap + 1, key=lambda one: one.last)
        high = bisect_left(self.open, last + self.gap, key=lambda one: one.first)
        return slice(low, max(low, high))

    def takes(self, first: int, last: int, open_ends: int) -> bool:
        """Returns whether records from `first` to `last` are accepted. They join an open run or become a new run."""
        near = self._near(first, last)
        return last + self.gap > open_ends or near.stop > near.start

    def touch(self, first: int, last: int) -> None:
        """Adds the records of one slice, whose event times are from `first` to `last`.

        If the records connect several open runs, these runs become one run.
        """
        near = self._near(first, last)
        joined = self.open[near]
        if len(joined) == 1:
            one = joined[0]
            one.first, one.last = min(one.first, first), max(one.last, last)
        else:
            one = OpenRun(first, last)
            for other in joined:
                one.first, one.last = min(one.first, other.first), max(one.last, other.last)
                one.changed |= other.changed
                one.answered |= other.answered
            self.open[near] = [one]
        one.changed.add(self._family.slice_start(first))

    def _cut(self, run: OpenRun) -> Iterator[tuple[int, int, bool]]:
        """Yields the sessions of a run: (start, end) of their slices, and whether the run continues
        after the session.
        """
        start, last = self._family.slice_start(run.first), self._family.slice_start(run.last)
        while (border := self._family.cut_ms(start)) <= last:
            yield start, border, True
            start = border
        yield start, last + self.gap, False

    def answer(self, watermark: int, slices: Slices, kernel: Kernel) -> Iterator[WindowResult]:
        """Answers the sessions that end before the watermark and have changed since their last answer."""
        for run in self.open:
            if run.first >= watermark:
                break
            if not run.changed:
                continue
            for start, border, cut in self._cut(run):
                end = border if cut else run.last + self.gap
                if end > watermark:
                    break
                parts = slices(start, border - 1)
                bounds = (parts[0].first, end)
                changed = {at for at in run.changed if start <= at < border}
                if bounds in run.answered and not changed:
                    continue
                run.changed -= changed
                whole = merged(kernel, [part.partial() for part in parts])
                replaces = tuple(was for was in run.answered if start <= was[0] < border and was != bounds)
                revision = 1 + max(run.answered.pop(was, 0) for was in (bounds, *replaces))
                run.answered[bounds] = revision
                yield WindowResult(
                    self.index,
                    *bounds,
                    revision,
                    whole.state,
                    whole.records,
                    whole.first_ms,
                    whole.last_ms,
                    replaces,
                    cut,
                )

    def forget(self, open_ends: int, slices: Slices) -> list[tuple[int, int]]:
        """Removes final sessions, and returns the extent [first, last] of each removed session."""
        final: list[tuple[int, int]] = []
        for run in list(self.open):
            for start, border, cut in self._cut(run):
                if (border if cut else run.last + self.gap) > open_ends:
                    return final
                final.append((start, border - 1))
                if cut:
                    self._cut_off(run, border, slices)
            self.open.remove(run)
        return final

    def _cut_off(self, run: OpenRun, border: int, slices: Slices) -> None:
        self.sealed = border
        run.first = slices(border, run.last)[0].first
        run.answered = {bounds: revision for bounds, revision in run.answered.items() if bounds[0] >= border}
