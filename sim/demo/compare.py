"""Compares answers with the truth: the demo's table and `demo-report.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np
from rich.table import Table

from sim.demo.queries import EXPECTATIONS, Group, Truth

Value = tuple[float, float, float]
"""Estimate, lower, upper."""


@dataclass(frozen=True, slots=True)
class QueryReport:
    """The results of one query. Bytes are over all edges; staleness is that of a window's first answer."""

    name: str
    windows: int
    groups: int
    max_error: float
    budget: str
    contract_met: bool
    bytes_shipped: int
    bytes_raw_gzip: int
    staleness_ms_p50: float
    staleness_ms_p95: float
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(name: str, answers: Iterable[Mapping[str, Any]], truth: Truth, shipped: int, raw: int) -> QueryReport:
    """Compares the final answers of a query with the truth and its budget."""
    problems: list[str] = []
    errors, truths, inside, staleness = [], [], [], []
    groups: set[Group] = set()
    seen: dict[int, str] = {}
    for answer in answers:
        start = millis(answer["window"]["start"])
        seen[start] = answer["phase"]
        staleness.append(answer["quality"]["staleness_ms"])
        if not answer["contract"]["met"]:
            problems.append(f"window {answer['window']['start']}: {answer['contract']['violations']}")
        rows = {group: values for row in answer["data"] for group, values in [_row(row)]}
        for group, values in truth.get(start, {}).items():
            groups.add(group)
            for key, exact in values.items():
                if exact is None:
                    continue
                # A group without updates has the value 0, with the bounds of the withheld amounts.
                estimate, lower, upper = rows.get(group, {}).get(key, _withheld(answer, key))
                errors.append(abs(estimate - exact))
                truths.append(exact)
                inside.append(lower - 1e-9 <= exact <= upper + 1e-9)
        if extra := set(rows) - set(truth.get(start, {})):
            problems.append(f"window {answer['window']['start']}: groups that do not exist: {sorted(map(str, extra))}")
    problems += [f"window {start} has no answer" for start in truth if start not in seen]
    problems += [f"window {start} is {phase}, not final" for start, phase in seen.items() if phase != "final"]
    expectation = EXPECTATIONS[name]
    met = bool(errors) and expectation.is_met(np.array(errors), np.array(truths), np.array(inside))
    if not met:
        problems.append(
            f"not within {expectation.budget}: {int((~np.array(inside)).sum())} values outside of their interval"
        )
    return QueryReport(
        name=name,
        windows=len(seen),
        groups=len(groups),
        max_error=float(max(errors, default=np.nan)),
        budget=expectation.budget,
        contract_met=not problems,
        bytes_shipped=shipped,
        bytes_raw_gzip=raw,
        staleness_ms_p50=float(np.quantile(staleness, 0.5)) if staleness else np.nan,
        staleness_ms_p95=float(np.quantile(staleness, 0.95)) if staleness else np.nan,
        problems=tuple(problems[:20]),
    )


def millis(text: str) -> int:
    """Converts an RFC 3339 time to milliseconds since the epoch."""
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def _row(row: Mapping[str, Any]) -> tuple[Group, dict[str, Value]]:
    values: dict[str, Value] = {}
    for name, value in row.items():
        if name == "group":
            continue
        parts = value.get("quantiles", {"": value})
        for quantile, part in parts.items():
            if part["estimate"] is not None:
                key = f"{name}@{quantile}" if quantile else name
                values[key] = (part["estimate"], part["lower"], part["upper"])
    return tuple(row.get("group", {}).values()), values


def _withheld(answer: Mapping[str, Any], measure: str) -> Value:
    withheld = answer["quality"]["error"]["withheld"]
    bounds = withheld.get(measure, {}) if isinstance(withheld, Mapping) else {}
    return 0.0, -float(bounds.get("below", 0.0)), float(bounds.get("above", 0.0))


def table(reports: Iterable[QueryReport], seconds: float) -> Table:
    """Returns the table of results."""
    result = Table(title=f"Answers compared with the file, after {seconds:.0f} s", title_style="bold")
    for name in ("query", "windows", "groups", "largest error", "contract", "met"):
        result.add_column(name, justify="left" if name in ("query", "contract") else "right")
    for name in ("shipped", "raw, gzip", "ratio", "staleness p50", "p95"):
        result.add_column(name, justify="right")
    for r in reports:
        met = "[green]yes[/]" if r.contract_met else "[red]NO[/]"
        result.add_row(
            r.name, str(r.windows), str(r.groups), f"{r.max_error:.4g}", r.budget, met,
            f"{r.bytes_shipped / 1024:,.0f} KiB", f"{r.bytes_raw_gzip / 1024:,.0f} KiB",
            f"{r.bytes_shipped / r.bytes_raw_gzip:.2f}", f"{r.staleness_ms_p50:.0f} ms", f"{r.staleness_ms_p95:.0f} ms",
        )  # fmt: skip
    return result
