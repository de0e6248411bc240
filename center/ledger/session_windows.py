"""Session windows: the reports of all edges about their slices decide which sessions exist.

Closes report the extent of each slice's records. `center/ledger/sessionize.py` computes the sessions from the extents.
The first record identifies a session. If an earlier record arrives, or if the session is joined to the session before
it, the session becomes part of another session. If the session had an answer, it gets one more revision. This revision
has no data, and names the session that has the records now. If a session begins at the same record again, its revision
numbers continue.

A session is *closed* one gap later than other windows with the same end. A record less than a gap after the last record
may be in the next slice, and an edge reports it when it closes that slice. When a session is final, it is sealed with
all slices before it. A record between a final session and a session that is not final belongs to the session that is
not final.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from center.budgets.processing_delay import AnswerMargin
from center.ledger.events import Emission
from center.ledger.losses import Span
from center.ledger.sessionize import ObservedSession, connected_slices, session_windows
from center.ledger.state import QueryState, StateEntry, WindowState
from center.ledger.window_book import WindowBook
from center.ledger.window_facts import window_facts
from center.ledger.withheld import CloseTotals
from edgewater.answers import Facts, SessionFacts
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.model.window_range import WindowRange
from edgewater.model.windows import Extent, SessionWindow


class SessionWindowBook(WindowBook):
    """The windows of a query with session windows."""

    def __init__(self, state: QueryState, entries: Iterable[tuple[str, int, StateEntry]], margin: AnswerMargin) -> None:
        super().__init__(state, entries, margin)
        self._extents: dict[int, Extent] = {}
        for start in self.slices.open:
            self._update_extent(start)
        # Starts of sessions, including merged sessions, by the slice that contains them.
        self._sessions_by_slice: defaultdict[int, list[int]] = defaultdict(list)
        for start in self.windows:
            self._sessions_by_slice[self._window.slice_start(start)].append(start)

    @property
    def _window(self) -> SessionWindow:
        assert isinstance(self._spec.window, SessionWindow)
        return self._spec.window

    def sealed_before(self) -> int:
        return self._state.sealed_before_ms

    # Which sessions exist

    def _open_lacking(self, from_ms: int | None, to_ms: int | None, today_ms: int) -> None:
        return  # without a record there is no session

    def _affected_windows(self, changed: Sequence[int]) -> set[int]:
        gap = self._window.gap_ms
        for start in changed:
            self._update_extent(start)
        with_records = {start for start in changed if start in self._extents}
        dirty: set[int] = set()
        examined: set[int] = set()
        for start in sorted({near for s in with_records for near in (s - gap, s, s + gap) if near in self._extents}):
            if start not in examined:
                connected = connected_slices(start, self._extents, self._window)
                examined.update(connected)
                dirty |= self._update_sessions(connected, with_records)
        return dirty

    def _update_sessions(self, connected: range, changed: set[int]) -> set[int]:
        """Stores the sessions of connected slices, and returns the windows that need a new answer."""
        current = {s.start_ms: s for s in session_windows(connected, self._extents, self._window)}
        removed = [start for s in connected for start in self._sessions_by_slice.get(s, ()) if start not in current]
        dirty: set[int] = set()
        inherited_ms: dict[int, int] = {}
        for start in removed:
            state = self.windows.get(start)
            assert state is not None
            if state.session is None:
                continue
            if not state.is_answered:
                self._drop_window(start)
                continue
            target = next(
                s for s in current.values() if s.from_ms <= self._window.slice_start(start) < s.to_ms
            ).start_ms
            self.windows.put(start, replace(state, session=None, merged_into=target, refine_from_ms=0))
            inherited_ms[target] = min(state.first_staleness_ms or 0, inherited_ms.get(target, MAX_TIME_MS))
            dirty.add(start)
        for start, session in current.items():
            state = self.windows.get(start)
            if state is None or state.session != session or not changed.isdisjoint(session.slices(self._window)):
                self._put_session(start, session, inherited_ms.get(start))
                dirty.add(start)
        return dirty

    def _put_session(self, start_ms: int, session: ObservedSession, inherited_staleness_ms: int | None) -> None:
        before = self.windows.get(start_ms)
        state = replace(before or WindowState(has_data=True), session=session, merged_into=None)
        if state.first_staleness_ms is None and inherited_staleness_ms is not None:
            # The records of this session were answered in time, under the start of another session.
            state = replace(state, first_staleness_ms=inherited_staleness_ms)
        if inherited_staleness_ms is not None:
            state = replace(state, refine_from_ms=0)  # answers of the merged session refer readers to this session
        self.windows.put(start_ms, state)
        if before is None:
            self._sessions_by_slice[self._window.slice_start(start_ms)].append(start_ms)
        if before is None or before.session is None:
            self.deadlines.add(start_ms)

    def _session(self, start_ms: int) -> ObservedSession | None:
        state = self.windows.get(start_ms)
        return state.session if state else None

    def _end(self, start_ms: int) -> int:
        session = self._session(start_ms)
        return session.end_ms if session else MIN_TIME_MS

    def _required_span(self, start_ms: int) -> Span:
        session = self._session(start_ms)
        if session is None:
            return MIN_TIME_MS, MIN_TIME_MS
        # A record less than a gap before the first record belongs to the session, too, unless a border separates it.
        begin, end = self._own.slices(self._window)
        return max(begin, start_ms - self._window.gap_ms + 1), min(end, self._window.closes_at(session.end_ms))

    def _slices_of(self, start_ms: int) -> range:
        session = self._session(start_ms)
        assert session is not None, "only a session has slices"
        return session.slices(self._window)

    def _lost_through(self, slice_start_ms: int) -> int:
        return MAX_TIME_MS if slice_start_ms < self.sealed_before() else MIN_TIME_MS

    def _update_extent(self, start_ms: int) -> None:
        state = self.slices.open.get(start_ms)
        if state is not None and state.has_data:
            # Edges report extents with each frame. Without an extent, records may be anywhere in the slice.
            self._extents[start_ms] = state.extent or (start_ms, start_ms + self._window.gap_ms - 1)

    # Answers

    def _answer_window(self, start_ms: int, dirty: bool, due: bool, now_ms: int) -> Emission | None:
        state = self.windows.get(start_ms)
        if state is None:
            return None
        if state.session is None:
            return self._redirect(start_ms, state, now_ms) if dirty else None
        # Answers of a session that was merged into this session refer readers to this session, so it needs an answer.
        has_inherited = not state.is_answered and state.first_staleness_ms is not None
        return super()._answer_window(start_ms, dirty, due or has_inherited, now_ms)

    def _redirect(self, start_ms: int, state: WindowState, now_ms: int) -> Emission:
        """Returns the last answer of a session that was merged into another session: an empty window without data."""
        session = SessionFacts(False, self._state.sessions_cut, state.merged_into)
        facts = window_facts(
            self._spec,
            CloseTotals(),
            expected=len(self._state.expected),
            staleness_ms=0,
            first_staleness_ms=state.first_staleness_ms or 0,
            session=session,
        )
        revision = self._next_revision(state)
        self.windows.put(start_ms, replace(state, revision=revision))
        ref = self._state.query.ref
        return Emission(ref, start_ms, start_ms, revision, state.phase, now_ms, facts, start_ms, start_ms, self._spec)

    def _facts(self, start_ms: int, slices: range, staleness_ms: int, first_staleness_ms: int) -> Facts:
        facts = super()._facts(start_ms, slices, staleness_ms, first_staleness_ms)
        session = self._session(start_ms)
        return replace(facts, session=SessionFacts(session is not None and session.cut, self._state.sessions_cut))

    # After the final answer

    def set_windows(self, windows: WindowRange) -> None:
        super().set_windows(windows)
        self._extents = {start: extent for start, extent in self._extents.items() if self.takes(start)}

    def _close_window(self, start_ms: int) -> None:
        session = self._session(start_ms)
        assert session is not None
        sealed, cuts = max(self._state.sealed_before_ms, session.to_ms), self._state.sessions_cut + session.cut
        self._set_state(replace(self._state, sealed_before_ms=sealed, sessions_cut=cuts))
        self._drop_window(start_ms)

    def _drop_window(self, start_ms: int) -> None:
        self.windows.drop(start_ms)
        at = self._window.slice_start(start_ms)
        self._sessions_by_slice[at].remove(start_ms)
        if not self._sessions_by_slice[at]:
            del self._sessions_by_slice[at]

    def _seal_slices(self) -> None:
        """Seals the slices that can no longer belong to an open session."""
        gap, final = self._window.gap_ms, self._state.final_through_ms
        if final > MIN_TIME_MS:
            # A record at the end of a slice ends its session a gap later. The close of the next slice closes it.
            open_from = self._window.slice_start(final) - gap
            first_open = min((w.session.from_ms for _, w in self.windows.items() if w.session), default=open_from + gap)
            sealed = max(self._state.sealed_before_ms, min(open_from, first_open - gap))
            if self.has_ended:
                sealed = self._own.slices(self._window)[1]
            if sealed > self._state.sealed_before_ms:
                self._set_state(replace(self._state, sealed_before_ms=sealed))
        for at in [at for at in self._sessions_by_slice if at < self.sealed_before()]:
            for start in list(self._sessions_by_slice[at]):
                self._drop_window(start)
        before = self.sealed_before()
        for start in [s for s in self._extents if s < before]:
            del self._extents[start]
        super()._seal_slices()
