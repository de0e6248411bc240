"""Blocks of KLL's values, of many groups and levels, and which level has to be compacted."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from edgewater.synopses.base import FloatArray, IntArray

MAX_LEVEL = 60
_LEAST = 8  # values in any level

Levels = npt.NDArray[np.uint8]
Block = tuple[IntArray, FloatArray, Levels]
"""Group, value and level per row, sorted by group and value."""


def concatenated(blocks: list[Block]) -> Block:
    """All rows, as they come."""
    if len(blocks) == 1:
        return blocks[0]
    groups, values, levels = (np.concatenate(columns) for columns in zip(*blocks, strict=True))
    return groups, values, levels


def sorted_block(blocks: list[Block]) -> Block:
    """All rows of blocks in any order."""
    groups, values, levels = concatenated(blocks)
    if not groups.any():
        if not levels.any():
            return groups, np.sort(values), levels
        order = np.argsort(values, kind="stable")
    else:
        order = np.lexsort((values, groups))
    return groups[order], values[order], levels[order]


def halved(blocks: list[Block], room: int, coin: Callable[[FloatArray, int], int]) -> Block:
    """Blocks of one group as one, in which levels of more than `room` values were compacted: sorts, no masks.

    Args:
        coin: gives 0 or 1 for the values of a level that is compacted.
    """
    _, held, levels = (np.concatenate(columns) for columns in zip(*blocks, strict=True))
    borders = np.cumsum(np.bincount(levels, minlength=1))[:-1]
    waiting = np.split(held[np.argsort(levels, kind="stable")], borders)
    level, behind = 0, []
    while level < len(waiting):
        values = waiting[level]
        if len(values) > room:
            values = np.sort(values)
            pairs = len(values) & ~1
            rising = values[coin(values, level) : pairs : 2]
            waiting[level + 1 : level + 2] = [np.concatenate([*waiting[level + 1 : level + 2], rising])]
            values = values[pairs:]
        behind.append(values)
        level += 1
    levels = np.repeat(np.arange(len(behind), dtype=np.uint8), [len(values) for values in behind])
    held = np.concatenate(behind)
    order = np.argsort(held, kind="stable")
    return np.zeros(len(held), np.int64), held[order], levels[order]


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
    room = np.where(below <= top, _rooms(k)[np.maximum(top - below, 0)], 0)
    over = sizes.sum(axis=1) > room.sum(axis=1)
    if not over.any():
        return None
    # If the sizes are more than the rooms, one size is more than its room.
    return np.where(over, np.argmax(sizes > room, axis=1), -1)


@lru_cache(maxsize=64)
def _rooms(k: int) -> IntArray:
    """The room in the top level, the one below it, and so on: ⌈k·(2/3)^j⌉, in integers."""
    return np.array([max(-(-k * 2**j // 3**j), _LEAST) for j in range(256)])
