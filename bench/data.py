"""Data sets of the benches, which are not in the repository, and generated data for `--smoke`."""

from __future__ import annotations

import gzip
from datetime import date, timedelta
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
from pyarrow import csv

DATA = Path("../shared/data")
DOWNLOADS_WEEK = DATA / "cran_downloads_bench_week"
DOWNLOADS_DEV = DATA / "cran_downloads_dev"
TAXI = DATA / "nyc_green_taxi_2022q1"
FIRST_DAY = date(2015, 1, 5)


def existing(folder: Path, without: str = "--smoke runs on generated data") -> Path:
    """Returns the folder.

    Args:
        without: alternative to the data set, for the error message.

    Raises:
        click.UsageError: there is no such folder.
    """
    if not folder.is_dir():
        raise click.UsageError(f"{folder}: there is no such folder with a data set; {without}")
    return folder


def made_downloads(directory: Path, records: int, days: int = 7) -> Path:
    """Writes a folder like `DOWNLOADS_WEEK`: one CSV file per day with `records` rows, in random order within hours."""
    path = directory / f"downloads-{records}x{days}"
    path.mkdir(parents=True, exist_ok=True)
    for number in range(days):
        rng = np.random.default_rng(number)
        second = np.sort(rng.integers(0, 86_400, records))
        package = np.minimum(rng.zipf(1.3, records), 200)
        table = pa.table(
            {
                "date": pa.array([(FIRST_DAY + timedelta(number)).isoformat()] * records),
                "time": pa.array([f"{s // 3600:02}:{s // 60 % 60:02}:{s % 60:02}" for s in second.tolist()]),
                "size": np.rint(rng.lognormal(12, 2, records)).astype(np.int64),
                "r_version": pa.array(["3.1.2"] * records),
                "r_arch": pa.array(["x86_64"] * records),
                "r_os": pa.array(["linux-gnu"] * records),
                "package": pa.array([f"package{p}" for p in package.tolist()]),
                "version": pa.array([f"1.{p % 3}" for p in package.tolist()]),
                "country": pa.array(np.array(["US", "DE", "CN", "BR"])[rng.integers(0, 4, records)]),
                "ip_id": rng.integers(1, 500, records),
            }
        )
        table = table.take(pa.array(np.lexsort((rng.random(records), second // 3600))))
        with gzip.open(path / f"{FIRST_DAY + timedelta(number)}.csv.gz", "wb") as file:
            csv.write_csv(table, file)
    return path
