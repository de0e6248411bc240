"""Dropping old answers while the job runs, whether or not frames come: in a thread beside it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from center.results.store import ResultStore
from edgewater.errors import StorageError

logger = logging.getLogger(__name__)

EVERY_S = 60.0
SOON_S = 0.05
"""Between two transactions while there is more to drop: on SQLite the job has to get in between."""


@contextmanager
def trimming(store: ResultStore, keep_ms: int, now_ms: Callable[[], int], every_s: float = EVERY_S) -> Iterator[None]:
    """Trims the store now and then for as long as the context lasts; see `ResultStore.trim`.

    Args:
        keep_ms: how long answers stay after they were given.
        now_ms: wall clock, ms.
        every_s: how often there is a look.
    """
    stop = threading.Event()

    def trim() -> None:
        pause_s = 0.0
        while not stop.wait(pause_s):
            try:
                pause_s = SOON_S if store.trim(now_ms() - keep_ms) else every_s
            except StorageError as exc:
                logger.warning("old answers are not dropped, and tried again: %s", exc)
                pause_s = every_s

    thread = threading.Thread(target=trim, name="answer-retention", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
