"""The C library's allocator: what makes a process return memory to the operating system. Without glibc nothing is done.

A batch or a frame briefly takes tens of MiB. Arrow's allocator and glibc keep freed memory for the next one; on a small
machine other programs need it.

glibc raises the size from which blocks have a mapping of their own to that of the largest block that was freed, up to
32 MiB. After one large frame such blocks come from the heap, and one small block behind them keeps all of it resident.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h
LARGE_BYTES = 256 << 10
"""Blocks of this size and more have a mapping of their own, which ends when they are freed."""
ARENAS = 2
"""Heaps that threads share; glibc makes eight per core."""


def return_large_blocks() -> None:
    """Makes large blocks return to the operating system when they are freed. Call once, before threads start."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt: Any = ctypes.CDLL(None).mallopt
        for option, value in ((_MMAP_THRESHOLD, LARGE_BYTES), (_TRIM_THRESHOLD, LARGE_BYTES), (_ARENA_MAX, ARENAS)):
            mallopt(option, value)


def use_system_allocator() -> None:
    """Makes Arrow allocate with malloc, so that `release_free_memory` also covers Arrow's memory. Call once, early."""
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())


def release_free_memory() -> None:
    """Returns free memory to the operating system."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
