"""The first start of a center's components, by fork from the supervisor.

If each component loaded the same modules itself, this would cost 0.9 s of CPU before the job launches its JVM. So the
supervisor loads the modules once, the job's modules first, and forks. A component that is restarted is an interpreter
of its own. The supervisor has threads by then, and a process with threads must not fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

from center.ops.supervisor import ComponentCommand

MODULES = {
    "job": ("center.job.job", "center.results"),
    "standby": (),
    "api": ("center.api", "center.api.routers.health", "center.api.server"),
    "sink": ("center.sinks.process",),
    "gateway": ("center.ingest.gateway", "center.storage.frame_log"),
}
"""The modules that each component loads, in the order in which the components start. The first component is the one
that other components wait for. The last component loads gRPC, so no other component has gRPC. Further drivers
(``job-2``) start with the first driver."""
_ARG_START, _ARG_END = 45, 46  # format: of /proc/self/stat
"""Indices of fields of /proc/self/stat after the command's name (proc(5): fields 48 and 49)."""

log = logging.getLogger(__name__)


class ForkedProcess:
    """A forked component, with the methods of `asyncio.subprocess.Process` that the supervisor uses."""

    def __init__(self, pid: int, stdin: BinaryIO) -> None:
        self.pid = pid
        self.stdin = stdin
        self._ended = os.pidfd_open(pid)

    async def wait(self) -> int:
        """Waits until the process has ended, and returns its exit code. The code of a signal is negative. Call it only
        once.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._ended, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._ended)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._ended)
        self.stdin.close()
        return os.waitstatus_to_exitcode(status)

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._ended, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def fork_components(commands: Sequence[ComponentCommand], lock: BinaryIO) -> dict[str, ForkedProcess]:
    """Starts the components that this process can fork safely. The supervisor starts the others as new interpreters.

    Args:
        commands: commands of the form `python -m edgewater …`.
        lock: a file that is closed in the components.

    Returns:
        The processes by name of the command. In a component, the function does not return.
    """
    forked: dict[str, ForkedProcess] = {}
    if sys.platform != "linux":
        return forked
    for name, modules in MODULES.items():
        for module in modules:
            importlib.import_module(module)
        if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
            log.info("a thread was started: %s is not forked", name)
            break
        for command in commands:
            if command.name.partition("-")[0] == name:
                forked[command.name] = _fork(command.argv(), [lock, *(f.stdin for f in forked.values())])
    return forked


def _fork(argv: Sequence[str], not_inherited: Sequence[BinaryIO]) -> ForkedProcess:
    gc.collect()
    gc.freeze()  # a collection would write to the pages that the processes share
    readable, writable = os.pipe()
    if (pid := os.fork()) == 0:
        for file in not_inherited:
            file.close()
        os.close(writable)
        _become(argv, readable)
    os.close(readable)
    return ForkedProcess(pid, os.fdopen(writable, "wb", buffering=0))


def _become(argv: Sequence[str], stdin: int) -> NoReturn:
    """Runs ``python -m edgewater …`` like a new interpreter, and ends with its exit code."""
    from edgewater.__main__ import main

    os.setsid()
    os.dup2(stdin, 0)
    os.close(stdin)
    _show_as(argv)
    sys.argv = list(argv[argv.index("edgewater") :])  # without the interpreter and its options
    main(args=sys.argv[1:], prog_name="edgewater")
    sys.exit()


def _show_as(argv: Sequence[str]) -> None:
    """Makes tools like `ps` show this command line instead of the supervisor's. It is cut to the
    supervisor's length.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        begin, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        shown = os.fsencode("\0".join(argv))[: end - begin - 1]
        with open("/proc/self/mem", "r+b", buffering=0) as memory:  # noqa: PTH123
            memory.seek(begin)
            memory.write(shown.ljust(end - begin, b"\0"))
