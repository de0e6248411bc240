"""The data sets: synthetic keys as in the paper, and taxi rides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.data import TAXI

ORIGIN_MS = 1_640_995_200_000
ROWS_PER_SECOND = 10_000
_FILES, _LEAST_IN_FILE = 8, 10_000


def synthetic(directory: Path, rows: int, *, zipf: bool, late_share: float = 0.0, seed: int = 20_210_714) -> Path:
    """Returns `rows` records in files of equal size: ts (ms), key (1 to 1000, uniform or Zipf 1.1), value (log-normal).

    Times ascend, except for a share of records that is moved back by up to 10 s.
    """
    name = f"{'zipf' if zipf else 'uniform'}-{rows}-{late_share:g}"
    path = directory / name
    if path.exists():
        return path
    path.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, 1001) ** 1.1
    cumulated = np.cumsum(weights / weights.sum())
    files = min(_FILES, max(rows // _LEAST_IN_FILE, 1))
    for number in range(files):
        first, last = rows * number // files, rows * (number + 1) // files
        n = last - first
        ts = ORIGIN_MS + np.arange(first, last, dtype=np.int64) * 1000 // ROWS_PER_SECOND
        if late_share:
            late = rng.random(n) < late_share
            ts[late] -= rng.integers(1, 10_000, int(late.sum()))
        key = np.searchsorted(cumulated, rng.random(n)) + 1 if zipf else rng.integers(1, 1001, n)
        table = pa.table({"ts": ts, "key": key.astype(np.int64), "value": rng.lognormal(3, 1, n)})
        pq.write_table(table, path / f"{number:02}.parquet", row_group_size=1 << 18)
    return path


def taxi(directory: Path, rows: int, *, made: bool = False) -> Path:
    """Returns at least `rows` rides: the real ones (or `made` ones), and copies of them, each a quarter of a year
    later.

    A copy has the same zones and distances, so distinct counts stay and frequencies grow by whole factors.
    """
    path = directory / f"taxi-{rows}"
    if path.exists():
        return path
    path.mkdir(parents=True)
    rides = _made_rides(rows) if made else _real_rides()
    ms = pc.divide(rides["lpep_pickup_datetime"].cast(pa.timestamp("us")).cast(pa.int64()), 1000)
    route = pc.add(pc.multiply(rides["PULocationID"], 1000), rides["DOLocationID"])
    quarter_ms = 90 * 86_400_000
    for copy in range(max(-(-rows // len(rides)), 1)):
        table = pa.table(
            {
                "ts": pc.add(ms, copy * quarter_ms),
                "zone": rides["PULocationID"],
                "route": route,
                "passengers": rides["passenger_count"],
                "distance": rides["trip_distance"],
                "amount": rides["total_amount"],
            }
        )
        pq.write_table(table, path / f"{copy:04}.parquet")
    return path


def _real_rides() -> pa.Table:
    columns = [
        "lpep_pickup_datetime",
        "PULocationID",
        "DOLocationID",
        "passenger_count",
        "trip_distance",
        "total_amount",
    ]
    files = sorted(TAXI.glob("green_tripdata_*.parquet"))
    return pa.concat_tables([pq.read_table(f, columns=columns) for f in files]).combine_chunks()


def _made_rides(rows: int) -> pa.Table:
    """Generates rides with the same columns, for `--smoke`."""
    rng = np.random.default_rng(7)
    return pa.table(
        {
            "lpep_pickup_datetime": pa.array(1_640_995_200_000_000 + np.arange(rows) * 60_000_000, pa.timestamp("us")),
            "PULocationID": np.minimum(rng.zipf(1.3, rows), 260),
            "DOLocationID": rng.integers(1, 260, rows),
            "passenger_count": rng.integers(1, 6, rows).astype(float),
            "trip_distance": rng.lognormal(0.7, 0.8, rows),
            "total_amount": rng.lognormal(2.8, 0.5, rows),
        }
    )


def read_local(path: Path) -> Any:
    """Returns all records as one Arrow table."""
    return pq.read_table(path).combine_chunks()
