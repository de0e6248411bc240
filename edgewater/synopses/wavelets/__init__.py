"""Haar wavelets of signals: values by index, for range sums and points with deterministic bounds.

`center.batch` and users build them; they are order-based and have no groups, so queries cannot name them.
"""
