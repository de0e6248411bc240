"""The kernel that edges and center share: queries, windows, synopses, wire types.

Nothing in here does I/O, reads a clock or starts a thread.
"""

__version__ = "0.1.0"
