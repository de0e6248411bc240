"""A virtual machine park: an event loop with virtual time, processes that can be killed at any step, and their disks.

The production code runs on it unchanged. Its coroutines run on `VirtualLoop`, where a sleep costs nothing and threads
(`asyncio.to_thread`) are calls at later moments. Whatever a process does outside itself (a write, an fsync, a commit, a
message) is a *step*, at which it may be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random  # noqa: TID251  (a generator of its own per seed, whose draws are cheap)
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any

import sim.wire.virtual_loop

EPOCH_MS = 1_767_225_600_000
"""The wall time at which every world begins: 2026-01-01."""


class Killed(BaseException):
    """The process has been killed. Not an Exception, so that no process handles its own death."""


class VirtualLoop(sim.wire.virtual_loop.VirtualLoop):
    """A loop whose threads are steps of a process, at which it may be killed."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Calls `func` a little later, and gives its result to the loop a little later still: a thread."""
        process, future = PROCESS.get(), self.create_future()

        def call() -> None:
            if process is None or not process.alive:
                return
            outcome: Any = None
            error: Exception | None = None
            try:
                process.step("thread")
                outcome = func(*args)
                process.step("thread ended")
            except Killed:
                return
            except Exception as exc:
                error = exc

            def deliver() -> None:
                if future.done() or not process.alive:
                    return
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(outcome)

            self.call_later(self._rng.expovariate(500.0), deliver)

        self.call_later(self._rng.expovariate(1000.0), call)
        return future


class Process:
    """One run of a program on one machine, from its start until it is killed or ends.

    Args:
        clock_ms: the machine's wall clock.
        on_death: called once when it is killed, with the step at which it was.
        on_failure: called with the exception of a task that failed: the program has ended by its own error.

    Attributes:
        steps_left: it is killed when so many steps have been done; None: never.
    """

    def __init__(
        self, name: str, loop: VirtualLoop, rng: random.Random, clock_ms: Callable[[], int],
        on_death: Callable[[Process, str], None], on_failure: Callable[[Process, BaseException], None],
    ) -> None:  # fmt: skip
        self.name = name
        self.loop = loop
        self.rng = rng
        self.now_ms = clock_ms
        self.alive = True
        self.steps_left: int | None = None
        self._on_death = on_death
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)

    def monotonic(self) -> float:
        return 1000.0 + self.loop.time()

    def step(self, what: str) -> None:
        """Counts a step. Raises Killed if it is the last one, or if the process is dead."""
        if self.alive and self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left < 0:
                self.kill(what)
        if not self.alive:
            raise Killed(what)

    def kill(self, what: str) -> None:
        if self.alive:
            self.alive = False
            self.loop.call_soon(self._bury)
            self._on_death(self, what)

    def _bury(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def run(self, call: Callable[[], Any]) -> Any:
        """Calls synchronous code of the process."""
        return self.context.copy().run(call)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Starts a task whose failure is the end of the process."""
        task = self.context.copy().run(lambda: self.loop.create_task(coroutine, name=name))
        task.add_done_callback(self._ended)
        return task

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, Killed) and self.alive:
            self.report_failure(error)
            self.kill("failed")

    def report_failure(self, error: BaseException) -> None:
        """Reports an exception that production code did not handle."""
        self._on_failure(self, error)


PROCESS: ContextVar[Process | None] = ContextVar("PROCESS", default=None)


def this_process() -> Process:
    process = PROCESS.get()
    assert process is not None, "only a process does this"
    return process


def new_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """The loop's task factory: a task belongs to the process that starts it, and dies with it."""
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
    context = options.get("context")
    process = context.get(PROCESS) if context is not None else PROCESS.get()
    if process is not None:
        process.adopt(task)
    return task


class CrashableOs:
    """Stands for the `os` module of a module that writes files: writes and fsyncs are steps.

    A process that is killed before an fsync has returned leaves any part of what it has written since the last one, the
    last bytes damaged: a torn write.
    """

    def __init__(self) -> None:
        self._synced: dict[tuple[int, int], int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _key(self, fd: int) -> tuple[int, int]:
        status = os.fstat(fd)
        return status.st_dev, status.st_ino

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        process = this_process()
        self._synced.setdefault(self._key(fd), offset)
        with self._torn(process, fd, bytes(data), offset):
            process.step("write")
        return os.pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        process = PROCESS.get()
        if process is None:
            return
        key = self._key(fd)
        with self._torn(process, fd, b"", 0):
            process.step("fsync")
        self._synced.pop(key, None)
        process.step("fsynced")

    def rename(self, source: Any, target: Any) -> None:
        process = PROCESS.get()
        if process is not None:
            process.step("rename")
        os.rename(source, target)  # noqa: PTH104

    @contextlib.contextmanager
    def _torn(self, process: Process, fd: int, data: bytes, offset: int) -> Iterator[None]:
        try:
            yield
        except Killed:
            synced = self._synced.pop(self._key(fd), None)
            if synced is None:
                raise
            if data:
                os.pwrite(fd, data, offset)
            size = os.fstat(fd).st_size
            kept = process.rng.randint(min(synced, size), size)
            os.ftruncate(fd, kept)
            if kept > synced and process.rng.random() < 0.5:
                os.pwrite(fd, process.rng.randbytes(1), kept - 1)
            raise
