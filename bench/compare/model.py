"""The rows of a measured run, predicted by the simulator (`sim.wire`) on the same records and links."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from bench.compare.links import LinkSettings
from bench.compare.ways import Way
from bench.compare.workload import COLUMNS, Workload
from edgewater.model.query import QuerySpec
from sim.budgets.link import SimulatedLink
from sim.budgets.trace import Trace
from sim.wire.experiment import WireSettings, run

HEADER = ("way", "KiB/s", "KB on the wire", "measured", "ratio", "p50 s", "measured", "p95 s", "measured", "ratio")
UNLIMITED_BYTES_S = 1e12


def read_trace(load: Workload) -> tuple[Trace, list[Trace]]:
    """Returns the records of all sites, and of each site."""
    tables = [csv.read_csv(path) for path in load.files]
    homes = np.repeat(np.arange(len(tables)), [table.num_rows for table in tables])
    table = pa.concat_tables(tables)
    keys = {name: table[name] for name in COLUMNS if COLUMNS[name] == "string"}
    values = {name: table[name] for name in COLUMNS if name not in keys}
    trace = Trace.from_columns(table["at_ms"].to_numpy(), keys, values)
    order = np.argsort(table["at_ms"].to_numpy(), kind="stable")
    return trace, trace.split(homes[order], len(tables))


def predict(
    way: Way, load: Workload, records: tuple[Trace, list[Trace]], link: LinkSettings, speed: float
) -> dict[str, Any]:
    """Returns the row of a way; `contracts_kept` and costs are not predicted."""
    edges = [f"site{site}" for site in range(len(load.files))]
    query = QuerySpec.from_mapping(way.query(load.largest, edges))
    rate = link.rate_bytes_s or UNLIMITED_BYTES_S
    model = SimulatedLink(rate, latency_ms=1000.0 * link.delay_s, bucket_bytes=link.bucket_bytes)
    began_s = time.process_time()
    done = run(*records, query, model, WireSettings(speed))
    seconds = done.staleness * load.window_ms / 1000 / speed
    # At the deadline the center answers with the data that have arrived.
    seconds = seconds if way.deadline_s is None else np.minimum(seconds, way.deadline_s)
    return {
        "way": way.name,
        "kib_s": None if link.rate_bytes_s is None else link.rate_bytes_s / 1024,
        "windows": len(seconds),
        "p50_s": float(np.quantile(seconds, 0.5)),
        "p95_s": float(np.quantile(seconds, 0.95)),
        "worst_error": float(done.error.max() / load.largest),
        "bytes": round(done.bytes),
        "entries": done.updates,
        "cpu_model_s": round(time.process_time() - began_s, 2),
    }


def table(rows: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> str:
    """Returns the predicted rows beside the measured ones as a Markdown table."""
    known = {(row["way"], row["kib_s"]): row for row in measured}
    lines = [HEADER, ("---",) * len(HEADER)]
    for row in rows:
        other = known.get((row["way"], row["kib_s"]), {})
        lines.append((
            row["way"], "∞" if row["kib_s"] is None else f"{row['kib_s']:g}", f"{row['bytes'] / 1000:,.0f}",
            f"{other['bytes'] / 1000:,.0f}" if other else "", _ratio(row, other, "bytes"),
            *(text for name in ("p50_s", "p95_s")
              for text in (f"{row[name]:.2f}", f"{other[name]:.2f}" if other else "")), _ratio(row, other, "p95_s"),
        ))  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ratio(row: dict[str, Any], measured: dict[str, Any], name: str) -> str:
    if not measured or not measured[name]:
        return ""
    return f"{row[name] / measured[name]:.2f}"
