"""The compared ways: what runs at each site and at the center, and what each way promises."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

SCRIPTS = Path(__file__).parent / "scripts"
Kind = Literal["script", "flink", "spark", "edgewater"]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to get sums and counts, or another function, by group and window to the center.

    Attributes:
        name: as on the command line and in the tables.
        kind: what its center is.
        label: for readers.
        site, center: script names, and arguments after those that each script has.
        error_share: the promised error, as a share of the largest group; None: no promise.
        deadline_s: the promised time from a window's end to an answer that a client can see; None: no promise.
        budget: for Edgewater, keys of the query; ``{share}`` stands for that share of the largest group in bytes.
        group_by: the columns of the groups.
        function: `sum` of bytes and counts, or another one of `MEASURES`.
    """

    name: str
    kind: Kind
    label: str
    site: tuple[str, ...] = ()
    center: tuple[str, ...] = ()
    error_share: float | None = None
    deadline_s: float | None = None
    budget: Mapping[str, Any] = field(default_factory=dict)
    group_by: tuple[str, ...] = ("package", "country")
    function: str = "sum"

    def query(self, largest: int, edges: list[str]) -> dict[str, Any]:
        """Returns the query that an Edgewater way registers."""
        query: dict[str, Any] = {
            "name": "downloads",
            "from": "downloads",
            "group_by": list(self.group_by),
            "measures": MEASURES[self.function],
            "window": {"tumbling": "6h"},
            "edges": edges,
        }
        for key, value in self.budget.items():
            error = value.get("error") if isinstance(value, Mapping) else None
            if isinstance(error, float):
                value = {**value, "error": {"bytes": int(error * largest)}}
            query[key] = value
        return query

    @property
    def statements(self) -> int:
        """The statements of the programs that a user writes for this way, without imports; 0: configuration alone."""
        return sum(_statements(SCRIPTS / words[0]) for words in (self.site, self.center) if words)


def _statements(path: Path) -> int:
    nodes = ast.walk(ast.parse(path.read_text()))
    skipped = (ast.Import, ast.ImportFrom)
    # its docstring is not counted
    return sum(isinstance(node, ast.stmt) and not isinstance(node, skipped) for node in nodes) - 1


RAW, RAW_SAMPLE_10, RAW_SAMPLE_1 = (("raw_site.py", "{level}", rate) for rate in ("1", "0.1", "0.01"))

TOP = 20
"""The way `top` counts this many packages of each country, the most frequent ones."""
MEASURES = {
    "sum": {"bytes": "sum(size)", "n": "count()"},
    "distinct": {"value": "distinct(client)"},
    "p99": {"value": "quantiles(size)"},
    "top": {"value": f"top_k(package, k={TOP})"},
}

TWO_SECONDS = {"staleness": "2s"}

WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way("flink", "flink", "raw records into Flink", RAW, ("flink_center.py",), 0.0),
        Way("spark", "spark", "raw records into Spark", RAW, ("spark_center.py",), 0.0),
        Way("script-exact", "script", "script, exact sums", ("window_site.py",), ("window_center.py",), 0.0),
        Way("script-1%", "script", "script, no groups below 1 %",
            ("window_site.py", "{quarter}"), ("window_center.py",), 0.01),
        Way("sample-10%", "script", "sample of 10 %", RAW_SAMPLE_10, ("sample_center.py",)),
        Way("sample-1%", "script", "sample of 1 %", RAW_SAMPLE_1, ("sample_center.py",)),
        Way("exact", "edgewater", "Edgewater, exact", error_share=0.0),
        Way("error-0.1%", "edgewater", "Edgewater, 0.1 %", error_share=0.001, budget={"budget": {"error": 0.001}}),
        Way("error-1%", "edgewater", "Edgewater, 1 %", error_share=0.01, budget={"budget": {"error": 0.01}}),
        Way("error-1%-2s", "edgewater", "Edgewater, 1 % and 2 s", error_share=0.01, deadline_s=2.0,
            budget={"budget": {"error": 0.01, **TWO_SECONDS}}),
        Way("staleness-2s", "edgewater", "Edgewater, 2 s", deadline_s=2.0, budget={"budget": TWO_SECONDS}),
        Way("accuracy-5%", "edgewater", "Edgewater, by country, accuracy 5 %",
            budget={"accuracy": {"error": "5%", "confidence": "95%", "measure": "bytes"}}, group_by=("country",)),
        *(
            Way(f"script-{function}", "script", f"script, {label} by country", ("function_site.py", function),
                ("function_center.py", function), 0.0, group_by=("country",), function=function)
            for function, label in (("distinct", "sets of clients"), ("p99", "sizes"), ("top", "counts of packages"))
        ),
        *(
            Way(function, "edgewater", f"Edgewater, {function} by country", group_by=("country",), function=function)
            for function in ("distinct", "p99", "top")
        ),
    )
}  # fmt: skip
