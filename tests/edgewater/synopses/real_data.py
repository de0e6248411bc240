"""Columns of the real data sets in ``../shared/data``; only tests of the lane `data` read them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

FOLDER = Path(__file__).parents[4] / "shared" / "data"
_DOWNLOADS = "cran_downloads_dev/2015-01-01.csv.gz"
_TRIPS = "nyc_green_taxi_2022q1/green_tripdata_2022-01.parquet"


@dataclass(frozen=True)
class Column:
    """A column of a file, read on demand, without nulls and with numbers in their stored type."""

    file: str
    name: str

    def read(self) -> Any:
        path = FOLDER / self.file
        if not path.exists():
            pytest.skip(f"{path} does not exist")
        column = pc.drop_null(_table(path)[self.name]).combine_chunks()
        return column if pa.types.is_string(column.type) else column.to_numpy(zero_copy_only=False)


class Floats(Column):
    """A column converted to float64."""

    def read(self) -> np.ndarray:
        return np.asarray(super().read(), np.float64)


NUMBERS = {
    "cran sizes": Floats(_DOWNLOADS, "size"),
    "taxi fares": Floats(_TRIPS, "fare_amount"),  # some negative: refunds
    "taxi distances": Floats(_TRIPS, "trip_distance"),
}
ITEMS = {"cran packages": Column(_DOWNLOADS, "package"), "cran ip": Column(_DOWNLOADS, "ip_id")}


@cache
def _table(path: Path) -> pa.Table:
    return pa.csv.read_csv(path) if path.suffix == ".gz" else pq.read_table(path)
