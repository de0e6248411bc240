from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from starlette.applications import Starlette

from center.api.models import stream_columns
from center.catalog import Catalog
from center.config import CenterConfig
from center.ingest.gateway import Gateway
from center.ingest.group_commit import LAG_MS
from center.storage.frame_log import FrameLog
from edgewater.base.errors import InvalidConfig, StorageError
from edgewater.runtime.health import health_routes
from edgewater.wire import Encoding, QueryRef
from edgewater.wire import uplink_pb2 as pb
from tests.center.gateway_world import JFK, MILES, Center, RawEdge, center, eventually, frame, spec, tokens
from tests.center.kept_frames import read_frame, stored_frame
from tests.insides import reading
from tests.refusals import refused


async def test_the_same_identity_with_another_checksum_is_an_alarm_that_names_it(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c:
        async with RawEdge(c.port, greets=True) as edge:
            await edge.deliver(frame(0))
        async with RawEdge(c.port) as edge:
            await edge.hello(oldest=0, following=2)
            await edge.send(frame(0, content=b"another"), frame(1))
            status, code, message = await edge.refusal()
        assert (status, code) == (grpc.StatusCode.FAILED_PRECONDITION, "outdated-state")
        assert "edge jfk, incarnation i1, frame 0" in message
        await eventually(c.catalog.alarms.latest)
        assert [(a.kind, a.edge, a.message) for a in c.catalog.alarms.latest()] == [("frame-conflict", "jfk", message)]
        assert c.entries() == [("jfk", 0)]
        assert reading(c.gateway.metrics.alarms.labels("frame-conflict")) == 1


async def test_the_same_body_in_another_compression_is_a_re_delivery(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c:
        sent = frame(0, content=b"synopsis" * 40)
        again = dataclasses.replace(sent, encoding=Encoding.PLAIN, body=sent.plain_body())
        assert again.body != sent.body
        async with RawEdge(c.port, greets=True) as edge:
            await edge.send(sent)
            await edge.acked(0)
        async with RawEdge(c.port) as edge:
            await edge.hello(oldest=0, following=2)
            await edge.send(again, frame(1))
            await edge.acked(1)
        assert c.entries() == [("jfk", 0), ("jfk", 1)] and c.catalog.alarms.latest() == []


async def test_a_body_that_cannot_be_decompressed_is_refused_before_it_is_acknowledged(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port, greets=True) as edge:
        whole = frame(0, content=b"synopsis" * 40)
        assert whole.encoding is not Encoding.PLAIN
        await edge.send(dataclasses.replace(whole, body=whole.body[:-4]))
        status, code, message = await edge.refusal()
        assert (status, code) == (grpc.StatusCode.DATA_LOSS, "corrupt-frame")
        assert "edge jfk, incarnation i1: frame 0: " in message
        assert c.entries() == []


@pytest.mark.parametrize("seq", [0, 1])
async def test_a_frame_whose_checksum_is_wrong_is_refused_by_name(tmp_path: Path, seq: int) -> None:
    """A thread checks the first frame of a query, the event loop later ones."""
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port, greets=True) as edge:
        for whole in range(seq):
            await edge.send(frame(whole))
            await edge.acked(whole)
        damaged = frame(seq).to_wire()
        damaged.body = damaged.body[:-1] + bytes([damaged.body[-1] ^ 1])
        await edge.call.write(pb.FromEdge(frame=damaged))
        status, code, message = await edge.refusal()
        assert (status, code) == (grpc.StatusCode.DATA_LOSS, "corrupt-frame")
        assert f"edge jfk, incarnation i1: frame {seq}: " in message
        assert c.entries() == [("jfk", whole) for whole in range(seq)]


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (pb.FromEdge(frame=frame(2).to_wire()), "frame 2 came, but frame 0 is expected"),
        (pb.FromEdge(frame=frame(0, QueryRef("../x", 1)).to_wire()), "'../x', which is not a query's name"),
        (pb.FromEdge(frame=frame(0, content=os.urandom(5_000)).to_wire()), "frame 0 has"),
        (pb.FromEdge(hello=pb.Hello()), "second Hello"),
        (pb.FromEdge(query_status=pb.QueryStatus(query="")), "a status of ''"),
    ],
)
async def test_a_message_that_breaks_the_protocol_ends_the_session_by_name(
    tmp_path: Path, broken: pb.FromEdge, named: str
) -> None:
    async with center(tmp_path, max_frame_bytes=4_000) as c, RawEdge(c.port, greets=True) as edge:
        await edge.call.write(broken)
        status, code, message = await edge.refusal()
        assert (status, code) == (grpc.StatusCode.FAILED_PRECONDITION, "protocol")
        assert named in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"protocol_min": 3, "protocol_max": 4}, "protocol 3 to 4, this center 1 to 1"),
        ({"edge": "a b"}, "edge 'a b'"),
        ({"incarnation": ""}, "incarnation ''"),
        ({"oldest_seq": 9}, "frames 9"),
    ],
)
async def test_a_hello_that_makes_no_sense_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        with pytest.raises(grpc.aio.AioRpcError, match=named):
            await edge.hello(**fields)
        assert c.catalog.edges.all() == []


