"""Fast-AGMS: sizes of joins and self-joins, and frequencies, from signed counters.

Alon, Matias and Szegedy (1996); Cormode and Garofalakis, "Sketching streams through the net" (VLDB 2005).
In each row an item adds its sign to one counter. If signs are 4-wise independent, the product of two relations' rows
has the join size as its mean and a variance of at most (F2·F2' + J²)/width. The estimate is the median over rows.

Columns and signs are bits of a random polynomial of degree 3 over the integers modulo 2^61 - 1, one per row, which is
4-wise independent by construction, whatever the quality of the hash.

Intervals follow from Cantelli's inequality per row and the binomial distribution of the number of rows that deviate
(`deviations`); the second moments enter by their own upper bounds, at a fifth of the permitted failures. Nothing is
assumed about the data: 4-wise independence gives a variance and no more, and data exist whose rows deviate as often as
Cantelli allows. The intervals are about twice as wide as the intervals of a normal approximation.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np

from edgewater.base.errors import InvalidRequest
from edgewater.synopses.base import Count, Estimates, FloatArray, IntArray, Question, Questions
from edgewater.synopses.checks import check_confidence, check_fraction
from edgewater.synopses.frequency.counters import (
    MAX_DEPTH,
    MAX_WIDTH,
    MIN_WIDTH,
    CounterStack,
    SingleCounters,
    register_counters,
)
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray, hash_values
from edgewater.synopses.questions import Frequency, JoinSize, SelfJoinSize

DEFAULT_WIDTH, DEFAULT_DEPTH = 1024, 5

_MOMENT_FAILURES = 0.2  # measured: bench.synopses
"""Part of the permitted failures that the bounds of second moments use."""
_PAIRS = 16  # derived: the worst pair is an end or the middle
"""The number of pairs of probabilities that the search for the worst pair tries. For an odd number of rows, the worst
pair is an end or the middle of the range."""

_PRIME = (1 << 61) - 1  # format: a Mersenne prime
_P, _LOW = np.uint64(_PRIME), np.uint64(0xFFFFFFFF)
_29, _32, _61, _3 = np.uint64(29), np.uint64(32), np.uint64(61), np.uint64(3)
_LOW_29 = np.uint64((1 << 29) - 1)


class FastAgmsStack(CounterStack):
    """A Fast-AGMS sketch per group."""

    kind: ClassVar[str] = "fast_agms"
    questions: ClassVar[Questions] = (Count, SelfJoinSize, JoinSize, Frequency)
    chunk: ClassVar[int] = 1 << 13  # a polynomial needs more temporaries than a mixer

    def __init__(self, groups: int = 0, **parameters: Any) -> None:
        super().__init__(groups, **parameters)
        self._coefficients = _coefficients(self.seed, self.depth)

    def _row(self, words: WordArray, row: int) -> tuple[IntArray, IntArray]:
        values = polynomial(words, self._coefficients[row])
        signs = (values & np.uint64(1)).view(np.int64) * 2 - 1
        # 61 bits: the top bits are the column; the lowest bit is the sign.
        return (values >> np.uint64(62 - self.columns.bit_length())).view(np.int64), signs

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the answer per group; the default question is the self-join size."""
        self.check(question)
        match question:
            case Count():
                return Estimates.exact(self._view("n"))
            case JoinSize(other, confidence):
                return self._join_size(self._other_stack(other), check_confidence(confidence))
            case Frequency(item, confidence):
                return self._frequencies(item, check_confidence(confidence))
        confidence = question.confidence if isinstance(question, SelfJoinSize) else SelfJoinSize().confidence
        value, lower, upper = self._moments(check_confidence(confidence))
        return Estimates(value, lower, upper, confidence, self.kind)

    def _moments(self, confidence: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Returns the second moment per group and its bounds: |estimate - F2| ≤ t·√(2/columns)·F2."""
        value, upper = self._bounded_moments(deviations(self.depth, confidence))
        error = deviations(self.depth, confidence) * math.sqrt(2 / self.columns)
        return value, np.floor(value / (1 + error)), upper

    def _bounded_moments(self, deviation: float) -> tuple[FloatArray, FloatArray]:
        """Returns the second moment per group, and its upper bound.

        The bound holds if the median of rows is at most `deviation` standard deviations too small.
        """
        table = self.table().astype(np.float64)
        value = np.asarray(np.median((table * table).sum(axis=2), axis=1))
        error = deviation * math.sqrt(2 / self.columns)
        upper = value / (1 - error) if error < 1 else np.where((table == 0).all(axis=(1, 2)), 0.0, np.inf)
        return value, np.ceil(upper)

    def _largest_moments(self, failures: float) -> FloatArray:
        """Returns bounds that the second moments exceed with a probability of at most `failures`; float64 per group."""
        return self._bounded_moments(deviations(self.depth, 1 - failures, sides=1))[1]

    def _join_size(self, other: FastAgmsStack, confidence: float) -> Estimates:
        """Returns the join size J per group.

        Solves |estimate - J|² ≤ t²·(F2·F2' + J²)/columns for J. Each F2 is at its upper bound, which uses a tenth of
        the failures.
        """
        products = self.table().astype(np.float64) * other.table()
        value = np.asarray(np.median(products.sum(axis=2), axis=1))
        failures = (1 - confidence) * _MOMENT_FAILURES
        each = [stack._largest_moments(failures / 2) for stack in (self, other)]
        factor = deviations(self.depth, confidence + failures) ** 2 / self.columns
        with np.errstate(invalid="ignore"):
            product = np.where(np.minimum(*each) > 0, each[0] * each[1], 0.0)
            if factor < 1:
                root = np.sqrt(factor * value**2 + (1 - factor) * factor * product)
                lower, upper = (value - root) / (1 - factor), (value + root) / (1 - factor)
            else:
                lower, upper = np.full(len(value), -np.inf), np.full(len(value), np.inf)
            largest = np.sqrt(product)  # Cauchy and Schwarz
            lower, upper = np.maximum(np.floor(lower), -largest), np.minimum(np.ceil(upper), largest)
        return Estimates(value, np.minimum(lower, value), np.maximum(upper, value), confidence, self.kind)

    def _frequencies(self, item: Any, confidence: float) -> Estimates:
        """Returns the median of the item's counters, each times its sign.

        Solves |estimate - f|² ≤ t²·(F2 - f²)/columns for f: the item does not collide with itself.
        """
        word = self._hash_item(item)
        if word is None:
            return Estimates.exact(np.zeros(len(self)))
        table = self.table()
        rows = [self._row(word, row) for row in range(self.depth)]
        cells = np.stack([table[:, j, int(at[0])] * int(sign[0]) for j, (at, sign) in enumerate(rows)], axis=1)
        value = np.asarray(np.median(cells, axis=1), np.float64)
        failures = (1 - confidence) * _MOMENT_FAILURES
        factor = deviations(self.depth, confidence + failures) ** 2 / self.columns
        root = np.sqrt(np.maximum(factor * ((1 + factor) * self._largest_moments(failures) - value**2), 0.0))
        lower, upper = ((value + sign * root) / (1 + factor) for sign in (-1, 1))
        # The interval contains the estimate, also where the moments exclude the estimate.
        lower, upper = np.minimum(np.ceil(lower), value), np.maximum(np.floor(upper), value)
        return Estimates(value, lower, upper, confidence, self.kind)


def _coefficients(seed: int, depth: int) -> list[list[np.uint64]]:
    """Returns four random numbers below 2^61 - 1 per row. The first is the coefficient of the highest power."""
    words = hash_values(np.arange(4 * depth), seed ^ 0x4147_4D53)  # "AGMS": independent of the hashes of values
    return [[w % _P for w in words[4 * row : 4 * row + 4]] for row in range(depth)]


def polynomial(words: WordArray, coefficients: list[np.uint64]) -> WordArray:
    """Returns ((a·x + b)·x + c)·x + d modulo 2^61 - 1, for x = word modulo 2^61 - 1.

    Products have 122 bits and are computed from halves of 32 and 29 bits, with 2^61 ≡ 1 and 2^64 ≡ 8.
    """
    x = (words & _P) + (words >> _61)
    high, low = x >> _32, x & _LOW
    value = np.full(len(words), coefficients[0])
    for constant in coefficients[1:]:
        top, bottom = value >> _32, value & _LOW
        middle = top * low
        middle += bottom * high
        top *= high
        top <<= _3
        bottom *= low
        top += middle >> _29
        middle &= _LOW_29
        middle <<= _32
        top += middle
        top += bottom & _P
        bottom >>= _61
        top += bottom
        top += constant
        value = top & _P
        top >>= _61
        value += top
    value[value >= _P] -= _P
    return value


@lru_cache(maxsize=1 << 8)
def deviations(depth: int, confidence: float, *, sides: int = 2) -> float:
    """Returns t such that the median of `depth` rows is within t standard deviations of one row, at this confidence.

    A row deviates upwards by t or more with probability p ≤ 1/(1 + t²) (Cantelli), downwards with p' likewise, and p +
    p' ≤ 1/t² (Chebyshev). The median deviates upwards only if at least half of the rows do, with probability g(p). The
    probability of a failure is the largest g(p) + g(p') of all such pairs.

    Args:
        sides: 1: the deviation in one direction only.
    """
    low, high = 0.0, 1.0 / (1 - confidence) + 1.0  # of t²: Chebyshev's bound of a single row
    for _ in range(60):
        square = (low + high) / 2
        least, most = max(1 / square - 1 / (1 + square), 0.0), min(1 / (1 + square), 1.0)
        off = _half_deviate(depth, most)
        if sides == 2:
            pairs = (most + (least - most) * i / _PAIRS for i in range(_PAIRS + 1))
            off = max(_half_deviate(depth, p) + _half_deviate(depth, min(1 / square - p, most)) for p in pairs)
        low, high = (low, square) if off <= 1 - confidence else (square, high)
    return math.sqrt(high)


def _half_deviate(depth: int, p: float) -> float:
    """Returns the probability that at least half of the rows deviate, each with probability p."""
    return sum(math.comb(depth, i) * p**i * (1 - p) ** (depth - i) for i in range((depth + 1) // 2, depth + 1))


class FastAgms(SingleCounters):
    """Sizes of joins and self-joins: one Fast-AGMS sketch of depth × width counters.

    Args:
        width: a power of two from 16 to 2^24; one row's error is √(2/width) times the root of both moments.
        depth: 1 to 32 rows, of which the median is used. An even number is no better than the next lower odd number.
        seed: seed of the hash. Only synopses of equal width, depth and seed merge or join.

    >>> from edgewater.synopses import JoinSize
    >>> orders, payments = FastAgms(), FastAgms()
    >>> orders.update([1, 2, 2, 3])
    >>> payments.update([2, 3, 4])
    >>> orders.query(JoinSize(payments)).value  # two pairs of 2, one pair of 3
    3.0
    """

    stack_type = FastAgmsStack

    def __init__(self, width: int = DEFAULT_WIDTH, depth: int = DEFAULT_DEPTH, *, seed: int = DEFAULT_SEED) -> None:
        super().__init__(FastAgmsStack(1, width=width, depth=depth, seed=seed))

    @classmethod
    def for_error(cls, epsilon: float, delta: float = 0.05, *, seed: int = DEFAULT_SEED) -> Self:
        """Returns the smallest sketch for a relative error of the self-join size of at most epsilon, with probability 1
        - delta.

        Raises:
            InvalidRequest: no sketch reaches this error.
        """
        check_fraction("epsilon", epsilon)
        check_fraction("delta", delta)
        sizes = []
        for depth in range(1, MAX_DEPTH, 2):
            # F2 ≤ estimate/(1 - error), so the error must be slightly below epsilon.
            width = 2 * (deviations(depth, 1 - delta) * (1 + epsilon) / epsilon) ** 2
            rounded = max(MIN_WIDTH, 1 << (math.ceil(width) - 1).bit_length())
            if rounded <= MAX_WIDTH:
                sizes.append((depth * rounded, depth, rounded))
        if not sizes:
            raise InvalidRequest("epsilon", epsilon, f"a relative error that {MAX_WIDTH} counters per row can reach")
        _, depth, width_of = min(sizes)
        return cls(width_of, depth, seed=seed)


register_counters(FastAgms, DEFAULT_WIDTH, DEFAULT_DEPTH, delta=0.05)
