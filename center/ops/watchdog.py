"""Finds a process that lives but makes no steps.

A process that waits for a core makes no steps either. So the time for which its threads have waited for a core is not
counted, and an overloaded machine raises no false alarm.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from center.storage.progress import Track, progress_path, read_progress

MAX_CHECK_S = 5.0
"""The longest time in seconds that counts between two checks, because this process or the machine may have been
suspended."""


def waited_s(group: int) -> dict[int, float]:
    """Returns, by thread of a process group, the time in seconds that the thread has waited for a core.

    The result is empty if the kernel does not report this time.
    """
    waits = {}
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if os.getpgid(int(process.name)) == group:
                for task in (process / "task").iterdir():
                    with suppress(OSError):
                        waits[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return waits


class HangWatch:
    """Watches the progress of a component.

    Args:
        directory: directory of the component's progress file (`DriverProgress`).
        most_s: time in seconds without a step after which the process hangs.
        waits: returns the times that threads of a process group have waited for a core.
    """

    def __init__(
        self,
        directory: Path,
        most_s: float,
        *,
        monotonic: Callable[[], float],
        waits: Callable[[int], dict[int, float]] = waited_s,
    ) -> None:
        self._directory, self._most_s, self._monotonic, self._waits = directory, most_s, monotonic, waits
        self._pid = 0
        self._checked_s = 0.0
        self._steps: dict[Track, int] = {}
        self._still_s: dict[Track, float] = {}
        self._waited: dict[int, float] | None = None

    def check(self, pid: int) -> str:
        """Returns why a process hangs, or an empty string if no hang is known. Called every few seconds."""
        now_s, found = self._monotonic(), read_progress(progress_path(self._directory, pid))
        passed_s = min(now_s - self._checked_s, MAX_CHECK_S)
        self._checked_s = now_s
        if pid != self._pid:
            self._pid, self._steps, self._still_s, self._waited = pid, {}, {}, None
        waited, self._waited = self._waited, None
        if any(state.is_live and state.steps == self._steps.get(track) for track, state in found.items()):
            self._waited = self._waits(pid)  # only now, because it reads all of /proc
        if waited is None or self._waited is None:  # time counts from here on
            passed_s = starved_s = 0.0
        else:
            waits = self._waited
            starved_s = max((waits[task] - before for task, before in waited.items() if task in waits), default=0.0)
        for track, state in found.items():
            if not state.is_live or state.steps != self._steps.get(track):
                self._still_s[track] = 0.0
            else:
                self._still_s[track] += max(passed_s - starved_s, 0.0)
            self._steps[track] = state.steps
            if self._still_s[track] > self._most_s:
                where = f" while it works on query {state.query}" if state.query else ""
                return f"{track.name.lower()} has made no step for {self._still_s[track]:.0f} s{where}"
        return ""
