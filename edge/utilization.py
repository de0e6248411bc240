"""Measures the fraction of time in which each source is busy, and detects sources with unread input.

At any moment a source is busy (it reads, decodes or ingests), idle (it has read all input and waits for more) or
backpressured (it waits for memory or the disk). A source that keeps up is regularly idle. An overloaded source is never
idle. The busy share detects an overloaded edge better than CPU time, because it also reflects other processes on the
machine and the number of cores. Backpressured time does not count as busy, because a faster processor would not shorten
it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from edgewater.wire import QueryRef

LOOK_S = 2.0  # limit: how late a source that has become busy is noticed
"""A source that waits for input had nothing to read until this time ago, in seconds: earlier input would have ended its
wait.
"""
REFUSED_S = 2.0  # limit: how long a refused client counts as input
"""A refused push counts as unread input for this long, in seconds, because its sender repeats it after one second."""

RECENT_RECORDS = 1 << 20  # limit: how old the measured costs are
"""The cost of a query is the mean over about this many of its last records."""

ActivityMarker = Callable[[str], AbstractContextManager[None]]
"""Takes the name of a source, and returns a context manager around one activity of the source."""


def _current_task() -> asyncio.Task[Any] | None:
    with suppress(RuntimeError):  # there is no event loop
        return asyncio.current_task()
    return None


def no_marker(_: str) -> AbstractContextManager[None]:
    """An `ActivityMarker` that measures nothing."""
    return nullcontext()


@dataclass(slots=True)
class _SourceActivity:
    """The activity of one source. All times are seconds of the monotonic clock.

    Attributes:
        depth: number of busy sections in progress minus the number of waits. The source is busy while it is above 0.
        began_s: start of each busy section in progress, by section number. The first section is the source's own read
            loop; the others are pushed requests.
        idle: number of waits for input in progress.
        waiter: the task that waits for input; None if there is none.
        drained_s: end of the last wait for input. All input had been read then.
        empty_s: start of the last wait for input. The source had nothing to read then.
        refused_s: time of the last refused push.
        since_s: time of the last change of `depth`.
        busy_s: busy time in the current interval.
        before_s: busy time in the previous interval.
    """

    depth: int = 0
    began_s: dict[int, float] = field(default_factory=dict)
    idle: int = 0
    waiter: asyncio.Task[Any] | None = None
    drained_s: float = -math.inf
    empty_s: float = -math.inf
    refused_s: float = -math.inf
    since_s: float = 0.0
    busy_s: float = 0.0
    before_s: float = 0.0

    def unread_s(self, now_s: float) -> float:
        """Returns for how many seconds the source may have had unread input."""
        if now_s - self.refused_s <= REFUSED_S:
            return math.inf
        pushed = list(self.began_s.values())[1:]
        if pushed:
            return now_s - min(pushed)  # requests may overlap, so the oldest one counts
        return now_s - self.drained_s if self.began_s and not self.idle else 0.0

    def last_empty_s(self, now_s: float, sleeps: bool) -> float:
        """Returns the last time at which the source had nothing to read, in seconds of the monotonic clock. Returns
        -infinity if the source has always had input, or if a push was refused within the last `REFUSED_S` seconds.

        Args:
            sleeps: whether the source does not see its input before its wait ends.
        """
        if now_s - self.refused_s <= REFUSED_S:
            return -math.inf
        empty_s = max(self.empty_s, now_s - LOOK_S) if self.idle and not sleeps else self.empty_s
        return min([empty_s, *list(self.began_s.values())[1:]])


class BusyMeter:
    """Measures the busy time of each source. Not thread-safe.

    Overlapping busy sections of one source, such as two pushed requests, count once.

    Args:
        monotonic: returns the seconds of a monotonic clock.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._sources: dict[str, _SourceActivity] = {}
        self._began_s = self._before_s = monotonic()  # start of the current interval, and of the previous one
        self._sections = 0
        self._asleep: set[asyncio.Task[Any] | None] = set()

    async def sleep(self, seconds: float) -> None:
        """Sleeps. A source that sleeps while it is marked as idle does not see its input before it wakes up."""
        task = asyncio.current_task()
        self._asleep.add(task)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._asleep.discard(task)

    @contextmanager
    def busy(self, source: str) -> Iterator[None]:
        """Marks a section in which the source is read, decoded or ingested."""
        self._shift(source, +1)
        self._sections += 1
        section, began_s = self._sections, self._sources[source].began_s
        began_s[section] = self._monotonic()
        try:
            yield
        finally:
            del began_s[section]
            self._shift(source, -1)

    @contextmanager
    def idle(self, source: str) -> Iterator[None]:
        """Marks a wait for input inside a busy section. All input has been read when the wait begins.

        If input ends the wait, the wait may be long: the idle rule counts from `LOOK_S` ago, so a source need not renew
        its mark. A source that polls for input calls `sleep` instead, and the idle rule counts from the begin.
        """
        with self.backpressured(source):
            state = self._sources[source]
            state.idle += 1
            state.empty_s, state.waiter = self._monotonic(), _current_task()
            try:
                yield
            finally:
                state.idle -= 1
                state.drained_s = self._monotonic()

    @contextmanager
    def backpressured(self, source: str) -> Iterator[None]:
        """Marks a wait for memory or the disk inside a busy section. There may be unread input."""
        self._shift(source, -1)
        try:
            yield
        finally:
            self._shift(source, +1)

    def on_refused(self, source: str) -> None:
        """Records that a push to the source was refused. Its sender will repeat it."""
        self._sources.setdefault(source, _SourceActivity()).refused_s = self._monotonic()

    def unread_sources(self, longer_s: float) -> set[str]:
        """Returns the sources that may have had unread input for longer than `longer_s`."""
        now_s = self._monotonic()
        return {name for name, source in self._sources.items() if source.unread_s(now_s) > longer_s}

    def empty_for_s(self, source: str) -> float:
        """Returns the seconds since the source last had nothing to read; infinity if it has never been empty."""
        state = self._sources.get(source)
        now_s = self._monotonic()
        return math.inf if state is None else now_s - state.last_empty_s(now_s, state.waiter in self._asleep)

    def busy_for_s(self, source: str) -> float:
        """Returns for how many seconds a source has been read without a wait for input."""
        state = self._sources.get(source)
        if state is None or state.idle or not state.began_s:
            return 0.0
        return self._monotonic() - max(state.drained_s, min(state.began_s.values()))

    def take_busy_share(self) -> float:
        """Returns the busy share of the busiest source since the last call, 0 to 1. Begins a new interval."""
        now_s = self._monotonic()
        share = self._largest(now_s - self._began_s, before=False)
        self._before_s, self._began_s = self._began_s, now_s
        for source in self._sources.values():
            source.before_s, source.busy_s = source.busy_s, 0.0
        return share

    @property
    def recent_busy_share(self) -> float:
        """The busy share of the busiest source over the previous and the current interval, 0 to 1."""
        return self._largest(self._monotonic() - self._before_s, before=True)

    def _largest(self, length_s: float, *, before: bool) -> float:
        if length_s <= 0:
            return 0.0
        for name in self._sources:
            self._shift(name, 0)
        busy_s = (s.busy_s + (s.before_s if before else 0.0) for s in self._sources.values())
        return min(max(busy_s, default=0.0) / length_s, 1.0)

    def _shift(self, name: str, by: int) -> None:
        source, now_s = self._sources.setdefault(name, _SourceActivity()), self._monotonic()
        if source.depth > 0:
            source.busy_s += now_s - source.since_s
        source.since_s = now_s
        source.depth += by


