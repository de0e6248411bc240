"""`SynopsisCache`: decoded synopses in an LRU cache that is bounded by their bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from cachetools import LRUCache

from edgewater.answers.work import waiting

T = TypeVar("T")

_OVERHEAD_BYTES = 1024
"""Size of an entry besides its arrays: objects, key, table of groups."""
_MISSING = object()
"""Distinguishes a missing entry from a cached None (a window without data)."""


class SynopsisCache:
    """A thread-safe LRU cache of decoded synopses.

    Args:
        cache_bytes: capacity.
        on_lookup: called with each lookup's result: True if the value was cached.
    """

    def __init__(self, cache_bytes: int, on_lookup: Callable[[bool], None] = lambda hit: None) -> None:
        self._cache: LRUCache[Hashable, Any] = LRUCache(max(cache_bytes, 1), getsizeof=_size)
        self._lock = threading.Lock()
        self._evaluating = threading.Lock()
        self._on_lookup = on_lookup

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        with self._lock:
            return int(self._cache.currsize)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the cached value, or makes and caches it (two threads may make the same value concurrently).

        The value is shared: do not change it, and evaluate it only within `exclusively`.
        """
        with self._lock:
            cached = self._cache.get(key, _MISSING)
        self._on_lookup(cached is not _MISSING)
        if cached is not _MISSING:
            found: T = cached
            return found
        made = make()
        with self._lock:
            if _size(made) <= self._cache.maxsize:
                self._cache[key] = made
        return made

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
    return (0 if value is None else int(value.nbytes)) + _OVERHEAD_BYTES
