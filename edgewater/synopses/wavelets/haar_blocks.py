"""The arithmetic of Haar wavelets: coefficients of dyadic blocks, and the blocks of a length.

A coefficient (level l, position p) has the support [p·2^l, (p + 1)·2^l). It is half the difference of the means of its
left and right halves, (a - b)/2; its orthonormal weight is |d|·2^(l/2). A sequence of length n has one block per set
bit of n, the largest first, each with its mean: n need not be a power of two, and there is no padding. Two neighbouring
blocks of equal size become one, as digits carry in an addition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.base.errors import InvalidRecord
from edgewater.synopses.base import FloatArray, IntArray

MAX_MAGNITUDE = 1e140
"""Maximum magnitude of a value. The energies of larger values overflow float64."""

_ROOTS = np.sqrt(np.exp2(np.arange(64)))


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Coefficients as three arrays of one length."""

    levels: IntArray
    positions: IntArray
    details: FloatArray

    def __len__(self) -> int:
        return len(self.levels)

    def at(self, index: npt.NDArray[np.generic]) -> Coefficients:
        return Coefficients(self.levels[index], self.positions[index], self.details[index])

    def weights(self) -> FloatArray:
        """Returns orthonormal magnitudes. The square is the energy that is lost if the coefficient is discarded."""
        return np.asarray(np.abs(self.details) * _ROOTS[self.levels])

    def keys(self) -> IntArray:
        """Returns one number per coefficient; positions of level l are below 2^(57 - l)."""
        return np.asarray(self.positions << 6 | self.levels)

    def summed(self) -> Coefficients:
        """Adds up coefficients of equal level and position; returns them sorted by key."""
        keys, where = np.unique(self.keys(), return_inverse=True)
        return Coefficients(keys & 63, keys >> 6, np.bincount(where, self.details, len(keys)).astype(np.float64))

    def overlaps(self, first: int, end: int) -> IntArray:
        """Returns the length of the left half minus that of the right half of each support within [first, end)."""
        return imbalance(self.levels, self.positions, first, end)


def imbalance(levels: IntArray, positions: IntArray, first: int, end: int) -> IntArray:
    start = positions << levels
    middle = start + (1 << (levels - 1))
    stop = start + (1 << levels)
    left = np.minimum(middle, end) - np.maximum(start, first)
    right = np.minimum(stop, end) - np.maximum(middle, first)
    return np.asarray(np.maximum(left, 0) - np.maximum(right, 0))


def no_coefficients() -> Coefficients:
    return Coefficients(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


def concatenated(parts: list[Coefficients]) -> Coefficients:
    if not parts:
        return no_coefficients()
    columns = ((p.levels, p.positions, p.details) for p in parts)
    return Coefficients(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def block_levels(length: int) -> list[int]:
    """Returns the levels of the blocks of a length, the largest first: its set bits."""
    return [level for level in range(length.bit_length() - 1, -1, -1) if length >> level & 1]


@dataclass(slots=True)
class Frontline:
    """The blocks of a growing sequence: a mean per set bit of the length."""

    length: int = 0
    means: list[float] = field(default_factory=list)

    def push(self, level: int, mean: float) -> Coefficients:
        """Appends a block of 2^level values; its level must be at most that of the last block.

        Returns:
            The coefficients of the blocks that were merged.
        """
        assert self.length % (1 << level) == 0, f"a block of level {level} after {self.length} values"
        carried = []
        while self.length >> level & 1:
            left = self.means.pop()
            self.length -= 1 << level
            carried.append((level + 1, self.length >> (level + 1), left / 2 - mean / 2))
            mean, level = left / 2 + mean / 2, level + 1
        self.means.append(mean)
        self.length += 1 << level
        columns = np.array([c[:2] for c in carried], np.int64).reshape(-1, 2)
        return Coefficients(columns[:, 0], columns[:, 1], np.array([c[2] for c in carried], np.float64))

    def append(self, values: FloatArray) -> list[Coefficients]:
        """Appends values in the largest aligned blocks, each transformed as arrays; returns the new coefficients."""
        found, at = [], 0
        while at < len(values):
            room = (self.length & -self.length).bit_length() - 1 if self.length else 63
            level = min(room, (len(values) - at).bit_length() - 1)
            details, mean = transform(values[at : at + (1 << level)], self.length)
            found += [*details, self.push(level, mean)]
            at += 1 << level
        return found

    def copy(self) -> Frontline:
        return Frontline(self.length, list(self.means))

    def blocks(self) -> list[tuple[int, int, float]]:
        """Returns (level, start, mean) per block, in order."""
        start, found = 0, []
        for level, mean in zip(block_levels(self.length), self.means, strict=True):
            found.append((level, start, mean))
            start += 1 << level
        return found


def transform(values: FloatArray, start: int) -> tuple[list[Coefficients], float]:
    """Returns the coefficients of a block of 2^k values that begins at index `start`, and its mean."""
    found, level = [], 0
    while len(values) > 1:
        level += 1
        halves = values / 2
        details = halves[0::2] - halves[1::2]
        values = halves[0::2] + halves[1::2]
        first = start >> level
        positions = np.arange(first, first + len(details))
        found.append(Coefficients(np.full(len(details), level), positions, details))
    return found, float(values[0])


def signal_of(values: Any) -> FloatArray:
    """Converts values to finite float64. Raises InvalidRecord."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    array = values if isinstance(values, pa.Array) else pa.array(values)
    accepted = f"finite numbers below {MAX_MAGNITUDE:g} in magnitude, without nulls"
    numeric = pa.types.is_integer(array.type) or pa.types.is_floating(array.type) or pa.types.is_null(array.type)
    if not numeric or array.null_count:
        raise InvalidRecord("values", f"{array.type}, {array.null_count} nulls", accepted)
    numbers = np.asarray(array.to_numpy(zero_copy_only=False), np.float64)
    fit = np.abs(numbers) < MAX_MAGNITUDE
    if not fit.all():
        raise InvalidRecord("values", float(numbers[~fit][0]), accepted)
    return numbers
