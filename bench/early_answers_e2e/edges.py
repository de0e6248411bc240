"""The records of the end-to-end measurement, with delays, and the thread that pushes them to an edge."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from edgewater.synopses import FloatArray, IntArray

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


class Pusher(threading.Thread):
    """Pushes records at their arrival times, one request per `PUSH_EVERY_MS`."""

    def __init__(self, url: str, schedule: PushSchedule) -> None:
        super().__init__(daemon=True)
        self._url, self._schedule = url, schedule
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            with httpx.Client(headers={"content-type": "application/x-ndjson"}, timeout=60) as client:
                self._push(client)
        except Exception as exc:
            self.failure = exc

    def _push(self, client: httpx.Client) -> None:
        s, at = self._schedule, 0
        while at < len(s.arrival):
            now = time.time() * 1000  # noqa: TID251
            to = int(np.searchsorted(s.arrival, now))
            if to > at:
                lines = (
                    f'{{"t":{b},"x":{v}}}'
                    for b, v in zip(s.event_ms[at:to].tolist(), s.values[at:to].tolist(), strict=True)
                )
                client.post(self._url, content="\n".join(lines) + "\n").raise_for_status()
                at = to
            time.sleep(max(0.0, PUSH_EVERY_MS / 1000 - (time.time() * 1000 - now) / 1000))  # noqa: TID251


def edge_config(name: str, gateway_port: int, port: int, state: Path, disorder_ms: int) -> dict[str, Any]:
    return {
        "edge": name,
        "center": {"address": f"127.0.0.1:{gateway_port}"},
        "state_dir": str(state),
        "http": {"listen": f"127.0.0.1:{port}"},
        "streams": {
            "trips": {
                "columns": {"x": "float64"},
                "time": {"column": "t", "unit": "ms"},
                "disorder": f"{disorder_ms}ms",
                "idle": "5s",
                "sources": [{"http": None}],
            }
        },
    }
