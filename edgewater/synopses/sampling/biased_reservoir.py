"""A sample that forgets: the probability of a record falls by 1/n with each record after it.

Aggarwal, "On Biased Reservoir Sampling" (VLDB 2006), algorithm 2.1 with p_in = 1, says: each record
replaces one of n at random. That is: each record hashes to a slot, and a slot keeps the newest. Said
so, samples merge per slot by the newest record, and what comes out is the sample of a single pass, bit
for bit, in any order and any tree. (Keeping the newest n of a union instead makes a FIFO of it.)

A record with r later ones (of all sources: one with more traffic ages the others' records) is still
there with probability (1 - 1/n)^r. With p_in < 1 records are thinned first, by a hash of their own: all that is
said of n slots then holds for a stream of which a part p_in is left, so that records age by p_in/n each, and
a longer past is remembered in as many slots. The samples need not know r: of the n slots, the expected part that
holds nothing newer than the record is that very probability, and it can be counted.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from edgewater.errors import InvalidRequest
from edgewater.synopses.base import (
    BoolArray,
    Count,
    Estimates,
    FloatArray,
    IntArray,
    Mean,
    Properties,
    Quantile,
    Question,
    Questions,
    Rank,
    Sum,
)
from edgewater.synopses.hashing import DEFAULT_SEED, finalised
from edgewater.synopses.intervals import around, normal_quantile, student_t
from edgewater.synopses.questions import Proportion, Since
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
from edgewater.synopses.sampling.fifo import DEFAULT_SIZE, TimedStack
from edgewater.synopses.sampling.sample_rows import Rows, tags_of
from edgewater.synopses.sampling.single_sample import SingleSample

_THINNING = 2  # of the hash that decides who comes in; that of the slots is the tag itself


class BiasedReservoirStack(TimedStack):
    """`size` slots per group, each with the newest of the records that hashed to it.

    `Mean`, `Proportion`, `Rank` and `Quantile` are about the records weighted by (1 - p_in/size)^r, r being
    how many came later. `Since` is about all records since a time, each alike.
    """

    kind: ClassVar[str] = "biased_reservoir"
    properties: ClassVar[Properties] = Properties(idempotent=True, foldable=True, ordered=True)
    questions: ClassVar[Questions] = (Mean, Proportion, Rank, Quantile, Since)
    options: ClassVar[tuple[str, ...]] = ("p_in",)

    def __init__(self, groups: int = 0, *, p_in: float | None = None, **common: Any) -> None:
        if p_in is not None and (not isinstance(p_in, int | float) or not 0 < p_in <= 1):
            raise InvalidRequest("p_in", p_in, "a probability above 0, at most 1")
        self.p_in = None if p_in is None or p_in == 1 else float(p_in)
        super().__init__(groups, **common)

    @property
    def part(self) -> float:
        """The part of the records that may come into a slot."""
        return 1.0 if self.p_in is None else self.p_in

    def _promising(self, rows: Rows) -> BoolArray | None:
        """What thinning leaves: by a hash apart from that of the slot, so the same wherever a record is seen."""
        if self.p_in is None:
            return None
        tags = finalised(tags_of(rows.keys[1], rows.keys[2], self.seed), _THINNING)
        return np.asarray(tags < np.uint64(int(self.p_in * 2.0**64)))

    def _most_levels(self) -> int:
        """Slots fold by their number modulo half as many, which needs an even number."""
        return (self.capacity & -self.capacity).bit_length() - 1

    def _slots(self, rows: Rows) -> IntArray:
        tags = tags_of(rows.keys[1], rows.keys[2], self.seed)
        return np.asarray((tags % np.uint64(self.capacity)).astype(np.int64))

    def _kept(self, rows: Rows) -> IntArray:
        """The last of each slot: rows are sorted by time."""
        places = rows.groups * self.capacity + self._slots(rows)
        _, from_the_end = np.unique(places[::-1], return_index=True)
        return np.sort(len(rows) - 1 - from_the_end)

    def query(self, question: Question | None = None) -> Estimates:
        """The answer per group; without a question, the mean weighted towards the newest."""
        self.check(question)
        rows = self._settle()
        match question:
            case Since(time_ms, Count(confidence)):
                return self._count_since(rows, time_ms, confidence)
            case Since(time_ms, Sum(confidence) | Mean(confidence) as asked):
                return self._since(rows, time_ms, isinstance(asked, Sum), confidence)
            case Since(_, asked):
                reason = f"{self.kind} cannot answer it since a time"
                raise InvalidRequest("question", asked, "Count, Sum or Mean", reason)
        # Slots are as good as independent draws from an endless, weighted stream: no finite population.
        return Draw(rows.groups, rows.values, np.zeros(len(self)), self.kind).query(question or Mean())

    def _newer(self, rows: Rows) -> tuple[IntArray, IntArray]:
        """Per row how many of its group's slots hold something newer; per group the number of rows."""
        starts = rows.starts(len(self))
        return starts[rows.groups + 1] - 1 - np.arange(len(rows)), np.diff(starts)

    def _count_since(self, rows: Rows, time_ms: int, confidence: float) -> Estimates:
        """Linear counting (Whang et al. 1990) of the slots that something since then has hit."""
        n = float(self.capacity)
        hit = np.bincount(rows.groups[rows.keys[0] >= time_ms], minlength=len(self)).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.log1p(-hit / n) / np.log1p(-1 / n) if n > 1 else np.where(hit > 0, np.inf, 0.0)
            load = value / n
            # Of the slots, and of thinning: the records that a binomial sample of them stands for.
            variance = n * (np.expm1(load) - load) + value * (1 - self.part)
            value = value / self.part
            half = (normal_quantile(confidence) * np.sqrt(variance) + (hit > 0)) / self.part
            lower, upper = around(value, half)
        return Estimates(value, np.maximum(lower, hit), upper, confidence, self.kind)

    def _since(self, rows: Rows, time_ms: int, total: bool, confidence: float) -> Estimates:
        """Horvitz and Thompson: each record stands for 1/P; the mean is the ratio of two such sums (Hájek)."""
        newer, _ = self._newer(rows)
        chosen = rows.keys[0] >= time_ms
        draw = Draw(rows.groups[chosen], rows.at(chosen).values, np.ones(len(self)), self.kind)
        values = draw.numbers()
        present = (1 - newer[chosen] / self.capacity) * self.part
        weights = 1 / present
        count, summed, squares = (self._summed(draw.groups, w) for w in (weights, weights * values, weights * weights))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            mean = summed / count
            off = values if total else values - mean[draw.groups]
            variance = self._summed(draw.groups, off * off * (1 - present) * weights * weights)
            # Few old records weigh much: as many degrees of freedom as equal weights would have (Kish).
            freedom = np.where(count > 0, count * count / squares, 0.0) - 1
            half = student_t(confidence, freedom) * np.sqrt(variance) / (1.0 if total else count)
            value = np.where(count > 0, summed if total else mean, np.nan)
            lower, upper = around(value, half)
        return Estimates(value, lower, upper, confidence, self.kind)

    def _summed(self, groups: IntArray, weights: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(groups, weights, len(self)), np.float64)


