"""Sums by key, of columns: what `bincount`, `unique` and `reduceat` make of them."""

from __future__ import annotations

import numpy as np

from edgewater.synopses import FloatArray, IntArray

DENSE = 1 << 17
"""Counters that are worth having; keys that are further apart are sorted instead."""


def summed(code: IntArray, sums: FloatArray) -> tuple[IntArray, FloatArray]:
    """Columns added up by code, [row, code], from the first on; a code is there if its sum of the first row is not 0.

    Added one after the other: sums of sums are the same to the last bit, wherever they were cut.
    """
    first = int(code.min())
    if int(code.max()) - first < DENSE:
        codes, code = np.arange(first, int(code.max()) + 1), code - first
    else:
        codes, code = np.unique(code, return_inverse=True)
    total = np.array([np.bincount(code, row) for row in sums], np.float64)
    used = np.flatnonzero(total[0])
    return codes[used], total[:, used]


def starts(ascending: IntArray) -> IntArray:
    """Where each distinct value begins."""
    return np.concatenate([[0], 1 + np.flatnonzero(ascending[1:] != ascending[:-1])])


def runs(ascending: IntArray) -> list[tuple[int, slice]]:
    """The distinct values and where each stands."""
    first = starts(ascending).tolist()
    ends = [*first[1:], len(ascending)]
    return [(int(ascending[a]), slice(a, b)) for a, b in zip(first, ends, strict=True)]


def counted(parts: IntArray) -> list[tuple[int, int]]:
    """Each value, and how often it is there."""
    values, counts = np.unique(parts, return_counts=True)
    return [(int(v), int(c)) for v, c in zip(values, counts, strict=True)]
