"""Merges the answers of a query's windows into answers of longer intervals, such as hours or days (*roll-ups*).

The synopses are merged. So a rolled-up count is the count of all records. A rolled-up quantile or distinct count is the
same as in one window of this length. The facts of the windows are united, and each window's contract is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from center.results import AnswerRecord, as_far_as_readable
from center.serving.render import statement_of
from edgewater.answers.statement import Violation, united_contract, violations_of_facts
from edgewater.answers.uniting import united
from edgewater.base.errors import InvalidRequest
from edgewater.base.quantities import duration_ms
from edgewater.model.calendar_units import CALENDAR_UNITS, UTC
from edgewater.model.calendars import is_zone
from edgewater.model.query import QuerySpec
from edgewater.model.windows import MAX_SLICES_PER_WINDOW, CalendarWindow, SlidingWindow, TimeWindow, TumblingWindow
from edgewater.synopses import GroupedAggregate

CHUNK_WINDOWS, CHUNK_BYTES = 1_000, 16 << 20  # limit: memory of a roll-up
"""The answers that are merged at once. An interval may have any number of windows."""
EVERY_ACCEPTED = f"a duration such as 1h, or one of {', '.join(CALENDAR_UNITS)}"


@dataclass(frozen=True, slots=True)
class RollupInterval:
    """Event times [start_ms, end_ms) whose windows are merged.

    Attributes:
        windows: number of windows that cover the interval without an overlap.
    """

    start_ms: int
    end_ms: int
    windows: int


class Intervals:
    """The intervals of a roll-up.

    Args:
        window: the windows of the query.
        every: a duration, or a unit of `CALENDAR_UNITS`.
        zone: of calendar units.

    Raises:
        InvalidRequest: the windows are sessions, or `every` or `zone` is not valid.
    """

    def __init__(self, window: object, every: str, zone: str = UTC) -> None:
        if not isinstance(window, TimeWindow):
            raise InvalidRequest("every", every, "no roll-up: session windows have no common borders")
        if not is_zone(zone):
            raise InvalidRequest("zone", zone, "a time zone of the IANA database, such as Europe/Berlin")
        self._window, self._every = window, every
        self._last = RollupInterval(0, 0, 0)
        self._intervals = CalendarWindow(every, zone) if every in CALENDAR_UNITS else self._of_length(window, every)

    def _of_length(self, window: TimeWindow, every: str) -> SlidingWindow:
        try:
            length_ms = duration_ms(every, "every", InvalidRequest, minimum_ms=1)
        except InvalidRequest as exc:
            raise InvalidRequest("every", every, EVERY_ACCEPTED) from exc
        if not isinstance(window, SlidingWindow) or length_ms % window.size_ms:
            raise self._misfit()
        return TumblingWindow(length_ms, window.offset_ms)

    def _misfit(self) -> InvalidRequest:
        size = next(text for key, text in self._window.to_mapping().items() if key in ("tumbling", "sliding"))
        accepted = f"intervals that begin and end with a window; the windows take {size}"
        return InvalidRequest("every", self._every, accepted)

    def at(self, time_ms: int) -> RollupInterval:
        """Returns the interval that contains a time.

        Raises InvalidRequest if windows of the query cross its borders.
        """
        if not self._last.start_ms <= time_ms < self._last.end_ms:
            self._last = self._containing(time_ms)
        return self._last

    def _containing(self, time_ms: int) -> RollupInterval:
        window, start = self._window, self._intervals.slice_start(time_ms)
        end = self._intervals.end(start)
        if isinstance(window, SlidingWindow):
            fits = (start - window.offset_ms) % window.every_ms == 0 == (end - start) % window.size_ms
            count = (end - start) // window.size_ms
        else:
            fits = window.slice_start(start) == start and window.slice_start(end) == end
            count = sum(1 for _ in window.starts(start, end, MAX_SLICES_PER_WINDOW))
        if not fits:
            raise self._misfit()
        return RollupInterval(start, end, count)

    def windows(self, interval: RollupInterval) -> Iterator[tuple[int, int]]:
        """Yields start and end of the windows that cover an interval without an overlap."""
        window, start = self._window, interval.start_ms
        while start < interval.end_ms:
            end = window.end(start)
            yield start, end
            start = end

    def select(self, interval: RollupInterval, records: Iterable[AnswerRecord]) -> Iterator[AnswerRecord]:
        """Yields the answers that cover an interval. Of sliding windows, it yields windows that do not overlap."""
        size = self._window.size_ms if isinstance(self._window, SlidingWindow) else 1
        for r in records:
            if (r.window_start_ms - interval.start_ms) % size == 0 and r.window_end_ms <= interval.end_ms:
                yield r


def roll_up(
    records: Iterable[AnswerRecord],
    spec: QuerySpec,
    intervals: Intervals,
    empty: Callable[[Sequence[tuple[int, int]]], Collection[tuple[int, int]]] = lambda windows: (),
) -> Iterator[AnswerRecord]:
    """Yields one answer per interval that has any answers; reads further records lazily.

    An interval of one window has the answer of the window.

    Args:
        records: the newest answers, ascending by start, with their synopses.
        empty: returns which windows have no answer because they are empty (`AnswerReader.empty_windows`).

    Raises:
        InvalidRequest: the query's windows cross the borders of intervals, or its accuracy is about a function of a
            sample.
    """
    if spec.accuracy is not None and spec.accuracy.kind is None:
        raise InvalidRequest("every", spec.accuracy.measure, "no roll-up: functions of a sample do not merge")
    for interval, parts in groupby(records, lambda record: intervals.at(record.window_start_ms)):
        chosen = intervals.select(interval, parts)
        if interval.windows == 1:
            yield from (replace(record, facts=united([record.facts], spec)) for record in chosen)
            continue
        union = _Union(spec)
        for chunk in _chunks(chosen):
            union.add(chunk)
        if union.starts:
            lacking: list[tuple[int, int]] = []
            if len(union.starts) < interval.windows:
                lacking = [window for window in intervals.windows(interval) if window[0] not in union.starts]
            yield union.answer(interval, len(empty(lacking)))


def _chunks(records: Iterable[AnswerRecord]) -> Iterator[list[AnswerRecord]]:
    """Yields the records in parts of at most `CHUNK_WINDOWS` answers and about `CHUNK_BYTES` of synopses."""
    chunk, size = list[AnswerRecord](), 0
    for record in records:
        chunk.append(record)
        size += len(record.synopsis or b"")
        if len(chunk) >= CHUNK_WINDOWS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Union:
    """The union of the windows of one interval, as far as they have been read."""

    def __init__(self, spec: QuerySpec) -> None:
        self._spec = spec
        self._answer: AnswerRecord | None = None
        self._violated: dict[str, tuple[int, str]] = {}
        self.starts: set[int] = set()

    def add(self, records: Sequence[AnswerRecord]) -> None:
        """Adds answers to further windows. An answer whose data cannot be merged costs only itself."""
        known = [] if self._answer is None else [self._answer]
        try:
            merged = _merged([*known, *records])
        except Exception:  # reading them one by one finds the answers, and their errors
            records = [as_far_as_readable(_checked, record) for record in records]
            merged = _merged([*known, *records])
        parts = [*known, *records]
        for record in records:
            self.starts.add(record.window_start_ms)
            violations = as_far_as_readable(partial(_violations, spec=self._spec), record)
            for code, message in {violation.code: violation.message for violation in reversed(violations)}.items():
                count, first = self._violated.get(code, (0, message))
                self._violated[code] = count + 1, first
        self._answer = replace(
            parts[0],
            answer_id=max(part.answer_id for part in parts),
            revision=sum(part.revision for part in parts),
            phase=min((part.phase for part in parts), key=lambda phase: phase.rank),
            answered_at_ms=max(part.answered_at_ms for part in parts),
            staleness_ms=max(part.staleness_ms for part in parts),
            facts=united([part.facts for part in parts], self._spec),
            synopsis=merged,
            data_of=0,
        )

    def answer(self, interval: RollupInterval, empty: int) -> AnswerRecord:
        """Returns the answer to the interval.

        Args:
            empty: number of its windows that have no answer because they are empty.
        """
        assert self._answer is not None, "called after `add`"
        windows = len(self.starts)
        unanswered = interval.windows - windows - empty
        facts = united([self._answer.facts], self._spec, empty=empty, unanswered=unanswered)
        contract = united_contract(facts, self._violated, windows, self._spec)
        begin, end = interval.start_ms, interval.end_ms
        return replace(self._answer, window_start_ms=begin, window_end_ms=end, facts=facts, of_windows=contract)


def _merged(records: Sequence[AnswerRecord]) -> bytes | None:
    synopses = [record.synopsis for record in records if record.synopsis is not None]
    return GroupedAggregate.merge_bytes(synopses) if synopses else None


def _checked(record: AnswerRecord) -> AnswerRecord:
    _merged([record])
    return record


def _violations(record: AnswerRecord, spec: QuerySpec) -> Sequence[Violation]:
    """Returns what one window violates. Its values are evaluated only if they may decide it."""
    if spec.accuracy is not None or (spec.error_budget is not None and record.facts.withheld):
        return statement_of(record, spec).contract.violations
    return violations_of_facts(record.facts, spec)
