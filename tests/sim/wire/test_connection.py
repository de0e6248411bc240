"""Packets of a modelled connection, against arithmetic."""

from __future__ import annotations

import asyncio

import pytest

from edgewater.wire import uplink_pb2 as pb
from sim.budgets.link import LinkSimulation, SimulatedLink
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
LINK = SimulatedLink(RATE, latency_ms=1000 * DELAY_S)


class Ends:
    """Both ends of a call: what arrives, and when; the gateway replies `reply_s` after each message, or never."""

    def __init__(self, loop: VirtualLoop, reply_s: float | None, link: SimulatedLink) -> None:
        self.loop, self.reply_s = loop, reply_s
        self.arrived: list[tuple[float, pb.FromEdge]] = []
        self.call = Call(loop, link, 0, self._serve)

    def _serve(self, data: bytes) -> None:
        self.arrived.append((self.loop.time(), pb.FromEdge.FromString(data)))
        if self.reply_s is not None:
            self.loop.call_later(self.reply_s, self.call.send, ECHO)


ECHO = pb.ToEdge(time_echo=pb.TimeEcho(edge_sent_at_ms=1))


def after_one(message: pb.FromEdge, reply_s: float | None = None, link: SimulatedLink = LINK) -> Ends:
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
    ends = after_one(goodbye(4 * SEGMENT_BYTES - 50), link=SimulatedLink(rate))
    assert ends.call.down.carried_bytes == OPENING_BYTES[1] + acknowledgements * PACKET_HEADER_BYTES


@pytest.mark.parametrize("depth", [1_600.0, 65_536.0])
def test_a_token_bucket_lets_its_depth_pass_at_once_and_the_rest_at_the_rate(depth: float) -> None:
    link = LinkSimulation(SimulatedLink(RATE, latency_ms=50, bucket_bytes=depth), 0)
    arrivals_ms = [link.transmit(800.0, 1_000.0) for _ in range(200)]
    expected = [1_050.0 + max(800.0 * n - depth, 0.0) / RATE * 1000 for n in range(1, 201)]
    assert arrivals_ms == pytest.approx(expected)
    # The bucket fills again at the rate.
    later_ms = arrivals_ms[-1] + 200.0
    assert link.transmit(0.25 * RATE, later_ms) == pytest.approx(later_ms + 50.0)
    assert link.transmit(100.0, later_ms) == pytest.approx(later_ms + 50.0 + 100 / RATE * 1000)


def test_no_token_passes_during_an_outage() -> None:
    link = LinkSimulation(SimulatedLink(RATE, bucket_bytes=65_536.0, trace=((1_000.0, 0.0), (61_000.0, 1.0))), 0)
    assert link.transmit(100.0, 2_000.0) == pytest.approx(61_000.0)


def test_a_long_round_trip_delays_what_exceeds_the_window_after_idle_time() -> None:
    """The window doubles per round trip: 10, 20, 40 packets."""
    wide = SimulatedLink(1e8, latency_ms=300)
    arrived = [after_one(goodbye(packets * SEGMENT_BYTES - 100), link=wide).arrived[0][0] for packets in (10, 30, 70)]
    assert arrived == pytest.approx([1.3, 1.9, 2.5], abs=0.05)


def test_what_a_policer_drops_is_sent_again_and_arrives_once_and_in_order() -> None:
    policer = SimulatedLink(RATE, latency_ms=50, bucket_bytes=8_000.0, queue_bytes=0.0)
    loop, arrived = VirtualLoop(), list[pb.FromEdge]()
    messages = [goodbye(size) for size in (6_000, 3_000, 10, 2_000)]

    async def talk() -> Call:
        call = Call(loop, policer, 0, lambda data: arrived.append(pb.FromEdge.FromString(data)))
        for message in messages:
            await call.write(message)
        await asyncio.sleep(60.0)
        return call

    try:
        call = loop.run_until_complete(talk())
    finally:
        loop.close()
    assert arrived == messages
    assert call.up.carried_bytes > sum(message.ByteSize() for message in messages)


def test_calls_on_one_link_share_its_rate() -> None:
    loop, arrived_s = VirtualLoop(), list[float]()

    async def talk() -> None:
        calls = [Call(loop, LINK, 0, lambda _: arrived_s.append(loop.time()))]
        calls.append(Call(loop, LINK, 1, lambda _: arrived_s.append(loop.time()), calls[0]))
        await asyncio.sleep(1.0)
        for call in calls:
            await call.write(goodbye(1_000))
        await asyncio.sleep(60.0)

    try:
        loop.run_until_complete(talk())
    finally:
        loop.close()
    wire_s = (goodbye(1_000).ByteSize() + MESSAGE_HEADER_BYTES + HTTP2_BYTES + PACKET_HEADER_BYTES) / RATE
    assert arrived_s == pytest.approx([1.0 + DELAY_S + wire_s, 1.0 + DELAY_S + 2 * wire_s])
