"""Few threads for costly requests, so that other requests and registrations always find a thread, and soon the CPU."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request

from edgewater.answers.work import Work, WorkLimits, spend

WATCH_S = 0.2  # limit: work for a client that has left
"""Interval at which it is checked whether the client of a costly request is still there."""
T = TypeVar("T")


class Baton:
    """Lets one thread work at a time, in the order in which the threads ask.

    Several threads that compute would keep the interpreter from all other requests. A lock does not hand itself on: the
    thread that releases it usually takes it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_held = False
        self._waiting: deque[threading.Event] = deque()

    def take(self) -> None:
        with self._lock:
            if not self._is_held:
                self._is_held = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()

    def give(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_held = False


class CostlyLane:
    """Runs costly work in its own threads. The threads take turns. The work ends with its budget, and with its client.

    Attributes:
        limiter: the threads. Further work waits.
        limits: the budget of a request that states none.
    """

    def __init__(self, threads: int) -> None:
        self.limiter, self.limits = CapacityLimiter(threads), WorkLimits()
        self._baton = Baton()

    def work(self, is_gone: Callable[[], bool], limits: WorkLimits | None = None) -> Work:
        """Returns the budget of a request.

        Args:
            is_gone: returns whether its client has left.
        """
        return Work(limits or self.limits, time.thread_time, time.monotonic, is_gone, self._baton)

    async def run(self, request: Request, work: Callable[[], T], limits: WorkLimits | None = None) -> T:
        """Returns the result of `work`, which runs in a thread of this lane. The body of the request must have been
        read.

        Raises:
            Overspent: the work needs more than its budget.
            ClientGone: the client has gone.
        """
        gone = threading.Event()
        budget = self.work(gone.is_set, limits)

        def worked() -> T:
            with budget.running():
                spend()  # the client may have gone while the work waited for a thread
                return work()

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
