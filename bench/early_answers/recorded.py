"""Recorded arrival disorder: R package downloads, whose rows are in random order within each hour of the log.

The log of an hour becomes readable when the hour is over, so a row arrives in the following hour, at its position in
the file. An hour is a window, and delays are up to two windows. An hour is replayed in three seconds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from edgewater.base.errors import InvalidConfig
from edgewater.synopses import FloatArray, IntArray
from sim.early_answers.workload import Events

HOUR_MS = 3_600_000
REPLAYED_HOUR_MS = 3_000


class RecordedDownloads:
    """A workload whose windows are hours and whose values are bytes.

    Args:
        folder: directory with one file `*.csv.gz` per day, with the columns date, time, size, ip_id.
        edges: number of edges, to which rows are assigned by the downloading address.
    """

    groups = 1
    window_ms = step_ms = REPLAYED_HOUR_MS

    def __init__(self, folder: Path, *, edges: int = 1, seed: int = 1, windows: int | None = None) -> None:
        files = sorted(folder.glob("*.csv.gz"))
        if not files:
            raise InvalidConfig("downloads", str(folder), "a directory with .csv.gz files of downloads")
        self.sources, self._seed = edges, seed
        self._hours: list[tuple[FloatArray, FloatArray, IntArray]] = []
        for file in files:
            self._read(file)
        self.windows = min(windows or len(self._hours), len(self._hours))

    def _read(self, file: Path) -> None:
        options = pa_csv.ConvertOptions(include_columns=["time", "size", "ip_id"], column_types={"time": "string"})
        table = pa_csv.read_csv(file, convert_options=options).combine_chunks()
        parts = [pc.cast(pc.utf8_slice_codeunits(table["time"], a, a + 2), "int64").to_numpy() for a in (0, 3, 6)]
        size = table["size"].to_numpy(zero_copy_only=False).astype(float)
        edge = table["ip_id"].to_numpy().astype(np.int64) % self.sources
        inside = (parts[1] * 60 + parts[2]) * 1000.0
        for hour in range(24):
            mine = (parts[0] == hour) & np.isfinite(size)
            self._hours.append((inside[mine], size[mine], edge[mine]))

    def window(self, index: int) -> Events:
        inside, size, edge = self._hours[index]
        rng = np.random.default_rng([self._seed, 5, index])
        scale = REPLAYED_HOUR_MS / HOUR_MS
        place = (np.arange(len(inside)) + rng.random(len(inside))) / max(len(inside), 1)
        born = (inside + rng.random(len(inside)) * 1000) * scale
        arrival = REPLAYED_HOUR_MS * (1 + place)
        start = float(index * REPLAYED_HOUR_MS)
        zeros = np.zeros(len(inside), np.int64)
        return Events(
            edge,
            np.minimum(born, REPLAYED_HOUR_MS - 1e-6) + start,
            arrival - born,
            size,
            zeros,
            rng.random(len(inside)),
        )

    def step(self, index: int) -> Events:
        return self.window(index)

    def restarts_before(self, index: int) -> bool:
        return False
