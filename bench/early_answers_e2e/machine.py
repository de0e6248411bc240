"""The load of the machine during a measurement, to detect results that other processes have influenced."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
CROWDED_LOAD_PER_CORE, CROWDED_WAITING = 1.0, 0.2


@dataclass(frozen=True, slots=True)
class MachineSnapshot:
    """A snapshot of the machine and of a tree of processes.

    Attributes:
        stalled_us: time since boot during which some thread of the machine waited for a core.
        ran_ns, waited_ns: by thread of the tree, time on a core and time ready to run without one.
    """

    at_s: float
    stalled_us: int
    ran_ns: dict[str, int]
    waited_ns: dict[str, int]

    @classmethod
    def take(cls, root: int) -> MachineSnapshot:
        """Returns a snapshot of the process tree under `root`. Omits processes that cannot be read."""
        ran, waited = dict[str, int](), dict[str, int]()
        for thread in _threads(root):
            with suppress(OSError, ValueError):
                on_core, ready, _ = (int(x) for x in (thread / "schedstat").read_text().split())
                ran[str(thread)], waited[str(thread)] = on_core, ready
        return cls(time.monotonic(), _stalled_us(), ran, waited)

    def since(self, before: MachineSnapshot) -> dict[str, Any]:
        """Returns the differences to an earlier snapshot, for threads that exist in both."""
        ran = sum(n - before.ran_ns[t] for t, n in self.ran_ns.items() if t in before.ran_ns) / 1e9
        waited = sum(n - before.waited_ns[t] for t, n in self.waited_ns.items() if t in before.waited_ns) / 1e9
        elapsed_s = self.at_s - before.at_s
        load = os.getloadavg()[0]
        some_waited = (self.stalled_us - before.stalled_us) / 1e6 / elapsed_s
        cores = os.cpu_count() or 1
        crowded = load > CROWDED_LOAD_PER_CORE * cores or some_waited > CROWDED_WAITING
        return {
            "cores": cores,
            "load": [round(x, 1) for x in os.getloadavg()],
            "some_waited_for_a_core": round(some_waited, 3),
            "ours_cores_used": round(ran / elapsed_s, 2),
            "ours_waiting_share": round(waited / max(ran + waited, 1e-9), 3),
            "verdict": "CROWDED: latencies are the machine's as much as the product's" if crowded else "quiet",
        }


def _stalled_us() -> int:
    with suppress(OSError, ValueError, IndexError):
        return int((PROC / "pressure" / "cpu").read_text().splitlines()[0].rpartition("total=")[2])
    return 0


def _threads(root: int) -> Iterator[Path]:
    parents = dict[int, int]()
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    tree, fresh = set[int](), {root}
    while fresh:
        tree |= fresh
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - tree
    for pid in tree:
        with suppress(OSError):
            yield from (PROC / str(pid) / "task").iterdir()
