"""Scenarios in virtual time, for values of constants. Each returns costs: the less, the better."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.budgets.cells import DEFAULT, OPTIMAL, WARM_UP, Cell, Setting, measure
from bench.budgets.traces import zipf
from bench.budgets.workload import BudgetsSize
from bench.least_bytes import fewest, generated
from bench.least_bytes import measure as measure_least
from edgewater.model.query import QuerySpec
from sim.budgets.link import SimulatedLink
from sim.wire.experiment import run
from tests.edge.uplink.link_world import Sender

WINDOWS, RECORDS = 7, 4_000
WIRE_WINDOW_MS = 10_000
Costs = dict[str, float]


def entries_only(trace: str, kind: str, bandwidth: str, budget: float, seed: int) -> Costs:
    """Returns the costs on a link where only entries take bytes, beside the offline optimum (`bench.budgets`)."""
    size = BudgetsSize(WINDOWS, seed, RECORDS)
    setting, cost = Setting(trace, "sum", bandwidth, kind), "staleness" if kind == "error" else "error"
    row, best = (measure(Cell(setting, budget, policy, size)) for policy in (DEFAULT, OPTIMAL))
    slot = row["slot"] if cost == "staleness" else 1e-4
    lost = np.mean(np.array(row[kind][WARM_UP:]) > budget * (1.0 + 1e-9))
    return {
        "bytes": row["updates_per_window"], cost: float(np.mean(row[cost][WARM_UP:])), "lost": float(lost),
        "regret": (float(np.mean(row[cost][WARM_UP:])) + slot) / (float(np.mean(best[cost][WARM_UP:])) + slot),
    }  # fmt: skip


def four_edges(seed: int) -> Costs:
    """Returns the costs of a combined budget over four edges, with frames of real size (`bench.least_bytes`)."""
    load = generated(5, seed, 4_000, 1_000)
    sums = load.sums()
    limit = 0.01 * float(sums.sum(axis=1).max())
    equal, best = fewest(sums, limit)
    bandwidth = (400.0 + 9.0 * equal / len(sums) / 4) / (load.window_ms / 1000 / 12)
    row = measure_least(load, limit, 0.1, bandwidth)
    costs = {"bytes": row["bytes"], "staleness": row["staleness_p95"], "regret": row["entries"] / best}
    return costs | {"lost": row["late_windows"] / row["windows"] + (row["worst_error"] > 1.0 + 1e-9)}


def wire(bytes_s: float, budget: dict[str, Any], seed: int, windows: int = WINDOWS) -> Costs:
    """Returns the costs of two edges with the production uplink, over packets."""
    trace = zipf(windows, WIRE_WINDOW_MS, records=1_500, groups=600, seed=seed)
    parts = trace.split(np.random.default_rng(seed).integers(0, 2, len(trace)), 2)
    query = QuerySpec.from_mapping({
        "name": "wire", "from": "trace", "group_by": ["key"], "measures": {"value": "sum(value)"},
        "window": {"tumbling": f"{WIRE_WINDOW_MS}ms"}, "edges": ["edge0", "edge1"],
    } | ({"budget": budget} if budget else {}))  # fmt: skip
    out = run(trace, parts, query, SimulatedLink(bytes_s, 30.0, 5.0, seed=seed))
    stale_s = out.staleness[1:] * WIRE_WINDOW_MS / 1000
    limit = budget["error"]["value"] if "error" in budget else np.inf
    lost = (out.error[1:] > limit * (1.0 + 1e-9)) | (stale_s > (1.0 if "staleness" in budget else np.inf))
    error = 1e-3 + float(np.mean(out.relative_error[1:]))
    return {"bytes": out.bytes, "staleness": float(np.mean(stale_s)), "error": error, "lost": float(np.mean(lost))}


RATE_BYTES_S = 4_300.0


def link(
    demand: float, seed: int, *, depth: float = 0.0, delay_ms: float = 50.0, rate: float = RATE_BYTES_S, **settings: Any
) -> Costs:
    """Returns what frames are late and what of the link is unused, with the production flow control alone."""
    model = {name: settings.pop(name) for name in ("trace", "queue_bytes") if name in settings}
    behind = SimulatedLink(rate, delay_ms, 3.0, bucket_bytes=depth, seed=seed, **model)
    sender = Sender(behind, lambda _: demand, seed=seed, **settings).run(WINDOWS + 5)
    until_s = sender.now - sender.window_s
    carried = min(rate * behind.steps()[-1][1] / behind.steps()[0][1], demand / sender.window_s)
    delays = [frame.arrived_s - frame.sent_s for frame in sender.frames if frame.sent_s > 20.0]
    first_s = max(frame.arrived_s for frame in sender.frames if frame.sent_s < 10.0)
    return {
        "late": 1.1 - sender.calibration(20.0), "unused": 0.1 + max(1.0 - sender.use(20.0, until_s) / carried, 0.0),
        "delay": float(np.quantile(delays, 0.9)), "frames": len(sender.frames), "first": first_s,
        "rate": 0.1 + abs(sender.flow.forecast(sender.now).mid_bytes_s / rate - 1.0),
    }  # fmt: skip


ERROR, STALENESS = {"error": {"value": 3e5}}, {"staleness": "1s"}
SCENARIOS: dict[str, Callable[[int], Costs]] = {
    "entries/zipf/error": partial(entries_only, "zipf", "error", "low", 1e-3),
    "entries/rhythm/error": partial(entries_only, "rhythm", "error", "low", 3e-4),
    "entries/zipf/staleness": partial(entries_only, "zipf", "staleness", "low", 0.03),
    "entries/rhythm/staleness": partial(entries_only, "rhythm", "staleness", "low", 0.03),
    "entries/flights/error": partial(entries_only, "flights", "error", "high", 0.01),
    "edges/combined": four_edges,
    "wire/1/exact": partial(wire, 1024, {}),
    "wire/1/error": partial(wire, 1024, ERROR),
    "wire/0.6/combined": partial(wire, 600, {**ERROR, **STALENESS}),
    "wire/0.8/staleness": partial(wire, 800, STALENESS),
    "link/plain": partial(link, 60_000),
    "link/small": partial(link, 15_000, depth=1_600.0),
    "link/bucket": partial(link, 20_000, depth=65_536.0),
    "link/deep": partial(link, 60_000, depth=65_536.0),
    "link/far": partial(link, 60_000, depth=1_600.0, delay_ms=600.0),
    "link/halved": partial(link, 60_000, depth=1_600.0, trace=((0.0, 1.0), (42_000.0, 0.5))),
    "link/pauses": partial(link, 20_000, depth=1_600.0, delay_ms=1.0, pause_s=0.2),
    "link/wide": partial(link, 500_000, delay_ms=5.0, rate=1e7),
    "link/policer": partial(link, 20_000, depth=8_000.0, queue_bytes=0.0),
    "wire/1/bytes": partial(wire, 1024, {"bytes": {"amount": "250KB", "per": "hour"}}, windows=30),
}
