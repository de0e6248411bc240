"""The wire format: frames and their contents, and the generated code of `proto/edgewater/v1`.

Edge, center and simulator build and read frames with it. Only the uplink and the gateway import the gRPC stubs, from
`edgewater.wire.uplink_pb2_grpc`: Spark's Python workers read frames and must not import gRPC.
"""

from edgewater.wire.frames import (
    CODE_METADATA,
    FRAME_OVERHEAD_BYTES,
    GUESSES,
    MAX_BODY_BYTES,
    MAX_FRAMES,
    MIN_PROTOCOL,
    PROTOCOL,
    REJECTIONS,
    RETRY_METADATA,
    UNCERTAIN,
    Arrivals,
    DroppedRecords,
    DropReason,
    Encoding,
    Frame,
    FrameBody,
    InputLoss,
    LossReason,
    Partial,
    QueryRef,
    Rest,
    SamplingReason,
    Signs,
    SliceClose,
    Withheld,
    body_from_wire,
    body_to_wire,
    encode_body,
    groups_of,
    reason_of,
)
from edgewater.wire.link_bytes import link_bytes
