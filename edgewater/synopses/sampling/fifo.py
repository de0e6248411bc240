"""FIFO samples: the newest records by event time, at a fixed size.

Records are ordered by (time, source, number), a total order, so merging is well defined for equal times, and equal
values are separate records. Times are compared and never subtracted. A source whose clock is fast dominates a merged
sample: `source_counts` shows it, and a `quota` bounds the number of records of one source. It is better to correct
event times before they reach the sample.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from edgewater.synopses.array_stack import register_stack
from edgewater.synopses.base import (
    BoolArray,
    Count,
    Estimates,
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
from edgewater.synopses.checks import check_whole
from edgewater.synopses.questions import Proportion
from edgewater.synopses.registry import MAX_SAMPLE_SIZE, Parameter
from edgewater.synopses.sampling.estimator import SampleEstimator
from edgewater.synopses.sampling.sample_rows import SampleRows
from edgewater.synopses.sampling.sample_stack import DEFAULT_SIZE, MAX_SIZE, SingleSample, TimedSampleStack


class FifoStack(TimedSampleStack):
    """The `size` newest records per group. Answers are exact for these records.

    With a `quota`, only the `quota` newest records of each source are candidates. The algebra is the same: if a newer
    record of its source displaces a record, no older record of that source replaces it.
    """

    kind: ClassVar[str] = "fifo"
    properties: ClassVar[Properties] = Properties(idempotent=True, ordered=True)
    questions: ClassVar[Questions] = (Mean, Sum, Count, Minimum, Maximum, Proportion, Rank, Quantile)
    options: ClassVar[tuple[str, ...]] = ("quota",)

    def __init__(self, groups: int = 0, *, quota: int | None = None, **common: Any) -> None:
        self.quota = None if quota is None else check_whole("quota", quota, 1, MAX_SIZE)
        super().__init__(groups, **common)

    def _retained(self, rows: SampleRows) -> BoolArray:
        candidates = np.ones(len(rows), bool) if self.quota is None else self._within_quota(rows)
        newer = np.append(np.cumsum(candidates[::-1])[::-1], 0)  # candidates from each row to the end
        left = newer[:-1] - newer[rows.starts(len(self))[rows.groups + 1]]
        return np.asarray(candidates & (left <= self.capacity))

    def _within_quota(self, rows: SampleRows) -> BoolArray:
        assert self.quota is not None
        order = np.lexsort((rows.keys[1], rows.groups))  # stable: by time within a source
        groups, sources = rows.groups[order], rows.keys[1][order]
        last = np.append((groups[1:] != groups[:-1]) | (sources[1:] != sources[:-1]), True)[: len(rows)]
        ends = np.flatnonzero(last)
        places = np.arange(len(rows))
        within = np.zeros(len(rows), bool)
        within[order] = ends[np.searchsorted(ends, places)] - places < self.quota >> self.level
        return within

    def _candidates(self, rows: SampleRows) -> BoolArray:
        """Returns the records that are not older than the oldest record of their group, if the group is full."""
        starts = self._rows.starts(len(self))
        full = np.diff(starts) >= self.capacity
        oldest = np.full(len(self), np.iinfo(np.int64).min)
        oldest[full] = self._rows.keys[0][starts[:-1][full]]
        return np.asarray(rows.keys[0] >= (oldest if len(self) == 1 else oldest[rows.groups]))

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the answer about the newest records per group; the default question is the mean."""
        self.check(question)
        rows = self.consolidate()
        estimator = SampleEstimator(rows.groups, rows.values, np.ones(len(self)), self.kind)
        if isinstance(question, Minimum | Maximum):
            question = Quantile(0.0 if isinstance(question, Minimum) else 1.0)
        answer = estimator.query(question or Mean())
        return Estimates(answer.value, answer.lower, answer.upper, 1.0, self.kind)


class FifoSample(SingleSample[FifoStack]):
    """The `size` newest records by event time.

    Args:
        source: a number of its own for each sample that is updated and later merged with this sample. It orders records
            of equal time, before their numbers in the source.
        quota: maximum number of records of one source; None: no limit. Only samples of equal size and quota merge.

    >>> from edgewater.synopses import Mean
    >>> newest = FifoSample(3)
    >>> newest.update([1.0, 2.0, 3.0, 4.0, 5.0], times=[10, 20, 30, 40, 50])
    >>> newest.query(Mean()).value
    4.0
    """

    stack_type = FifoStack

    def __init__(self, size: int = DEFAULT_SIZE, *, source: int = 0, quota: int | None = None) -> None:
        super().__init__(FifoStack(1, size=size, source=source, quota=quota))

    def source_counts(self) -> dict[int, int]:
        """Returns the number of records per source; a source with a fast clock has too many."""
        return self.stack.source_counts()


register_stack(FifoStack, parameters={"size": Parameter.whole(DEFAULT_SIZE, 1, MAX_SAMPLE_SIZE)})
