"""From a window's end to its answer in REST, on real processes: the watermark of Aion against a fixed one.

A center (gateway, Spark job, API) and edges run on loopback. Records are born evenly and pushed to the edges over HTTP
after a delay of their own. Two queries read the same stream: one with an accuracy, one that waits until the stream's
watermark has passed the window's end (`disorder`: the delays' 99.9 % quantile). For each window the time is taken
at which `/live` shows its first answer. Truth is what was sent.

    python -m bench.watermarks_e2e --seconds 60 --edges 3 --rate 500 --mean-delay 200 --json
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np

from bench.watermarks_e2e_edges import Pusher, Schedule, edge_config
from examples.flights.run import Demo, free_port

WINDOW_MS = 3_000
SETTLE_S = 3.0
LEARNING = 5
"""Windows at the beginning that are not counted: of arrivals nothing is known yet."""
ERROR = 0.05


@dataclass
class Listener(threading.Thread):
    """Notes when each answer appears in REST, by query, window and revision."""

    url: str
    seen: dict[tuple[str, int, int], tuple[float, dict[str, Any]]] = field(default_factory=dict)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.stopping = threading.Event()

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        while not self.stopping.is_set():
            try:
                with httpx.stream("GET", f"{self.url}/v1/live", timeout=httpx.Timeout(5, read=2)) as reply:
                    for line in reply.iter_lines():
                        if self.stopping.is_set():
                            return
                        if line.startswith("data:"):
                            self._note(json.loads(line[5:]))
            except httpx.TransportError:
                continue
            except Exception as exc:
                self.failure = exc
                return

    def _note(self, event: dict[str, Any]) -> None:
        if "window" not in event or "revision" not in event:
            return
        start = round(datetime.fromisoformat(event["window"]["start"]).timestamp() * 1000)
        self.seen.setdefault((event["query"], start, event["revision"]), (time.time() * 1000, event))  # noqa: TID251


def specs(disorder_ms: int) -> list[dict[str, Any]]:
    common = {"from": "trips", "measures": {"total": "sum(x)"}, "window": {"tumbling": f"{WINDOW_MS}ms"}}
    return [
        {"name": "aion", **common, "accuracy": {"error": "5%", "confidence": "95%"}, "lateness": "1s"},
        {"name": "fixed", **common},
    ]


def measure(system: Demo, seconds: float, edges: int, rate: float, delay_ms: float, seed: int) -> dict[str, Any]:
    disorder = int(-np.log(0.001) * delay_ms)
    metrics_port = free_port()
    start_center(system, metrics_port)
    ports = [free_port() for _ in range(edges)]
    for spec in specs(disorder):
        system.client.post("/v1/queries", json=spec).raise_for_status()
    for i, port in enumerate(ports):
        config = edge_config(f"e{i}", system.gateway_port, port, system.directory / "state" / f"e{i}", disorder)
        system._start(f"e{i}", ["edge", "run", system._write(f"e{i}.yaml", config)])
    for i, port in enumerate(ports):
        system._until_ready(f"e{i}", f"http://127.0.0.1:{port}/readyz")
    time.sleep(SETTLE_S)  # the queries reach the edges
    listener = Listener(system.url)
    listener.start()
    begin_ms = (int(time.time() * 1000) // WINDOW_MS + 1) * WINDOW_MS  # noqa: TID251
    schedules = [Schedule.make(begin_ms, seconds, rate, delay_ms, seed + i) for i in range(edges)]
    pushers = [Pusher(f"http://127.0.0.1:{p}/v1/streams/trips", s) for p, s in zip(ports, schedules, strict=True)]
    for pusher in pushers:
        pusher.start()
    for pusher in pushers:
        pusher.join()
    time.sleep(SETTLE_S + disorder / 1000)
    listener.stopping.set()
    system.check_alive()
    if listener.failure or any(p.failure for p in pushers):
        raise click.ClickException(f"{listener.failure or [p.failure for p in pushers]}")
    result = summarise(listener, schedules, begin_ms, int(seconds * 1000) // WINDOW_MS)
    return {**result, "job": job_means(httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text)}


def start_center(system: Demo, metrics_port: int) -> None:
    """As `Demo.start_center`, with the job's metrics."""
    (system.directory / "state").mkdir(parents=True)
    config = {
        "data_dir": str(system.directory / "state" / "center"),
        "gateway": {"listen": f"127.0.0.1:{system.gateway_port}"},
        "api": {"listen": f"127.0.0.1:{system.api_port}"},
        "spark": {"metrics": f"127.0.0.1:{metrics_port}"},
    }
    system._start("center", ["center", "run", "--config", system._write("center.yaml", config)])
    system.wait_until_ready()


