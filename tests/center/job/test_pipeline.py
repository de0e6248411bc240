"""Batches that are read while the one before is applied."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import pyarrow as pa
import pytest

from center.job.job import READS
from center.job.microbatch import BatchFailed, BatchProcessor, ReadBatch
from center.job.pipeline import BatchPipeline

WITHIN_S = 60


class Recorder:
    """What of a `BatchProcessor` the pipeline calls, with a log; batches wait for their gate, and some fail."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.begun: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self.failing: set[str] = set()
        self.failure: Exception | None = None

    def read(self, frame: Any, batch_id: int, is_moot: Callable[[], bool] = lambda: False) -> ReadBatch:
        self._do(f"read {batch_id}", is_moot)
        return ReadBatch(batch_id, pa.table({}), 0.0, 0, 0)

    def apply(self, batch: ReadBatch) -> None:
        self._do(f"apply {batch.number}")

    def _do(self, what: str, is_moot: Callable[[], bool] = lambda: False) -> None:
        self.log.append(f"{what} begins")
        self.begun[what].set()
        if what in self.gates:
            assert self.gates[what].wait(WITHIN_S)
        if what in self.failing:
            if not is_moot():
                self.failure = ValueError(what)
            raise BatchFailed(what)
        self.log.append(what)

    def gate(self, what: str) -> threading.Event:
        self.gates[what] = threading.Event()
        return self.gates[what]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def pipeline(recorder: Recorder) -> Iterator[BatchPipeline]:
    pipeline = BatchPipeline(cast(BatchProcessor, recorder))
    yield pipeline
    for gate in recorder.gates.values():
        gate.set()
    pipeline.close()


def test_a_batch_is_read_while_the_one_before_is_applied_and_no_third_one_is(
    recorder: Recorder, pipeline: BatchPipeline
) -> None:
    may_apply = recorder.gate("apply 0")
    pipeline(None, 0)
    assert recorder.begun["apply 0"].wait(WITHIN_S)
    pipeline(None, 1)  # returns, so Spark plans batch 2
    assert recorder.begun["read 1"].wait(WITHIN_S)
    may_apply.set()
    pipeline(None, 2)
    pipeline.end()

    log = recorder.log
    assert log.index("read 1 begins") < log.index("apply 0") < log.index("apply 1 begins")
    assert log.index("apply 0") < log.index("read 2 begins")


@pytest.mark.parametrize("what", ["read 1", "apply 1"])
def test_after_a_failure_nothing_is_applied_until_the_next_stream(
    recorder: Recorder, pipeline: BatchPipeline, what: str
) -> None:
    recorder.failing = {what}
    pipeline(None, 0)
    pipeline(None, 1)
    with pytest.raises(BatchFailed, match=what):
        for number in range(2, 5):
            pipeline(None, number)
    pipeline.end()
    assert pipeline.failure is not None and str(recorder.failure) == what
    assert "apply 2 begins" not in recorder.log

    recorder.failing = set()
    pipeline.begin()
    assert pipeline.failure is None
    pipeline(None, 2)
    assert recorder.begun["apply 2"].wait(WITHIN_S)
    pipeline.end()
    assert "apply 2" in recorder.log and pipeline.failure is None


def test_the_failure_of_the_last_batch_is_seen_without_another_one(recorder: Recorder, pipeline: BatchPipeline) -> None:
    recorder.failing = {"apply 0"}
    pipeline(None, 0)
    assert recorder.begun["apply 0"].wait(WITHIN_S)
    pipeline.end()
    assert str(pipeline.failure) == "apply 0"


@pytest.mark.parametrize("applies", [True, False])
def test_the_end_cancels_what_is_read_waits_for_what_is_applied_and_blames_no_cancelled_batch(
    recorder: Recorder, applies: bool
) -> None:
    may_apply, cancelled = recorder.gate("apply 0"), recorder.gate("read 1")
    recorder.failing = {"read 1"} | (set() if applies else {"apply 0"})

    def cancel() -> None:
        may_apply.set()
        cancelled.set()

    pipeline = BatchPipeline(cast(BatchProcessor, recorder), cancel=cancel)
    pipeline(None, 0)
    assert recorder.begun["apply 0"].wait(WITHIN_S)
    pipeline(None, 1)
    pipeline.end()
    assert "apply 1 begins" not in recorder.log
    assert ("apply 0" in recorder.log) == applies
    assert str(recorder.failure) == ("None" if applies else "apply 0")
    assert str(pipeline.failure) == ("read 1" if applies else "apply 0")
    with pytest.raises(BatchFailed, match="read 1"):
        pipeline(None, 2)
    pipeline.close()


