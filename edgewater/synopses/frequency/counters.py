"""Rows of counters per group: the base of count-min and Fast-AGMS.

Both are linear functions of the frequencies: an item adds its weight, in Fast-AGMS times a sign, to one counter of each
row. States therefore add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from edgewater.synopses.array_stack import halvings, register_stack
from edgewater.synopses.base import IntArray, Properties
from edgewater.synopses.checks import check_power_of_two, check_whole
from edgewater.synopses.encoding.layout import MAX_COUNT, Layout, field
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray
from edgewater.synopses.items import CHUNK, ItemStack
from edgewater.synopses.registry import Parameter
from edgewater.synopses.row_stack import RowStack, row_fields
from edgewater.synopses.single import SingleSynopsis

MIN_WIDTH, MAX_WIDTH = 16, 1 << 24  # limit: memory of a synopsis
MAX_DEPTH = 32  # limit: memory of a sketch

_SAMPLE = 512  # measured: bench.synopses
_REPEATING = 1 << 16  # measured: bench.synopses


class CounterStack(RowStack, ItemStack):
    """A sketch of `depth` rows of `width` counters per group, as one array of shape (groups, depth, columns).

    Args:
        width: a power of two; only stacks of equal width merge.
        level: how many times release 0.3.0 has folded it. Only stacks of equal levels merge.
    """

    properties: ClassVar[Properties] = Properties(linear=True)
    required: ClassVar[tuple[str, ...]] = ("width", "depth")
    carried: ClassVar[tuple[str, ...]] = ("level", "seed", "item_type")
    arrays: ClassVar[dict[str, tuple[str, float]]] = {"n": ("<i8", 0)}
    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout.of(
            field("level", "<i8", 1), field("n", least=-MAX_COUNT, most=MAX_COUNT, counts=True), *row_fields("<i8")
        ),
    )
    chunk: ClassVar[int] = CHUNK

    def __init__(
        self,
        groups: int = 0,
        *,
        width: int,
        depth: int,
        level: int = 0,
        seed: int = DEFAULT_SEED,
        item_type: str | None = None,
    ) -> None:
        self.width = check_power_of_two("width", width, MIN_WIDTH, MAX_WIDTH)
        self.depth = check_whole("depth", depth, 1, MAX_DEPTH)
        self.level = check_whole("level", level, 0, halvings(self.width // MIN_WIDTH))
        super().__init__(groups, seed=seed, item_type=item_type)
        self._set_row((self.depth, self.columns), np.int64)

    @staticmethod
    def state_bytes(parameters: Mapping[str, Any]) -> int:
        """Returns the memory of one group."""
        return int(parameters["width"] * parameters["depth"] * 8)

    @property
    def columns(self) -> int:
        """The current number of counters per row: the width, halved per level."""
        return self.width >> self.level

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        """Adds a batch: Arrow strings, or a NumPy array of bool, integers or floats."""
        self._check_item_type(values)
        at = 0
        while at < len(values):
            repeats = len(self) == 1 and self._repeats(values, at)
            chunk = slice(at, at + (_REPEATING if repeats else self.chunk))
            words, amounts = self._hash(values[chunk]), None
            if repeats:
                words, amounts = _counted(words)
            self._add(codes[at : at + len(words)], words, amounts)
            at = chunk.stop

    def _repeats(self, values: Any, at: int) -> bool:
        """Returns whether to count distinct values first, because a sample of the values contains many duplicates."""
        if len(values) - at < 2 * _SAMPLE:
            return False
        return len(_counted(self._hash(values[at : at + _SAMPLE]))[0]) <= _SAMPLE * 0.6

    def _add(self, codes: IntArray, words: WordArray, weights: IntArray | None) -> None:
        single = len(self) == 1
        if single:
            self._view("n")[0] += len(words) if weights is None else weights.sum()
        else:
            np.add.at(self._view("n"), codes, 1 if weights is None else weights)
        flat, starts = self._rows.reshape(-1), 0 if single else codes * (self.depth * self.columns)
        for row in range(self.depth):
            columns, signs = self._row(words, row)
            amount: Any = 1 if weights is None else weights
            if signs is not None:
                amount = signs if weights is None else signs * weights
            # Integers throughout: bincount with weights sums float64, which is exact only below 2^53.
            if single:
                np.add.at(self._rows[0, row], columns, amount)
            else:
                np.add.at(flat, columns + (starts + row * self.columns), amount)

    def _row(self, words: WordArray, row: int) -> tuple[IntArray, IntArray | None]:
        """Returns each word's column in this row, and its sign there (None: all are +1)."""
        raise NotImplementedError

    def merge(self, other: Self, codes: IntArray) -> None:
        self._require_mergeable(other)
        self._view("n")[codes] += other._view("n")
        self.table()[codes] += other.table()


def exact_sum(counters: npt.NDArray[Any], axis: int) -> IntArray:
    """Returns the int64 sum along an axis, computed in the narrowest type that cannot overflow.

    NumPy adds more numbers of a narrower type at once.
    """
    limits = np.iinfo(counters.dtype)
    bound = counters.shape[axis] * max(int(limits.max), -int(limits.min))
    fitting = next((t for t in (np.int16, np.int32) if bound <= np.iinfo(t).max), np.int64)
    return np.asarray(counters.sum(axis=axis, dtype=fitting), np.int64)


def _counted(words: WordArray) -> tuple[WordArray, IntArray]:
    """Returns each distinct word and its count; sorts the words in place."""
    words.sort()
    borders = np.flatnonzero(np.concatenate([[True], words[1:] != words[:-1], [True]]))
    return words[borders[:-1]], np.diff(borders)


class SingleCounters(SingleSynopsis[Any]):
    """A `Synopsis` over a `CounterStack` of length 1."""

    stack: CounterStack


def register_counters(single: type[Any], width: int, depth: int, delta: float) -> None:
    """Registers a kind of counters and its query function.

    Args:
        single: the class that a user holds, with `for_error(epsilon, delta)`.
        width, depth, delta: defaults of the query function.
    """
    stack: type[CounterStack] = single.stack_type

    def size_for(goals: Mapping[str, Any]) -> Mapping[str, Any]:
        parameters: Mapping[str, Any] = single.for_error(goals["epsilon"], goals["delta"]).stack.parameters
        return parameters

    register_stack(
        stack,
        parameters={
            "width": Parameter.power_of_two(width, MIN_WIDTH, MAX_WIDTH),
            "depth": Parameter.whole(depth, 1, MAX_DEPTH),
        },
        goals={"epsilon": Parameter.fraction(None), "delta": Parameter.fraction(delta)},
        size_for=size_for,
    )
