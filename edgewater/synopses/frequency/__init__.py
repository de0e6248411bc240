"""Frequencies of items per group: count-min, Fast-AGMS (join sizes), the most frequent items.

The query functions `count_min`, `fast_agms` and `top_k` build them. They compare values only for equality
(`items.ItemStack`).
"""
