"""Membership of values per group: Bloom filters and cuckoo filters.

The query functions `bloom`, `cuckoo` and `counting_cuckoo` build them. A filter must be large enough for the values of
all edges together. Answers state when a filter is above its capacity.
"""
