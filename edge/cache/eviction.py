"""Eviction: in which order entries leave the primary cache when the link has room.

A policy ranks groups; the lowest rank leaves first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge.cache.entries import SliceEntries
from edgewater.synopses.base import IntArray

Policy = Callable[[SliceEntries, IntArray], IntArray]
"""(entries, candidate groups) -> rank per candidate."""


def least_recently_used(entries: SliceEntries, groups: IntArray) -> IntArray:
    """LRU: the group that was touched longest ago is the likeliest to have its final value."""
    return entries.touched[groups]


def first_to_leave(entries: SliceEntries, groups: IntArray, count: int, policy: Policy) -> IntArray:
    """The `count` groups that leave first, in ascending group order; O(n) in the candidates."""
    if count >= len(groups):
        return groups
    ranks = policy(entries, groups)
    return np.sort(groups[np.argpartition(ranks, count)[:count]])
