"""The results of a slicer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WindowResult:
    """An answer to a window: the first answer or a revision.

    Attributes:
        window_index: index of the window's family in the slicer.
        start, end: [start, end) of the window, in ms of event time; in ranks for a count window.
        revision: 1, 2, … per window. The answers in `replaces` count as earlier revisions.
        synopsis: a copy that belongs to the receiver. For an order-based synopsis, a `SliceManager` of the window's
            slices.
        records: number of records.
        first_ms, last_ms: event times of the first and the last record.
        replaces: (start, end) of answered sessions that no longer exist, because a late record has joined or moved
            them.
        cut: whether the session was cut at its maximum length and continues in the next session.
    """

    window_index: int
    start: int
    end: int
    revision: int
    synopsis: Any
    records: int
    first_ms: int
    last_ms: int
    replaces: tuple[tuple[int, int], ...] = ()
    cut: bool = False


@dataclass(frozen=True, slots=True)
class LateCounts:
    """The numbers of late records in a batch.

    Attributes:
        records: number of all records of the batch.
        late: number of accepted records behind the watermark. Answered windows with such records get a new revision.
        dropped: per family, number of records whose windows are all final.
    """

    records: int
    late: int
    dropped: tuple[int, ...]
