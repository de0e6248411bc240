"""Blocks of KLL's values, of many groups and levels, and which level has to be compacted."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from edgewater.synopses.base import FloatArray, IntArray

MAX_LEVEL = 60
_LEAST = 8  # values in any level

Levels = npt.NDArray[np.uint8]
Block = tuple[IntArray, FloatArray, Levels]
"""Group, value and level per row, sorted by group and value."""
Coin = Callable[[FloatArray, int], int]
"""Tosses 0 or 1 for the compaction of these values, of this level, which it counts."""


def concatenated(blocks: list[Block]) -> Block:
    """All rows, as they come."""
    if len(blocks) == 1:
        return blocks[0]
    groups, values, levels = (np.concatenate(columns) for columns in zip(*blocks, strict=True))
    return groups, values, levels


def sorted_block(blocks: list[Block], length: int) -> Block:
    """All rows of blocks in any order, of `length` groups."""
    groups, values, levels = concatenated(blocks)
    if length == 1:
        if not levels.any():
            return groups, np.sort(values), levels
        order = np.argsort(values, kind="stable")
    else:
        order = np.lexsort((values, groups))
    return groups[order], values[order], levels[order]


def too_full(rows: Block, length: int, k: int) -> IntArray | None:
    """Per group the lowest level to compact, or -1; None: no group has to be.

    Args:
        length: how many groups there are.
        k: the room in a group's top level; each level below has 2/3 of that, and 8 at least.
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
    # If the sizes are more than the rooms, one size is more than its room.
    return np.where(over, np.argmax(sizes > room, axis=1), -1)


def compacted(rows: Block, k: int, coin: Coin) -> Block:
    """Rows of one group with the lowest level that is too full compacted, until there is room: what `too_full` and a
    selection give, by places in the rows instead of masks over them."""
    groups, values, levels = rows
    if not len(values):
        return rows
    order, ends = np.argsort(levels, kind="stable"), np.cumsum(np.bincount(levels)).tolist()
    places = [order[begin:end] for begin, end in pairwise([0, *ends])]
    levels, kept = levels.copy(), np.ones(len(levels), bool)
    while (level := _lowest_too_full([len(at) for at in places], k)) is not None:
        at = places[level]
        pairs, rising = len(at) & ~1, coin(values[at], level)
        risen = at[rising:pairs:2]
        kept[at[1 - rising : pairs : 2]] = False
        levels[risen] += 1
        places[level] = at[pairs:]
        places[level + 1 : level + 2] = [np.sort(np.concatenate([*places[level + 1 : level + 2], risen]))]
    return (groups[kept], values[kept], levels[kept]) if not kept.all() else rows


def _lowest_too_full(sizes: list[int], k: int) -> int | None:
    """As `too_full`, of one group whose top level is the last and not empty."""
    rooms, whole = _rooms_up_to(len(sizes), k)
    if sum(sizes) <= whole:
        return None
    return next(level for level, size in enumerate(sizes) if size > rooms[level])


@lru_cache(maxsize=1 << 10)
def _rooms_up_to(tall: int, k: int) -> tuple[tuple[int, ...], int]:
    """The room in each of so many levels, and in all of them."""
    rooms = _rooms_below(k)[:tall][::-1]
    return rooms, sum(rooms)


@lru_cache(maxsize=64)
def _rooms_below(k: int) -> tuple[int, ...]:
    """The room in the top level, the one below it, and so on: ⌈k·(2/3)^j⌉, in integers."""
    return tuple(max(-(-k * 2**j // 3**j), _LEAST) for j in range(256))
