"""The time from a window's end to its answer in the REST API, on real processes: early answers and a fixed watermark.

A center (gateway, Spark job, API) and edges run on loopback. Records have evenly distributed event times and are pushed
to the edges over HTTP after random delays. Two queries read the same stream: one with an accuracy, and one that is
answered when the stream's watermark has passed the window's end (`disorder`: the 99.9 % quantile of the delays). For
each window the bench records when `/live` shows the first answer, and compares it with the records that were sent.

It also reports the stages of that time, from the `/metrics` of the job, and the load of the machine, because latencies
alone do not distinguish a slow product from a busy machine. Run it on a quiet machine.

    python -m bench.early_answers_e2e --seconds 60 --edges 3 --rate 500 --mean-delay 200 --json
"""

from __future__ import annotations

import json
import os
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

from bench.early_answers_e2e.edges import PushSchedule, pusher, start_edges
from bench.early_answers_e2e.machine import MachineSnapshot
from bench.early_answers_e2e.stages import quantiles_ms, scrape, since, stages
from bench.outcome import logs_kept_on_failure
from sim.demo.ports import free_address
from sim.demo.run import Demo

WINDOW_MS = 3_000
SETTLE_S = 3.0
WARM_UP = 5
"""Windows at the start that are not evaluated, because there is no history of arrivals yet."""
ERROR = 0.05
GOAL_P95_MS = 500
QUERIES = ("aion", "fixed")


