"""The stream on a real Spark, from frames in the log to final answers."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from center.job.admission import BatchLimits
from center.job.frame_source import FORMAT, FramePartition, FrameReader, FrameSource, SourceOptions
from center.job.job import JobConfig, start_stream
from center.job.ledger_writer import CatalogEvents, LedgerWriter
from center.job.metrics import JobMetrics
from center.job.microbatch import BatchProcessor
from center.ledger import Ledger
from center.results import ResultStore

pytestmark = pytest.mark.spark

WITHIN_S = 60
IDLE_TIMEOUT = "spark.sql.execution.pyspark.udf.idleTimeoutSeconds"
"""What a session may set instead of `spark.python.worker.idleTimeoutSeconds`."""
FOR_EVER_MS = 1 << 42
Process = Callable[[Any, int], None]


class Until:
    """A batch function that knows when all frames are consumed.

    Not `processAllAvailable`, which misses its own signal now and then and wakes up 10 s later.
    """

    def __init__(self, world: Any, process: Process) -> None:
        self._world = world
        self._process = process
        self._done = threading.Event()

    def __call__(self, frame: Any, batch_id: int) -> None:
        self._process(frame, batch_id)
        if self._world.all_consumed():
            self._done.set()

    def wait(self) -> None:
        assert self._done.wait(WITHIN_S), "frames are left"


class Run:
    """A job's parts as one process has them, without the deadline thread."""

    def __init__(self, world: Any, **settings: Any) -> None:
        self.world = world
        self.config = JobConfig(
            world.catalog_url,
            world.results_url,
            world.log_dir,
            world.path / "work",
            clock=world.clock,
            **{"keep_frames_ms": FOR_EVER_MS} | settings,
        )
        self.metrics = JobMetrics()
        self.store = ResultStore(world.results_url)
        ledger = Ledger()
        self.store.load_ledger(ledger)
        catalog_events = CatalogEvents(world.catalog)
        self.writer = LedgerWriter(ledger, self.store, catalog_events, self.metrics, now_ms=world.clock)
        self.process = BatchProcessor(
            self.writer, world.catalog, self.metrics, world.log_dir, now_ms=world.clock, monotonic=time.monotonic
        )

    @contextmanager
    def streaming(self, spark: Any, process: Process | None = None) -> Iterator[Any]:
        spark.dataSource.register(FrameSource)
        query = start_stream(spark, self.config, process or self.process)
        try:
            yield query
        finally:
            query.stop()
            self.writer.close()
            self.store.close()

    def drain(self, spark: Any, process: Process | None = None) -> None:
        """Streams until a batch has been processed and nothing is left."""
        with self.streaming(spark, until := Until(self.world, process or self.process)):
            until.wait()

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"edgewater_job_{name}_total", labels) or 0.0


def test_final_answers_say_what_the_edges_saw(spark: Any, shared_world: Any) -> None:
    world = shared_world
    refs = world.register("a", "b")
    for window in range(4):
        for ref in refs:
            world.ship_window(ref, window)
    for ref in refs:
        world.end(ref)

    run = Run(world)
    run.drain(spark)

    assert world.all_consumed()
    assert world.answers() == world.truth
    assert world.observed() == world.records
    assert run.counted("frames") == sum(world.catalog.frames.last_positions().values())


def test_a_stream_stopped_midway_that_lost_its_checkpoint_counts_all_once(spark: Any, world: Any) -> None:
    refs = world.register("a", "b")
    for window in range(4):
        for ref in refs:
            world.ship_window(ref, window)
    first = Run(world, limits=BatchLimits(frames=5))
    enough = threading.Event()

    def process(frame: Any, batch_id: int) -> None:
        first.process(frame, batch_id)
        if batch_id == 2:
            enough.set()

    with first.streaming(spark, process):
        assert enough.wait(WITHIN_S)
    assert 0 < sum(world.store.consumed().values()) < sum(world.catalog.frames.last_positions().values())
    shutil.rmtree(first.config.work_dir)
    for ref in refs:
        world.end(ref)
    Run(world).drain(spark)

    assert world.answers() == world.truth
    assert world.observed() == world.records


def test_a_crash_after_the_commit_counts_nothing_twice(spark: Any, world: Any) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    world.end(ref)
    first = Run(world)

    def process(frame: Any, batch_id: int) -> None:
        first.process(frame, batch_id)
        raise RuntimeError("killed between our commit and Spark's")

    with pytest.raises(StreamingQueryException), first.streaming(spark, process) as query:
        query.awaitTermination(WITHIN_S)
    Run(world).drain(spark)

    assert world.answers() == world.truth
    assert world.observed() == world.records


def test_a_batch_that_spark_runs_again_changes_nothing(spark: Any, world: Any) -> None:
    (ref,) = world.register("a")
    for window in range(3):
        world.ship_window(ref, window)
    world.end(ref)
    run = Run(world, limits=BatchLimits(frames=4))

    def twice(frame: Any, batch_id: int) -> None:
        run.process(frame, batch_id)
        run.process(frame, batch_id)

    run.drain(spark, twice)

    assert world.answers() == world.truth
    assert world.observed() == world.records


@contextmanager
def kept_checkpoint(
    spark: Any, run: Run, process: Process, source: type[FrameSource] = FrameSource, idle_timeout: str = "60s"
) -> Iterator[Any]:
    """A stream on a checkpoint that is kept, as the job never has one."""
    spark.dataSource.register(source)
    config = run.config
    options = SourceOptions(
        config.catalog_url, config.results_url, str(config.log_dir), config.limits, keep_frames_ms=FOR_EVER_MS
    )
    frames = spark.readStream.format(FORMAT).options(**options.to_options()).load()
    checkpoint = run.world.path / "kept"
    spark.conf.set(IDLE_TIMEOUT, idle_timeout)
    query = frames.writeStream.foreachBatch(process).option("checkpointLocation", str(checkpoint)).start()
    try:
        yield query
    finally:
        spark.conf.unset(IDLE_TIMEOUT)
        query.stop()
        run.writer.close()
        run.store.close()


