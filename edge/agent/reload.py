"""Reloads of the configuration: the agent stops in order, and its process runs the program anew.

A reload takes as long as a start. It loses nothing: the state is on disk, and the listening sockets stay open. If the
file cannot be used, nothing changes. Some faults show only in the new program, such as columns that do not fit a
running query. The process then returns to the previous configuration.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path

from edge.config import EdgeConfig, load_config
from edgewater.base.errors import EdgewaterError, InvalidConfig
from edgewater.runtime.listeners import Listeners
from edgewater.runtime.tasks import Tasks

log = logging.getLogger(__name__)

PREVIOUS = "EDGEWATER_PREVIOUS_CONFIG"
"""The environment variable with the descriptor of a file in memory, which has the configuration before the reload."""
WATCH_S = 1.0  # limit: how late a changed file is noticed
"""Interval at which a watched file is read."""


class ConfigFile:
    """The configuration file of an agent, and the content with which the agent runs.

    Args:
        environ: may have the variable `PREVIOUS`.

    Attributes:
        failure: why the newest content is not in use; empty: it is in use.
    """

    def __init__(self, path: Path, environ: MutableMapping[str, str] = os.environ) -> None:
        self._path, self._environ = path, environ
        self.failure = ""
        self._running: EdgeConfig | None = None
        self._content = self._checked = b""
        self._previous: bytes | None = None
        descriptor = environ.pop(PREVIOUS, None)
        if descriptor is not None:
            with os.fdopen(int(descriptor), "rb") as file:
                self._previous = file.read()

    def load(self) -> EdgeConfig:
        """Returns the configuration to run. Raises InvalidConfig: the file cannot be used."""
        self._content = self._checked = self._read()
        new = load_config(self._path)
        if self._previous is not None:  # the file may have changed since the old program checked it
            self._running = _parsed(self._previous)
            self._check(new)
        self._running = new
        return new

    def load_previous(self, problem: EdgewaterError) -> EdgeConfig:
        """Returns the configuration before the reload. Called if the new configuration cannot be used.

        Raises:
            EdgewaterError: `problem`, if this is no reload.
        """
        if self._previous is None:
            raise problem
        self._reject(problem)
        self._content, self._previous = self._previous, None
        self._running = _parsed(self._content)
        return self._running

    def confirm(self) -> None:
        """Called when the agent runs. The configuration is not the cause of a later failure."""
        self._previous = None

    def may_reload(self) -> bool:
        """Reads the file, and returns whether an agent can begin anew with it. Otherwise `failure` says why."""
        self._checked = self._read()
        try:
            self._check(load_config(self._path))
        except EdgewaterError as exc:
            self._reject(exc)
            return False
        self.failure = ""
        return True

    def _check(self, new: EdgeConfig) -> None:
        assert self._running is not None
        for name in ("edge", "state_dir"):
            old, value = getattr(self._running, name), getattr(new, name)
            if value != old:
                raise InvalidConfig(name, value, f"{old}, until the agent is stopped and started")
        for config in (self._running, new):
            for name, stream in config.streams.items():
                if any(source.stdin for source in stream.sources):
                    reason = "a reload would lose what the agent has read of standard input"
                    raise InvalidConfig(f"streams.{name}.sources", "stdin", "a stop and a start of the agent", reason)

    def _reject(self, problem: EdgewaterError) -> None:
        self.failure = str(problem)
        log.error("the new configuration is not used, and the agent continues with the previous one: %s", problem)

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError:
            return b""

    async def changed(self) -> None:
        """Returns when the file has new content with which an agent can begin anew, and the file is completely
        written.
        """
        content = self._content
        while True:
            await asyncio.sleep(WATCH_S)
            before, content = content, self._read()
            if content == self._content:
                self.failure, self._checked = "", content
            elif content == before and content != self._checked and self.may_reload():
                return

    def begin_again(self, listeners: Listeners) -> None:
        """Replaces this process by a process that runs the program anew. Called when the agent has stopped."""
        log.info("the agent begins anew with the new configuration")
        listeners.hand_over()
        descriptor = _in_memory(self._content)
        os.set_inheritable(descriptor, True)
        self._environ[PREVIOUS] = str(descriptor)
        sys.stdout.flush()
        logging.shutdown()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _parsed(content: bytes) -> EdgeConfig:
    descriptor = _in_memory(content)
    try:
        return load_config(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _in_memory(content: bytes) -> int:
    """Returns the descriptor of a file in memory. Only this process can read it: a configuration may have secrets."""
    descriptor = os.memfd_create("edge.yaml")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


async def until_stopped(
    run_agent: Callable[[asyncio.Event], Awaitable[None]], file: ConfigFile, watches: bool, tasks: Tasks
) -> bool:
    """Runs the agent until a signal ends it. Returns whether it must begin anew with the file's new content.

    Without a handler, SIGHUP would end the process. So the signal is blocked before and after, and waits for the next
    handler. This handler may be in the program that `execv` starts.
    """
    loop, stop, reload = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def begin_anew() -> None:
        reload.set()
        stop.set()

    def on_hangup() -> None:
        if file.may_reload():
            begin_anew()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    tasks.end = stop.set
    if watches:
        tasks.start("configuration", _watch(file, begin_anew))
    try:
        await run_agent(stop)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        await tasks.cancel()
    tasks.exit_if_failed()
    return reload.is_set()


async def _watch(file: ConfigFile, begin_anew: Callable[[], None]) -> None:
    await file.changed()
    begin_anew()
