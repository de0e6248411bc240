from __future__ import annotations

import json

import pytest

from center.catalog.edge_rows import streams_from_json, streams_to_json
from center.ingest.validation import (
    MAX_FINGERPRINTS,
    read_heartbeat,
    read_hello,
    read_inputs,
    read_likely_bandwidth,
    read_utilization,
)
from edgewater.base.errors import ProtocolError
from edgewater.base.streams import Delivery, EdgeId
from edgewater.wire import uplink_pb2 as pb


def hello(speed: float = 60.0, event_origin_ms: int = 0) -> pb.Hello:
    clock = pb.Stream.Clock(event_origin_ms=event_origin_ms, wall_origin_ms=0, speed=speed)
    stream = pb.Stream(name="flights", columns=[pb.Stream.Column(name="carrier", type="string")], clock=clock)
    return pb.Hello(protocol_min=1, protocol_max=1, edge="jfk", incarnation="i1", streams=[stream])


@pytest.mark.parametrize("speed", [1e-300, 0.0, -1.0, 1e12, float("inf"), float("nan")])
def test_a_clock_whose_deadlines_would_not_fit_is_refused_by_name(speed: float) -> None:
    with pytest.raises(ProtocolError):
        read_hello(hello(speed))


def test_a_link_that_no_file_may_name_is_refused() -> None:
    message = hello()
    message.link = "ship 42"
    with pytest.raises(ProtocolError):
        read_hello(message)


def test_an_origin_that_no_clock_can_have_is_refused() -> None:
    with pytest.raises(ProtocolError):
        read_hello(hello(event_origin_ms=1 << 60))


def test_the_slowest_and_the_fastest_clock_still_give_deadlines_of_64_bits() -> None:
    for speed in (1e-3, 1e9):
        (stream,) = read_hello(hello(speed, event_origin_ms=1 << 53)).streams
        assert abs(stream.clock.to_wall_ms(1 << 42)) < 1 << 63


def test_the_delivery_of_a_stream_is_exactly_once_unless_it_is_said() -> None:
    message = hello()
    assert [s.deliveries for s in read_hello(message).streams] == [()]
    message.streams[0].deliveries.extend([pb.Stream.AT_MOST_ONCE, pb.Stream.EXACTLY_ONCE, pb.Stream.AT_LEAST_ONCE])
    both = (Delivery.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE)
    assert [s.deliveries for s in read_hello(message).streams] == [both]


@pytest.mark.parametrize("unknown", [0, 99])
def test_an_unknown_delivery_is_refused_because_answers_would_promise_too_much(unknown: int) -> None:
    message = hello()
    message.streams[0].deliveries.extend([unknown])  # type: ignore[list-item]
    with pytest.raises(ProtocolError):
        read_hello(message)


def test_a_constant_is_a_value_of_its_column() -> None:
    message = hello()
    message.streams[0].columns.add(name="gate", type="int64")
    message.streams[0].constants.update({"carrier": '"UA"', "gate": "7"})
    (stream,) = read_hello(message).streams
    assert dict(stream.constants) == {"carrier": "UA", "gate": 7}
    assert streams_from_json(json.loads(json.dumps(streams_to_json([stream])))) == (stream,)


@pytest.mark.parametrize("name", ["carrier", "other"])
@pytest.mark.parametrize(
    "text", ["7", "null", "{", "[1]", "true", '"' + "a" * 4000 + '"', "NaN", "[" * 3000, r'"\ud800"']
)
def test_a_constant_of_another_type_is_refused(name: str, text: str) -> None:
    message = hello()
    message.streams[0].constants[name] = text
    with pytest.raises(ProtocolError):
        read_hello(message)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1.0, -0.0])
def test_a_figure_of_a_heartbeat_that_no_edge_can_measure_is_unknown(value: float) -> None:
    message = pb.Heartbeat(bandwidth_bytes_s=value, likely_bytes_s=value, rtt_ms=value, busy_share=value, sent_at_ms=7)
    assert read_likely_bandwidth(message) == 0
    message.streams.add(stream="flights", records=(1 << 64) - 1)
    message.drops["too-late"] = (1 << 64) - 1
    said = hello()
    said.release = "9.1.0"
    beat = read_heartbeat(read_hello(said), message, 7)
    assert (beat.edge, beat.incarnation, beat.release) == (EdgeId("jfk"), "i1", "9.1.0")
    assert (beat.bandwidth_bytes_s, beat.rtt_ms, beat.clock_offset_ms, read_utilization(message)) == (0, 0, 0, 0)
    assert max(*beat.records.values(), *beat.drops.values()) < 1 << 63


def test_of_the_files_of_an_edge_a_bounded_number_is_taken_and_what_no_edge_can_mean_is_left_out() -> None:
    inputs = [
        pb.Input(stream="no name!", source="a", fingerprints=[1]),
        pb.Input(stream="flights", source="a\0" * 400, fingerprints=[1, 1, (1 << 64) - 1]),
        *(pb.Input(stream="flights", source=f"s{n}", fingerprints=range(50)) for n in range(100)),
    ]
    found = read_inputs(pb.Heartbeat(inputs=inputs))
    assert found[0].fingerprints == (1,)
    assert "\0" not in found[0].source and len(found[0].source) <= 255
    assert sum(len(record.fingerprints) for record in found) == MAX_FINGERPRINTS
