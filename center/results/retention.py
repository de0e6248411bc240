"""Deletion of old answers, in a thread beside the job."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from center.results.store import ResultStore
from edgewater.base.errors import StorageError
from edgewater.runtime.tasks import Tasks

log = logging.getLogger(__name__)

EVERY_S = 60.0  # limit: work of deleting
SOON_S = 0.05  # limit: how long other writers wait
"""Pause between two transactions while answers remain to be deleted. On SQLite it lets the job write in between."""


@contextmanager
def trimming(
    store: ResultStore,
    keep_ms: int,
    now_ms: Callable[[], int],
    every_s: float = EVERY_S,
    *,
    wait_ms: int = 0,
    awaited: Callable[[], int | None] = lambda: None,
    expired: Callable[[int, int], None] = lambda before_ms, now_ms: None,
    tasks: Tasks | None = None,
) -> Iterator[None]:
    """Deletes old answers periodically while the context is entered; see `ResultStore.trim`.

    Args:
        keep_ms: how long answers are kept.
        now_ms: wall clock, ms.
        every_s: pause between runs.
        wait_ms: how much longer answers are kept that a sink has not written yet.
        awaited: returns the id of the newest answer that all sinks have; None: there is no sink.
        expired: called with a wall time, and the time now, when no answer remains to be deleted. Answers that were
            given before the first time are no longer kept.
        tasks: the tasks of the process.
    """
    stop = threading.Event()

    def dropped() -> int:
        before_ms, through = now_ms() - keep_ms, awaited()
        count = store.trim(before_ms, through)
        if not count and through is not None:
            count = store.trim(before_ms - wait_ms)
        if not count:
            expired(before_ms - wait_ms, now_ms())
        return count

    def trim() -> None:
        pause_s = 0.0
        while not stop.wait(pause_s):
            try:
                pause_s = SOON_S if dropped() else every_s
            except StorageError as exc:
                log.warning("old answers could not be dropped, retrying: %s", exc)
                pause_s = every_s

    thread = (tasks or Tasks()).thread("answer-retention", trim)
    try:
        yield
    finally:
        stop.set()
        thread.join()
