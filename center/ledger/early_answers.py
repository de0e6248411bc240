"""Windows of a query with an accuracy: answered as soon as the contract is met, stragglers or not.

The grid's rules stand: `complete`, `final` and a staleness budget's deadline are as without an accuracy. What is added
is the early answer. Each report and each deadline brings `AccuracyBook` up to date and asks it of the windows
that have ended and have no answer. An early answer is revised when it changes by a quarter of its interval.

The book is kept as a log: the notes of each transaction are a entry of the state, and now and then a snapshot takes
their place. So a transaction writes what was new in it, and undoing one is reading the log again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from center.estimation.estimator import AccuracyBook
from center.estimation.prediction import Prediction
from center.ledger.events import Emission, FrameSummary
from center.ledger.quality import Phase, Quality, with_accuracy
from center.ledger.state import EntryKind, EstimatorLogEntry, QueryState, StateEntry, StateTable
from center.ledger.time_windows import TimeWindowLedger
from center.sampling import needed_rate
from edgewater.accuracy import report_schedule
from edgewater.streams import EdgeId
from edgewater.wire.frames import SamplingReason

SNAPSHOT = -1
"""The number of the note that is the snapshot."""
MAX_AHEAD_MS = 60_000
"""Wall time by which an edge's clock may be ahead of the center's."""
COMPACT_BYTES = 1 << 18
"""Of notes, at least, before a snapshot takes their place; and four times what it was last."""


class AccuracyLedger(TimeWindowLedger):
    """The rules for a query with an accuracy."""

    def __init__(self, state: QueryState, entries: Iterable[tuple[EntryKind, int, StateEntry]], margin_ms: int) -> None:
        self._log: StateTable[EstimatorLogEntry] = StateTable()
        others: list[tuple[EntryKind, int, StateEntry]] = []
        for kind, start, entry in entries:
            if isinstance(entry, EstimatorLogEntry):
                self._log.put(start, entry)
            else:
                others.append((kind, start, entry))
        self._predicted: Prediction | None = None
        self._because: dict[str, frozenset[SamplingReason]] = {}
        super().__init__(state, others, margin_ms)
        self._book = self._read_book()

    def _read_book(self) -> AccuracyBook:
        accuracy = self._spec.accuracy
        clock = report_schedule(self._spec.window, accuracy, self._spec.lateness_ms)
        assert accuracy is not None and clock is not None
        latest = None if self._due_after_ms is None else self._due_after_ms // clock.grid.slot_ms
        book = AccuracyBook(accuracy, clock, latest, self._state.running_clock.speed)
        self._log_bytes = 0
        for number, notes in sorted(self._log.items()):
            if number == SNAPSHOT:
                state = json.loads(notes.text)
                if "groups" not in state:  # of an earlier build: what follows builds on it, and all is learnt anew
                    self._log_bytes = 1 << 62
                    break
                book.restore(state)
                continue
            self._log_bytes += len(notes.text)
            for note in json.loads(notes.text):
                book.apply(note)
        book.notes = []
        return book

    @property
    def book(self) -> AccuracyBook:
        return self._book

    def needed_rates(self) -> dict[EdgeId, float]:
        """By edge, the entry of its records that has to be processed for the contract."""
        return {EdgeId(e): needed_rate(self._spec, rate) for e, rate in self._book.rates().items()}

    # Transactions

    def _tables(self) -> list[tuple[EntryKind, StateTable[Any]]]:
        return [*super()._tables(), ("accuracy", self._log)]

    def _write_log(self) -> None:
        """Makes a entry of what the book has noted; or a snapshot of it and all entries, once it is worth it."""
        if not self._book.notes:
            return
        text = json.dumps(self._book.notes, separators=(",", ":"))
        self._book.notes = []
        self._log_bytes += len(text)
        held = self._log.get(SNAPSHOT)
        if self._log_bytes > max(COMPACT_BYTES, 4 * len(held.text) if held else 0):
            for number in list(self._log):
                self._log.drop(number)
            text = json.dumps(self._book.to_state(), separators=(",", ":"))
            self._log.put(SNAPSHOT, EstimatorLogEntry(text))
            self._log_bytes = 0
            return
        self._log.put(max((n for n in self._log), default=SNAPSHOT) + 1, EstimatorLogEntry(text))

    # Taking in

    def _apply_frames(self, frames: Iterable[FrameSummary], unlisted: Iterable[EdgeId]) -> list[int]:
        frames = sorted(frames, key=lambda f: f.position)
        changed = super()._apply_frames(frames, unlisted)
        self._book.expect(self._state.expected)
        for frame in frames:
            if frame.arrivals is not None:
                # A clock that is far ahead must not carry the query's time away with it.
                latest_ms = self._state.running_clock.to_event_ms(frame.received_at_ms + MAX_AHEAD_MS)
                told, through_ms = frame.arrivals, min(frame.arrivals.through_ms, latest_ms)
                self._book.report(frame.edge, through_ms, told.substreams, told.sampled, told.unread)
        return changed

    def deadline(self) -> int | None:
        """As without an accuracy; and when an edge that has not told of an ended window is no longer waited for."""
        due_ms = super().deadline()
        ends = [self._end(start) for start, state in self._windows.items() if self._is_open(start, state.is_answered)]
        if not ends:
            return due_ms
        book = self._book
        look_ms = min(ends) + book.patience_ms
        if look_ms <= book.now_ms:
            look_ms = book.now_ms + book.patience_ms
        wall_ms = self._state.running_clock.to_wall_ms(look_ms) + 1
        return wall_ms if due_ms is None else min(due_ms, wall_ms)

    def _is_open(self, start_ms: int, answered: bool) -> bool:
        return not answered and self._book.is_seen(start_ms)

    # Answering

    def _emit_due(self, dirty: set[int], now_ms: int) -> list[Emission]:
        book = self._book
        book.expect(self._state.expected)
        book.advance(self._state.running_clock.to_event_ms(now_ms))
        ripe = {
            start
            for start, state in self._windows.items()
            if self._is_open(start, state.is_answered) and book.has_ended(start)
        }
        emissions = super()._emit_due(dirty | ripe, now_ms)
        book.forget_before(self.sealed_before())
        self._write_log()
        return emissions

    def _answer_window(self, start_ms: int, dirty: bool, due: bool, now_ms: int) -> Emission | None:
        state, book = self._windows.get(start_ms), self._book
        if state is None and not due:
            return None
        phase = (
            self._phase(start_ms) if state is None else max(self._phase(start_ms), state.phase, key=lambda p: p.rank)
        )
        if due:
            book.advance(self._state.running_clock.to_event_ms(now_ms), force=True)
        seen = book.is_seen(start_ms) and book.has_ended(start_ms)
        self._predicted, self._because = None, {}
        if phase is not Phase.EARLY:
            self._predicted, self._because = book.settled(start_ms)
        elif state is not None and state.is_answered:
            if not dirty or not seen or not book.may_revise(start_ms):
                return None
            self._predicted = book.predict(start_ms)
            last = book.last_given(start_ms)
            if last is not None and not self._predicted.differs(last):
                return None
        elif due:
            self._predicted = book.predict(start_ms) if seen else None
        else:
            self._predicted = book.judge(start_ms)
            if self._predicted is None:
                return None
        if phase is not Phase.EARLY and seen and book.last_given(start_ms) is None:
            book.given(start_ms, self._predicted or book.predict(start_ms), early=False)  # to be learnt from
        emission = super()._answer_window(start_ms, dirty, due or phase is Phase.EARLY, now_ms)
        if emission is not None and self._predicted is not None and phase is Phase.EARLY:
            book.given(start_ms, self._predicted, early=True)
        return emission

    def _quality(self, start_ms: int, slices: range, staleness_ms: int, first_staleness_ms: int) -> Quality:
        quality = super()._quality(start_ms, slices, staleness_ms, first_staleness_ms)
        early = self._phase(start_ms) is Phase.EARLY or self._book.may_lack(start_ms)
        covered, book, because = None, self._book, self._because
        if self._predicted is not None and self._phase(start_ms) is Phase.EARLY:
            because = book.sampled_because(start_ms)
        if self._phase(start_ms) is Phase.FINAL:
            covered = book.finish(start_ms)
        return with_accuracy(quality, self._spec, self._predicted, early=early, covered=covered, coverage=book.coverage,
                      slot_ms=book.schedule.grid.slot_ms, too_many_groups=book.is_crowded,
                      sampled_because=because)  # fmt: skip