async def test_a_session_that_begins_with_something_else_or_nothing_is_ended(tmp_path: Path) -> None:
    async with center(tmp_path, hello_timeout_ms=50) as c:
        async with RawEdge(c.port) as edge:
            await edge.send(frame(0))
            assert "the first message was frame" in (await edge.refusal())[2]
        async with RawEdge(c.port) as edge:
            assert "no Hello within 50 ms" in (await edge.refusal())[2]


async def test_only_the_owner_of_a_token_is_let_in_and_only_under_its_own_id(tmp_path: Path) -> None:
    async with center(tmp_path, tokens=tokens(jfk="secret-j", lga="secret-l")) as c:
        for token, named in ((None, "no credential"), ("wrong", "unknown credential"), ("", "no credential")):
            async with RawEdge(c.port, token) as edge:
                status, code, message = await edge.refusal()
                assert (status, code) == (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")
                assert named in message
        async with RawEdge(c.port, "secret-l") as edge:
            with pytest.raises(grpc.aio.AioRpcError, match="Hello of edge jfk with the credential of edge lga"):
                await edge.hello("jfk")
        assert c.catalog.edges.all() == []
        async with RawEdge(c.port, "secret-j") as edge:
            await edge.hello("jfk")


async def test_without_credentials_only_this_machine_is_served(tmp_path: Path) -> None:
    catalog = Catalog(f"sqlite:///{tmp_path}/c.db")
    gateway = Gateway(catalog, FrameLog(tmp_path / "log"), CenterConfig(), lambda: 0)
    with refused(InvalidConfig, "gateway.listen"):
        await gateway.start("0.0.0.0:0")
    await gateway.stop()
    catalog.close()


async def test_a_port_that_somebody_has_is_refused_by_name(tmp_path: Path) -> None:
    async with center(tmp_path) as c:
        second = Gateway(c.catalog, FrameLog(tmp_path / "log2"), CenterConfig(), lambda: 0)
        with refused(InvalidConfig, "gateway.listen"):
            await second.start(f"127.0.0.1:{c.port}")
        await second.stop()


@pytest.mark.parametrize("where", ["append", "sync", "index"])
async def test_a_disk_that_is_full_costs_time_and_no_frame(tmp_path: Path, where: str) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port, greets=True) as edge:
        await edge.deliver(frame(0))
        setattr(
            c.catalog if where == "index" else c.log.segment_files,
            {"index": "refuse"}.get(where, f"refuse_{where}"),
            True,
        )
        await edge.send(frame(1), frame(2))
        assert (await edge.until("throttle")).throttle.retry_after_ms > 0
        assert "cannot be made durable" in c.gateway.readiness()[0]
        assert reading(c.gateway.metrics.stalled) == 1
        app = Starlette(routes=health_routes(c.gateway.metrics.registry, c.gateway.readiness))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as http:
            answer = await http.get("/readyz")
            assert answer.status_code == 503 and "made durable" in answer.json()["missing"][0]
            assert (await http.get("/livez")).status_code == 200
            assert "edgewater_gateway_stalled 1.0" in (await http.get("/metrics")).text
        assert c.entries() == [("jfk", 0)]
        assert all(m.ack.through < 1 for m in edge.received if m.WhichOneof("message") == "ack")
        c.log.segment_files.refuse_append = c.log.segment_files.refuse_sync = c.catalog.refuse = False
        await edge.acked(2)
        assert c.entries() == [("jfk", n) for n in range(3)]
        for entry in c.catalog.frames.entries("miles@1", 0, 9):
            assert read_frame(c.log, entry.segment, entry.offset, entry.length).seq == entry.seq
        assert c.gateway.readiness() == []


async def test_a_center_killed_between_log_and_index_takes_the_frame_again_and_counts_it_once(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port, greets=True) as edge:
        c.catalog.refuse = True
        await edge.send(frame(0))
        await eventually(lambda: c.log.durable)
    torn = next(tmp_path.rglob("*.frames"))
    os.truncate(torn, torn.stat().st_size - 3)
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        welcome = await edge.hello(oldest=0, following=1)
        assert not welcome.any_acked
        await edge.deliver(frame(0))
        (entry,) = c.catalog.frames.entries("miles@1", 0, 9)
        assert read_frame(c.log, entry.segment, entry.offset, entry.length) == stored_frame(frame(0))


