"""Count-min: frequencies of items, never too low, and too high by at most e·N/width with high probability.

Cormode and Muthukrishnan, "An improved data stream summary" (2005). An item's estimate is the smallest of its counters,
one per row. The interval [estimate - e·N/width, estimate] holds with probability 1 - e^-depth, because an estimate is
never below the true frequency unless an item's total is negative. (Some libraries state the estimate as the *lower*
bound, but it is the upper bound.)

Conservative update is not supported: it tightens estimates, but prevents merging.
"""

from __future__ import annotations

import math
from typing import ClassVar, Self

import numpy as np

from edgewater.base.errors import InvalidRequest
from edgewater.synopses.base import Count, Estimates, IntArray, Question, Questions
from edgewater.synopses.checks import check_fraction
from edgewater.synopses.frequency.counters import (
    MAX_DEPTH,
    MAX_WIDTH,
    MIN_WIDTH,
    CounterStack,
    SingleCounters,
    exact_sum,
    register_counters,
)
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray
from edgewater.synopses.items import row_hashes
from edgewater.synopses.questions import Frequency
from edgewater.synopses.shapes import Shape, ShownInterval

DEFAULT_WIDTH, DEFAULT_DEPTH = 65536, 5


class CountMinStack(CounterStack):
    """A count-min sketch per group."""

    kind: ClassVar[str] = "count_min"
    questions: ClassVar[Questions] = (Count, Frequency)

    def _row(self, words: WordArray, row: int) -> tuple[IntArray, None]:
        return (row_hashes(words, row) >> np.uint64(65 - self.columns.bit_length())).view(np.int64), None

    def shown(self, asked: Question | None = None) -> tuple[Shape, ...]:
        return (ShownInterval(question=asked or Count(), whole=asked is None),)

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the number of values per group (the default question), or the frequency of an item.

        Bytes of release 0.3.0 may lack more values than were added. The estimate is then the median of the item's
        counters, and its bounds are infinite.
        """
        self.check(question)
        if not isinstance(question, Frequency):
            return Estimates.exact(self._view("n"))
        word = self._hash_item(question.item)
        if word is None:
            return Estimates.exact(np.zeros(len(self)))
        table = self.table()
        cells = np.stack([table[:, row, int(self._row(word, row)[0][0])] for row in range(self.depth)], axis=1)
        n = self._view("n")
        value = cells.min(axis=1).astype(np.float64)
        # A true frequency is a whole number.
        lower = np.maximum(np.ceil(value - math.e * n / self.columns), 0)
        upper, basis = value, self.kind
        overdrawn = (table < 0).any(axis=(1, 2))
        if overdrawn.any():
            value = np.where(overdrawn, np.median(cells, axis=1), value)
            lower, upper = np.where(overdrawn, -np.inf, lower), np.where(overdrawn, np.inf, upper)
            basis = f"{self.kind}, of a group from which more was subtracted than it contained"
        return Estimates(value, np.minimum(lower, value), upper, 1 - math.exp(-self.depth), basis)

    def _check_rows(self) -> None:
        # Each value adds to one counter of each row.
        if (exact_sum(self.table(), 2) != self._view("n")[:, None]).any():
            raise ValueError("the counters of a row do not add up to the number of values")


class CountMin(SingleCounters):
    """The frequencies of items: one count-min sketch of depth × width counters.

    Args:
        width: a power of two from 16 to 2^24; estimates are too high by at most e·N/width, N the values.
        depth: 1 to 32 rows; the bound fails with probability e^-depth.
        seed: seed of the hash. Only synopses of equal width, depth and seed merge.

    >>> from edgewater.synopses import Frequency
    >>> hits = CountMin.for_error(0.001, 0.01)
    >>> hits.update(["/a"] * 900 + ["/b"] * 100)
    >>> hits.query(Frequency("/b")).value
    100.0
    """

    stack_type = CountMinStack

    def __init__(self, width: int = DEFAULT_WIDTH, depth: int = DEFAULT_DEPTH, *, seed: int = DEFAULT_SEED) -> None:
        super().__init__(CountMinStack(1, width=width, depth=depth, seed=seed))

    @classmethod
    def for_error(cls, epsilon: float, delta: float = 0.01, *, seed: int = DEFAULT_SEED) -> Self:
        """Returns the smallest sketch that is too high by at most epsilon·N with probability 1 - delta.

        Raises:
            InvalidRequest: no sketch reaches this error.
        """
        needed = math.e / check_fraction("epsilon", epsilon)
        depth = math.ceil(-math.log(check_fraction("delta", delta)))
        if needed > MAX_WIDTH:
            raise InvalidRequest("epsilon", epsilon, f"at least {math.e / MAX_WIDTH:.2g}")
        if depth > MAX_DEPTH:
            raise InvalidRequest("delta", delta, f"at least {math.exp(-MAX_DEPTH):.2g}")
        return cls(max(MIN_WIDTH, 1 << (math.ceil(needed) - 1).bit_length()), depth, seed=seed)


register_counters(CountMin, DEFAULT_WIDTH, DEFAULT_DEPTH, delta=0.01)
