"""Haar wavelets that minimise the maximum error of a value, instead of the L2 norm of the error.

After the greedy algorithm of Karras and Mamoulis ("One-Pass Wavelet Synopses for Maximum-Error Metrics", VLDB 2005):
the loss of a coefficient is the error that values in its support would have without it, and the coefficient with the
smallest loss is removed. The authors track, for each coefficient, the signed errors in its left and right half. This
class tracks only a bound of the error's magnitude, so that merges and later batches are possible. Coefficients are
removed in rounds, each a quarter of the surplus, so that array operations select a whole round.

Two bounds are tracked per retained coefficient. `below` bounds the error of values in its support due to removed
coefficients at or below its children. `above` is the total magnitude of the removed coefficients between it and the
next retained coefficient above. When a coefficient is removed, its magnitude and its `above` are added to `above` of
the coefficients directly under it. `below` of the next coefficient above becomes at least the sum of its magnitude, its
`below` and its `above`.
"""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np

from edgewater.synopses.base import BoolArray, FloatArray, IntArray
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import Layout, field
from edgewater.synopses.wavelets.haar import DEFAULT_COEFFICIENTS, FIELDS, LEVELS, HaarWavelet
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

_ROUNDING = 1e-12  # derived: rounding of a sum
_BOUNDS = {"least": 0.0, "most": 1e200}
_FIELDS = (
    field("error of all values", "<f8", 1, **_BOUNDS),
    field("errors of blocks", "<f8", "blocks", **_BOUNDS),
    field("errors below coefficients", "<f8", "coefficients", **_BOUNDS),
    field("errors above coefficients", "<f8", "coefficients", **_BOUNDS),
)


