"""Two real drivers over one center, each a partition of the queries; one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bench.first_light.center_rates import FIRST_MS, Load
from bench.first_light.synthetic_edge import WINDOW_MS, synopsis
from center.job.leadership import display_name
from center.results import ResultStore
from center.storage.query_partition import QueryPartition
from sim.demo.compare import millis
from sim.demo.run import Demo

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]  # the simulation has up to three drivers

GROUPS, WITHIN_S = 5, 180
NAMES = [next(f"q{n}" for n in range(9) if f"q{n}@1" in half) for half in QueryPartition.all(2)]
"""A query of each partition."""


@pytest.fixture
def center(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path, 1.0, settings={"spark": {"drivers": 2}})
    try:
        demo.start_center()
        yield demo
    finally:
        demo.stop()


def driver_of(center: Demo, name: str) -> int:
    """The process that leads the partition of a query, by its lease."""
    with closing(ResultStore(f"sqlite:///{center.directory}/state/center/results.db")) as store:
        (owner,) = [lease.owner for partition, lease in store.leases().items() if f"{name}@1" in partition]
    return int(display_name(owner).rpartition(":")[2])


def readiness(center: Demo) -> dict[str, Any]:
    return dict(center.client.get("/readyz").json()["components"]["job"])


async def ship(load: Load, windows: range) -> dict[tuple[str, int], int]:
    """A window of each query every tenth of a second."""
    sent = {}
    for number in windows:
        start_ms = FIRST_MS + number * WINDOW_MS
        for name in NAMES:
            sent[name, start_ms] = load.edge.put(name, start_ms, [synopsis(GROUPS, 0)])
        await asyncio.sleep(0.1)
    return sent


def test_while_the_driver_of_one_partition_is_dead_the_others_queries_are_answered_and_nothing_is_lost(
    center: Demo,
) -> None:
    async def run() -> None:
        async with Load(center, NAMES) as load, asyncio.timeout(WITHIN_S):
            before = await ship(load, range(10))
            await load.wait_for(before)
            ready = readiness(center)
            assert ready["ready"] and len(ready["leader"].split(", ")) == 2

            killed, kept = (driver_of(center, name) for name in NAMES)
            assert killed != kept
            os.kill(killed, signal.SIGKILL)
            meanwhile = await ship(load, range(10, 30))
            await load.wait_for({key: seq for key, seq in meanwhile.items() if key[0] == NAMES[1]})
            assert not any(key in load.answered_at for key in meanwhile if key[0] == NAMES[0])

            await load.wait_for(meanwhile)  # the supervisor has started a driver again
            assert driver_of(center, NAMES[0]) not in (killed, kept) and driver_of(center, NAMES[1]) == kept

            await asyncio.to_thread(check, center)

    asyncio.run(run())


def check(center: Demo) -> None:
    """Every window of both queries is answered, exactly."""
    for name in NAMES:
        answers = list(center.answers(name))
        assert [millis(a["window"]["start"]) for a in answers] == [FIRST_MS + n * WINDOW_MS for n in range(30)]
        for answer in answers:
            assert [row["n"]["estimate"] for row in answer["data"]] == [1] * GROUPS
            assert answer["quality"]["completeness"]["ratio"] == 1.0
