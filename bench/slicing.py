"""`python -m bench.slicing [--smoke]`: the cost of concurrent windows that share slices, compared with one window.

A stream of 20,000 records/s; windows of 100 s, of which 1 to 100 are open at any time. Slicing updates one slice per
record for any number of windows (goal: at most 1.5 times the time of a single window). Bucketing, which updates each
window separately, is measured on a part of the stream. Times are CPU times, the minimum of several alternating runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.outcome import OUT, store_result
from bench.shared_slices import Bucketing, Slicer
from edgewater.model.windows import SlidingWindow
from edgewater.synopses import CountMin, DDSketch, HyperLogLog

RATE, SIZE_MS, BATCH = 20_000, 100_000, 1 << 16
CONCURRENT = (1, 10, 100)
GOAL = 1.5
SYNOPSES: dict[str, Callable[[], Any]] = {
    "count-min 5x1024": lambda: CountMin(1024, 5),
    "hyperloglog 2^12": lambda: HyperLogLog(12),
    "ddsketch 1 %": lambda: DDSketch(),
}


def stream(seconds: int, rate: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns Zipf values and their event times, in order."""
    rng = np.random.default_rng(0)
    n = rate * seconds
    return rng.zipf(1.1, n) % 100_000, np.sort(rng.integers(0, seconds * 1000, n))


def answered(slicer: Any, values: np.ndarray, times: np.ndarray) -> int:
    """Runs a stream; returns the number of answered windows."""
    windows = 0
    for at in range(0, len(values), BATCH):
        slicer.update(values[at : at + BATCH], times[at : at + BATCH])
        windows += len(slicer.advance(int(times[min(at + BATCH, len(times)) - 1])))
    return windows + len(slicer.finish(int(times[-1])))


def seconds(slicer: Any, values: np.ndarray, times: np.ndarray) -> float:
    """Returns the CPU time of a stream."""
    began = time.process_time()
    answered(slicer, values, times)
    return time.process_time() - began


def cells(length_s: int, rate: int, repeats: int) -> list[dict[str, Any]]:
    values, times = stream(length_s, rate)
    part = len(values) // 20
    rows = []
    for name, make in SYNOPSES.items():
        took: dict[int, float] = {k: float("inf") for k in CONCURRENT}
        for _ in range(repeats):  # alternating, so that conditions are equal
            for k in CONCURRENT:
                took[k] = min(took[k], seconds(Slicer(make, SlidingWindow(SIZE_MS, SIZE_MS // k)), values, times))
        for k in CONCURRENT:
            slow = seconds(Bucketing(make, SlidingWindow(SIZE_MS, SIZE_MS // k)), values[:part], times[:part])
            rows.append(
                {
                    "synopsis": name,
                    "windows": k,
                    "slicing_m_per_s": round(len(values) / took[k] / 1e6, 2),
                    "times_a_single_window": round(took[k] / took[1], 2),
                    "goal": GOAL,
                    "bucketing_m_per_s": round(part / slow / 1e6, 3),
                }
            )
    return rows


@click.command()
@click.option("--seconds", default=300, show_default=True, help="Length of the stream, in event time.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--smoke", is_flag=True, help="Check that the bench runs: seconds, on few records.")
@click.option("--json", "path", type=click.Path(path_type=Path), default=OUT / "slicing.json", show_default=True)
def main(seconds: int, repeats: int, smoke: bool, path: Path) -> None:
    """Measure windows over shared slices."""
    rows = cells(seconds, 100, 1) if smoke else cells(seconds, RATE, repeats)
    for row in rows:
        missed = " !" if row["times_a_single_window"] > GOAL else ""
        click.echo("  ".join(f"{name} {value}" for name, value in row.items()) + missed)
    store_result(path, rows)


if __name__ == "__main__":
    main()
