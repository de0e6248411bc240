"""The newest records: a window of fixed size by event time.

Records are ordered by (time, source, number), a total order, so equal times make no difference to
merging and equal values are records of their own. Times are compared and never subtracted. A source
whose clock is fast owns a merged sample: `shares` shows it; correct the times before they come here.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np

from edgewater.synopses.base import (
    BoolArray,
    Count,
    Estimates,
    IntArray,
    Maximum,
    Mean,
    Minimum,
    Properties,
    Quantile,
    Question,
    Questions,
    Rank,
    Sum,
)
from edgewater.synopses.draw import Draw
from edgewater.synopses.hashing import DEFAULT_SEED
from edgewater.synopses.items import check_whole
from edgewater.synopses.questions import Proportion
from edgewater.synopses.registry import register_kind
from edgewater.synopses.sample_rows import Key, Rows, SampleStack
from edgewater.synopses.single_sample import SingleSample

DEFAULT_SIZE = 1000
MAX_SIZE = 1 << 24


class TimedStack(SampleStack):
    """Samples of `size` records that go by event time: what FIFO and biased samples have in common."""

    key_types: ClassVar[tuple[str, ...]] = ("<i8", "<u8", "<i8")  # time, source, number

    def __init__(
        self,
        groups: int = 0,
        *,
        size: int = DEFAULT_SIZE,
        source: int = 0,
        seed: int = DEFAULT_SEED,
        item_type: str | None = None,
    ) -> None:
        self.size = check_whole("size", size, 1, MAX_SIZE)
        super().__init__(groups, source=source, seed=seed, item_type=item_type)

    @property
    def parameters(self) -> dict[str, Any]:
        return {"size": self.size}

    @property
    def capacity(self) -> int:
        """Records per group now: the size, halved per level."""
        return self.size >> self.level

    def _empty(self) -> Self:
        return type(self)(size=self.size, source=self.source, seed=self.seed, item_type=self.item_type)

    @classmethod
    def _of_parameters(cls, parameters: dict[str, Any], **common: Any) -> Self:
        return cls(size=parameters["size"], **common)

    def _keys(self, numbers: IntArray, times: IntArray | None) -> tuple[Key, ...]:
        sources = np.full(len(numbers), self.source, np.uint64)
        return (numbers if times is None else times, sources, numbers)

    def shares(self, group: int = 0) -> dict[int, int]:
        """How many of a group's records each source has given."""
        rows = self._settle()
        start, end = rows.starts(len(self))[group : group + 2]
        sources, counts = np.unique(rows.keys[1][start:end], return_counts=True)
        return dict(zip(sources.tolist(), counts.tolist(), strict=True))

    def times(self, group: int = 0) -> IntArray:
        """The event times of `items`, ascending."""
        rows = self._settle()
        start, end = rows.starts(len(self))[group : group + 2]
        return np.asarray(rows.keys[0][start:end])


class FifoStack(TimedStack):
    """The `size` newest records per group. Answers are exact, about these records alone."""

    kind: ClassVar[str] = "fifo"
    properties: ClassVar[Properties] = Properties(idempotent=True, foldable=True, ordered=True)
    questions: ClassVar[Questions] = (Mean, Sum, Count, Minimum, Maximum, Proportion, Rank, Quantile)

    def _most_levels(self) -> int:
        return self.capacity.bit_length() - 1

    def _kept(self, rows: Rows) -> BoolArray:
        left = rows.starts(len(self))[rows.groups + 1] - np.arange(len(rows))
        return np.asarray(left <= self.capacity)

    def _promising(self, rows: Rows) -> BoolArray:
        """Records at least as new as the oldest of a full group."""
        held = self._held.starts(len(self))
        full = np.diff(held) >= self.capacity
        oldest = np.full(len(self), np.iinfo(np.int64).min)
        oldest[full] = self._held.keys[0][held[:-1][full]]
        return np.asarray(rows.keys[0] >= (oldest if len(self) == 1 else oldest[rows.groups]))

    def query(self, question: Question | None = None) -> Estimates:
        """The answer about the newest records, per group; without a question, their mean."""
        self.check(question)
        rows = self._settle()
        draw = Draw(rows.groups, rows.values, np.ones(len(self)), self.kind)
        if isinstance(question, Minimum | Maximum):
            question = Quantile(0.0 if isinstance(question, Minimum) else 1.0)
        answer = draw.query(question or Mean())
        return Estimates(answer.value, answer.lower, answer.upper, 1.0, self.kind)


class FifoSample(SingleSample[FifoStack]):
    """The `size` newest records by event time.

    Args:
        source: a number of its own for every sample that is updated and will be merged with others. It
            decides between records of equal time, before their number in the source.
    """

    stack_type = FifoStack
    kind: ClassVar[str] = FifoStack.kind
    properties: ClassVar[Properties] = FifoStack.properties
    questions: ClassVar[Questions] = FifoStack.questions

    def __init__(self, size: int = DEFAULT_SIZE, *, source: int = 0) -> None:
        super().__init__(FifoStack(1, size=size, source=source, seed=DEFAULT_SEED))

    def shares(self) -> dict[int, int]:
        """How many of the records each source has given: one with a fast clock has too many."""
        return self._stack.shares()


register_kind(FifoStack)
