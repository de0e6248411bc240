"""A Bernoulli sample: each record is in it with the same probability, and whether one is does not depend on others.

A record is in if its tag, a hash of its identity, is below rate·2^64. So the sample of a union is the
union of the samples, and a sample of a lower rate is part of the one of a higher rate. A group that
outgrows `limit` records halves its rate: the least halving at which they fit depends on the records
and not on their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from edgewater.errors import InvalidRequest
from edgewater.synopses.base import (
    BoolArray,
    Estimates,
    FloatArray,
    IntArray,
    Mean,
    Properties,
    Question,
    Questions,
)
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray
from edgewater.synopses.items import check_whole
from edgewater.synopses.registry import (
    ITEM_TYPES,
    MAX_SAMPLE_SIZE,
    REQUIRED,
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
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

DEFAULT_LIMIT = 1 << 16
_MAX_LEVEL = 20
_MOST_HALVED = 60
_MIN_RATE = 1e-9
_ALL = np.uint64((1 << 64) - 1)


class BernoulliStack(SampleStack):
    """Records per group, each with probability `rate`, halved as often as needed to hold at most `limit`."""

    kind: ClassVar[str] = "bernoulli"
    properties: ClassVar[Properties] = Properties(idempotent=True, foldable=True)
    questions: ClassVar[Questions] = QUESTIONS
    arrays: ClassVar[dict[str, tuple[str, float]]] = {"halved": ("<i8", 0)}
    key_types: ClassVar[tuple[str, ...]] = ("<u8",)

    def __init__(
        self,
        groups: int = 0,
        *,
        rate: float,
        limit: int = DEFAULT_LIMIT,
        source: int = 0,
        seed: int = DEFAULT_SEED,
        item_type: str | None = None,
    ) -> None:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not _MIN_RATE <= rate <= 1:
            raise InvalidRequest("rate", rate, f"a probability from {_MIN_RATE} to 1")
        self.rate = float(rate)
        self.limit = check_whole("limit", limit, 1, 1 << 30)
        super().__init__(groups, source=source, seed=seed, item_type=item_type)

    @property
    def parameters(self) -> dict[str, Any]:
        return {"rate": self.rate, "limit": self.limit}

    def _empty(self) -> Self:
        return type(self)(
            rate=self.rate, limit=self.limit, source=self.source, seed=self.seed, item_type=self.item_type
        )

    @classmethod
    def _of_parameters(cls, parameters: dict[str, Any], **common: Any) -> Self:
        return cls(rate=parameters["rate"], limit=parameters["limit"], **common)

    def _most_levels(self) -> int:
        return min(_MAX_LEVEL, self.limit.bit_length() - 1) - self.level

    def rates(self) -> FloatArray:
        """The probability now, per group."""
        self._settle()
        return self._rates()

    def _rates(self) -> FloatArray:
        return np.asarray(self.rate * 0.5 ** np.maximum(self._view("halved"), self.level))

    def _limits(self) -> WordArray:
        """The largest tag that is in, per group."""
        rates = self._rates()
        words = (np.where(rates < 1, rates, 0.0) * 2.0**64).astype(np.uint64)
        return np.where(rates < 1, np.maximum(words, np.uint64(1)) - np.uint64(1), _ALL)

    def _keys(self, numbers: IntArray, times: IntArray | None) -> tuple[Key, ...]:
        return (tags_of(np.array([self.source], np.uint64), numbers, self.seed),)

    def _promising(self, rows: Rows) -> BoolArray:
        limits = self._limits()
        return np.asarray(rows.keys[0] <= (limits if len(self) == 1 else limits[rows.groups]))

    def _kept(self, rows: Rows) -> BoolArray:
        """Halves the rate of groups that are too large until they fit. A fold halves rate and room."""
        halved = self._view("halved")
        while True:
            kept = self._promising(rows)
            crowded = np.bincount(rows.groups[kept], minlength=len(self)) > self.limit >> self.level
            if not crowded.any():
                return kept
            halved[crowded] = np.maximum(halved, self.level)[crowded] + 1

    unite = None  # type: ignore[assignment]  # rates are the samples' own, and halve one after the other

    def merge_ones(self, others: Sequence[Self]) -> None:
        for other in others:
            self.merge(other, np.zeros(1, np.int64))

    def merge(self, other: Self, codes: IntArray) -> None:
        other._settle()
        halved = other._view("halved").copy()  # `other` may be this stack itself
        super().merge(other, codes)
        mine = self._view("halved")
        mine[codes] = np.maximum(mine[codes], halved)
        self._hold(self._held.at(self._kept(self._held)))

    def to_message(self) -> SynopsisMessage:
        self._settle()
        self._view("halved")[:] = np.maximum(self._view("halved"), self.level)
        return super().to_message()

    def _check_rows(self, rows: Rows) -> None:
        halved = self._view("halved")
        if ((halved < 0) | (halved > _MOST_HALVED)).any():
            raise ValueError("rates out of range")
        super()._check_rows(rows)

    def query(self, question: Question | None = None) -> Estimates:
        """The answer per group; without a question, the mean."""
        self.check(question)
        rows = self._settle()
        return Draw(rows.groups, rows.values, self.rates(), self.kind).query(question or Mean())


class BernoulliSample(SingleSample[BernoulliStack]):
    """Each record with probability `rate`; the rate is halved when there would be more than `limit`.

    Args:
        source: a number of its own for every sample that is updated and will be merged with others.
        seed: of the tags. Only samples of equal rate, limit and seed merge.
    """

    stack_type = BernoulliStack

    def __init__(self, rate: float, *, limit: int = DEFAULT_LIMIT, source: int = 0, seed: int = DEFAULT_SEED) -> None:
        super().__init__(BernoulliStack(1, rate=rate, limit=limit, source=source, seed=seed))

    @property
    def rate(self) -> float:
        """The probability now."""
        return float(self._stack.rates()[0])


def _make(parameters: Parameters, data_type: pa.DataType | None) -> BernoulliStack:
    return BernoulliStack(**dict(parameters), item_type=item_type(data_type))


register_kind(BernoulliStack)
register_function(
    Function(
        "bernoulli",
        _make,
        types=ITEM_TYPES,
        parameters={
            "rate": Parameter.number(REQUIRED, _MIN_RATE, 1, f"a probability from {_MIN_RATE} to 1, such as 0.01"),
            "limit": Parameter.whole(DEFAULT_LIMIT, 1, MAX_SAMPLE_SIZE),
        },
    )
)
