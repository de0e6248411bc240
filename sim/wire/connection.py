"""Models a gRPC call over one TCP connection, packet by packet over a modelled link."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from edge.uplink.uplink_session import HTTP2_FRAME_BYTES, HTTP2_HEADER_BYTES
from edgewater.wire import uplink_pb2 as pb
from sim.budgets.link import LinkModel, LinkSimulation

SEGMENT_BYTES, PACKET_HEADER_BYTES = 1448, 52
"""The data of a full packet, and the headers of IP and TCP with timestamps."""
MESSAGE_HEADER_BYTES = 5
"""gRPC's header of a message."""
DELAYED_ACK_S = 0.04
"""Linux acknowledges data after this time, unless other data carries the acknowledgement."""
SEGMENTS_PER_ACK = 2
WINDOW_UPDATE_BYTES = 26
"""The next message after a received one has the window updates of HTTP/2, of the stream and of the connection."""
OPENING_BYTES = 900, 550
"""Bytes up and down of opening a call: TCP's handshake, the settings of HTTP/2, the headers of the call."""


class Direction:
    """One direction of a connection. Data arrives in order. Packets of the other direction acknowledge it.

    Args:
        deliver: called with each message when its last byte arrives.

    Attributes:
        carried_bytes: bytes of all packets, with their headers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, link: LinkSimulation, deliver: Callable[[bytes], None]) -> None:
        self._loop, self._link, self._deliver = loop, link, deliver
        self._under_way: deque[bytes | None] = deque()
        self._unacknowledged = 0
        self._has_delivered = False
        self._ack: asyncio.TimerHandle | None = None
        self.back: Direction = self

    @property
    def carried_bytes(self) -> float:
        return self._link.sent_bytes

    def send(self, message: bytes) -> None:
        """Sends a message in as few packets as it takes."""
        left = len(message) + MESSAGE_HEADER_BYTES
        left += -(-left // HTTP2_FRAME_BYTES) * HTTP2_HEADER_BYTES + self.back.take_window_update()
        while left > 0:
            size = min(left, SEGMENT_BYTES)
            left -= size
            self._packet(size, message if left == 0 else None)

    def open(self, size: int) -> None:
        """Sends bytes that belong to no message."""
        self._link.transmit(float(size), self._loop.time() * 1000.0)

    def _packet(self, size: int, message: bytes | None) -> None:
        self.back.clear_acknowledgement()  # this packet carries it
        arrival_ms = self._link.transmit(float(size + PACKET_HEADER_BYTES), self._loop.time() * 1000.0)
        self._under_way.append(message)
        self._loop.call_at(arrival_ms / 1000.0, self._arrive)

    def _arrive(self) -> None:
        message = self._under_way.popleft()  # timers of the same moment fire in any order
        self._unacknowledged += 1
        if self._unacknowledged >= SEGMENTS_PER_ACK:
            self._acknowledge()
        elif self._ack is None:
            self._ack = self._loop.call_later(DELAYED_ACK_S, self._acknowledge)
        if message is not None:
            self._has_delivered = True
            self._deliver(message)

    def take_window_update(self) -> int:
        """Returns the bytes of the window updates that are due to the sender."""
        has_delivered, self._has_delivered = self._has_delivered, False
        return WINDOW_UPDATE_BYTES if has_delivered else 0

    def _acknowledge(self) -> None:
        self.clear_acknowledgement()
        self.back.open(PACKET_HEADER_BYTES)

    def clear_acknowledgement(self) -> None:
        """Notes that the data received so far has been acknowledged."""
        self._unacknowledged = 0
        if self._ack is not None:
            self._ack.cancel()
            self._ack = None


class Call:
    """One `Session` call of an edge, which `edge.uplink.uplink_session` uses like a call of gRPC. It never ends.

    Args:
        number: the number of the edge. Edges with different numbers have different jitter.
        serve: called with each message of the edge when it arrives at the gateway.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, model: LinkModel, number: int, serve: Callable[[bytes], None]):
        self._received: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self.up = Direction(loop, LinkSimulation(model, 2 * number), serve)
        self.down = Direction(loop, LinkSimulation(model, 2 * number + 1), self._receive)
        self.up.back, self.down.back = self.down, self.up
        for direction, size in zip((self.up, self.down), OPENING_BYTES, strict=True):
            direction.open(size)

    def _receive(self, message: bytes) -> None:
        self._received.append(message)
        self._changed.set()

    async def write(self, message: pb.FromEdge) -> None:
        self.up.send(message.SerializeToString())

    async def read(self) -> pb.ToEdge:
        while not self._received:
            self._changed.clear()
            await self._changed.wait()
        return pb.ToEdge.FromString(self._received.popleft())

    async def done_writing(self) -> None:
        pass

    def send(self, message: pb.ToEdge) -> None:
        """Sends a message to the edge."""
        self.down.send(message.SerializeToString())

    @property
    def carried_bytes(self) -> float:
        """Bytes that the link has carried, in both directions."""
        return self.up.carried_bytes + self.down.carried_bytes
