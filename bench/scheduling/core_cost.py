"""The cost of sixty queries for the edge's core per record, by the size of a batch.

CPU time, without sources and frames.

The queries of `equal` differ only in their names. The queries of `staggered` are of three kinds, with windows that end
one after the other. Both have conditions and key columns in common. Each query of `apart` has its own condition, so
that nothing of a batch can be shared.

The gain of a second core is the wall time of one thread with all queries, divided by the wall time of two threads with
half of the queries each. Both are the best of the runs. Decoding is not part of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from edge.core import Configured, EdgeCore, Ingested, StreamSpec
from edgewater.model.query import QuerySpec
from edgewater.model.streams import TIME_COLUMN
from edgewater.wire import QueryRef

Row = dict[str, Any]
Queries = tuple[tuple[QueryRef, QuerySpec], ...]

WORKLOADS = ("equal", "staggered", "apart")
BATCH_ROWS = (4_096, 16_384, 65_536)
QUERIES, RECORDS = 60, 262_144
WINDOW_MS = 4_000
RUNS = 5
COLUMNS = {"k": pa.string(), "country": pa.string(), "v": pa.int64()}
_START_MS = 1_800_000_000_000


def core_rows(batch_rows: Sequence[int] = BATCH_ROWS, runs: int = RUNS, records: int = RECORDS) -> list[Row]:
    """Returns a row per workload and size of batches: µs of CPU per record, and the gain of a second core."""
    rows = []
    for workload in WORKLOADS:
        queries = _queries(workload)
        for size in batch_rows:
            spent_s = [_spent_s(queries, size, records) for _ in range(runs + 1)][1:]
            alone_s = min(_wall_s([queries], size, records) for _ in range(runs))
            halves_s = min(_wall_s([queries[::2], queries[1::2]], size, records) for _ in range(runs))
            rows.append({
                "part": "core", "workload": workload, "batch": size, "queries": QUERIES,
                "us": 1e6 * statistics.median(spent_s) / records, "second_core": alone_s / halves_s,
            })  # fmt: skip
    return rows


def _queries(workload: str) -> Queries:
    kinds: list[dict[str, Any]] = [
        {"group_by": ["k"], "measures": {"n": "count()", "s": "sum(v)"}},
        {"where": "v > 50", "group_by": ["country"], "measures": {"n": "count()", "most": "max(v)"}},
        {"group_by": ["country"], "measures": {"q": "quantiles(v)"}},
    ]
    result = []
    for i in range(QUERIES):
        kind = kinds[0 if workload == "equal" else i % len(kinds)]
        if workload == "apart":
            kind = {**kind, "where": f"v > {i}"}
        offset_ms = 0 if workload == "equal" else WINDOW_MS * i // QUERIES
        window = {"tumbling": f"{WINDOW_MS}ms", "offset": f"{offset_ms}ms"}
        spec = QuerySpec.from_mapping({"name": f"q{i}", "from": "events", "window": window, **kind})
        result.append((QueryRef(f"q{i}", 1), spec))
    return tuple(result)


def _spent_s(queries: Queries, size: int, records: int) -> float:
    core, batches = _core(queries), _batches(size, records)
    began_s = time.process_time()
    _run(core, batches)
    return time.process_time() - began_s


def _wall_s(parts: Sequence[Queries], size: int, records: int) -> float:
    cores, batches = [_core(queries) for queries in parts], _batches(size, records)
    with ThreadPoolExecutor(len(cores)) as threads:
        began_s = time.perf_counter()
        list(threads.map(_run, cores, [batches] * len(cores)))
        return time.perf_counter() - began_s


def _run(core: EdgeCore, batches: Sequence[pa.RecordBatch]) -> None:
    for batch in batches:
        core.handle(Ingested("events", "file", batch, _START_MS))


def _core(queries: Queries) -> EdgeCore:
    core = EdgeCore({"events": StreamSpec(COLUMNS)})
    core.handle(Configured(queries))
    core.handle(Ingested("events", "file", _batch(0, 1_000), _START_MS))
    return core


def _batches(size: int, records: int) -> list[pa.RecordBatch]:
    return [_batch(at, min(size, records - at)) for at in range(0, records, size)]


def _batch(first: int, rows: int) -> pa.RecordBatch:
    numbers = np.arange(first, first + rows)
    columns = {
        "k": pa.array([f"key{i}" for i in (numbers * 7919 % 1000).tolist()]),
        "country": pa.array([f"c{i}" for i in (numbers % 10).tolist()]),
        "v": pa.array(numbers * 31 % 1000),
        TIME_COLUMN: pa.array(np.full(rows, _START_MS + 1_500)),
    }
    return pa.record_batch(columns)
