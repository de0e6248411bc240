"""`ByteCache`: an LRU cache of values that never change, bounded by their bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, TypeVar

from cachetools import LRUCache

T = TypeVar("T")

_ENTRY_BYTES = 1024  # derived: objects and key of an entry
"""Size of an entry besides its value: objects, key."""
_MISSING = object()
"""Distinguishes a missing entry from a cached None."""


class ByteCache:
    """A thread-safe LRU cache.

    Args:
        cache_bytes: capacity.
        size: returns the bytes of a value.
        on_lookup: called with each lookup's result: True if the value was cached.
    """

    def __init__(
        self, cache_bytes: int, size: Callable[[Any], int], on_lookup: Callable[[bool], None] = lambda hit: None
    ) -> None:
        self._cache: LRUCache[Hashable, Any] = LRUCache(max(cache_bytes, 1), lambda value: _ENTRY_BYTES + size(value))
        self._lock = threading.Lock()
        self._on_lookup = on_lookup

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        with self._lock:
            return int(self._cache.currsize)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the cached value, or makes and caches it. The value is shared: do not change it.

        Two threads may make the same value at once. A lock would let all threads wait for the slowest one.
        """
        with self._lock:
            cached = self._cache.get(key, _MISSING)
        self._on_lookup(cached is not _MISSING)
        if cached is not _MISSING:
            found: T = cached
            return found
        made = make()
        with self._lock, suppress(ValueError):  # larger than the whole cache
            self._cache[key] = made
        return made
