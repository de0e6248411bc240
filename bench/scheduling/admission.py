"""The center's admission, with batches of a simulated duration: by slack and round robin.

200 queries, three edges. Each query's windows end every 10 s. Edges send each frame that is full, and a last
frame that closes the window. A batch takes a fixed time, plus its bytes divided by the machine's rate. The latency of a
window begins when the last edge's closing frame arrives. It ends when the batch of this frame is applied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from bench.scheduling.cells import Row
from center.job.admission import AdmissionPolicy, BatchLimits, LeastSlack, PendingFrame, RoundRobin

STEP_MS = 10_000
FIXED_S = 0.15
BYTES_PER_S = 25e6
CAPACITY = BatchLimits().bytes / (FIXED_S + BatchLimits().bytes / BYTES_PER_S)
"""Bytes per second in full batches."""
FRAMES_PER_WINDOW = 8
CASES = ((0.7, 0), (0.95, 0), (1.05, 0), (1.2, 0), (0.7, 30), (0.9, 30))
"""(load, seconds for which the job was down at the beginning)"""


def admission_rows(queries: int = 200, edges: int = 3, seconds: int = 120, seed: int = 1) -> list[Row]:
    rows: list[Row] = []
    for load, down_s in CASES:
        for name in ("least slack", "round robin"):
            latency_ms, batches = _run(name, load, down_s, queries, edges, seconds, seed)
            p90, p99 = np.quantile(latency_ms, [0.9, 0.99])
            rows.append(
                {
                    "part": "admission",
                    "policy": name,
                    "load": load,
                    "down_s": down_s,
                    "queries": queries,
                    "batches": batches,
                    "windows": len(latency_ms),
                    "latency_ms_mean": float(np.mean(latency_ms)),
                    "latency_ms_p90": float(p90),
                    "latency_ms_p99": float(p99),
                }
            )
    return rows


def _run(
    name: str, load: float, down_s: int, queries: int, edges: int, seconds: int, seed: int
) -> tuple[list[float], int]:
    rng = np.random.default_rng(seed)
    offsets = rng.integers(0, STEP_MS, queries)
    size = load * CAPACITY * STEP_MS / 1e3 / (queries * edges * (FRAMES_PER_WINDOW + 1))
    log = {f"q{q:03}@1": _frames(int(offsets[q]), edges, seconds, size, rng) for q in range(queries)}
    received = {key: [frame.received_at_ms for frame in queue] for key, (queue, _) in log.items()}
    now_s = float(down_s)
    steps = {f"q{q:03}@1": (STEP_MS, int(offsets[q])) for q in range(queries)}
    admission: AdmissionPolicy = RoundRobin() if name == "round robin" else LeastSlack(steps.get)

    def pending(key: str, after: int, through: int) -> Sequence[PendingFrame]:
        return log[key][0][after:through]

    start: dict[str, int] = {}
    latency_ms, batches = [], 0
    awaited = {key: list(closes) for key, (_, closes) in log.items()}
    while any(awaited.values()):
        last = {key: at for key, times in received.items() if (at := bisect_right(times, now_s * 1e3))}
        ends = admission.admit(start, last, pending, BatchLimits())
        if not ends:
            now_s += 0.02
            continue
        taken = sum(f.size for key, end in ends.items() for f in log[key][0][start.get(key, 0) : end])
        took_s = FIXED_S + taken / BYTES_PER_S
        now_s += took_s
        admission.done(ends, took_s)
        batches += 1
        start |= ends
        for key, end in ends.items():
            while awaited[key] and awaited[key][0] <= end:
                closing = log[key][0][awaited[key].pop(0) - 1]
                latency_ms.append(now_s * 1e3 - closing.received_at_ms)
    return latency_ms, batches


def _frames(
    offset_ms: int, edges: int, seconds: int, size: float, rng: np.random.Generator
) -> tuple[list[PendingFrame], list[int]]:
    """Returns a query's frames by position, and the positions of the frames with which the last edge closes a
    window.
    """
    arrivals: list[tuple[int, str, int]] = []
    for edge in range(edges):
        for window, end_ms in enumerate(range(offset_ms + STEP_MS, seconds * 1_000, STEP_MS)):
            filled = rng.integers(end_ms - STEP_MS, end_ms, FRAMES_PER_WINDOW) + 1
            arrivals += [(int(at), f"edge{edge}", -1) for at in filled]
            arrivals.append((end_ms + int(rng.integers(20, 400)), f"edge{edge}", window))
    arrivals.sort()
    through_ms = [offset_ms + (window + 1) * STEP_MS if window >= 0 else 0 for _, _, window in arrivals]
    frames = [
        PendingFrame(n, max(1, int(rng.gamma(4, size / 4))), at, edge, through_ms[n - 1])
        for n, (at, edge, _) in enumerate(arrivals, 1)
    ]
    closing = {window: n for n, (_, _, window) in enumerate(arrivals, 1) if window >= 0}
    return frames, sorted(closing.values())
