"""One query's windows: what edges have reported of them, and when each is answered.

Three frontiers in event time decide. *Closed*: every expected edge has closed what ends before it, so
windows are ``complete``; it goes back when an edge joins. *Final*: the lateness behind it, and never
goes back. *Due*: where the clock stands, less the staleness budget; windows that it passes unclosed
are answered ``early`` with what there is.

Windows wait in heaps by start, and a frontier that moves pops those it has passed. So a batch costs
what it touches and closes, however many windows are open. Entries of a heap are hints: the tables
(`Parts`) are the truth, and a heap can be rebuilt from them at any time.

Which windows there are is what kinds of windows differ in: `GridLedger` and `SessionLedger`. All that
is asked here of windows is that they lie in event time as their starts do, the ends too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Any

from center.catalog.store import EdgeRecord, expected_edges
from center.ledger.events import Emission, FrameFact
from center.ledger.quality import Phase, Quality, Totals, assess
from center.ledger.state import Head, Origin, Part, PartKind, Parts, SealedSlice, SliceState, WindowState
from edgewater.query import StalenessBudget
from edgewater.streams import NEVER_MS, EdgeId, StreamClock
from edgewater.wire.frames import SliceClose

MAX_SEALED_STATEMENTS = 4096
"""Statements (slice, edge) that are kept of final windows, to tell what comes after."""


class QueryLedger(ABC):
    """The rules for one query. Driven by `Ledger`, which sees to transactions."""

    def __init__(self, head: Head, parts: Iterable[tuple[PartKind, int, Part]], margin_ms: int) -> None:
        self._spec = head.query.spec
        budget = self._spec.budget
        # How long after its end a window is due; None: whenever all edges have closed it.
        self._due_after_ms: int | None = None
        if isinstance(budget, StalenessBudget):
            self._due_after_ms = budget.staleness_ms - min(margin_ms, budget.staleness_ms // 2)
        self._slices: Parts[SliceState] = Parts()
        self._windows: Parts[WindowState] = Parts()
        self._sealed: Parts[SealedSlice] = Parts()
        for _, start, part in parts:
            if isinstance(part, SliceState):
                self._slices.put(start, part)
            elif isinstance(part, WindowState):
                self._windows.put(start, part)
            elif isinstance(part, SealedSlice):
                self._sealed.put(start, part)
        self._head_before: Head | None = None
        self._set_head(head)
        self._rebuild_heaps()

    @property
    def head(self) -> Head:
        return self._head

    # What it is told

    def edges_changed(self, edges: Sequence[EdgeRecord]) -> None:
        """Takes over who is expected, and the stream's clock. Answers nothing: `settle` does."""
        head = self._head
        retired = {e.edge for e in edges if e.retired}
        expected = {e for e in expected_edges(self._spec, edges) if e not in retired}
        if self._spec.edges is None:
            # Reported, but the list is older than its Hello: it belongs to those that are waited for.
            listed = {e.edge for e in edges}
            expected.update(EdgeId(e) for e in head.through_ms if e not in listed)
        serving = [e for e in sorted(edges, key=lambda e: e.edge) if not e.retired and e.stream(self._spec.stream)]
        clock = self._choose_clock(serving)
        due_from_ms = head.due_from_ms
        if serving and clock != head.clock:
            due_from_ms = self._first_due_window(clock, min(e.first_seen_ms for e in serving))
        gone = tuple(sorted(e.edge for e in edges if e.retired and e.stream(self._spec.stream)))
        changed = replace(head, expected=tuple(sorted(expected)), retired=gone, clock=clock, due_from_ms=due_from_ms)
        if changed != head:
            self._set_head(changed)

    def report(self, facts: Iterable[FrameFact], unlisted: Iterable[EdgeId], now_ms: int) -> list[Emission]:
        """Frames of this query have been merged.

        Args:
            unlisted: edges among them that `edges_changed` has not told of yet.
        """
        return self._settle(self._windows_over(self._note(facts, unlisted)), now_ms)

    def settle(self, now_ms: int) -> list[Emission]:
        """Answers what time or `edges_changed` has made ripe."""
        return self._settle(set(), now_ms)

    def deadline(self) -> int | None:
        """Wall time, ms, at which the next window is due; None: no window will be, without news."""
        if self._due_after_ms is None:
            return None
        while self._awaiting_due and not self._is_unanswered(self._awaiting_due[0]):
            heappop(self._awaiting_due)
        starts = [*self._awaiting_due[:1], *self._next_without_data()]
        return self._due_at(min(starts)) if starts else None

    @abstractmethod
    def sealed_before(self) -> int:
        """Slices that start before it belong to final windows only: nothing is applied to them."""

    # Transactions: see `Parts`

    def begin(self) -> None:
        self._head_before = self._head
        for _, parts in self._tables():
            parts.begin()

    def commit(self) -> None:
        self._head_before = None
        for _, parts in self._tables():
            parts.commit()

    def rollback(self) -> None:
        assert self._head_before is not None
        for _, parts in self._tables():
            parts.rollback()
        self._set_head(self._head_before)
        self._head_before = None
        self._rebuild_heaps()

    def head_changed(self) -> bool:
        return self._head_before is not self._head

    def changed_parts(self) -> list[tuple[PartKind, int, Part | None]]:
        """Of the running transaction; None: gone."""
        return [(kind, start, value) for kind, parts in self._tables() for start, value in parts.changes().items()]

    def all_parts(self) -> list[tuple[PartKind, int, Part]]:
        return [(kind, start, value) for kind, parts in self._tables() for start, value in sorted(parts.items())]

    def _tables(self) -> list[tuple[PartKind, Parts[Any]]]:
        return [("slice", self._slices), ("window", self._windows), ("sealed", self._sealed)]

    # Which windows there are

    @abstractmethod
    def _windows_over(self, changed: Sequence[int]) -> set[int]:
        """The windows, not final, that have to be answered anew since these slices have changed."""

    @abstractmethod
    def _end(self, start_ms: int) -> int: ...

    @abstractmethod
    def _reach(self, start_ms: int) -> tuple[int, int]:
        """The event time [from, to) that an edge must have told all of, for the window to lack nothing of it."""

    @abstractmethod
    def _slices_of(self, start_ms: int) -> range:
        """The starts of the slices that the window is made of."""

    @abstractmethod
    def _has_final_window(self, slice_start_ms: int) -> bool: ...

    def _next_without_data(self) -> list[int]:
        """The next window that is due although nothing is known of it, if there is one."""
        return []

    def _pop_overdue(self, now_ms: int) -> Sequence[int]:
        """Windows of which nothing is known though their time has come."""
        return ()

    def _first_due_window(self, clock: StreamClock | None, first_seen_ms: int) -> int | None:
        """The first window that is due with or without data."""
        return None

    # Taking in

    def _note(self, facts: Iterable[FrameFact], unlisted: Iterable[EdgeId]) -> list[int]:
        """Writes down what frames say; returns the slices, not final, of which they say something new."""
        through, gaps = dict(self._head.through_ms), dict(self._head.gaps)
        touched: set[int] = set()
        stated: dict[int, dict[Origin, SliceClose]] = {}
        for fact in sorted(facts, key=lambda f: f.position):
            closed = through.get(fact.edge, NEVER_MS)
            if fact.since_ms is not None and fact.since_ms != gaps.get(fact.edge, (0, None))[1]:
                # It joined, or lost its state: what it had not closed by then it does not have.
                gaps[fact.edge] = (closed, fact.since_ms)
            through[fact.edge] = max(closed, fact.through_ms)
            touched.update(fact.touched)
            for close in fact.closes:
                stated.setdefault(close.slice_start_ms, {})[fact.edge, fact.incarnation] = close
        changed = []
        after_final = self._head.after_final
        for start in sorted(touched | stated.keys()):
            closes = stated.get(start, {})
            after_final += self._after_final(start, closes)
            if start < self.sealed_before():
                self._note_sealed(start, {o: c.observed for o, c in closes.items()})
            elif self._note_slice(start, closes, start in touched):
                changed.append(start)
        expected = self._head.expected
        if self._spec.edges is None:
            expected = tuple(sorted({*expected, *unlisted}))
        self._set_head(replace(self._head, through_ms=through, gaps=gaps, expected=expected, after_final=after_final))
        return changed

    def _after_final(self, start_ms: int, closes: Mapping[Origin, SliceClose]) -> int:
        """The records that these statements add to a slice of which a window is final already."""
        if not self._has_final_window(start_ms):
            return 0
        state, sealed = self._slices.get(start_ms), self._sealed.get(start_ms)
        known = {o: c.observed for o, c in state.closes.items()} if state else dict(sealed.observed) if sealed else {}
        return sum(max(0, c.observed - known.get(o, 0)) for o, c in closes.items())

    def _note_slice(self, start_ms: int, closes: Mapping[Origin, SliceClose], touched: bool) -> bool:
        held = self._slices.get(start_ms)
        known = held.closes if held else {}
        # "Nothing seen, nothing withheld" is what silence says too: no reason to answer again.
        nothing = SliceClose(start_ms, 0, 0)
        news = {o: c for o, c in closes.items() if c != known.get(o, nothing)}
        if not news and not touched:
            return False
        if held is None:
            heappush(self._open_slices, start_ms)
        if news or held is None or not held.has_data:
            had_data = touched or (held is not None and held.has_data)
            self._slices.put(start_ms, SliceState.of({**known, **news}, had_data, self._spec))
        return True

    def _await_window(self, start_ms: int) -> None:
        heappush(self._awaiting_close, start_ms)
        heappush(self._awaiting_final, start_ms)
        if self._due_after_ms is not None:
            heappush(self._awaiting_due, start_ms)

    # Answering

    def _settle(self, dirty: set[int], now_ms: int) -> list[Emission]:
        final = max(self._head.final_through_ms, self._closed_ms - self._spec.lateness_ms)
        if final > self._head.final_through_ms:
            self._set_head(replace(self._head, final_through_ms=final))
        due = self._pop_due(now_ms)
        emissions = []
        for start in sorted(dirty | due | self._pop_closed()):
            emission = self._judge(start, start in dirty, start in due, now_ms)
            if emission is not None:
                emissions.append(emission)
        self._seal_slices()
        return emissions

    def _judge(self, start_ms: int, dirty: bool, due: bool, now_ms: int) -> Emission | None:
        """The answer to a window, if it is to get one now."""
        state = self._windows.get(start_ms)
        if state is None:
            if not due:
                return None  # No data and no answer: a window that nobody has heard of.
            state = WindowState(has_data=False)
            self._await_window(start_ms)
        reached = self._phase(start_ms)
        phase = max(reached, state.phase, key=lambda p: p.rank)
        # What was complete may come to lack an edge: one that joined, or that a session has grown past.
        lacks = phase is Phase.COMPLETE and reached is Phase.EARLY
        if state.is_answered:
            if not dirty and phase is state.phase and (lacks or not state.lacks):
                return None
        elif phase is Phase.EARLY and not due:
            return None
        end, slices = self._end(start_ms), self._slices_of(start_ms)
        staleness = max(0, now_ms - self._head.running_clock.to_wall_ms(end))
        first = staleness if state.first_staleness_ms is None else state.first_staleness_ms
        quality = self._quality(start_ms, slices, staleness, first)
        if phase is Phase.FINAL:
            self._retire(start_ms)
        else:
            revision = state.revision + 1
            answered = replace(state, revision=revision, phase=phase, first_staleness_ms=first, lacks=lacks)
            self._windows.put(start_ms, answered)
            if lacks and not state.lacks:
                heappush(self._awaiting_close, start_ms)
        ref, revision = self._head.query.ref, state.revision + 1
        return Emission(ref, start_ms, end, revision, phase, now_ms, quality, slices.start, slices.stop)

    def _quality(self, start_ms: int, slices: range, staleness_ms: int, first_staleness_ms: int) -> Quality:
        states = (self._slices.get(s) for s in slices)
        return assess(
            self._spec,
            Totals.union((s.totals for s in states if s is not None), self._spec),
            expected=len(self._head.expected),
            missing=tuple(e for e in self._head.expected if self._is_missing(e, start_ms)),
            after_final=self._head.after_final,
            staleness_ms=staleness_ms,
            first_staleness_ms=first_staleness_ms,
        )

    def _is_missing(self, edge: EdgeId, start_ms: int) -> bool:
        """Whether a window lacks records of the edge: it has not closed it, or never had them all."""
        begin, end = self._reach(start_ms)
        gap_from, gap_to = self._head.gaps.get(edge, (NEVER_MS, NEVER_MS))
        return self._head.through_ms.get(edge, NEVER_MS) < end or max(begin, gap_from) < min(end, gap_to)

    def _retire(self, start_ms: int) -> None:
        """A window has got its final answer."""
        self._windows.drop(start_ms)

    def _pop_closed(self) -> set[int]:
        """Windows with data or an answer that the closed or the final frontier has passed."""
        passed = set()
        while self._awaiting_close and self._reach(self._awaiting_close[0])[1] <= self._closed_ms:
            passed.add(heappop(self._awaiting_close))
        while self._awaiting_final and self._is_final(self._reach(self._awaiting_final[0])[1]):
            passed.add(heappop(self._awaiting_final))
        return {start for start in passed if start in self._windows}

    def _pop_due(self, now_ms: int) -> set[int]:
        """Windows without an answer whose time has come, with data or without."""
        if self._due_after_ms is None:
            return set()
        due = set()
        while self._awaiting_due and self._due_at(self._awaiting_due[0]) <= now_ms:
            start = heappop(self._awaiting_due)
            if self._is_unanswered(start):
                due.add(start)
        return due.union(self._pop_overdue(now_ms))

    # After the last answer

    def _seal_slices(self) -> None:
        before = self.sealed_before()
        while self._open_slices and self._open_slices[0] < before:
            start = heappop(self._open_slices)
            state = self._slices.drop(start)
            if state is not None:
                self._note_sealed(start, {o: c.observed for o, c in state.closes.items()})

    def _note_sealed(self, start_ms: int, observed: Mapping[Origin, int]) -> None:
        held = self._sealed.get(start_ms)
        known = held.observed if held else {}
        news = {o: n for o, n in observed.items() if n > known.get(o, 0)}
        if not news:
            return
        if held is None:
            heappush(self._sealed_starts, start_ms)
        self._sealed.put(start_ms, SealedSlice({**known, **news}))
        self._sealed_statements += len(news.keys() - known.keys())
        while self._sealed_statements > MAX_SEALED_STATEMENTS and len(self._sealed) > 1:
            oldest = self._sealed.drop(heappop(self._sealed_starts))
            self._sealed_statements -= len(oldest.observed) if oldest else 0

    # Frontiers

    def _set_head(self, head: Head) -> None:
        self._head = head
        if head.expected:
            self._closed_ms = min(head.through_ms.get(e, NEVER_MS) for e in head.expected)
        else:
            # Nobody is waited for: either no edge is known, and nothing is closed, or all that
            # reported are retired, and what the last of them closed stands.
            self._closed_ms = max((head.through_ms.get(e, NEVER_MS) for e in head.retired), default=NEVER_MS)

    def _phase(self, start_ms: int) -> Phase:
        closed_at_ms = self._reach(start_ms)[1]
        if self._is_final(closed_at_ms):
            return Phase.FINAL
        return Phase.COMPLETE if closed_at_ms <= self._closed_ms else Phase.EARLY

    def _is_final(self, end_ms: int) -> bool:
        return end_ms <= self._head.final_through_ms

    def _is_unanswered(self, start_ms: int) -> bool:
        state = self._windows.get(start_ms)
        return state is not None and not state.is_answered

    def _due_at(self, start_ms: int) -> int:
        return self._head.running_clock.to_wall_ms(self._end(start_ms)) + (self._due_after_ms or 0)

    def _choose_clock(self, serving: Sequence[EdgeRecord]) -> StreamClock | None:
        """The clock in use as long as any edge has it, so that a newcomer does not move deadlines."""
        clocks = [s.clock for e in serving if (s := e.stream(self._spec.stream)) is not None]
        if not clocks or self._head.clock in clocks:
            return self._head.clock
        return clocks[0]

    def _rebuild_heaps(self) -> None:
        windows = list(self._windows.items())
        self._awaiting_close = [start for start, w in windows if w.phase is Phase.EARLY or w.lacks]
        self._awaiting_final = [start for start, _ in windows]
        self._awaiting_due = [start for start, w in windows if not w.is_answered and self._due_after_ms is not None]
        self._open_slices = list(self._slices)
        self._sealed_starts = list(self._sealed)
        self._sealed_statements = sum(len(s.observed) for _, s in self._sealed.items())
        heaps = (self._awaiting_close, self._awaiting_final, self._awaiting_due, self._open_slices, self._sealed_starts)
        for heap in heaps:
            heapify(heap)
