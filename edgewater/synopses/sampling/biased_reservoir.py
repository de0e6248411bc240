"""Biased reservoirs: samples of recent records. The probability of a record falls by 1/n with each later record.

In Aggarwal, "On Biased Reservoir Sampling" (VLDB 2006), algorithm 2.1 with p_in = 1, each record replaces one of n
records at random. This is equivalent to hashing each record to a slot that contains the newest record. In this form,
samples merge per slot by the newest record. The result equals the sample of a single pass, bit for bit, in any order
and any tree. (The newest n records of a union would be a FIFO sample.)

A record with r later records is still in the sample with probability (1 - 1/n)^r. Later records of all sources count,
so a source with more traffic ages the records of the others. With p_in < 1, another hash thins the records first: a
fraction p_in of the stream remains, records age by p_in/n each, and the same number of slots covers a longer past.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from edgewater.base.errors import InvalidRequest
from edgewater.synopses.array_stack import register_stack
from edgewater.synopses.base import (
    BoolArray,
    Estimates,
    FloatArray,
    IntArray,
    Mean,
    Properties,
    Quantile,
    Question,
    Questions,
    Rank,
)
from edgewater.synopses.encoding.layout import Layout
from edgewater.synopses.hashing import DEFAULT_SEED, finalised
from edgewater.synopses.questions import Proportion
from edgewater.synopses.registry import MAX_SAMPLE_SIZE, Parameter
from edgewater.synopses.sampling.estimator import SampleEstimator
from edgewater.synopses.sampling.sample_rows import SampleRows, record_tags
from edgewater.synopses.sampling.sample_stack import DEFAULT_SIZE, RANGE, SingleSample, TimedSampleStack, sample_layouts

MIN_P_IN = 2.0**-32
"""Records are thinned by hashes of 64 bits."""
_THINNING = 2  # number of the hash that thins records; the tag without it chooses the slot; format: number of a hash


class BiasedReservoirStack(TimedSampleStack):
    """`size` slots per group, each with the newest of the records that hash to it.

    `Mean`, `Proportion`, `Rank` and `Quantile` weight records by (1 - p_in/size)^r, where r is the number of later
    records.
    """

    kind: ClassVar[str] = "biased_reservoir"
    version: ClassVar[int] = 1
    properties: ClassVar[Properties] = Properties(idempotent=True, ordered=True)
    questions: ClassVar[Questions] = (Mean, Proportion, Rank, Quantile)
    options: ClassVar[tuple[str, ...]] = ("p_in",)
    arrays: ClassVar[dict[str, tuple[str, float]]] = RANGE
    layouts: ClassVar[tuple[Layout, ...]] = sample_layouts(TimedSampleStack.key_types)

    def __init__(self, groups: int = 0, *, p_in: float | None = None, **common: Any) -> None:
        if p_in is not None and (not isinstance(p_in, int | float) or not MIN_P_IN <= p_in <= 1):
            raise InvalidRequest("p_in", p_in, f"a probability of at least {MIN_P_IN:.0e}, at most 1")
        self.p_in = None if p_in is None or p_in == 1 else float(p_in)
        super().__init__(groups, **common)

    @property
    def admission_rate(self) -> float:
        """The fraction of the records that may enter a slot."""
        return 1.0 if self.p_in is None else self.p_in

    def _candidates(self, rows: SampleRows) -> BoolArray | None:
        """Returns the records that remain after thinning. Its hash is independent of the slot's hash."""
        if self.p_in is None:
            return None
        tags = finalised(record_tags(rows.keys[1], rows.keys[2], self.seed), _THINNING)
        return np.asarray(tags < np.uint64(int(self.p_in * 2.0**64)))

    def _slots(self, rows: SampleRows) -> IntArray:
        tags = record_tags(rows.keys[1], rows.keys[2], self.seed)
        return np.asarray((tags % np.uint64(self.capacity)).astype(np.int64))

    def _retained(self, rows: SampleRows) -> IntArray:
        """Returns the last row of each slot; rows are sorted by time."""
        places = rows.groups * self.capacity + self._slots(rows)
        _, from_the_end = np.unique(places[::-1], return_index=True)
        return np.sort(len(rows) - 1 - from_the_end)

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the answer per group; the default question is the mean, weighted towards the newest records."""
        self.check(question)
        rows = self.consolidate()
        # Slots are equivalent to independent samples of an infinite, weighted stream: a rate of 0.
        rate, least, greatest = np.zeros(len(self)), self._view("least"), self._view("greatest")
        estimator = SampleEstimator(rows.groups, rows.values, rate, self.kind, least, greatest)
        return estimator.query(question or Mean())

    def _complete(self) -> BoolArray:
        """Returns false for all groups: each record may have replaced an older one, so no group is known to be
        complete.
        """
        return np.zeros(len(self), bool)


class BiasedReservoir(SingleSample[BiasedReservoirStack]):
    """A sample of at most `size` records in which older records become rarer, by p_in/size per later record.

    Args:
        size: the number of slots.
        p_in: the fraction of the records that may enter the sample, Aggarwal's p_in.
        source: a number of its own for each sample that is updated and later merged with this sample.
        seed: seed of the slots. Only samples of equal size, p_in and seed merge.

    >>> BiasedReservoir(4).inclusion([0, 4, 8]).round(2).tolist()  # with 0, 4 and 8 later records
    [1.0, 0.32, 0.1]
    """

    stack_type = BiasedReservoirStack

    def __init__(
        self, size: int = DEFAULT_SIZE, *, source: int = 0, seed: int = DEFAULT_SEED, p_in: float = 1.0
    ) -> None:
        super().__init__(BiasedReservoirStack(1, size=size, source=source, seed=seed, p_in=p_in))

    def inclusion(self, later: Any) -> FloatArray:
        """Returns the probability that a record with `later` records after it is in the sample."""
        rate = self.stack.admission_rate
        return np.asarray(rate * (1 - rate / self.stack.capacity) ** np.asarray(later, np.float64))


register_stack(
    BiasedReservoirStack,
    "biased",
    "biased_reservoir",
    parameters={"size": Parameter.whole(DEFAULT_SIZE, 1, MAX_SAMPLE_SIZE)},
)
