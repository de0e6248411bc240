"""ColumnBatch of the real data sets in ``../shared/data``; none where the folder is not there."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

FOLDER = Path(__file__).parents[4] / "shared" / "data"
_DOWNLOADS = FOLDER / "cran_downloads_dev" / "2015-01-01.csv.gz"
_TRIPS = FOLDER / "nyc_green_taxi_2022q1" / "green_tripdata_2022-01.parquet"


@lru_cache(maxsize=1)
def numbers() -> dict[str, np.ndarray]:
    """float64 columns: sizes of downloads, fares (some negative: refunds) and distances of taxi trips."""
    found = {}
    if _DOWNLOADS.exists():
        found["cran sizes"] = _column(pa.csv.read_csv(_DOWNLOADS), "size")
    if _TRIPS.exists():
        trips = pq.read_table(_TRIPS, columns=["fare_amount", "trip_distance"])
        found["taxi fares"], found["taxi distances"] = (_column(trips, c) for c in trips.column_names)
    return found


@lru_cache(maxsize=1)
def items() -> dict[str, np.ndarray | pa.Array]:
    """ColumnBatch of things: packages and addresses."""
    if not _DOWNLOADS.exists():
        return {}
    downloads = pa.csv.read_csv(_DOWNLOADS)
    return {
        "cran packages": downloads["package"].combine_chunks(),
        "cran ip": downloads["ip_id"].to_numpy(),
    }


def _column(table: pa.Table, name: str) -> np.ndarray:
    return np.asarray(pc.drop_null(table[name]).to_numpy(), np.float64)
