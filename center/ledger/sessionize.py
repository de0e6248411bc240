"""Where sessions begin and end, from where the records of each slice begin and end. Pure.

With slices as wide as the gap, records of one slice are in one session, and only neighbouring slices can
share one (`edgewater.windows`). So sessions are a function of the slices' extents alone: it makes no
difference which edge said what, in which order, or how often.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from edgewater.windows import Session

Extent = tuple[int, int]
"""Event times of the first and the last record of a slice, at all edges together."""


@dataclass(frozen=True, slots=True)
class Run:
    """A session: whole neighbouring slices.

    Attributes:
        start_ms: its first record; together with the query it names the session.
        end_ms: a gap behind its last record, or where it was cut.
        from_ms, to_ms: its slices, the first one's start and the last one's end.
        cut: it goes on behind its end, and only its greatest length ends it there.
    """

    start_ms: int
    end_ms: int
    from_ms: int
    to_ms: int
    cut: bool = False

    def slices(self, window: Session) -> range:
        return range(self.from_ms, self.to_ms, window.gap_ms)


def run_around(slice_start_ms: int, extents: Mapping[int, Extent], window: Session) -> range:
    """The slices that hang together with one that has records, however long that becomes.

    Takes a step per slice.
    """
    gap = window.gap_ms
    first = last = slice_start_ms
    while first - gap in extents and extents[first][0] - extents[first - gap][1] < gap:
        first -= gap
    while last + gap in extents and extents[last + gap][0] - extents[last][1] < gap:
        last += gap
    return range(first, last + gap, gap)


def sessions_of(run: Sequence[int], extents: Mapping[int, Extent], window: Session) -> Iterator[Run]:
    """The sessions of slices that hang together: one, or as many as its length asks for.

    It is cut from its beginning on, so what has been cut off and is final stays as it is.
    """
    most = window.slices_per_window
    for at in range(0, len(run), most):
        piece = run[at : at + most]
        border = piece[-1] + window.gap_ms
        cut = at + most < len(run)
        end = border if cut else extents[piece[-1]][1] + window.gap_ms
        yield Run(extents[piece[0]][0], end, piece[0], border, cut)
