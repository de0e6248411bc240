"""Few threads for costly requests, so that other requests and registrations always find a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request

from center.api.problems import HttpProblem

WATCH_S = 0.2
"""Interval at which it is checked whether the client of a costly request is still there."""
T = TypeVar("T")
Alive = Callable[[], None]
"""Raises HttpProblem if the client has gone. Costly work calls it between its steps."""


class Lane:
    """Runs costly work in its own threads. The work ends with its client.

    Attributes:
        limiter: the threads. Further work waits.
    """

    def __init__(self, threads: int) -> None:
        self.limiter = CapacityLimiter(threads)

    async def run(self, request: Request, work: Callable[[Alive], T]) -> T:
        """Returns the result of `work`, which runs in a thread of this lane. The body of the request must have been
        read.

        Raises:
            HttpProblem: the client has gone.
        """
        gone = threading.Event()

        def alive() -> None:
            if gone.is_set():
                raise HttpProblem("unavailable", "the client has gone")

        def worked() -> T:
            alive()  # the client may have gone while the work waited for a thread
            return work(alive)

        watching = asyncio.create_task(_watch(request, gone))
        try:
            return await run_sync(worked, limiter=self.limiter)
        finally:
            gone.set()  # the request may have been cancelled
            watching.cancel()


async def _watch(request: Request, gone: threading.Event) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(WATCH_S)
    gone.set()
