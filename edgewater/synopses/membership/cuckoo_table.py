"""The table and the stash of cuckoo filters: 16-bit fingerprints in buckets of four, of many groups in one array.

Fan et al., "Cuckoo filter: practically better than Bloom" (2014). A fingerprint is stored in one of two buckets, i and
i ^ spread(fingerprint), so that each bucket number gives the other. This requires a power of two of buckets. A
fingerprint with its pair of buckets is one *cell*, numbered by the lower bucket. The table contains each cell at most
once. The stash counts further copies, so a value that occurs a million times does not fill its buckets. The stash also
contains cells for which the table has no place.

Insertion works in rounds of a few array operations. All unplaced fingerprints try one bucket and then the other; then
one fingerprint per full bucket evicts another. `insert` returns the fingerprints without a place after `MAX_ROUNDS`, or
earlier if evictions no longer make progress.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgewater.synopses.array_stack import with_capacity
from edgewater.synopses.base import BoolArray, IntArray, run_indices
from edgewater.synopses.hashing import WordArray, finalised

SLOTS = 4  # derived: Fan et al. 2014, section 5
FINGERPRINTS = (1 << 16) - 1  # format: 16 bits
"""Fingerprints are 1 to 65535; 0 is an empty slot."""

BUCKET_BYTES = 2 * SLOTS + 1
"""Memory of a bucket."""

MAX_ROUNDS = 256  # limit: CPU of an insertion
_PROGRESS_ROUNDS = 24  # limit: CPU of a full table
"""If fewer than an eighth of the unplaced fingerprints find a place within this many rounds, insertion stops."""

_MANY = 1 << 10  # measured: bench.synopses
"""With more unplaced fingerprints than this, it pays to count the fingerprints for which there is no place."""

_SPREAD = finalised(np.arange(1 << 16, dtype=np.uint64), 0).view(np.int64)


class CuckooTable:
    """Cells of `groups` × `buckets` buckets. Bucket numbers run through all groups.

    A cell's key is ``lower bucket << 16 | fingerprint``, int64.
    """

    def __init__(self, groups: int, buckets: int) -> None:
        self.buckets = buckets
        self._slots: npt.NDArray[np.uint16] = np.zeros((groups * buckets, SLOTS), np.uint16)
        self._used: npt.NDArray[np.uint8] = np.zeros(groups * buckets, np.uint8)  # slots 0 … used - 1 are in use

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes + self._used.nbytes

    @property
    def groups(self) -> int:
        return len(self._used) // self.buckets

    def grow(self, groups: int) -> None:
        self._slots = with_capacity(self._slots.reshape(-1, self.buckets, SLOTS), groups).reshape(-1, SLOTS)
        self._used = with_capacity(self._used.reshape(-1, self.buckets), groups).reshape(-1)

    def keys(self, groups: IntArray | int, words: WordArray) -> IntArray:
        """Returns the cells of values with these hashes."""
        low = (words & np.uint64(0xFFFFFFFF)) * np.uint64(FINGERPRINTS) >> np.uint64(32)
        bucket = (words >> np.uint64(32)).view(np.int64) & (self.buckets - 1)
        return self._keys(groups * self.buckets + bucket, low.view(np.int64) + 1)

    def _keys(self, buckets: IntArray, fingerprints: IntArray) -> IntArray:
        return np.minimum(buckets, self.other(buckets, fingerprints)) << 16 | fingerprints

    def other(self, buckets: IntArray, fingerprints: IntArray) -> IntArray:
        """Returns the other bucket of the pair, in the same group."""
        return buckets ^ (_SPREAD[fingerprints] & (self.buckets - 1))

    def is_key(self, keys: IntArray) -> BoolArray:
        """Returns which numbers are possible cells of this table."""
        bucket, fingerprint = keys >> 16, keys & FINGERPRINTS
        inside = (keys >= 0) & (bucket < len(self._used)) & (fingerprint > 0)
        return np.asarray(inside & (self._keys(bucket, fingerprint) == keys))

    def holds(self, keys: IntArray) -> BoolArray:
        """Returns which cells are in the table."""
        bucket, fingerprint = keys >> 16, keys & FINGERPRINTS
        pair = np.stack([bucket, self.other(bucket, fingerprint)], axis=1)
        return np.asarray((self._slots[pair] == fingerprint[:, None, None]).any(axis=(1, 2)))

    def insert(self, keys: IntArray) -> IntArray:
        """Adds distinct cells that are not in the table.

        Returns the cells without a place, which may be older cells.
        """
        bucket, fingerprint = keys >> 16, keys & FINGERPRINTS
        before, surplus = len(keys), keys[:0]
        for turn in range(MAX_ROUNDS):
            if turn % _PROGRESS_ROUNDS == _PROGRESS_ROUNDS - 1:
                if len(bucket) > before * 7 // 8:
                    break  # nearly full: evictions only move the surplus
                before = len(bucket)
            for _ in range(2):
                unplaced = np.flatnonzero(~self._place(bucket, fingerprint))
                if not len(unplaced):
                    return surplus
                bucket, fingerprint = bucket[unplaced], fingerprint[unplaced]
                bucket = self.other(bucket, fingerprint)
            if len(bucket) > _MANY:
                hopeless = self._exceed_free_slots(bucket)
                surplus = np.concatenate([surplus, self._keys(bucket[hopeless], fingerprint[hopeless])])
                bucket, fingerprint = bucket[~hopeless], fingerprint[~hopeless]
            self._evict(bucket, fingerprint, turn)
        return np.concatenate([surplus, self._keys(bucket, fingerprint)])

    def _exceed_free_slots(self, buckets: IntArray) -> BoolArray:
        """Returns which fingerprints belong to a group that has fewer free slots than unplaced fingerprints."""
        groups = buckets // self.buckets
        free = SLOTS * self.buckets - self.sizes()
        return np.asarray((np.bincount(groups, minlength=len(free)) > free)[groups])

    def _place(self, buckets: IntArray, fingerprints: IntArray) -> BoolArray:
        """Fills free slots; returns which fingerprints are placed. A bucket takes its fingerprints in their order."""
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
        """Exchanges, in place, one fingerprint per bucket with a fingerprint in the bucket.

        That one tries its other bucket next.
        """
        _, one = np.unique(buckets, return_index=True)
        bucket = buckets[one]
        # The slot depends on the round and the bucket. Otherwise evictions would form a cycle.
        slot = (finalised(bucket.view(np.uint64), turn + 1) & np.uint64(SLOTS - 1)).view(np.int64)
        evicted = self._slots[bucket, slot].astype(np.int64)
        self._slots[bucket, slot] = fingerprints[one]
        fingerprints[one] = evicted
        buckets[one] = self.other(bucket, evicted)

    def sizes(self) -> IntArray:
        """Returns the number of cells per group."""
        return np.asarray(self._used.reshape(-1, self.buckets).sum(axis=1, dtype=np.int64))

    def contents(self) -> IntArray:
        """Returns the cells, ascending."""
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


class CuckooStash:
    """The copies of cells beyond the copy in the table, and cells without a place there, as sorted arrays.

    Attributes:
        keys: the cells, distinct and ascending.
        copies: the number of copies per cell; never 0.
    """

    def __init__(self) -> None:
        self.keys: IntArray = np.zeros(0, np.int64)
        self.copies: IntArray = np.zeros(0, np.int64)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.copies.nbytes

    def holds(self, keys: IntArray) -> IntArray:
        """Returns the number of copies per cell."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int64)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.copies[at], 0)

    def add(self, keys: IntArray, copies: IntArray) -> None:
        """Adds copies of distinct cells."""
        if len(keys):
            self.keys, self.copies = self.joined(keys, copies)

    def joined(self, keys: IntArray, copies: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the union of these cells and the stash, ascending and distinct, with the sums of copies that are not
        0.
        """
        keys, copies = np.concatenate([keys, self.keys]), np.concatenate([copies, self.copies])
        if not len(keys):
            return keys, copies
        order = np.argsort(keys, kind="stable")
        keys, copies = keys[order], copies[order]
        first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        total = np.add.reduceat(copies, first)
        return keys[first][total != 0], total[total != 0]

    def take(self, groups: IntArray, span: int) -> CuckooStash:
        """Returns the cells of these groups, renumbered 0, 1, …; each group has `span` keys."""
        starts, ends = (np.searchsorted(self.keys, (groups + i) * span) for i in (0, 1))
        counts = ends - starts
        at = run_indices(starts, counts)
        result = CuckooStash()
        result.keys = self.keys[at] + np.repeat((np.arange(len(groups)) - groups) * span, counts)
        result.copies = self.copies[at]
        return result

    def reset(self, groups: IntArray, span: int) -> None:
        kept = ~np.isin(self.keys // span, groups)
        self.keys, self.copies = self.keys[kept], self.copies[kept]
