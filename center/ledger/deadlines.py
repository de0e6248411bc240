"""`Deadlines` stores when the next decision about each window of a query must be made.

A window waits for one of these times: until all edges have closed it, until it is final, or until its staleness budget
ends. If it has changed since its newest answer, it waits until it may be refined. Windows are in heaps by start. When a
frontier advances, the windows that it has passed are taken from the heap. So the time of a batch depends on the windows
that it changes and closes, and not on the number of open windows. An entry of a heap may be outdated. The table of
windows decides, and the heaps can be built again from it.

The rules assume that the order of windows by start is also their order by end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heapify, heappop, heappush, nsmallest

from center.ledger.state import StateTable, WindowState
from edgewater.answers import Phase


class Deadlines:
    """The deadlines of the windows of one query.

    Args:
        windows: the windows that are not final, by start.
        closes_at: by start of a window, the event time up to which all edges must have closed the window.
        due_at: by start of a window, the wall time at which the window is answered at the latest; None if there is no
            such time.

    Attributes:
        refine_at_ms: wall time at which the first of the changed windows may be answered; None if no changed window
            waits.
    """

    def __init__(
        self, windows: StateTable[WindowState], closes_at: Callable[[int], int], due_at: Callable[[int], int] | None
    ) -> None:
        self._windows, self._closes_at, self._due_at = windows, closes_at, due_at
        states = list(windows.items())
        self._awaiting_close = [start for start, w in states if w.phase is Phase.EARLY or w.lacks_edges]
        self._awaiting_final = [start for start, _ in states]
        self._awaiting_due = [start for start, w in states if not w.is_answered and due_at is not None]
        for heap in (self._awaiting_close, self._awaiting_final, self._awaiting_due):
            heapify(heap)
        self._outdated = {start for start, w in states if w.outdated}
        self.refine_at_ms: int | None = None
        self.update_refinement()

    @property
    def entries(self) -> int:
        """Number of entries in all heaps."""
        return len(self._awaiting_close) + len(self._awaiting_final) + len(self._awaiting_due)

    def add(self, start_ms: int) -> None:
        """Adds a new window."""
        heappush(self._awaiting_close, start_ms)
        heappush(self._awaiting_final, start_ms)
        if self._due_at is not None:
            heappush(self._awaiting_due, start_ms)

    def await_close(self, start_ms: int) -> None:
        """Makes a window that was complete wait for edges again."""
        heappush(self._awaiting_close, start_ms)

    def take_final(self, through_ms: int, reached_ms: int, most: int) -> tuple[set[int], int]:
        """Takes the windows that become final, the earliest first.

        Args:
            through_ms: event time up to which windows are final so far.
            reached_ms: event time up to which windows may become final.
            most: the largest number of windows to take.

        Returns:
            The windows, and the event time up to which windows are final after the answers to these windows.
        """
        final, passed = max(through_ms, reached_ms), set[int]()
        while self._awaiting_final and (end := self._closes_at(self._awaiting_final[0])) <= final:
            if self._awaiting_final[0] not in self._windows or self._awaiting_final[0] in passed:
                heappop(self._awaiting_final)
            elif len(passed) < most:
                passed.add(heappop(self._awaiting_final))
            else:
                final = max(through_ms, end - 1)
                break
        return passed, final

    def take_closed(self, closed_ms: int, most: int) -> set[int]:
        """Takes windows that all edges have closed and that have data or an answer, the earliest first."""
        passed = set[int]()
        while self._awaiting_close and self._closes_at(self._awaiting_close[0]) <= closed_ms:
            if self._awaiting_close[0] not in self._windows:
                heappop(self._awaiting_close)
            elif len(passed) < most:
                passed.add(heappop(self._awaiting_close))
            else:
                break
        return passed

    def take_due(self, now_ms: int, most: int) -> set[int]:
        """Takes windows without an answer whose deadline has passed, the earliest first."""
        due = set[int]()
        while len(due) < most and self._awaiting_due and self._is_due(self._awaiting_due[0], now_ms):
            start = heappop(self._awaiting_due)
            if self._is_unanswered(start):
                due.add(start)
        return due

    def next_due(self) -> int | None:
        """Returns the start of the first window that has a deadline and no answer; None if there is no such window."""
        while self._awaiting_due and not self._is_unanswered(self._awaiting_due[0]):
            heappop(self._awaiting_due)
        return self._awaiting_due[0] if self._awaiting_due else None

    def take_refined(self, changed: set[int], most: int, now_ms: int) -> set[int]:
        """Takes changed windows that may be answered now, the earliest first, and marks the other changed windows as
        outdated.

        Args:
            changed: windows that have changed in this event. Windows that changed earlier and still wait are taken,
                too.
        """
        windows = self._windows
        waiting = {start for start in self._outdated if (w := windows.get(start)) is not None and w.outdated}
        ready = (s for s in waiting | changed if (w := windows.get(s)) is not None and w.may_be_refined(now_ms))
        now = set(nsmallest(max(0, most), ready))
        self._outdated = (waiting | changed) - now
        for start in (changed - now - waiting) | (waiting & now):
            if (state := windows.get(start)) is not None:
                windows.put(start, replace(state, outdated=start not in now))
        return now

    def without_wait(self, starts: set[int]) -> set[int]:
        """Removes the wait after the last answers of windows, so that the next event can answer them. Returns the
        windows.
        """
        for start in starts:
            if (state := self._windows.get(start)) is not None and state.refine_from_ms:
                self._windows.put(start, replace(state, refine_from_ms=0))
        return starts

    def update_refinement(self) -> None:
        """Sets `refine_at_ms`. Called after answers have been given."""
        states = (self._windows.get(start) for start in self._outdated)
        self.refine_at_ms = min((w.refine_from_ms for w in states if w is not None and w.outdated), default=None)

    def has_passed(self, now_ms: int, closed_ms: int, final_ms: int) -> bool:
        """Returns whether further windows could be answered now.

        Args:
            closed_ms: event time up to which windows are closed.
            final_ms: event time up to which windows may be final.
        """
        return bool(
            (self.refine_at_ms is not None and self.refine_at_ms <= now_ms)
            or (self._awaiting_final and self._closes_at(self._awaiting_final[0]) <= final_ms)
            or (self._awaiting_close and self._closes_at(self._awaiting_close[0]) <= closed_ms)
        )

    def _is_due(self, start_ms: int, now_ms: int) -> bool:
        return self._due_at is not None and self._due_at(start_ms) <= now_ms

    def _is_unanswered(self, start_ms: int) -> bool:
        state = self._windows.get(start_ms)
        return state is not None and not state.is_answered
