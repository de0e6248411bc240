"""Bytes that an error budget needs if it is divided by need, compared with equal shares of the same budget.

Ten production `EdgeCore`s, a production `BudgetAllocator`, no link: each edge ships once a second what its budget
requires, and receives its share within a second. Record rates of edges are Zipf-skewed, values lognormal, groups Zipf.
Bytes are the bytes of the compressed frames. The first windows, until shares have settled, are excluded from both. The
error is the error of the worst group of any window, relative to E.

    python -m bench.shares [--smoke]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.outcome import OUT, store_result
from center.budgets import AllocationPolicy, BudgetAllocator, BudgetReport
from edge.core.core import EdgeCore
from edge.core.drift import DriftRates
from edge.core.events import Acked, BudgetSet, Configured, FrameBuilt, Ingested, PullEvent, SourcesOpened
from edge.core.streams import StreamSpec
from edgewater.base.streams import TIME_COLUMN, EdgeId
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import QueryRef

REF = QueryRef("traffic", 1)
EDGES, GROUPS, WINDOWS, WARM_UP = 10, 400, 16, 6
WINDOW_MS = 10_000
RECORDS = 60_000
"""Records per window over all edges."""
BUDGETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""E as a fraction of a window's total."""


@dataclass(frozen=True, slots=True)
class ShareRow:
    skew: float
    budget: float
    division: str
    bytes: int
    frames: int
    worst_error: float


