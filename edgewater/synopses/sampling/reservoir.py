"""Reservoir samples: uniform samples of a fixed size, the records with the smallest tags.

The tag of a record is a hash of its identity (`sample_rows.py`): uniform, and equal wherever the record is read. The k
smallest tags of a union are therefore among the k smallest tags of each partial. The merged sample equals the sample of
a single pass over all records, bit for bit, and merging a partial twice changes nothing (bottom-k: Cohen and Kaplan
2007; Agarwal et al. 2013).

The tag of rank k + 1 is stored too. Given this tag τ, each record was sampled with probability τ/2^64. This estimates
the number of records (k/τ) without a counter, which would count re-delivered partials twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from edgewater.base.errors import InvalidRequest
from edgewater.synopses.array_stack import register_stack
from edgewater.synopses.base import BoolArray, Estimates, IntArray, Mean, Properties, Question, Questions
from edgewater.synopses.checks import check_fraction
from edgewater.synopses.encoding.layout import Layout
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray
from edgewater.synopses.intervals import normal_quantile
from edgewater.synopses.registry import MAX_SAMPLE_SIZE, Parameter
from edgewater.synopses.sampling.estimator import QUESTIONS, SampleEstimator
from edgewater.synopses.sampling.sample_rows import MAX_TAG, SampleRows
from edgewater.synopses.sampling.sample_stack import (
    DEFAULT_SIZE,
    MAX_SIZE,
    RANGE,
    SingleSample,
    SizedSampleStack,
    sample_layouts,
)


class ReservoirStack(SizedSampleStack):
    """A uniform sample without replacement of at most `size` records per group."""

    kind: ClassVar[str] = "reservoir"
    version: ClassVar[int] = 1
    properties: ClassVar[Properties] = Properties(idempotent=True)
    questions: ClassVar[Questions] = QUESTIONS
    arrays: ClassVar[dict[str, tuple[str, float]]] = RANGE
    layouts: ClassVar[tuple[Layout, ...]] = sample_layouts(SizedSampleStack.key_types)

    def __init__(self, groups: int = 0, **common: Any) -> None:
        super().__init__(groups, **common)
        self._max_tags: WordArray = np.full(groups, MAX_TAG)

    def _retained(self, rows: SampleRows) -> BoolArray:
        rank = np.arange(len(rows)) - rows.starts(len(self))[rows.groups]
        return np.asarray(rank <= self.capacity)

    def _set_rows(self, rows: SampleRows) -> None:
        super()._set_rows(rows)
        starts = rows.starts(len(self))
        self._max_tags = np.full(len(self), MAX_TAG)
        full = np.diff(starts) > self.capacity
        self._max_tags[full] = rows.keys[0][starts[1:][full] - 1]

    def grow(self, groups: int) -> None:
        super().grow(groups)
        self._max_tags = np.concatenate([self._max_tags, np.full(max(len(self) - len(self._max_tags), 0), MAX_TAG)])

    def _candidates(self, rows: SampleRows) -> BoolArray:
        limits = self._max_tags if len(self) == 1 else self._max_tags[rows.groups]
        return np.asarray(rows.keys[0] <= limits)

    def _complete(self) -> BoolArray:
        return np.asarray(np.diff(self.consolidate().starts(len(self))) <= self.capacity)

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the answer per group; the default question is the mean."""
        self.check(question)
        return self.estimator().query(question or Mean())

    def estimator(self) -> SampleEstimator:
        """Returns the estimator of the sample without the record of rank k + 1."""
        rows = self.consolidate()
        full = np.diff(rows.starts(len(self))) > self.capacity
        rate = np.where(full, self._max_tags.astype(np.float64) / 2.0**64, 1.0)
        inside = rows.at(~full[rows.groups] | (rows.keys[0] < self._max_tags[rows.groups]))
        return SampleEstimator(
            inside.groups, inside.values, rate, self.kind, self._view("least"), self._view("greatest")
        )

    def items(self, group: int = 0) -> pa.Array:
        return super().items(group)[: self.capacity]

    def sampled(self) -> tuple[IntArray, pa.Array]:
        estimator = self.estimator()
        return estimator.groups, pa.array(estimator.values)


class ReservoirSample(SingleSample[ReservoirStack]):
    """A uniform sample of at most `size` records without replacement.

    Args:
        size: number of records. The half-width of the interval of a mean is about s/√size at 68 %.
        source: a number of its own for each sample that is updated and later merged with this sample.
        seed: seed of the tags. Only samples of equal size and seed merge.

    >>> import numpy as np
    >>> from edgewater.synopses import Mean
    >>> sample = ReservoirSample(100)
    >>> sample.update(np.arange(10_000.0))
    >>> mean = sample.query(Mean())
    >>> round(mean.value), round(mean.lower), round(mean.upper)  # 4,999.5 is true
    (4857, 4243, 5483)
    """

    stack_type = ReservoirStack

    def __init__(self, size: int = DEFAULT_SIZE, *, source: int = 0, seed: int = DEFAULT_SEED) -> None:
        super().__init__(ReservoirStack(1, size=size, source=source, seed=seed))

    @classmethod
    def for_error(cls, epsilon: float, *, confidence: float = 0.95, source: int = 0, seed: int = DEFAULT_SEED) -> Self:
        """Returns the smallest sample that gives any proportion within ±epsilon: size z²/(4·epsilon²)."""
        size = int(np.ceil((normal_quantile(confidence) / (2 * check_fraction("epsilon", epsilon))) ** 2))
        if size > MAX_SIZE:
            raise InvalidRequest("epsilon", epsilon, f"an error that {MAX_SIZE} records can reach")
        return cls(size, source=source, seed=seed)


def _size_for(goals: Mapping[str, Any]) -> Mapping[str, Any]:
    return ReservoirSample.for_error(goals["epsilon"]).stack.parameters


register_stack(
    ReservoirStack,
    "reservoir",
    "sample",
    parameters={"size": Parameter.whole(DEFAULT_SIZE, 1, MAX_SAMPLE_SIZE)},
    goals={"epsilon": Parameter.fraction(None)},
    size_for=_size_for,
)
