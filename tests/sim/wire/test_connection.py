"""Packets of a modelled connection, against arithmetic."""

from __future__ import annotations

import asyncio

import pytest

from edgewater.wire import uplink_pb2 as pb
from sim.budgets.link import LinkModel
from sim.wire.connection import (
    DELAYED_ACK_S,
    MESSAGE_HEADER_BYTES,
    OPENING_BYTES,
    PACKET_HEADER_BYTES,
    SEGMENT_BYTES,
    WINDOW_UPDATE_BYTES,
    Call,
)
from sim.wire.virtual_loop import VirtualLoop

RATE, DELAY_S = 4096.0, 0.05
HTTP2_BYTES = 9
LINK = LinkModel(RATE, latency_ms=1000 * DELAY_S)


class Ends:
    """Both ends of a call: what arrives, and when; the gateway replies `reply_s` after each message, or never."""

    def __init__(self, loop: VirtualLoop, reply_s: float | None, link: LinkModel) -> None:
        self.loop, self.reply_s = loop, reply_s
        self.arrived: list[tuple[float, pb.FromEdge]] = []
        self.call = Call(loop, link, 0, self._serve)

    def _serve(self, data: bytes) -> None:
        self.arrived.append((self.loop.time(), pb.FromEdge.FromString(data)))
        if self.reply_s is not None:
            self.loop.call_later(self.reply_s, self.call.send, ECHO)


ECHO = pb.ToEdge(time_echo=pb.TimeEcho(edge_sent_at_ms=1))


def after_one(message: pb.FromEdge, reply_s: float | None = None, link: LinkModel = LINK) -> Ends:
    """A second after opening, the edge sends a message."""
    loop = VirtualLoop()

    async def talk() -> Ends:
        ends = Ends(loop, reply_s, link)
        await asyncio.sleep(1.0)
        await ends.call.write(message)
        await asyncio.sleep(60.0)
        return ends

    try:
        return loop.run_until_complete(talk())
    finally:
        loop.close()


def goodbye(size: int) -> pb.FromEdge:
    return pb.FromEdge(goodbye=pb.Goodbye(reason="x" * size))


@pytest.mark.parametrize("size", [10, 5_000])
def test_a_message_arrives_when_its_packets_have_passed(size: int) -> None:
    message = goodbye(size)
    ends = after_one(message)
    data = message.ByteSize() + MESSAGE_HEADER_BYTES + HTTP2_BYTES
    wire = data + -(-data // SEGMENT_BYTES) * PACKET_HEADER_BYTES
    ((arrived_s, received),) = ends.arrived
    assert received == message
    assert arrived_s == pytest.approx(1.0 + wire / RATE + DELAY_S)
    assert ends.call.up.carried_bytes == OPENING_BYTES[0] + wire


def test_data_is_acknowledged_by_a_packet_of_its_own_unless_a_reply_comes_soon() -> None:
    silent, late = after_one(goodbye(10)), after_one(goodbye(10), 2 * DELAYED_ACK_S)
    soon = after_one(goodbye(10), DELAYED_ACK_S / 2)
    reply = ECHO.ByteSize() + MESSAGE_HEADER_BYTES + HTTP2_BYTES + WINDOW_UPDATE_BYTES + PACKET_HEADER_BYTES
    assert silent.call.down.carried_bytes == OPENING_BYTES[1] + PACKET_HEADER_BYTES
    assert soon.call.down.carried_bytes == OPENING_BYTES[1] + reply
    assert late.call.down.carried_bytes == OPENING_BYTES[1] + reply + PACKET_HEADER_BYTES
    # The edge acknowledges the reply.
    assert soon.call.up.carried_bytes == silent.call.up.carried_bytes + PACKET_HEADER_BYTES


@pytest.mark.parametrize(("rate", "acknowledgements"), [(1e6, 2), (4096.0, 4)])
def test_every_second_packet_is_acknowledged_at_once_others_later(rate: float, acknowledgements: int) -> None:
    ends = after_one(goodbye(4 * SEGMENT_BYTES - 50), link=LinkModel(rate))
    assert ends.call.down.carried_bytes == OPENING_BYTES[1] + acknowledgements * PACKET_HEADER_BYTES
