"""Tumbling, sliding and calendar windows. Their borders do not depend on records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from center.ledger.state import WindowState
from center.ledger.window_book import WindowBook
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS, StreamClock
from edgewater.model.windows import TimeWindow

MAX_LACKING = 1000
"""The most windows without data that are opened because of one loss."""
MAX_UNANSWERED = 16 * MAX_LACKING
"""The most windows without data and without an answer. If there are more, no further window is opened because of a
loss."""

MAX_OVERDUE = 100  # limit: each is an answer, and a center may have been down for days.
"""The most windows without data that are answered after their deadline: the last ones. An earlier window is answered
when edges report it: an answer before that could only say that nothing has come."""


class TimeWindowBook(WindowBook):
    """The rules for a query of tumbling, sliding or calendar windows."""

    @property
    def _window(self) -> TimeWindow:
        assert isinstance(self._spec.window, TimeWindow)
        return self._spec.window

    def sealed_before(self) -> int:
        final = self._state.final_through_ms
        if self.has_ended:
            return self._own.slices(self._window)[1]
        return MIN_TIME_MS if final == MIN_TIME_MS else self._window.first_ending_after(final)

    def _affected_windows(self, changed: Sequence[int]) -> set[int]:
        self._open_windows(start for start in changed if self.slices.has_data(start))
        return {w for w in self._windows_over(changed) if not self._is_final(self._end(w))}

    def _windows_over(self, slice_starts_ms: Iterable[int]) -> Iterator[int]:
        """Yields the windows of this version that contain one of the slices. The slices must ascend."""
        return (start for start in self._window.windows_of_slices(slice_starts_ms) if start in self._own)

    def _open_windows(self, slice_starts_ms: Iterable[int]) -> None:
        for start in self._windows_over(slice_starts_ms):
            state = self.windows.get(start)
            if state is not None and not state.has_data:
                self.windows.put(start, replace(state, has_data=True))
            elif state is None and not self._is_final(self._end(start)):
                self.windows.put(start, WindowState(has_data=True))
                self.deadlines.add(start)

    def _end(self, start_ms: int) -> int:
        return self._window.end(start_ms)

    def _required_span(self, start_ms: int) -> tuple[int, int]:
        return start_ms, self._end(start_ms)

    def _slices_of(self, start_ms: int) -> range:
        return self._window.slices_of_window(start_ms)

    def _lost_through(self, slice_start_ms: int) -> int:
        if slice_start_ms < self.sealed_before():
            return MAX_TIME_MS
        first = max(self._window.windows_over(slice_start_ms).start, self._first_start)
        has_final_window = self._is_final(self._end(first))
        return self._state.final_through_ms if has_final_window else MIN_TIME_MS

    # Windows without data

    def _open_lacking(self, from_ms: int | None, to_ms: int | None, today_ms: int) -> None:
        state, window = self._state, self._window
        to_ms, today_ms = (None if to_ms is None else min(to_ms, self._own.until_ms)), min(today_ms, self._own.until_ms)
        if sum(not w.has_data and not w.is_answered for _, w in self.windows.items()) >= MAX_UNANSWERED:
            return
        if from_ms is None:
            is_running = state.final_through_ms > MIN_TIME_MS
            from_ms = MIN_TIME_MS if is_running else state.running_clock.to_event_ms(state.query.registered_at_ms)
        start = max(window.first_ending_after(max(from_ms, state.final_through_ms)), self._first_start)
        if to_ms is None or next(window.starts(start, to_ms, MAX_LACKING), start) > start:  # more than may be opened
            to_ms = today_ms if to_ms is None else min(to_ms, today_ms)
        for lacking in window.starts(start, to_ms, MAX_LACKING):
            if lacking not in self.windows:
                self.windows.put(lacking, WindowState(has_data=False))
                self.deadlines.add(lacking)

    def _next_without_data(self) -> list[int]:
        closed = max(self._closed_ms, self._state.final_through_ms)
        if self._state.due_from_ms is None or closed >= MAX_TIME_MS:
            return []
        start = max(self._state.due_from_ms, self._window.first_ending_after(closed))
        return [start] if start < self._own.until_ms else []

    def _take_overdue(self, now_ms: int, most: int) -> list[int]:
        """Takes windows without data whose deadline has passed and that an edge has not closed.

        If more than `most` windows are overdue, the deadline stays in the past. If all edges have closed a window
        without a record, the window is empty and gets no answer. Of many windows, the last `MAX_OVERDUE` are taken.
        """
        if self._state.due_from_ms is None:
            return []
        closed = max(self._closed_ms, self._state.final_through_ms)
        # An ended stream is closed for all time, but an edge may still join. So windows after the current time stay.
        due_ms = now_ms - (self._due_after_ms or 0)
        today = self._state.running_clock.to_event_ms(due_ms)
        first = max(self._state.due_from_ms, self._window.first_ending_after(min(closed, today)))
        oldest = self._today_ms(due_ms) - MAX_OVERDUE * self._window.step_ms
        start = max(first, self._window.first_ending_after(oldest))
        overdue: list[int] = []
        while len(overdue) < most and self._due_without_data(start) <= now_ms and start < self._own.until_ms:
            if start not in self.windows and self._end(start) > closed:
                overdue.append(start)
            start = self._window.following(start)
        if start > first:
            self._set_state(replace(self._state, due_from_ms=start))
        return overdue

    def _first_due_window(self, clock: StreamClock | None, first_seen_ms: int) -> int | None:
        """Returns the first window that becomes due with or without data.

        Earlier windows began before the query was registered, before an edge served the stream, or before a replay
        began.
        """
        if self._due_after_ms is None or clock is None:
            return None
        begins = clock.to_event_ms(max(self._state.query.registered_at_ms, first_seen_ms))
        if not clock.is_live:
            begins = max(begins, clock.event_origin_ms)
        return max(self._window.windows_over(self._window.slice_start(begins)).start, self._first_start)

    @property
    def _first_start(self) -> int:
        """The start of the first window of this version; the minimum time if the version has no first window."""
        return self._own.slices(self._window)[0]
