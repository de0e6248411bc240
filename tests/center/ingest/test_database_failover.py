"""A gateway over a PostgreSQL server with a synchronous standby, which takes its place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.center.catalog_world import spec
from tests.center.gateway_world import RawEdge, center, frame
from tests.center.postgres import serving_pair

FRAMES = 2_000


@pytest.mark.slow
@pytest.mark.full
async def test_each_frame_is_indexed_once_when_the_database_is_killed_and_its_standby_promoted(
    tmp_path: Path, postgres_binaries: Path
) -> None:
    with serving_pair(postgres_binaries) as (primary, standby):
        async with (
            center(tmp_path, url=primary.url_of_pair(standby), queries=[spec()]) as c,
            RawEdge(c.port, greets=True) as edge,
        ):
            sending = asyncio.create_task(edge.send(*(frame(n) for n in range(FRAMES))))
            acked = await edge.acked(FRAMES // 10)
            await asyncio.to_thread(primary.kill)
            await asyncio.to_thread(standby.promote)
            durable = c.entries()
            assert durable[: FRAMES // 10 + 1] == [("jfk", n) for n in range(FRAMES // 10 + 1)], acked
            assert len(durable) < FRAMES, "killed while frames were committed"
            await edge.acked(FRAMES - 1)
            await sending
            assert c.entries() == [("jfk", n) for n in range(FRAMES)]
