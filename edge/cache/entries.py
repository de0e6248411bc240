"""The entries of one slice: per group the pending value V, the sent value F, and the last touch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.synopses import codec
from edgewater.synopses.base import BoolArray, BoundedError, FloatArray, IntArray
from edgewater.synopses.grouped import GroupedAggregate
from edgewater.wire.frames import Withheld
from edgewater.wire.synopsis_pb2 import Array as ArrayMessage


class SliceEntries:
    """Parallel arrays over the groups of one slice.

    Args:
        pending: an empty aggregate; it holds V, what has arrived and was not sent.
        bounded: the measures for which F, the value sent so far, is kept. Only error budgets need it.
    """

    def __init__(self, pending: GroupedAggregate, bounded: Sequence[str] = ()) -> None:
        self.pending = pending
        self._has_pending: BoolArray = np.zeros(0, bool)
        self._touched: IntArray = np.zeros(0, np.int64)
        self._sent: dict[str, FloatArray] = {name: np.zeros(0) for name in bounded}

    def __len__(self) -> int:
        return len(self.pending)

    @property
    def nbytes(self) -> int:
        arrays = [self._has_pending, self._touched, *self._sent.values()]
        return self.pending.nbytes + sum(a.nbytes for a in arrays)

    @property
    def has_pending(self) -> BoolArray:
        """Per group: is there anything that was not sent?"""
        return self._has_pending[: len(self)]

    @property
    def touched(self) -> IntArray:
        """Per group: the number of the batch that last updated it."""
        return self._touched[: len(self)]

    def update(
        self, keys: Sequence[pa.Array], values: Mapping[str, pa.Array | None], rows: int, times: IntArray, touch: int
    ) -> None:
        """Adds `rows` records; `touch` numbers the batch."""
        codes = self.pending.update(keys, values, rows, times=times)
        self._grow()
        self._has_pending[codes] = True
        self._touched[codes] = touch

    def _grow(self) -> None:
        groups = len(self.pending)
        if groups > len(self._touched):
            capacity = max(groups, 2 * len(self._touched))
            self._has_pending = _grown(self._has_pending, capacity)
            self._touched = _grown(self._touched, capacity)
            self._sent = {name: _grown(sent, capacity) for name, sent in self._sent.items()}

    def accumulated_error(self, measure: str) -> FloatArray:
        """error(F, F ⊕ V) per group, signed: F ⊕ V − F."""
        stack = cast(BoundedError, self.pending.measures[measure])
        return stack.change(self._sent[measure][: len(self)])

    def send(self, groups: IntArray) -> GroupedAggregate:
        """Takes the pending values of these groups out: V becomes empty, F becomes F ⊕ V."""
        taken = self.pending.take(groups)
        for name, sent in self._sent.items():
            sent[groups] = cast(BoundedError, taken.measures[name]).advance(sent[groups])
        self.pending.reset(groups)
        self._has_pending[groups] = False
        return taken

    def withheld(self) -> tuple[Withheld, ...]:
        """What is pending, per measure, over all groups: what a closed slice keeps back."""
        result = []
        for name in self._sent:
            error = np.where(self.has_pending, self.accumulated_error(name), 0.0)
            above, below = np.maximum(error, 0.0), np.maximum(-error, 0.0)
            groups = int(np.count_nonzero(error))
            if groups:
                result.append(
                    Withheld(
                        name,
                        float(above.max()),
                        float(below.max()),
                        float(above.sum()),
                        float(below.sum()),
                        groups,
                    )
                )
        return tuple(result)

    def snapshot(self) -> list[bytes]:
        """The whole state as blobs, read back by `restore`."""
        arrays = [self.has_pending, self.touched, *(s[: len(self)] for s in self._sent.values())]
        return [self.pending.to_bytes(), *(codec.encode(a).SerializeToString(deterministic=True) for a in arrays)]

    @classmethod
    def restore(cls, blobs: Sequence[bytes], bounded: Sequence[str]) -> SliceEntries:
        result = cls(GroupedAggregate.from_bytes(blobs[0]), bounded)
        arrays = [codec.decode(ArrayMessage.FromString(blob)) for blob in blobs[1:]]
        result._has_pending, result._touched = arrays[0], arrays[1]
        result._sent = dict(zip(bounded, arrays[2:], strict=True))
        return result


def _grown(array: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    grown = np.zeros(capacity, array.dtype)
    grown[: len(array)] = array
    return grown
