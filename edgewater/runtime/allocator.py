"""Keeps a process small: settings of the C library's allocator, and libraries that are not loaded.

With these settings, a process returns memory to the operating system. Without glibc they have no effect.

A batch or a frame needs tens of MiB for a moment. By default, Arrow's allocator and glibc keep freed memory for the
next one. On a small machine, other programs need this memory.

glibc gives large blocks separate mappings. When such a block is freed, glibc raises the smallest size of such blocks to
the size of the freed block, up to 32 MiB. After one large frame, smaller blocks therefore come from the heap. One small
block behind them keeps all of them resident.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h; format: of glibc
LARGE_BYTES = 256 << 10  # limit: memory that stays after blocks are freed
"""Blocks of at least this size get a separate mapping, which ends when they are freed."""
ARENAS = 2  # limit: memory of heaps
"""The number of heaps that threads share. glibc would make eight per core."""


def take_less_memory() -> None:
    """Makes glibc return large blocks when they are freed, and leaves out pandas. A long-running process calls it once,
    before threads start and before the first array is made.
    """
    leave_out_pandas()
    with contextlib.suppress(AttributeError, OSError):
        mallopt: Any = ctypes.CDLL(None).mallopt
        for option, value in ((_MMAP_THRESHOLD, LARGE_BYTES), (_TRIM_THRESHOLD, LARGE_BYTES), (_ARENA_MAX, ARENAS)):
            mallopt(option, value)


def use_system_allocator() -> None:
    """Makes Arrow allocate with malloc, so that `release_free_memory` also covers Arrow's memory. Call it once,
    early.
    """
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())


class _NoPandas:
    """An import finder that reports pandas as missing."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is left out", name=name)


@contextlib.contextmanager
def without_pandas() -> Iterator[None]:
    """Reports pandas as missing to what is imported meanwhile, unless it is imported already."""
    finder: Any = _NoPandas
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def leave_out_pandas() -> None:
    """Prevents Arrow from importing pandas. Call it once, before the first array is made.

    Otherwise the first `pa.array` of a process imports pandas, if it is installed: 35 MiB and 0.3 s. A process that
    converts nothing to pandas does not need it. A plugin can still import it.
    """
    import pyarrow as pa

    with without_pandas():
        pa.array([0])  # Arrow looks for pandas only once


def release_start_code() -> None:
    """Unmaps the pages of libraries and read-only files that only the start has read, 30 MiB. Call it once, after the
    start.

    When the process uses a page again, it gets the page from the system's file cache. Pages that the process has
    changed stay. On systems without ``/proc``, nothing is done.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        madvise: Any = ctypes.CDLL(None).madvise
        for begin, end in list(_unchanged_mappings(Path("/proc/self/smaps").read_text().splitlines())):
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _unchanged_mappings(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yields begin and end of each private, read-only mapping of a file without a changed page."""
    mapping, is_file, changed_kib = "", False, 0
    for line in lines:
        name, *fields = line.split()
        if name.endswith(":"):
            if name in ("Anonymous:", "Swap:"):
                changed_kib += int(fields[0])
            elif name == "VmFlags:" and is_file and not changed_kib:  # the last line of a mapping
                begin, _, end = mapping.partition("-")
                yield int(begin, 16), int(end, 16)
        else:
            mapping, changed_kib = name, 0
            is_file = fields[0] in ("r-xp", "r--p") and len(fields) > 4 and fields[4].startswith("/")


def release_free_memory() -> None:
    """Returns free memory to the operating system."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
