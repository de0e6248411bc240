"""This release reads what each release since 0.3.0 has written, and answers the same from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from edgewater.wire import PROTOCOL, Frame, QueryRef
from edgewater.wire import uplink_pb2 as pb
from tests.center.gateway_world import RawEdge, center, eventually
from tests.edge import uplink_world
from tests.golden.system import INCARNATION, JFK, NOW_MS, QUERIES, ROWS, SPECS, T0, Edge, Stores
from tests.golden.write import SETS, descriptors, from_file, merged, replies, session, unpack

UNKNOWN = bytes([0xC2, 0x3E, 3]) + b"new"
"""Field 1000 of a message, with three bytes."""
GONE = {f"edgewater.v1.{name}" for name in ("Cost", "ToEdge.cost", "Scheduling", "Heartbeat.scheduling", "QueryDelay")}
"""Messages and fields about queues on agents. Only 0.3.0 sends them, and their numbers stay reserved."""
pytestmark = pytest.mark.parametrize("golden", SETS, ids=lambda p: p.name)


def expected(golden: Path) -> dict[str, Any]:
    return dict(json.loads((golden / "expected.json").read_text()))


def differences(was: Any, now: Any, at: str = "") -> list[str]:
    """Where values of `was` are missing or other in `now`. A later release may add members to mappings.

    Sums of float64 differ in their last digits between processors, since numpy adds in another order.
    """
    if isinstance(was, dict) and isinstance(now, dict):
        return [line for key, value in was.items() for line in differences(value, now.get(key), f"{at}.{key}")]
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return [line for n, (w, i) in enumerate(zip(was, now, strict=True)) for line in differences(w, i, f"{at}.{n}")]
    is_near = isinstance(was, float) and isinstance(now, float) and math.isclose(was, now, rel_tol=1e-12)
    return [] if is_near or was == now else [f"{at}: {was!r:.100}, now {now!r:.100}"]


def test_an_edge_goes_on_from_the_state_and_sends_the_same_frames(golden: Path, tmp_path: Path) -> None:
    unpack(golden, tmp_path)
    sent = from_file((golden / "frames.bin").read_bytes())
    frames = {frame.seq: frame for frame in (Frame.from_wire(pb.Frame.FromString(data)) for data in sent)}
    edge = Edge(tmp_path / "edge")
    assert (edge.core.damaged_records, edge.core.incarnation, edge.core.state.runs) == (0, INCARNATION, [11])
    left = [[f.seq, f.query.name, f.crc32c] for f in edge.frames()]
    assert left == expected(golden)["unacknowledged"]
    assert all(frames[f.seq].unpack() == f.unpack() for f in edge.frames())
    acknowledged = [frame for seq, frame in frames.items() if seq < left[0][0]]
    edge.read_on(ROWS)
    edge.end()
    assert differences(expected(golden)["merged"], merged([*acknowledged, *edge.frames()])) == []
    edge.core.close()


def test_a_center_gives_the_same_answers_from_the_stores_and_goes_on(golden: Path, tmp_path: Path) -> None:
    unpack(golden, tmp_path)
    stores = Stores(tmp_path)
    assert differences(expected(golden)["answers"], stores.answers()) == []
    stores.merge()
    stores.finish()
    assert differences(expected(golden)["final"], stores.answers()) == []
    stores.close()


@pytest.mark.parametrize("newer", [False, True], ids=["", "newer"])
async def test_a_gateway_takes_the_session_of_an_edge(golden: Path, tmp_path: Path, newer: bool) -> None:
    messages = [pb.FromEdge.FromString(data) for data in from_file((golden / "session.bin").read_bytes())]
    if newer:
        messages[0].hello.protocol_max += 1
        messages = [of_a_next_release(message) for message in messages]
        messages.insert(1, of_a_next_release(pb.FromEdge()))  # a kind that this release does not know
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        c.clock[0] = NOW_MS
        for spec in SPECS:
            c.catalog.queries.register(spec, NOW_MS)
        for message in messages[:-1]:
            await edge.call.write(message)
        hello = messages[0].hello
        assert (await edge.until("welcome")).welcome.protocol == PROTOCOL
        await edge.acked(hello.next_seq - 1)
        assert not any(m.HasField("refused") for m in edge.received)
        indexed = sorted(seq for ref, _ in QUERIES for _, seq in c.entries(f"{ref.name}@1"))
        assert indexed == list(range(hello.oldest_seq, hello.next_seq))
        await eventually(lambda: c.catalog.edges.get(JFK).records == {"flights": ROWS})
        assert c.catalog.edges.get(JFK).drops == {"too-late": 1}


@pytest.mark.parametrize("newer", [False, True], ids=["", "newer"])
async def test_an_edge_acts_upon_the_messages_of_a_center(golden: Path, newer: bool) -> None:
    script, agent = uplink_world.ScriptedCenter(), uplink_world.Agent()
    async with script.serve() as port, uplink_world.running(uplink_world.uplink(port, agent)):
        for data in from_file((golden / "replies.bin").read_bytes()):
            message = pb.ToEdge.FromString(data)
            script.send(of_a_next_release(message) if newer else message)
            if newer:
                script.send(of_a_next_release(pb.ToEdge()))
        await agent.until(lambda: agent.budget)
    budgeted = QUERIES[2][0]
    assert agent.queries == list(QUERIES) and agent.sampling is not None
    assert QueryRef(agent.sampling.query, agent.sampling.query_version) == budgeted
    assert (agent.sampling.rate, agent.sampling.clock_offset_ms, agent.sampling.expected_records) == (0.5, -2.5, 0)
    assert agent.refused == [(budgeted, "not-expected", 2)]
    assert agent.budget is not None
    assert (agent.shares, agent.budget.version, agent.budget.from_ms) == ({"miles": 1500.0}, 2, T0)


def of_a_next_release(message: Any) -> Any:
    """Adds a field that this release does not know to a message and to all messages in it."""
    message.MergeFromString(UNKNOWN)
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in value if hasattr(value, "add") else [value]:
                of_a_next_release(each)
    return message


def test_each_field_of_a_message_keeps_its_number_and_its_type(golden: Path) -> None:
    """Fields may be added, and fields of `GONE` may be absent: a release that does not know a field ignores it."""
    then, now = (fields(each) for each in (described(golden), descriptors()))
    kept = {name: value for name, value in then.items() if name not in GONE and name.rpartition(".")[0] not in GONE}
    assert {name: now.get(name) for name in kept} == kept
    assert not any(name in GONE for name in now)
    for message, number in ((pb.ToEdge, 10), (pb.Heartbeat, 8)):
        described_now = DescriptorProto()
        message.DESCRIPTOR.CopyToProto(described_now)
        assert any(each.start <= number < each.end for each in described_now.reserved_range)


def test_the_release_reads_what_this_one_sends(golden: Path, tmp_path: Path) -> None:
    """As far as it knows the fields; both with the messages that each declares."""
    unpack(golden, tmp_path)
    edge = Edge(tmp_path / "edge")
    pool = DescriptorPool()
    for file in described(golden).file:
        pool.Add(file)
    frames = edge.frames()
    bodies = [(pb.FrameBody.FromString(frame.plain_body()), "FrameBody") for frame in frames]
    messages = [*((m, "FromEdge") for m in session(frames)), *((m, "ToEdge") for m in replies()), *bodies]
    for message, name in messages:
        old = GetMessageClass(pool.FindMessageTypeByName(f"edgewater.v1.{name}"))
        read = old.FromString(message.SerializeToString())
        assert differences(as_dict(read), as_dict(message)) == []
    edge.core.close()


def as_dict(message: Any) -> dict[str, Any]:
    """The fields of a message that are set, with the numbers of enumerations."""
    return {field.name: _plain(value) for field, value in message.ListFields()}


def _plain(value: Any) -> Any:
    if hasattr(value, "ListFields"):
        return as_dict(value)
    if hasattr(value, "items"):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if hasattr(value, "append") or hasattr(value, "add") else value


def described(golden: Path) -> FileDescriptorSet:
    return FileDescriptorSet.FromString((golden / "messages.binpb").read_bytes())


def fields(files: FileDescriptorSet) -> dict[str, tuple[Any, ...]]:
    """By the full name of a field or of an enumeration's value: number, type, and whether it is repeated."""
    found: dict[str, tuple[Any, ...]] = {}

    def add(prefix: str, holder: Any, nested: Any) -> None:
        for enum in holder.enum_type:
            found.update({f"{prefix}.{enum.name}.{value.name}": (value.number,) for value in enum.value})
        for message in nested:
            name = f"{prefix}.{message.name}"
            found.update({f"{name}.{f.name}": (f.number, f.type, f.type_name, f.label) for f in message.field})
            add(name, message, message.nested_type)

    for file in files.file:
        add(file.package, file, file.message_type)
    return found
