"""Runs plans of the job one after the other, without a JVM. Benches measure the driver and its tasks with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from center.job.batch_applier import BatchApplier, Times
from center.job.loop_core import Look, Run
from center.job.merge import PartMerged, merge_part
from center.job.planner import FramePlanner, divide


def next_run(planner: FramePlanner, after: Mapping[str, int]) -> Run | None:
    """Returns the next frames after the positions; None: there are none."""
    while (looked := planner.look(Look(after, frozenset()))).again_s is not None:
        pass
    return looked.run or next(iter(looked.heavy), None)


def merge(run: Run, log_dir: Path, parallelism: int = 2) -> list[PartMerged]:
    """Merges a run as tasks do. Raises RuntimeError if a task fails."""
    outcomes = [merge_part(str(log_dir), part) for part in divide(run.frames, parallelism)]
    merged = [outcome for outcome in outcomes if isinstance(outcome, PartMerged)]
    if len(merged) < len(outcomes):
        raise RuntimeError(f"a task failed: {outcomes}")
    return merged


def apply(applier: BatchApplier, run: Run, merged: list[PartMerged], now_ms: int) -> None:
    """Applies a run. Raises RuntimeError if a query is not applied."""
    if failed := applier.apply(run, merged, Times(now_ms, now_ms)):
        raise RuntimeError(f"queries are not applied: {failed}")
