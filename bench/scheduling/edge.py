"""Sixty queries on one real edge agent that has one core: which order answers sooner, at which load.

Workloads: `equal`: windows of 4 s that all end together, queries that cost the same; `staggered`: windows of 4 s that
end one after the other, three kinds of queries; `mixed`: these kinds with windows of 2, 5, 10 and 20 s; `costs`: as
`staggered`, but every tenth query costs many times as much.

The agent runs as in production (file source, journal, worker), pinned to a core, in a process of its own. Frames are
taken from its outbox and acknowledged at once, instead of a link and a center. The load is the offered work divided by
the work that the agent can do in the CPU time that it gets: the rate follows the share of the core that other processes
leave. Latency is from a window's end until the frame that closes it is durable. Windows that are open at the end count
with the time that they have waited.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge.agent import Agent, open_agent
from edge.config import parse_config
from edge.core import Configured
from edge.process import now_ms
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef

Row = dict[str, Any]

POLICIES = ("klink", "fair", "off")
LOADS = (0.7, 0.95, 1.2, 1.5)
WORKLOADS = {"equal": (4_000,), "staggered": (4_000,), "mixed": (2_000, 5_000, 10_000, 20_000), "costs": (4_000,)}
"""The lengths of the windows in ms."""
QUERIES, STEP_S = 60, 0.05
UNJUDGED_MS = 2_000
"""Windows that end later than this before the end of a run are omitted."""
WARM_UP_S, SETTLE_S = 6.0, 1.5
WARM_UP_LOAD = 0.5
"""Maximum load until `SETTLE_S` before the end of the warm-up. Near its capacity an agent hardly catches up with the
input that it left unread at the start. That would decide the latencies."""
SMOOTHING = 0.05
"""Weight of a step in the moving average of the core's share."""
CAPACITY_RECORDS = 120_000
ASSUMED_COST_S = 1e-5
"""CPU time per record if the agent's capacity is not measured, as in a smoke run."""
MEASURED = ("latency", "records", "core_share", "unread", "queued", "windows")
_NOT_STARTED_S = 120.0


def edge_rows(
    seconds: float = 30.0,
    loads: tuple[float, ...] = LOADS,
    policies: tuple[str, ...] = POLICIES,
    queries: int = QUERIES,
    calibration: int = CAPACITY_RECORDS,
    warm_up_s: float = WARM_UP_S,
    workloads: Iterable[str] = WORKLOADS,
    runs: int = 1,
) -> list[Row]:
    """Returns a row per workload, load and policy: the medians of several runs, with the policies in turn.

    Args:
        calibration: number of records by which the agent's capacity is measured; 0: it is assumed.
    """
    rows = []
    for workload in workloads:
        cost_s = _cost_s(workload, queries, calibration) if calibration else ASSUMED_COST_S
        for load in loads:
            found: dict[str, list[Row]] = {policy: [] for policy in policies}
            for number in range(runs):
                for policy in policies[::-1] if number % 2 else policies:
                    found[policy].append(_measure(policy, workload, load, cost_s, queries, seconds, warm_up_s))
            rows += [_median(each) for each in found.values()]
    return rows


def _median(runs: Sequence[Row]) -> Row:
    def over_runs(key: str) -> Any:
        values = [run[key] for run in runs if run[key] is not None]
        return (float(np.median(values)) if values else None) if key.startswith(MEASURED) else values[0]

    return {key: over_runs(key) for key in runs[0]} | {"runs": len(runs)}


