"""The facts of a frame: all its contents except for the synopses, such as closes, losses and arrival counts.

The gateway splits the body of a checked frame once. Partials go to the frame log, and facts go to the frame index. A
task reads the partials. The driver reads the facts by position.
"""

from __future__ import annotations

from edgewater.wire import FrameBody, Partial, body_from_wire, body_to_wire
from edgewater.wire import uplink_pb2 as pb


def read_facts(encoded: bytes) -> FrameBody:
    """Returns the body of a frame from its facts. Its partials have slices and no synopses.

    Raises:
        DecodeError: the index is damaged.
    """
    return body_from_wire(pb.FrameBody.FromString(encoded))


def split_message(body: pb.FrameBody) -> tuple[tuple[Partial, ...], bytes]:
    """Removes the synopses from `body`. Returns the partials of the body, and the serialised body without synopses.

    In the serialised body, partials have only their slices.
    """
    partials = tuple(Partial(p.slice_start_ms, p.synopsis) for p in body.partials)
    starts_ms = sorted({p.slice_start_ms for p in partials})
    del body.partials[:]
    body.partials.extend(pb.Partial(slice_start_ms=start_ms) for start_ms in starts_ms)
    return partials, body.SerializeToString(deterministic=True)


def split_body(body: FrameBody) -> tuple[tuple[Partial, ...], bytes]:
    """Returns the result of `split_message` for a body that is not encoded."""
    return split_message(body_to_wire(body))
