"""Late records: the records that came when their windows were final, that sources rejected, or that edges
guessed about; per edge, and per slice.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Connection, Row, delete, func, insert, select

from center.ledger import AT_ONCE_MS, QueryChanges
from center.results import schema as t
from center.storage.database import MAX_ADDED, upsert
from edgewater.answers import NO_LATE, LateRecords
from edgewater.answers.uniting import MAX_DEVICES
from edgewater.base.errors import StorageError
from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.registered_query import query_key
from edgewater.wire import reason_of

MAX_RANGES = 32
"""Maximum ranges of slices with the same start by which rejected records are counted, over all reasons."""
_VALUES = TypeAdapter(dict[str, tuple[int, list[tuple[str, float, float, float | None]]]])
_Ranges = dict[tuple[int, int, str], LateRecords]
"""By end, time through which windows lack the records, and reason: late records of slices with one start."""
_CHUNK = 200  # limit: bound parameters of a statement
"""Starts of slices in one statement: fewer than the bound parameters that any database accepts."""


def add_late_records(connection: Connection, changes: QueryChanges) -> None:
    """Adds the late records of a transaction. The final windows that may lack them wait for a correction.

    Slices are counted if their windows have an answer in the store or may still get one. At their edges such windows
    were final earlier than at the center, which waits for all edges.
    """
    key, late, open_from_ms = query_key(changes.ref), changes.late, changes.open_from_ms
    totals: dict[tuple[str, str], int] = {}
    slices: dict[int, _Ranges] = {}
    first = connection.execute(select(func.min(t.answers.c.window_start_ms)).where(t.answers.c.query == key)).scalar()
    for place, each in late.items():
        reason, _ = reason_of(place.reason)
        totals[place.edge, reason] = totals.get((place.edge, reason), 0) + each.records
        if place.slice_end_ms > min(open_from_ms, MIN_TIME_MS if first is None else first):
            counts = slices.setdefault(place.slice_start_ms, {})
            kind = (place.slice_end_ms, place.through_ms, place.reason)
            counts[kind] = counts.get(kind, NO_LATE).plus(each)
    rows = [
        {"query": key, "edge": edge, "reason": reason, "records": min(n, MAX_ADDED)}
        for (edge, reason), n in totals.items()
    ]
    upsert(connection, t.late_records, rows, added=["records"])
    starts, spans = list(slices), list(changes.final_spans)
    for at in range(0, len(starts), _CHUNK):
        spans += _add_late_slices(connection, key, {start: slices[start] for start in starts[at : at + _CHUNK]})
    await_corrections(connection, key, spans)


def await_corrections(
    connection: Connection, key: str, spans: Iterable[tuple[int, int]], due_ms: int = AT_ONCE_MS
) -> None:
    """Lets the windows that start in these ranges wait for a correction."""
    rows = [{"query": key, "from_ms": begin, "to_ms": end, "due_ms": due_ms} for begin, end in spans]
    upsert(connection, t.corrections, rows)


def _add_late_slices(connection: Connection, key: str, slices: Mapping[int, _Ranges]) -> list[tuple[int, int]]:
    """Returns the ranges of slices that count records of shorter ranges from now on."""
    c = t.late_slices.c
    these = (c.query == key) & c.slice_start_ms.in_(slices)
    for row in connection.execute(select(t.late_slices).where(these)).all():
        counts, at = slices[row.slice_start_ms], (row.slice_end_ms, row.through_ms, _kind_of(row))
        counts[at] = counts.get(at, NO_LATE).plus(_late_of(row.records, row.amounts))
    connection.execute(delete(t.late_slices).where(these))
    rows = [
        _row(key, start, at, number, late)
        for start, counts in slices.items()
        for number, (at, late) in enumerate(_few_ranges(counts).items())
    ]
    connection.execute(insert(t.late_slices), rows)
    crowded = {start: counts for start, counts in slices.items() if len(counts) > MAX_RANGES}
    return [(start, max(end for end, *_ in counts)) for start, counts in crowded.items()]


def _row(key: str, start_ms: int, at: tuple[int, int, str], number: int, late: LateRecords) -> dict[str, str | int]:
    """Returns a row of the late records of a slice.

    Args:
        number: distinguishes the rows of the slice.
    """
    end_ms, through_ms, kind = at
    reason, only = reason_of(kind)
    return {
        "query": key,
        "slice_start_ms": start_ms,
        "slice_end_ms": end_ms,
        "through_ms": through_ms,
        "reason": f"{reason}{{{number}" if only else reason,
        "records": min(late.records, MAX_ADDED),
        "amounts": _amounts_of(late),
        "only": only,
    }


def _kind_of(row: Row[Any]) -> str:
    reason, _ = reason_of(row.reason)
    return f"{reason}{row.only}"


def _few_ranges(counts: _Ranges) -> _Ranges:
    """Returns the counts of ranges that start with one slice.

    If there are too many ranges, the ranges of one reason are united to the longest range, and to all groups.
    """
    if len(counts) <= MAX_RANGES:
        return counts
    longest: dict[tuple[int, str], int] = {}
    for end, through, kind in counts:
        reason, _ = reason_of(kind)
        longest[through, reason] = max(end, longest.get((through, reason), end))
    united: _Ranges = {}
    for (_, through, kind), late in counts.items():
        reason, _ = reason_of(kind)
        key = longest[through, reason], through, reason
        united[key] = united.get(key, NO_LATE).plus(late)
    return united


def _amounts_of(late: LateRecords) -> str:
    _, amounts = late.to_state()
    return json.dumps(amounts) if amounts else ""


def _late_of(records: int, amounts: str) -> LateRecords:
    return LateRecords.from_state((records, json.loads(amounts) if amounts else ()))


def late_by_window(
    connection: Connection, key: str, windows: Iterable[tuple[int, int]]
) -> dict[int, dict[str, LateRecords]]:
    """Returns, by window start and `DroppedRecords.kind`, the records that came after the window was final, or were
    rejected.

    Windows without such records are absent.

    Args:
        windows: start and end of each window.
    """
    windows, c = list(windows), t.late_slices.c
    span = (c.slice_end_ms > min(w[0] for w in windows)) & (c.slice_start_ms < max(w[1] for w in windows))
    # Rows by the next power of two above their length. Of each class, only rows that start shortly before a window
    # overlap it.
    classes: dict[int, list[Row[Any]]] = {}
    for row in connection.execute(select(t.late_slices).where(c.query == key, span).order_by(c.slice_start_ms)):
        classes.setdefault((row.slice_end_ms - row.slice_start_ms).bit_length(), []).append(row)
    by_window: dict[int, dict[str, LateRecords]] = {}
    for start, end in windows if classes else ():
        for bits, rows in classes.items():
            first = bisect_left(rows, start - (1 << bits), key=lambda row: row.slice_start_ms)
            for at in range(first, len(rows)):
                row = rows[at]
                if row.slice_start_ms >= end:
                    break
                if row.slice_end_ms > start and end <= row.through_ms:
                    counts = by_window.setdefault(start, {})
                    late = _late_of(row.records, row.amounts)
                    kind = _kind_of(row)
                    counts[kind] = counts.get(kind, NO_LATE).plus(late)
    return {start: _few_kinds(counts) for start, counts in by_window.items()}


def _few_kinds(counts: dict[str, LateRecords]) -> dict[str, LateRecords]:
    """Returns the late records of a window. If there are too many kinds, the kinds of one reason become one."""
    if len(counts) <= MAX_DEVICES:
        return counts
    united: dict[str, LateRecords] = {}
    for kind, late in counts.items():
        reason, _ = reason_of(kind)
        united[reason] = united.get(reason, NO_LATE).plus(late)
    return united


def late_to_json(late: Mapping[str, LateRecords]) -> str:
    """Returns late records by reason as they are stored beside an answer."""
    values = {reason: each.to_state() for reason, each in late.items()}
    return json.dumps(values, sort_keys=True, separators=(",", ":")) if values else ""


def late_from_json(text: str) -> dict[str, LateRecords]:
    """Reads the output of `late_to_json`. Raises StorageError if it is damaged."""
    try:
        values = _VALUES.validate_json(text) if text else {}
    except ValidationError as exc:
        raise StorageError("the late records of an answer cannot be read") from exc
    return {reason: LateRecords.from_state(value) for reason, value in values.items()}
