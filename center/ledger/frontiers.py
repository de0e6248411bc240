"""`Frontiers`: the state of a query, and how far its windows are closed and final in event time."""

from __future__ import annotations

import operator
from itertools import repeat

from center.ledger.state import QueryState
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.model.window_range import ALL_WINDOWS, WindowRange


class Frontiers:
    """See `center.ledger.window_book`.

    Attributes:
        ahead_ms: by how much the wall clock was set forward (`ClockStepped`).
    """

    def __init__(self, state: QueryState) -> None:
        self._spec = state.query.spec
        self.ahead_ms = 0
        self._frontier: tuple[object, ...] | None = None
        self._set_state(state)

    @property
    def state(self) -> QueryState:
        return self._state

    def _set_state(self, state: QueryState) -> None:
        frontier = state.expected, state.through_ms, state.retired
        # With many edges, computing the minimum is most of an event's work. So it is skipped if these members have not
        # changed; unchanged members are the same objects.
        unchanged = self._frontier is not None and all(map(operator.is_, frontier, self._frontier))
        self._state, self._frontier = state, frontier
        if unchanged:
            return
        if state.expected:
            self._closed_ms = min(map(state.through_ms.get, state.expected, repeat(MIN_TIME_MS)))
        else:
            # No edge is expected. If no edge is known, nothing is closed. If all edges that reported are retired, the
            # latest of their closes counts.
            self._closed_ms = max((state.through_ms.get(e, MIN_TIME_MS) for e in state.retired), default=MIN_TIME_MS)

    @property
    def _own(self) -> WindowRange:
        """The windows of this version of the query."""
        return self._state.query.windows

    def takes(self, slice_start_ms: int) -> bool:
        """Returns whether a slice belongs to a window of this version."""
        if self._own == ALL_WINDOWS:
            return True
        begin, end = self._own.slices(self._spec.window)
        return begin <= slice_start_ms < end

    @property
    def has_ended(self) -> bool:
        """Whether all windows of this version are final."""
        _, end = self._own.slices(self._spec.window)
        return end < MAX_TIME_MS and (self._own.is_empty or self._is_final(end))

    def _is_final(self, end_ms: int) -> bool:
        return end_ms <= self._state.final_through_ms

    def _today_ms(self, now_ms: int) -> int:
        """Returns the event time that the stream has reached. Time by which the clock was set forward does not count
        until an edge has reported it.
        """
        clock = self._state.running_clock
        return min(clock.to_event_ms(now_ms), max(clock.to_event_ms(now_ms - self.ahead_ms), self._heard_ms))

    @property
    def _heard_ms(self) -> int:
        """The event time up to which an edge has reported."""
        through = self._state.through_ms.values()
        return max((each for each in through if each < MAX_TIME_MS), default=MIN_TIME_MS)
