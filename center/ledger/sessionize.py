"""Computes session windows from the extents of slices. No I/O.

Slices are as wide as the gap (`edgewater.model.windows`). So all records of one slice belong to one session, and only
adjacent slices can share a session. Sessions are therefore a function of the slices' extents. They do not depend on
which edge reported an extent, in which order and how often.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edgewater.model.windows import Extent, SessionWindow, sessions_of


@dataclass(frozen=True, slots=True)
class ObservedSession:
    """A session. It consists of whole adjacent slices.

    Attributes:
        start_ms: event time of the first record. It identifies the session within the query.
        end_ms: a gap after the last record, or the cut.
        from_ms, to_ms: start of the first slice, and end of the last slice.
        cut: whether the session reached its maximum length and continues in the next session.
    """

    start_ms: int
    end_ms: int
    from_ms: int
    to_ms: int
    cut: bool = False

    def slices(self, window: SessionWindow) -> range:
        return range(self.from_ms, self.to_ms, window.gap_ms)


def connected_slices(slice_start_ms: int, extents: Mapping[int, Extent], window: SessionWindow) -> range:
    """Returns the starts of the slices that are connected to a slice by gaps between records shorter than the session
    gap.

    The function takes one step per slice of the result.
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
    """Yields the sessions of connected slices: one session, or several sessions if the maximum length cuts it.

    The cuts are counted from the beginning, so a final session that was cut does not change.
    """
    for slices, cut in sessions_of(connected, window, extents.__getitem__):
        border = slices[-1] + window.gap_ms
        end = border if cut else extents[slices[-1]][1] + window.gap_ms
        yield ObservedSession(extents[slices[0]][0], end, slices[0], border, cut)
