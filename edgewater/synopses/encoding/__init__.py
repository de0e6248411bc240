"""Byte formats: the messages of synopses, many messages read at once, and snapshots of components.

The stacks of this package, `merge_bytes`, and the snapshots of the edge and the center use it. It knows arrays and
messages, but no kind of synopsis: it imports no stack.
"""

from edgewater.synopses.encoding import codec, columns, flat, state

__all__ = ["codec", "columns", "flat", "state"]
