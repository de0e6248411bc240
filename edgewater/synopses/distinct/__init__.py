"""The number of distinct values per group: HyperLogLog. The query function `distinct` builds it."""
