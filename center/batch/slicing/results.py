"""The results of a slicer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WindowResult:
    """An answer to a window, the first or a revision.

    Attributes:
        window_index: index of the window's family in the slicer.
        start, end: [start, end) of the window: ms of event time, or ranks for a count window.
        revision: 1, 2, … per window; answers that it replaces count as earlier revisions.
        synopsis: a copy that the receiver owns; of an order-based synopsis, a `SliceManager` of its slices.
        records: number of records.
        first_ms, last_ms: event times of the first and the last record.
        replaces: (start, end) of answered windows that no longer exist: sessions that a late record has joined or
            moved.
        cut: the session was cut at its maximum length and continues in the next one.
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
        records: all records of the batch.
        late: records behind the watermark that were accepted; answered windows get a new revision.
        dropped: per family, records whose windows are all final.
    """

    records: int
    late: int
    dropped: tuple[int, ...]