async def test_numbers_and_texts_that_no_database_holds_harm_nobody(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port, greets=True) as edge:
        beat = pb.Heartbeat(
            rtt_ms=float("nan"), bandwidth_bytes_s=float("inf"), backlog_bytes=(1 << 64) - 1, drops={"a\0b": 1}
        )
        await edge.call.write(pb.FromEdge(heartbeat=beat))
        await eventually(lambda: c.catalog.edges.get(JFK).drops)
        record = c.catalog.edges.get(JFK)
        assert (record.rtt_ms, record.bandwidth_bytes_s, record.backlog_bytes) == (0, 0, 1 << 62)


async def test_a_query_registered_while_the_catalog_fails_reaches_the_edges_once_it_works_again(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port, greets=True) as edge:
        await edge.until("queries", lambda told: not told.queries)
        read, failed_at = c.catalog.budgets.version, []

        def refuse() -> int:
            failed_at.append(c.gateway._plan.version)
            raise StorageError("database is locked")

        c.catalog.budgets.version = refuse  # type: ignore[method-assign]
        c.catalog.queries.register(spec(), 1)
        await eventually(lambda: c.catalog.version() in failed_at)
        c.catalog.budgets.version = read  # type: ignore[method-assign]
        (query,) = (await edge.until("queries")).queries.queries
        assert query.name == "miles"


async def test_at_the_limit_an_edge_replaces_its_own_session_and_no_other_is_let_in(tmp_path: Path) -> None:
    async with center(tmp_path, max_sessions=1) as c, RawEdge(c.port) as old:
        await old.hello()
        async with RawEdge(c.port) as new:
            await new.hello()
            assert "a newer session" in (await old.refusal())[2]
            async with RawEdge(c.port) as other:
                with pytest.raises(grpc.aio.AioRpcError, match="1 edges are connected") as caught:
                    await other.hello("lga")
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert [e.edge for e in c.catalog.edges.all()] == [JFK]


async def test_calls_that_say_nothing_are_limited_too(tmp_path: Path) -> None:
    async with center(tmp_path, max_sessions=1) as c, RawEdge(c.port) as one, RawEdge(c.port) as two:
        endings = [asyncio.create_task(edge.refusal()) for edge in (one, two)]
        done, held = await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        (refused,) = done
        assert refused.result()[::2] == (
            grpc.StatusCode.UNAVAILABLE, "1 calls have not sent a Hello yet, which is this gateway's limit",
        )  # fmt: skip


async def test_two_agents_with_one_id_are_told_so_and_raise_an_alarm(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as one, RawEdge(c.port) as two, RawEdge(c.port) as again:
        await one.hello(incarnation="i1")
        await two.hello(incarnation="i2")
        assert "another agent, of incarnation i2, has connected under this id" in (await one.refusal())[2]
        await again.hello(incarnation="i1")
        assert "another agent, of incarnation i1, has connected under this id" in (await two.refusal())[2]
        (alarm,) = [a for a in c.catalog.alarms.latest() if a.kind == "id-in-use-twice"]
        assert "incarnations i1 and i2 take turns: two agents run under this id" in alarm.message


async def test_a_newer_session_of_an_edge_takes_the_older_ones_place(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as old, RawEdge(c.port) as new:
        await old.hello()
        await new.hello()
        assert "a newer session" in (await old.refusal())[2]
        await new.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=1)))
        await new.until("time_echo")
        assert c.catalog.edges.get(JFK).connected


async def test_a_query_that_is_not_consumed_keeps_no_frames_of_others(tmp_path: Path) -> None:
    stuck, fine = MILES, QueryRef("fine", 1)

    async def commit_together(c: Center, edge: RawEdge, first: int) -> dict[QueryRef, str]:
        """Ships frames `first` to `first + 2`, the last two in one commit; the segments of those two by query."""
        c.catalog.gate, before = asyncio.Event(), len(c.catalog.batches)
        held = c.catalog.gate
        await edge.send(frame(first, stuck))
        await eventually(lambda: c.catalog.gate is None)
        await edge.send(frame(first + 1, stuck), frame(first + 2, fine))
        await eventually(lambda: sum(map(len, c.gateway._group_commit._pending.values())) == 2)
        held.set()
        await edge.acked(first + 2)
        assert c.catalog.batches[before:] == [1, 2]
        keys = {stuck: "miles@1", fine: "fine@1"}
        return {query: c.catalog.frames.entries(key, 0, 1 << 40)[-1].segment for query, key in keys.items()}

    async with center(tmp_path) as c:
        for name in ("miles", "fine"):
            c.catalog.queries.register(spec(name), 1)
        async with RawEdge(c.port, greets=True) as edge:
            at = await commit_together(c, edge, 0)
            assert at[stuck] == at[fine]
            assert c.catalog.frames.drop({"fine@1": 1}) == [], "the segment has a frame of the other query"
            c.clock[0] += LAG_MS + 1
            at = await commit_together(c, edge, 3)
            assert c.catalog.frames.drop({"fine@1": 2}) == [at[fine]]
            c.catalog.frames.drop({"miles@1": 4})
            c.clock[0] += LAG_MS + 1
            at = await commit_together(c, edge, 6)
            assert at[stuck] == at[fine], "it is consumed again"


