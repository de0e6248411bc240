"""The cost of one edge by records per second: CPU time and memory of a real agent, with a real gateway and no job."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow.compute as pc
import yaml
from pyarrow import csv

from bench.compare.workload import COLUMNS, generate_downloads
from bench.scale.sessions import start_gateway
from center.catalog import Catalog
from edge.process import now_ms
from edgewater.model.query import QuerySpec
from sim.demo.ports import free_address, free_port

WINDOW_MS = 5_000
RATES, SECONDS, WARM_S = (40, 1_000, 10_000), 20, 6
BUDGETS: dict[str, dict[str, Any]] = {"exact": {}, "1 % and 2 s": {"budget": {"error": 0.01, "staleness": "2s"}}}
APPENDS_S = 0.01
"""Time between two appends of the writer to the file that the edge follows."""
WITHIN_S = 60.0
FOUR = (["package"], ["country"], ["package", "country"], [])
"""Key columns of four queries."""
REST = "at rest"


def measure(smoke: bool) -> dict[str, Any]:
    """Returns rows by input, rate and budget, and of an edge at rest.

    A row has percent of a core, MiB, and ms from a window's end until its last frame arrived.
    """
    seconds, warm_s = (2, 2) if smoke else (SECONDS, WARM_S)
    rows: dict[str, Any] = {}
    for rate in RATES if not smoke else (1_000,):
        for name, budget in BUDGETS.items() if not smoke else (("exact", {}),):
            rows[f"{rate} records/s, replayed, {name}"] = _edge([_query("q", **budget)], rate, seconds, warm_s)
        if not smoke:
            rows[f"{rate} records/s, followed"] = _edge([_query("q")], rate, seconds, warm_s, follow=True)
    four = [_query(f"q{n}", group_by=keys) for n, keys in enumerate(FOUR)]
    rows["1000 records/s, followed, four queries"] = _edge(four, 1_000, seconds, warm_s, follow=True)
    rows[REST] = _edge([], 0, seconds, warm_s, follow=True)
    return rows


def _query(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "from": "downloads",
        "group_by": ["package", "country"],
        "measures": {"bytes": "sum(size)", "n": "count()"},
        "window": {"tumbling": f"{WINDOW_MS}ms"},
        **changes,
    }


def _edge(
    queries: list[dict[str, Any]], rate: int, seconds: float, warm_s: float, *, follow: bool = False
) -> dict[str, float]:
    """Runs an edge on generated records; measures it for `seconds` after `warm_s`."""
    with tempfile.TemporaryDirectory() as folder:
        directory, port = Path(folder), free_port()
        catalog = Catalog(f"sqlite:///{directory}/catalog.db")
        for query in queries:
            if "budget" in query and "error" in query["budget"]:
                largest = max(rate * WINDOW_MS * 1_000, 1)
                budget = query["budget"]
                query = {**query, "budget": {**budget, "error": {"bytes": int(budget["error"] * largest)}}}
            catalog.queries.register(QuerySpec.from_mapping(query), now_ms())
        catalog.close()
        gateway = start_gateway(directory, port)
        try:
            with _running(directory, port, rate, seconds + warm_s + 30, follow) as (process, url):
                _await_session(url, process)
                time.sleep(warm_s)
                used_s, began_s, began_ms = _cpu_s(process), time.perf_counter(), now_ms()
                records = _records(url)
                time.sleep(seconds)
                used_s, took_s = _cpu_s(process) - used_s, time.perf_counter() - began_s
                records = _records(url) - records
                memory = _memory_mib(process)
            closes_ms = _closes_ms(directory / "catalog.db", began_ms)
        finally:
            gateway.kill()
            gateway.wait()
    closes = {f"close_ms_p{q}": round(float(np.percentile(closes_ms, q))) for q in (50, 95)} if closes_ms else {}
    return {
        "core_percent": round(100 * used_s / took_s, 2),
        "us_per_record": round(used_s / records * 1e6, 1) if records else 0.0,
        "records_s": round(records / took_s),
        **memory,
        **closes,
    }


def _closes_ms(catalog: Path, since_ms: int) -> list[int]:
    """Returns, for each window from then on, the time from its end until its last frame has arrived at the gateway."""
    with closing(sqlite3.connect(catalog)) as connection:
        rows = connection.execute("SELECT name, through_ms, received_at_ms FROM frames ORDER BY received_at_ms")
        first: dict[tuple[str, int], int] = {}
        for name, through_ms, received_ms in rows:
            end_ms = through_ms // WINDOW_MS * WINDOW_MS
            first.setdefault((name, end_ms), received_ms - end_ms)
    return [took for (_, end_ms), took in first.items() if end_ms >= since_ms]


@contextmanager
def _running(
    directory: Path, port: int, rate: int, seconds: float, follow: bool
) -> Iterator[tuple[psutil.Process, str]]:
    """Runs an edge whose records begin in two seconds. It replays a file, or follows a file that grows."""
    listen, file = free_address(), directory / "downloads.csv"
    begin_ms = (now_ms() + 2_999) // 1000 * 1000
    table = generate_downloads(int(rate * seconds), begin_ms, begin_ms + int(1000 * seconds))
    stream: dict[str, Any] = {"columns": COLUMNS, "time": {"column": "at_ms", "unit": "ms"}}
    stream["sources"] = [{"file": {"path": str(file), "format": "csv", "follow": follow}}]
    if follow:
        file.write_text(",".join(table.column_names) + "\n")
    else:
        at = datetime.fromtimestamp(begin_ms / 1000, UTC).isoformat()
        stream["replay"] = {"speed": 1, "start": at, "at": at}
        csv.write_csv(table, file, csv.WriteOptions(quoting_style="none"))
    config = {
        "edge": "e0",
        "center": {"address": f"127.0.0.1:{port}"},
        "state_dir": str(directory / "state"),
        "http": {"listen": listen},
        "streams": {"downloads": stream},
    }
    path = directory / "edge.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "edgewater", "edge", "run", str(path), "--log-level", "error"]
    edge = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    stop = threading.Event()
    writer = threading.Thread(target=_append, args=(file, table, stop))
    if follow:
        writer.start()
    try:
        yield psutil.Process(edge.pid), f"http://{listen}"
    finally:
        stop.set()
        if follow:
            writer.join()
        edge.terminate()
        edge.wait()


def _append(path: Path, table: Any, stop: threading.Event) -> None:
    """Appends the records at their event times."""
    times, row = table["at_ms"].to_numpy(), 0
    columns = [pc.cast(column, "string") for column in table.columns]
    lines = pc.binary_join_element_wise(*columns, ",").to_pylist()
    with path.open("a") as file:
        while not stop.wait(APPENDS_S):
            end = int(times.searchsorted(now_ms()))
            file.write("".join(f"{line}\n" for line in lines[row:end]))
            file.flush()
            row = max(row, end)


def _await_session(url: str, process: psutil.Process) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        try:
            if _metric(url, "edgewater_edge_connected") == 1:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline_s or not process.is_running():
            raise RuntimeError("the edge has no session with the gateway")
        time.sleep(0.2)


def _metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)


def _records(url: str) -> float:
    return _metric(url, "edgewater_edge_records_total")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _memory_mib(process: psutil.Process) -> dict[str, float]:
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in status if line.startswith(("VmRSS", "VmHWM"))}
    return {"rss_mib": round(kib["VmRSS"] / 1024, 1), "peak_rss_mib": round(kib["VmHWM"] / 1024, 1)}
