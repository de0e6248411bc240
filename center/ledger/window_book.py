"""`QueryLedger`: what edges have reported of one query's windows, and when each window is answered.

Three frontiers in event time decide. *Closed*: every expected edge has closed the slices before it, so windows that end
there are ``complete``, unless an edge has stated that it lacks some of their records; it moves back when an edge joins.
*Final*: the closed frontier less the lateness; it never moves back. *Due*: the stream's clock less the staleness
budget; windows that it passes before they are closed are answered ``early`` with the data at hand.

Windows are kept in heaps by start, and a frontier that advances pops those it has passed. A batch therefore costs what
it touches and closes, however many windows are open. Heap entries are hints: the tables (`StateTable`) are
authoritative and the heaps can be rebuilt from them.

Subclasses define which windows exist: `TimeWindowLedger` and `SessionWindowLedger`. The rules here assume only that
windows ordered by start are ordered by end.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush, nsmallest
from itertools import repeat
from typing import Any

from center.catalog import EdgeRecord, expected_edges
from center.ledger.events import Emission, FrameSummary, LateSlice, refusal
from center.ledger.quality import Constants, EdgeStatements, Phase, Quality, assess
from center.ledger.state import (
    EdgeIncarnation,
    QueryState,
    SealedSlice,
    SliceState,
    StateEntry,
    StateTable,
    WindowState,
    at_most,
)
from center.ledger.stored_state import EntryRow, StoredEdges
from center.ledger.withheld import Totals
from edgewater.model.streams import LIVE, MAX_TIME_MS, MIN_TIME_MS, EdgeId, StreamClock
from edgewater.model.windows import SlidingWindow
from edgewater.wire import REJECTIONS, DroppedRecords, InputLoss, LossReason, SliceClose

AFTER_FINAL = "after-final"
"""Why records are in no answer to a window: the center received them when it had given the final one."""
LEAVING_MS = 10_000
"""Wall time from an edge's last heartbeat within which it has learned that it is retired, and accepts no more."""
MAX_AHEAD_MS = 60_000
"""Wall time by which an edge's clock may be ahead of the center's."""
MAX_WORK = 200
"""Answers to windows of one small slice that one event gives of a query; one to a window of n slices counts as
1 + n / 8, and by their size. Measured: an answer takes 1 to 2 ms, each of its slices 0.2 ms, each KiB of them 5 to 23
µs. The next event goes on; other queries come first."""
BYTES_PER_WORK = 64 << 10
UNWEIGHED_SHARE = 8
"""After a start the sizes of a query's slices are unknown: it may make an eighth until its first answer."""
LEAST_SHARE = 16
"""Once the queries of one event have made twice `MAX_WORK`, the others may make a sixteenth of it: all wait for it."""
MAX_LOSS_TEXT = 500
MAX_SEALED_STATEMENTS = 4096
"""Counts (slice, edge) that are kept of final windows, to detect records that arrive after them."""


