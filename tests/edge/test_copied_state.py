"""Real agents on a copy of a state directory, or on an older version of it: nothing is counted for another process."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
import yaml

from edge.process import now_ms
from edgewater.base.streams import EdgeId
from edgewater.model.edge_records import EdgeRecord
from edgewater.synopses import GroupedAggregate
from sim.demo.ports import free_port
from tests.edge.center_world import NDJSON, Center, with_center
from tests.query_specs import query_spec

pytestmark = pytest.mark.slow  # each starts processes

QUERY = query_spec(name="n", stream="events", lateness="1h")
ENOUGH_S = 60


class EdgeProcess:
    """`edgewater edge run` as edge ``a`` over one state directory; clients push to it."""

    def __init__(self, directory: Path, center: Center) -> None:
        self.center, self.state = center, directory / "state"
        self._config, self._log = directory / "edge.yaml", directory / "edge.log"
        self._port = free_port()
        stream = {"columns": {"x": "int64"}, "time": {"column": "at", "max_skew": "1d"}, "idle": "1s"}
        document = {
            "edge": "a",
            "center": {"address": f"127.0.0.1:{center.port}"},
            "state_dir": str(self.state),
            "http": {"listen": f"127.0.0.1:{self._port}"},
            "streams": {"events": {**stream, "sources": [{"http": {}}]}},
        }
        directory.mkdir(exist_ok=True)
        self._config.write_text(yaml.safe_dump(document))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "edgewater", "edge", "run", str(self._config), stdout=log, stderr=log
            )
        await until(self.is_connected, "a session")

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def push(self, records: int, at_ms: int | None = None) -> None:
        at_ms = at_ms or now_ms()
        text = "".join(json.dumps({"x": n, "at": at_ms}) + "\n" for n in range(records))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}", timeout=ENOUGH_S) as client:
            reply = await client.post("/v1/streams/events", content=text, headers=NDJSON)
        assert (reply.status_code, reply.json()["accepted"]) == (200, records), reply.text

    async def is_connected(self) -> bool:
        with suppress(httpx.TransportError):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}", timeout=5) as client:
                return "edgewater_edge_connected 1.0" in (await client.get("/metrics")).text
        return False


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    async with asyncio.timeout(ENOUGH_S):
        while not await condition():
            await asyncio.sleep(0.05)


def indexed(center: Center) -> int:
    """The records in the frames that the center has acknowledged."""
    partials = [GroupedAggregate.from_bytes(p.synopsis) for _, body in center.bodies() for p in body.partials]
    return sum(int(p.query("n").value.sum()) for p in partials)


async def until_indexed(center: Center, records: int) -> None:
    async def enough() -> bool:
        return indexed(center) >= records

    await until(enough, f"{records} records")


def edge(center: Center) -> EdgeRecord:
    return center.catalog.edges.get(EdgeId("a"))


def alarms(center: Center) -> set[str]:
    return {alarm.kind for alarm in center.catalog.alarms.latest()}


@asynccontextmanager
async def agents(center: Center, *directories: Path) -> AsyncIterator[list[EdgeProcess]]:
    made = [EdgeProcess(directory, center) for directory in directories]
    try:
        yield made
    finally:
        for agent in made:
            await agent.stop()


@pytest.mark.nightly
@with_center(QUERY)
async def test_an_older_copy_that_is_restored_is_a_new_incarnation_with_a_stated_loss(
    center: Center, tmp_path: Path
) -> None:
    async with agents(center, tmp_path / "one") as (agent,):
        await agent.start()
        await agent.push(8)
        await until_indexed(center, 8)
        await agent.stop()
        shutil.copytree(agent.state, tmp_path / "copy")
        await agent.start()
        await agent.push(50)  # in the journal that will be replaced, and in frames
        await until_indexed(center, 58)
        await agent.kill()
        before = edge(center)
        shutil.rmtree(agent.state)
        shutil.copytree(tmp_path / "copy", agent.state)
        await agent.start()
        await until(lambda: asyncio.sleep(0, edge(center).incarnation != before.incarnation), "a new incarnation")
        await agent.push(5)
        await until_indexed(center, 63)
        assert indexed(center) == 63
        assert edge(center).state_lost_at_ms is not None
        assert {"id-in-use-twice", "state-lost"} <= alarms(center)


@with_center(QUERY)
async def test_accepted_records_that_a_restored_copy_lacks_are_noticed_though_no_frame_had_them(
    center: Center, tmp_path: Path
) -> None:
    """The copy was made while the agent ran, so it knows the process that connected last."""
    async with agents(center, tmp_path / "one") as (agent,):
        await agent.start()
        later_ms = now_ms() + 3_600_000  # no window of these records ends in this test
        await agent.push(3, later_ms)
        shutil.copytree(agent.state, tmp_path / "copy")
        await agent.push(50, later_ms)

        async def reported() -> bool:
            return edge(center).records.get("events") == 53

        await until(reported, "a heartbeat after the push")
        await agent.kill()
        shutil.rmtree(agent.state)
        shutil.copytree(tmp_path / "copy", agent.state)
        await agent.start()
        assert edge(center).state_lost_at_ms is not None
        assert "edge-state-behind" in alarms(center)


@pytest.mark.nightly
@with_center(QUERY)
async def test_two_agents_on_copies_of_one_state_are_two_incarnations_and_nothing_is_acknowledged_unseen(
    center: Center, tmp_path: Path
) -> None:
    async with agents(center, tmp_path / "one", tmp_path / "two") as (one, two):
        await one.start()
        await one.push(8)
        await until_indexed(center, 8)
        await one.stop()
        shutil.copytree(one.state, two.state)
        first = edge(center).incarnation
        await one.start()
        assert edge(center).incarnation == first and edge(center).state_lost_at_ms is None
        await one.push(20)
        await until_indexed(center, 28)
        await two.start()
        # The two take turns from now on.
        assert edge(center).incarnations == 2 and edge(center).state_lost_at_ms is not None
        assert "id-in-use-twice" in alarms(center)
        await two.push(30)
        await one.push(40)  # both hold on to their records until they have a session
        await until_indexed(center, 98)
        await asyncio.gather(one.stop(), two.stop())
        assert indexed(center) == 98