def window_of(workload: str, i: int, queries: int) -> tuple[int, int]:
    """Returns the length and the offset in ms of a query's windows."""
    lengths = WORKLOADS[workload]
    size_ms = lengths[i // 3 % len(lengths)]
    return size_ms, 0 if workload == "equal" else size_ms * i // queries


def specs(workload: str, queries: int) -> tuple[tuple[QueryRef, QuerySpec], ...]:
    """Returns the queries: cheap, filtered and expensive ones in turn; only cheap ones for the workload `equal`."""
    kinds: list[dict[str, Any]] = [
        {"group_by": ["k"], "measures": {"n": "count()", "s": "sum(v)"}},
        {"where": "v > 50", "group_by": ["country"], "measures": {"n": "count()", "most": "max(v)"}},
        {"group_by": ["country"], "measures": {"q": "quantiles(v)"}},
    ]
    result = []
    for i in range(queries):
        size_ms, offset_ms = window_of(workload, i, queries)
        kind = kinds[0 if workload == "equal" else i % len(kinds)]
        if workload == "costs" and i % 10 == 9:
            kind = {"group_by": ["k"], "measures": {"q": "quantiles(v)", "u": "kll(v)", "d": "distinct(country)"}}
        window = {"tumbling": f"{size_ms}ms", "offset": f"{offset_ms}ms"}
        spec = QuerySpec.from_mapping({"name": f"q{i}", "from": "events", "window": window, **kind})
        result.append((QueryRef(f"q{i}", 1), spec))
    return tuple(result)


def _cost_s(workload: str, queries: int, records: int) -> float:
    """Returns the agent's CPU time per record while it reads a backlog."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with (directory / "log.ndjson").open("w") as log:
            log.write(_lines(records, now_ms(), 7))
        agent = _Process(directory, "off", workload, queries)
        agent.wait_for(lambda: agent.status.get("records", 0) >= records)
        cpu_s = agent.stop()["cpu_s"]
    return float(cpu_s) / records


def _measure(
    policy: str, workload: str, load: float, cost_s: float, queries: int, seconds: float, warm_up_s: float
) -> Row:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        log = directory / "log.ndjson"
        log.touch()
        agent = _Process(directory, policy, workload, queries)
        began_s = at_s = time.monotonic()
        due_records, written, before, share = 0.0, 0, 0, agent.core_share()
        while (now_s := time.monotonic()) - began_s < warm_up_s + seconds:
            share += SMOOTHING * (agent.core_share() - share)
            is_warm = now_s - began_s >= warm_up_s - SETTLE_S
            due_records += (now_s - at_s) * (load if is_warm else min(load, WARM_UP_LOAD)) * share / cost_s
            at_s = now_s
            before = written if now_s - began_s < warm_up_s else before
            with log.open("a") as file:
                file.write(_lines(int(due_records), now_ms(), written))
            written, due_records = written + int(due_records), due_records - int(due_records)
            time.sleep(STEP_S)
        first_ms = now_ms() - int(1000 * seconds)
        result = agent.stop()
    latency_ms = _latencies(result, workload, queries, first_ms)
    p50, p99 = (float(np.percentile(latency_ms, p)) if len(latency_ms) else None for p in (50, 99))
    return {
        "part": "edge", "workload": workload, "policy": policy, "load": load, "queries": queries,
        "windows": len(latency_ms),
        "latency_ms_mean": float(np.mean(latency_ms)) if len(latency_ms) else None,
        "latency_ms_p50": p50, "latency_ms_p99": p99,
        "records_s": (written - before) / seconds, "core_share": agent.share,
        "unread_share": 1.0 - result["records"] / max(written, 1), "queued_peak_bytes": result["queued_peak"],
    }  # fmt: skip


def _latencies(
    result: dict[str, Any], workload: str, queries: int, first_ms: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the latency in ms of every window that ended after `first_ms`, and `UNJUDGED_MS` before the end."""
    closed = {(name, start): at for name, start, at in result["closed"]}
    stop_ms, found = result["stopped_ms"], []
    for i in range(queries):
        size_ms, offset_ms = window_of(workload, i, queries)
        start_ms = (first_ms - offset_ms) // size_ms * size_ms + offset_ms
        while (end_ms := start_ms + size_ms) < stop_ms - UNJUDGED_MS:
            found.append(closed.get((f"q{i}", start_ms), stop_ms) - end_ms)
            start_ms = end_ms
    return np.array(found, np.float64)


def _lines(rows: int, at_ms: int, first: int) -> str:
    return "".join(
        f'{{"at":{at_ms},"k":"key{i * 7919 % 1000}","country":"c{i % 10}","v":{i * 31 % 1000}}}\n'
        for i in range(first, first + rows)
    )


class _Process:
    """The agent's process.

    Attributes:
        status: the status that it has written last.
        share: of its core, over its life.
    """

    def __init__(self, directory: Path, policy: str, workload: str, queries: int) -> None:
        self._directory, self.status, self.share = directory, dict[str, Any](), 1.0
        arguments = (directory, policy, workload, queries)
        self._process = multiprocessing.get_context("spawn").Process(target=_agent, args=arguments)
        self._process.start()
        self._ran, self._waited = 0, 0
        self.wait_for(lambda: "records" in self.status)

    def wait_for(self, condition: Any) -> None:
        until_s = time.monotonic() + _NOT_STARTED_S
        while not condition():
            if not self._process.is_alive() or time.monotonic() > until_s:
                self._process.kill()
                raise RuntimeError("the agent of the bench has ended, or does not go on")
            time.sleep(STEP_S)
            path = self._directory / "status.json"
            if path.exists():
                self.status = json.loads(path.read_text())

    def core_share(self) -> float:
        """Returns the CPU time that the agent got since the last call, as a part of the time that it wanted."""
        ran, waited = _times(self._process.pid)
        before = self._ran, self._waited
        self._ran, self._waited = ran, waited
        wanted = ran - before[0] + waited - before[1]
        self.share = ran / max(ran + waited, 1)
        return (ran - before[0]) / wanted if wanted > 0 else 1.0

    def stop(self) -> dict[str, Any]:
        self.core_share()
        (self._directory / "stop").touch()
        self._process.join(_NOT_STARTED_S)
        result: dict[str, Any] = json.loads((self._directory / "result.json").read_text())
        return result


def _times(pid: int | None) -> tuple[int, int]:
    """Returns the ns that all threads ran, and that the event loop's thread waited for the core."""
    ran = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            ran += int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return ran, int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1])


