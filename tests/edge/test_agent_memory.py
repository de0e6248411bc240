"""A query that groups by something unique over years, at a real agent with a real gateway: the others do not notice."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from edge.agent import open_agent
from edge.config import EdgeConfig, parse_config
from edge.process import now_ms
from edgewater.model.query import QuerySpec
from edgewater.wire import InputLoss
from sim.demo.ports import free_address
from tests.edge.center_world import NDJSON, Center, running, until, with_center

COUNT = {"measures": {"n": "count()"}}
HOSTILE = {"name": "hostile", "from": "a", "group_by": ["id"], "window": {"tumbling": "3650d"}, **COUNT}
HONEST = {"name": "honest", "from": "b", "group_by": ["id"], "window": {"tumbling": "1s"}, **COUNT}
ROWS = 4000


def settings(directory: Path, center: Center) -> EdgeConfig:
    stream = {"columns": {"id": "int64"}, "time": {"column": "at"}, "idle": "200ms", "sources": [{"http": {}}]}
    return parse_config(
        {
            "edge": "jfk",
            "center": {"address": f"127.0.0.1:{center.port}"},
            "state_dir": str(directory / "state"),
            "http": {"listen": free_address()},
            "streams": {"a": stream, "b": stream},
            "limits": {"max_pending_bytes": "1MiB"},
        }
    )


def body(first: int, count: int) -> str:
    at = now_ms()
    return "".join(json.dumps({"id": first + i, "at": at}) + "\n" for i in range(count))


def counted(center: Center, query: str) -> int:
    return sum(close.observed for name, b in center.bodies() if name == query for close in b.closes)


def losses(center: Center) -> dict[str, list[InputLoss]]:
    found: dict[str, list[InputLoss]] = {}
    for name, b in center.bodies():
        if b.losses:
            found.setdefault(name, []).extend(b.losses)
    return found


@pytest.mark.slow
@with_center(*[QuerySpec.from_mapping(mapping) for mapping in (HOSTILE, HONEST)])
async def test_a_query_that_fills_its_memory_stops_no_push_and_no_other_query(center: Center, tmp_path: Path) -> None:
    config = settings(tmp_path, center)
    agent = open_agent(config)
    async with running(agent) as task:
        await until(lambda: len(agent.durable.core.queries) == 2, "queries", task)
        async with httpx.AsyncClient(base_url=f"http://{config.http.listen}", timeout=30) as client:

            async def push(stream: str, first: int, count: int) -> None:
                reply = await client.post(f"/v1/streams/{stream}", content=body(first, count), headers=NDJSON)
                assert reply.status_code == 200, reply.text

            for i in range(8):
                await push("a", ROWS * i, ROWS)
                await push("b", 0, 10)
            await until(lambda: counted(center, "honest") == 80, "the honest query's windows", task)
            await until(lambda: "hostile" in losses(center), "the statement", task)
            metrics = (await client.get("/metrics")).text
    stated = losses(center)
    assert stated.keys() == {"hostile"} and {loss.reason for loss in stated["hostile"]} == {"query-memory"}
    assert "edgewater_edge_limited_queries 1.0" in metrics
    assert 'edgewater_edge_input_losses_total{reason="query-memory",stream="a"} ' in metrics
    drops = agent.durable.state.drops
    assert drops.keys() == {"query-memory"} and 0 < drops["query-memory"] < 8 * ROWS
