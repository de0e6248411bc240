"""The cost of one edge by records per second: CPU time and memory of a real agent, with a real gateway and no job."""

from __future__ import annotations

import contextlib
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

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
COMMANDS = ("--help", "query --help", "top --help", "edge run --help", "center --help")
REPLAYED, FOLLOWED, STDIN, PUSHED = "replayed", "followed", "standard input", "pushed"
APPENDS_S, PUSHES_S = 0.01, 0.05
"""Time between two appends of the writer to the file that the edge follows, and between two pushes."""
WITHIN_S = 60.0
FOUR = (["package"], ["country"], ["package", "country"], [])
"""Key columns of four queries."""
REST, HEADLINE = "at rest", "1000 records/s, replayed, exact"


def measure(smoke: bool) -> dict[str, Any]:
    """Returns rows by input, rate and budget: percent of a core, MiB, and ms from a window's end until its last frame
    arrived.

    Then an edge at rest, and the CPU time of commands.
    """
    seconds, warm_s = (2, 2) if smoke else (SECONDS, WARM_S)
    rows: dict[str, Any] = {}
    for rate in RATES if not smoke else (1_000,):
        for name, budget in BUDGETS.items() if not smoke else (("exact", {}),):
            rows[f"{rate} records/s, replayed, {name}"] = _edge([_query("q", **budget)], rate, seconds, warm_s)
        if not smoke:
            rows[f"{rate} records/s, followed"] = _edge([_query("q")], rate, seconds, warm_s, FOLLOWED)
    accuracy = {"accuracy": {"error": "5%", "confidence": "95%", "measure": "n"}, "lateness": "10s"}
    for name, source, query in (
        ("standard input", STDIN, _query("q")),
        ("pushed", PUSHED, _query("q")),
        ("followed, accuracy", FOLLOWED, _query("q", group_by=[], **accuracy)),
    ):
        rows[f"1000 records/s, {name}"] = _edge([query], 1_000, seconds, warm_s, source)
    four = [_query(f"q{n}", group_by=keys) for n, keys in enumerate(FOUR)]
    rows["1000 records/s, followed, four queries"] = _edge(four, 1_000, seconds, warm_s, FOLLOWED)
    rows[REST] = _edge([], 0, seconds, warm_s, FOLLOWED)
    return rows | {"cli_cpu_s": {words: _cli_cpu_s(words) for words in COMMANDS[: 2 if smoke else None]}}


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
    queries: list[dict[str, Any]], rate: int, seconds: float, warm_s: float, source: str = REPLAYED
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
            with _running(directory, port, rate, seconds + warm_s + 30, source) as (process, url):
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
    directory: Path, port: int, rate: int, seconds: float, source: str
) -> Iterator[tuple[psutil.Process, str]]:
    """Runs an edge whose records begin in two seconds."""
    listen, file = free_address(), directory / "downloads.csv"
    begin_ms = (now_ms() + 2_999) // 1000 * 1000
    table = generate_downloads(int(rate * seconds), begin_ms, begin_ms + int(1000 * seconds))
    stream: dict[str, Any] = {"columns": COLUMNS, "time": {"column": "at_ms", "unit": "ms"}}
    stream["sources"] = [
        {"stdin": {"format": "csv"}} if source == STDIN
        else {"http": {}} if source == PUSHED
        else {"file": {"path": str(file), "format": "csv", "follow": source == FOLLOWED}}
    ]  # fmt: skip
    stop = threading.Event()
    header = ",".join(table.column_names) + "\n"
    if source == FOLLOWED:
        file.write_text(header)
    elif source == REPLAYED:
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
    edge = subprocess.Popen(
        [sys.executable, "-m", "edgewater", "edge", "run", str(path), "--log-level", "error"],
        stdin=subprocess.PIPE,
        text=True,
    )
    if source == FOLLOWED:
        write, every_s = _appender(file.open("a")), APPENDS_S
    elif source == STDIN:
        assert edge.stdin is not None
        write, every_s = _appender(edge.stdin), APPENDS_S
        write(header)
    else:
        client = httpx.Client(headers={"Content-Type": "text/csv"})
        write, every_s = (
            lambda text: client.post(f"http://{listen}/v1/streams/downloads", content=header + text),
            PUSHES_S,
        )
    writer = threading.Thread(target=_write, args=(write, every_s, table, stop))
    if source != REPLAYED:
        writer.start()
    try:
        yield psutil.Process(edge.pid), f"http://{listen}"
    finally:
        stop.set()
        if source != REPLAYED:
            writer.join()
        edge.terminate()
        edge.wait()


def _appender(file: TextIO) -> Callable[[str], Any]:
    def append(text: str) -> None:
        file.write(text)
        file.flush()

    return append


def _write(write: Callable[[str], Any], every_s: float, table: Any, stop: threading.Event) -> None:
    """Writes the records at their event times."""
    times, row = table["at_ms"].to_numpy(), 0
    columns = [pc.cast(column, "string") for column in table.columns]
    lines = pc.binary_join_element_wise(*columns, ",").to_pylist()
    while not stop.wait(every_s):
        end = int(times.searchsorted(now_ms()))
        if end > row:
            with contextlib.suppress(OSError, httpx.TransportError):  # the edge does not listen yet
                write("\n".join(lines[row:end]) + "\n")
                row = end


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


def _cli_cpu_s(words: str) -> float:
    """Returns the CPU seconds of a command, the minimum of three runs."""
    used = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "edgewater", *words.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"COLUMNS": "80"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return round(min(used), 3)
