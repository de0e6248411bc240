"""`WindowBook` has the windows of one query, the answers to them, and the rules for the answers to give now.

Three frontiers in event time decide:

- *Closed*: every expected edge has closed the slices before this time. Windows that end before it are ``complete``,
  unless an edge has stated that it lacks records of the window. This frontier goes back when an edge joins.
- *Final*: the closed frontier minus the lateness. It never goes back.
- *Due*: the stream's clock minus the staleness budget. If it passes a window that is not closed, the window is answered
  ``early`` with the data that the center has.

Four parts have one task each. `Deadlines` stores when the next decision must be made. `Losses` finds the records that
are known to be missing. `ReportedSlices` stores the reports of edges. `AnswerWork` limits how many answers one event
gives.

Subclasses define which windows exist: `TimeWindowBook` and `SessionWindowBook`. The rules here assume only that the
order of windows by start is also their order by end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from center.budgets.processing_delay import AnswerMargin
from center.ledger.answer_work import AnswerWork
from center.ledger.deadlines import Deadlines
from center.ledger.events import Emission, FrameSummary, refusal
from center.ledger.expected_edges import with_edges
from center.ledger.frontiers import Frontiers
from center.ledger.late_history import LateHistory, slices_of_blocks
from center.ledger.losses import Losses, Span, bounded_loss, loss_of_uncertain
from center.ledger.slices import FrameReports, ReportedSlices
from center.ledger.state import QueryState, SealedSlice, SliceState, StateEntry, StateTable, WindowState, at_most
from center.ledger.stored_state import EntryRow, QueryChanges, StoredEdges
from center.ledger.window_facts import edge_statements, keeps_error, window_facts
from center.ledger.withheld import CloseTotals
from edgewater.answers import Facts, Phase
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS, EdgeId, StreamClock
from edgewater.model.edge_records import EdgeRecord
from edgewater.model.window_range import ALL_WINDOWS, WindowRange
from edgewater.model.windows import TimeWindow
from edgewater.wire import InputLoss


class WindowBook(Frontiers, ABC):
    """The windows of one query. `Ledger` calls its methods and provides its transactions.

    Args:
        margin: see `Ledger`.

    Attributes:
        windows: windows that have data or an answer and are not final, by start.
        revisions_after: new answers get higher revisions than this one.
        has_backlog: whether further windows could be answered at once.
        stored: the numbers of edges, and the state in the store. It is replaced when the state was loaded.
    """

    def __init__(self, state: QueryState, entries: Iterable[tuple[str, int, StateEntry]], margin: AnswerMargin) -> None:
        super().__init__(state)
        self._margin = margin
        self.windows: StateTable[WindowState] = StateTable()
        self.slices = ReportedSlices(self._spec)
        for _, start, entry in entries:
            if isinstance(entry, SliceState):
                self.slices.open.put(start, entry)
            elif isinstance(entry, WindowState):
                self.windows.put(start, entry)
            elif isinstance(entry, SealedSlice):
                self.slices.sealed.put(start, entry)
        self.slices.rebuild()
        window = self._spec.window
        self.work = AnswerWork(window.slices_per_window if isinstance(window, TimeWindow) else 1)
        self.deadlines = Deadlines(
            self.windows,
            lambda start_ms: self._required_span(start_ms)[1],
            None if self._due_after_ms is None else self._due_at,
        )
        self.revisions_after = 0
        self.has_backlog = False
        self.stored = StoredEdges()
        self._writing: QueryState | None = None
        self._state_before: QueryState | None = None
        self._open_from_ms = MIN_TIME_MS

    @property
    def _due_after_ms(self) -> int | None:
        """Wall time from a window's end until the window is due; None if it is due when all edges have closed it."""
        budget = self._spec.staleness_budget
        return None if budget is None else budget.staleness_ms - self._margin.of(budget.staleness_ms)

    # Borders

    def set_windows(self, windows: WindowRange) -> None:
        """Sets the range of the windows of this version. The later windows belong to the next version of the query.

        Windows outside of the range are dropped. Readers have not seen an answer to them.
        """
        self._set_state(replace(self._state, query=replace(self._state.query, windows=windows)))
        for start in [start for start in self.windows if start not in windows]:
            self._drop_window(start)
        for start in [start for start in self.slices.open if not self.takes(start)]:
            self.slices.open.drop(start)

    def is_abandoned(self, now_ms: int) -> bool:
        """Returns whether all windows of this version are in the past, no edge is expected, and no window is open."""
        _, end = self._own.slices(self._spec.window)
        if end == MAX_TIME_MS or self._state.expected or len(self.windows):
            return False
        return end + self._spec.lateness_ms <= self._state.running_clock.to_event_ms(now_ms)

    # Events

    def edges_changed(self, edges: Sequence[EdgeRecord]) -> None:
        """Updates the expected edges and the stream's clock. It gives no answers. The next `emit_due` gives them."""
        before, changed = self._state, with_edges(self._state, edges, self._first_due_window)
        if changed is not before:
            self._set_state(changed)
        self.stored.add(sorted({*changed.expected, *changed.retired, *changed.lost_states, *changed.left}))
        expected = frozenset(changed.expected)
        for edge, lost_state in changed.lost_states.items():
            if edge in expected and lost_state != before.lost_states.get(edge):
                until = lost_state[1]
                self._open_lacking(None, until + 1, until + 1)

    def report(self, frames: Iterable[FrameSummary], unlisted: Collection[EdgeId], now_ms: int) -> list[Emission]:
        """Applies merged frames of this query, and returns the answers to give now.

        Args:
            unlisted: edges of these frames that `edges_changed` has not listed yet.
        """
        frames = list(frames)
        dirty = self._affected_windows(self._apply_frames(frames, unlisted))
        stated: dict[EdgeId, list[InputLoss]] = {}
        clock = self._state.running_clock
        for frame in frames:
            if frame.losses:
                stated.setdefault(frame.edge, []).extend(bounded_loss(loss, frame, clock) for loss in frame.losses)
        uncertain = [d for frame in frames for d in frame.dropped if not d.reason.is_late]
        if uncertain:
            lost = [loss_of_uncertain(each, self._spec.window) for each in uncertain]
            dirty |= self._windows_lacking(at_most(lost), now_ms)
        for edge, losses in stated.items():
            self._set_state(self._state.with_losses(edge, losses))
            dirty |= self.deadlines.without_wait(self._windows_lacking(at_most(losses), now_ms))
        return self.emit_due(now_ms, dirty)

    def refuse(self, slice_starts: Iterable[int]) -> None:
        """States that slices lack partials of the edges that have reported records of the slices.

        If no edge has reported records of a slice, the loss is stated for all expected edges. The next answers to the
        windows over the slices state the loss. Earlier answers had the partials.
        """
        for start in slice_starts:
            for edge in self.slices.edges_with_records(start) or self._state.expected:
                self._set_state(self._state.with_losses(EdgeId(edge), [refusal(start)]))

    def deadline(self) -> int | None:
        """Returns the wall time in ms at which the next window is due or may be refined; None if no window waits for a
        time.
        """
        refined = [] if self.deadlines.refine_at_ms is None else [self.deadlines.refine_at_ms]
        if self._due_after_ms is None:
            return min(refined, default=None)
        first = self.deadlines.next_due()
        due = [] if first is None else [self._due_at(first)]
        due += map(self._due_without_data, self._next_without_data())
        return min([*due, *refined], default=None)

    @abstractmethod
    def sealed_before(self) -> int:
        """Returns an event time in ms. Slices that start before it belong only to final windows, and accept no more
        data.
        """

    # Transactions

    def begin(self) -> None:
        """Begins a transaction. The last transaction has succeeded, because the ledger is loaded again
        after a failure.
        """
        if self._writing is not None:
            self.stored.set_stored(self._writing)
            self._writing = None
        self._state_before = self._state
        self._open_from_ms = self.sealed_before()
        self.slices.begin()
        for _, table in self._tables():
            table.begin()

    def changes(self) -> QueryChanges | None:
        """Returns the changes that the transaction writes; None if nothing has changed."""
        rows = self._changed_rows()
        if not rows and self._state_before is self._state:
            return None
        return QueryChanges(
            self._state.query.ref,
            self.stored.state_json(self._state),
            tuple(rows),
            dict(self.slices.late),
            self._open_from_ms,
            (self._state.empty_from_ms, self._state.empty_through_ms),
            self.slices.final_spans(self._state.final_through_ms),
        )

    def _changed_rows(self) -> list[EntryRow]:
        self._writing, rows = self._state, self.stored.rows(self._state)
        for start, value in self.slices.open.changes().items():
            rows += self.stored.slice_rows(start, self.slices.open.before(start), value)
        for kind, table in self._tables():
            rows += [(kind, start, v.to_state() if v else None) for start, v in table.changes().items()]
        return rows

    def _tables(self) -> list[tuple[str, StateTable[Any]]]:
        """Returns, by kind, the tables that are stored with one row per value."""
        return [("window", self.windows), ("sealed", self.slices.sealed)]

    # Which windows exist

    @abstractmethod
    def _affected_windows(self, changed: Sequence[int]) -> set[int]:
        """Returns the windows that are not final and need a new answer because these slices changed. Slices ascend."""

    @abstractmethod
    def _end(self, start_ms: int) -> int: ...

    @abstractmethod
    def _required_span(self, start_ms: int) -> Span:
        """Returns the event time [from, to) that an edge must have closed for the window to have all its records."""

    @abstractmethod
    def _slices_of(self, start_ms: int) -> range:
        """Returns the start times of the window's slices."""

    @abstractmethod
    def _lost_through(self, slice_start_ms: int) -> int:
        """Returns an event time. Windows over the slice that end at or before it are final, and lack later records.

        `MAX_TIME_MS` means that all windows over the slice are final. `MIN_TIME_MS` means that no such window is final.
        """

    @abstractmethod
    def _open_lacking(self, from_ms: int | None, to_ms: int | None, today_ms: int) -> None:
        """Opens the windows that are not final and may lack records between two event times.

        If such a window got no answer, readers would believe that the window is empty. If there are very many such
        windows, only the last windows up to `today_ms` are opened.

        Args:
            from_ms: start of the range; None if it is unknown. Then all windows that are not final may lack records.
            to_ms: end of the range; None if it is unknown. Then the range ends at `today_ms`.
            today_ms: the event time that the stream has reached.
        """

    def _next_without_data(self) -> list[int]:
        """Returns the next window that becomes due without data, if there is one."""
        return []

    def _take_overdue(self, now_ms: int, most: int) -> Sequence[int]:
        """Takes at most `most` windows without data whose deadline has passed."""
        return ()

    def _first_due_window(self, clock: StreamClock | None, first_seen_ms: int) -> int | None:
        """Returns the first window that becomes due with or without data."""
        return None

    # Frames

    def _apply_frames(self, frames: Iterable[FrameSummary], unlisted: Collection[EdgeId]) -> list[int]:
        """Applies frames. Returns the slices that the frames changed and that are not final."""
        frames = sorted(frames, key=lambda f: f.position)
        if self._own != ALL_WINDOWS:
            begin, end = self._own.slices(self._spec.window)
            frames = [frame.within(begin, end) for frame in frames]
        self.stored.add(frame.edge for frame in frames)
        late_before, rejected_before = self.slices.late_counts()
        after_final = self.slices.after_final()
        reports = FrameReports.of(frames, self._state)
        self.slices.add_dropped(frames)
        has_late = [start for start, closes in reports.closes.items() if any(c.late for c in closes.values())]
        before = {start: self.slices.counts(start)[1] for start in has_late}
        changed = self.slices.apply(reports, self.sealed_before(), self._lost_through)
        history = self._late_history(frames, before, self.slices.after_final() - after_final)
        late, rejected = self.slices.late_counts()
        state = self._state
        expected = state.expected
        if self._spec.edges is None and unlisted:
            expected = tuple(sorted({*expected, *unlisted}))
        self._set_state(
            replace(
                state,
                through_ms=reports.through_ms,
                gaps=reports.gaps,
                expected=expected,
                after_final=state.after_final + late - late_before,
                rejected=state.rejected + rejected - rejected_before,
                reach=reports.reach,
                lost_states=reports.lost_states,
                late_history=history,
            )
        )
        return changed

    def _late_history(
        self, frames: Sequence[FrameSummary], late_before: Mapping[int, int], after_final: Mapping[int, int]
    ) -> LateHistory:
        """Returns the history with the late records of frames.

        Args:
            late_before: by slice whose closes count late records, how many they counted before the frames.
            after_final: by slice, how many records the closes of the frames add when a window over it was final.
        """
        history, window = self._state.late_history, self._spec.window
        dropped = [each for frame in frames for each in frame.dropped if each.reason.is_late]
        counted = [each for frame in frames for each in frame.late]
        by_closes = {start: self.slices.counts(start)[1] - late for start, late in late_before.items()}
        by_closes = {start: records for start, records in by_closes.items() if records > 0}
        if not (dropped or counted or by_closes) or not history.answered:
            return history  # without an answer, nothing was late for one
        slices = {history.newest_ms, *by_closes, *(each.slice_start_ms for each in (*dropped, *counted))}
        observed = {start: self.slices.counts(start)[0] for start in slices_of_blocks(window, slices)}
        final = {start: min(records, after_final.get(start, 0)) for start, records in by_closes.items()}
        return history.with_late(window, by_closes, final, counted, dropped, observed)

    def _windows_lacking(self, losses: Sequence[InputLoss], now_ms: int) -> set[int]:
        """Returns the windows that are not final and need a new answer because of losses."""
        for loss in losses:
            self._open_lacking(loss.from_ms, loss.to_ms, self._today_ms(now_ms))
        spans = ((start, self._required_span(start)) for start in self.windows)
        return {start for start, span in spans if any(loss.overlaps(*span) for loss in losses)}

    # Answers

    def emit_due(self, now_ms: int, dirty: AbstractSet[int] = frozenset()) -> list[Emission]:
        """Returns the answers to windows that became due by time or because of `edges_changed`.

        Args:
            dirty: windows that have changed in this event.
        """
        most, deadlines = self.work.max_answers, self.deadlines
        closed = self._take_final(most)
        closed |= deadlines.take_closed(self._closed_ms, most - len(closed))
        due: set[int] = set()
        if self._due_after_ms is not None:
            due = deadlines.take_due(now_ms, most - len(closed))
            due.update(self._take_overdue(now_ms, most - len(closed) - len(due)))
        passed = closed | due
        changed = {s for s in dirty - passed if (w := self.windows.get(s)) is not None and self._gets_answer(s, w)}
        dirty = deadlines.take_refined(changed, most - len(passed), now_ms) | (dirty & passed)
        # All edges have closed these windows, but an edge lacks records of them. The windows cannot become complete, so
        # they are answered now, unless the newest answer states the missing edge.
        losses = Losses(self._state)
        stating = {s for s in closed if (w := self.windows.get(s)) is not None and w.lacks_edges}
        lacking = {s for s in closed - stating if losses.concern(self._required_span(s))}
        dirty, due = dirty | lacking, due | lacking
        emissions = []
        for start in sorted(dirty | due | closed):
            emission = self._answer_window(start, start in dirty, start in due, now_ms)
            if emission is not None:
                emissions.append(emission)
        self._seal_slices()
        deadlines.update_refinement()
        self.has_backlog = deadlines.has_passed(now_ms, self._closed_ms, self._closed_ms - self._spec.lateness_ms)
        self._note_empty()
        self._set_state(self._state.without_losses_before(self.sealed_before()))
        return emissions

    def _note_empty(self) -> None:
        """Notes which windows without an answer are empty.

        Called after the answers of an event, and before losses are forgotten: a loss of more windows than may be opened
        is known only by its statement. With a backlog, closed windows with records may have no answer yet.
        """
        state, through = self._state, self._closed_ms
        if not state.expected:
            return
        if through < MAX_TIME_MS:  # a stream that has ended stays recognizable
            through = min(through, self._own.slices(self._spec.window)[1])  # the next version answers later windows
        if self.has_backlog:
            through = min([through, *(start for start, w in self.windows.items() if not w.is_answered)])
        known = max(self._closed_ms, state.final_through_ms, state.empty_from_ms)
        begin = min(max(state.empty_from_ms, Losses(state).doubtful_before()), known)
        if (begin, through) != (state.empty_from_ms, state.empty_through_ms):
            self._set_state(replace(state, empty_from_ms=begin, empty_through_ms=through))

    def _take_final(self, most: int) -> set[int]:
        """Advances the final frontier as far as the windows before it can be answered now. Returns these windows."""
        through = self._state.final_through_ms
        passed, final = self.deadlines.take_final(through, self._closed_ms - self._spec.lateness_ms, most)
        if final > through:
            self._set_state(replace(self._state, final_through_ms=final))
        return passed

    def _gets_answer(self, start_ms: int, state: WindowState) -> bool:
        """Returns whether a changed window may get an answer now, and need not wait for its close or its deadline."""
        waits = not state.is_answered and state.first_staleness_ms is None
        return not waits or self._required_span(start_ms)[1] <= self._closed_ms

    def _answer_window(self, start_ms: int, dirty: bool, due: bool, now_ms: int) -> Emission | None:
        """Returns the answer to a window; None if the window gets no answer now.

        Args:
            dirty: whether the window has changed and may be answered again.
            due: whether the window is answered with the data that the center has.
        """
        state = self.windows.get(start_ms)
        if state is None:
            if not due:
                return None  # no data and no answer
            state = WindowState(has_data=False)
            self.deadlines.add(start_ms)
        reached = self._phase(start_ms)
        phase = max(reached, state.phase, key=lambda p: p.rank)
        # A complete window can lack an edge again: an edge has joined, or the session has become longer than the edge's
        # last close.
        lacks_edges = phase is Phase.COMPLETE and reached is Phase.EARLY
        if state.is_answered:
            if not dirty and phase is state.phase and (lacks_edges or not state.lacks_edges):
                return None
        elif phase is Phase.EARLY and not due:
            return None
        return self._answer(start_ms, state, phase, lacks_edges, now_ms)

    def _answer(self, start_ms: int, state: WindowState, phase: Phase, lacks_edges: bool, now_ms: int) -> Emission:
        end, slices = self._end(start_ms), self._slices_of(start_ms)
        staleness = max(0, now_ms - self._state.running_clock.to_wall_ms(end))
        first = staleness if state.first_staleness_ms is None else state.first_staleness_ms
        in_budget_ms = state.kept_staleness_ms
        if self._spec.saves_bytes:
            # Both limits must hold for one answer. An answer in time that lacks edges does not meet the budget.
            facts = self._facts(start_ms, slices, staleness, staleness if in_budget_ms is None else in_budget_ms)
            if in_budget_ms is None and keeps_error(facts, self._spec):
                in_budget_ms = staleness
        else:
            facts = self._facts(start_ms, slices, staleness, first)
        history, is_final = self._state.late_history, phase is Phase.FINAL
        allowed = history.allowance(slices, facts.observed, facts.late, self._spec, is_final=is_final)
        if allowed is not None:
            facts = replace(facts, deviations=(*facts.deviations, allowed))
        if not state.is_answered:
            history = history.with_answer(start_ms, self._spec.window)
            self._set_state(replace(self._state, late_history=history))
        revision = self._next_revision(state)
        if phase is Phase.FINAL:
            self._close_window(start_ms)
        else:
            # Under a combined budget, the first answer that keeps the error must be in time, so this answer cannot
            # wait.
            may_wait = in_budget_ms is not None or not self._spec.saves_bytes
            answered = replace(
                state,
                revision=revision,
                phase=phase,
                first_staleness_ms=first,
                lacks_edges=lacks_edges,
                outdated=False,
                kept_staleness_ms=in_budget_ms,
                refine_from_ms=now_ms + state.refinement_wait_ms if may_wait else 0,
                answers=state.answers + 1,
            )
            self.windows.put(start_ms, answered)
            if lacks_edges and not state.lacks_edges:
                self.deadlines.await_close(start_ms)
        ref = self._state.query.ref
        return Emission(ref, start_ms, end, revision, phase, now_ms, facts, slices.start, slices.stop, self._spec)

    def _next_revision(self, state: WindowState) -> int:
        return max(state.revision, self.revisions_after) + 1

    def _facts(self, start_ms: int, slices: range, staleness_ms: int, first_staleness_ms: int) -> Facts:
        states, span, losses = self.slices.states(slices), self._required_span(start_ms), Losses(self._state)
        missing = losses.missing_edges(span, self.slices.stated_by(slices, self._state.through_ms))
        return window_facts(
            self._spec,
            CloseTotals.union((s.totals for s in states), self._spec),
            expected=len(self._state.expected),
            staleness_ms=staleness_ms,
            first_staleness_ms=first_staleness_ms,
            deviations=losses.deviations(span, missing),
            deliveries=losses.deliveries(span),
            has_data=any(s.has_data for s in states),
            edges=edge_statements(self._state, missing, states),
        )

    def _close_window(self, start_ms: int) -> None:
        """Removes a window that has its final answer."""
        self._drop_window(start_ms)

    def _drop_window(self, start_ms: int) -> None:
        self.windows.drop(start_ms)

    def _seal_slices(self) -> None:
        """Seals the slices whose windows are all final."""
        self.slices.seal_before(self.sealed_before())

    # Times

    def _phase(self, start_ms: int) -> Phase:
        span = self._required_span(start_ms)
        if self._is_final(span[1]):
            return Phase.FINAL
        is_complete = span[1] <= self._closed_ms and not Losses(self._state).concern(span)
        return Phase.COMPLETE if is_complete else Phase.EARLY

    def _due_without_data(self, start_ms: int) -> int:
        """Returns when a window without data is due. If no edge has reported its end, the time by which the clock was
        set forward is added.
        """
        return self._due_at(start_ms) + (0 if self._end(start_ms) <= self._heard_ms else self.ahead_ms)

    def _due_at(self, start_ms: int) -> int:
        return self._state.running_clock.to_wall_ms(self._end(start_ms)) + (self._due_after_ms or 0)
