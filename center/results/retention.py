"""Deletion of old answers, in a thread beside the job."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from center.results.store import ResultStore
from edgewater.model.errors import StorageError

logger = logging.getLogger(__name__)

EVERY_S = 60.0
SOON_S = 0.05
"""Pause between two transactions while there is more to drop: on SQLite it lets the job in between."""


@contextmanager
def trimming(store: ResultStore, keep_ms: int, now_ms: Callable[[], int], every_s: float = EVERY_S) -> Iterator[None]:
    """Trims the store periodically while the context is entered; see `ResultStore.trim`.

    Args:
        keep_ms: how long answers are kept.
        now_ms: wall clock, ms.
        every_s: pause between runs.
    """
    stop = threading.Event()

    def trim() -> None:
        pause_s = 0.0
        while not stop.wait(pause_s):
            try:
                pause_s = SOON_S if store.trim(now_ms() - keep_ms) else every_s
            except StorageError as exc:
                logger.warning("old answers could not be dropped, retrying: %s", exc)
                pause_s = every_s

    thread = threading.Thread(target=trim, name="answer-retention", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