class BiasedReservoir(SingleSample[BiasedReservoirStack]):
    """A sample of at most `size` records in which older ones become rarer, by p_in/size per later record.

    Args:
        size: even, better a power of two, to be folded.
        p_in: the part of the records that may come in at all, Aggarwal's p_in.
        source: a number of its own for every sample that is updated and will be merged with others.
        seed: of the slots. Only samples of equal size, p_in and seed merge.
    """

    stack_type = BiasedReservoirStack

    def __init__(
        self, size: int = DEFAULT_SIZE, *, source: int = 0, seed: int = DEFAULT_SEED, p_in: float = 1.0
    ) -> None:
        super().__init__(BiasedReservoirStack(1, size=size, source=source, seed=seed, p_in=p_in))

    def inclusion(self, later: Any) -> FloatArray:
        """The probability of a record with `later` records after it."""
        part = self._stack.part
        return np.asarray(part * (1 - part / self._stack.capacity) ** np.asarray(later, np.float64))


def _make(parameters: Parameters, data_type: pa.DataType | None) -> BiasedReservoirStack:
    return BiasedReservoirStack(**dict(parameters), item_type=item_type(data_type))


register_kind(BiasedReservoirStack)
register_function(
    Function("biased", _make, types=ITEM_TYPES, parameters={"size": Parameter.whole(DEFAULT_SIZE, 1, MAX_SAMPLE_SIZE)}),
    "biased_reservoir",
)