def test_what_waits_at_the_end_is_left_to_the_next_stream(recorder: Recorder) -> None:
    may_apply = recorder.gate("apply 0")
    pipeline = BatchPipeline(cast(BatchProcessor, recorder), cancel=may_apply.set)
    pipeline(None, 0)
    assert recorder.begun["apply 0"].wait(WITHIN_S)
    pipeline(None, 1)
    assert recorder.begun["read 1"].wait(WITHIN_S)
    pipeline.end()
    assert "apply 0" in recorder.log and "apply 1 begins" not in recorder.log
    pipeline.close()


def test_on_one_machine_a_batch_is_read_before_the_next_one_is_planned(recorder: Recorder) -> None:
    pipeline = BatchPipeline(cast(BatchProcessor, recorder), plans_ahead=False)
    may_apply = recorder.gate("apply 0")
    pipeline(None, 0)
    assert "read 0" in recorder.log and "apply 0" not in recorder.log
    may_apply.set()
    pipeline(None, 1)
    assert "read 1" in recorder.log
    pipeline.end()
    pipeline.close()


def test_without_overlap_a_batch_is_applied_before_the_next_one_is_planned(recorder: Recorder) -> None:
    pipeline = BatchPipeline(cast(BatchProcessor, recorder), overlaps=lambda: False)
    for number in range(3):
        pipeline(None, number)
        assert recorder.log[-1] == f"apply {number}"
    recorder.failing = {"apply 3"}
    with pytest.raises(BatchFailed, match="apply 3"):
        pipeline(None, 3)
    pipeline.end()
    pipeline.close()


def test_a_connection_that_fails_once_costs_one_stream(recorder: Recorder) -> None:
    failures = [OSError("too many open files")]

    def before_read() -> None:
        if failures:
            raise failures.pop()

    pipeline = BatchPipeline(cast(BatchProcessor, recorder), before_read, overlaps=lambda: False)
    with pytest.raises(BatchFailed, match="batch 0: OSError"):
        pipeline(None, 0)
    pipeline.end()
    pipeline.begin()
    pipeline(None, 0)
    assert recorder.log[-1] == "apply 0"
    pipeline.end()
    pipeline.close()


def test_a_call_after_the_end_reads_nothing(recorder: Recorder, pipeline: BatchPipeline) -> None:
    pipeline(None, 0)
    pipeline.end()
    with pytest.raises(BatchFailed, match="batch 1: its stream ends"):
        pipeline(None, 1)
    assert "read 1 begins" not in recorder.log


@pytest.mark.spark
@pytest.mark.slow
def test_the_end_cancels_sparks_tasks(spark: Any) -> None:
    """A batch whose tasks hang, as on a cluster without free executors, does not keep the job from its end."""
    started, context = threading.Event(), spark.sparkContext

    class Reads(Recorder):
        def read(self, frame: Any, batch_id: int, is_moot: Callable[[], bool] = lambda: False) -> ReadBatch:
            started.set()
            try:
                frame.toArrow()
            except Exception as exc:
                raise BatchFailed(type(exc).__name__) from None
            return super().read(frame, batch_id)

    def hang(batches: Any) -> Any:
        time.sleep(10 * WITHIN_S)
        yield from batches

    recorder, cancel = Reads(), cast(Callable[[], None], lambda: context.cancelJobsWithTag(READS))
    pipeline = BatchPipeline(cast(BatchProcessor, recorder), lambda: context.addJobTag(READS), cancel)
    pipeline(spark.range(1).mapInArrow(hang, "id long"), 0)
    assert started.wait(WITHIN_S)
    began_s = time.monotonic()
    pipeline.end()
    assert time.monotonic() - began_s < WITHIN_S
    assert pipeline.failure is not None and not recorder.log
    pipeline.close()
