"""Group commit: whoever waits for durability shares the next fsync."""

from __future__ import annotations

import asyncio
import logging

from edge.durability.durable_core import DurableCore
from edgewater.errors import StorageError

log = logging.getLogger(__name__)

RETRY_S = 0.5


class GroupCommit:
    """Makes what the core has handled durable, off the event loop.

    While the disk refuses, waiters wait: what they wait for is in memory and in no file, so neither
    "yes" nor "no" would be true. `failure` tells those who have not asked yet to stay away.
    """

    def __init__(self, core: DurableCore) -> None:
        self._core = core
        self._lock = asyncio.Lock()
        self._waiters: list[asyncio.Future[None]] = []
        self._wanted = asyncio.Event()
        self.failure: StorageError | None = None

    async def durable(self) -> None:
        """Returns once everything handled before the call is on disk."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wanted.set()
        await waiter

    async def run(self) -> None:
        """Serves waiters for ever."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            waiters, self._waiters = self._waiters, []
            await self._sync()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def checkpoint(self) -> None:
        """Writes a checkpoint; no commit runs meanwhile."""
        async with self._lock:
            try:
                # On the loop: the core must not move while its state is written down.
                self._core.checkpoint()
                self.failure = None
            except StorageError as exc:
                self._failed(exc)

    async def _sync(self) -> None:
        while True:
            async with self._lock:
                try:
                    await asyncio.to_thread(self._core.sync)
                    self.failure = None
                    return
                except StorageError as exc:
                    self._failed(exc)
            await asyncio.sleep(RETRY_S)

    def _failed(self, error: StorageError) -> None:
        if self.failure is None:
            log.error("%s; nothing is lost, nothing is accepted until it can be written again", error)
        self.failure = error