class QueryCosts:
    """Measures the CPU time that each query takes per record, as the core's `CostMeter`.

    Args:
        cpu_s: returns the CPU time of the event loop's thread in seconds, so that other processes change no cost.
    """

    def __init__(self, cpu_s: Callable[[], float]) -> None:
        self._cpu_s, self._began_s = cpu_s, 0.0
        self._sums: dict[QueryRef, tuple[float, float]] = {}

    def begin(self) -> None:
        """Starts a measurement (see `CostMeter.begin`)."""
        self._began_s = self._cpu_s()

    def end(self, query: QueryRef, records: int) -> None:
        """Ends the measurement of one query (see `CostMeter.end`)."""
        now_s = self._cpu_s()
        count, spent_s = self._sums.get(query, (0.0, 0.0))
        kept = 0.5 if count > RECENT_RECORDS else 1.0
        self._sums[query] = kept * count + records, kept * spent_s + now_s - self._began_s
        self._began_s = now_s

    def record_s(self, queries: Collection[QueryRef]) -> dict[QueryRef, float]:
        """Returns the mean CPU time per record, in seconds, of the running queries that have processed records.

        Args:
            queries: the running queries. The sums of other queries are removed.
        """
        self._sums = {ref: sums for ref, sums in self._sums.items() if ref in queries}
        return {ref: spent_s / count for ref, (count, spent_s) in self._sums.items() if count}
