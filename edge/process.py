"""The process of an agent: its wall clock, and the memory that it gives back to the system.

Cores take the time as an argument; only the shell reads this clock. Decoding a batch takes tens of MiB for a moment.
Arrow's allocator and glibc keep freed memory for the next batch; on a small machine other programs need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import time

import pyarrow as pa


def now_ms() -> int:
    """Milliseconds since the epoch, UTC."""
    return int(time.time() * 1000)  # noqa: TID251


def use_system_allocator() -> None:
    """Lets Arrow allocate by malloc, so that `give_back` reaches its memory, too. Call it once, early."""
    pa.set_memory_pool(pa.system_memory_pool())


def give_back() -> None:
    """Returns free memory to the system, where the C library can (glibc); elsewhere does nothing."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
