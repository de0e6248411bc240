"""The number of distinct values per group: HyperLogLog. The query function `distinct` builds it."""

from edgewater.synopses.distinct.hyperloglog import HyperLogLog, HyperLogLogStack

__all__ = ["HyperLogLog", "HyperLogLogStack"]
