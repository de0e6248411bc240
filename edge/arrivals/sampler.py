"""Bernoulli sampling by marks: event i is kept at rate θ if its mark u_i < θ.

The mark is a hash of (seed, source, number of the event at its source): a replay draws the same sample,
batch boundaries do not matter, and a sample of a lower rate is part of the one of a higher rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from edgewater.errors import InvalidInput
from edgewater.synopses import DEFAULT_SEED, BoolArray, FloatArray, IntArray, finalised_word

_BITS = 32
_MASK = (1 << _BITS) - 1
_FACTORS = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))
"""Of the 32-bit finaliser with the least bias that a search has found (Wellons 2018)."""

WordArray = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class BernoulliSampler:
    """Marks and keeps the events of one source.

    Attributes:
        source: a number of its own per (edge, source); with the same number, samples would be correlated.
    """

    source: int
    seed: int = DEFAULT_SEED

    def marks(self, first: int, count: int) -> FloatArray:
        """u of `count` events, the first being the source's event number `first`. Multiples of 2⁻³² in [0, 1)."""
        _check_numbers(first, count)
        return np.asarray(self._words(first, count) * 2.0**-_BITS, np.float64)

    def keep(self, first: int, count: int, rate: float) -> IntArray:
        """Positions of the events to process now, ascending: all at rate 1, without a look at any mark."""
        _check_numbers(first, count)
        least = math.ceil(check_rate(rate) * 2.0**_BITS)
        if least > _MASK:
            return np.arange(count)
        return np.flatnonzero(self._words(first, count) < np.uint32(least)) if least else np.zeros(0, np.int64)

    def _words(self, first: int, count: int) -> WordArray:
        """The marks as integers: 32 bits are half the memory of 64, and their products are vectorised."""
        block, start = first >> _BITS, first & _MASK
        here = min(count, _MASK + 1 - start)
        words = _mixed(start, here, *_keys(self.source, self.seed, block))
        if here == count:
            return words
        return np.concatenate([words, self._words(first + here, count - here)])


def _check_numbers(first: int, count: int) -> None:
    if first < 0 or count < 0:
        raise InvalidInput("first", (first, count), "numbers of events, not negative")


@lru_cache(maxsize=4096)
def _keys(source: int, seed: int, block: int) -> tuple[int, int]:
    """Two words per source and 2³² events, so that neither sources nor rounds share a sequence."""
    mask = (1 << 64) - 1
    word = finalised_word(finalised_word(source & mask, seed & mask) ^ (block & mask), 1)
    return word & _MASK, word >> _BITS


def _mixed(start: int, count: int, before: int, between: int) -> WordArray:
    words = np.arange(start, start + count, dtype=np.uint32)
    words ^= np.uint32(before)
    scratch = words >> np.uint32(16)
    words ^= scratch
    words *= _FACTORS[0]
    words += np.uint32(between)
    np.right_shift(words, np.uint32(15), out=scratch)
    words ^= scratch
    # The finaliser's last step is left out: it would change the lower half of the bits only, and the upper half decides
    # all but one of 65,536 comparisons.
    words *= _FACTORS[1]
    return words


def check_rate(rate: float) -> float:
    if not 0 <= rate <= 1:
        raise InvalidInput("rate", rate, "a probability from 0 to 1")
    return float(rate)


def kept(marks: FloatArray, rate: float) -> BoolArray:
    """Which events are in the sample of `rate`; all are at rate 1."""
    return np.asarray(marks < check_rate(rate))
