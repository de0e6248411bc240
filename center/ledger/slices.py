"""`ReportedSlices` stores the reports of edges about the slices of one query, including reports that came too late.

The closes of a slice are stored until all windows over the slice are final. Then the slice is *sealed*: only the
numbers of its records remain, to detect records that arrive after the final answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import takewhile

from center.ledger.events import FrameSummary, LateSlice
from center.ledger.state import EdgeIncarnation, QueryState, SealedSlice, SliceState, StateTable
from edgewater.answers import LateRecords
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS, EdgeId
from edgewater.model.query import QuerySpec
from edgewater.wire import UNCERTAIN, SliceClose, reason_of

AFTER_FINAL = "after-final"
"""The reason of records that are in no answer to a window because they came after the final answer."""
MAX_SEALED_STATEMENTS = 4096
"""The most counts of sealed slices, by slice and edge. They are stored to detect records that arrive later."""


@dataclass(slots=True)
class FrameReports:
    """The reports of frames of one query.

    Attributes:
        through_ms, gaps, reach, lost_states: the members of `QueryState` after the frames.
        touched: slices for which the frames have partials.
        closes: by slice and edge incarnation, the close with the most records.
        outdated: pairs of slice and edge incarnation for which values came after the close.
    """

    through_ms: dict[str, int]
    gaps: dict[str, tuple[int, int]]
    reach: dict[str, tuple[str, int]]
    lost_states: dict[str, tuple[int, int]]
    touched: set[int] = field(default_factory=set)
    closes: dict[int, dict[EdgeIncarnation, SliceClose]] = field(default_factory=dict)
    outdated: set[tuple[int, EdgeIncarnation]] = field(default_factory=set)

    @classmethod
    def of(cls, frames: Iterable[FrameSummary], state: QueryState) -> FrameReports:
        """Returns the members of a state after the reports of frames. The frames must ascend by position."""
        result = cls(dict(state.through_ms), dict(state.gaps), dict(state.reach), dict(state.lost_states))
        for frame in frames:
            result._add_progress(frame, state.final_through_ms)
            result._add_closes(frame)
        return result

    def _add_progress(self, frame: FrameSummary, final_through_ms: int) -> None:
        closed = self.through_ms.get(frame.edge, MIN_TIME_MS)
        if frame.since_ms is not None and frame.since_ms != self.gaps.get(frame.edge, (0, None))[1]:
            # The edge joined, or lost its state. It does not have the records between its last close and `since_ms`.
            gap_from, gap_to = self.gaps.get(frame.edge, (closed, MIN_TIME_MS))
            is_open = gap_to > final_through_ms  # windows that are not final lack the earlier records
            self.gaps[frame.edge] = min(gap_from, closed) if is_open else closed, frame.since_ms
        self.through_ms[frame.edge] = max(closed, frame.through_ms)
        incarnation, furthest = self.reach.get(frame.edge, (frame.incarnation, MIN_TIME_MS))
        if frame.incarnation != incarnation:
            # The lost incarnation may have sent records ahead of the clock. These records may be counted again.
            at_ms, until = self.lost_states.get(frame.edge, (0, MIN_TIME_MS))
            self.lost_states[frame.edge] = at_ms, max(until, furthest)
        added = (*frame.touched, *(c.slice_start_ms for c in frame.closes if c.observed))
        self.reach[frame.edge] = frame.incarnation, max((furthest, *added))

    def _add_closes(self, frame: FrameSummary) -> None:
        self.touched.update(frame.touched)
        origin = frame.edge, frame.incarnation
        self.outdated.update((start, origin) for start in frame.touched)
        for close in frame.closes:
            closes = self.closes.setdefault(close.slice_start_ms, {})
            self.outdated.discard((close.slice_start_ms, origin))
            if origin not in closes or _is_newer(close, closes[origin]):
                closes[origin] = close


def _is_newer(close: SliceClose, known: SliceClose) -> bool:
    """Returns whether a close may replace another one of the same edge and slice.

    Counters never decrease, and the last close of a slice follows its provisional closes. A frame that is applied after
    a quarantine may have an older close.
    """
    return (close.observed, not close.provisional) >= (known.observed, not known.provisional)


class ReportedSlices:
    """The slices of one query that have data or closes, and the late records of a transaction.

    Attributes:
        open: slices that belong to a window that is not final.
        sealed: slices of final windows.
        late: records, since `begin`, that are missing in answers to some windows.
    """

    def __init__(self, spec: QuerySpec) -> None:
        self._spec = spec
        self.open: StateTable[SliceState] = StateTable()
        self.sealed: StateTable[SealedSlice] = StateTable()
        self.late: dict[LateSlice, LateRecords] = {}
        self._open_starts: list[int] = []
        self._sealed_statements = 0

    def rebuild(self) -> None:
        """Computes the derived values again. Called when the tables have been filled."""
        self._open_starts = list(self.open)
        heapify(self._open_starts)
        self._sealed_statements = sum(len(s.observed) for _, s in self.sealed.items())

    def begin(self) -> None:
        """Begins a transaction."""
        self.late = {}
        self.open.begin()
        self.sealed.begin()

    def states(self, starts: Iterable[int]) -> list[SliceState]:
        """Returns the states of these slices. A slice without a state is left out."""
        return [state for start in starts if (state := self.open.get(start)) is not None]

    def has_data(self, start_ms: int) -> bool:
        """Returns whether an edge has reported records of a slice that is not sealed."""
        state = self.open.get(start_ms)
        return state is not None and state.has_data

    def counts(self, start_ms: int) -> tuple[int, int]:
        """Returns the number of records of a slice, and the number of late ones if the slice is not sealed."""
        state, sealed = self.open.get(start_ms), self.sealed.get(start_ms)
        if state is not None:
            return state.totals.observed, state.totals.late
        return (0 if sealed is None else sum(sealed.observed.values())), 0

    def edges_with_records(self, start_ms: int) -> set[str]:
        """Returns the edges whose closes of the slice count records."""
        state = self.open.get(start_ms)
        return {edge for (edge, _), close in state.closes.items() if close.observed} if state else set()

    def stated_by(self, slices: Sequence[int], through_ms: Mapping[str, int]) -> frozenset[str]:
        """Returns the edges that have closed all of these slices, at least provisionally.

        Args:
            slices: ascending.
            through_ms: by edge, the event time up to which the edge has closed slices. Such a slice needs no close.
        """
        stated = {start: state.provisional for start in slices if (state := self.open.get(start)) is not None}

        def states_all(edge: str) -> bool:
            closed = through_ms.get(edge, MIN_TIME_MS)
            unclosed = takewhile(lambda start: self._spec.window.slice_end(start) > closed, reversed(slices))
            return all(edge in stated.get(start, ()) for start in unclosed)

        return frozenset(filter(states_all, frozenset[str]().union(*stated.values())))

    def late_counts(self) -> tuple[int, int]:
        """Returns two numbers of records in `late`: records that came too late, and rejected or guessed records."""
        uncertain = sum(late.records for place, late in self.late.items() if reason_of(place.reason)[0] in UNCERTAIN)
        return sum(late.records for late in self.late.values()) - uncertain, uncertain

    def after_final(self) -> Counter[int]:
        """Returns, by slice, the number of records in `late` that closes added to final windows."""
        counts: Counter[int] = Counter()
        for place, late in self.late.items():
            if place.reason == AFTER_FINAL:
                counts[place.slice_start_ms] += late.records
        return counts

    def final_spans(self, final_through_ms: int) -> list[tuple[int, int]]:
        """Returns ranges of the starts of windows. The final windows in them may lack records of `late`.

        Args:
            final_through_ms: event time up to which windows are final.

        Returns:
            Disjoint ranges [from, to), ascending.
        """
        longest_ms, spans = self._spec.window.longest_ms, list[tuple[int, int]]()
        for start, end in sorted(
            (place.slice_start_ms, min(place.slice_end_ms, place.through_ms)) for place in self.late
        ):
            begin, end = start - longest_ms, min(end, final_through_ms)
            if start >= end:
                continue  # no final window overlaps the slice, or the slice is not known
            if spans and begin <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(spans[-1][1], end)
            else:
                spans.append((begin, end))
        return spans

    def add_dropped(self, frames: Iterable[FrameSummary]) -> None:
        """Counts late and rejected records, and records that edges counted or left out on a guess."""
        for frame in frames:
            for drop in frame.dropped:
                late = LateRecords.by(drop.records, drop.amounts)
                self._add_late(frame.edge, drop.slice_start_ms, MAX_TIME_MS, drop.kind, late, drop.until_ms)

    def apply(self, reports: FrameReports, sealed_before_ms: int, lost_through: Callable[[int], int]) -> list[int]:
        """Applies closes and partials.

        Args:
            sealed_before_ms: slices that start before this event time belong only to final windows.
            lost_through: by slice, the event time up to which the windows over the slice are final.

        Returns:
            The slices that changed and are not sealed, ascending.
        """
        self._forget_rests(reports)
        changed = []
        for start in sorted(reports.touched | reports.closes.keys()):
            closes = reports.closes.get(start, {})
            self._count_after_final(start, closes, lost_through(start))
            if start < sealed_before_ms:
                self._update_sealed(start, {o: c.observed for o, c in closes.items()})
            elif self._update_open(start, closes, start in reports.touched):
                changed.append(start)
        return changed

    def seal_before(self, before_ms: int) -> None:
        """Seals the slices that start before an event time."""
        while self._open_starts and self._open_starts[0] < before_ms:
            start = heappop(self._open_starts)
            state = self.open.drop(start)
            if state is not None:
                self._update_sealed(start, {o: c.observed for o, c in state.closes.items()})

    def _add_late(
        self, edge: EdgeId, start_ms: int, through_ms: int, reason: str, late: LateRecords, until_ms: int | None = None
    ) -> None:
        end_ms = self._spec.window.slice_end(start_ms) if start_ms > MIN_TIME_MS else MIN_TIME_MS
        end_ms = end_ms if until_ms is None else until_ms
        place = LateSlice(edge, start_ms, end_ms, through_ms, reason)
        self.late[place] = self.late[place].plus(late) if place in self.late else late

    def _forget_rests(self, reports: FrameReports) -> None:
        """Removes the rests from closes whose edge has sent values after the close, such as late records.

        The edge no longer withholds a part of the rest, so the rest is unknown until the edge closes the slice again.
        """
        for start, origin in sorted(reports.outdated):
            state, closes = self.open.get(start), reports.closes.setdefault(start, {})
            close = closes.get(origin) or (state.closes.get(origin) if state is not None else None)
            if close is not None and close.withheld:
                closes[origin] = replace(close, withheld=tuple(replace(w, rest=None) for w in close.withheld))

    def _count_after_final(self, start_ms: int, closes: Mapping[EdgeIncarnation, SliceClose], through_ms: int) -> None:
        """Counts the records that closes add to a slice if some window over it is final."""
        if through_ms == MIN_TIME_MS:
            return
        state, sealed = self.open.get(start_ms), self.sealed.get(start_ms)
        known = {o: c.observed for o, c in state.closes.items()} if state else dict(sealed.observed) if sealed else {}
        for origin, close in closes.items():
            if close.observed > known.get(origin, 0):
                records = close.observed - known.get(origin, 0)
                self._add_late(EdgeId(origin[0]), start_ms, through_ms, AFTER_FINAL, LateRecords(records))

    def _update_open(self, start_ms: int, closes: Mapping[EdgeIncarnation, SliceClose], touched: bool) -> bool:
        before = self.open.get(start_ms)
        known = before.closes if before else {}
        # A close that has no records and withholds nothing changes nothing, so it needs no new answer.
        nothing = SliceClose(start_ms, 0, 0)
        news = {o: c for o, c in closes.items() if c != (last := known.get(o, nothing)) and _is_newer(c, last)}
        if not news and not touched:
            return False
        if before is None:
            heappush(self._open_starts, start_ms)
        if news or before is None or not before.has_data:
            had_data = touched or (before is not None and before.has_data)
            self.open.put(start_ms, SliceState.of({**known, **news}, had_data, self._spec))
        return True

    def _update_sealed(self, start_ms: int, observed: Mapping[EdgeIncarnation, int]) -> None:
        before = self.sealed.get(start_ms)
        known = before.observed if before else {}
        news = {o: n for o, n in observed.items() if n > known.get(o, 0)}
        if not news:
            return
        if before is not None:
            self.sealed.drop(start_ms)  # `put` then makes it the slice that changed last
        self.sealed.put(start_ms, SealedSlice({**known, **news}))
        self._sealed_statements += len(news.keys() - known.keys())
        # An edge that joins late closes old slices again within its lateness. So the slices that have not changed for
        # the longest time are removed, not the slices with the earliest start.
        while self._sealed_statements > MAX_SEALED_STATEMENTS and len(self.sealed) > 1:
            oldest = self.sealed.drop(next(iter(self.sealed)))
            self._sealed_statements -= len(oldest.observed) if oldest else 0
