"""Sessions at the center: which there are follows from what all edges say of their slices.

The slices that edges close say where their records begin and end, and `center/ledger/sessionize.py` tells the
sessions from that. A session is named by its first record, so one to which an earlier record comes,
or that is joined to the one before, becomes part of another. If it has been answered, its name gets a
last revision that says where its records are now, and has none itself; should the name come to begin a
session again, its revisions go on behind that.

*Closed* takes up to a gap longer than for other windows: a record less than a gap behind the last one may
lie in the slice behind it, of which an edge tells when it has closed it. A session is sealed, with all
slices before it, once it is final. A record that comes between two sessions, of which the first is final
and the second is not, belongs to the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from center.ledger.events import Emission
from center.ledger.quality import Quality, SessionQuality, Totals, assess
from center.ledger.query import QueryLedger
from center.ledger.sessionize import Extent, Run, run_around, sessions_of
from center.ledger.state import Origin, WindowState
from edgewater.streams import END_OF_TIME_MS, NEVER_MS
from edgewater.windows import Session
from edgewater.wire.frames import SliceClose


class SessionLedger(QueryLedger):
    """The rules for a query of session windows."""

    @property
    def _window(self) -> Session:
        assert isinstance(self._spec.window, Session)
        return self._spec.window

    def sealed_before(self) -> int:
        return self._head.sealed_before_ms

    # Which sessions there are

    def _windows_over(self, changed: Sequence[int]) -> set[int]:
        gap = self._window.gap_ms
        told = {start for start in changed if start in self._extents}
        dirty: set[int] = set()
        drawn: set[int] = set()
        for start in sorted({near for s in told for near in (s - gap, s, s + gap) if near in self._extents}):
            if start not in drawn:
                run = run_around(start, self._extents, self._window)
                drawn.update(run)
                dirty |= self._redraw(run, told)
        return dirty

    def _redraw(self, run: range, told: set[int]) -> set[int]:
        """Puts the sessions of slices that hang together; returns those to be answered anew."""
        drawn = {r.start_ms: r for r in sessions_of(run, self._extents, self._window)}
        gone = [start for s in run for start in self._begun.get(s, ()) if start not in drawn]
        dirty: set[int] = set()
        heirs: dict[int, int] = {}
        for start in gone:
            state = self._windows.get(start)
            assert state is not None
            if state.run is None:
                continue
            if not state.is_answered:
                self._forget(start)
                continue
            heir = next(r for r in drawn.values() if r.from_ms <= self._window.slice_start(start) < r.to_ms)
            self._windows.put(start, replace(state, run=None, merged_into=heir.start_ms))
            heirs[heir.start_ms] = min(state.first_staleness_ms or 0, heirs.get(heir.start_ms, END_OF_TIME_MS))
            dirty.add(start)
        for start, session in drawn.items():
            state = self._windows.get(start)
            if state is None or state.run != session or not told.isdisjoint(session.slices(self._window)):
                self._draw(start, session, heirs.get(start))
                dirty.add(start)
        return dirty

    def _draw(self, start_ms: int, session: Run, inherited_staleness_ms: int | None) -> None:
        held = self._windows.get(start_ms)
        state = replace(held or WindowState(has_data=True), run=session, merged_into=None)
        if state.first_staleness_ms is None and inherited_staleness_ms is not None:
            # Its records were answered in time, under another name.
            state = replace(state, first_staleness_ms=inherited_staleness_ms)
        self._windows.put(start_ms, state)
        if held is None:
            self._begun[self._window.slice_start(start_ms)].append(start_ms)
        if held is None or held.run is None:
            self._await_window(start_ms)

    def _run(self, start_ms: int) -> Run | None:
        state = self._windows.get(start_ms)
        return state.run if state else None

    def _end(self, start_ms: int) -> int:
        run = self._run(start_ms)
        return run.end_ms if run else NEVER_MS

    def _reach(self, start_ms: int) -> tuple[int, int]:
        run = self._run(start_ms)
        if run is None:
            return NEVER_MS, NEVER_MS
        # A record less than a gap before its first would belong to it too.
        return start_ms - self._window.gap_ms + 1, self._window.closes_at(run.end_ms)

    def _slices_of(self, start_ms: int) -> range:
        run = self._run(start_ms)
        assert run is not None, "only a session is answered"
        return run.slices(self._window)

    def _has_final_window(self, slice_start_ms: int) -> bool:
        return slice_start_ms < self.sealed_before()

    def _note_slice(self, start_ms: int, closes: Mapping[Origin, SliceClose], touched: bool) -> bool:
        changed = super()._note_slice(start_ms, closes, touched)
        self._note_extent(start_ms)
        return changed

    def _note_extent(self, start_ms: int) -> None:
        state = self._slices.get(start_ms)
        if state is not None and state.has_data:
            # Edges say it with each frame. Should one not, its records may lie anywhere in the slice.
            self._extents[start_ms] = state.extent or (start_ms, start_ms + self._window.gap_ms - 1)

    # Answering

    def _judge(self, start_ms: int, dirty: bool, due: bool, now_ms: int) -> Emission | None:
        state = self._windows.get(start_ms)
        if state is None:
            return None
        if state.run is None:
            return self._hand_over(start_ms, state, now_ms) if dirty else None
        # Who reads of a session that it is part of this one now shall find it.
        has_inherited = not state.is_answered and state.first_staleness_ms is not None
        return super()._judge(start_ms, dirty, due or has_inherited, now_ms)

    def _hand_over(self, start_ms: int, state: WindowState, now_ms: int) -> Emission:
        """The answer of a session that is part of another: an empty window without data."""
        quality = assess(
            self._spec,
            Totals(),
            expected=len(self._head.expected),
            missing=(),
            after_final=self._head.after_final,
            staleness_ms=0,
            first_staleness_ms=state.first_staleness_ms or 0,
        )
        session = SessionQuality(False, self._head.sessions_cut, state.merged_into)
        revision = state.revision + 1
        self._windows.put(start_ms, replace(state, revision=revision))
        ref, quality = self._head.query.ref, replace(quality, session=session)
        return Emission(ref, start_ms, start_ms, revision, state.phase, now_ms, quality, start_ms, start_ms)

    def _quality(self, start_ms: int, slices: range, staleness_ms: int, first_staleness_ms: int) -> Quality:
        quality = super()._quality(start_ms, slices, staleness_ms, first_staleness_ms)
        run = self._run(start_ms)
        return replace(quality, session=SessionQuality(run is not None and run.cut, self._head.sessions_cut))

    # After the last answer

    def _retire(self, start_ms: int) -> None:
        run = self._run(start_ms)
        assert run is not None
        sealed, cuts = max(self._head.sealed_before_ms, run.to_ms), self._head.sessions_cut + run.cut
        self._set_head(replace(self._head, sealed_before_ms=sealed, sessions_cut=cuts))
        self._forget(start_ms)

    def _forget(self, start_ms: int) -> None:
        self._windows.drop(start_ms)
        at = self._window.slice_start(start_ms)
        self._begun[at].remove(start_ms)
        if not self._begun[at]:
            del self._begun[at]

    def _seal_slices(self) -> None:
        """Seals what can be part of no session that is not final."""
        gap, final = self._window.gap_ms, self._head.final_through_ms
        if final > NEVER_MS:
            # A lone record at the end of a slice ends a gap later, and is closed with the slice after that.
            open_from = self._window.slice_start(final) - gap
            first_open = min((w.run.from_ms for _, w in self._windows.items() if w.run), default=open_from + gap)
            sealed = max(self._head.sealed_before_ms, min(open_from, first_open - gap))
            if sealed > self._head.sealed_before_ms:
                self._set_head(replace(self._head, sealed_before_ms=sealed))
        for at in [at for at in self._begun if at < self.sealed_before()]:
            for start in list(self._begun[at]):
                self._forget(start)
        before = self.sealed_before()
        for start in [s for s in self._extents if s < before]:
            del self._extents[start]
        super()._seal_slices()

    def _rebuild_heaps(self) -> None:
        super()._rebuild_heaps()
        self._extents: dict[int, Extent] = {}
        for start in self._slices:
            self._note_extent(start)
        # Starts of sessions, also of those that are part of another, by the slice they lie in.
        self._begun: defaultdict[int, list[int]] = defaultdict(list)
        for start in self._windows:
            self._begun[self._window.slice_start(start)].append(start)
