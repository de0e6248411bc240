"""Models a gRPC call over one TCP connection, packet by packet over a modelled link.

TCP's window of congestion begins with ten packets, and grows by each packet that is acknowledged (slow start). Without
data in flight it shrinks again (RFC 2861). A packet that the link drops is sent again after a timeout. It halves the
window, which then grows by a packet per round trip. Data behind the packet is delivered after it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from edge.uplink.uplink_session import HTTP2_FRAME_BYTES, HTTP2_HEADER_BYTES
from edgewater.wire import uplink_pb2 as pb
from sim.budgets.link import LinkSimulation, SimulatedLink

SEGMENT_BYTES, PACKET_HEADER_BYTES = 1448, 52  # format: of TCP on Ethernet
"""The data of a full packet, and the headers of IP and TCP with timestamps."""
MESSAGE_HEADER_BYTES = 5  # format: of gRPC
"""gRPC's header of a message."""
DELAYED_ACK_S = 0.04  # format: of TCP in Linux
"""Linux acknowledges data after this time, unless other data carries the acknowledgement."""
SEGMENTS_PER_ACK = 2  # format: of TCP (RFC 5681)
WINDOW_UPDATE_BYTES = 26  # format: of HTTP/2
"""The next message after a received one has the window updates of HTTP/2, of the stream and of the connection."""
OPENING_BYTES = 900, 550  # derived: TCP's handshake, settings of HTTP/2, headers of the call
"""Bytes up and down of opening a call: TCP's handshake, the settings of HTTP/2, the headers of the call."""


FIRST_WINDOW, LEAST_WINDOW = 10.0, 2.0  # format: of TCP (RFC 6928)
"""TCP's window of congestion after the handshake and after idle time, and its least size, in packets."""
LEAST_TIMEOUT_S = 0.2
"""Linux waits for an acknowledgement for the round trip and this time."""


@dataclass(slots=True)
class _Packet:
    size: int
    message: bytes | None
    has_arrived: bool = False


class Direction:
    """One direction of a connection. Data arrives in order. Packets of the other direction acknowledge it.

    Args:
        deliver: called with each message when its last byte arrives.

    Attributes:
        link: the link, which other connections may use, too.
        carried_bytes: bytes of all packets, with their headers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, link: LinkSimulation, deliver: Callable[[bytes], None]) -> None:
        self._loop, self.link, self._deliver = loop, link, deliver
        self._unsent = deque[_Packet]()
        self._under_way = deque[_Packet]()
        self._delivered = self._acknowledged = 0
        self._window, self._threshold, self._active_s = FIRST_WINDOW, math.inf, 0.0
        self._sent_at_s, self._round_trip_s = deque[float](), 1.0
        self._unacknowledged = 0
        self._has_delivered = False
        self._ack: asyncio.TimerHandle | None = None
        self.back: Direction = self
        self.carried_bytes = 0.0

    def send(self, message: bytes) -> None:
        """Sends a message in as few packets as it takes."""
        left = len(message) + MESSAGE_HEADER_BYTES
        left += -(-left // HTTP2_FRAME_BYTES) * HTTP2_HEADER_BYTES + self.back.take_window_update()
        while left > 0:
            size = min(left, SEGMENT_BYTES)
            left -= size
            self._unsent.append(_Packet(size + PACKET_HEADER_BYTES, message if left == 0 else None))
        self._send_packets()

    def open(self, size: int) -> float:
        """Sends bytes that belong to no message, without a retransmission; returns when they arrive, in seconds."""
        self.carried_bytes += size
        return self.link.transmit(float(size), self._loop.time() * 1000.0) / 1000.0

    def _send_packets(self) -> None:
        """Sends what the window of congestion allows."""
        now_s, timeout_s = self._loop.time(), self._round_trip_s + LEAST_TIMEOUT_S
        if not self._sent_at_s:
            timeouts = min((now_s - self._active_s) // timeout_s, 64.0)
            self._window = min(self._window, max(self._window / 2.0**timeouts, FIRST_WINDOW))
        while self._unsent and len(self._sent_at_s) < self._window:
            packet = self._unsent.popleft()
            self._under_way.append(packet)
            self._sent_at_s.append(now_s)
            self._active_s = now_s
            self._transmit(packet, timeout_s)

    def _transmit(self, packet: _Packet, timeout_s: float) -> None:
        if self.link.drops(float(packet.size), self._loop.time() * 1000.0):
            self._window = self._threshold = max(self._window / 2.0, LEAST_WINDOW)
            self._loop.call_later(timeout_s, self._transmit, packet, 2.0 * timeout_s)
            return
        self.back.clear_acknowledgement()  # this packet carries it
        self._loop.call_at(self.open(packet.size), self._arrive, packet, self.back._delivered)

    def _arrive(self, packet: _Packet, acknowledges: int) -> None:
        """Receives a packet, which also acknowledges so many packets of the other direction."""
        self.back._on_acknowledged(acknowledges)
        packet.has_arrived = True
        self._unacknowledged += 1
        arrived = list[bytes]()
        while self._under_way and self._under_way[0].has_arrived:  # timers of the same moment fire in any order
            self._delivered += 1
            if (message := self._under_way.popleft().message) is not None:
                arrived.append(message)
        if self._unacknowledged >= SEGMENTS_PER_ACK:
            self._acknowledge()
        elif self._ack is None:
            self._ack = self._loop.call_later(DELAYED_ACK_S, self._acknowledge)
        for message in arrived:
            self._has_delivered = True
            self._deliver(message)

    def _on_acknowledged(self, count: int) -> None:
        """Notes at the sender that so many of its packets have arrived."""
        new = count - self._acknowledged
        if new <= 0:
            return
        self._acknowledged = count
        for _ in range(new):
            self._round_trip_s = min(self._loop.time() - self._sent_at_s.popleft(), self._round_trip_s)
        self._window += new if self._window < self._threshold else new / self._window
        self._send_packets()

    def take_window_update(self) -> int:
        """Returns the bytes of the window updates that are due to the sender."""
        has_delivered, self._has_delivered = self._has_delivered, False
        return WINDOW_UPDATE_BYTES if has_delivered else 0

    def _acknowledge(self) -> None:
        self.clear_acknowledgement()
        self._loop.call_at(self.back.open(PACKET_HEADER_BYTES), self._on_acknowledged, self._delivered)

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
        beside: a call that uses the same link.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        model: SimulatedLink,
        number: int,
        serve: Callable[[bytes], None],
        beside: Call | None = None,
    ) -> None:
        self._received: deque[bytes] = deque()
        self._changed = asyncio.Event()
        links = LinkSimulation(model, 2 * number), LinkSimulation(model, 2 * number + 1)
        if beside is not None:
            links = beside.up.link, beside.down.link
        self.up: Direction = Direction(loop, links[0], serve)
        self.down: Direction = Direction(loop, links[1], self._receive)
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
