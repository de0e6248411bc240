"""Recorded data run by a faster clock: records are released when their event time comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np

from edge.config import ReplayConfig
from edge.records import Chunk, Position, Source
from edgewater.streams import LIVE, TIME_COLUMN, StreamClock

GRAIN_MS = 20
"""Records that are due within this many ms of wall time are released together."""
LONGEST_SLEEP_MS = 1000
"""The wall clock is asked again at least this often: it may be set while we sleep."""


def replay_clock(replay: ReplayConfig | None, now_ms: int) -> StreamClock | None:
    """The clock of a stream that is started now; None: speed max, as fast as records come.

    A replay without `at` begins when it is first started: keep the clock, or a restart begins anew.
    """
    if replay is None:
        return LIVE
    if replay.speed == "max":
        return None
    assert replay.start is not None, "the configuration has checked it"
    return StreamClock(replay.start, now_ms if replay.at is None else replay.at, replay.speed)


class PacedSource:
    """A `Source` whose records come by a replay clock."""

    def __init__(
        self,
        source: Source,
        clock: StreamClock,
        *,
        now_ms: Callable[[], int],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = source.name
        self.stream = source.stream
        self.replayable = source.replayable
        self._source = source
        self._clock = clock
        self._now_ms = now_ms
        self._sleep = sleep

    def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        return paced(self._source.chunks(position), self._clock, now_ms=self._now_ms, sleep=self._sleep)

    def reread(self, start: Position | None, end: Position) -> Chunk:
        return self._source.reread(start, end)


async def paced(
    chunks: AsyncIterator[Chunk],
    clock: StreamClock,
    *,
    now_ms: Callable[[], int],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    grain_ms: int = GRAIN_MS,
) -> AsyncIterator[Chunk]:
    """The same records in the same order, none before `clock` has reached its event time.

    Order is the file's: a record waits for every record before it. Chunks are cut where the clock
    stands; each part has positions of its own, so a restart goes on inside a block.

    Parts of a chunk are a grain apart at least, unless whoever takes them needs longer. So a source that keeps up
    is seen to wait, however many records a second there are, and its parts are not smaller than they have to be.

    Args:
        sleep: seconds to wait; called once for each time nothing is due, and between two parts.
    """
    released_ms = now_ms() - grain_ms
    async for chunk in chunks:
        rest: Chunk | None = chunk
        while rest is not None:
            now = now_ms()
            due = due_rows(rest, clock.to_event_ms(now))
            if due == rest.batch.num_rows:
                yield rest
                rest = None
            elif due and not 0 <= now - released_ms < grain_ms:  # (so also if the wall clock was set back)
                head, rest = rest.split(due)
                released_ms = now
                yield head
            elif due:
                await sleep((released_ms + grain_ms - now) / 1000)
            else:
                # An empty chunk is due at once, so there is a first record.
                next_ms = int(rest.batch.column(TIME_COLUMN)[0].as_py())
                wait_ms = clock.to_wall_ms(next_ms) - now_ms()
                await sleep(min(max(wait_ms, grain_ms), LONGEST_SLEEP_MS) / 1000)


def due_rows(chunk: Chunk, event_ms: int) -> int:
    """How many of the first records have event times at or before `event_ms`."""
    times = chunk.batch.column(TIME_COLUMN).to_numpy()
    return int(np.searchsorted(np.maximum.accumulate(times), event_ms, side="right")) if len(times) else 0