def test_a_checkpoint_behind_the_store_counts_nothing_twice(spark: Any, world: Any) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    first = Run(world)
    with kept_checkpoint(spark, first, until := Until(world, first.process)):
        until.wait()
    world.ship_window(ref, 1)
    world.end(ref)
    Run(world).drain(spark)

    again = Run(world)
    with kept_checkpoint(spark, again, until := Until(world, again.process)):
        until.wait()

    assert again.counted("batches") == 1
    assert again.counted("frames") == 0
    assert world.answers() == world.truth
    assert world.observed() == world.records


def test_a_checkpoint_ahead_of_the_store_fails_and_a_new_one_loses_nothing(spark: Any, world: Any) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    first = Run(world, limits=BatchLimits(frames=3))  # two batches: Spark commits one when the next begins
    with kept_checkpoint(spark, first, until := Until(world, first.process)):
        until.wait()
    world.lose_results()
    world.ship_window(ref, 1)
    world.end(ref)

    restored = Run(world)
    with pytest.raises(StreamingQueryException), kept_checkpoint(spark, restored, restored.process) as query:
        query.awaitTermination(WITHIN_S)
    assert "were not read before later ones" in str(restored.process.failure)
    Run(world).drain(spark)

    assert world.answers() == world.truth
    assert world.observed() == world.records


def test_frames_that_were_dropped_and_never_applied_are_told_and_passed(spark: Any, world: Any) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    world.catalog.frames.drop({"a@1": 2})
    world.end(ref)

    run = Run(world)
    run.drain(spark)

    assert run.counted("skipped", kind="lost") == 1
    (alarm,) = world.catalog.alarms.latest()
    assert (alarm.kind, alarm.message) == ("frames-lost", "query a@1: frames 1 to 2 were dropped unread")


def test_a_damaged_frame_is_skipped_counted_and_alarmed(spark: Any, world: Any) -> None:
    refs = world.register("a", "b")
    for ref in refs:
        world.ship_window(ref, 0)
    (victim,) = world.catalog.frames.entries("a@1", 0, 1)
    path = world.log_dir / victim.segment
    data = bytearray(path.read_bytes())
    data[victim.offset + victim.length - 1] ^= 0xFF
    path.write_bytes(data)
    for ref in refs:
        world.end(ref)

    run = Run(world)
    run.drain(spark)

    assert world.all_consumed()
    whole = {at: size for at, size in world.truth.items() if at[0] == refs[1]}
    answers = world.answers()
    assert {at: size for at, size in answers.items() if at[0] == refs[1]} == whole
    assert sum(answers.values()) < sum(world.truth.values())
    assert run.counted("skipped", kind="frame-damaged") == 1
    (alarm,) = world.catalog.alarms.latest()
    assert alarm.kind == "frame-damaged"
    assert "query a@1, frame 1" in alarm.message


def test_frames_of_a_deleted_query_are_consumed_and_forgotten(spark: Any, world: Any) -> None:
    refs = world.register("a", "b")
    for ref in refs:
        world.ship_window(ref, 0)
        world.end(ref)
    world.catalog.queries.delete("a", world.now)

    Run(world).drain(spark)

    assert world.all_consumed()
    assert {ref for ref, *_ in world.answers()} == {refs[1]}


def test_applied_frames_leave_the_index_and_then_the_disk(spark: Any, world: Any) -> None:
    (ref,) = world.register("a")
    run = Run(world, keep_frames_ms=0, retention_every_ms=0, limits=BatchLimits(frames=4))
    for window in range(20):
        world.ship_window(ref, window)
    world.end(ref)
    before = len(list(world.log_dir.rglob("*.frames")))

    run.drain(spark)

    left = world.catalog.frames.entries("a@1", 0, 1 << 40)
    assert len(left) <= 8, "all but those of the last batches"
    assert len(list(world.log_dir.rglob("*.frames"))) < before
    assert world.answers() == world.truth


def test_a_large_batch_is_read_by_several_tasks_and_merged_once(spark: Any, world: Any) -> None:
    (ref,) = world.register("a")
    big = "/" + "x" * 4_000
    total = 0
    for number in range(60):
        urls = [f"{big}{number}-{i}" for i in range(20)]
        total += len(urls)
        world.ship_records(world.edges[0], ref, 0, urls)
    world.end(ref)

    Run(world).drain(spark)

    assert sum(world.answers().values()) == total


@pytest.mark.slow
def test_a_worker_that_hangs_on_a_frame_is_ended_and_its_batch_fails(spark: Any, world: Any) -> None:
    """By default after a minute. The frame is then found by trying it (`center/job/examination.py`)."""

    class HangingReader(FrameReader):
        def read(self, partition: FramePartition) -> Iterator[Any]:
            time.sleep(1 << 20)
            return iter(())

    class HangingSource(FrameSource):
        def streamReader(self, schema: Any) -> FrameReader:  # noqa: N802
            return HangingReader(SourceOptions.from_options(self.options))

    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    hanging, began_s = Run(world), time.monotonic()
    with (
        pytest.raises(StreamingQueryException),
        kept_checkpoint(spark, hanging, hanging.process, HangingSource, "1s") as query,
    ):
        query.awaitTermination(WITHIN_S)
    assert time.monotonic() - began_s < WITHIN_S
    world.end(ref)
    Run(world).drain(spark)
    assert world.answers() == world.truth
