"""Tunes the Python workers of Spark."""

from __future__ import annotations

import gc
from functools import cache

SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""The environment in which NumPy and Arrow start no threads. A process with threads must not fork."""


@cache
def settle() -> None:
    """Excludes all imported objects from garbage collection, once per process.

    Spark's workers run a full collection after every task. Scanning the objects of the imported modules takes up to 0.1
    s. This is more time than merging a usual batch takes.
    """
    gc.collect()
    gc.freeze()