async def test_a_commit_of_two_segments_of_which_the_disk_takes_one_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with center(tmp_path) as c:
        for name in ("miles", "fine"):
            c.catalog.queries.register(spec(name), 1)
        async with RawEdge(c.port, greets=True) as edge:
            await edge.deliver(frame(0))
            c.clock[0] += LAG_MS + 1
            files, append, present = c.log.segment_files, c.log.segment_files.append, list[int]()

            def append_some(batch: Sequence[bytes]) -> str:
                present.append(len(files.names()))
                files.refuse_append = len(present) in (2, 4, 6)
                return append(batch)

            c.catalog.gate = held = asyncio.Event()
            await edge.send(frame(1))
            await eventually(lambda: c.catalog.gate is None)
            await edge.send(frame(2), frame(3, QueryRef("fine", 1)))
            await eventually(lambda: sum(map(len, c.gateway._group_commit._pending.values())) == 2)
            monkeypatch.setattr(files, "append", append_some)
            held.set()
            await edge.acked(3)
        indexed = {e.segment for key in ("miles@1", "fine@1") for e in c.catalog.frames.entries(key, 0, 1 << 40)}
        assert set(c.log.segments()) == indexed
        assert present == 4 * [2, 3]


NUMBERS = (math.nan, math.inf, -math.inf, -1.0, 5e-324, 1.7e308)
COUNTS = (0, 1, 1 << 53, (1 << 62) - 1, 1 << 62, (1 << 64) - 1)


def filled(message: Any, number: float, count: int) -> Any:
    """Sets all numeric fields of a message and of its parts. Texts name what the edge may name."""
    texts = {"query": "miles", "stream": "flights", "name": "flights"}
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            key = "flights" if field.name == "durable_records" else "miles"
            if value.type == value.TYPE_DOUBLE:
                getattr(message, field.name)[key] = number
            elif value.type == value.TYPE_UINT64:
                getattr(message, field.name)[key] = count
        elif field.message_type is not None:
            part = getattr(message, field.name)
            filled(part.add() if field.is_repeated else part, number, count)
        else:
            if field.type == field.TYPE_DOUBLE:
                value = number
            elif field.type in (field.TYPE_UINT64, field.TYPE_FIXED64):
                value = count if field.name != "query_version" else 1
            elif field.type == field.TYPE_INT64:
                value = min(count, (1 << 63) - 1)
            elif field.type == field.TYPE_STRING:
                value = texts.get(field.name, "x")
            else:
                continue
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
    return message


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["heartbeat", "query_status", "budget_report", "goodbye", "hello"])
async def test_whatever_numbers_an_edge_states_the_others_go_on(tmp_path: Path, kind: str) -> None:
    """Each numeric field of each message, with each number. Frames have a check of their own (`test_frame_check`)."""
    async with center(tmp_path, queries=[spec(budget={"error": {"miles": 1000}})]) as c:
        for turn, (number, count) in enumerate(itertools.product(NUMBERS, COUNTS)):
            for liar in ("liar", "other"):
                async with RawEdge(c.port) as edge:
                    if kind != "hello":
                        await edge.hello(liar)
                    message = filled(getattr(pb.FromEdge(), kind), number, count)
                    if kind == "hello":
                        message.protocol_min, message.protocol_max = 1, 1
                        message.edge, message.incarnation = liar, f"i{turn}"
                        message.sent_at_ms, message.next_seq = 1, max(message.next_seq, message.oldest_seq)
                        message.streams[0].ClearField("clock")
                        message.streams[0].ClearField("columns")
                        message.streams[0].columns.add(name="carrier", type="string")
                        message.streams[0].columns.add(name="distance", type="int64")
                        del message.runs[:]
                        del message.streams[0].deliveries[:]
                    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                        await edge.call.write(pb.FromEdge(**{kind: message}))
                        await edge.call.done_writing()
                        while await edge.call.read() is not grpc.aio.EOF:
                            pass
            assert c.gateway.tasks.missing() == []
            assert reading(c.gateway.metrics.ended.labels("internal")) == 0, (number, count)
        async with RawEdge(c.port) as edge:
            await edge.hello("honest")
            await edge.until("queries", lambda told: told.queries)
            await edge.report_budget()
            for name in ("second", "third"):  # the first poll may fail for the report
                c.catalog.queries.register(spec(name), 1)
                await edge.until("queries", lambda told, name=name: told.queries[-1].name == name)
        assert stream_columns({}, c.catalog.edges.all())[0]["records"] < 1 << 63
