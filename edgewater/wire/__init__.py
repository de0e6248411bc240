"""The wire format: frames and their contents, and the generated code of `proto/edgewater/v1`.

Edge, center and simulator build and read frames with it. The gRPC stubs are imported by the uplink and the gateway
only, from `edgewater.wire.uplink_pb2_grpc`: Spark's Python workers read frames and must not import gRPC.
"""

from edgewater.wire.frames import (
    CODE_METADATA,
    FRAME_OVERHEAD_BYTES,
    MAX_BODY_BYTES,
    MAX_FRAMES,
    MIN_PROTOCOL,
    PROTOCOL,
    RETRY_METADATA,
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
    SamplingReason,
    Signs,
    SliceClose,
    Withheld,
    body_from_wire,
    body_to_wire,
    encode_body,
)

__all__ = [
    "CODE_METADATA",
    "FRAME_OVERHEAD_BYTES",
    "MAX_BODY_BYTES",
    "MAX_FRAMES",
    "MIN_PROTOCOL",
    "PROTOCOL",
    "RETRY_METADATA",
    "Arrivals",
    "DropReason",
    "DroppedRecords",
    "Encoding",
    "Frame",
    "FrameBody",
    "InputLoss",
    "LossReason",
    "Partial",
    "QueryRef",
    "SamplingReason",
    "Signs",
    "SliceClose",
    "Withheld",
    "body_from_wire",
    "body_to_wire",
    "encode_body",
]
