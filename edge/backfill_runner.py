"""Runs the backfills of queries with ``since``: reads the earlier records of sources again, while live data are read.

One backfill runs at a time, in blocks of few records. After each block it pauses for `PAUSES` times as long as the
block took. Live sources are read meanwhile, and never wait for a backfill, because the backfill stops at half of the
memory limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing

from edge.core.events import BackfillEnded, BackfillIngested
from edge.durability import DurableCore
from edge.records import Source
from edgewater.base.errors import InvalidInput
from edgewater.wire import QueryRef

log = logging.getLogger(__name__)

PAUSES = 3.0  # limit: the share of the CPU that backfills take, a quarter
"""The pause after a block, as a multiple of the block's time. So a backfill uses at most a quarter of the agent's
time.
"""
POLL_S = 0.2  # limit: how late a new backfill begins
RETRY_S = 5.0  # limit: attempts to read a source that fails
MAX_ATTEMPTS = 12
"""The number of attempts to read a source, `RETRY_S` apart. Then its backfill ends without the rest."""
STALL_S = 60.0  # limit: the wait for an ingestion that does not end
"""A backfill ends if the memory is used up for this long while no frame is unacknowledged."""

Sleep = Callable[[float], Awaitable[None]]


class BackfillRunner:
    """Reads the ranges in `EdgeState.backfills`.

    Args:
        sources: separate instances of the edge's sources, because a backfill opens files at other positions.
        pending_limit_bytes: memory of the core above which backfills wait.
        changed: called when the core has changed.
    """

    def __init__(
        self,
        core: DurableCore,
        sources: Iterable[Source],
        pending_limit_bytes: int,
        *,
        changed: Callable[[], None],
        now_ms: Callable[[], int],
        monotonic: Callable[[], float],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._core = core
        self._sources = {source.name: source for source in sources}
        self._pending_limit_bytes = pending_limit_bytes
        self._changed, self._now_ms, self._monotonic, self._sleep = changed, now_ms, monotonic, sleep

    def add(self, sources: Iterable[Source]) -> None:
        """Adds sources that were opened while the agent runs. Their `backfill` must not disturb their `chunks`."""
        self._sources |= {source.name: source for source in sources}

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            found = next(
                ((ref, source) for ref, ranges in self._core.state.backfills.items() for source in ranges), None
            )
            if found is None:
                await self._sleep(POLL_S)
            else:
                await self._run_source(*found)

    async def _run_source(self, query: QueryRef, source: str) -> None:
        log.info("query %s: source %s is read again from the beginning", query.name, source)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await self._read(query, source)
                break
            except (InvalidInput, OSError) as exc:
                log.error("query %s: source %s cannot be read again: %s", query.name, source, exc)
                if attempt < MAX_ATTEMPTS:
                    await self._sleep(RETRY_S)
        if self._is_running(query, source):
            backfill = self._core.core.queries[query].backfill
            assert backfill is not None
            left = backfill.unread[source].records
            self._core.handle(BackfillEnded(query, source))
            self._changed()
            log.info("query %s: source %s has been read again; %d records are missing", query.name, source, left)

    def _is_running(self, query: QueryRef, source: str) -> bool:
        """Returns whether the query still exists and its backfill has this source."""
        return source in self._core.state.backfills.get(query, {})

    async def _read(self, query: QueryRef, source: str) -> None:
        """Reads a source up to the end of its range.

        Raises:
            InvalidInput, OSError: the source cannot be read.
        """
        limits = self._core.state.backfills[query][source]
        if limits.until is None or source not in self._sources:
            return
        backfill = self._core.core.queries[query].backfill
        assert backfill is not None
        began_s, since_ms = self._monotonic(), backfill.since_ms
        async with aclosing(self._sources[source].backfill(limits.position, limits.until, since_ms)) as chunks:
            async for chunk in chunks:
                if not self._is_running(query, source):
                    return
                assert chunk.end is not None
                event = BackfillIngested(query, source, chunk.batch, self._now_ms(), chunk.rejected_records)
                self._core.ingest_backfill(event, chunk.start, chunk.end, keep=chunk.keep)
                self._changed()
                await self._sleep(PAUSES * (self._monotonic() - began_s))
                if not await self._has_room(query):
                    return
                began_s = self._monotonic()

    async def _has_room(self, query: QueryRef) -> bool:
        """Waits for memory. Returns False if no memory can become free, because nothing in memory can be sent."""
        waited_s = 0.0
        while self._core.core.pending_bytes > self._pending_limit_bytes:
            waited_s = 0.0 if self._core.core.unacked else waited_s + POLL_S
            if waited_s >= STALL_S:
                log.error(
                    "query %s: its backfill ends, as its open windows do not fit into half of limits.max_pending_bytes",
                    query.name,
                )
                return False
            await self._sleep(POLL_S)
        return True