@dataclass
class LiveListener(threading.Thread):
    """Records when each answer appears in the REST API, by query, window and revision."""

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
    system.start_center()
    for spec in specs(disorder):
        system.client.post("/v1/queries", json=spec).raise_for_status()
    ports = start_edges(system, [f"e{i}" for i in range(edges)], {"trips": disorder})
    time.sleep(SETTLE_S)  # time for the queries to reach the edges
    listener = LiveListener(system.url)
    listener.start()
    begin_ms = (int(time.time() * 1000) // WINDOW_MS + 1) * WINDOW_MS  # noqa: TID251
    schedules = [PushSchedule.make(begin_ms, seconds, rate, delay_ms, seed + i) for i in range(edges)]
    pushers = [pusher(f"http://127.0.0.1:{p}/v1/streams/trips", s) for p, s in zip(ports, schedules, strict=True)]
    for each in pushers:
        each.start()
    metrics = f"http://{system.settings['spark']['metrics']}/metrics"
    # After the last answer of the warm-up, and before the end of the first evaluated window.
    sleep_until(begin_ms + min(WARM_UP + 1, seconds * 1000 / WINDOW_MS) * WINDOW_MS - 200)
    counted_from, machine = scrape(metrics), MachineSnapshot.take(os.getpid())
    for each in pushers:
        each.join()
    sleep_until(begin_ms + seconds * 1000)
    beside = MachineSnapshot.take(os.getpid()).since(machine)
    time.sleep(SETTLE_S + disorder / 1000)
    listener.stopping.set()
    system.check_alive()
    if listener.failure or any(p.failure for p in pushers):
        raise click.ClickException(f"{listener.failure or [p.failure for p in pushers]}")
    grown = since(counted_from, last := scrape(metrics))
    result = {"machine": beside, **summarise(listener, schedules, begin_ms, int(seconds * 1000) // WINDOW_MS)}
    for query in QUERIES:
        result[query]["stages_ms"] = stages(grown, query)
    coverage = last.get(("edgewater_job_interval_coverage_ratio", (("query", "aion"),)))
    whole = {
        name: quantiles_ms(grown, f"edgewater_job_{name}_seconds") for name in ("report_delay", "frame_delay", "batch")
    }
    return {**result, "job": {**{f"{name}_ms": value for name, value in whole.items()}, "coverage": coverage}}


def sleep_until(at_ms: float) -> None:
    time.sleep(max(0.0, at_ms / 1000 - time.time()))  # noqa: TID251


def summarise(listener: LiveListener, schedules: list[PushSchedule], begin_ms: int, windows: int) -> dict[str, Any]:
    """Returns per query, over the windows after the warm-up, the time and the error of the first answers."""
    first: dict[tuple[str, int], tuple[float, dict[str, Any]]] = {}
    for (query, start, _), seen in sorted(listener.seen.items(), key=lambda item: item[0]):
        first.setdefault((query, start), seen)  # a revision that is replaced at once does not appear
    result: dict[str, Any] = {}
    for query in QUERIES:
        rows = [_row(n, first[query, start], schedules) for n in range(windows)
                if (query, start := begin_ms + n * WINDOW_MS) in first]  # fmt: skip
        counted = [row for row in rows if row["window"] >= min(WARM_UP, windows - 1)]
        early = [row["window"] for row in rows if row["early"]]
        result[query] = {
            "windows": len(counted), "of": windows - WARM_UP,
            "ms": _quantiles([row["ms"] for row in counted]),
            "decided_ms": _quantiles([row["decided_ms"] for row in counted]),
            "decided_to_client_ms": _quantiles([row["ms"] - row["decided_ms"] for row in counted]),
            "chosen_wait_ms": _quantiles([row["chosen_wait_ms"] for row in counted]),
            "first_early_window": min(early, default=None),
            "early": sum(row["early"] for row in counted),
            "contract_met": sum(row["met"] for row in counted),
            "within_error": sum(row["error"] <= ERROR for row in counted),
            "interval_stated": sum(row["stated"] for row in counted),
            "interval_holds": sum(row["held"] for row in counted),
            "error_p95": round(float(np.percentile([row["error"] for row in counted], 95)), 5) if counted else None,
        }  # fmt: skip
    return result


def _row(n: int, seen: tuple[float, dict[str, Any]], schedules: list[PushSchedule]) -> dict[str, Any]:
    at_ms, answer = seen
    start = round(datetime.fromisoformat(answer["window"]["start"]).timestamp() * 1000)
    cell, quality = answer["data"][0]["total"], answer["quality"]
    truth = sum(s.truth(start, start + WINDOW_MS) for s in schedules)
    stated = cell["lower"] is not None and cell["upper"] is not None
    return {
        "window": n, "ms": at_ms - start - WINDOW_MS, "early": answer["phase"] == "early",
        "decided_ms": quality["staleness_ms"],
        "chosen_wait_ms": (quality.get("accuracy") or {}).get("waited_ms") or 0,
        "error": abs(cell["estimate"] - truth) / truth, "met": answer["contract"]["met"],
        "stated": stated,
        "held": stated and cell["lower"] <= truth * (1 + 1e-9) and truth * (1 - 1e-9) <= cell["upper"],
    }  # fmt: skip


def _quantiles(values: list[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(values, q)), 1) for q in (50, 95, 99)} if values else {}


def show(result: dict[str, Any]) -> None:
    """Prints the result as text."""
    machine = result["machine"]
    click.echo(
        f"machine: {machine['verdict']}\n  load {machine['load']} on {machine['cores']} cores; during "
        f"{machine['some_waited_for_a_core']:.0%} of the time a thread waited for a core; this bench waited "
        f"{machine['ours_waiting_share']:.0%} of the time in which it could run"
    )
    for query in QUERIES:
        row = result[query]
        goal = f"   goal p95 <= {GOAL_P95_MS}" if query == "aion" else ""
        click.echo(f"{query}: window end to first answer in REST, ms {row['ms']}{goal}")
        keys = ("early", "contract_met", "within_error", "interval_stated", "interval_holds", "error_p95")
        counts = ", ".join(f"{key} {row[key]}" for key in keys)
        click.echo(f"  of {row['windows']}: {counts}; first early answer: window {row['first_early_window']}")
        for key in ("chosen_wait_ms", "decided_ms", "decided_to_client_ms"):
            click.echo(f"  {key:22} {row[key]}")
        for stage, value in row["stages_ms"].items():
            click.echo(f"  {stage + '_ms':22} {value}")
    click.echo(f"job: {result['job']}")


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="Length of the stream, in event time.")
@click.option("--edges", default=3, show_default=True)
@click.option("--rate", default=500.0, show_default=True, help="Records per second and edge.")
@click.option("--mean-delay", default=200.0, show_default=True, help="Mean of the exponential delays, in ms.")
@click.option("--seed", default=1, show_default=True)
@click.option("--smoke", is_flag=True, help="Check that the bench runs: half a minute, one edge, three windows.")
@click.option("--json", "as_json", is_flag=True)
def main(seconds: float, edges: int, rate: float, mean_delay: float, seed: int, smoke: bool, as_json: bool) -> None:
    """Measure the time from a window's end to its answer in the REST API."""
    if smoke:
        seconds, edges, rate = 9.0, 1, 100.0
    directory = Path(tempfile.mkdtemp(prefix="edgewater-e2e-"))
    with logs_kept_on_failure(Demo(directory, seconds, settings={"spark": {"metrics": free_address()}})) as system:
        result = measure(system, seconds, edges, rate, mean_delay, seed)
    if as_json:
        json.dump(result, sys.stdout, indent=1)
        return
    show(result)


if __name__ == "__main__":
    main()
