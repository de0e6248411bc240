"""Rows of samples, and the identities of records, which decide which records are sampled.

An identity is the `source` of a record, a number that no other source has, and the record's number within it. If two
rows have one identity, one record was delivered twice.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.synopses.base import BoolArray, IntArray
from edgewater.synopses.hashing import WordArray, finalised

Key = npt.NDArray[Any]

MAX_TAG = np.uint64((1 << 64) - 1)


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Records of a sample.

    Attributes:
        groups: int64 per row.
        keys: the columns of the identity, the most significant first.
        values: NumPy array, or Arrow array of strings.
    """

    groups: IntArray
    keys: tuple[Key, ...]
    values: Any

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def nbytes(self) -> int:
        return int(self.groups.nbytes + sum(k.nbytes for k in self.keys) + self.values.nbytes)

    def at(self, index: npt.NDArray[Any]) -> SampleRows:
        """Returns the rows at these positions, or the rows where this mask is true."""
        if index.dtype == np.bool_:
            index = np.flatnonzero(index)
        values = self.values.take(pa.array(index)) if isinstance(self.values, pa.Array) else self.values[index]
        return SampleRows(self.groups[index], tuple(k[index] for k in self.keys), values)

    def sorted(self) -> SampleRows:
        """Returns the rows sorted by group and key."""
        if (self.groups[1:] == self.groups[:-1]).all() and len(self.keys) == 1:
            return self.at(np.argsort(self.keys[0]))
        return self.at(np.lexsort((*self.keys[::-1], self.groups)))

    def repeats(self) -> BoolArray:
        """Returns which rows have the group and key of the previous row."""
        same = self.groups[1:] == self.groups[:-1]
        for key in self.keys:
            same &= key[1:] == key[:-1]
        return np.concatenate([[False], same])[: len(self)]

    def ascend(self) -> bool:
        """Returns whether the rows are sorted by group and key, without repeats."""
        same = np.ones(max(len(self) - 1, 0), bool)
        for column in (self.groups, *self.keys):
            if (same & (column[1:] < column[:-1])).any():
                return False
            same &= column[1:] == column[:-1]
        return not same.any()

    def starts(self, groups: int) -> IntArray:
        """Returns the index at which each of `groups` groups begins in sorted rows, and the end; int64, shape (groups +
        1,).
        """
        return np.searchsorted(self.groups, np.arange(groups + 1))


def concatenated(runs: list[SampleRows]) -> SampleRows:
    values = [run.values for run in runs]
    return SampleRows(
        np.concatenate([run.groups for run in runs]),
        tuple(np.concatenate(columns) for columns in zip(*(run.keys for run in runs), strict=True)),
        pa.concat_arrays(values) if isinstance(values[0], pa.Array) else np.concatenate(values),
    )


def source_of(*names: str) -> int:
    """Returns a `source` for the identity that these names form, such as an edge and its incarnation: a 64-bit hash.

    It is the same on every platform. Two of a thousand identities get one number with probability 3e-14.
    """
    text = "\0".join(names).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def record_tags(source: int | WordArray, numbers: IntArray, seed: int) -> WordArray:
    """Returns a uniform 64-bit hash per identity; distinct for distinct numbers of one source.

    Args:
        source: one source for all records, or uint64, one per record.
        numbers: int64, the records' numbers within their source.
    """
    sources = np.array([source], np.uint64) if isinstance(source, int) else source
    return finalised(finalised(sources, seed) + numbers.view(np.uint64), 1)
