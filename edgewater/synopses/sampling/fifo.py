"""The newest records: a window of fixed size by event time.

Records are ordered by (time, source, number), a total order, so equal times make no difference to
merging and equal values are records of their own. Times are compared and never subtracted. A source
whose clock is fast owns a merged sample: `shares` shows it, and a `quota` bounds how much of the sample one
source may have. Better than either is to correct the times before they come here.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

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
from edgewater.synopses.hashing import DEFAULT_SEED
from edgewater.synopses.items import check_whole
from edgewater.synopses.questions import Proportion
from edgewater.synopses.registry import (
    ITEM_TYPES,
    MAX_SAMPLE_SIZE,
    Function,
    Parameter,
    Parameters,
    item_type,
    register_function,
    register_kind,
)
from edgewater.synopses.sampling.draw import Draw
from edgewater.synopses.sampling.sample_rows import Key, Rows, SampleStack
from edgewater.synopses.sampling.single_sample import SingleSample

DEFAULT_SIZE = 1000
MAX_SIZE = 1 << 24


class TimedStack(SampleStack):
    """Samples of `size` records that go by event time: what FIFO and biased samples have in common."""

    key_types: ClassVar[tuple[str, ...]] = ("<i8", "<u8", "<i8")  # time, source, number
    options: ClassVar[tuple[str, ...]] = ()  # parameters that are written only where they are used

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
        given = {name: getattr(self, name) for name in self.options}
        return {"size": self.size, **{name: value for name, value in given.items() if value is not None}}

    @property
    def capacity(self) -> int:
        """Records per group now: the size, halved per level."""
        return self.size >> self.level

    def _empty(self) -> Self:
        return type(self)(**self.parameters, source=self.source, seed=self.seed, item_type=self.item_type)

    @classmethod
    def _of_parameters(cls, parameters: dict[str, Any], **common: Any) -> Self:
        options = {name: parameters[name] for name in cls.options if name in parameters}
        return cls(size=parameters["size"], **options, **common)

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
    """The `size` newest records per group. Answers are exact, about these records alone.

    With a `quota`, only the `quota` newest of each source are candidates. That is as good an algebra: what a
    newer record of its source puts out makes room for nothing older than that record.
    """

    kind: ClassVar[str] = "fifo"
    properties: ClassVar[Properties] = Properties(idempotent=True, foldable=True, ordered=True)
    questions: ClassVar[Questions] = (Mean, Sum, Count, Minimum, Maximum, Proportion, Rank, Quantile)
    options: ClassVar[tuple[str, ...]] = ("quota",)

    def __init__(self, groups: int = 0, *, quota: int | None = None, **common: Any) -> None:
        self.quota = None if quota is None else check_whole("quota", quota, 1, MAX_SIZE)
        super().__init__(groups, **common)

    def _most_levels(self) -> int:
        """A quota folds with the size, which needs it even: else the size would be halved more than it."""
        levels = self.capacity.bit_length() - 1
        if self.quota is None:
            return levels
        quota = self.quota >> self.level
        return min(levels, (quota & -quota).bit_length() - 1)

    def _kept(self, rows: Rows) -> BoolArray:
        candidates = np.ones(len(rows), bool) if self.quota is None else self._within_quota(rows)
        newer = np.append(np.cumsum(candidates[::-1])[::-1], 0)  # candidates from here to the end
        left = newer[:-1] - newer[rows.starts(len(self))[rows.groups + 1]]
        return np.asarray(candidates & (left <= self.capacity))

    def _within_quota(self, rows: Rows) -> BoolArray:
        assert self.quota is not None
        order = np.lexsort((rows.keys[1], rows.groups))  # stable: by time within a source
        groups, sources = rows.groups[order], rows.keys[1][order]
        last = np.append((groups[1:] != groups[:-1]) | (sources[1:] != sources[:-1]), True)[: len(rows)]
        ends = np.flatnonzero(last)
        places = np.arange(len(rows))
        within = np.zeros(len(rows), bool)
        within[order] = ends[np.searchsorted(ends, places)] - places < self.quota >> self.level
        return within

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
        quota: most records of any one source; None: as many as there is room for. Only samples of equal size and
            quota merge.
    """

    stack_type = FifoStack

    def __init__(self, size: int = DEFAULT_SIZE, *, source: int = 0, quota: int | None = None) -> None:
        super().__init__(FifoStack(1, size=size, source=source, seed=DEFAULT_SEED, quota=quota))

    def shares(self) -> dict[int, int]:
        """How many of the records each source has given: one with a fast clock has too many."""
        return self._stack.shares()


def _make(parameters: Parameters, data_type: pa.DataType | None) -> FifoStack:
    return FifoStack(**dict(parameters), item_type=item_type(data_type))


register_kind(FifoStack)
register_function(
    Function("fifo", _make, types=ITEM_TYPES, parameters={"size": Parameter.whole(DEFAULT_SIZE, 1, MAX_SAMPLE_SIZE)})
)