class ShareTrace:
    """The records of all runs: group codes and values per edge and second."""

    def __init__(self, skew: float, seed: int, windows: int = WINDOWS, records: int = RECORDS) -> None:
        self.windows = windows
        rng = np.random.default_rng(seed)
        rates = 1.0 / np.arange(1, EDGES + 1) ** skew
        self.per_second = np.maximum(1, records * rates / rates.sum() / (WINDOW_MS / 1000)).astype(int)
        popularity = 1.0 / np.arange(1, GROUPS + 1) ** 1.1
        popularity /= popularity.sum()
        seconds = windows * WINDOW_MS // 1000
        self.batches = [
            [
                (rng.choice(GROUPS, n, p=popularity), np.rint(rng.lognormal(6.0, 1.5, n)).astype(np.int64))
                for n in self.per_second
            ]
            for _ in range(seconds)
        ]
        self.truth = np.zeros((windows, GROUPS))
        for second, row in enumerate(self.batches):
            for keys, values in row:
                np.add.at(self.truth[second * 1000 // WINDOW_MS], keys, values)
        self.names = np.array([f"/page/{i:04d}" for i in range(GROUPS)])


def run(trace: ShareTrace, skew: float, budget: float, division: str) -> ShareRow:
    limit = budget * float(trace.truth.sum(axis=1).mean())
    spec = QuerySpec.from_mapping(
        {
            "name": "traffic",
            "from": "log",
            "group_by": ["page"],
            "measures": {"bytes": "sum(bytes)"},
            "window": {"tumbling": f"{WINDOW_MS}ms"},
            "budget": {"error": {"bytes": limit}},
        }
    )
    ids = [EdgeId(f"edge-{i}") for i in range(EDGES)]
    cores = {e: _core(spec) for e in ids}
    meters = {e: DriftRates(WINDOW_MS) for e in ids}
    allocator = BudgetAllocator({"bytes": limit}, {}, AllocationPolicy(min_interval_ms=10_000))
    allocator.set_members(frozenset(ids), {})
    if division == "equal":
        for core in cores.values():
            core.handle(BudgetSet(REF, {"bytes": limit / EDGES}, 1))
    center = np.zeros((trace.windows, GROUPS))
    size = frames = 0
    for second, row in enumerate(trace.batches):
        for edge, (keys, values) in zip(ids, row, strict=True):
            core = cores[edge]
            core.handle(Ingested("log", "f", _batch(trace.names[keys], values, second * 1000), (second + 1) * 1000))
            for body_bytes, found in _ship(core):
                counted = second * 1000 // WINDOW_MS >= WARM_UP
                size, frames = size + counted * body_bytes, frames + counted
                for window, groups in found.items():
                    for name, value in groups.items():
                        center[window // WINDOW_MS, int(name[-4:])] += value
            if division != "equal":
                _report(allocator, edge, core, meters[edge], second * 1000)
        if division != "equal":
            allocator.rebalance((second + 1) * 1000, 1 << 50)
            for edge, grant in allocator.grants().items():
                cores[edge].handle(BudgetSet(REF, grant.shares, grant.version, grant.from_ms))
    closed = slice(WARM_UP, trace.windows - 1)
    worst = float(np.abs(trace.truth[closed] - center[closed]).max() / limit)
    assert worst <= 1.0, f"the budget is exceeded: {worst}"
    return ShareRow(skew, budget, division, size, frames, worst)


def _core(spec: QuerySpec) -> EdgeCore:
    core = EdgeCore({"log": StreamSpec({"page": pa.string(), "bytes": pa.int64()})})
    core.handle(SourcesOpened((("log", "f"),)))
    core.handle(Configured(((REF, spec),)))
    return core


def _batch(pages: np.ndarray, values: np.ndarray, begin_ms: int) -> pa.RecordBatch:
    times = begin_ms + np.arange(len(values)) * 1000 // max(len(values), 1)
    return pa.record_batch({"page": pa.array(pages, pa.string()), "bytes": values, TIME_COLUMN: times})


def _ship(core: EdgeCore) -> list[tuple[int, dict[int, Mapping[str, float]]]]:
    """Returns, for each frame that the edge ships now, its bytes and its sums by slice and group."""
    shipped = []
    while built := [e for e in core.handle(PullEvent(1 << 20)) if isinstance(e, FrameBuilt)]:
        frame = built[0].frame
        found: dict[int, Mapping[str, float]] = {}
        for partial in frame.unpack().partials:
            aggregate = GroupedAggregate.from_bytes(partial.synopsis)
            sums = aggregate.query("bytes").value
            found[partial.slice_start_ms] = dict(zip(aggregate.rows()[0].to_pylist(), sums.tolist(), strict=True))
        shipped.append((frame.wire_bytes, found))
        core.handle(Acked(frame.seq))
    return shipped


def _report(allocator: BudgetAllocator, edge: EdgeId, core: EdgeCore, meter: DriftRates, now_ms: int) -> None:
    pipeline = core.queries[REF]
    meter.update(pipeline.frames.drift, pipeline.through_ms)
    last = pipeline.store.schedule.last
    report = BudgetReport(
        pipeline.store.schedule.version, last.shares, last.from_ms, pipeline.shipper.entry_bytes, dict(meter.per_s)
    )
    assert allocator.report(edge, report, now_ms + 1) == []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skew", type=float, nargs="*", default=[0.0, 1.0, 2.0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=OUT / "shares.json")
    parser.add_argument("--smoke", action="store_true", help="seconds, on few records")
    args = parser.parse_args()
    budgets = BUDGETS[-1:] if args.smoke else BUDGETS
    size = {"windows": WARM_UP + 2, "records": 3_000} if args.smoke else {}
    rows: list[ShareRow] = []
    print(f"{'skew':>5} {'E / total':>9} {'equal':>10} {'balanced':>10} {'saved':>7}   worst error / E")
    for skew in args.skew[-1:] if args.smoke else args.skew:
        trace = ShareTrace(skew, args.seed, **size)
        for budget in budgets:
            equal, balanced = (run(trace, skew, budget, division) for division in ("equal", "balanced"))
            rows += [equal, balanced]
            saved = 1 - balanced.bytes / equal.bytes
            errors = f"{equal.worst_error:.2f} {balanced.worst_error:.2f}"
            print(f"{skew:5.1f} {budget:9.0e} {equal.bytes:10,} {balanced.bytes:10,} {saved:7.1%}   {errors}")
    store_result(args.out, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
