"""The job's production path from the frame log to answers, without a JVM: Spark only carries rows between two parts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadMaxBytes

from center.job.admission import BatchLimits
from center.job.frame_source import FrameReader, SourceOptions
from center.job.ledger_writer import CatalogEvents, LedgerWriter
from center.job.metrics import JobMetrics
from center.job.microbatch import BatchProcessor
from center.job.rows import ROW_SCHEMA
from center.ledger import Ledger
from center.results import ResultStore
from center.storage.progress import DriverProgress, NoProgress
from edgewater.synopses import plugins
from edgewater.synopses.encoding import codec
from tests.center.job.conftest import synopsis

FOR_EVER_MS = 1 << 42
DEADLY = """
import os, signal, sys, time

from edgewater.synopses.exact.aggregates import IntegerSumStack


class DeadlyStack(IntegerSumStack):
    kind = "deadly"

    @classmethod
    def from_message(cls, message):
        if message.parameters == "spares workers" and any("pyspark" in argument for argument in sys.orig_argv):
            message.parameters = "{}"
            read = super().from_message(message)
            read.spares_workers = True
            return read
        if message.parameters == "hangs":
            time.sleep(1 << 20)
        elif message.parameters == "takes memory":
            bytes(8 << 30)
        os.kill(os.getpid(), signal.SIGSEGV)

    def to_message(self):
        message = super().to_message()
        message.parameters = "spares workers" if hasattr(self, "spares_workers") else ""
        return message


ALL = DeadlyStack
"""


def install_deadly(path: Path) -> bytes:
    """Installs a kind of synopsis in a directory, for processes that have it on their path, whose native code is at
    fault; returns a partial of it, which ends the process."""
    info = path / "deadly-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deadly\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\ndeadly = deadly:ALL\n")
    (path / "deadly.py").write_text(DEADLY)
    return deadly("")


def deadly(does: str) -> bytes:
    """A partial of the kind that `install_deadly` installs, which does something else to the process."""
    message = codec.unseal(synopsis(["/evil"], [1]))
    message.parts[0].kind, message.parts[0].parameters = "deadly", does
    return codec.seal(message)


@dataclass(frozen=True)
class Collected:
    """What `foreachBatch` passes, as far as the job uses it."""

    rows: pa.Table

    def toArrow(self) -> pa.Table:  # noqa: N802
        return self.rows


class MicroBatches:
    """One run of the job's reader and processor over a `World`; another one is a restart."""

    def __init__(
        self,
        world: Any,
        *,
        keep_frames_ms: int = FOR_EVER_MS,
        limits: BatchLimits | None = None,
        progress: DriverProgress = NoProgress(),  # noqa: B008
    ) -> None:
        self.world, self._keep_frames_ms, self._limits, self._progress = world, keep_frames_ms, limits, progress
        self._open()

    def _open(self) -> None:
        world = self.world
        options = SourceOptions(
            world.catalog_url, world.results_url, str(world.log_dir), self._limits or BatchLimits(),
            keep_frames_ms=self._keep_frames_ms, retention_every_ms=0,
        )  # fmt: skip
        self.reader, self.metrics = FrameReader(options), JobMetrics()
        self.store, self.ledger = ResultStore(world.results_url), Ledger()
        self.store.load_ledger(self.ledger)
        self.writer = LedgerWriter(
            self.ledger, self.store, CatalogEvents(world.catalog), self.metrics, now_ms=world.clock,
            progress=self._progress,
        )  # fmt: skip
        self.process = BatchProcessor(
            self.writer, world.catalog, self.metrics, world.log_dir, now_ms=world.clock, monotonic=time.monotonic
        )  # fmt: skip
        self._at = self.reader.initialOffset()

    def close(self) -> None:
        self.writer.close()
        self.store.close()
        for opened in ("_catalog", "_store"):
            if opened in vars(self.reader):
                getattr(self.reader, opened).close()

    def restart(self) -> None:
        """Starts again: nothing is kept but the stores."""
        self.close()
        self._open()

    def run(self, most: int = 100) -> int:
        """Runs batches until no frame is left and no answer is due. Returns their number; raises BatchFailed."""
        for number in range(most):
            if not self.run_one():
                while (due_ms := self.ledger.next_deadline()) is not None and due_ms <= self.world.clock():
                    self.writer.advance()
                return number
        raise AssertionError("frames are left")

    def run_one(self) -> bool:
        """Runs one batch; False: no frame is left. Raises BatchFailed."""
        end = self.reader.latestOffset(self._at, ReadMaxBytes(1 << 30))
        if end == self._at:
            return False
        read = [batch for part in self.reader.partitions(self._at, end) for batch in self.reader.read(part)]
        self.process(Collected(pa.Table.from_batches(read, ROW_SCHEMA)), 0)
        self._at = end
        self.reader.commit(end)
        return True

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"edgewater_job_{name}_total", labels) or 0.0
