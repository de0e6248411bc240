"""The agent's wall clock, and the release of freed memory to the operating system.

Cores take the time as an argument; only the shell reads this clock. Decoding a batch briefly takes tens of MiB.
Arrow's allocator and glibc keep freed memory for the next batch; on a small machine other programs need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import time

import pyarrow as pa


def now_ms() -> int:
    """Returns milliseconds since the epoch, UTC."""
    return int(time.time() * 1000)  # noqa: TID251


def use_system_allocator() -> None:
    """Makes Arrow allocate with malloc, so that `release_free_memory` also covers Arrow's memory. Call once, early."""
    pa.set_memory_pool(pa.system_memory_pool())


def release_free_memory() -> None:
    """Returns free memory to the operating system if the C library supports it (glibc)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
