"""A uniform sample of fixed size: the records with the smallest tags.

A record's tag is a hash of its identity (`sample_rows.py`), as uniform as a random number and the same
wherever the record is seen. So the k smallest tags of a union are among the k smallest of its parts:
the merged sample is the one that a single pass over all records would have drawn, bit for bit, and a
part that is merged twice changes nothing (bottom-k: Cohen and Kaplan 2007; Agarwal et al. 2013).

The tag with rank k + 1 is kept too. Given that tag τ, each record was drawn with probability τ/2^64,
which says how many records there were (k/τ) without a counter; a counter would count re-delivered
parts again. Who knows the number of records, from a `count` beside the sample, gives it with the
question (`population`) and gets the narrower interval of N·mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from edgewater.errors import InvalidRequest
from edgewater.synopses.base import (
    BoolArray,
    Estimate,
    Estimates,
    FloatArray,
    IntArray,
    Mean,
    Properties,
    Question,
    Questions,
)
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray
from edgewater.synopses.intervals import normal_quantile
from edgewater.synopses.items import check_share, check_whole
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
from edgewater.synopses.sampling.draw import QUESTIONS, Draw
from edgewater.synopses.sampling.sample_rows import Key, Rows, SampleStack, tags_of
from edgewater.synopses.sampling.single_sample import SingleSample

DEFAULT_SIZE = 1000
MAX_SIZE = 1 << 24
_ALL = np.uint64((1 << 64) - 1)


class ReservoirStack(SampleStack):
    """A uniform sample without replacement of at most `size` records per group."""

    kind: ClassVar[str] = "reservoir"
    properties: ClassVar[Properties] = Properties(idempotent=True, foldable=True)
    questions: ClassVar[Questions] = QUESTIONS
    key_types: ClassVar[tuple[str, ...]] = ("<u8",)

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
        self._limits: WordArray = np.full(groups, _ALL)

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

    def _most_levels(self) -> int:
        return self.capacity.bit_length() - 1

    def _keys(self, numbers: IntArray, times: IntArray | None) -> tuple[Key, ...]:
        return (tags_of(np.array([self.source], np.uint64), numbers, self.seed),)

    def _kept(self, rows: Rows) -> BoolArray:
        rank = np.arange(len(rows)) - rows.starts(len(self))[rows.groups]
        return np.asarray(rank <= self.capacity)

    def _hold(self, rows: Rows) -> None:
        super()._hold(rows)
        starts = rows.starts(len(self))
        self._limits = np.full(len(self), _ALL)
        full = np.diff(starts) > self.capacity
        self._limits[full] = rows.keys[0][starts[1:][full] - 1]

    def grow(self, groups: int) -> None:
        super().grow(groups)
        self._limits = np.concatenate([self._limits, np.full(max(len(self) - len(self._limits), 0), _ALL)])

    def _promising(self, rows: Rows) -> BoolArray:
        limits = self._limits if len(self) == 1 else self._limits[rows.groups]
        return np.asarray(rows.keys[0] <= limits)

    def _expect(self, many: Self) -> None:
        tags, wanted = many._settle().keys[0], 2 * (self.capacity + 1)
        if len(tags) > wanted:
            limit = np.partition(tags, wanted)[wanted]
            if len(np.unique(tags[tags <= limit])) > self.capacity:  # records that came twice count once
                self._limits[:] = np.minimum(self._limits, limit)

    def query(self, question: Question | None = None, *, population: FloatArray | None = None) -> Estimates:
        """The answer per group; without a question, the mean.

        Args:
            population: float64 per group, how many records there were, if that is known.
        """
        self.check(question)
        draw = self.draw()
        question = question or Mean()
        if population is None:
            return draw.query(question)
        return draw.of_population(np.asarray(population, np.float64), question)

    def draw(self) -> Draw:
        """The sample, without the record that marks its limit."""
        rows = self._settle()
        full = np.diff(rows.starts(len(self))) > self.capacity
        share = np.where(full, self._limits.astype(np.float64) / 2.0**64, 1.0)
        inside = rows.at(~full[rows.groups] | (rows.keys[0] < self._limits[rows.groups]))
        return Draw(inside.groups, inside.values, share, self.kind)

    def items(self, group: int = 0) -> pa.Array:
        return super().items(group)[: self.capacity]

    def sampled(self) -> tuple[IntArray, pa.Array]:
        draw = self.draw()
        return draw.groups, pa.array(draw.values)


class ReservoirSample(SingleSample[ReservoirStack]):
    """A uniform sample of at most `size` records, drawn without replacement.

    Args:
        size: records kept. The interval of a mean is about s/√size wide to either side at 68 %.
        source: a number of its own for every sample that is updated and will be merged with others.
        seed: of the tags. Only samples of equal size and seed merge.
    """

    stack_type = ReservoirStack

    def __init__(self, size: int = DEFAULT_SIZE, *, source: int = 0, seed: int = DEFAULT_SEED) -> None:
        super().__init__(ReservoirStack(1, size=size, source=source, seed=seed))

    @classmethod
    def for_error(cls, epsilon: float, *, confidence: float = 0.95, source: int = 0, seed: int = DEFAULT_SEED) -> Self:
        """The smallest one that gives any proportion within ±epsilon: size z²/(4·epsilon²)."""
        size = int(np.ceil((normal_quantile(confidence) / (2 * check_share("epsilon", epsilon))) ** 2))
        if size > MAX_SIZE:
            raise InvalidRequest("epsilon", epsilon, f"an error that {MAX_SIZE} records can give")
        return cls(size, source=source, seed=seed)

    def query(self, question: Question | None = None, *, population: float | None = None) -> Estimate:
        """The answer; without a question, the mean.

        Args:
            population: how many records there were, if that is known, such as `records` where no part was
                merged twice. Sums and counts are then as good as means and proportions.
        """
        known = None if population is None else np.array([population], np.float64)
        return self._stack.query(question, population=known)[0]


def _make(parameters: Parameters, data_type: pa.DataType | None) -> ReservoirStack:
    return ReservoirStack(**dict(parameters), item_type=item_type(data_type))


def _size_for(goals: Mapping[str, Any]) -> Mapping[str, Any]:
    return ReservoirSample.for_error(goals["epsilon"])._stack.parameters


register_kind(ReservoirStack)
register_function(
    Function(
        "reservoir",
        _make,
        types=ITEM_TYPES,
        parameters={"size": Parameter.whole(DEFAULT_SIZE, 1, MAX_SAMPLE_SIZE)},
        goals={"epsilon": Parameter.share(None)},
        size_for=_size_for,
    ),
    "sample",
)
