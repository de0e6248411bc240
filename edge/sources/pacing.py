"""Replays recorded data under a replay clock. Each record is released when the clock reaches its event time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np

from edge.config import ReplayConfig
from edge.records import COALESCE_S, Chunk, Position, Source
from edge.source_kinds import SourceContext
from edgewater.base.streams import LIVE, TIME_COLUMN, StreamClock

RELEASE_INTERVAL_MS = int(1000 * COALESCE_S)
"""Records whose release times lie within this many ms of wall time are released together."""
LONGEST_SLEEP_MS = 1000  # limit: how late a clock that was set is noticed
"""The wall clock is read again at least this often, because it may be set during a sleep."""


def replay_clock(replay: ReplayConfig | None, now_ms: int) -> StreamClock | None:
    """Returns the clock of a stream that starts now; None for speed max (as fast as records can be read).

    A replay without `at` begins at its first start. The caller stores the clock, so that a restart continues the
    replay.
    """
    if replay is None:
        return LIVE
    if replay.speed == "max":
        return None
    assert replay.start is not None, "the configuration guarantees it"
    return StreamClock(replay.start, now_ms if replay.at is None else replay.at, replay.speed)


class PacedSource:
    """A `Source` that releases the records of another source according to a replay clock. It passes everything else
    on to that source."""

    def __init__(self, source: Source, clock: StreamClock, context: SourceContext) -> None:
        self._source, self._clock, self._context = source, clock, context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        context, sleep = self._context, partial(self._context.wait, self.name)
        wait = lambda: round(1000 * context.coalesce_s(self.stream, self.name))  # noqa: E731
        chunks = self._source.chunks(position)
        return paced(chunks, self._clock, now_ms=context.now_ms, sleep=sleep, interval_ms=wait)


async def paced(
    chunks: AsyncIterator[Chunk],
    clock: StreamClock,
    *,
    now_ms: Callable[[], int],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    interval_ms: Callable[[], int] = lambda: RELEASE_INTERVAL_MS,
) -> AsyncIterator[Chunk]:
    """Yields the same records in the same order, each when `clock` has reached its event time.

    A record waits for every record before it. A chunk is split at the clock's current time. Each part has its own
    positions, so that a restart can resume inside a block.

    Two parts of a chunk are released at least `interval_ms` apart, unless the consumer takes longer. So a source that
    keeps up is idle between the parts at any record rate, and parts are not smaller than necessary.

    Args:
        interval_ms: returns the least wall time between two parts. Called after each release.
        sleep: sleeps for a number of seconds. Called when no record can be released yet, and between two parts.
    """
    wait_ms, released_ms = 0, now_ms()
    async for chunk in chunks:
        rest: Chunk | None = chunk
        release_ms = np.maximum.accumulate(chunk.batch.column(TIME_COLUMN).to_numpy())  # of each record of `rest`
        while rest is not None:
            now = now_ms()
            due = int(np.searchsorted(release_ms, clock.to_event_ms(now), side="right"))
            if due == len(release_ms):
                yield rest
                rest = None
            elif due and not 0 <= now - released_ms < wait_ms:  # also true after the wall clock was set back
                head, rest = rest.split(due)
                release_ms, released_ms = release_ms[due:], now
                yield head
                wait_ms = interval_ms()
            elif due:
                await sleep((released_ms + wait_ms - now) / 1000)
            else:
                # An empty chunk is released at once, so `rest` has a first record.
                next_wait_ms = clock.to_wall_ms(int(release_ms[0])) - now_ms()
                await sleep(min(max(next_wait_ms, wait_ms, RELEASE_INTERVAL_MS), LONGEST_SLEEP_MS) / 1000)
