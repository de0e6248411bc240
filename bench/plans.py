"""A center's frame log, catalog and job without a network and a JVM, to measure the driver and its tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from center.catalog import Catalog, SessionStart
from center.job.admission import BatchLimits, LeastSlack
from center.job.batch_applier import BatchApplier, Times
from center.job.job_parts import JobParts
from center.job.ledger_writer import LedgerWriter
from center.job.loop_core import Look, Run
from center.job.merge import MergeTask, PartMerged
from center.job.metrics import JobMetrics
from center.job.planner import FramePlanner, divide
from center.ledger import Ledger
from center.results import ResultStore
from center.storage.delta_segments import DeltaSegments
from center.storage.frame_log import FrameLog
from edgewater.base.streams import LIVE, EdgeId
from edgewater.model.edge_records import StreamRecord
from edgewater.model.query import QuerySpec


class JobCenter:
    """Runs the plans of the job one after the other.

    Attributes:
        refs: of the queries, in the order of `specs`.
        after: the positions that are applied, by query.
    """

    def __init__(
        self,
        directory: Path,
        specs: Sequence[QuerySpec],
        edges: Sequence[EdgeId],
        columns: Mapping[str, pa.DataType],
        now_ms: Callable[[], int],
        limits: BatchLimits | None = None,
        admission: LeastSlack | None = None,
    ) -> None:
        url, self.log_dir, self._now_ms = f"sqlite:///{directory}/center.db", directory / "log", now_ms
        self.catalog, self.log, self.ledger = Catalog(url), FrameLog(self.log_dir), Ledger()
        streams = (StreamRecord(specs[0].stream, dict(columns), LIVE),)
        self.catalog.edges.begin_sessions(
            [SessionStart(e, "i", {}, streams, oldest_seq=0, next_seq=0, now_ms=now_ms(), session=e) for e in edges]
        )
        self.refs = [self.catalog.queries.register(spec, now_ms())[0].ref for spec in specs]
        segments = DeltaSegments(self.log_dir / "deltas")
        self._store, self._task = ResultStore(url, segments=segments), MergeTask(self.log_dir, segments)
        shared = JobParts(self.catalog, self._store, JobMetrics(), now_ms)
        self.writer = LedgerWriter(self.ledger, shared)
        self.planner = FramePlanner(
            self.catalog, self.writer.consumed, limits or BatchLimits(), time.monotonic, admission=admission
        )
        self._applier = BatchApplier(self.writer, shared, self.log_dir)
        self.after: dict[str, int] = {}

    def next_run(self) -> Run | None:
        """Returns the next frames; None: there are none."""
        while (looked := self.planner.look(Look(self.after, frozenset()))).again_s is not None:
            pass
        return looked.run or next(iter(looked.heavy), None)

    def merge(self, run: Run, parallelism: int = 2) -> list[PartMerged]:
        """Merges a run as tasks do. Raises RuntimeError if a task fails."""
        outcomes = [self._task.merge("1-of-1/0/0", part) for part in divide(run.frames, parallelism)]
        merged = [outcome for outcome in outcomes if isinstance(outcome, PartMerged)]
        if len(merged) < len(outcomes):
            raise RuntimeError(f"a task failed: {outcomes}")
        return merged

    def apply(self, run: Run, merged: list[PartMerged]) -> None:
        """Applies a run. Raises RuntimeError if a query is not applied."""
        if failed := self._applier.apply(run, merged, Times(self._now_ms(), self._now_ms())):
            raise RuntimeError(f"queries are not applied: {failed}")
        self.after |= run.through

    def close(self) -> None:
        self.writer.close()
        self._store.close()
        self.catalog.close()
