"""Compaction of KLL sketches: blocks of values of many groups and levels, and the thinning of many sketches.

**Compaction.** `too_full` selects the level of each group to compact; `compacted` does it for a single group.

**Thinning.** Compacting a thousand sketches one after the other sorts all their values together. But each sketch is
already sorted, which suffices to thin it. Cut the values of one level, in their order, into blocks of 2^j. Choose one
value of each block uniformly; it represents the block's values j levels higher. For any x, a block whose values are all
at most x, or all above it, counts as before. Only a block that x divides can be wrong, by less than W = 2^(level + j)
and by 0 on average. There is at most one such block per sketch, and one more at the border to the next sketch. The
choices are independent, so by Hoeffding such a block adds W²/4 to V, just as a compaction of level h (W = 2^(h + 1))
adds 4^h.

The final compactions of the union add about (n/k)²/4 to V in any case (measured). So sketches are thinned as long as
all of their blocks together add at most half of that. The stated error of 1,000 sketches grows by 9 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewater.synopses.base import FloatArray, IntArray
from edgewater.synopses.hashing import finalised

MAX_LEVEL = 60
_MIN_ROOM = 8  # each level has room for at least this many values

Levels = npt.NDArray[np.uint8]
Block = tuple[IntArray, FloatArray, Levels]
"""Group, value and level per row, sorted by group and value."""
Coins = Callable[[FloatArray, int], int]
"""Returns 0 to 3 at random, for `halved`, for these values of this level, and adds the compaction to V."""
RandomWord = Callable[[FloatArray, int], int]
"""Returns a random 64-bit word for these values of this level."""

_THINNING_DIVISOR = 8  # thinning may add (n/k)²/8 to V


def concatenated(blocks: list[Block]) -> Block:
    """Returns all rows, in the order of the blocks."""
    if len(blocks) == 1:
        return blocks[0]
    groups, values, levels = (np.concatenate(columns) for columns in zip(*blocks, strict=True))
    return groups, values, levels


def sorted_block(blocks: list[Block], length: int) -> Block:
    """Returns all rows of unsorted blocks of `length` groups as one block."""
    groups, values, levels = concatenated(blocks)
    if length == 1:
        if not levels.any():
            return groups, np.sort(values), levels
        order = np.argsort(values, kind="stable")
    else:
        order = np.lexsort((values, groups))
    return groups[order], values[order], levels[order]


def too_full(rows: Block, length: int, k: int) -> IntArray | None:
    """Returns the lowest level to compact per group, or -1; None: no group needs a compaction.

    Args:
        length: the number of groups.
        k: the room in a group's top level. Each level below has 2/3 of the room of the next higher level, at least 8.
    """
    groups, _, levels = rows
    if not len(groups):
        return None
    tall = int(levels.max()) + 1
    sizes = np.bincount(groups * tall + levels, minlength=length * tall).reshape(length, tall)
    below = np.arange(tall)
    top = np.max(np.where(sizes > 0, below, 0), axis=1)[:, None]
    room = np.where(below <= top, np.array(_rooms_below(k)[:tall])[np.maximum(top - below, 0)], 0)
    over = sizes.sum(axis=1) > room.sum(axis=1)
    if not over.any():
        return None
    # If the sum of the sizes exceeds the sum of the rooms, some size exceeds its room.
    return np.where(over, np.argmax(sizes > room, axis=1), -1)


def shift_variance(level: Any) -> Any:
    """Returns the variance of a rank's shift by a compaction of a level. Accepts a level, or an array of levels."""
    return 4.0**level / 2


