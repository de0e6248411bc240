"""`python -m bench.backfill [--smoke]`: the latency of live records while a backfill runs beside them.

One agent with a stream of a file and of pushed records. After the file has been read, small pushes are made at a fixed
rate. The time from each to its acknowledgement, which follows the fsync, is measured alternately while a query with
``since: beginning`` reads the file again, and afterwards, with the same queries. The figure is the ratio of the 95th
percentiles.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa

from edge.agent import Agent, open_agent
from edge.config import parse_config
from edge.core import Configured
from edge.process import now_ms
from edge.records import Chunk
from edgewater.model.query import QuerySpec
from edgewater.model.streams import TIME_COLUMN
from edgewater.wire import QueryRef

OUT = Path("bench/out")
PUSH_ROWS, PUSH_EVERY_S = 100, 0.05
START_MS = 1_700_000_000_000
SPEC = {
    "from": "log",
    "group_by": "url",
    "measures": {"n": "count()", "bytes": "sum(bytes)"},
    "window": {"tumbling": "1m"},
    "lateness": "1d",
}
LIVE = QueryRef("live", 1), QuerySpec.from_mapping({**SPEC, "name": "live"})


def _write(path: Path, records: int, seed: int) -> None:
    """Records of an hour, Zipf-distributed over 2,000 groups."""
    rng = np.random.default_rng(seed)
    urls, sizes = rng.zipf(1.2, records) % 2_000, rng.integers(100, 100_000, records)
    times = START_MS + np.arange(records) * 3_600_000 // records
    with path.open("w") as file:
        for url, size, at in zip(urls.tolist(), sizes.tolist(), times.tolist(), strict=True):
            file.write(f'{{"url": "/{url}", "bytes": {size}, "at": {at}}}\n')


def _push(number: int) -> Chunk:
    columns = {
        "url": pa.array([f"/{n % 50}" for n in range(PUSH_ROWS)]),
        "bytes": pa.array(np.full(PUSH_ROWS, 1_000)),
        TIME_COLUMN: pa.array(np.full(PUSH_ROWS, START_MS + 3_600_000 + number)),
    }
    return Chunk("log:http", pa.record_batch(columns), None, None, (), 0)


async def _push_all(agent: Agent, is_over: Any) -> list[float]:
    """Returns latencies in ms of pushes at a fixed rate. The latency of a late push begins when it was due."""
    latencies: list[float] = []
    due_s = time.monotonic()
    while not is_over():
        await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
        await agent.accept(_push(len(latencies)), "log")
        latencies.append(1000 * (time.monotonic() - due_s))
        due_s += PUSH_EVERY_S
    return latencies


async def _measure(directory: Path, rounds: int) -> dict[str, Any]:
    config = parse_config(
        {
            "edge": "bench",
            "center": {"address": "127.0.0.1:1"},
            "state_dir": str(directory / "state"),
            "streams": {
                "log": {
                    "columns": {"url": "string", "bytes": "int64"},
                    "time": {"column": "at", "unit": "ms"},
                    "sources": [{"file": {"path": str(directory / "log.ndjson"), "format": "ndjson"}}, {"http": {}}],
                }
            },
        }
    )
    agent = open_agent(config)
    queries = [LIVE]
    agent.durable.handle(Configured(tuple(queries)))
    agent.outbox.configured.set()
    tasks = [asyncio.create_task(loop) for loop in agent.loops().values()]
    core = agent.durable.core
    while agent.durable.core.streams["log"].is_open("log:file:" + str(directory / "log.ndjson")):
        await asyncio.sleep(0.02)
    records = core.streams["log"].records
    without: list[float] = []
    beside: list[float] = []
    seconds: list[float] = []
    for number in range(rounds):
        began_s = time.monotonic()
        name = f"again{number}"
        again = QueryRef(name, 1), QuerySpec.from_mapping({**SPEC, "name": name, "since": "beginning"})
        agent.durable.handle(Configured((*queries, again)))
        beside += await _push_all(agent, lambda: not agent.durable.state.backfills)
        seconds.append(time.monotonic() - began_s)
        until_s = time.monotonic() + seconds[-1]
        without += await _push_all(agent, lambda until_s=until_s: time.monotonic() >= until_s)
        agent.durable.handle(Configured(tuple(queries)))
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)
    agent.durable.close()
    quantiles = {name: np.percentile(values, [50, 95, 99]).round(2).tolist()
                 for name, values in (("without", without), ("beside", beside))}  # fmt: skip
    return {
        "records": records,
        "pushes": {"without": len(without), "beside": len(beside)},
        "latency_ms_p50_p95_p99": quantiles,
        "p95_ratio": round(quantiles["beside"][1] / quantiles["without"][1], 2),
        "records_per_s": round(records / float(np.median(seconds))),
    }


@click.command()
@click.option("--smoke", is_flag=True, help="A small file and one round.")
def main(smoke: bool) -> None:
    """Prints the latencies with and without a backfill, and their ratio."""
    with tempfile.TemporaryDirectory() as directory:
        _write(Path(directory) / "log.ndjson", 20_000 if smoke else 1_000_000, seed=1)
        result = {"at_ms": now_ms(), **asyncio.run(_measure(Path(directory), 1 if smoke else 3))}
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "backfill.json").write_text(json.dumps(result, indent=2) + "\n")
    click.echo(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
