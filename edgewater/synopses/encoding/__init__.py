"""Byte formats: the messages of synopses, many messages read as one stack, and snapshots of components.

The stacks of this package and the snapshots of the edge and the center use it. It knows arrays and
messages, but no kind of synopsis: it imports no stack.
"""

from edgewater.synopses.encoding import codec, state
