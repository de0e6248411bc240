"""The traces and queries of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.data import DOWNLOADS_WEEK
from edgewater.query import QuerySpec
from sim.budgets.trace import Trace, cran, zipf

CRAN_WINDOW_MS = 6 * 3_600_000
ZIPF_WINDOW_MS = 600_000


@dataclass(frozen=True, slots=True)
class BudgetsSize:
    """How much of a trace is run.

    Attributes:
        seed, records: of the Zipf trace; records are a window's.
        downloads: the folder of the other one.
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
    """A trace by name, made or read once per process."""
    if name == "zipf":
        made = zipf(size.windows, ZIPF_WINDOW_MS, records=size.records, groups=size.records * 2 // 5, seed=size.seed)
        return Work(made, "value", ZIPF_WINDOW_MS)
    whole = cran(size.downloads)
    first = whole.times_ms[0] // CRAN_WINDOW_MS * CRAN_WINDOW_MS
    kept = np.flatnonzero(whole.times_ms < first + size.windows * CRAN_WINDOW_MS)
    return Work(whole.rows(kept), "size", CRAN_WINDOW_MS)
