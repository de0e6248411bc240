"""What a slicer gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WindowResult:
    """The answer to one window, or a new one to a window that was answered before.

    Attributes:
        window_index: which of the slicer's families it belongs to.
        start, end: of the window, [start, end): ms of event time, ranks for a count window.
        revision: 1, 2, … for this window; what it replaces counts as its earlier revisions.
        synopsis: a copy of the receiver's own: a `SliceManager` of its slices if it is order-based.
        records: how many are in it.
        first_ms, last_ms: event times of its first and its last record.
        replaces: (start, end) of windows answered before that this one is now instead of: sessions that a
            late record has joined or moved. They exist no more.
        cut: a session that its greatest length ends; the next one goes on where it does.
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
    """What became of a batch.

    Attributes:
        records: of the batch.
        late: taken although the watermark had passed them; windows answered already get a new revision.
        dropped: per family, records of which no window is still open to change.
    """

    records: int
    late: int
    dropped: tuple[int, ...]
