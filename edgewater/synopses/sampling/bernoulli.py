"""Bernoulli samples: each record is sampled with the same probability, independently of the others.

A record is sampled if its tag, a hash of its identity, is below rate·2^64. The sample of a union is therefore the union
of the samples, and a sample of a lower rate is a subset of that of a higher rate. A group that exceeds `limit` records
halves its rate. The number of halvings depends on the records and not on their order.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from edgewater.base.errors import InvalidRequest
from edgewater.synopses.array_stack import register_stack
from edgewater.synopses.base import BoolArray, Estimates, FloatArray, IntArray, Mean, Properties, Question, Questions
from edgewater.synopses.checks import check_whole
from edgewater.synopses.encoding.layout import Layout, field
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray
from edgewater.synopses.registry import MAX_SAMPLE_SIZE, REQUIRED, Parameter
from edgewater.synopses.sampling.estimator import QUESTIONS, SampleEstimator
from edgewater.synopses.sampling.sample_rows import MAX_TAG, SampleRows
from edgewater.synopses.sampling.sample_stack import RANGE, RateSampleStack, SingleSample, sample_layouts

DEFAULT_LIMIT = 1 << 16
_MAX_LEVEL = 20  # limit: rates above 2^-64
_MAX_HALVED = 60  # limit: rates above 2^-64
_MIN_RATE = 1e-9  # limit: rates above 2^-64


class BernoulliStack(RateSampleStack):
    """A sample per group with the probability `rate`, halved until at most `limit` records remain."""

    kind: ClassVar[str] = "bernoulli"
    version: ClassVar[int] = 1
    properties: ClassVar[Properties] = Properties(idempotent=True)
    questions: ClassVar[Questions] = QUESTIONS
    arrays: ClassVar[dict[str, tuple[str, float]]] = {"halved": ("<i8", 0), **RANGE}
    layouts: ClassVar[tuple[Layout, ...]] = sample_layouts(
        RateSampleStack.key_types, (field("halved", least=0, most=_MAX_HALVED),)
    )
    threshold: ClassVar[str] = "halved"
    required: ClassVar[tuple[str, ...]] = ("rate", "limit")

    def __init__(self, groups: int = 0, *, rate: float, limit: int = DEFAULT_LIMIT, **common: Any) -> None:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not _MIN_RATE <= rate <= 1:
            raise InvalidRequest("rate", rate, f"a probability from {_MIN_RATE} to 1")
        self.rate = float(rate)
        self.limit = check_whole("limit", limit, 1, 1 << 30)
        super().__init__(groups, **common)

    @property
    def _max_level(self) -> int:
        return min(_MAX_LEVEL, self.limit.bit_length() - 1)

    def rates(self) -> FloatArray:
        """Returns the current sampling rate per group."""
        self.consolidate()
        return self._rates()

    def _rates(self) -> FloatArray:
        return np.asarray(self.rate * 0.5 ** self._thresholds())

    def _complete(self) -> BoolArray:
        return np.asarray(self.rates() >= 1)

    def _limits(self) -> WordArray:
        """Returns the largest sampled tag per group."""
        rates = self._rates()
        words = (np.where(rates < 1, rates, 0.0) * 2.0**64).astype(np.uint64)
        return np.where(rates < 1, np.maximum(words, np.uint64(1)) - np.uint64(1), MAX_TAG)

    def _candidates(self, rows: SampleRows) -> BoolArray:
        limits = self._limits()
        return np.asarray(rows.keys[0] <= (limits if len(self) == 1 else limits[rows.groups]))

    def _retained(self, rows: SampleRows) -> BoolArray:
        """Halves the rate of groups above the limit until they fit."""
        halved = self._view("halved")
        while True:
            retained = self._candidates(rows)
            crowded = np.bincount(rows.groups[retained], minlength=len(self)) > self.limit >> self.level
            if not crowded.any():
                return retained
            halved[crowded] = np.maximum(halved, self.level)[crowded] + 1

    def _thresholds(self) -> IntArray:
        return np.asarray(np.maximum(self._view("halved"), self.level))

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the answer per group; the default question is the mean."""
        self.check(question)
        rows = self.consolidate()
        estimator = SampleEstimator(
            rows.groups, rows.values, self.rates(), self.kind, self._view("least"), self._view("greatest")
        )
        return estimator.query(question or Mean())


class BernoulliSample(SingleSample[BernoulliStack]):
    """A sample with the probability `rate`, which is halved when there are more than `limit` records.

    Args:
        source: a number of its own for each sample that is updated and later merged with this sample.
        seed: seed of the tags. Only samples of equal rate, limit and seed merge.

    >>> import numpy as np
    >>> from edgewater.synopses import Count
    >>> sample = BernoulliSample(0.1)
    >>> sample.update(np.arange(10_000.0))
    >>> found = sample.query(Count())
    >>> found.lower <= 10_000 <= found.upper, found.basis
    (True, 'bernoulli')
    """

    stack_type = BernoulliStack

    def __init__(self, rate: float, *, limit: int = DEFAULT_LIMIT, source: int = 0, seed: int = DEFAULT_SEED) -> None:
        super().__init__(BernoulliStack(1, rate=rate, limit=limit, source=source, seed=seed))

    @property
    def rate(self) -> float:
        """The current sampling rate."""
        return float(self.stack.rates()[0])


register_stack(
    BernoulliStack,
    parameters={
        "rate": Parameter.number(REQUIRED, _MIN_RATE, 1, f"a probability from {_MIN_RATE} to 1, such as 0.01"),
        "limit": Parameter.whole(DEFAULT_LIMIT, 1, MAX_SAMPLE_SIZE),
    },
)
