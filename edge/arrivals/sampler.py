"""Bernoulli sampling by marks: event i is in the sample of rate θ if its mark u_i < θ.

The mark is a hash of (seed, source, number of the event at its source). So a replay draws the same sample, batch
boundaries do not matter, and the sample of a lower rate is a subset of the sample of a higher rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from edgewater.base.errors import InvalidInput
from edgewater.synopses import DEFAULT_SEED, FloatArray, finalised_word

_BITS = 32
_MASK = (1 << _BITS) - 1
_FACTORS = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))
"""Factors of the 32-bit finaliser with the least bias that a search has found (Wellons 2018)."""

WordArray = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class BernoulliSampler:
    """Samples the events of one source.

    Attributes:
        source: a number that is unique for the edge and the source. Equal numbers would correlate two samples.
    """

    source: int
    seed: int = DEFAULT_SEED

    def marks(self, first: int, count: int) -> FloatArray:
        """Returns the marks u of `count` events from number `first` on: float64, multiples of 2⁻³² in [0, 1)."""
        _check_numbers(first, count)
        return np.asarray(self._words(first, count) * 2.0**-_BITS, np.float64)

    def _words(self, first: int, count: int) -> WordArray:
        """Returns the marks as 32-bit integers. They need half the memory of 64 bits, and their products vectorise."""
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
    """Returns two words for a source and a block of 2³² events, so that no two blocks share a sequence of marks."""
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
    # The last step of the finaliser is omitted, because it changes only the lower half of the bits. The upper half
    # decides all but one of 65,536 comparisons.
    words *= _FACTORS[1]
    return words
