"""Many KLL sketches as one: what they hold is thinned before anything is sorted.

Compacting a thousand sketches by the book sorts all that they hold together. But each of them is sorted already,
and that is enough to thin it. Cut the values of one level, as they come, into blocks of 2^j and keep of each block
one value, drawn evenly, for all of them: it goes up j levels. Whatever x is, a block whose values are all at most x,
or all above it, counts as before. Only a block that x divides can be wrong, by less than W = 2^(level + j) and by 0
on average, and of each sketch that is one block at most, and one more where it touches the next. The draws are
independent, so by Hoeffding such a block adds W²/4 to V, just as a compaction of level h (W = 2^(h + 1)) adds 4^h.

How far that may go: the last compactions of the union add about (n/k)²/4 in any case (measured), so sketches are
thinned as long as all of their blocks together add a small part of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewater.errors import CorruptSynopsis
from edgewater.synopses.base import FloatArray, IntArray
from edgewater.synopses.hashing import finalised
from edgewater.synopses.quantiles.kll_blocks import MAX_LEVEL, Block, Levels

_SHARE = 32
_WEIGHTS = 2.0 ** np.arange(MAX_LEVEL + 1)
_STATES = {"n": np.int64, "nan": np.int64, "variance": np.float64, "min": np.float64, "max": np.float64}

Draw = Callable[[FloatArray, int], int]
"""A 64-bit word from the values of a level."""


def height_for(n: int, mean: float, k: int) -> int:
    """The level H that the values of sketches of `mean` values each may be raised to, when n are merged.

    4^H ≤ n·mean/(32·k²): over all of the sketches Σ 4^H is then at most (n/k)²/32, in however many steps they come.
    """
    most = n * mean / (_SHARE * k * k)
    return max(math.frexp(most)[1] - 1, 0) // 2  # ⌊log4⌋


def thinned(values: FloatArray, levels: Levels, height: int, sketches: int, word: Draw) -> tuple[list[Block], float]:
    """The values of sketches, one after the other and each sorted, of one level each; those below `height` are
    raised to it but for part of a block. And what that adds to V."""
    pieces, added = [], 0.0
    for level in range(int(levels.max(initial=0)) + 1):
        at = np.flatnonzero(levels == level)
        if not len(at):
            continue
        bits = max(height - level, 0)
        blocks = len(at) >> bits if bits else 0
        if blocks:
            drawn = at[(np.arange(blocks) << bits) + _even(blocks, bits, word(values, level))]
            pieces.append(_piece(values[drawn], height))
            added += min(blocks, 2 * sketches - 1) * 4.0 ** (height - 1)
        pieces.append(_piece(values[at[blocks << bits :]], level))
    return [piece for piece in pieces if len(piece[1])], added


def _piece(values: FloatArray, level: int) -> Block:
    return np.zeros(len(values), np.int64), values, np.full(len(values), level, np.uint8)


def _even(blocks: int, bits: int, word: int) -> IntArray:
    """Independent numbers from 0 to 2^bits - 1."""
    size = next(size for size in (1, 2, 4, 8) if bits <= 8 * size)
    words = finalised(np.arange(-(-blocks * size // 8), dtype=np.uint64), word).astype("<u8", copy=False)
    return (words.view(f"<u{size}")[:blocks] & ((1 << bits) - 1)).astype(np.int64)


def cascaded(runs: list[Block], room: int, word: Draw) -> tuple[Block, float]:
    """Rows of one group as one block, with levels of more than `room` values thinned once they are sorted: then x
    divides no block but one. And what that adds to V."""
    waiting, level, added = _by_level(runs), 0, 0.0
    while level < len(waiting):
        values = waiting[level]
        if len(values) > room:
            values = np.sort(values)
            bits = (len(values) // room).bit_length()
            first = word(values, level) >> 64 - bits
            whole = len(values) >> bits << bits
            waiting.extend([np.zeros(0)] * (level + bits + 1 - len(waiting)))
            waiting[level + bits] = np.concatenate([waiting[level + bits], values[first : whole : 1 << bits]])
            waiting[level] = values[whole:]
            added += 4.0 ** (level + bits - 1)
        level += 1
    levels = np.repeat(np.arange(len(waiting), dtype=np.uint8), [len(values) for values in waiting])
    held = np.concatenate(waiting)
    order = np.argsort(held, kind="stable")
    return (np.zeros(len(held), np.int64), held[order], levels[order]), added


def _by_level(runs: list[Block]) -> list[FloatArray]:
    found: list[list[FloatArray]] = []
    for _, values, levels in runs:
        least, most = int(levels.min()), int(levels.max())
        found.extend([] for _ in range(most + 1 - len(found)))
        for level in range(least, most + 1):
            found[level].append(values if least == most else values[levels == level])
    return [np.concatenate(pieces) if pieces else np.zeros(0) for pieces in found]


def check_sketches(states: dict[str, npt.NDArray[Any]], ends: IntArray, values: FloatArray, levels: Levels) -> None:
    """Raises CorruptSynopsis unless these are states of one group each, one after the other."""
    counts, rows = np.diff(ends, prepend=0), int(ends[-1])
    shapes = {a.shape for a in (*states.values(), ends)} == {ends.shape} and ends.ndim == 1
    types = all(states[name].dtype == dtype for name, dtype in _STATES.items())
    fit = values.shape == levels.shape == (rows,) and values.dtype == np.float64 and levels.dtype == np.uint8
    if not (shapes and types and fit) or (counts < 0).any() or levels.max(initial=0) > MAX_LEVEL:
        raise CorruptSynopsis("kll: arrays do not fit")
    used = counts > 0
    firsts, lasts = (ends - counts)[used], ends[used] - 1
    rising = values[1:] >= values[:-1]
    rising[firsts[1:] - 1] = True
    weights = np.zeros(len(ends))
    if rows:
        weights[used] = np.add.reduceat(_WEIGHTS[levels], firsts)
    inside = (values[firsts] >= states["min"][used]) & (values[lasts] <= states["max"][used])
    counted = (states["nan"] >= 0) & (states["variance"] >= 0) & (weights == states["n"])
    if not (rising.all() and inside.all() and counted.all()):
        raise CorruptSynopsis("kll: values out of order, or weights that do not add up to n")
