"""The records of the end-to-end measurement, with delays, and the thread that pushes them to an edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgewater.synopses import FloatArray, IntArray
from sim.demo.ports import free_address
from sim.demo.pusher import Pusher
from sim.demo.run import Demo

PUSH_EVERY_MS = 20


@dataclass(frozen=True)
class PushSchedule:
    """Records in order of arrival. Times in ms since the epoch."""

    event_ms: IntArray
    arrival: FloatArray
    values: FloatArray

    @classmethod
    def make(cls, begin_ms: int, seconds: float, rate: float, delay_ms: float, seed: int) -> PushSchedule:
        rng = np.random.default_rng(seed)
        event_ms = begin_ms + np.sort(rng.uniform(0, seconds * 1000, int(rate * seconds))).astype(np.int64)
        arrival = event_ms + 1 + rng.exponential(delay_ms, len(event_ms))
        order = np.argsort(arrival)
        values = np.round(rng.gamma(2.0, 5.0, len(event_ms)) * (1 + 0.3 * (seed % 5)), 3)
        return cls(event_ms[order], arrival[order], values[order])

    def truth(self, start_ms: int, end_ms: int) -> float:
        return float(self.values[(self.event_ms >= start_ms) & (self.event_ms < end_ms)].sum())


def pusher(url: str, schedule: PushSchedule) -> Pusher:
    """Returns a thread that pushes records at their arrival times, one request per `PUSH_EVERY_MS`."""

    def lines(first: int, end: int) -> str:
        part = slice(first, end)
        records = zip(schedule.event_ms[part].tolist(), schedule.values[part].tolist(), strict=True)
        return "".join(f'{{"t":{t},"x":{x}}}\n' for t, x in records)

    return Pusher(url, schedule.arrival / 1000, lines, PUSH_EVERY_MS / 1000)


def start_edges(system: Demo, names: Sequence[str], disorder_ms: Mapping[str, int]) -> list[int]:
    """Starts edges with these streams, and returns the ports at which they receive pushes when all accept records."""
    configs: dict[str, Any] = {}
    for name in names:
        configs[name] = {
            "edge": name,
            "center": {"address": f"127.0.0.1:{system.gateway_port}"},
            "state_dir": str(system.directory / "state" / name),
            "http": {"listen": free_address()},
            "streams": {
                stream: {
                    "columns": {"x": "float64"},
                    "time": {"column": "t", "unit": "ms"},
                    "disorder": f"{each_ms}ms",
                    "idle": "5s",
                    "sources": [{"http": None}],
                }
                for stream, each_ms in disorder_ms.items()
            },
        }
        system.run_edge(configs[name])
    for name, config in configs.items():
        system.wait_for_edge(name, config)
    return [int(config["http"]["listen"].rpartition(":")[2]) for config in configs.values()]
