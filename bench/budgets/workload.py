"""The traces and queries of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.data import DOWNLOADS_WEEK
from edgewater.model.query import QuerySpec
from sim.budgets.trace import Trace, cran, rhythm, zipf
from sim.demo import data as flights

CRAN_WINDOW_MS = 6 * 3_600_000
ZIPF_WINDOW_MS = 600_000
FLIGHTS_WINDOW_MS = 24 * 3_600_000
FLIGHTS_KEYS = ("carrier", "dest")


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


FEW = 50
"""Number of groups of the trace `few`, which have records until a window ends."""
GENERATED = {"zipf": zipf, "rhythm": rhythm, "few": zipf}


def _first_windows(trace: Trace, windows: int, window_ms: int) -> Trace:
    first = trace.times_ms[0] // window_ms * window_ms
    return trace.rows(np.flatnonzero(trace.times_ms < first + windows * window_ms))
