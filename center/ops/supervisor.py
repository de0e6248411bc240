"""Supervisor of `edgewater center run`. The components of a center are child processes, and are restarted when they
die.

A component may be killed at any moment without loss of acknowledged data. The frame log, the catalog and the result
store guarantee this. Three details matter here:

- A child leads its own process group. Ctrl-C reaches only the supervisor, which then stops the children. If a dead
  child leaves processes (the JVM of the job), they are killed before the child is restarted.
- A child's standard input is a pipe that only the supervisor holds open. If the supervisor is killed, the pipe ends and
  the children stop (`stop_with_supervisor`). So no child runs without a supervisor.
- If the first start of a child ends with code 2, the child cannot use its configuration. A restart cannot help, so the
  supervisor stops the other children and fails. A component that has run once is always restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Protocol

from center.storage.progress import write_whole
from edgewater.base.errors import InvalidConfig, StorageError
from edgewater.runtime.tasks import Tasks

log = logging.getLogger(__name__)

EXIT_BAD_INPUT = 2  # format: click's status of wrong usage
WATCH_S = 3.0  # limit: how late a hang is noticed
GRACE_S = 25.0  # limit: time of a stop
"""Time in seconds after which components that have not stopped are killed. Spark ends its batch within a few
seconds."""


@dataclass(frozen=True, slots=True)
class ComponentCommand:
    """A component and the command that starts it.

    Attributes:
        argv: returns the command line. Called before every start.
        hangs: returns why the process must be killed, or an empty string if it need not be killed. Called every
            `WATCH_S` with the process id. None if the component is not watched.
    """

    name: str
    argv: Callable[[], Sequence[str]]
    hangs: Callable[[int], str] | None = None


class ComponentProcess(Protocol):
    """A running component: the part of `asyncio.subprocess.Process` that the supervisor uses."""

    @property
    def pid(self) -> int: ...
    async def wait(self) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delay before a component is restarted. The delay doubles until the component has run for `settled_s`."""

    first_s: float = 0.2
    most_s: float = 10.0
    settled_s: float = 30.0

    def delay_s(self, failures: int) -> float:
        """Returns the delay after a number of consecutive failures, each within `settled_s` after a start."""
        return float(min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 30)))


def describe_exit(code: int) -> str:
    """Returns a phrase that describes a child's return code."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class Supervisor:
    """Starts components, restarts components that die, and stops all components together.

    Args:
        pids_dir: directory that has a ``<name>.pid`` file per running component.
        monotonic: a clock in seconds.
        started: components that run already. Each is the leader of a process group.
    """

    def __init__(
        self,
        commands: Sequence[ComponentCommand],
        pids_dir: Path,
        *,
        monotonic: Callable[[], float],
        backoff: Backoff = Backoff(),
        grace_s: float = GRACE_S,
        started: Mapping[str, ComponentProcess] = MappingProxyType({}),
    ) -> None:
        self._commands = tuple(commands)
        self._pids_dir = pids_dir
        self._monotonic = monotonic
        self._backoff = backoff
        self._grace_s = grace_s
        self._started = dict(started)
        self._running: dict[str, ComponentProcess] = {}
        self._restarts = {c.name: 0 for c in self._commands}
        self._tasks = Tasks()

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of the running components."""
        return {name: process.pid for name, process in self._running.items()}

    @property
    def restarts(self) -> Mapping[str, int]:
        """Number of restarts per component."""
        return dict(self._restarts)

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set. Returns when the last child has ended.

        Raises:
            InvalidConfig: a component cannot use its configuration. All components have been stopped.
        """
        self._pids_dir.mkdir(parents=True, exist_ok=True)
        self._tasks.end = stop.set
        stopping = asyncio.create_task(stop.wait())
        keepers = [asyncio.create_task(self._supervise(c, stop)) for c in self._commands]
        try:
            await asyncio.wait([stopping, *keepers], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()
            self._signal_all(signal.SIGTERM)
            _, late = await asyncio.wait(keepers, timeout=self._grace_s)
            if late:
                log.warning("not stopped within %g s, killed: %s", self._grace_s, ", ".join(self._running))
                self._signal_all(signal.SIGKILL)
            ended = await asyncio.gather(*keepers, return_exceptions=True)
            stopping.cancel()
        for outcome in ended:
            if isinstance(outcome, BaseException):
                raise outcome
        self._tasks.exit_if_failed()

    async def _supervise(self, command: ComponentCommand, stop: asyncio.Event) -> None:
        failures = 0
        while not stop.is_set():
            began_s = self._monotonic()
            code = await self._run_once(command, stop)
            if stop.is_set():
                return
            if code == EXIT_BAD_INPUT and self._restarts[command.name] == 0:
                accepted = "a configuration it can work with"
                raise InvalidConfig(command.name, f"exit code {code}", accepted, "see its messages above")
            failures = 1 if self._monotonic() - began_s >= self._backoff.settled_s else failures + 1
            delay_s = self._backoff.delay_s(failures)
            self._restarts[command.name] += 1
            log.warning("%s %s; starting it again in %.1f s", command.name, describe_exit(code), delay_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await stop.wait()

    async def _run_once(self, command: ComponentCommand, stop: asyncio.Event) -> int:
        process = self._started.pop(command.name, None) or await asyncio.create_subprocess_exec(
            *command.argv(), stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        self._running[command.name] = process
        pid_file = self._pids_dir / f"{command.name}.pid"
        write_whole(pid_file, f"{process.pid}\n")
        log.info("%s runs as process %d", command.name, process.pid)
        if stop.is_set():  # it was set while the child was being created, so no signal was sent to the child
            process.terminate()
        watching = self._tasks.start(f"watch-{command.name}", self._watch(command, process.pid, stop))
        try:
            return await process.wait()
        finally:
            watching.cancel()
            del self._running[command.name]
            pid_file.unlink(missing_ok=True)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    async def _watch(self, command: ComponentCommand, pid: int, stop: asyncio.Event) -> None:
        """Kills the process of a component if it hangs."""
        while command.hangs is not None and not stop.is_set():
            await asyncio.sleep(WATCH_S)
            reason = await asyncio.to_thread(command.hangs, pid)
            if reason and not stop.is_set():
                log.error("%s hangs and is killed: %s", command.name, reason)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                return

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)


@contextlib.contextmanager
def exclusive_lock(data_dir: Path) -> Iterator[BinaryIO]:
    """Holds the directory's lock, so that two supervisors never share the directory.

    Yields:
        The locked file. A forked process must close it; otherwise the directory stays locked while the process runs.

    Raises:
        StorageError: another supervisor holds the lock.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    busy = f"{data_dir}: another `edgewater center run` uses this directory"
    with locked_file(data_dir / "supervisor.lock", busy) as lock:
        yield lock


@contextlib.contextmanager
def locked_file(path: Path, busy: str) -> Iterator[BinaryIO]:
    """Holds the lock of a file, which is created if it is missing.

    Raises:
        StorageError: another process holds the lock; the error has the message `busy`.
    """
    with path.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise StorageError(busy) from exc
        yield lock


def stop_with_supervisor() -> None:
    """Sends SIGTERM to this process when the supervisor ends, for whatever reason. Called in a child."""

    def wait_for_end() -> None:
        # sys.stdin is not read itself: a waiting thread would hold its lock, which is fatal when the interpreter exits.
        try:
            while os.read(sys.stdin.fileno(), 1):
                pass
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_end, name="supervisor-gone", daemon=True).start()