def _agent(directory: Path, policy: str, workload: str, queries: int) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    logging.disable(logging.CRITICAL)
    columns = {"k": "string", "country": "string", "v": "int64"}
    source = {"file": {"path": str(directory / "log.ndjson"), "format": "ndjson", "follow": True}}
    document = {
        "edge": "bench", "state_dir": str(directory / "state"), "center": {"address": "127.0.0.1:1"},
        "http": {"listen": "127.0.0.1:0"},
        "streams": {"events": {"columns": columns, "time": {"column": "at", "unit": "ms"}, "sources": [source]}},
        "limits": {"scheduling": policy, "checkpoint": "1h"},
    }  # fmt: skip
    agent = open_agent(parse_config(document))
    agent.durable.handle(Configured(specs(workload, queries)))
    agent.outbox.configured.set()
    asyncio.run(_serve(agent, directory))


async def _serve(agent: Agent, directory: Path) -> None:
    closed: list[tuple[str, int, int]] = []
    peak, core = 0, agent.durable.core

    async def ship() -> None:
        while True:
            frames = await agent.outbox.take(256 << 10)
            at_ms = now_ms()
            closed.extend((f.query.name, c.slice_start_ms, at_ms) for f in frames for c in f.unpack().closes)
            agent.outbox.on_ack(frames[-1].seq)

    tasks = [asyncio.create_task(loop) for loop in (*agent.loops().values(), ship())]
    before_s = time.process_time()
    while not (directory / "stop").exists():
        state = {"records": core.streams["events"].records}
        (directory / "status.tmp").write_text(json.dumps(state))
        (directory / "status.tmp").rename(directory / "status.json")
        peak = max(peak, core.queued_bytes)
        for task in tasks:
            if task.done():
                task.result()  # a loop of an agent ends only by an error
        await asyncio.sleep(0.1)
    result = {
        "closed": closed, "records": core.streams["events"].records, "queued_peak": peak,
        "cpu_s": time.process_time() - before_s, "stopped_ms": now_ms(),
    }  # fmt: skip
    (directory / "result.json").write_text(json.dumps(result))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    agent.durable.close()
