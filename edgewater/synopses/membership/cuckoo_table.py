"""The table of cuckoo filters: 16-bit fingerprints in buckets of four, of many groups in one array.

Fan et al., "Cuckoo filter: practically better than Bloom" (2014). A fingerprint stands in one of two
buckets, i and i ^ spread(fingerprint), so either is found from the other; that takes a power of two of
buckets. A fingerprint and its pair of buckets are one *cell*, numbered by the lower bucket. The table
holds a cell at most once: copies are the business of the filter, and a value that comes a million
times cannot fill its buckets.

Inserting many goes in rounds, each a few array operations: all that wait try one bucket and then the
other; then one per full bucket throws a fingerprint out and takes its place. What has not found a
place after `MAX_ROUNDS`, or where evicting no longer helps, is handed back.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgewater.synopses.base import BoolArray, IntArray
from edgewater.synopses.hashing import WordArray, finalised

SLOTS = 4
FINGERPRINTS = (1 << 16) - 1
"""Fingerprints are 1 to 65535; 0 is an empty slot."""

MAX_ROUNDS = 256
_WORTH_ROUNDS = 24
"""Rounds in which an eighth of those that wait must find a place, or it is not worth going on."""

_SPREAD = finalised(np.arange(1 << 16, dtype=np.uint64), 0).view(np.int64)


class CuckooTable:
    """Cells of `groups` × `buckets` buckets. Buckets are numbered through all groups.

    A cell's key is ``lower bucket << 16 | fingerprint``, int64.
    """

    def __init__(self, groups: int, buckets: int) -> None:
        self.buckets = buckets
        self._slots: npt.NDArray[np.uint16] = np.zeros((groups * buckets, SLOTS), np.uint16)
        self._used: npt.NDArray[np.uint8] = np.zeros(groups * buckets, np.uint8)  # slots 0 … used - 1 are taken

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes + self._used.nbytes

    @property
    def groups(self) -> int:
        return len(self._used) // self.buckets

    def grow(self, groups: int) -> None:
        if groups > self.groups:
            wider = CuckooTable(max(groups, self.groups * 3 // 2), self.buckets)
            wider._slots[: len(self._slots)] = self._slots
            wider._used[: len(self._used)] = self._used
            self._slots, self._used = wider._slots, wider._used

    def keys(self, groups: IntArray | int, words: WordArray) -> IntArray:
        """The cells of values with these hashes."""
        low = (words & np.uint64(0xFFFFFFFF)) * np.uint64(FINGERPRINTS) >> np.uint64(32)
        bucket = (words >> np.uint64(32)).view(np.int64) & (self.buckets - 1)
        return self._keys(groups * self.buckets + bucket, low.view(np.int64) + 1)

    def _keys(self, buckets: IntArray, fingerprints: IntArray) -> IntArray:
        return np.minimum(buckets, self.other(buckets, fingerprints)) << 16 | fingerprints

    def other(self, buckets: IntArray, fingerprints: IntArray) -> IntArray:
        """The other bucket of the pair, in the same group."""
        return buckets ^ (_SPREAD[fingerprints] & (self.buckets - 1))

    def is_key(self, keys: IntArray) -> BoolArray:
        """Whether these numbers are cells of this table."""
        bucket, fingerprint = keys >> 16, keys & FINGERPRINTS
        inside = (keys >= 0) & (bucket < len(self._used)) & (fingerprint > 0)
        return np.asarray(inside & (self._keys(bucket, fingerprint) == keys))

    def holds(self, keys: IntArray) -> BoolArray:
        """Whether these cells are in the table."""
        return self._slot_of(keys)[1]

    def _slot_of(self, keys: IntArray) -> tuple[IntArray, BoolArray]:
        """The flat slot of each cell, and whether it is there at all."""
        bucket, fingerprint = keys >> 16, keys & FINGERPRINTS
        pair = np.stack([bucket, self.other(bucket, fingerprint)], axis=1)
        same = (self._slots[pair] == fingerprint[:, None, None]).reshape(len(keys), 2 * SLOTS)
        at = same.argmax(axis=1)
        return pair[np.arange(len(keys)), at // SLOTS] * SLOTS + at % SLOTS, same.any(axis=1)

    def insert(self, keys: IntArray) -> IntArray:
        """Adds distinct cells that it does not hold; returns those — maybe others — that have no place now."""
        bucket, fingerprint = keys >> 16, keys & FINGERPRINTS
        before = len(keys)
        for turn in range(MAX_ROUNDS):
            if turn % _WORTH_ROUNDS == _WORTH_ROUNDS - 1:
                if len(bucket) > before * 7 // 8:
                    break  # nearly full: evictions only move the surplus about
                before = len(bucket)
            for _ in range(2):
                waiting = np.flatnonzero(~self._place(bucket, fingerprint))
                if not len(waiting):
                    return keys[:0]
                bucket, fingerprint = bucket[waiting], fingerprint[waiting]
                bucket = self.other(bucket, fingerprint)
            self._evict(bucket, fingerprint, turn)
        return self._keys(bucket, fingerprint)

    def _place(self, buckets: IntArray, fingerprints: IntArray) -> BoolArray:
        """Fills free slots; returns which have got one. Of several for one bucket the first come first."""
        order = np.argsort(buckets, kind="stable")
        wanted = buckets[order]
        first = np.flatnonzero(np.concatenate([[True], wanted[1:] != wanted[:-1]]))
        rank = np.arange(len(wanted)) - np.repeat(first, np.diff(np.append(first, len(wanted))))
        slot = self._used[wanted] + rank
        fits = slot < SLOTS
        placed = np.zeros(len(buckets), bool)
        placed[order[fits]] = True
        self._slots[wanted[fits], slot[fits]] = fingerprints[order[fits]]
        np.add.at(self._used, wanted[fits], 1)
        return placed

    def _evict(self, buckets: IntArray, fingerprints: IntArray, turn: int) -> None:
        """One per bucket changes places with a fingerprint in it, which will try its other bucket; in place."""
        _, one = np.unique(buckets, return_index=True)
        bucket = buckets[one]
        # A slot that differs from turn to turn and from bucket to bucket, or evictions go in circles.
        slot = (finalised(bucket.view(np.uint64), turn + 1) & np.uint64(SLOTS - 1)).view(np.int64)
        thrown = self._slots[bucket, slot].astype(np.int64)
        self._slots[bucket, slot] = fingerprints[one]
        fingerprints[one] = thrown
        buckets[one] = self.other(bucket, thrown)

    def remove(self, keys: IntArray) -> None:
        """Takes out distinct cells that it holds."""
        at, _ = self._slot_of(keys)
        self._slots.reshape(-1)[at] = 0
        touched = np.unique(at // SLOTS)
        packed = np.sort(self._slots[touched], axis=1)[:, ::-1]  # empty slots to the end
        self._slots[touched] = packed
        self._used[touched] = (packed > 0).sum(axis=1)

    def sizes(self) -> IntArray:
        """Cells per group."""
        return np.asarray(self._used.reshape(-1, self.buckets).sum(axis=1, dtype=np.int64))

    def contents(self) -> IntArray:
        """The cells, ascending."""
        bucket, slot = np.nonzero(self._slots)
        return np.sort(self._keys(bucket.astype(np.int64), self._slots[bucket, slot].astype(np.int64)))

    def take(self, groups: IntArray) -> CuckooTable:
        result = CuckooTable(0, self.buckets)
        result._slots = self._slots.reshape(-1, self.buckets, SLOTS)[groups].reshape(-1, SLOTS)
        result._used = self._used.reshape(-1, self.buckets)[groups].reshape(-1)
        return result

    def reset(self, groups: IntArray) -> None:
        self._slots.reshape(-1, self.buckets, SLOTS)[groups] = 0
        self._used.reshape(-1, self.buckets)[groups] = 0
