"""Keeping the agent's resident memory near what it holds.

Decoding a batch takes tens of MiB for a moment. Arrow's own allocator and glibc both keep such memory
for the next batch; on a small machine beside a source that is not theirs to keep.
"""

from __future__ import annotations

import contextlib
import ctypes

import pyarrow as pa


def use_system_allocator() -> None:
    """Lets Arrow allocate by malloc, so that `give_back` reaches its memory, too. Call it once, early."""
    pa.set_memory_pool(pa.system_memory_pool())


def give_back() -> None:
    """Returns free memory to the system, where the C library can (glibc); elsewhere does nothing."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
