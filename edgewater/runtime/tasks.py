"""Supervision of the long-lived tasks and threads of a process.

If one of them fails, the rest of the process may seem to work for days. So each process starts them here. A failure is
logged and counted, ``/readyz`` states it, and it ends the process. The supervisor of the process starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import Counter

from edgewater.base.errors import EdgewaterError, named

END_S = 20.0  # limit: the end of a process
"""A process that does not end within this time after a failure is killed."""
log = logging.getLogger(__name__)


class Tasks:
    """The long-lived tasks and threads of a process.

    Args:
        end: ends the process. It is called after the first failure, by any thread.
        expected: exceptions of tasks that the owner awaits and handles. They are no failures.

    Attributes:
        failures: Prometheus' counter of failures. The owner adds it to a registry.
    """

    def __init__(self, end: Callable[[], object] = lambda: None, expected: tuple[type[Exception], ...] = ()) -> None:
        self.end = end
        self._expected = expected
        self.failures = Counter(
            "edgewater_task_failures", "Failures of tasks, which end the process.", ["task"], registry=None
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: dict[str, str] = {}

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task on the running event loop. The task raises the exception of `work`."""
        task = asyncio.create_task(self._watched(name, work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # it has been logged, so asyncio need not log it again

    def thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Starts a daemon thread."""

        def run() -> None:
            try:
                work()
            except BaseException as exc:  # uvicorn exits, and a panic of a library in Rust is no Exception
                self._fail(name, exc)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    async def cancel(self) -> None:
        """Cancels the tasks, and returns when they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def missing(self) -> list[str]:
        """Returns which tasks have failed, and why, for ``/readyz``."""
        return [f"task {name} has failed, and the process ends: {why}" for name, why in self._failed.items()]

    def exit_if_failed(self) -> None:
        """Ends the process with status 1 if a task has failed. Called at the end of an orderly stop."""
        if self._failed:
            sys.exit(1)

    async def _watched(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BaseException as exc:
            if not isinstance(exc, (asyncio.CancelledError, *self._expected)):
                self._fail(name, exc)
            raise

    def _fail(self, name: str, exc: BaseException) -> None:
        is_first = not self._failed
        # The text of a foreign exception may quote a secret. Only the log has it.
        self._failed[name] = named(exc) if isinstance(exc, EdgewaterError) else type(exc).__name__
        self.failures.labels(name).inc()
        log.error("task %s has failed, and the process ends", name, exc_info=exc)
        if is_first:
            self.end()


def within_limit(stop: Callable[[], object]) -> Callable[[], None]:
    """Returns a function that calls `stop`, and kills this process if the process has not ended after `END_S`."""

    def end() -> None:
        timer = threading.Timer(END_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        stop()

    return end
