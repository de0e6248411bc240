"""`python -m bench.least_bytes [--smoke]`: bytes under combined budgets, compared with error budgets alone.

Four production `EdgeCore`s over simulated links, frames of real size, shares by a production `BudgetAllocator`. The
generated trace has about 18,760 groups a window and edges of different rates. The trace of CRAN's downloads has 20,100
in windows of 6 hours. Bytes are compared with the zstd-compressed columns that the query needs. Entries are compared
with the minimum that must be sent under equal shares and under the best constant shares. Writes
bench/out/least-bytes.json.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa

from bench.budgets.traces import ZIPF_EXPONENT
from bench.budgets.workload import CRAN_WINDOW_MS, cran
from bench.data import DOWNLOADS_WEEK, existing
from bench.outcome import OUT, store_result
from center.budgets import BudgetAllocator, BudgetReport
from edge.core.drift import DriftRates
from edge.core.events import BudgetSet
from edgewater.base.streams import EdgeId
from edgewater.model.query import QuerySpec
from edgewater.synopses import FloatArray, IntArray
from sim.budgets.edges import EdgeSimulation, simulate
from sim.budgets.link import SimulatedLink
from sim.budgets.trace import Trace

EDGES = 4
WINDOW_MS = 600_000
RECORDS, GROUPS = 180_000, 40_000
FRAME_BYTES, ENTRY_BYTES = 400.0, 9.0
"""Approximate bytes of a frame in addition to its entries, and of an entry."""
WIDTHS = (6, 6, 9, 10, 6, 8, 6, 6, 7, 7, 4, 6)
STEPS = 60
"""Number of parts into which the best shares divide the budget."""


@dataclass(frozen=True, slots=True)
class LeastWorkload:
    """A trace, the edge of each record, and the column that is summed."""

    name: str
    trace: Trace
    homes: IntArray
    column: str
    window_ms: int

    def sums(self) -> FloatArray:
        """Returns the sums, [window, edge, group]."""
        trace, groups = self.trace, int(self.trace.codes.max()) + 1
        window = (trace.times_ms - trace.times_ms[0] // self.window_ms * self.window_ms) // self.window_ms
        cell = (window * EDGES + self.homes) * groups + trace.codes
        sums = np.bincount(cell, trace.values(self.column), (int(window.max()) + 1) * EDGES * groups)
        return np.asarray(sums.reshape(-1, EDGES, groups), np.float64)

    def raw_bytes(self) -> int:
        """Returns the bytes of the needed columns of all edges: zstd-compressed buffers of Arrow.

        Times are stored as differences of successive records.
        """
        total = 0
        for part in self.trace.split(self.homes, EDGES):
            steps = np.diff(part.times_ms, prepend=part.times_ms[0]).astype(np.int32)
            columns = [part.batch.column(name) for name in (*part.keys, self.column)]
            buffers = [b for c in columns for b in c.buffers() if b is not None] + [pa.py_buffer(steps.tobytes())]
            total += sum(len(pa.compress(b, codec="zstd", asbytes=True)) for b in buffers)
        return total

    def query(self, error: float | None, staleness: float | None) -> QuerySpec:
        """Returns a query with these budgets: an error in the unit of the values, a staleness in windows."""
        budget: dict[str, Any] = {} if error is None else {"error": {"value": error}}
        if staleness is not None:
            budget["staleness"] = f"{round(staleness * self.window_ms)}ms"
        mapping: dict[str, Any] = {
            "name": "least", "from": "trace", "group_by": list(self.trace.keys),
            "measures": {"value": f"sum({self.column})"}, "window": {"tumbling": f"{self.window_ms}ms"},
        }  # fmt: skip
        return QuerySpec.from_mapping({**mapping, "budget": budget} if budget else mapping)


def generated(windows: int, seed: int, records: int = RECORDS, groups: int = GROUPS) -> LeastWorkload:
    """Zipf-distributed items, lognormal integers; edge i has a share of the records in proportion to 1 / i."""
    rng = np.random.default_rng(seed)
    weights, rates = np.arange(1, groups + 1) ** -ZIPF_EXPONENT, 1.0 / np.arange(1, EDGES + 1)
    names = pa.array([f"/shop/item-{i:05d}" for i in rng.permutation(groups)])
    total = windows * records
    times = np.sort(rng.integers(0, windows * WINDOW_MS, total))
    items = rng.choice(groups, total, p=weights / weights.sum())
    values = np.rint(rng.lognormal(10.0, 1.5, total)).astype(np.int64)
    trace = Trace.from_columns(times, {"item": names.take(pa.array(items))}, {"price": values})
    return LeastWorkload("generated", trace, rng.choice(EDGES, total, p=rates / rates.sum()), "price", WINDOW_MS)


def downloads(windows: int, folder: Path) -> LeastWorkload:
    """CRAN's downloads by package, version and country; each record is at a random edge."""
    whole = cran(folder)
    first = whole.times_ms[0] // CRAN_WINDOW_MS * CRAN_WINDOW_MS
    trace = whole.rows(np.flatnonzero(whole.times_ms < first + windows * CRAN_WINDOW_MS))
    homes = np.random.default_rng(0).integers(0, EDGES, len(trace))
    return LeastWorkload("cran", trace, homes, "size", CRAN_WINDOW_MS)


