"""Live streams beside a large query: the time from the commit of an answer until a client has its event.

    python -m bench.live_stream [--seconds 10] [--groups 20000] [--rate 10] [--json] [--smoke]

An API process serves two queries over one result store: `large`, with many groups, is revised `--rate` times a second,
`small`, with ten groups, twice a second. Each client is a process with one stream. `cpu_s` is the CPU time of the API
process. The bench writes the answers in place of the job, so no Spark and no edge takes part.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
import psutil
from sqlalchemy import insert, select, update

from center.results.schema import answers, counters
from edgewater.model.registered_query import RegisteredQuery
from sim.demo.ports import free_address
from tests.center.api.conftest import HOUR, T0, Desk

SMALL_PER_S = 2.0
VARIANTS = 10
"""Number of different data sets of the large query. Consecutive ones differ in one group of a hundred."""
STREAMS = {
    "small": "/v1/queries/small/live",
    "large": "/v1/queries/large/live",
    "large, changes": "/v1/queries/large/live?changes=true",
    "large, summary": "/v1/queries/large/live?summary=true",
    "large, one group": "/v1/queries/large/live?group=carrier:p-00001",
    "all, summary": "/v1/live?summary=true",
}


@dataclass(frozen=True)
class Writer:
    """Stores further revisions of a query's only window, as the job does."""

    desk: Desk
    query: RegisteredQuery
    synopses: tuple[bytes, ...]

    def write(self, revision: int) -> float:
        """Commits a revision; returns the wall time of the commit in seconds."""
        with self.desk.results._engine.begin() as connection:
            chosen = (answers.c.query == self.query.key) & (answers.c.revision == 1)
            (row,) = connection.execute(select(answers).where(chosen)).mappings()
            counter = counters.c.name == "answer"
            connection.execute(update(counters).where(counter).values(value=counters.c.value + 1))
            number = connection.execute(select(counters.c.value).where(counter)).scalar_one()
            changed = {"revision": revision, "synopsis": self.synopses[revision % len(self.synopses)]}
            connection.execute(insert(answers), [{**row, "answer_id": number, **changed}])
        return time.time_ns() / 1e9


def _client(url: str, seen: Connection) -> None:
    """Runs in a process: sends (query, revision, wall time, bytes) of each answer."""
    with httpx.stream("GET", url, timeout=60) as response:
        pieces: list[bytes] = []
        for chunk in response.iter_raw():
            pieces.append(chunk)
            if not chunk.endswith((b"\r\n\r\n", b"\n\n")):
                continue
            arrived = time.time_ns() / 1e9
            for event in b"".join(pieces).replace(b"\r\n", b"\n").split(b"\n\n"):
                lines = dict(line.split(b": ", 1) for line in event.split(b"\n") if b": " in line)
                if lines.get(b"event") == b"answer":
                    answer = json.loads(lines[b"data"])
                    seen.send((answer["query"], answer["revision"], arrived, len(event)))
            pieces = []


def _prepare(desk: Desk, name: str, groups: int, variants: int) -> Writer:
    query = desk.register(name=name, edges=["jfk"], measures={"n": "count()", "miles": "sum(distance)"})
    synopses = []
    for variant in range(variants):
        flights = {f"p-{i:05}": 1 + (i % 100 == variant) for i in range(groups)}
        desk.report(query, "jfk", T0 + variant * HOUR, flights)
        synopses.append(desk.results.answer(query.ref, T0 + variant * HOUR, 1).synopsis)
    with desk.results._engine.begin() as connection:
        connection.execute(answers.delete().where((answers.c.query == query.key) & (answers.c.window_start_ms > T0)))
        connection.execute(answers.delete().where((answers.c.query == query.key) & (answers.c.revision > 1)))
    return Writer(desk, query, tuple(s for s in synopses if s is not None))


def measure(folder: Path, groups: int, rate: float, seconds: float, names: list[str]) -> list[dict[str, Any]]:
    desk = Desk(folder)
    desk.connect("jfk")
    writers = {"large": _prepare(desk, "large", groups, VARIANTS), "small": _prepare(desk, "small", 10, 3)}
    address = free_address()
    stores = [f"{name}_url=sqlite:///{folder}/{name}.db" for name in ("catalog", "results")]
    options = [*stores, f"api.listen={address}"]
    command = [sys.executable, "-m", "edgewater", "center", "api", "--data-dir", str(folder), "--log-level", "error"]
    api = subprocess.Popen([*command, *(x for option in options for x in ("--set", option))])
    clients: list[Any] = []
    try:
        _until_served(f"http://{address}/livez")
        readers = {}
        for name in names:
            readers[name], theirs = multiprocessing.Pipe(duplex=False)
            clients.append(multiprocessing.Process(target=_client, args=(f"http://{address}{STREAMS[name]}", theirs)))
            clients[-1].start()
        time.sleep(2)
        process = psutil.Process(api.pid)
        spent = sum(process.cpu_times()[:2])
        committed = _write(writers, rate, seconds)
        time.sleep(2)
        spent = sum(process.cpu_times()[:2]) - spent
        return [_row(name, readers[name], committed, spent) for name in names]
    finally:
        for each in clients:
            each.terminate()
        api.terminate()
        api.wait(30)


def _until_served(url: str) -> None:
    for _ in range(300):
        try:
            httpx.get(url)
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(url)


def _write(writers: dict[str, Writer], rate: float, seconds: float) -> dict[tuple[str, int], float]:
    pace = {"large": 1 / rate, "small": 1 / SMALL_PER_S}
    due_s, revision = dict.fromkeys(pace, 0.0), dict.fromkeys(pace, 1)
    committed = {}
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        name = min(due_s, key=lambda each: due_s[each])
        time.sleep(max(0.0, due_s[name] - now))
        revision[name] += 1
        committed[name, revision[name]] = writers[name].write(revision[name])
        due_s[name] += pace[name]
    return committed


def _row(name: str, reader: Connection, committed: dict[tuple[str, int], float], cpu_s: float) -> dict[str, Any]:
    took, sizes = [], []
    while reader.poll():
        query, revision, arrived, size = reader.recv()
        if (query, revision) in committed:
            took.append(1000 * (arrived - committed[query, revision]))
            sizes.append(size)
    p50, p95 = np.quantile(took, (0.5, 0.95)) if took else (np.nan, np.nan)
    return {
        "stream": name, "events": len(took), "p50_ms": round(p50, 1), "p95_ms": round(p95, 1),
        "max_ms": round(max(took, default=np.nan), 1), "event_kib": round(np.mean(sizes) / 1024, 1) if sizes else None,
        "api_cpu_s": round(cpu_s, 1),
    }  # fmt: skip


@click.command()
@click.option("--seconds", default=10.0, show_default=True)
@click.option("--groups", default=20_000, show_default=True)
@click.option("--rate", default=10.0, show_default=True, help="Revisions of the large query per second.")
@click.option("--stream", "names", multiple=True, type=click.Choice(list(STREAMS)), help="Only these; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON.")
@click.option("--smoke", is_flag=True, help="Check that the bench runs: few groups, two seconds.")
def main(seconds: float, groups: int, rate: float, names: tuple[str, ...], as_json: bool, smoke: bool) -> None:
    """Measure how soon clients see answers beside a large query."""
    if smoke:
        seconds, groups, rate = 2.0, 500, 4.0
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), groups, rate, seconds, list(names) or list(STREAMS))
    for row in rows:
        click.echo(json.dumps(row) if as_json else "  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
