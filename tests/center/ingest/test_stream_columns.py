"""The columns of a stream are the center's word where it gives it: the first Hello decides nothing then."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from center.config import CenterConfig, ColumnEntry
from edgewater.wire import uplink_pb2 as pb
from tests.center.gateway_world import RawEdge, center, eventually, frame, spec

COLUMNS = {"carrier": ColumnEntry(type="string"), "distance": ColumnEntry(type="int64")}


def stream(**types: str) -> pb.Stream:
    return pb.Stream(name="flights", columns=[pb.Stream.Column(name=n, type=k) for n, k in types.items()])


async def refusal(port: int, edge: str, *streams: pb.Stream) -> str:
    async with RawEdge(port) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.hello(edge, streams=streams)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        return caught.value.details() or ""


async def test_a_wrong_edge_that_is_the_first_does_not_keep_the_honest_ones_out(tmp_path: Path) -> None:
    columns = {"columns": {"carrier": "string", "distance": {"type": "int64", "description": "miles"}}}
    config = CenterConfig.from_mapping({"streams": {"flights": columns}})
    async with center(tmp_path, columns=config.columns, queries=[spec()]) as c:
        assert await refusal(c.port, "mallory", stream(carrier="int64")) == (
            "Hello: column flights.carrier is int64 at edge mallory; expected string, by streams.flights.columns in the"
            " center's configuration"
        )
        unknown = await refusal(c.port, "mallory", stream(carrier="string", **{f"x{'y' * 500}": "bool"}))
        assert "expected only the columns carrier, distance" in unknown
        assert c.catalog.edges.all() == []
        await eventually(lambda: [a.kind for a in c.catalog.alarms.latest()] == ["columns-differ"] * 2)
        async with RawEdge(c.port) as few, RawEdge(c.port) as honest:
            await few.hello("few", streams=[stream(carrier="string")])
            await honest.hello()
            await honest.deliver(frame(0))
        assert c.entries() == [("jfk", 0)]


async def test_an_admin_corrects_what_the_first_edge_has_said(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as wrong:
        await wrong.hello("mallory", streams=[stream(carrier="int64")])
        assert "or declare it at the center" in await refusal(c.port, "jfk", stream(carrier="string"))
        c.catalog.streams.declare("flights", COLUMNS)
        status, code, message = await wrong.refusal()
        assert (status, code) == (grpc.StatusCode.FAILED_PRECONDITION, "protocol")
        assert "expected string, as an admin of the center has set" in message
        c.catalog.queries.register(spec(), 1)
        async with RawEdge(c.port) as honest:
            await honest.hello()
            await honest.deliver(frame(0))
        assert c.entries() == [("jfk", 0)]
