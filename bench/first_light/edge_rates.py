"""One edge on one core: NDJSON and columnar records per second, and memory at 100,000 groups."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from edge.core.core import EdgeCore
from edge.core.events import Configured, Ingested, SourcesOpened
from edge.core.streams import StreamSpec
from edgewater.base.streams import TIME_COLUMN
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef

COLUMNS = {
    "client": pa.string(),
    "country": pa.string(),
    "provider": pa.string(),
    "url": pa.string(),
    "status": pa.int64(),
    "bytes": pa.int64(),
}
QUERY = QuerySpec.from_mapping(
    {
        "name": "bytes_by_url",
        "from": "access",
        "where": "status < 400",
        "group_by": ["provider", "country", "url"],
        "measures": {"bytes": "sum(bytes)", "requests": "count()"},
        "window": {"tumbling": "1h"},
    }
)
BATCH_ROWS = 65_536
START_MS = 1_700_000_000_000


def access_log(rows: int, groups: int, seed: int) -> pa.RecordBatch:
    """Returns access-log records over `groups` triples (provider, country, url), distributed by Zipf 1.1."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, groups + 1) ** 1.1
    group = rng.choice(groups, rows, p=weights / weights.sum())
    return pa.record_batch(
        {
            "client": pa.array([f"10.{k >> 8 & 255}.{k & 255}.7" for k in rng.integers(0, 65_536, rows).tolist()]),
            "country": pa.array(np.array(["us", "de", "fr", "cn", "br"])[group % 5]),
            "provider": pa.array(np.array([f"provider{i}" for i in range(20)])[group % 20]),
            "url": pa.array([f"/assets/{g}/main.js" for g in group.tolist()]),
            "status": pa.array(rng.choice([200, 200, 200, 304, 404], rows)),
            "bytes": pa.array(rng.integers(100, 1_000_000, rows)),
            TIME_COLUMN: pa.array(START_MS + np.sort(rng.integers(0, 1000, rows))),
        }
    )


def core() -> EdgeCore:
    result = EdgeCore({"access": StreamSpec(COLUMNS)})
    result.handle(SourcesOpened((("access", "file"),)))
    result.handle(Configured(((QueryRef("bytes_by_url", 1), QUERY),)))
    return result


def columnar(batches: list[pa.RecordBatch], rounds: int) -> float:
    """Returns records/s through `EdgeCore`, with batches in memory."""
    edge = core()
    began = time.perf_counter()
    for _ in range(rounds):
        for batch in batches:
            edge.handle(Ingested("access", "file", batch, START_MS + 1000))
    return rounds * sum(b.num_rows for b in batches) / (time.perf_counter() - began)


def write_ndjson(batches: list[pa.RecordBatch], path: Path) -> int:
    """Writes the records as NDJSON; returns the size of the file."""
    with path.open("w") as file:
        for batch in batches:
            rows = batch.rename_columns([*COLUMNS, "at"]).to_pylist()
            file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    return path.stat().st_size


def memory_at(groups: int) -> dict[str, float]:
    """Returns the resident memory of a process with `groups` groups, in MiB; to be run in a separate process."""
    edge = core()
    rng = np.random.default_rng(0)
    for at in range(0, groups, BATCH_ROWS // 4):
        edge.handle(Ingested("access", "file", _each_group_once(at, min(groups, at + BATCH_ROWS // 4), rng), START_MS))
    entries = len(edge.queries[QueryRef("bytes_by_url", 1)].store.slices[START_MS // 3_600_000 * 3_600_000].entries)
    assert entries == groups
    return {"groups": entries, "resident_mib": resident_mib(), "core_mib": edge.pending_bytes / 2**20}


def _each_group_once(first: int, last: int, rng: np.random.Generator) -> pa.RecordBatch:
    group = np.arange(first, last)
    return pa.record_batch(
        {
            "client": pa.array(["10.0.0.1"] * len(group)),
            "country": pa.array(np.array(["us", "de", "fr", "cn", "br"])[group % 5]),
            "provider": pa.array(np.array([f"provider{i}" for i in range(20)])[group % 20]),
            "url": pa.array([f"/assets/{g}/main.js" for g in group.tolist()]),
            "status": pa.array(np.full(len(group), 200)),
            "bytes": pa.array(rng.integers(100, 1_000_000, len(group))),
            TIME_COLUMN: pa.array(np.full(len(group), START_MS)),
        }
    )


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def measure(directory: Path, records: int) -> dict[str, Any]:
    from bench.first_light.decode_rate import ndjson  # the memory measurement must not import the decoders

    batches = [access_log(BATCH_ROWS, 100_000, seed) for seed in range(records // BATCH_ROWS)]
    path = directory / "access.ndjson"
    size = write_ndjson(batches, path)
    columnar(batches[:2], 1)
    return {"columnar_records_s": columnar(batches, 3), **ndjson(path, records), "ndjson_bytes": size}
