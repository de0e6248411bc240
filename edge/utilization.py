"""How busy the reading of sources is: of each, the part of time that it does not wait for input; and which have input
that has not been read.

A source that keeps up reads, decodes and ingests what has come and then waits for more; one that does not keep up
never waits. That tells an overloaded edge better than its processor time does: who shares the processor with it, and
how many cores there are, is in it. What a source waits for besides its input, such as room for what it has read or the
disk, is not time that a faster processor would save, and is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

REFUSED_S = 2.0
"""For so long what was pushed and not taken counts as input: its sender is told to come again after a second."""

Mark = Callable[[str], AbstractContextManager[None]]
"""Marks a time in what a source does, by its name."""


def unmarked(_: str) -> AbstractContextManager[None]:
    """Where nobody measures."""
    return nullcontext()


@dataclass(slots=True)
class _Source:
    """Attributes:
    depth: pieces of work under way, less waits; busy_s: in this interval; before_s: in the last one.
    began_s: when each piece of work that is under way began; the first is a source's own, pushes come behind it.
    idle: waits for input that are under way.
    drained_s: when it last waited for input, and so had read all there was.
    refused_s: when something that was pushed could last not be taken.
    """

    depth: int = 0
    began_s: dict[int, float] = field(default_factory=dict)
    idle: int = 0
    drained_s: float = -math.inf
    refused_s: float = -math.inf
    since_s: float = 0.0
    busy_s: float = 0.0
    before_s: float = 0.0

    def unread_s(self, now_s: float) -> float:
        """For how long there may have been input that has not been read."""
        if now_s - self.refused_s <= REFUSED_S:
            return math.inf
        pushed = list(self.began_s.values())[1:]
        if pushed:
            return now_s - min(pushed)  # they overlap, and each is read by itself
        return now_s - self.drained_s if self.began_s and not self.idle else 0.0


class BusyMeter:
    """The busy time of each source. One thread.

    Work of one source that overlaps, such as of two pushed requests, counts once.

    Args:
        monotonic: seconds that never go back.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._sources: dict[str, _Source] = {}
        self._began_s = self._before_s = monotonic()  # this interval, and the last one
        self._pieces = 0

    @contextmanager
    def working(self, source: str) -> Iterator[None]:
        """The source is being read, decoded or ingested meanwhile, but for its waits."""
        self._shift(source, +1)
        self._pieces += 1
        piece, began_s = self._pieces, self._sources[source].began_s
        began_s[piece] = self._monotonic()
        try:
            yield
        finally:
            del began_s[piece]
            self._shift(source, -1)

    @contextmanager
    def waiting(self, source: str) -> Iterator[None]:
        """Within a piece of work: all there is has been read, and it goes on when there is more."""
        with self.held(source):
            state = self._sources[source]
            state.idle += 1
            try:
                yield
            finally:
                state.idle -= 1
                state.drained_s = self._monotonic()

    @contextmanager
    def held(self, source: str) -> Iterator[None]:
        """Within a piece of work: it goes on when there is room, or a disk; there may be input."""
        self._shift(source, -1)
        try:
            yield
        finally:
            self._shift(source, +1)

    def refused(self, source: str) -> None:
        """Something that was pushed could not be taken: it will come again."""
        self._sources.setdefault(source, _Source()).refused_s = self._monotonic()

    def unread(self, longer_s: float) -> set[str]:
        """The sources that may have had input for longer than that which has not been read."""
        now_s = self._monotonic()
        return {name for name, source in self._sources.items() if source.unread_s(now_s) > longer_s}

    def take(self) -> float:
        """The share of the busiest source since the last call, 0 to 1; a new interval begins."""
        now_s = self._monotonic()
        share = self._largest(now_s - self._began_s, before=False)
        self._before_s, self._began_s = self._began_s, now_s
        for source in self._sources.values():
            source.before_s, source.busy_s = source.busy_s, 0.0
        return share

    @property
    def recent(self) -> float:
        """As `take`, of the last interval and the one that runs, which goes on."""
        return self._largest(self._monotonic() - self._before_s, before=True)

    def _largest(self, length_s: float, *, before: bool) -> float:
        if length_s <= 0:
            return 0.0
        for name in self._sources:
            self._shift(name, 0)
        busy_s = (s.busy_s + (s.before_s if before else 0.0) for s in self._sources.values())
        return min(max(busy_s, default=0.0) / length_s, 1.0)

    def _shift(self, name: str, by: int) -> None:
        source, now_s = self._sources.setdefault(name, _Source()), self._monotonic()
        if source.depth > 0:
            source.busy_s += now_s - source.since_s
        source.since_s = now_s
        source.depth += by
