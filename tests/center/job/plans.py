"""The job's production path from the frame log to answers, without a JVM: tasks run in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from center.job.admission import BatchLimits
from center.job.batch_applier import BatchApplier
from center.job.delta_sweep import MAX_UNAPPLIED_BYTES, DeltaSweep
from center.job.frame_retention import FrameRetention
from center.job.job_parts import JobParts
from center.job.ledger_writer import LedgerWriter
from center.job.loop_core import FIRST_DELAY_S, Lane
from center.job.merge import Frame, Part, PartOutcome
from center.job.merge_loop import MergeLoop
from center.job.merger import Merger
from center.job.metrics import JobMetrics
from center.job.planner import FramePlanner
from center.ledger import Ledger
from center.results import COSTLY_MS, MAX_ANSWER_BYTES, ResultStore
from center.storage.delta_segments import SpanPart
from center.storage.frame_log import FrameLog
from center.storage.progress import DriverProgress, NoProgress
from edgewater.synopses import plugins
from edgewater.synopses.encoding import codec
from tests.center.job.conftest import synopsis
from tests.center.job.in_process_merger import InProcessMerger
from tests.packages import write_package

FOR_EVER_MS = 1 << 42
WITHIN_S = 60.0
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
    write_package(path, "deadly", DEADLY, plugins.GROUP, {"deadly": "deadly:ALL"})
    return deadly("")


def deadly(does: str) -> bytes:
    """A partial of the kind that `install_deadly` installs, which does something else to the process."""
    message = codec.unseal(synopsis(["/evil"], [1]))
    message.parts[0].kind, message.parts[0].parameters = "deadly", does
    return codec.seal(message)


class Failing(Exception):
    """Frames are not applied, whatever they are: the loop waits before it tries again."""


class Recorded:
    """A merger that records what is submitted: lane and number of frames of each plan, and the futures."""

    def __init__(self, merger: Merger) -> None:
        self._merger = merger
        self.submitted: list[tuple[Lane, int]] = []
        self.futures: list[Future[Any]] = []

    def submit(
        self, number: int, parts: Sequence[Part], lane: Lane, description: str, prefix: str
    ) -> Future[list[PartOutcome]]:
        self.submitted.append((lane, sum(0 if isinstance(part, SpanPart) else len(part) for part in parts)))
        submitted = self._merger.submit(number, parts, lane, description, prefix)
        self.futures.append(submitted)
        return submitted

    def probe(self) -> Future[None]:
        probed = self._merger.probe()
        self.futures.append(probed)
        return probed

    def cancel(self, number: int) -> None:
        self._merger.cancel(number)

    def close(self) -> None:
        self._merger.close()

    @property
    def is_busy(self) -> bool:
        self.futures = [future for future in self.futures if not future.done()]
        return bool(self.futures)


class Plans:
    """One run of the job's loop over a `World`, without Spark; another one is a restart."""

    def __init__(
        self,
        world: Any,
        *,
        keep_frames_ms: int = FOR_EVER_MS,
        limits: BatchLimits | None = None,
        progress: DriverProgress = NoProgress(),  # noqa: B008
        kills: Callable[[Sequence[Frame]], bool] = lambda _: False,
        merger: Merger | None = None,
        costly_ms: float = COSTLY_MS,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        most_unapplied_bytes: int = MAX_UNAPPLIED_BYTES,
    ) -> None:
        self._costly_ms, self.max_answer_bytes, self._most_unapplied = costly_ms, max_answer_bytes, most_unapplied_bytes
        self.merger = Recorded(merger or InProcessMerger(world.task, kills))
        self.world, self._keep_frames_ms, self._limits, self._progress = world, keep_frames_ms, limits, progress
        self.seconds = 0.0
        self._open()

    def _open(self) -> None:
        world = self.world
        self.metrics, self.ledger = JobMetrics(), Ledger()
        self.store = ResultStore(
            world.results_url, self.max_answer_bytes, costly_ms=self._costly_ms, segments=world.segments
        )
        self.store.load_ledger(self.ledger)
        shared = JobParts(world.catalog, self.store, self.metrics, world.clock, self._progress)
        self.writer = LedgerWriter(self.ledger, shared)
        self.applier = BatchApplier(self.writer, shared, world.log_dir)
        planner = FramePlanner(world.catalog, self.writer.consumed, self._limits or BatchLimits(), lambda: self.seconds)
        retention = FrameRetention(shared, FrameLog(world.log_dir), keep_ms=self._keep_frames_ms, every_ms=0)
        sweep = DeltaSweep(shared, every_ms=0, most_bytes=self._most_unapplied)
        self.loop = MergeLoop(
            planner, self.applier, self.merger, 2, lambda: retention.run(world.clock()), sweep, now_ms=world.clock,
            monotonic=lambda: self.seconds,
        )  # fmt: skip
        self.writer.on_awaited = self.loop.want_answers
        self._begun = False

    def close(self) -> None:
        self.writer.close()
        self.store.close()

    def restart(self) -> None:
        """Starts again: nothing is kept but the stores."""
        self.close()
        self._open()

    def run(self, most: int = 200) -> int:
        """Runs plans until no frame is left and no answer is due. Returns their number; raises Failing."""
        for number in range(most):
            if not self.run_one():
                while (due_ms := self.ledger.next_deadline()) is not None and due_ms <= self.world.clock():
                    self.writer.advance()
                    self.run_one()  # merges of answers
                return number
        raise AssertionError("frames are left")

    def run_one(self) -> bool:
        """Runs until a plan is applied; False: no frame is left. Raises Failing."""
        before = self.loop.applied
        if not self._begun:
            self._begun = True
            self.loop.begin_term()
        else:
            self.loop.wake()
        while self.loop.applied == before:
            busy = self.merger.is_busy
            if self.loop.turn(WITHIN_S if busy else 0.0) or busy:
                continue
            due_s = self.loop.core.next_deadline()
            if due_s is None:
                return False
            is_failing = due_s - self.seconds >= FIRST_DELAY_S
            self.seconds = max(due_s, self.seconds)
            if is_failing:
                raise Failing(self.loop.core.problem)
            self.loop.wake()
        return True

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"edgewater_job_{name}_total", labels) or 0.0
