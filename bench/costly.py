"""Six of the most costly requests: when they end, and what they leave to other requests.

    python -m bench.costly [--smoke] [--seconds 20] [--windows 525600]

`left_s`: from the moment at which a client leaves until no thread works for it. `p95_ms`: of `GET …/latest` and of a
registration, idle and while six clients repeat the most costly requests. The clients are another process. With
`--windows`, it measures a roll-up of so many windows of a minute with 100 groups instead.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
import psutil
from fastapi import FastAPI
from sqlalchemy import insert, select

from center.results.schema import answers
from edgewater.model.registered_query import RegisteredQuery
from tests.center.api.conftest import HOUR, SPEC, T0, Desk

RULE = {"alert": "a", "query": "big", "certainly": "n > 3"}
CHECK = {"kind": "alerts", "rules": [RULE], "targets": {"t": {"webhook": {"url": {"env": "HOOK"}}}}}
LINE = json.dumps({"latest": 100, "measure": "miles", "question": "sum", "merge": True})
REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "select": ("POST", f"/v1/sql?end={T0 + 4 * HOUR}", {"json": {"sql": "SELECT * FROM big"}}),
    "promql": ("GET", "/prometheus/api/v1/query_range",
               {"params": {"query": '{__name__=~"big:.*"}', "start": T0 / 1000, "end": T0 / 1000 + 360_000,
                           "step": 60}}),
    "evaluate": ("POST", "/v1/queries/big/evaluate",
                 {"content": (LINE + "\n") * 100, "headers": {"content-type": "application/x-ndjson"}}),
    "roll-up": ("GET", "/v1/queries/big/rollup?every=day", {}),
    "explain": ("GET", f"/v1/queries/big/windows/{T0}/explain", {}),
    "alerts": ("POST", "/v1/alerts/check", {"json": CHECK}),
}  # fmt: skip


def filled(desk: Desk, groups: int, windows: int, **changes: Any) -> RegisteredQuery:
    """Registers a query with the same answer in each window."""
    query = desk.register(lateness="99h", **changes)
    counts = {f"C{n}": 1 for n in range(groups)}
    desk.report(query, "jfk", T0, counts)
    with desk.results._engine.begin() as connection:
        (row,) = connection.execute(select(answers).where(answers.c.query == query.key)).mappings()
        length = row["window_end_ms"] - row["window_start_ms"]
        last = connection.execute(select(answers.c.answer_id).order_by(answers.c.answer_id.desc())).scalars().first()
        for begin in range(1, windows, 5_000):
            starts = {n: T0 + n * length for n in range(begin, min(begin + 5_000, windows))}
            rows = [
                {**row, "answer_id": last + n, "window_start_ms": start, "window_end_ms": start + length}
                for n, start in starts.items()
            ]
            connection.execute(insert(answers), rows)
    return query


def left_s(app: FastAPI, url: str, name: str) -> float | None:
    """Returns how long the work of a request goes on after its client has left; None: it had ended before."""
    method, path, request = REQUESTS[name]
    with httpx.Client(base_url=url) as client:
        try:
            client.request(method, path, **request, timeout=0.5)
            return None
        except httpx.TimeoutException:
            pass
    begin = time.monotonic()
    while app.state.services.costly.limiter.borrowed_tokens:
        time.sleep(0.01)
    return time.monotonic() - begin


def repeat(url: str, name: str, seconds: float) -> dict[str, Any]:
    """Repeats a costly request. Returns the status of the replies, and the longest time."""
    method, path, request = REQUESTS[name]
    replies, ends = list[tuple[int, float]](), time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=120) as client:
        while time.monotonic() < ends:
            begin = time.monotonic()
            status = client.request(method, path, **request).status_code
            replies.append((status, round(time.monotonic() - begin, 2)))
    return {"replies": len(replies), "status": sorted({r[0] for r in replies}), "most_s": max(r[1] for r in replies)}


def p95_ms(url: str, seconds: float, prefix: str) -> dict[str, float]:
    """Returns the 95th percentile of the durations of reads and of registrations."""
    taken: dict[str, list[float]] = {"get": [], "register": []}
    ends, number = time.monotonic() + seconds, 0
    with httpx.Client(base_url=url, timeout=120) as client:
        while time.monotonic() < ends:
            for kind, each in taken.items():
                begin = time.perf_counter()
                if kind == "get":
                    reply = client.get("/v1/queries/small/latest", headers={"cache-control": "no-cache"})
                else:
                    reply = client.post("/v1/queries", json={**SPEC, "name": f"{prefix}{number}"})
                assert reply.is_success, reply.text
                each.append(1000 * (time.perf_counter() - begin))
            number += 1
            time.sleep(0.05)
    return {kind: round(float(np.percentile(each, 95)), 1) for kind, each in taken.items()}


def measure(seconds: float, groups: int, windows: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(Path(folder))
        desk.connect("jfk")
        filled(desk, 5, 1, name="small")
        filled(desk, groups, windows, name="big")
        app = desk.app()
        desk.app = lambda **_: app  # type: ignore[method-assign]
        spawning = multiprocessing.get_context("spawn")
        with desk.served() as url, ProcessPoolExecutor(7, spawning) as clients:
            result: dict[str, Any] = {"left_s": {name: left_s(app, url, name) for name in REQUESTS}}
            result["idle"] = clients.submit(p95_ms, url, seconds, "a").result()
            loads = {name: clients.submit(repeat, url, name, seconds + 2) for name in REQUESTS}
            time.sleep(1)
            result["loaded"] = clients.submit(p95_ms, url, seconds, "b").result()
            result["replies"] = {name: load.result() for name, load in loads.items()}
    return result


def roll_up(windows: int, groups: int) -> dict[str, Any]:
    """Returns the seconds of a roll-up by year, and the memory that it adds."""
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(Path(folder))
        desk.connect("jfk")
        filled(desk, groups, windows, name="minutes", window={"tumbling": "1m"})
        desk.get("/v1/queries/minutes/latest")
        gc.freeze()  # as the processes of a center do
        process = psutil.Process()
        before, peak, done = process.memory_info().rss, 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.05):
                peak = max(peak, process.memory_info().rss)

        watching = threading.Thread(target=watch)
        watching.start()
        begin = time.monotonic()
        reply = desk.get("/v1/queries/minutes/rollup?every=year")
        seconds = time.monotonic() - begin
        done.set()
        watching.join()
        assert reply.status_code == 200, reply.text
        first = reply.json()["answers"][0]
        return {
            "seconds": round(seconds, 1), "added_mib": (peak - before) >> 20,
            "windows": first["quality"]["completeness"]["windows"], "groups": len(first["data"]),
        }  # fmt: skip


@click.command(help=__doc__)
@click.option("--smoke", is_flag=True, help="Check that the bench runs.")
@click.option("--seconds", default=20.0)
@click.option("--windows", default=0, help="Measure a roll-up of so many windows.")
def main(smoke: bool, seconds: float, windows: int) -> None:
    size = (1.0, 50, 4) if smoke else (seconds, 20_000, 100)
    click.echo(json.dumps(roll_up(windows, 100) if windows else measure(*size), indent=1))


if __name__ == "__main__":
    main()
