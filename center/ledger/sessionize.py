"""Session windows from the extents of slices. Pure.

Slices are as wide as the gap (`edgewater.model.windows`). So all records of one slice belong to one session, and only
neighbouring slices can share a session. Sessions are therefore a function of the slices' extents. They do not depend on
which edge reported an extent, in which order and how often.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edgewater.model.windows import Extent, SessionWindow, sessions_of


@dataclass(frozen=True, slots=True)
class ObservedSession:
    """A session, which consists of whole neighbouring slices.

    Attributes:
        start_ms: event time of the first record; identifies the session within the query.
        end_ms: a gap after the last record, or the cut.
        from_ms, to_ms: start of the first slice and end of the last one.
        cut: the session reached its maximum length and continues in the next one.
    """

    start_ms: int
    end_ms: int
    from_ms: int
    to_ms: int
    cut: bool = False

    def slices(self, window: SessionWindow) -> range:
        return range(self.from_ms, self.to_ms, window.gap_ms)


def connected_slices(slice_start_ms: int, extents: Mapping[int, Extent], window: SessionWindow) -> range:
    """Starts of the slices that are connected to a slice with records by gaps shorter than the session gap.

    Takes one step per slice of the result.
    """
    gap = window.gap_ms
    first = last = slice_start_ms
    while first - gap in extents and extents[first][0] - extents[first - gap][1] < gap:
        first -= gap
    while last + gap in extents and extents[last + gap][0] - extents[last][1] < gap:
        last += gap
    return range(first, last + gap, gap)


def session_windows(
    connected: range, extents: Mapping[int, Extent], window: SessionWindow
) -> Iterator[ObservedSession]:
    """Yields the sessions of connected slices: one session, or several if the maximum length cuts it.

    It cuts from the beginning on, so a final session that was cut does not change.
    """
    for slices, cut in sessions_of(connected, window, extents.__getitem__):
        border = slices[-1] + window.gap_ms
        end = border if cut else extents[slices[-1]][1] + window.gap_ms
        yield ObservedSession(extents[slices[0]][0], end, slices[0], border, cut)
