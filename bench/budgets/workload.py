"""The traces and queries of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.budgets.traces import rhythm, zipf
from bench.data import DOWNLOADS_WEEK
from edgewater.model.query import QuerySpec
from sim.budgets.trace import Trace
from sim.demo import data as flights
from sim.plan.event_times import event_times
from sim.plan.reader import ColumnSelection, read_files

CRAN_WINDOW_MS = 6 * 3_600_000
ZIPF_WINDOW_MS = 600_000
FLIGHTS_WINDOW_MS = 24 * 3_600_000
FLIGHTS_KEYS = ("carrier", "dest")
CRAN_KEYS = ("package", "version", "country")


@dataclass(frozen=True, slots=True)
class BudgetsSize:
    """The size of a run.

    Attributes:
        seed: seed of the generated traces.
        records: records per window of the generated traces.
        downloads: directory of the CRAN logs.
    """

    windows: int
    seed: int
    records: int = 100_000
    downloads: Path = DOWNLOADS_WEEK


@dataclass(frozen=True, slots=True)
class Work:
    """A trace, and the column that queries aggregate."""

    trace: Trace
    column: str
    window_ms: int

    def query(self, aggregate: str, kind: str = "", budget: float = 0.0) -> QuerySpec:
        """Returns a query with a budget of a kind: error, in the measure's unit, or staleness, in windows; or none."""
        measure = "count()" if aggregate == "count" else f"{aggregate}({self.column})"
        query: dict[str, Any] = {
            "name": "budgets", "from": "trace", "group_by": list(self.trace.keys), "measures": {"value": measure},
            "window": {"tumbling": f"{self.window_ms}ms"},
        }  # fmt: skip
        if kind == "error":
            query["budget"] = {"error": {"value": float(budget)}}
        elif kind == "staleness":
            query["budget"] = {"staleness": f"{max(round(budget * self.window_ms), 1)}ms"}
        return QuerySpec.from_mapping(query)


@cache
def work(name: str, size: BudgetsSize) -> Work:
    """Returns a trace by name, made or read once per process."""
    if name in GENERATED:
        groups = FEW if name == "few" else size.records * 2 // 5
        made = GENERATED[name](size.windows, ZIPF_WINDOW_MS, records=size.records, groups=groups, seed=size.seed)
        return Work(made, "value", ZIPF_WINDOW_MS)
    if name == "flights":
        table = flights.load()
        keys = {key: table[key] for key in FLIGHTS_KEYS}
        whole = Trace.from_columns(table[flights.TIME].to_numpy(), keys, {"distance": table["distance"]})
        return Work(_first_windows(whole, size.windows, FLIGHTS_WINDOW_MS), "distance", FLIGHTS_WINDOW_MS)
    return Work(_first_windows(cran(size.downloads), size.windows, CRAN_WINDOW_MS), "size", CRAN_WINDOW_MS)


def cran(directory: Path) -> Trace:
    """Returns RStudio's CRAN download logs, in order of time: bytes by package, version and country."""
    texts = ("date", "time", *CRAN_KEYS)
    columns = ColumnSelection(dict.fromkeys(("size", *texts), "trace"), texts)
    table = read_files(sorted(directory.glob("*.csv.gz")), columns, click.echo)
    times, valid = event_times(table, ("date", "time"), None, click.echo)
    assert valid.all()
    return Trace.from_columns(times, {key: table[key] for key in CRAN_KEYS}, {"size": table["size"]})


FEW = 50
"""Number of groups of the trace `few`, which have records until a window ends."""
GENERATED = {"zipf": zipf, "rhythm": rhythm, "few": zipf}


def _first_windows(trace: Trace, windows: int, window_ms: int) -> Trace:
    first = trace.times_ms[0] // window_ms * window_ms
    return trace.rows(np.flatnonzero(trace.times_ms < first + windows * window_ms))
