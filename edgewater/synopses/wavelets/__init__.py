"""Haar wavelets of signals: values by index, for range sums and points with deterministic bounds.

`center.batch` and users build them; they are order-based and have no groups, so queries cannot name them.
"""

from edgewater.synopses.wavelets.haar import HaarWavelet
from edgewater.synopses.wavelets.haar_max import MaxErrorWavelet

__all__ = ["HaarWavelet", "MaxErrorWavelet"]
