"""One and two drivers apply the same prepared frames, each its partition of the queries, over one PostgreSQL.

On two cores a second driver competes with the first driver and the database. So the kernel gives each driver with its
JVM and Python workers a share of a core (a quota of its control group), as on slow machines of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from bench.scale.executors import (
    CPU_GROUPS,
    PARTIALS,
    WITHIN_S,
    cpu_of_tree,
    limited,
    prepare,
    rate_ratio,
    rate_row,
    running,
)
from center.results import ResultStore
from center.spark.java import require_java
from center.storage.query_partition import QueryPartition
from tests.center.postgres import PostgresServer, find_binaries, serving

QUERIES, WINDOWS = 12, 200
SETTLED, ENDED = 0.4, 0.97
"""The rate is measured between these fractions of the frames. In this time, drivers have their share of a core."""
SHARE = 0.4


def measure(smoke: bool) -> dict[str, Any]:
    """Returns a row per number of drivers, and the ratio of their rates."""
    require_java(os.environ)
    if not os.access(CPU_GROUPS, os.W_OK):
        return {"ratio": None, "not_measured": f"{CPU_GROUPS} cannot be written"}
    if (binaries := find_binaries()) is None:
        return {"ratio": None, "not_measured": "no PostgreSQL on this machine (Debian: apt-get install postgresql)"}
    rows = {}
    with serving(binaries) as server:
        for drivers in (1, 2):
            with tempfile.TemporaryDirectory() as name:
                rows[f"{drivers} drivers"] = _apply(Path(name), server, drivers, 4 if smoke else WINDOWS)
    return {"share_of_a_core": SHARE, "rows": rows, "ratio": rate_ratio(*rows.values())}


def _apply(directory: Path, server: PostgresServer, drivers: int, windows: int) -> dict[str, Any]:
    url = server.new_database()
    frames = asyncio.run(prepare(directory, url, windows, QUERIES))
    spark = {"master": "local[1]", "driver_memory": "768m", "drivers": drivers}
    config = {"data_dir": str(directory), "catalog_url": url, "results_url": url, "spark": spark}
    (directory / "center.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "edgewater", "center", "job", "-c", str(directory / "center.yaml")]
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(running(command, directory / f"job-{number}.log", "--log-level", "warning"))
            for number in range(drivers)
        ]
        store = ResultStore(url)
        stack.callback(store.close)
        end_s = time.monotonic() + WITHIN_S

        def applied() -> list[float]:
            """Returns the fraction of each partition's frames that is applied."""
            if time.monotonic() > end_s or any(job.poll() is not None for job in jobs):
                raise RuntimeError((directory / "job-0.log").read_text()[-2_000:])
            time.sleep(0.02)
            positions = store.consumed()
            return [
                sum(at for key, at in positions.items() if key in partition) / whole
                for partition, whole in shares.items()
            ]

        shares = {partition: frames * _part(partition) for partition in QueryPartition.all(drivers)}
        while min(applied()) < SETTLED:
            pass
        for job in jobs:
            stack.enter_context(limited(job.pid, SHARE))
        first, before_s, at_s = applied(), sum(cpu_of_tree(job.pid) for job in jobs), time.perf_counter()
        while max(last := applied()) < ENDED:  # all drivers have work until then
            pass
        took_s = time.perf_counter() - at_s
        used_s = sum(cpu_of_tree(job.pid) for job in jobs) - before_s
    done = sum((now - then) * whole for now, then, whole in zip(last, first, shares.values(), strict=True))
    return rate_row(round(done) * PARTIALS, took_s, {"drivers": used_s})


def _part(partition: QueryPartition) -> float:
    """Returns the fraction of the queries that is in a partition."""
    return sum(f"x{number}@1" in partition for number in range(QUERIES)) / QUERIES
