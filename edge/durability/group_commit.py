"""Group commit: all callers that wait for durability share the next fsync."""

from __future__ import annotations

import asyncio
import logging

from edge.durability.durable_core import DurableCore
from edgewater.base.errors import StorageError

log = logging.getLogger(__name__)

RETRY_S = 0.5  # limit: attempts to write to a disk that fails


class JournalGroupCommit:
    """Makes events that the core has handled durable, without blocking the event loop.

    While writing fails, callers keep waiting. Their events are in memory, so they are neither durable nor lost.

    Attributes:
        failure: the error while writing fails, otherwise None. While it is set, new input should be refused.
    """

    def __init__(self, core: DurableCore) -> None:
        self._core = core
        self._lock = asyncio.Lock()
        self._waiters: list[asyncio.Future[None]] = []
        self._wanted = asyncio.Event()
        self.failure: StorageError | None = None

    async def durable(self) -> None:
        """Returns once all events that were handled before the call are on disk."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wanted.set()
        await waiter

    async def run(self) -> None:
        """Serves waiters until it is cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            waiters, self._waiters = self._waiters, []
            await self._sync()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def checkpoint(self) -> None:
        """Writes a checkpoint. No commit runs at the same time."""
        async with self._lock:
            try:
                # It runs on the event loop, because the core must not change while its state is written.
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
            log.error("%s; nothing is lost, and no records are accepted until writing succeeds", error)
        self.failure = error
