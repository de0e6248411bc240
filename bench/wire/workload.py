"""A week of downloads from the CRAN mirror, as one CSV file per edge in order of event time."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

COLUMNS = {"size": "int64", "package": "string", "version": "string", "country": "string"}
LOGGED = ["date", "time", "size", "r_version", "r_arch", "r_os", "package", "version", "country", "ip_id"]
TIME = "time_ms"
STREAM = "downloads"
START = "2015-01-05T00:00:00Z"
SPAN_MS = 7 * 86_400_000


@dataclass(frozen=True, slots=True)
class WireWorkload:
    """The input of each edge, and the bytes of shipping it raw.

    Attributes:
        records: of all edges.
        gzip_needed: the columns that the query needs, as gzip-compressed CSV, all edges.
        gzip_logged: the log as the mirror writes it, gzip-compressed, all edges.
        largest: by window size in ms, the largest value that any group reaches in any window. This is the largest
            possible error; budgets are shares of it.
    """

    files: list[Path]
    records: int
    gzip_needed: int
    gzip_logged: int
    largest: dict[int, float]


def prepare(directory: Path, logs: Path, edges: int, window_sizes_ms: list[int]) -> WireWorkload:
    """Divides the week in `logs` among edges by client."""
    table = pa.concat_tables([csv.read_csv(day) for day in sorted(logs.glob("*.csv.gz"))])
    stamps = pc.strptime(pc.binary_join_element_wise(table["date"].cast("string"), table["time"].cast("string"), " "),
                         format="%Y-%m-%d %H:%M:%S", unit="ms")  # fmt: skip
    table = table.append_column(TIME, stamps.cast(pa.int64()))
    edge = np.asarray(table["ip_id"]) % edges
    files, needed, logged = [], 0, 0
    for i in range(edges):
        rows = table.filter(pa.array(edge == i)).sort_by(TIME)
        path = directory / f"edge{i}.csv"
        csv.write_csv(rows.select([TIME, *COLUMNS]), path)
        files.append(path)
        needed += len(gzip.compress(path.read_bytes(), compresslevel=6))
        sink = pa.BufferOutputStream()
        csv.write_csv(rows.select(LOGGED), sink)
        logged += len(gzip.compress(sink.getvalue().to_pybytes(), compresslevel=6))
    largest = {size: _largest(table, size) for size in window_sizes_ms}
    return WireWorkload(files, table.num_rows, needed, logged, largest)


def _largest(table: pa.Table, size_ms: int) -> float:
    window = pa.array(np.asarray(table[TIME]) // size_ms)
    sums = table.append_column("window", window).group_by(["window", "package", "version", "country"])
    return float(pc.max(sums.aggregate([("size", "sum")])["size_sum"]).as_py())
