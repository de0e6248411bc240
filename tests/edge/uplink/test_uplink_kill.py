from __future__ import annotations

import asyncio
import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from center.catalog import Catalog
from center.storage.frame_log import FrameLog
from sim.demo.ports import free_port
from tests.center.kept_frames import read_frame
from tests.edge.uplink_world import SPEC, Agent, entries, frame, gateway, running, uplink


def serve(path: Path, port: int) -> None:
    async def run() -> None:
        async with gateway(path, f"127.0.0.1:{port}"):
            await asyncio.Event().wait()

    asyncio.run(run())


def started(path: Path, port: int) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(path, port), daemon=True)
    process.start()
    return process


@pytest.mark.slow
async def test_a_gateway_killed_again_and_again_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    port = free_port()
    catalog = Catalog(f"sqlite:///{tmp_path}/catalog.db")
    catalog.queries.register(SPEC, 1)
    agent, made = Agent(), 0
    process = started(tmp_path, port)
    async with running(uplink(port, agent)):
        for _ in range(2):
            agent.make(frame(n, int(random.integers(100, 20_000))) for n in range(made, made + 150))
            made += 150
            stop_at = agent.acked + int(random.integers(1, 100))
            await agent.until(lambda stop_at=stop_at: agent.acked >= stop_at)
            process.kill()
            await asyncio.to_thread(process.join)
            process = started(tmp_path, port)
        await agent.until(lambda: agent.acked == made - 1)
    process.kill()
    await asyncio.to_thread(process.join)
    assert entries(catalog) == list(range(made))
    assert catalog.alarms.latest() == []
    log = FrameLog(tmp_path / "log")
    assert [
        read_frame(log, e.segment, e.offset, e.length).seq for e in catalog.frames.entries("miles@1", 0, made)
    ] == list(range(made))
    catalog.close()
