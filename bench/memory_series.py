"""Memory of a system's processes as a series, and whether it is flat.

Each sample adds up the resident set (RSS) and the proportional set (PSS: pages that processes share count once) of all
processes of a kind. A line is fitted to the last two thirds of a run. The verdict is about the RSS, because the PSS
changes with other programs that share pages. The standard error accounts for dependent samples (effective number of
samples of an AR(1) series: Bayley & Hammersley, 1946).
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

FLAT_SHARE, FLAT_MINUTES, LEAST_MINUTES = 0.05, 30.0, 10.0
CRITERION = (
    f"flat: over the last two thirds, slope + 2 standard errors is below {FLAT_SHARE:.0%} of the median per"
    f" {FLAT_MINUTES:.0f} minutes; grows: slope - 2 standard errors is above it; else, and in less than"
    f" {LEAST_MINUTES:.0f} minutes: not shown"
)
MIB = float(1 << 20)


@dataclass(frozen=True, slots=True)
class Trend:
    """The course of one series.

    Attributes:
        tenths: median of each tenth of the samples.
        slope, standard_error: of the last two thirds, per minute.
        most: the high-water mark, and `most_at_min` its minute.
    """

    tenths: tuple[float, ...]
    slope: float
    standard_error: float
    most: float
    most_at_min: float
    verdict: str

    @classmethod
    def of(cls, minutes: np.ndarray, values: np.ndarray) -> Trend:
        """Fits a trend.

        Args:
            minutes, values: float64 of shape (n,), ascending in time; n of at least 6.
        """
        late = minutes >= minutes[0] + (minutes[-1] - minutes[0]) / 3
        x, y = minutes[late] - minutes[late].mean(), values[late]
        slope = float(x @ y / (x @ x))
        rest = y - y.mean() - slope * x
        scale = float(rest @ rest)
        follows = float(rest[1:] @ rest[:-1]) / scale if scale else 0.0
        follows = min(max(follows, 0.0), 0.99)
        independent = max(3.0, len(y) * (1 - follows) / (1 + follows))
        error = float(np.sqrt(scale / (independent - 2) / (x @ x)))
        allowed = FLAT_SHARE * float(np.median(y)) / FLAT_MINUTES
        verdict = "flat" if slope + 2 * error < allowed else "grows" if slope - 2 * error > allowed else "not shown"
        if minutes[-1] - minutes[0] < LEAST_MINUTES:
            verdict = "not shown"
        top = int(np.argmax(values))
        tenths = tuple(float(np.median(part)) for part in np.array_split(values, 10) if len(part))
        return cls(tenths, slope, error, float(values[top]), float(minutes[top]), verdict)

    def to_json(self) -> dict[str, Any]:
        return {
            "median_of_each_tenth_mib": [round(v, 1) for v in self.tenths],
            "slope_mib_per_minute": round(self.slope, 3),
            "standard_error": round(self.standard_error, 3),
            "high_water_mib": round(self.most, 1),
            "high_water_at_minute": round(self.most_at_min, 1),
            "verdict": self.verdict,
        }


@dataclass
class MemorySeries:
    """Samples the memory of processes in a thread, between `start` and `stop`.

    Args:
        roots: returns the processes by name; their children belong to them.
        kinds: parts of command lines by kind. The kind of another process is its root's name.
        interval_s: between two samples.
    """

    roots: Callable[[], Mapping[str, int]]
    kinds: Mapping[str, str]
    interval_s: float = 10.0
    minutes: list[float] = field(default_factory=list)
    samples: list[dict[str, dict[str, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._began_s = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after one more sample."""
        self._ending.set()
        self._thread.join()
        self._take()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._take()
            self._ending.wait(self.interval_s)

    def _take(self) -> None:
        self.minutes.append((time.monotonic() - self._began_s) / 60)
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for name, process in self.processes():
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                kind = self._kind(name, process)
                found[kind].update(pss=memory.pss, rss=memory.rss, processes=1)
                if kind == "jvm":
                    found[kind].update(heap=java_heap(process.pid))
        self.samples.append({kind: dict(each) for kind, each in found.items()})

    def processes(self) -> Iterable[tuple[str, psutil.Process]]:
        for name, pid in self.roots().items():
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(pid)
                yield from ((name, each) for each in (root, *root.children(recursive=True)))

    def _kind(self, name: str, process: psutil.Process) -> str:
        command = " ".join(process.cmdline()) + " "
        return next((kind for kind, part in self.kinds.items() if part in command), name)

    def java_processes(self) -> list[int]:
        found = []
        for name, process in self.processes():
            with contextlib.suppress(psutil.Error):
                found += [process.pid] if self._kind(name, process) == "jvm" else []
        return found

    def series(self, kind: str, what: str) -> np.ndarray:
        """Returns `what` of the processes of a kind, MiB (a number of processes: as it is), float64 (samples,)."""
        unit = 1.0 if what == "processes" else MIB
        return np.array([sample.get(kind, {}).get(what, 0.0) / unit for sample in self.samples])

    def report(self) -> dict[str, Any]:
        minutes = np.array(self.minutes)
        kinds = sorted({kind for sample in self.samples for kind in sample})
        rows: dict[str, Any] = {"criterion": CRITERION, "interval_s": self.interval_s, "processes": {}}
        for kind in kinds:
            row = {what: Trend.of(minutes, self.series(kind, what)).to_json() for what in ("pss", "rss")}
            row["verdict"] = row["rss"]["verdict"]
            if any("heap" in sample.get(kind, {}) for sample in self.samples):
                row["heap_after_collection"] = Trend.of(minutes, self.series(kind, "heap")).to_json()
            row["series_mib"] = {what: self.series(kind, what).round(1).tolist() for what in ("pss", "rss")}
            row["processes"] = self.series(kind, "processes").astype(int).tolist()
            rows["processes"][kind] = row
        rows["minutes"] = minutes.round(2).tolist()
        return rows

    def draw(self, path: Path) -> None:
        """Writes a plot with a panel per kind of process."""
        from matplotlib.figure import Figure

        kinds = sorted({kind for sample in self.samples for kind in sample})
        figure = Figure(figsize=(9, 1.8 * len(kinds)), layout="constrained")
        for axes, kind in zip(figure.subplots(len(kinds), 1, squeeze=False, sharex=True)[:, 0], kinds, strict=True):
            for what in ("rss", "pss", "heap"):
                values = self.series(kind, what)
                if values.any():
                    axes.plot(self.minutes, values, label=what, linewidth=1)
            axes.set_title(f"{kind}: {Trend.of(np.array(self.minutes), self.series(kind, 'rss')).verdict}", fontsize=9)
            axes.set_ylim(bottom=0)
            axes.set_ylabel("MiB")
            axes.legend(fontsize=7, loc="lower right")
        axes.set_xlabel("minutes")
        figure.savefig(path)


def java_heap(pid: int) -> int:
    """Returns the heap of a JVM after its last collection, bytes: survivors and the old generation; 0: unknown."""
    if shutil.which("jstat") is None:
        return 0
    done = subprocess.run(["jstat", "-gc", str(pid)], capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    if done.returncode or len(lines) < 2:
        return 0
    kib = dict(zip(lines[0], lines[1], strict=True))
    return int(sum(float(kib[column]) for column in ("S0U", "S1U", "OU")) * 1024)


def collected_heap_mib(pid: int) -> float | None:
    """Collects all garbage of a JVM. Returns its live heap in MiB, or None if no `jcmd` is installed."""
    if shutil.which("jcmd") is None:
        return None
    subprocess.run(["jcmd", str(pid), "GC.run"], capture_output=True, check=False)
    return round(java_heap(pid) / MIB, 1)
