"""Frequencies of items per group: count-min, Fast-AGMS (join sizes), the most frequent items.

The query functions `count_min`, `fast_agms` and `top_k` build them. They compare values only for equality
(`items.ItemStack`).
"""

from edgewater.synopses.frequency.count_min import CountMin, CountMinStack
from edgewater.synopses.frequency.fast_agms import FastAgms, FastAgmsStack
from edgewater.synopses.frequency.top_k import TopK, TopKStack

__all__ = ["CountMin", "CountMinStack", "FastAgms", "FastAgmsStack", "TopK", "TopKStack"]
