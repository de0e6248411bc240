"""Questions about items, ranges, signals and two synopses together, beside those of `base.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from edgewater.synopses.base import Estimates, IntArray, Question


@dataclass(frozen=True, slots=True)
class Frequency(Question):
    """How often did `item` (of the type of the values) come?

    Attributes:
        confidence: for synopses whose interval can be made for any; others state their own.
    """

    item: Any
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Contains(Question):
    """Is `item` among the values? 1 for yes, 0 for no; the confidence is that of the yes or the no."""

    item: Any


@dataclass(frozen=True, slots=True)
class SelfJoinSize(Question):
    """The second frequency moment: the sum over all items of the square of how often each came."""

    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class JoinSize(Question):
    """How many pairs of equal items are there, one from here and one from `other`?

    Attributes:
        other: a synopsis of the same kind, parameters and seed, or a stack of as many groups (or of one).
    """

    other: Any
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class UnionSize(Question):
    """How many different values are here or in `other` (as for `JoinSize`)?"""

    other: Any
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class IntersectionSize(Question):
    """How many different values are both here and in `other` (as for `JoinSize`)?"""

    other: Any
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class FalsePositiveRate(Question):
    """How probable is it that a value which was never added is said to be there?"""


@dataclass(frozen=True, slots=True)
class TopItems(Question):
    """The `k` most frequent items, put to `Ranking.top`: its answer is a list per group."""

    k: int


@dataclass(frozen=True, slots=True)
class RankedItems:
    """The most frequent items of each group, one row per item.

    Attributes:
        groups: int64 group per row, ascending.
        items: Arrow array of the items; within a group by falling frequency.
        frequencies: of each row.
    """

    groups: IntArray
    items: pa.Array
    frequencies: Estimates

    def __len__(self) -> int:
        return len(self.groups)


@runtime_checkable
class Ranking(Protocol):
    """A stack that can say which items are the most frequent."""

    def top(self, question: TopItems | None = None) -> RankedItems:
        """None: as many as the measure asked for. Raises InvalidRequest for more than it can hold."""


@dataclass(frozen=True, slots=True)
class Range(Question):
    """How many values are in [lo, hi], both ends included?"""

    lo: float
    hi: float


@dataclass(frozen=True, slots=True)
class Proportion(Question):
    """Which part of the values is in [lo, hi], both ends included?"""

    lo: float
    hi: float
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class SubsetCount(Question):
    """How many of the values that were sampled from are in [lo, hi], both ends included?"""

    lo: float
    hi: float
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Since(Question):
    """A question about the values that came at `time_ms` or later: `Count`, `Sum` or `Mean`."""

    time_ms: int
    question: Question


@dataclass(frozen=True, slots=True)
class Point(Question):
    """The value at an index of a signal, from 0."""

    index: int


@dataclass(frozen=True, slots=True)
class RangeSum(Question):
    """The sum of a signal's values from index `first` to index `last`, both included."""

    first: int
    last: int
