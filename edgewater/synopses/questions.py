"""Questions about items, ranges, signals and pairs of synopses, in addition to those of `base.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from edgewater.synopses.base import Estimates, IntArray, Question


@dataclass(frozen=True, slots=True)
class Frequency(Question):
    """The number of occurrences of `item`, which has the type of the values.

    Attributes:
        confidence: used by synopses that support any confidence. Other synopses state their own.
    """

    item: Any
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Contains(Question):
    """Whether `item` is among the values: 1 or 0. The confidence is that of this answer."""

    item: Any


@dataclass(frozen=True, slots=True)
class SelfJoinSize(Question):
    """The second frequency moment: the sum of the squared frequencies of all items."""

    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class JoinSize(Question):
    """The number of pairs of equal items, one from this synopsis and one from `other`.

    Attributes:
        other: a synopsis of the same kind, parameters and seed, or a stack of as many groups or of one group.
    """

    other: Any
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class UnionSize(Question):
    """The number of distinct values in this synopsis or in `other` (as for `JoinSize`)."""

    other: Any
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class IntersectionSize(Question):
    """The number of distinct values both in this synopsis and in `other` (as for `JoinSize`)."""

    other: Any
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class FalsePositiveRate(Question):
    """The probability that `Contains` answers 1 for a value that was never added."""


@dataclass(frozen=True, slots=True)
class TopItems(Question):
    """The `k` most frequent items. `ItemRanking.top` answers it, with a list per group."""

    k: int


@dataclass(frozen=True, slots=True)
class RankedItems:
    """The most frequent items of each group, one row per item.

    Attributes:
        groups: int64 group per row, ascending.
        items: Arrow array of the items; within a group by descending frequency.
        frequencies: one estimate per row.
    """

    groups: IntArray
    items: pa.Array
    frequencies: Estimates

    def __len__(self) -> int:
        return len(self.groups)


@runtime_checkable
class ItemRanking(Protocol):
    """A stack that answers `TopItems`."""

    def top(self, question: TopItems | None = None) -> RankedItems:
        """Returns the most frequent items; None: as many as the measure's own k.

        Raises InvalidRequest if the stack has fewer counters.
        """


@runtime_checkable
class ValueSample(Protocol):
    """A stack that keeps some of the values as they are."""

    def sampled(self) -> tuple[IntArray, pa.Array]:
        """Returns the sampled values of all groups: int64 group per value, ascending, and the values."""


@dataclass(frozen=True, slots=True)
class Range(Question):
    """The number of values in [lo, hi], both ends included."""

    lo: float
    hi: float


@dataclass(frozen=True, slots=True)
class Proportion(Question):
    """The fraction of the values in [lo, hi], both ends included. Its denominator is the answer to `Count`."""

    lo: float
    hi: float
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class SubsetCount(Question):
    """The number of values of the sampled population in [lo, hi], both ends included."""

    lo: float
    hi: float
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Point(Question):
    """The value at an index of a signal, from 0."""

    index: int


@dataclass(frozen=True, slots=True)
class RangeSum(Question):
    """The sum of a signal's values from index `first` to index `last`, both included."""

    first: int
    last: int
