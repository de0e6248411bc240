"""Provides an event loop with virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time passes only when no callback is ready. It is deterministic: one thread, no I/O.

    Args:
        thread_s: the time from a call in a thread until its result is back on the loop.
    """

    def __init__(self, thread_s: float = 0.0) -> None:
        super().__init__()
        self._thread_s = thread_s
        self._virtual_s = 0.0
        self._clock_resolution = 1e-6
        self._selector = self  # BaseEventLoop asks it for I/O, and tells it how long it may wait.

    def time(self) -> float:
        return self._virtual_s

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen again: every task waits for another")
        self._virtual_s += timeout
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Calls `func` now, and gives its result to the loop a little later."""
        future = self.create_future()
        try:
            outcome, give = func(*args), future.set_result
        except Exception as exc:
            outcome, give = exc, future.set_exception
        self.call_later(self._thread_s, lambda: None if future.done() else give(outcome))
        return future
