"""`SynopsisCache`: decoded synopses in an LRU cache that is bounded by their bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from center.serving.byte_cache import ByteCache
from edgewater.answers.work import waiting


class SynopsisCache(ByteCache):
    """A thread-safe LRU cache of decoded synopses, which are evaluated only within `exclusively`.

    Args:
        cache_bytes: capacity.
        on_lookup: called with each lookup's result: True if the value was cached.
    """

    def __init__(self, cache_bytes: int, on_lookup: Callable[[bool], None] = lambda hit: None) -> None:
        super().__init__(cache_bytes, _size, on_lookup)
        self._evaluating = threading.Lock()

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Locks the stacks for an evaluation: some stacks apply pending updates on their first query.

        One lock serves all stacks. An evaluation is NumPy on the arrays of one group, and shorter than a thread switch.
        A request that waits for the lock lets the others work: the holder may wait for its turn.
        """
        if not self._evaluating.acquire(blocking=False):
            with waiting():
                self._evaluating.acquire()
        try:
            yield
        finally:
            self._evaluating.release()


def _size(value: Any) -> int:
    return 0 if value is None else int(value.nbytes)
