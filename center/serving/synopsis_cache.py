"""SynopsisCache synopses, kept for those who ask next: an LRU bounded by the bytes that they hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from cachetools import LRUCache

T = TypeVar("T")

_OVERHEAD_BYTES = 1024
"""Of an entry beside its arrays: objects, key, table of the groups."""
_MISSING = object()
"""None is kept too: what a window without data has."""


class SynopsisCache:
    """Safe to use from many threads. What cannot be kept is made again each time it is asked for.

    Args:
        cache_bytes: bound of what is kept.
        on_lookup: told of every look, whether it hit.
    """

    def __init__(self, cache_bytes: int, on_lookup: Callable[[bool], None] = lambda hit: None) -> None:
        self._cache: LRUCache[Hashable, Any] = LRUCache(max(cache_bytes, 1), getsizeof=_size)
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._on_lookup = on_lookup

    @property
    def nbytes(self) -> int:
        """What is kept now."""
        with self._lock:
            return int(self._cache.currsize)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is kept under the key, or what `make` makes (two threads may make the same at once).

        It is shared: not to be changed, and to be asked within `using` only.
        """
        with self._lock:
            held = self._cache.get(key, _MISSING)
        self._on_lookup(held is not _MISSING)
        if held is not _MISSING:
            found: T = held
            return found
        made = make()
        with self._lock:
            if _size(made) <= self._cache.maxsize:
                self._cache[key] = made
        return made

    @contextmanager
    def using(self) -> Iterator[None]:
        """To be held while a stack is asked: some settle what is pending when they are asked first.

        One lock for all: to ask is NumPy on arrays of one group, which is done before another thread has
        the interpreter.
        """
        with self._asking:
            yield


def _size(value: Any) -> int:
    return (0 if value is None else int(value.nbytes)) + _OVERHEAD_BYTES