class Allocation:
    """Shares by a production allocator: at each window's end, edges report and get their grants."""

    def __init__(self, limit: float, window_ms: int) -> None:
        self._allocator = BudgetAllocator({"value": limit}, {})
        self._ids = [EdgeId(f"edge-{i}") for i in range(EDGES)]
        self._allocator.set_members(frozenset(self._ids), {})
        self._meters = [DriftRates(window_ms) for _ in self._ids]
        self._window_ms = window_ms

    def __call__(self, ended: int, runs: list[EdgeSimulation]) -> None:
        now_ms = (ended + 1) * self._window_ms
        for _ in range(4):  # reduce, confirm, grow, confirm
            for edge, run, meter in zip(self._ids, runs, self._meters, strict=True):
                pipeline = run.core.queries[run.ref]
                meter.update(pipeline.frames.drift, pipeline.through_ms)
                version, last = pipeline.store.schedule.version, pipeline.store.schedule.last
                shares = last.shares if version else {}  # the first shares are the simulator's
                report = BudgetReport(version, shares, last.from_ms, pipeline.shipper.entry_bytes, dict(meter.per_s))
                assert self._allocator.report(edge, report, now_ms) == []
            self._allocator.rebalance(now_ms, 1 << 50)
            for edge, grant in self._allocator.grants().items():
                run = runs[self._ids.index(edge)]
                run.core.handle(BudgetSet(run.ref, grant.shares, grant.version, grant.from_ms))


def fewest(sums: FloatArray, limit: float) -> tuple[int, int]:
    """Returns the entries that exceed equal shares, and those that exceed the best constant shares."""
    equal = int(np.count_nonzero(sums > limit / EDGES))
    exceeding = [
        [float(np.count_nonzero(sums[:, edge] > limit * step / STEPS)) for step in range(STEPS + 1)]
        for edge in range(EDGES)
    ]
    best = np.array(exceeding[0])
    for counts in exceeding[1:]:
        best = np.array([min(best[k] + counts[n - k] for k in range(n + 1)) for n in range(STEPS + 1)])
    return equal, int(best[STEPS])


