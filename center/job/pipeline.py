"""`BatchPipeline`: a batch is applied while Spark plans the next batch and runs its tasks.

Spark plans a micro-batch, waits until the function of `foreachBatch` has run its tasks and applied their rows, then
plans the next batch. Executors are idle while the driver plans and applies. So this function hands the batch over, and
Spark considers it done. Only the result store records which batches have been applied, and every stream begins at its
positions (`center.job.job`). If a stream has read a batch, but not applied it, the next stream reads the batch again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from center.job.microbatch import BatchFailed, BatchProcessor

CANCEL_AGAIN_S = 0.2
"""Interval of cancelling: a Spark job may begin after the running jobs were cancelled."""


class BatchPipeline:
    """A function for `foreachBatch` that reads and applies micro-batches in two threads.

    A pipeline serves the streams of a job, one after the other. It keeps the rows of at most two batches: the batch
    that is being applied, and the next batch.

    Args:
        before_read: called by the thread that runs a batch's Spark jobs, before each batch.
        cancel: cancels these jobs.
        plans_ahead: whether Spark plans a batch while the tasks of the previous batch run. Only if they run on other
            machines: on one machine planning would take their CPU time, and make more batches of the same frames.
        overlaps: whether a batch may be read while the previous batch is applied. If not, each is applied before Spark
            plans the next batch. Used after failures: if a batch kills the process, the earlier batches are stored.
    """

    def __init__(
        self,
        processor: BatchProcessor,
        before_read: Callable[[], None] = lambda: None,
        cancel: Callable[[], None] = lambda: None,
        plans_ahead: bool = True,
        overlaps: Callable[[], bool] = lambda: True,
    ) -> None:
        self._processor, self._before_read, self._cancel = processor, before_read, cancel
        self._plans_ahead, self._overlaps = plans_ahead, overlaps
        self._reader = ThreadPoolExecutor(1, "read-batch")
        self._applier = ThreadPoolExecutor(1, "apply-batch")
        self._lock = threading.Lock()
        self._reading: Future[None] | None = None
        self._applying: Future[None] | None = None
        self._ends = False

    def begin(self) -> None:
        """Begins a stream, at the result store's positions."""
        self._reading = self._applying = None
        self._ends = False

    def __call__(self, frame: Any, batch_id: int) -> None:
        """Hands a batch over, and returns when Spark may plan the next batch.

        It waits until the tasks of the previous batch have run. Without `plans_ahead` it waits for this batch's tasks
        too, and without overlap until this batch is applied.

        Raises:
            BatchFailed: a batch has failed, or the stream ends.
        """
        _require_success(self._reading)
        with self._lock:
            if self._ends:
                raise BatchFailed(f"batch {batch_id}: its stream ends")
            self._reading = self._reader.submit(self._read, frame, batch_id)
        overlaps = self._overlaps()
        if not (overlaps and self._plans_ahead):
            _require_success(self._reading)
        if not overlaps:
            _require_success(self._applying)

    def _read(self, frame: Any, batch_id: int) -> None:
        try:
            self._before_read()
        except Exception as exc:
            raise BatchFailed(f"batch {batch_id}: {type(exc).__name__}") from None
        batch = self._processor.read(frame, batch_id, self._is_moot)
        _require_success(self._applying)
        if not self._ends:
            self._applying = self._applier.submit(self._processor.apply, batch)

    def _is_moot(self) -> bool:
        return self._ends or _failure(self._applying) is not None

    @property
    def failure(self) -> Exception | None:
        """The failure of a batch, after which the stream has to end; None: no batch has failed.

        The caller polls it, because a failure raises only if there is a further batch.
        """
        return _failure(self._applying) or _failure(self._reading)

    def end(self) -> None:
        """Cancels the batch that is being read and waits for the batch that is being applied.

        A batch that has been read and not applied is dropped: the next stream reads it again.
        """
        with self._lock:
            self._ends = True
        if self._reading is not None:
            while not self._reading.done():
                self._cancel()
                wait([self._reading], CANCEL_AGAIN_S)
        if self._applying is not None:
            wait([self._applying])

    def close(self) -> None:
        """Ends the threads. Call it after `end` of the last stream."""
        self._reader.shutdown()
        self._applier.shutdown()


def _require_success(of: Future[None] | None) -> None:
    """Waits for a batch. Raises its failure."""
    if of is not None:
        of.result()


def _failure(of: Future[None] | None) -> Exception | None:
    failure = of.exception() if of is not None and of.done() else None
    return failure if isinstance(failure, Exception) else None
