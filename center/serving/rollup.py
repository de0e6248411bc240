"""Merges the answers of a query's windows into answers of longer intervals, such as hours or days (*roll-ups*).

The synopses are merged. So a rolled-up count is the count of all records. A rolled-up quantile or distinct count is the
same as in one window of this length. The quality unites the statements of the windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from center.ledger import ACCURACY, Violation, united_late_counts, with_violations
from center.results import AnswerRecord
from center.serving.totals import Rests
from center.serving.withheld import read_bounds, union_of_windows
from edgewater.model import time_functions
from edgewater.model.errors import InvalidRequest
from edgewater.model.quantities import duration_ms
from edgewater.model.query import QuerySpec
from edgewater.model.windows import (
    CALENDAR_UNITS,
    MAX_SLICES_PER_WINDOW,
    UTC,
    CalendarWindow,
    SlidingWindow,
    TimeWindow,
    TumblingWindow,
)
from edgewater.synopses import GroupedAggregate

EVERY_ACCEPTED = f"a duration such as 1h, or one of {', '.join(CALENDAR_UNITS)}"
UNANSWERED, PER_WINDOW = "unanswered-windows", "budget-per-window"
"""Codes of violations of roll-ups."""
MAX_LOSSES = 100
"""The number of stated losses that a rolled-up answer lists."""


@dataclass(frozen=True, slots=True)
class Interval:
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
        if not time_functions.is_zone(zone):
            raise InvalidRequest("zone", zone, "a time zone of the IANA database, such as Europe/Berlin")
        self._window, self._every = window, every
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

    def at(self, time_ms: int) -> Interval:
        """Returns the interval that contains a time.

        Raises InvalidRequest if windows of the query cross its borders.
        """
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
        return Interval(start, end, count)

    def select(self, interval: Interval, records: Iterable[AnswerRecord]) -> list[AnswerRecord]:
        """Returns the answers that cover an interval. Of sliding windows, it returns windows that do not overlap."""
        size = self._window.size_ms if isinstance(self._window, SlidingWindow) else 1
        return [
            r
            for r in records
            if (r.window_start_ms - interval.start_ms) % size == 0 and r.window_end_ms <= interval.end_ms
        ]


def roll_up(records: Iterable[AnswerRecord], spec: QuerySpec, intervals: Intervals) -> Iterator[AnswerRecord]:
    """Yields one answer per interval that has any answers; reads further records lazily.

    Args:
        records: the newest answers, ascending by start, with their synopses.

    Raises:
        InvalidRequest: the query's windows cross the borders of intervals, or its accuracy is about a function of a
            sample.
        SynopsisError: stored bytes cannot be read.
    """
    if spec.accuracy is not None and spec.accuracy.kind is None:
        raise InvalidRequest("every", spec.accuracy.measure, "no roll-up: functions of a sample do not merge")
    for interval, parts in groupby(records, lambda record: intervals.at(record.window_start_ms)):
        chosen = intervals.select(interval, parts)
        if chosen:
            yield _merged(chosen, spec, interval)


def _merged(records: Sequence[AnswerRecord], spec: QuerySpec, interval: Interval) -> AnswerRecord:
    synopses = [record.synopsis for record in records if record.synopsis is not None]
    return AnswerRecord(
        answer_id=max(record.answer_id for record in records),
        query=records[0].query,
        window_start_ms=interval.start_ms,
        window_end_ms=interval.end_ms,
        revision=sum(record.revision for record in records),
        phase=min((record.phase for record in records), key=lambda phase: phase.rank),
        answered_at_ms=max(record.answered_at_ms for record in records),
        staleness_ms=max(record.staleness_ms for record in records),
        quality=_united_quality([record.quality for record in records], spec, interval),
        synopsis=GroupedAggregate.merge_bytes(synopses) if synopses else None,
    )


def _united_quality(qualities: Sequence[dict[str, Any]], spec: QuerySpec, interval: Interval) -> dict[str, Any]:
    completeness = _united_completeness([quality["completeness"] for quality in qualities], interval)
    predicted = sum("prediction" in quality for quality in qualities)
    contract = _united_contract([quality["contract"] for quality in qualities])
    if predicted:
        reason = f"{predicted} of {len(qualities)} windows have a prediction, and predictions are merged without bounds"
        contract = with_violations(contract, [Violation(ACCURACY, reason)])
    if unanswered := completeness.get("unanswered"):
        reason = f"{unanswered} of {interval.windows} windows have no answer"
        contract = with_violations(contract, [Violation(UNANSWERED, reason)])
    if spec.budget is not None and interval.windows > 1:
        contract = with_violations(
            contract, [Violation(PER_WINDOW, "the budget is about each window, not about several")]
        )
    whole = not any(completeness.get(name) for name in ("missing", "left", "unanswered"))
    rests = [quality["rests"] for quality in qualities]
    united = None if any(rest is None for rest in rests) else Rests.of_windows(spec, [Rests.of(q) for q in qualities])
    result: dict[str, Any] = {
        "completeness": completeness,
        "records": _united_records([quality["records"] for quality in qualities], whole),
        "staleness_ms": max(quality["staleness_ms"] for quality in qualities),
        "first_staleness_ms": max(quality["first_staleness_ms"] for quality in qualities),
        "error": {
            "sampling": None if predicted else 0,
            "withheld": {
                name: bound.to_mapping()
                for name, bound in union_of_windows(
                    spec, [read_bounds(quality["error"]["withheld"]) for quality in qualities]
                ).items()
            },
            "missing": 0 if whole else None,
        },
        "contract": contract,
        "edges": {},
        "rests": None if united is None else united.to_mapping(),
    }
    if predicted:
        result["prediction"] = {}  # no measure is predicted: the merged values have no bounds
    return result


def _united_completeness(parts: Sequence[dict[str, Any]], interval: Interval) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ratio": sum(part["ratio"] for part in parts) / interval.windows,
        "expected": max(part["expected"] for part in parts),
        "reported": min(part["reported"] for part in parts),
        "missing": _united_names(parts, "missing"),
        "windows": interval.windows,
    }
    if unanswered := interval.windows - len(parts):
        result["unanswered"] = unanswered
    for name in ("lost_state", "left"):
        if edges := _united_names(parts, name):
            result[name] = edges
    result |= united_late_counts(parts)
    delivery = {edge: promise for part in parts for edge, promise in part.get("delivery", {}).items()}
    if delivery:
        result["delivery"] = delivery
    losses = [loss for part in parts for loss in part.get("losses", ())]
    distinct = list({tuple(sorted(loss.items(), key=str)): loss for loss in losses}.values())
    if distinct:
        result["losses"] = distinct[:MAX_LOSSES]
    return result


def _united_names(parts: Sequence[dict[str, Any]], name: str) -> list[str]:
    return sorted({edge for part in parts for edge in part.get(name, ())})


def _united_records(parts: Sequence[dict[str, Any]], whole: bool) -> dict[str, Any]:
    result = {}
    for name in parts[0]:
        each = [part[name] for part in parts]
        result[name] = None if any(n is None for n in each) else sum(each)
    return result if whole else {**result, "expected": None}


def _united_contract(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the contract of a roll-up. It is met if each window has met its contract."""
    by_code: dict[str, list[str]] = {}
    for part in parts:
        for violation in part["violations"]:
            by_code.setdefault(violation["code"], []).append(violation["message"])
    violations = [
        {"code": code, "message": f"{len(messages)} of {len(parts)} windows: {messages[0]}"}
        for code, messages in by_code.items()
    ]
    return {"requested": parts[-1]["requested"], "met": all(part["met"] for part in parts), "violations": violations}
