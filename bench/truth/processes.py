"""Early answers of real agents, gateway, Spark and REST at speed 1, on the records of `bench.truth.early_answers`.

One run serves all cases of a seed. Edges read a stream per kind of data, pushed over HTTP at the time of arrival. The
first answer to each window in `/v1/live` is counted if it is early. For the cold state, queries are registered one
after the other. Each has its own condition, so that none uses another query's history.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.early_answers_e2e.__main__ import LiveListener, sleep_until
from bench.early_answers_e2e.edges import PushSchedule, pusher, start_edges
from bench.outcome import logs_kept_on_failure
from bench.truth.arrivals import SOURCES, WINDOW_MS, LateRecords
from bench.truth.cases import Case, State, Tallies, Tally
from bench.truth.early_answers import COLD_WINDOWS, ERROR, SUBSTREAM_MS, WARM_UP
from sim.demo.run import Demo

RATE = 200.0
"""Records per second, edge and stream."""
STREAMS = {"exponential": ("exponential delays", "", 3_000), "flips": ("flipping correlation", "flips", 8_000)}
"""By stream: the data, the additional event (`LateRecords`), and disorder and lateness in ms."""
ASKED = (("count", 0.95), ("sum", 0.68), ("sum", 0.95), ("sum", 0.99), ("mean", 0.95))
COLD = "cold"
SETTLE_S = 3.0
"""Time for a query to reach the edges."""

Schedules = Sequence[PushSchedule]


def cases() -> Iterator[Case]:
    for stream, (data, _, _) in STREAMS.items():
        states: tuple[State, ...] = ("cold", "steady") if stream == "exponential" else ("steady",)
        for state in states:
            run = partial(_tallies, stream, state)
            yield Case(f"{data}, {state}", data, state, "processes", run, trials=300, smoke=0)


def _tallies(stream: str, state: State, seed: int, trials: int) -> Tallies:
    return run(seed, trials)[stream, state]


@lru_cache(maxsize=1)
def run(seed: int, windows: int) -> dict[tuple[str, State], Tallies]:
    """Starts a center and edges, pushes records for this many windows, and counts the answers."""
    with logs_kept_on_failure(Demo(Path(tempfile.mkdtemp(prefix="edgewater-truth-")), 0.0)) as system:
        return _measure(system, seed, windows + WARM_UP)


def spec(name: str, stream: str, measure: str, confidence: float, **parts: object) -> dict[str, Any]:
    """Returns a query."""
    return {
        "name": name, "from": stream, "measures": {"total": "count()" if measure == "count" else f"{measure}(x)"},
        "window": {"tumbling": f"{WINDOW_MS}ms"}, "lateness": f"{STREAMS[stream][2]}ms", **parts,
        "accuracy": {
            "error": f"{100 * ERROR:g}%", "confidence": f"{100 * confidence:g}%", "measure": "total",
            "substream": f"{SUBSTREAM_MS}ms",
        },
    }  # fmt: skip


def schedules(stream: str, seed: int, windows: int, begin_ms: int) -> list[PushSchedule]:
    """Returns the records that are pushed to each edge."""
    records = LateRecords("exponential", event=STREAMS[stream][1], windows=windows, seed=seed, rate=RATE)
    steps = [records.window(index) for index in range(windows)]
    source, born, arrival, value = (
        np.concatenate([getattr(step, name) for step in steps])
        for name in ("source", "event_ms", "arrival_ms", "value")
    )
    result = []
    for edge in range(SOURCES):
        mine = np.flatnonzero(source == edge)
        mine = mine[np.argsort(arrival[mine], kind="stable")]
        event_ms = begin_ms + np.floor(born[mine]).astype(np.int64)
        result.append(PushSchedule(event_ms, begin_ms + np.ceil(arrival[mine]), np.round(value[mine], 6)))
    return result


def _measure(system: Demo, seed: int, windows: int) -> dict[tuple[str, State], Tallies]:
    system.start_center()
    names = {}
    for stream in STREAMS:
        for measure, confidence in ASKED:
            name = f"{stream}_{measure}_{round(100 * confidence)}"
            names[name] = stream, measure, confidence
            system.client.post("/v1/queries", json=spec(name, stream, measure, confidence)).raise_for_status()
    disorder_ms = {stream: each_ms for stream, (_, _, each_ms) in STREAMS.items()}
    ports = start_edges(system, [f"e{edge}" for edge in range(SOURCES)], disorder_ms)
    time.sleep(SETTLE_S)
    listener = LiveListener(system.url)
    listener.start()
    begin_ms = (int(time.time() * 1000) // WINDOW_MS + 2) * WINDOW_MS  # noqa: TID251
    pushed = {stream: schedules(stream, seed, windows, begin_ms) for stream in STREAMS}
    pushers = [
        pusher(f"http://127.0.0.1:{ports[edge]}/v1/streams/{stream}", each)
        for stream, edges in pushed.items()
        for edge, each in enumerate(edges)
    ]
    for each in pushers:
        each.start()
    cold = _ask_again(system, begin_ms, windows)
    for each in pushers:
        each.join()
    time.sleep(SETTLE_S + max(disorder_ms.values()) / 1000)
    listener.stopping.set()
    system.check_alive()
    for failure in (listener.failure, *(each.failure for each in pushers)):
        if failure is not None:
            raise failure
    result: dict[tuple[str, State], Tallies] = {(stream, "steady"): {} for stream in STREAMS}
    result["exponential", "cold"] = {}
    for name, (stream, measure, confidence) in names.items():
        first = begin_ms + WARM_UP * WINDOW_MS
        starts = range(first, begin_ms + windows * WINDOW_MS, WINDOW_MS)
        count(result[stream, "steady"], listener.seen, name, starts, measure, confidence, pushed[stream])
    for name, first in cold.items():
        starts = range(first, first + COLD_WINDOWS * WINDOW_MS, WINDOW_MS)
        count(result["exponential", "cold"], listener.seen, name, starts, "sum", 0.95, pushed["exponential"])
    return result


def _ask_again(system: Demo, begin_ms: int, windows: int) -> dict[str, int]:
    """Registers a new query every `COLD_WINDOWS` windows, and deletes the one before the last.

    Returns:
        By query, the start of its first window: the first after it has reached the edges.
    """
    settle = 1 + round(1000 * SETTLE_S) // WINDOW_MS
    first: dict[str, int] = {}
    for number, window in enumerate(range(WARM_UP, windows - COLD_WINDOWS - settle, COLD_WINDOWS)):
        sleep_until(begin_ms + window * WINDOW_MS)
        name = f"{COLD}_{number}"
        if number > 2:
            system.client.delete(f"/v1/queries/{COLD}_{number - 3}").raise_for_status()
        query = spec(name, "exponential", "sum", 0.95, where=f"x > {-1 - number}")
        system.client.post("/v1/queries", json=query).raise_for_status()
        first[name] = begin_ms + (window + settle) * WINDOW_MS
    return first


def count(
    result: Tallies,
    seen: dict[tuple[str, int, int], tuple[float, dict[str, Any]]],
    name: str,
    starts: range,
    measure: str,
    confidence: float,
    pushed: Schedules,
) -> None:
    """Adds the first answers to windows of a query, if they are early."""
    interval = result.setdefault((f"early {measure}", confidence), Tally())
    met = result.setdefault((f"early {measure}, met", confidence), Tally())
    first = {start: revision for query, start, revision in sorted(seen, reverse=True) if query == name}
    for start in starts:
        if start not in first:
            continue
        _, answer = seen[name, start, first[start]]
        if answer["phase"] != "early":
            continue
        inside = [(s.event_ms >= start) & (s.event_ms < start + WINDOW_MS) for s in pushed]
        number = float(sum(int(rows.sum()) for rows in inside))
        total = float(sum(float(s.values[rows].sum()) for s, rows in zip(pushed, inside, strict=True)))
        truth = {"count": number, "sum": total, "mean": total / max(number, 1.0)}[measure]
        cell, slack, within = answer["data"][0]["total"], 1e-9 * abs(truth), ERROR * abs(truth)
        interval.note(cell["lower"], cell["upper"], truth, slack)
        if answer["contract"]["met"]:
            met.note(truth - within, truth + within, cell["estimate"], slack)
