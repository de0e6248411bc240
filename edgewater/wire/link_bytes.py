"""The bytes that a link carries for a message, with its headers."""

from __future__ import annotations

import math

SEGMENT_BYTES, PACKET_HEADER_BYTES, MESSAGE_HEADER_BYTES = 1448, 52, 14  # format: of TCP over Ethernet
"""The data of a full packet; headers of IP and TCP with timestamps; and headers of HTTP/2 and gRPC."""


def link_bytes(size: int, *, is_behind: bool = False) -> int:
    """Returns the bytes that a link carries for a message of `size` bytes, with its headers.

    Args:
        is_behind: the message waits behind others. TCP then joins them.
    """
    packets = (size + MESSAGE_HEADER_BYTES) / SEGMENT_BYTES
    return size + MESSAGE_HEADER_BYTES + round((packets if is_behind else math.ceil(packets)) * PACKET_HEADER_BYTES)
