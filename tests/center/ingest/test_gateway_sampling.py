from __future__ import annotations

import math
from pathlib import Path

import pytest

from center.early import SamplingPlan
from edgewater.base.streams import EdgeId
from edgewater.wire import uplink_pb2 as pb
from tests.center.gateway_world import RawEdge, center, eventually, spec
from tests.edgewater.functions_world import Counting, install_functions


async def test_an_edge_that_cannot_keep_up_gets_the_sampling_rate_that_its_accuracy_needs(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        measured = {"group_by": None, "measures": {"miles": "sum(distance)"}, "accuracy": {"error": "5%"}}
        query = c.catalog.queries.register(spec(**measured), 1)[0]
        c.catalog.budgets.record_sampling(query.ref, {EdgeId("jfk"): SamplingPlan(0.25)})
        await edge.hello()
        await eventually(lambda: c.gateway._budget_sync.snapshot.sampling)
        await edge.until("queries", lambda queries: len(queries.queries) == 1)

        async def beat(backlog_bytes: int, *busy_shares: float) -> pb.Sampling:
            for share in busy_shares or (0.0,):
                beat = pb.Heartbeat(
                    sent_at_ms=c.clock[0], backlog_bytes=backlog_bytes, bandwidth_bytes_s=1000.0, busy_share=share
                )
                await edge.call.write(pb.FromEdge(heartbeat=beat))
            return (await edge.until("sampling")).sampling

        message = await beat(0)
        assert (message.query, message.query_version, message.rate) == ("miles", 1, 1.0)
        message = await beat(5_000)
        assert (message.rate, message.reason) == (0.25, pb.Sampling.LINK)
        assert (await beat(0)).rate == 1.0
        message = await beat(0, 0.95, 1.0, 0.99)
        assert (message.rate, message.reason) == (0.25, pb.Sampling.PROCESSOR)
        message = await beat(0, 0.1, math.nan, 0.1)
        assert (message.rate, message.reason) == (1.0, pb.Sampling.NONE)


async def test_an_edge_gets_the_number_of_records_for_which_its_rate_is_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_functions(monkeypatch, Counting(lambda x: x).named("score"))
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        measured = {"group_by": None, "measures": {"miles": "mean(score(distance))"}, "accuracy": {"error": "5%"}}
        query = c.catalog.queries.register(spec(**measured), 1)[0]
        plans = {EdgeId("jfk"): SamplingPlan(0.25, 400.0)}
        c.catalog.budgets.record_sampling(query.ref, plans)
        assert c.catalog.budgets.sampling() == {query.ref: plans}
        await edge.hello()
        await eventually(lambda: c.gateway._budget_sync.snapshot.sampling)
        await edge.until("queries", lambda queries: len(queries.queries) == 1)
        await edge.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=c.clock[0], bandwidth_bytes_s=1000.0)))
        message = (await edge.until("sampling")).sampling
        assert (message.rate, message.reason, message.expected_records) == (0.25, pb.Sampling.MEASURE, 400)