class MaxErrorWavelet(HaarWavelet):
    """A `HaarWavelet` whose coefficients minimise the maximum error of a point.

    Its L2 bound is valid too, but wider. After a merge or a late value, the bound of the maximum error is
    still valid, but only one number tracks it.

    >>> from edgewater.synopses import Point
    >>> load = MaxErrorWavelet(2)
    >>> load.update([3, 3, 3, 3, 9, 9, 9, 8])
    >>> last = load.query(Point(7))
    >>> round(load.max_error, 3), round(last.lower, 3), round(last.upper, 3)
    (0.25, 8.0, 8.5)
    """

    kind: ClassVar[str] = "haar_max"
    layouts: ClassVar[tuple[Layout, ...]] = (Layout.of(*FIELDS, *_FIELDS),)

    def __init__(self, coefficients: int = DEFAULT_COEFFICIENTS) -> None:
        super().__init__(coefficients)
        self._base_error = 0.0  # maximum error of a value, in addition to the tracked bounds
        self._clear_bounds()

    def _clear_bounds(self) -> None:
        self._keys = np.zeros(0, np.int64)  # keys of the coefficients that `_below` and `_above` describe
        self._below, self._above = np.zeros(0), np.zeros(0)
        self._block_errors: list[tuple[int, int, float]] = []  # level, start and error per block

    @property
    def max_error(self) -> float:
        """An upper bound of the difference between any value and its approximation."""
        self.consolidate()
        return (self._base_error + max((error for _, _, error in self._block_errors), default=0.0)) * (1 + _ROUNDING)

    def _norm_error(self, length: int) -> float:
        return min(super()._norm_error(length), length * self.max_error)

    def _chosen(self, weights: FloatArray) -> IntArray:
        keys, sizes = self._held.keys(), np.abs(self._held.details)
        below, above = (self._lookup(keys, column) for column in (self._below, self._above))
        order = np.argsort(keys)
        blocks = self._front.blocks()
        starts = np.array([start for _, start, _ in blocks], np.int64)
        errors = np.zeros(len(blocks))
        for level, start, error in self._block_errors:  # earlier blocks: now under a coefficient, or still blocks
            up = self._lowest_above(level, start, keys, order)
            if up >= 0:
                below[up] = max(below[up], error)
            else:
                at = int(np.searchsorted(starts, start, side="right")) - 1
                errors[at] = max(errors[at], error)
        parents = self._parents(keys, order)
        alive = np.ones(len(keys), bool)
        removed = sizes == 0
        while True:
            self._remove(alive, removed, parents, sizes, below, above, errors, starts)
            alive &= ~removed
            excess = int(alive.sum()) - self.capacity
            if excess <= 0:
                break
            among = np.flatnonzero(alive)
            losses = (below + sizes + above)[among]
            removed = np.zeros(len(keys), bool)
            removed[among[np.lexsort((keys[among], losses))[: -(-excess // 4)]]] = True
        kept = np.flatnonzero(alive)
        kept = kept[np.argsort(keys[kept])]
        self._keys, self._below, self._above = keys[kept], below[kept], above[kept]
        self._block_errors = [(level, start, float(e)) for (level, start, _), e in zip(blocks, errors, strict=True)]
        return kept

    def _lookup(self, keys: IntArray, column: FloatArray) -> FloatArray:
        """Returns the tracked bound per key; 0 for a new key."""
        if not len(self._keys):
            return np.zeros(len(keys))
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, column[at], 0.0)

    def _parents(self, keys: IntArray, order: IntArray) -> IntArray:
        """Returns the index of the next coefficient above each coefficient; -1: there is none."""
        parents = np.full(len(keys), -1)
        if not len(keys):
            return parents
        levels, positions = self._held.levels, self._held.positions
        for up in range(1, int(levels.max())):
            open_ones = np.flatnonzero((parents < 0) & (levels + up <= levels.max()))
            parents[open_ones] = _places((positions[open_ones] >> up) << 6 | (levels[open_ones] + up), keys, order)
        return parents

    def _lowest_above(self, level: int, start: int, keys: IntArray, order: IntArray) -> int:
        """Returns the index of the lowest coefficient whose support contains a block; -1: there is none."""
        levels = np.arange(level + 1, LEVELS)
        places = _places((start >> levels) << 6 | levels, keys, order)
        found = places[places >= 0]
        return int(found[0]) if len(found) else -1

    def _remove(
        self,
        alive: BoolArray,
        removed: BoolArray,
        parents: IntArray,
        sizes: FloatArray,
        below: FloatArray,
        above: FloatArray,
        errors: FloatArray,
        starts: IntArray,
    ) -> None:
        """Removes coefficients from the tree; updates parents, errors and bounds of the others in place."""
        levels = self._held.levels
        here = [np.flatnonzero(alive & (levels == level)) for level in np.unique(levels[alive])]
        for nodes in here:  # bottom up
            worst = below[nodes] + above[nodes] + np.where(removed[nodes], sizes[nodes], 0.0)
            inner = parents[nodes] >= 0
            np.maximum.at(below, parents[nodes][inner], worst[inner])
            roots = nodes[~inner]
            first = self._held.positions[roots] << levels[roots]
            np.maximum.at(errors, np.searchsorted(starts, first, side="right") - 1, worst[~inner])
        for nodes in here[::-1]:  # top down: the parents are final
            mine = nodes[(parents[nodes] >= 0) & removed[parents[nodes]]]
            lost = parents[mine]
            above[mine] += sizes[lost] + above[lost]
            parents[mine] = parents[lost]

    def _add(self, other: Self) -> None:
        self._base_error = self.max_error + other.max_error
        self._clear_bounds()
        super()._add(other)

    def _extended(self, length: int) -> Self:
        result = super()._extended(length)
        if length > self.records:
            result._base_error += self.max_error
        else:
            result._base_error, result._block_errors = self._base_error, list(self._block_errors)
            result._keys, result._below, result._above = self._keys, self._below, self._above
        return result

    def to_message(self) -> SynopsisMessage:
        message = super().to_message()
        tops = np.array([error for _, _, error in self._block_errors], np.float64)
        if not self._block_errors:
            tops = np.zeros(len(self._front.means))
        below, above = (self._lookup(self._held.keys(), column) for column in (self._below, self._above))
        for array in (np.array([self._base_error]), tops, below, above):
            message.arrays.append(codec.encode(array))
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        result = super().from_message(message)
        base, tops, below, above = cls.layouts[0].decode(cls.kind, message.arrays)[len(FIELDS) :]
        blocks = result._front.blocks()
        result._base_error = float(base[0])
        result._keys, result._below, result._above = result._held.keys(), below, above
        result._block_errors = [(level, start, float(e)) for (level, start, _), e in zip(blocks, tops, strict=True)]
        return result


def _places(searched: IntArray, keys: IntArray, order: IntArray) -> IntArray:
    """Returns the index in `keys`, which `order` sorts, of each searched key; -1: it is not in `keys`."""
    if not len(keys):
        return np.full(len(searched), -1)
    at = order[np.minimum(np.searchsorted(keys, searched, sorter=order), len(keys) - 1)]
    return np.where(keys[at] == searched, at, -1)
