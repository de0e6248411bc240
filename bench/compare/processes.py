"""The processes of a run: how they are started, the resources that they use, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

STOP_S = 8.0


@dataclass
class Processes:
    """The processes that have been started, by role: `site` or `center`."""

    by_role: dict[str, list[subprocess.Popen[bytes]]] = field(default_factory=lambda: {"site": [], "center": []})
    rss_bytes: dict[str, int] = field(default_factory=lambda: {"site": 0, "center": 0})

    def start(
        self,
        role: str,
        words: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        stdout: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a process. Its output goes to `log`; with `stdout`, only its errors."""
        with log.open("wb") as file:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file if stdout is None else stdout,
                stderr=file,
                env=os.environ | dict(environment or {}),
                start_new_session=True,
            )
        self.by_role[role].append(process)
        return process

    def cpu_s(self, role: str) -> float:
        """Returns the CPU time of a role's processes and their children, in seconds."""
        total = 0.0
        for process in _trees(self.by_role[role]):
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def measure_memory(self) -> None:
        """Updates the largest resident memory of one process tree of each role."""
        for role, processes in self.by_role.items():
            for process in processes:
                size = 0
                for each in _trees([process]):
                    with suppress(psutil.Error):
                        size += each.memory_info().rss
                self.rss_bytes[role] = max(self.rss_bytes[role], size)

    def ended(self) -> list[str]:
        """Returns the commands of processes that have ended although the run continues."""
        every = (process for processes in self.by_role.values() for process in processes)
        return [str(process.args) for process in every if process.poll() is not None]

    def stop(self) -> None:
        """Ends all processes."""
        every = [process for processes in self.by_role.values() for process in processes][::-1]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in every:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            for process in every:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)


def _trees(processes: Iterable[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    result = []
    for process in processes:
        with suppress(psutil.Error):
            root = psutil.Process(process.pid)
            result += [root, *root.children(recursive=True)]
    return result
