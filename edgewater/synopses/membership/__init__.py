"""Membership of values per group: Bloom filters and cuckoo filters.

The query functions `bloom`, `cuckoo` and `counting_cuckoo` build them. A filter must be large enough for the values of
all edges together. Answers state when a filter is above its capacity.
"""

from edgewater.synopses.membership.bloom import BloomFilter, BloomStack
from edgewater.synopses.membership.cuckoo import (
    CountingCuckooFilter,
    CountingCuckooStack,
    CuckooFilter,
    CuckooStack,
)

__all__ = [
    "BloomFilter",
    "BloomStack",
    "CountingCuckooFilter",
    "CountingCuckooStack",
    "CuckooFilter",
    "CuckooStack",
]