def halved(values: npt.NDArray[Any], coins: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns one value of each pair of sorted values, and the one or two values that have no pair, if any.

    Args:
        coins: 0 to 3. The lower bit is the position of the first pair's first value. The higher bit is the position of
            the chosen value in each pair.
    """
    first, end = coins & 1, len(values) - (len(values) - (coins & 1)) % 2
    rest = np.concatenate([values[:first], values[end:]])
    return values[first + (coins >> 1) : end : 2].copy(), rest  # contiguous, for the next round


def compacted(rows: Block, k: int, coins: Coins) -> Block:
    """Compacts the lowest level that is too full of a single group, until there is room.

    The result is that of `too_full` and a selection, but it uses indices of rows instead of masks over rows.
    """
    groups, values, levels = rows
    if not len(values):
        return rows
    order, ends = np.argsort(levels, kind="stable"), np.cumsum(np.bincount(levels)).tolist()
    places = [order[begin:end] for begin, end in pairwise([0, *ends])]
    levels, kept = levels.copy(), np.ones(len(levels), bool)
    while (level := _lowest_too_full([len(at) for at in places], k)) is not None:
        at = places[level]
        risen, rest = halved(at, coins(values[at], level))
        kept[at] = False
        kept[risen] = kept[rest] = True
        levels[risen] += 1
        places[level] = rest
        places[level + 1 : level + 2] = [np.sort(np.concatenate([*places[level + 1 : level + 2], risen]))]
    return (groups[kept], values[kept], levels[kept]) if not kept.all() else rows


def _lowest_too_full(sizes: list[int], k: int) -> int | None:
    """Returns the level of `too_full` for one group whose last level is not empty."""
    rooms, whole = _rooms_up_to(len(sizes), k)
    if sum(sizes) <= whole:
        return None
    return next(level for level, size in enumerate(sizes) if size > rooms[level])


@lru_cache(maxsize=1 << 10)
def _rooms_up_to(tall: int, k: int) -> tuple[tuple[int, ...], int]:
    """Returns the room in each of `tall` levels, and in all of them."""
    rooms = _rooms_below(k)[:tall][::-1]
    return rooms, sum(rooms)


@lru_cache(maxsize=64)
def _rooms_below(k: int) -> tuple[int, ...]:
    """Returns the room in the top level, in the next lower level, and so on: ⌈k·(2/3)^j⌉, in integers."""
    return tuple(max(-(-k * 2**j // 3**j), _MIN_ROOM) for j in range(256))


def height_for(n: int, mean: float, k: int) -> int:
    """Returns the level H to which values may be raised when n sketches of `mean` values each are merged.

    4^H ≤ n·mean/(8·k²): Σ 4^H over all sketches is then at most (n/k)²/8, for any number of steps.
    """
    power = n * mean / (_THINNING_DIVISOR * k * k)
    return max(math.frexp(power)[1] - 1, 0) // 2  # ⌊log4⌋


def thinned(
    values: FloatArray, levels: Levels, height: int, sketches: int, word: RandomWord
) -> tuple[list[Block], float]:
    """Thins the values of sketches: raises values below `height` to it, except an incomplete block per level.

    Returns blocks of one level each, and the amount added to V.

    Args:
        values, levels: of all sketches, concatenated; each sketch is sorted.
    """
    pieces, added = [], 0.0
    least, most = int(levels.min(initial=MAX_LEVEL)), int(levels.max(initial=0))
    for level in range(least, most + 1):
        # A mask of each level takes as long as all the other steps. Sketches of equal size often have one level.
        held = values if least == most else values[levels == level]
        bits = max(height - level, 0)
        blocks = len(held) >> bits if bits else 0
        if blocks:
            kept = (np.arange(blocks) << bits) + _uniform(blocks, bits, word(values, level))
            pieces.append(_piece(held[kept], height))
            added += min(blocks, 2 * sketches - 1) * 4.0 ** (height - 1)
        pieces.append(_piece(held[blocks << bits :], level))
    return [piece for piece in pieces if len(piece[1])], added


def _piece(values: FloatArray, level: int) -> Block:
    return np.zeros(len(values), np.int64), values, np.full(len(values), level, np.uint8)


def _uniform(blocks: int, bits: int, word: int) -> IntArray:
    """Returns independent random numbers from 0 to 2^bits - 1."""
    size = next(size for size in (1, 2, 4, 8) if bits <= 8 * size)
    words = finalised(np.arange(-(-blocks * size // 8), dtype=np.uint64), word).astype("<u8", copy=False)
    return (words.view(f"<u{size}")[:blocks] & ((1 << bits) - 1)).astype(np.int64)


def cascaded(runs: list[Block], room: int, word: RandomWord) -> tuple[Block, float]:
    """Returns rows of one group as one block, and the amount added to V.

    A level of more than `room` values is sorted and thinned, so that x divides a single block.
    """
    pending, level, added = _by_level(runs), 0, 0.0
    while level < len(pending):
        values = pending[level]
        if len(values) > room:
            values, coins, risen = np.sort(values), word(values, level), level
            pending[level] = np.zeros(0)
            while len(values) > room:
                pending.extend([np.zeros(0)] * (risen + 2 - len(pending)))
                values, rest = halved(values, coins & 3)
                pending[risen] = np.concatenate([pending[risen], rest])
                added += shift_variance(risen)
                coins, risen = coins >> 2, risen + 1
            pending[risen] = np.concatenate([pending[risen], values])
        level += 1
    levels = np.repeat(np.arange(len(pending), dtype=np.uint8), [len(values) for values in pending])
    held = np.concatenate(pending)
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
