"""Compaction of KLL sketches: blocks of values of many groups and levels.

`too_full` selects the level of each group to compact; `compacted` does it for a single group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewater.synopses.base import FloatArray, IntArray

MAX_LEVEL = 60  # format: weights below 2^62
_MIN_ROOM = 8  # each level has room for at least this many values

Levels = npt.NDArray[np.uint8]
Block = tuple[IntArray, FloatArray, Levels]
"""Group, value and level per row, sorted by group and value."""
Coins = Callable[[FloatArray, int], int]
"""Returns 0 to 3 at random, for `halved`, for these values of this level, and adds the compaction to V."""


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
