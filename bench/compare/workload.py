"""The records of a run: downloads by package and country as one CSV file per site, and their true sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

FIRST_MS = 1_420_416_000_000
"""2015-01-05T00:00:00Z, the first day of the week of downloads."""
COLUMNS = {"package": "string", "country": "string", "size": "int64", "client": "int64"}


@dataclass(frozen=True)
class Workload:
    """The input and the truth of all ways of a run.

    Attributes:
        files: one per site, with the header `at_ms,package,country,size,client`.
        windows: the number of windows.
        sums: by window, the truth: ``package,country`` -> (bytes, downloads).
        largest: bytes of the largest group of a window.
        functions: function -> by window, the truth: ``country`` or ``country,package`` -> value.
        site_sums: by site and window, the site's part of the truth: ``package,country`` -> bytes.
    """

    files: list[Path]
    start_ms: int
    window_ms: int
    windows: int
    sums: list[dict[str, tuple[int, int]]]
    largest: int
    functions: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    site_sums: list[list[dict[str, int]]] = field(default_factory=list)


def read_downloads(folder: Path, start_ms: int, end_ms: int) -> pa.Table:
    """Reads the downloads of a time range from daily logs of a CRAN mirror."""
    types = {"package": pa.string(), "country": pa.string(), "date": pa.string(), "time": pa.string()}
    options = csv.ConvertOptions(
        column_types=types | {"size": pa.int64(), "ip_id": pa.int64()},
        include_columns=[*types, "size", "ip_id"],
        null_values=["NA"],
        strings_can_be_null=False,
    )
    tables = [csv.read_csv(path, convert_options=options) for path in sorted(folder.glob("*.csv.gz"))]
    table = pa.concat_tables(tables)
    text = pc.binary_join_element_wise(table["date"], table["time"], " ")
    at = pc.strptime(text, "%Y-%m-%d %H:%M:%S", "ms").cast(pa.int64())
    table = pa.table(
        {
            "at_ms": at,
            "package": table["package"],
            "country": table["country"],
            "size": pc.fill_null(table["size"], 0),
            "client": table["ip_id"],
        }
    )
    return table.filter(pc.and_(pc.greater_equal(at, start_ms), pc.less(at, end_ms)))


def generate_downloads(records: int, start_ms: int, end_ms: int, seed: int = 1) -> pa.Table:
    """Generates downloads that are as skewed as the real ones: most groups of a window have one record."""
    rng = np.random.default_rng(seed)
    packages = np.minimum(rng.zipf(1.4, records), 7_000)
    countries = np.minimum(rng.zipf(1.6, records), 170)
    return pa.table(
        {
            "at_ms": np.sort(rng.integers(start_ms, end_ms, records)),
            "package": pc.binary_join_element_wise("package", pa.array(packages).cast(pa.string()), ""),
            "country": pc.binary_join_element_wise("c", pa.array(countries).cast(pa.string()), ""),
            "size": np.rint(rng.lognormal(12, 2, records)).astype(np.int64),
            "client": rng.integers(1, 20_000, records),
        }
    )


def prepare(
    directory: Path, table: pa.Table, sites: int, start_ms: int, window_ms: int, windows: int, late_share: float
) -> Workload:
    """Writes the files and computes the truth of the first windows.

    Args:
        table: may have records of more windows. The largest group is the largest of all windows, so that budgets do not
            depend on the number of windows.
        late_share: the share of records that arrive up to half a window after their event time.
    """
    totals = _totals(table, start_ms, window_ms)
    largest = pc.max(totals["size_sum"]).as_py()
    table = table.filter(pc.less(table["at_ms"], start_ms + windows * window_ms))
    rng = np.random.default_rng(2)
    at = table["at_ms"].to_numpy()
    arrival = at + (rng.random(len(at)) < late_share) * rng.integers(1, window_ms // 2, len(at))
    table = table.take(pa.array(np.argsort(arrival, kind="stable")))
    client, files, site_sums = table["client"].to_numpy(), [], []
    for site in range(sites):
        files.append(directory / f"site{site}.csv")
        with files[-1].open("wb") as file:
            file.write((",".join(table.column_names) + "\n").encode())
            rows = table.filter(pa.array(client % sites == site))
            csv.write_csv(rows, file, csv.WriteOptions(include_header=False, quoting_style="none"))
        site_sums.append(_sums(_totals(rows, start_ms, window_ms), windows))
    sums: list[dict[str, tuple[int, int]]] = [{} for _ in range(windows)]
    for window, name, amount, count in _rows(totals):
        if window < windows:
            sums[window][name] = amount, count
    functions = _functions(table, start_ms, window_ms, windows)
    return Workload(files, start_ms, window_ms, windows, sums, largest, functions, site_sums)


def _functions(table: pa.Table, start_ms: int, window_ms: int, windows: int) -> dict[str, list[dict[str, float]]]:
    """Returns distinct clients, the 99th percentile of sizes, and counts of packages, by window and country."""
    number = pc.divide(pc.subtract(table["at_ms"], start_ms), window_ms)
    package = pc.binary_join_element_wise(table["country"], table["package"], ",")
    records = table.append_column("window", number).append_column("item", package)
    aggregates = {
        "distinct": ("country", "client", "count_distinct"),
        "p99": ("country", "size", "list"),
        "top": ("item", "size", "count"),
    }
    result = {}
    for function, (key, column, name) in aggregates.items():
        groups = records.group_by(["window", key]).aggregate([(column, name)])
        values = groups[f"{column}_{name}"].to_pylist()
        if function == "p99":
            values = [float(np.quantile(sizes, 0.99, method="lower")) for sizes in values]
        result[function] = [{} for _ in range(windows)]
        for window, group, value in zip(groups["window"].to_pylist(), groups[key].to_pylist(), values, strict=True):
            result[function][window][group] = value
    return result


def _rows(totals: pa.Table) -> Iterator[tuple[int, str, int, int]]:
    columns = (totals[column].to_pylist() for column in ("window", "key", "size_sum", "size_count"))
    return zip(*columns, strict=True)


def _sums(totals: pa.Table, windows: int) -> list[dict[str, int]]:
    """Returns the bytes by window and group."""
    sums: list[dict[str, int]] = [{} for _ in range(windows)]
    for window, name, amount, _ in _rows(totals):
        if window < windows:
            sums[window][name] = amount
    return sums


def _totals(table: pa.Table, start_ms: int, window_ms: int) -> pa.Table:
    """Returns bytes and downloads by window and group."""
    number = pc.divide(pc.subtract(table["at_ms"], start_ms), window_ms)
    key = pc.binary_join_element_wise(table["package"], table["country"], ",")
    groups = pa.table({"window": number, "key": key, "size": table["size"]}).group_by(["window", "key"])
    return groups.aggregate([("size", "sum"), ("size", "count")])
