"""The byte format of synopses: one message, a message of named arrays, and many messages read at once.

The stacks of this package, the edge's and the center's snapshots and `merge_bytes` call it. It knows arrays and
messages, no kind of synopsis: it imports no stack.
"""

from edgewater.synopses.encoding import codec, columns, flat, named_arrays

__all__ = ["codec", "columns", "flat", "named_arrays"]
