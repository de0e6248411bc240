"""Haar wavelets that keep the greatest error of any value small, in place of the L2 norm.

After the greedy of Karras and Mamoulis ("One-Pass Wavelet Synopses for Maximum-Error Metrics", VLDB 2005): a
coefficient is worth the error that values below it would have without it, so the one goes whose loss would
make the least. They track the signed error of either half below each coefficient; here it is a bound of its
magnitude, which merges and which a later batch can be added to. The coefficients go in rounds, each a quarter of
those that are too many, so that all of a round are judged by array operations.

Per coefficient held: `below`, a bound of the error of values under it from coefficients gone at or below its
own children, and `above`, what is gone between it and the next one held above it. When one goes, its
magnitude joins the errors of all that is under it, and so the `above` of those and the `below` of the next.
"""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np

from edgewater.errors import CorruptSynopsis
from edgewater.synopses.base import BoolArray, FloatArray, IntArray
from edgewater.synopses.encoding import codec
from edgewater.synopses.items import check_whole
from edgewater.synopses.wavelets.haar import DEFAULT_COEFFICIENTS, HaarWavelet
from edgewater.synopses.wavelets.haar_blocks import signal_of
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

_ROUNDING = 1e-12


class MaxErrorWavelet(HaarWavelet):
    """A `HaarWavelet` whose coefficients are chosen for the greatest error of a point.

    Its L2 bound holds as well, and is wider. Merging, appending and late values keep the bound of the greatest
    error certain, but track it as one number from then on.
    """

    kind: ClassVar[str] = "haar_max"

    def __init__(self, coefficients: int = DEFAULT_COEFFICIENTS) -> None:
        super().__init__(coefficients)
        self._base = 0.0  # error of any value, apart from what is tracked
        self._forget()

    def _forget(self) -> None:
        self._keys = np.zeros(0, np.int64)  # of the coefficients that `_below` and `_above` are about
        self._below, self._above = np.zeros(0), np.zeros(0)
        self._tops: list[tuple[int, int, float]] = []  # level, start and error of blocks

    @property
    def max_error(self) -> float:
        """A bound of the difference between any value and what is held of it."""
        self._settle()
        return (self._base + max((error for _, _, error in self._tops), default=0.0)) * (1 + _ROUNDING)

    def _norm_error(self, length: int) -> float:
        return min(super()._norm_error(length), length * self.max_error)

    def _chosen(self, weights: FloatArray) -> IntArray:
        keys, sizes = self._held.keys(), np.abs(self._held.details)
        below, above = (self._known(keys, column) for column in (self._below, self._above))
        order = np.argsort(keys)
        blocks = self._front.blocks()
        starts = np.array([start for _, start, _ in blocks], np.int64)
        errors = np.zeros(len(blocks))
        for level, start, error in self._tops:  # blocks of before: a coefficient above them now, or a block
            up = self._above_of(level, start, keys, order)
            if up >= 0:
                below[up] = max(below[up], error)
            else:
                at = int(np.searchsorted(starts, start, side="right")) - 1
                errors[at] = max(errors[at], error)
        parents = self._parents(keys, order)
        alive = np.ones(len(keys), bool)
        gone = sizes == 0
        while True:
            self._let_go(alive, gone, parents, sizes, below, above, errors, starts)
            alive &= ~gone
            excess = int(alive.sum()) - self.capacity
            if excess <= 0:
                break
            among = np.flatnonzero(alive)
            worth = (below + sizes + above)[among]
            gone = np.zeros(len(keys), bool)
            gone[among[np.lexsort((keys[among], worth))[: -(-excess // 4)]]] = True
        kept = np.flatnonzero(alive)
        kept = kept[np.argsort(keys[kept])]
        self._keys, self._below, self._above = keys[kept], below[kept], above[kept]
        self._tops = [(level, start, float(e)) for (level, start, _), e in zip(blocks, errors, strict=True)]
        return kept

    def _known(self, keys: IntArray, column: FloatArray) -> FloatArray:
        """Per key what is tracked of it; 0 for one that is new."""
        if not len(self._keys):
            return np.zeros(len(keys))
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, column[at], 0.0)

    def _parents(self, keys: IntArray, order: IntArray) -> IntArray:
        """Per coefficient the place of the next one above it; -1 for none."""
        parents = np.full(len(keys), -1)
        if not len(keys):
            return parents
        levels, positions = self._held.levels, self._held.positions
        for up in range(1, int(levels.max())):
            open_ones = np.flatnonzero((parents < 0) & (levels + up <= levels.max()))
            parents[open_ones] = _places((positions[open_ones] >> up) << 6 | (levels[open_ones] + up), keys, order)
        return parents

    def _above_of(self, level: int, start: int, keys: IntArray, order: IntArray) -> int:
        """The place of the lowest coefficient that has a block under it; -1 for none."""
        levels = np.arange(level + 1, 49)
        places = _places((start >> levels) << 6 | levels, keys, order)
        found = places[places >= 0]
        return int(found[0]) if len(found) else -1

    def _let_go(
        self,
        alive: BoolArray,
        gone: BoolArray,
        parents: IntArray,
        sizes: FloatArray,
        below: FloatArray,
        above: FloatArray,
        errors: FloatArray,
        starts: IntArray,
    ) -> None:
        """Takes coefficients out of the tree; changes parents, errors and bounds of all that stay."""
        levels = self._held.levels
        here = [np.flatnonzero(alive & (levels == level)) for level in np.unique(levels[alive])]
        for nodes in here:  # from the bottom
            worst = below[nodes] + above[nodes] + np.where(gone[nodes], sizes[nodes], 0.0)
            inner = parents[nodes] >= 0
            np.maximum.at(below, parents[nodes][inner], worst[inner])
            roots = nodes[~inner]
            first = self._held.positions[roots] << levels[roots]
            np.maximum.at(errors, np.searchsorted(starts, first, side="right") - 1, worst[~inner])
        for nodes in here[::-1]:  # from the top, where parents are settled already
            mine = nodes[(parents[nodes] >= 0) & gone[parents[nodes]]]
            lost = parents[mine]
            above[mine] += sizes[lost] + above[lost]
            parents[mine] = parents[lost]

    # What changes other than by values behind: tracked as one number from then on.

    def add_at(self, index: int, amount: float) -> None:
        check_whole("index", index, 0, self.records - 1)
        signal_of([amount])  # refused before anything is changed
        self._base = self.max_error
        self._forget()
        super().add_at(index, amount)

    def _add(self, other: Self) -> None:
        self._base = self.max_error + other.max_error
        self._forget()
        super()._add(other)

    def append(self, other: Self) -> Self:
        result = super().append(other)
        result._base += other.max_error
        return result

    def _extended(self, length: int) -> Self:
        result = super()._extended(length)
        if length > self.records:
            result._base += self.max_error
        else:
            result._base, result._tops = self._base, list(self._tops)
            result._keys, result._below, result._above = self._keys, self._below, self._above
        return result

    # Bytes

    def to_message(self) -> SynopsisMessage:
        message = super().to_message()
        tops = np.array([error for _, _, error in self._tops], np.float64)
        if not self._tops:
            tops = np.zeros(len(self._front.means))
        below, above = (self._known(self._held.keys(), column) for column in (self._below, self._above))
        for array in (np.array([self._base]), tops, below, above):
            message.arrays.append(codec.encode(array))
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        codec.open_message(message, cls.kind, cls.version, 12)
        base, tops, below, above = (codec.decode(array) for array in message.arrays[8:])
        signal = SynopsisMessage()
        signal.CopyFrom(message)
        del signal.arrays[8:]
        result = super().from_message(signal)
        blocks, shape = result._front.blocks(), (len(result._held),)
        arrays = (base, tops, below, above)
        if [a.shape for a in arrays] != [(1,), (len(blocks),), shape, shape]:
            raise CorruptSynopsis(f"{cls.kind}: bounds of shapes {[a.shape for a in arrays]}")
        if any(a.dtype != np.float64 or not (a >= 0).all() for a in arrays):
            raise CorruptSynopsis(f"{cls.kind}: bounds below zero, or no numbers")
        result._base = float(base[0])
        result._keys, result._below, result._above = result._held.keys(), below, above
        result._tops = [(level, start, float(e)) for (level, start, _), e in zip(blocks, tops, strict=True)]
        return result


def _places(wanted: IntArray, keys: IntArray, order: IntArray) -> IntArray:
    """Where among `keys`, which `order` sorts, the wanted ones are; -1 for those that are not."""
    if not len(keys):
        return np.full(len(wanted), -1)
    at = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    return np.where(keys[at] == wanted, at, -1)