def job_means(text: str) -> dict[str, float | None]:
    """Mean ms of a batch, and from a frame's arrival at the gateway until it counts; and the job's own coverage."""
    given = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))

    def mean_ms(name: str) -> float | None:
        count = float(given.get(f"{name}_count", 0))
        return round(1000 * float(given[f"{name}_sum"]) / count, 1) if count else None

    coverage = given.get('edgewater_job_interval_coverage_ratio{query="aion"}')
    return {
        "batch_ms": mean_ms("edgewater_job_batch_seconds"),
        "frame_ms": mean_ms("edgewater_job_frame_delay_seconds"),
        "coverage": None if coverage is None else float(coverage),
    }


def summarise(listener: Listener, schedules: list[Schedule], begin_ms: int, windows: int) -> dict[str, Any]:
    result: dict[str, Any] = {"machine": {"cores": os.cpu_count(), "load": [round(x, 1) for x in os.getloadavg()]}}
    for query in ("aion", "fixed"):
        waits, given, chosen, errors, held, met = [], [], [], [], [], []
        for n in range(min(LEARNING, windows - 1), windows):
            start = begin_ms + n * WINDOW_MS
            first = listener.seen.get((query, start, 1))
            if first is None:
                continue
            at_ms, answer = first
            cell = answer["data"][0]["total"]
            truth = sum(s.truth(start, start + WINDOW_MS) for s in schedules)
            waits.append(at_ms - start - WINDOW_MS)
            given.append(answer["quality"]["staleness_ms"])
            chosen.append(answer["quality"].get("accuracy", {}).get("waited_ms") or 0)
            errors.append(abs(cell["estimate"] - truth) / truth)
            held.append(cell["lower"] <= truth * (1 + 1e-9) and truth * (1 - 1e-9) <= cell["upper"])
            met.append(answer["contract"]["met"])
        result[query] = {
            "windows": len(waits), "of": windows - LEARNING,
            "ms_p50": round(float(np.percentile(waits, 50)), 1) if waits else None,
            "ms_p95": round(float(np.percentile(waits, 95)), 1) if waits else None,
            "given_ms_p50": round(float(np.percentile(given, 50)), 1) if given else None,
            "given_ms_p95": round(float(np.percentile(given, 95)), 1) if given else None,
            "chosen_wait_ms_p50": round(float(np.percentile(chosen, 50)), 1) if chosen else None,
            "chosen_wait_ms_p95": round(float(np.percentile(chosen, 95)), 1) if chosen else None,
            "within_error": round(float(np.mean(np.array(errors) <= ERROR)), 4) if errors else None,
            "error_p95": round(float(np.percentile(errors, 95)), 5) if errors else None,
            "interval_holds": round(float(np.mean(held)), 4) if held else None,
            "met": round(float(np.mean(met)), 4) if met else None,
        }  # fmt: skip
    return result


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="For how long records are born.")
@click.option("--edges", default=3, show_default=True)
@click.option("--rate", default=500.0, show_default=True, help="Records a second and edge.")
@click.option("--mean-delay", default=200.0, show_default=True, help="Of the exponential delays, ms.")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(seconds: float, edges: int, rate: float, mean_delay: float, seed: int, as_json: bool) -> None:
    """Window end to REST, on real processes."""
    directory = Path(tempfile.mkdtemp(prefix="edgewater-e2e-"))
    system = Demo(directory, seconds)
    try:
        result = measure(system, seconds, edges, rate, mean_delay, seed)
    except BaseException:
        click.echo(f"logs are kept in {directory}", err=True)
        raise
    else:
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        system.stop()
    if as_json:
        json.dump(result, sys.stdout, indent=1)
        return
    for query, row in result.items():
        click.echo(f"{query:8}" + "  ".join(f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