def measure(work: LeastWorkload, limit: float | None, staleness: float | None, bandwidth: float) -> dict[str, Any]:
    """Runs one query over links of `bandwidth` bytes per second; the error is given in the unit of the budget."""
    began = time.process_time()
    query, parts = work.query(limit, staleness), work.trace.split(work.homes, EDGES)
    allocate = Allocation(limit, work.window_ms) if limit else None
    out = simulate(work.trace, parts, query, SimulatedLink(bandwidth), allocate)
    late = 0 if staleness is None else int(np.count_nonzero(out.staleness > staleness))
    return {
        "workload": work.name,
        "bandwidth_bytes_s": bandwidth,
        "staleness_budget": staleness,
        "windows": len(out.staleness),
        "bytes": int(out.bytes),
        "entries": out.updates,
        "worst_error": float(out.error.max() / limit) if limit else 0.0,
        "staleness_p95": out.staleness_p95(1),
        "late_windows": late,
        "cpu_s_per_window": (time.process_time() - began) / len(out.staleness),
    }


def compare(
    work: LeastWorkload, shares: Sequence[float], stalenesses: Sequence[float | None], parts: Sequence[int] = (40, 4)
) -> list[dict[str, Any]]:
    """Returns the rows of a workload: error budgets as shares of the largest group, alone (None) and combined.

    One link needs a fortieth of a window to send what must be sent at equal shares; another link needs a quarter.
    """
    sums, raw = work.sums(), work.raw_bytes()
    groups = float(np.count_nonzero(sums.sum(axis=1), axis=1).mean())
    largest, windows, rows = float(sums.sum(axis=1).max()), len(sums), []
    click.echo(f"{work.name}: {groups:,.0f} groups a window, {windows} windows, {raw:,} bytes of needed columns")
    titles = (
        "error",
        "stale",
        "link B/s",
        "bytes",
        "1/x",
        "entries",
        "equal",
        "best",
        "error/E",
        "p95",
        "late",
        "cpu s",
    )
    click.echo(" ".join(f"{title:>{width}}" for title, width in zip(titles, WIDTHS, strict=True)))
    for share in shares:
        equal, best = fewest(sums, share * largest)
        for part in parts:
            bandwidth = (FRAME_BYTES + ENTRY_BYTES * equal / windows / EDGES) / (work.window_ms / 1000 / part)
            for staleness in stalenesses:
                row = measure(work, share * largest, staleness, bandwidth)
                row |= {"error": share, "raw_bytes": raw, "equal_entries": equal, "best_entries": best}
                rows.append(row)
                shown = (
                    f"{share:.1%}", "-" if staleness is None else f"{staleness:g}", f"{bandwidth:.0f}",
                    f"{row['bytes']:,}", f"{raw / row['bytes']:.1f}", f"{row['entries']:,}",
                    f"{row['entries'] / equal:.2f}", f"{row['entries'] / best:.2f}", f"{row['worst_error']:.3f}",
                    f"{row['staleness_p95']:.4f}", row["late_windows"], f"{row['cpu_s_per_window']:.2f}",
                )  # fmt: skip
                click.echo(" ".join(f"{text:>{width}}" for text, width in zip(shown, WIDTHS, strict=True)))
    return rows


@click.command()
@click.option("--trace", "traces", multiple=True, type=click.Choice(["generated", "cran"]), default=["generated"],
              show_default=True)  # fmt: skip
@click.option("--windows", default=8, show_default=True, type=click.IntRange(2))
@click.option("--seed", default=7, show_default=True)
@click.option("--error", "errors", multiple=True, type=float, default=[0.01, 0.001], show_default=True)
@click.option("--smoke", is_flag=True, help="Check that the bench runs: seconds, on a small generated trace.")
def main(traces: tuple[str, ...], windows: int, seed: int, errors: tuple[float, ...], smoke: bool) -> None:
    """Measure combined budgets of 10 % of a window, and error budgets alone."""
    if smoke:
        rows = compare(generated(2, seed, 1_500, 300), (0.05,), (None, 0.1), (40,))
    else:
        made = {
            "generated": lambda: generated(windows, seed),
            "cran": lambda: downloads(windows, existing(DOWNLOADS_WEEK, "leave it out with --trace generated")),
        }
        rows = [row for name in traces for row in compare(made[name](), errors, (None, 0.1))]
    store_result(OUT / "least-bytes.json", rows)


if __name__ == "__main__":
    main()