class QueryLedger(ABC):
    """The rules for one query. `Ledger` drives it and provides its transactions."""

    def __init__(self, state: QueryState, entries: Iterable[tuple[str, int, StateEntry]], margin_ms: int) -> None:
        self._spec = state.query.spec
        budget = self._spec.staleness_budget
        # How long after its end a window is due; None: it is due when all edges have closed it.
        self._due_after_ms: int | None = None
        if budget is not None:
            self._due_after_ms = budget.staleness_ms - min(margin_ms, budget.staleness_ms // 2)
        self._slices: StateTable[SliceState] = StateTable()
        self._windows: StateTable[WindowState] = StateTable()
        self._sealed: StateTable[SealedSlice] = StateTable()
        for _, start, entry in entries:
            if isinstance(entry, SliceState):
                self._slices.put(start, entry)
            elif isinstance(entry, WindowState):
                self._windows.put(start, entry)
            elif isinstance(entry, SealedSlice):
                self._sealed.put(start, entry)
        self._outdated: set[int] = set()
        self._refine_at_ms: int | None = None  # wall time at which the first of `_outdated` may be answered
        self._edges = StoredEdges()
        self._frontier: tuple[object, ...] | None = None
        self._writing: QueryState | None = None
        self._state_before: QueryState | None = None
        self._late: dict[LateSlice, int] = {}
        self._open_from_ms = MIN_TIME_MS
        window = self._spec.window
        self._slices_per_answer = window.slices_per_window if isinstance(window, SlidingWindow) else 1
        self._slice_bytes: int | None = 0
        self.revisions_after = 0
        """No answer gets a revision up to this one."""
        self.allow(MAX_WORK)
        self._set_state(state)
        self._rebuild_heaps()
        self.has_backlog = False

    @property
    def state(self) -> QueryState:
        return self._state

    # Events

    @property
    def answer_work(self) -> int:
        """What an answer counts as, as in `MAX_WORK`."""
        return 1 + self._slices_per_answer // 8 + (self.answer_bytes or 0) // BYTES_PER_WORK

    @property
    def answer_bytes(self) -> int | None:
        """The expected size of an answer's slices; None: nothing is known since the state was loaded."""
        return None if self._slice_bytes is None else self._slices_per_answer * self._slice_bytes

    @property
    def open_windows(self) -> int:
        """Number of windows that are not final."""
        return len(self._windows)

    @property
    def has_waiting_changes(self) -> bool:
        """Whether windows have changed since their newest answer, and wait for the time of the next one."""
        return self._refine_at_ms is not None

    def weigh(self, size: int, slices: int | None = None) -> None:
        """Takes the size of so many slices, or (None) of those of an answer. The largest ones count the longest."""
        each = size // (slices or self._slices_per_answer)
        self._slice_bytes = max(each, (self._slice_bytes or 0) * 7 // 8)

    def forget_weight(self) -> None:
        """The state was loaded, which says nothing about the sizes of its slices."""
        self._slice_bytes = None

    def allow(self, work: int) -> None:
        """Sets what the next event may give of the query's answers, as in `MAX_WORK`."""
        work = work // UNWEIGHED_SHARE if self._slice_bytes is None else work
        self._max_answers = max(1, work // self.answer_work)

    def edges_changed(self, edges: Sequence[EdgeRecord]) -> None:
        """Updates the expected edges and the stream's clock. Emits nothing: `emit_due` does."""
        state = self._state
        retired = {e.edge for e in edges if e.retired}
        expected = {e for e in expected_edges(self._spec, edges) if e not in retired}
        if self._spec.edges is None:
            # An edge that has reported but is younger than the list is expected too.
            listed = {e.edge for e in edges}
            expected.update(EdgeId(e) for e in state.through_ms if e not in listed)
        serving = [e for e in sorted(edges, key=lambda e: e.edge) if not e.retired and e.stream(self._spec.stream)]
        clock = self._choose_clock(serving)
        due_from_ms = state.due_from_ms
        if serving and clock != state.clock:
            due_from_ms = self._first_due_window(clock, min(e.first_seen_ms for e in serving))
        deliveries = {e.edge: served.deliveries for e in serving if (served := e.stream(self._spec.stream))}
        of_stream = tuple(sorted(e.edge for e in edges if e.retired and e.stream(self._spec.stream)))
        left = {**state.left, **self._leaving(edges, expected)}
        changed = replace(
            state,
            expected=tuple(sorted(expected)),
            retired=of_stream,
            clock=clock,
            due_from_ms=due_from_ms,
            lost_states=self._lost_states(edges, clock),
            left=left,
            deliveries={edge: each for edge, each in deliveries.items() if each and edge in expected},
            constants=self._constants(e for e in edges if e.edge in expected or e.edge in left),
        )
        if changed != state:
            self._set_state(changed)
        self._edges.add(sorted({*changed.expected, *of_stream, *changed.lost_states, *changed.left}))
        for edge, (_, until) in changed.lost_states.items():
            if edge in expected and changed.lost_states[edge] != state.lost_states.get(edge):
                self._open_lacking(None, until + 1, until + 1)

    def _constants(self, edges: Iterable[EdgeRecord]) -> Mapping[str, Constants]:
        """The columns of `group_by` that have one value in all records of an edge, by edge."""
        result: dict[str, Constants] = {}
        for edge in edges:
            stream = edge.stream(self._spec.stream)
            named = {n: v for n, v in stream.constants.items() if n in self._spec.plain_keys} if stream else {}
            if named:
                result[edge.edge] = named
        return self._state.constants if result == self._state.constants else result

    def _leaving(self, edges: Sequence[EdgeRecord], expected: Collection[EdgeId]) -> dict[str, int]:
        """The edges that are no longer expected, each with an event time up to which it may have accepted records."""
        clock = self._state.running_clock
        before = frozenset(self._state.expected)
        gone = (e for e in edges if e.edge in before and e.edge not in expected)
        return {e.edge: clock.to_event_ms(_by_own_clock(e, e.seen_before_ms + LEAVING_MS)) for e in gone}

    def _lost_states(self, edges: Sequence[EdgeRecord], clock: StreamClock | None) -> Mapping[str, tuple[int, int]]:
        """The edges that have lost their state, each with the event time that the stream had reached by then.

        A replay begins anew with the new state, so the time is also taken from the clock that was in use before.
        """
        lost = dict(self._state.lost_states)
        clocks = [c for c in (self._state.clock, clock) if c is not None] or [LIVE]
        for edge in edges:
            at_ms = edge.state_lost_at_ms
            if at_ms is not None and at_ms != lost.get(edge.edge, (None, 0))[0] and edge.stream(self._spec.stream):
                until = max(c.to_event_ms(_by_own_clock(edge, at_ms)) for c in clocks)
                lost[edge.edge] = at_ms, max(until, lost.get(edge.edge, (0, MIN_TIME_MS))[1])
        return lost

    def report(self, frames: Iterable[FrameSummary], unlisted: Collection[EdgeId], now_ms: int) -> list[Emission]:
        """Applies merged frames of this query.

        Args:
            unlisted: edges among them that `edges_changed` has not listed yet.
        """
        frames = list(frames)
        dirty = self._affected_windows(self._apply_frames(frames, unlisted))
        stated: dict[EdgeId, list[InputLoss]] = {}
        for frame in frames:
            if frame.losses:
                stated.setdefault(frame.edge, []).extend(self._bounded(loss, frame) for loss in frame.losses)
        rejected = [d for frame in frames for d in frame.dropped if d.reason.is_rejection]
        if rejected:
            dirty |= self._windows_lacking(at_most(list(map(self._lost, rejected))), now_ms)
        for edge, losses in stated.items():
            self._set_state(self._state.with_losses(edge, losses))
            dirty |= self._without_wait(self._windows_lacking(at_most(losses), now_ms))
        return self._emit_due(dirty, now_ms)

    def refuse(self, slice_starts: Iterable[int]) -> None:
        """States that these slices lack partials: of the edges that have reported records of them, or of all.

        The windows over them say so when they are answered next: an answer that was given had the partials.
        """
        for start in slice_starts:
            state = self._slices.get(start)
            edges = {edge for (edge, _), close in state.closes.items() if close.observed} if state else set()
            for edge in edges or self._state.expected:
                self._set_state(self._state.with_losses(EdgeId(edge), [refusal(start)]))

    def emit_due(self, now_ms: int) -> list[Emission]:
        """Emits the windows that became due by time or by `edges_changed`."""
        return self._emit_due(set(), now_ms)

    def deadline(self) -> int | None:
        """Wall time, ms, at which the next window is due, or may be refined; None: no window waits for a time."""
        refined = [] if self._refine_at_ms is None else [self._refine_at_ms]
        if self._due_after_ms is None:
            return min(refined, default=None)
        while self._awaiting_due and not self._is_unanswered(self._awaiting_due[0]):
            heappop(self._awaiting_due)
        starts = [*self._awaiting_due[:1], *self._next_without_data()]
        due = [self._due_at(min(starts))] if starts else []
        return min([*due, *refined], default=None)

    @abstractmethod
    def sealed_before(self) -> int:
        """Event time, ms: slices that start before it belong to final windows only and accept no more data."""

    # Transactions

    def restored(self, edges: StoredEdges) -> None:
        """The store has this state, as far as `edges` says."""
        self._edges = edges

    def begin(self) -> None:
        if self._writing is not None:  # the last transaction has not failed, or the ledger would have been loaded
            self._edges.set_stored(self._writing)
            self._writing = None
        self._state_before = self._state
        self._open_from_ms = self.sealed_before()
        self._late = {}
        for table in (self._slices, *(table for _, table in self._tables())):
            table.begin()

    def state_changed(self) -> bool:
        return self._state_before is not self._state

    def changed_entries(self) -> list[EntryRow]:
        """The rows that the transaction writes."""
        self._writing, rows = self._state, self._edges.rows(self._state)
        for start, value in self._slices.changes().items():
            rows += self._edges.slice_rows(start, self._slices.before(start), value)
        for kind, table in self._tables():
            rows += [(kind, start, v.to_json() if v else None) for start, v in table.changes().items()]
        return rows

    def state_json(self) -> str:
        """The state without the parts of edges that have rows of their own."""
        return self._edges.state_json(self._state)

    def late_records(self) -> dict[LateSlice, int]:
        """The numbers of records, counted since `begin`, that came for windows when these were final."""
        return dict(self._late)

    @property
    def open_from_ms(self) -> int:
        """At `begin`, `sealed_before`: windows over later slices may get answers that have to state late records."""
        return self._open_from_ms

    def all_entries(self) -> list[EntryRow]:
        rows = self._edges.rows(self._state, all_parts=True)
        for start, value in sorted(self._slices.items()):
            rows += self._edges.slice_rows(start, None, value)
        for kind, table in self._tables():
            rows += [(kind, start, value.to_json()) for start, value in sorted(table.items())]
        return rows

    def _tables(self) -> list[tuple[str, StateTable[Any]]]:
        """The tables of which each value is one row."""
        return [("window", self._windows), ("sealed", self._sealed)]

    # Which windows exist

    @abstractmethod
    def _affected_windows(self, changed: Sequence[int]) -> set[int]:
        """The windows, not final, that need a new answer because these slices, which ascend, changed."""

    @abstractmethod
    def _end(self, start_ms: int) -> int: ...

    @abstractmethod
    def _required_span(self, start_ms: int) -> tuple[int, int]:
        """The event time [from, to) that an edge must have closed for the window to have all its records."""

    @abstractmethod
    def _slices_of(self, start_ms: int) -> range:
        """Start times of the window's slices."""

    @abstractmethod
    def _lost_through(self, slice_start_ms: int) -> int:
        """The windows over the slice that end at or before this event time are final: later records are lost to them.

        `MAX_TIME_MS`: all of them; `MIN_TIME_MS`: none.
        """

    @abstractmethod
    def _open_lacking(self, from_ms: int | None, to_ms: int | None, today_ms: int) -> None:
        """Opens the windows, not final, that may lack records between two event times: without an answer, a window
        without data would be taken for an empty one. Of very many, only the last ones up to `today_ms`.

        Args:
            from_ms: None: unknown, so all windows that are not final.
            to_ms: None: unknown, so up to `today_ms`.
            today_ms: the event time that the stream has reached.
        """

    def _next_without_data(self) -> list[int]:
        """The next window that becomes due without data, if there is one."""
        return []

    def _pop_overdue(self, now_ms: int, most: int) -> Sequence[int]:
        """At most so many windows without data that are due."""
        return ()

    def _first_due_window(self, clock: StreamClock | None, first_seen_ms: int) -> int | None:
        """The first window that becomes due with or without data."""
        return None

    # Frames

    def _apply_frames(self, frames: Iterable[FrameSummary], unlisted: Collection[EdgeId]) -> list[int]:
        """Applies frames and returns the slices, not final, that they changed."""
        through, gaps = dict(self._state.through_ms), dict(self._state.gaps)
        reach, lost = dict(self._state.reach), dict(self._state.lost_states)
        counted_before = self._counted_late()
        touched: set[int] = set()
        closes_by_slice: dict[int, dict[EdgeIncarnation, SliceClose]] = {}
        outdated: set[tuple[int, EdgeIncarnation]] = set()
        for frame in sorted(frames, key=lambda f: f.position):
            self._edges.add([frame.edge])
            closed = through.get(frame.edge, MIN_TIME_MS)
            if frame.since_ms is not None and frame.since_ms != gaps.get(frame.edge, (0, None))[1]:
                # The edge joined or lost its state: it does not have the records between its last close and then.
                gap_from, gap_to = gaps.get(frame.edge, (closed, MIN_TIME_MS))
                open_gap = gap_to > self._state.final_through_ms  # windows that are not final lack the earlier records
                gaps[frame.edge] = min(gap_from, closed) if open_gap else closed, frame.since_ms
            through[frame.edge] = max(closed, frame.through_ms)
            incarnation, furthest = reach.get(frame.edge, (frame.incarnation, MIN_TIME_MS))
            if frame.incarnation != incarnation:
                # What the lost incarnation has added ahead of the clock may be counted again.
                at_ms, until = lost.get(frame.edge, (0, MIN_TIME_MS))
                lost[frame.edge] = at_ms, max(until, furthest)
            added = (*frame.touched, *(c.slice_start_ms for c in frame.closes if c.observed))
            reach[frame.edge] = frame.incarnation, max((furthest, *added))
            for drop in frame.dropped:
                self._add_late(
                    frame.edge, drop.slice_start_ms, MAX_TIME_MS, drop.reason.label, drop.records, drop.until_ms
                )
            touched.update(frame.touched)
            origin = frame.edge, frame.incarnation
            outdated.update((start, origin) for start in frame.touched)
            for close in frame.closes:
                closes = closes_by_slice.setdefault(close.slice_start_ms, {})
                outdated.discard((close.slice_start_ms, origin))
                if origin not in closes or close.observed >= closes[origin].observed:
                    closes[origin] = close
        _forget_rests(sorted(outdated), closes_by_slice, self._slices)
        changed = []
        for start in sorted(touched | closes_by_slice.keys()):
            closes = closes_by_slice.get(start, {})
            self._count_after_final(start, closes)
            if start < self.sealed_before():
                self._update_sealed(start, {o: c.observed for o, c in closes.items()})
            elif self._update_slice(start, closes, start in touched):
                changed.append(start)
        expected = self._state.expected
        if self._spec.edges is None and unlisted:
            expected = tuple(sorted({*expected, *unlisted}))
        after_final, rejected = (n - before for n, before in zip(self._counted_late(), counted_before, strict=True))
        self._set_state(
            replace(
                self._state,
                through_ms=through,
                gaps=gaps,
                expected=expected,
                after_final=self._state.after_final + after_final,
                rejected=self._state.rejected + rejected,
                reach=reach,
                lost_states=lost,
            )
        )
        return changed

    def _counted_late(self) -> tuple[int, int]:
        """The numbers of records in `_late` that came too late, and that sources rejected."""
        rejected = sum(records for place, records in self._late.items() if place.reason in REJECTIONS)
        return sum(self._late.values()) - rejected, rejected

    def _add_late(
        self, edge: EdgeId, start_ms: int, through_ms: int, reason: str, records: int, until_ms: int | None = None
    ) -> None:
        end_ms = start_ms + self._spec.window.slice_ms if start_ms > MIN_TIME_MS else MIN_TIME_MS
        end_ms = end_ms if until_ms is None else until_ms
        late = LateSlice(edge, start_ms, end_ms, through_ms, reason)
        self._late[late] = self._late.get(late, 0) + records

    def _count_after_final(self, start_ms: int, closes: Mapping[EdgeIncarnation, SliceClose]) -> None:
        """Counts the records that these closes add to a slice that belongs to a final window."""
        through_ms = self._lost_through(start_ms)
        if through_ms == MIN_TIME_MS:
            return
        state, sealed = self._slices.get(start_ms), self._sealed.get(start_ms)
        known = {o: c.observed for o, c in state.closes.items()} if state else dict(sealed.observed) if sealed else {}
        for origin, close in closes.items():
            if close.observed > known.get(origin, 0):
                records = close.observed - known.get(origin, 0)
                self._add_late(EdgeId(origin[0]), start_ms, through_ms, AFTER_FINAL, records)

    def _update_slice(self, start_ms: int, closes: Mapping[EdgeIncarnation, SliceClose], touched: bool) -> bool:
        held = self._slices.get(start_ms)
        known = held.closes if held else {}
        # A close with no records and nothing withheld carries no news: it needs no new answer.
        nothing = SliceClose(start_ms, 0, 0)
        # Counters never decrease: a frame that is applied again, after quarantine, may have an older close.
        news = {
            o: c for o, c in closes.items() if c != (before := known.get(o, nothing)) and c.observed >= before.observed
        }
        if not news and not touched:
            return False
        if held is None:
            heappush(self._open_slices, start_ms)
        if news or held is None or not held.has_data:
            had_data = touched or (held is not None and held.has_data)
            self._slices.put(start_ms, SliceState.of({**known, **news}, had_data, self._spec))
        return True

    def _track_window(self, start_ms: int) -> None:
        heappush(self._awaiting_close, start_ms)
        heappush(self._awaiting_final, start_ms)
        if self._due_after_ms is not None:
            heappush(self._awaiting_due, start_ms)

    # Answers

    def _emit_due(self, dirty: set[int], now_ms: int) -> list[Emission]:
        closed = self._pop_final()
        closed |= self._pop_closed(self._max_answers - len(closed))
        due = self._pop_due(now_ms, self._max_answers - len(closed))
        passed = closed | due
        dirty = self._postpone(dirty - passed, self._max_answers - len(passed), now_ms) | (dirty & passed)
        # Nobody has more records of these before they are final, so they are answered now, without being complete.
        lacking = {s for s in closed if self._lacks_records(s) and not self._says_so(s)}
        dirty, due = dirty | lacking, due | lacking
        emissions = []
        for start in sorted(dirty | due | closed):
            emission = self._answer_window(start, start in dirty, start in due, now_ms)
            if emission is not None:
                emissions.append(emission)
        self._seal_slices()
        self._set_state(self._state.without_losses_before(self.sealed_before()))
        self._refine_at_ms = self._next_refinement()
        self.has_backlog = self._has_backlog(now_ms)
        return emissions

    def _says_so(self, start_ms: int) -> bool:
        """Whether the newest answer, which was complete before, says that the window lacks an edge."""
        state = self._windows.get(start_ms)
        return state is not None and state.lacks_edges

    def _postpone(self, dirty: set[int], most: int, now_ms: int) -> set[int]:
        """Returns the changed windows that are answered now, the earliest first, and marks the others as outdated."""
        waiting = {start for start in self._outdated if (w := self._windows.get(start)) is not None and w.outdated}
        changed = {start for start in dirty if (w := self._windows.get(start)) and self._gets_answer(start, w)}
        may_be = (s for s in waiting | changed if (w := self._windows.get(s)) is not None and w.may_be_refined(now_ms))
        now = set(nsmallest(max(0, most), may_be))
        self._outdated = (waiting | changed) - now
        for start in (changed - now - waiting) | (waiting & now):
            if (state := self._windows.get(start)) is not None:
                self._windows.put(start, replace(state, outdated=start not in now))
        return now

    def _without_wait(self, starts: set[int]) -> set[int]:
        """Lets the next event answer these windows, however new their last answers are."""
        for start in starts:
            if (state := self._windows.get(start)) is not None and state.refine_from_ms:
                self._windows.put(start, replace(state, refine_from_ms=0))
        return starts

    def _next_refinement(self) -> int | None:
        """Wall time, ms, at which the first of the outdated windows may be answered; None: no window is outdated."""
        states = (self._windows.get(start) for start in self._outdated)
        return min((w.refine_from_ms for w in states if w is not None and w.outdated), default=None)

    def _gets_answer(self, start_ms: int, state: WindowState) -> bool:
        """Whether a changed window may get an answer now; one that waits for its close or its deadline gets none."""
        waits = not state.is_answered and state.first_staleness_ms is None
        return not waits or self._required_span(start_ms)[1] <= self._closed_ms

    def _has_backlog(self, now_ms: int) -> bool:
        """Whether windows are left that could be answered now."""
        final = self._closed_ms - self._spec.lateness_ms
        return bool(
            (self._refine_at_ms is not None and self._refine_at_ms <= now_ms)
            or (self._awaiting_final and self._required_span(self._awaiting_final[0])[1] <= final)
            or (self._awaiting_close and self._required_span(self._awaiting_close[0])[1] <= self._closed_ms)
        )

    def _answer_window(self, start_ms: int, dirty: bool, due: bool, now_ms: int) -> Emission | None:
        """The answer to a window, or None if it gets none now."""
        state = self._windows.get(start_ms)
        if state is None:
            if not due:
                return None  # no data and no answer
            state = WindowState(has_data=False)
            self._track_window(start_ms)
        reached = self._phase(start_ms)
        phase = max(reached, state.phase, key=lambda p: p.rank)
        # A complete window can lack an edge again: one that joined, or that a session has grown beyond.
        lacks_edges = phase is Phase.COMPLETE and reached is Phase.EARLY
        if state.is_answered:
            if not dirty and phase is state.phase and (lacks_edges or not state.lacks_edges):
                return None
        elif phase is Phase.EARLY and not due:
            return None
        end, slices = self._end(start_ms), self._slices_of(start_ms)
        staleness = max(0, now_ms - self._state.running_clock.to_wall_ms(end))
        first = staleness if state.first_staleness_ms is None else state.first_staleness_ms
        kept = state.kept_staleness_ms
        if self._spec.saves_bytes:
            # Both limits hold together: an answer in time without all edges does not meet the budget.
            quality = self._quality(start_ms, slices, staleness, staleness if kept is None else kept)
            if kept is None and quality.keeps_error:
                kept = staleness
        else:
            quality = self._quality(start_ms, slices, staleness, first)
        if phase is Phase.FINAL:
            self._close_window(start_ms)
        else:
            # A combined budget is kept in time by the first answer that keeps its error, so that answer cannot wait.
            may_wait = kept is not None or not self._spec.saves_bytes
            answered = replace(
                state,
                revision=self._next_revision(state),
                phase=phase,
                first_staleness_ms=first,
                lacks_edges=lacks_edges,
                outdated=False,
                kept_staleness_ms=kept,
                refine_from_ms=now_ms + state.refinement_wait_ms if may_wait else 0,
                answers=state.answers + 1,
            )
            self._windows.put(start_ms, answered)
            if lacks_edges and not state.lacks_edges:
                heappush(self._awaiting_close, start_ms)
        ref, revision = self._state.query.ref, self._next_revision(state)
        return Emission(ref, start_ms, end, revision, phase, now_ms, quality, slices.start, slices.stop)

    def _next_revision(self, state: WindowState) -> int:
        return max(state.revision, self.revisions_after) + 1

    def _quality(self, start_ms: int, slices: range, staleness_ms: int, first_staleness_ms: int) -> Quality:
        states = [state for s in slices if (state := self._slices.get(s)) is not None]
        missing = tuple(e for e in self._state.expected if self._is_missing(e, start_ms))
        return assess(
            self._spec,
            Totals.union((s.totals for s in states), self._spec),
            expected=len(self._state.expected),
            missing=missing,
            lost_state=tuple(e for e in self._state.expected if self._has_lost_state(e, start_ms)),
            left=self._left(start_ms),
            staleness_ms=staleness_ms,
            first_staleness_ms=first_staleness_ms,
            losses=self._losses(start_ms),
            constants=self._state.constants,
            deliveries=self._state.deliveries,
            has_data=any(s.has_data for s in states),
            edges=self._statements(missing, states),
        )

    def _statements(self, missing: Sequence[EdgeId], states: Sequence[SliceState]) -> EdgeStatements:
        by_edge: dict[str, list[Totals]] = {}
        for state in states:
            for edge, totals in state.by_edge.items():
                by_edge.setdefault(edge, []).append(totals)
        through, absent = self._state.through_ms, frozenset(missing)
        return EdgeStatements(
            tuple(e for e in self._state.expected if e not in absent),
            {e: through[e] for e in missing if MIN_TIME_MS < through.get(e, MIN_TIME_MS) < MAX_TIME_MS},
            {e: each[0] if len(each) == 1 else Totals.union(each, self._spec) for e, each in sorted(by_edge.items())},
            {e: self._state.constants[e] for e in sorted(by_edge) if e in self._state.constants},
        )

    def _is_missing(self, edge: EdgeId, start_ms: int) -> bool:
        """Whether the window lacks records of the edge: the edge has not closed it, or lacks records itself."""
        end = self._required_span(start_ms)[1]
        return self._state.through_ms.get(edge, MIN_TIME_MS) < end or self._edge_lacks_records(edge, start_ms)

    def _edge_lacks_records(self, edge: EdgeId, start_ms: int) -> bool:
        """Whether the edge has a gap in the window, may have lost input of it, or has lost its state."""
        begin, end = self._required_span(start_ms)
        gap_from, gap_to = self._state.gaps.get(edge, (MIN_TIME_MS, MIN_TIME_MS))
        lost = any(loss.overlaps(begin, end) for loss in self._state.losses.get(edge, ()))
        return lost or max(begin, gap_from) < min(end, gap_to) or self._has_lost_state(edge, start_ms)

    def _has_lost_state(self, edge: EdgeId, start_ms: int) -> bool:
        """Whether the edge lost its state when the window had begun and was not final."""
        _, until = self._state.lost_states.get(edge, (0, MIN_TIME_MS - 1))
        return self._required_span(start_ms)[0] <= until

    def _left(self, start_ms: int) -> tuple[EdgeId, ...]:
        """The edges that left when the window had begun, without having closed it."""
        state, (begin, end) = self._state, self._required_span(start_ms)
        expected = frozenset(state.expected) if state.left else ()
        left = (e for e, until in sorted(state.left.items()) if begin <= until and e not in expected)
        return tuple(EdgeId(e) for e in left if state.through_ms.get(e, MIN_TIME_MS) < end)

    def _lacks_records(self, start_ms: int) -> bool:
        """Whether an expected edge does not have all records of the window, so that it cannot become complete."""
        state = self._state
        if not state.gaps and not state.losses and not state.lost_states:
            return False
        return any(self._edge_lacks_records(edge, start_ms) for edge in state.expected)

    def _losses(self, start_ms: int) -> tuple[tuple[EdgeId, InputLoss], ...]:
        """The stated losses of expected edges that the window may lack."""
        begin, end = self._required_span(start_ms)
        by_edge = ((e, loss) for e in self._state.expected for loss in self._state.losses.get(e, ()))
        return tuple((edge, loss) for edge, loss in by_edge if loss.overlaps(begin, end))

    def _bounded(self, loss: InputLoss, frame: FrameSummary) -> InputLoss:
        """A frame that cannot be read has no records that are newer than it, but for those ahead of the clock. Texts
        are repeated in the answer to every window that may lack records, so they are short."""
        loss = replace(loss, source=loss.source[:MAX_LOSS_TEXT], reason=loss.reason[:MAX_LOSS_TEXT])
        if loss.reason != LossReason.FRAME_DAMAGED:
            return loss
        return replace(loss, to_ms=self._state.running_clock.to_event_ms(frame.received_at_ms + MAX_AHEAD_MS))

    def _lost(self, rejected: DroppedRecords) -> InputLoss:
        """Returns rejected records as a loss of input, which selects their windows."""
        start_ms = rejected.slice_start_ms
        until_ms = start_ms + self._spec.window.slice_ms if rejected.until_ms is None else rejected.until_ms
        from_ms = None if start_ms == MIN_TIME_MS else start_ms
        return InputLoss("", rejected.reason.label, from_ms, None if until_ms == MAX_TIME_MS else until_ms)

    def _windows_lacking(self, losses: Sequence[InputLoss], now_ms: int) -> set[int]:
        """The windows, not final, that need a new answer because of losses."""
        for loss in losses:
            self._open_lacking(loss.from_ms, loss.to_ms, self._state.running_clock.to_event_ms(now_ms))
        spans = ((start, self._required_span(start)) for start in self._windows)
        return {start for start, span in spans if any(loss.overlaps(*span) for loss in losses)}

    def _close_window(self, start_ms: int) -> None:
        """Removes a window that has its final answer."""
        self._windows.drop(start_ms)

    def _pop_final(self) -> set[int]:
        """Advances the final frontier, as far as its windows can be answered now, and returns these."""
        final, passed = max(self._state.final_through_ms, self._closed_ms - self._spec.lateness_ms), set[int]()
        while self._awaiting_final and (end := self._required_span(self._awaiting_final[0])[1]) <= final:
            if self._awaiting_final[0] not in self._windows or self._awaiting_final[0] in passed:
                heappop(self._awaiting_final)
            elif len(passed) < self._max_answers:
                passed.add(heappop(self._awaiting_final))
            else:
                final = max(self._state.final_through_ms, end - 1)
                break
        if final > self._state.final_through_ms:
            self._set_state(replace(self._state, final_through_ms=final))
        return passed

    def _pop_closed(self, most: int) -> set[int]:
        """Windows with data or an answer that the closed frontier has passed."""
        passed = set[int]()
        while self._awaiting_close and self._required_span(self._awaiting_close[0])[1] <= self._closed_ms:
            if self._awaiting_close[0] not in self._windows:
                heappop(self._awaiting_close)
            elif len(passed) < most:
                passed.add(heappop(self._awaiting_close))
            else:
                break
        return passed

    def _pop_due(self, now_ms: int, most: int) -> set[int]:
        """Windows without an answer that are due, with data or without."""
        if self._due_after_ms is None:
            return set()
        due = set[int]()
        while len(due) < most and self._awaiting_due and self._due_at(self._awaiting_due[0]) <= now_ms:
            start = heappop(self._awaiting_due)
            if self._is_unanswered(start):
                due.add(start)
        return due.union(self._pop_overdue(now_ms, most - len(due)))

    # After the final answer

    def _seal_slices(self) -> None:
        before = self.sealed_before()
        while self._open_slices and self._open_slices[0] < before:
            start = heappop(self._open_slices)
            state = self._slices.drop(start)
            if state is not None:
                self._update_sealed(start, {o: c.observed for o, c in state.closes.items()})

    def _update_sealed(self, start_ms: int, observed: Mapping[EdgeIncarnation, int]) -> None:
        held = self._sealed.get(start_ms)
        known = held.observed if held else {}
        news = {o: n for o, n in observed.items() if n > known.get(o, 0)}
        if not news:
            return
        if held is not None:
            self._sealed.drop(start_ms)  # it becomes the one that changed last
        self._sealed.put(start_ms, SealedSlice({**known, **news}))
        self._sealed_statements += len(news.keys() - known.keys())
        # An edge that joins late closes old slices again within its lateness. So those go that have not changed for
        # longest, not those with the earliest start.
        while self._sealed_statements > MAX_SEALED_STATEMENTS and len(self._sealed) > 1:
            oldest = self._sealed.drop(next(iter(self._sealed)))
            self._sealed_statements -= len(oldest.observed) if oldest else 0

    # Frontiers

    def _set_state(self, state: QueryState) -> None:
        frontier = state.expected, state.through_ms, state.retired
        # With many edges the minimum is most of what an event costs. What a change keeps are the same objects.
        unchanged = self._frontier is not None and all(map(operator.is_, frontier, self._frontier))
        self._state, self._frontier = state, frontier
        if unchanged:
            return
        if state.expected:
            self._closed_ms = min(map(state.through_ms.get, state.expected, repeat(MIN_TIME_MS)))
        else:
            # No edge is expected. If none is known, nothing is closed; if all that reported are retired, the
            # furthest close among them counts.
            self._closed_ms = max((state.through_ms.get(e, MIN_TIME_MS) for e in state.retired), default=MIN_TIME_MS)

    def _phase(self, start_ms: int) -> Phase:
        closed_at_ms = self._required_span(start_ms)[1]
        if self._is_final(closed_at_ms):
            return Phase.FINAL
        is_complete = closed_at_ms <= self._closed_ms and not self._lacks_records(start_ms)
        return Phase.COMPLETE if is_complete else Phase.EARLY

    def _is_final(self, end_ms: int) -> bool:
        return end_ms <= self._state.final_through_ms

    def _is_unanswered(self, start_ms: int) -> bool:
        state = self._windows.get(start_ms)
        return state is not None and not state.is_answered

    def _due_at(self, start_ms: int) -> int:
        return self._state.running_clock.to_wall_ms(self._end(start_ms)) + (self._due_after_ms or 0)

    def _choose_clock(self, serving: Sequence[EdgeRecord]) -> StreamClock | None:
        """Keeps the clock in use as long as any edge has it, so that a new edge does not move deadlines."""
        clocks = [s.clock for e in serving if (s := e.stream(self._spec.stream)) is not None]
        if not clocks or self._state.clock in clocks:
            return self._state.clock
        return clocks[0]

    def _rebuild_heaps(self) -> None:
        windows = list(self._windows.items())
        self._awaiting_close = [start for start, w in windows if w.phase is Phase.EARLY or w.lacks_edges]
        self._awaiting_final = [start for start, _ in windows]
        self._awaiting_due = [start for start, w in windows if not w.is_answered and self._due_after_ms is not None]
        self._outdated = {start for start, w in windows if w.outdated}
        self._refine_at_ms = self._next_refinement()
        self._open_slices = list(self._slices)
        self._sealed_statements = sum(len(s.observed) for _, s in self._sealed.items())
        heaps = (self._awaiting_close, self._awaiting_final, self._awaiting_due, self._open_slices)
        for heap in heaps:
            heapify(heap)


class EventWork:
    """The work of answering that is left in one event, which all queries share."""

    def __init__(self) -> None:
        self._left = 2 * MAX_WORK

    def grant(self, ledger: QueryLedger) -> None:
        """Gives a query its share."""
        ledger.allow(max(MAX_WORK // LEAST_SHARE, min(MAX_WORK, self._left)))

    def spend(self, ledger: QueryLedger, answers: int) -> None:
        self._left -= answers * ledger.answer_work


def _forget_rests(
    outdated: Iterable[tuple[int, EdgeIncarnation]],
    closes_by_slice: dict[int, dict[EdgeIncarnation, SliceClose]],
    slices: StateTable[SliceState],
) -> None:
    """Adds closes without rests of slices of which their edge has sent values since, such as late records in several
    frames. A part of the rest is no longer withheld, so the rest is unknown until the edge closes the slice again."""
    for start, origin in outdated:
        state, closes = slices.get(start), closes_by_slice.setdefault(start, {})
        close = closes.get(origin) or (state.closes.get(origin) if state is not None else None)
        if close is not None and close.withheld:
            closes[origin] = replace(close, withheld=tuple(replace(w, rest=None) for w in close.withheld))


def _by_own_clock(edge: EdgeRecord, wall_ms: int) -> int:
    """The edge's wall time at a wall time of the center, where the edge's clock is ahead."""
    return wall_ms + max(0, round(edge.clock_offset_ms))
