"""Compares answers with the truth: the demo's table, and its report as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from rich.table import Table

from sim.demo.queries import EXPECTATIONS, Group, Truth, misses_allowed

Value = tuple[float, float, float]
"""Estimate, lower, upper."""


@dataclass(frozen=True, slots=True)
class QueryReport:
    """The results of one query. Bytes are over all edges. Staleness is the staleness of a window's first answer."""

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


def compare(name: str, answers: Iterable[Mapping[str, Any]], truth: Truth, shipped: int, raw: int) -> QueryReport:
    """Compares the final answers of a query with the truth and its budget."""
    problems: list[str] = []
    errors, truths, inside, staleness = [], [], [], []
    groups: set[Group] = set()
    seen: dict[int, str] = {}
    for answer in answers:
        start = millis(answer["window"]["start"])
        seen[start] = answer["phase"]
        staleness.append(answer["quality"]["first_staleness_ms"])
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


@dataclass(frozen=True, slots=True)
class EarlyReport:
    """The first early answers of a query, compared with the final values of their windows.

    Attributes:
        early: windows whose first answer was early.
        stated: early answers with an interval.
        held: intervals that contain the final value.
        promised: early answers whose contract is met: they promise to be within the accuracy's error.
        within: promised answers that are within it.
        error_p50, error_max: relative, over the answers with an interval.
        earlier_ms_p50: wall time from an early answer to the final one.
    """

    name: str
    windows: int
    early: int
    stated: int
    held: int
    promised: int
    within: int
    error_p50: float | None
    error_max: float | None
    earlier_ms_p50: float | None
    accuracy: str
    contract_met: bool
    problems: tuple[str, ...] = ()


def compare_early(
    spec: Mapping[str, Any], firsts: Iterable[Mapping[str, Any]], finals: Iterable[Mapping[str, Any]]
) -> EarlyReport:
    """Compares the first answer of each window of a query without groups with the final answer.

    The contract is met unless more intervals missed the final value than chance explains.
    """
    accuracy = spec["accuracy"]
    measure = accuracy["measure"]
    target, confidence = (float(accuracy[part].rstrip("%")) / 100 for part in ("error", "confidence"))
    final = {answer["window"]["start"]: answer for answer in finals}
    early = [answer for answer in firsts if answer["phase"] == "early"]
    errors, held, earlier, kept = [], [], [], []
    for answer in early:
        last = final[answer["window"]["start"]]
        cell, exact = answer["data"][0][measure], last["data"][0][measure]["estimate"]
        earlier.append(millis(last["given_at"]) - millis(answer["given_at"]))
        if cell["lower"] is not None and cell["upper"] is not None:
            errors.append(abs(cell["estimate"] - exact) / abs(exact))
            held.append(cell["lower"] <= exact <= cell["upper"])
            if answer["contract"]["met"]:
                kept.append(errors[-1] <= target)
    missed = len(held) - sum(held)
    met = missed <= misses_allowed(len(held), 1 - confidence)
    return EarlyReport(
        name=spec["name"],
        windows=len(final),
        early=len(early),
        stated=len(held),
        held=sum(held),
        promised=len(kept),
        within=sum(kept),
        error_p50=float(np.median(errors)) if errors else None,
        error_max=max(errors, default=None),
        earlier_ms_p50=float(np.median(earlier)) if earlier else None,
        accuracy=f"{accuracy['error']} with {accuracy['confidence']}",
        contract_met=met,
        problems=() if met else (f"{missed} of {len(held)} early intervals do not contain the final value",),
    )


def early_table(reports: Iterable[EarlyReport]) -> Table:
    """Returns the table of the early answers."""
    result = Table(title="First early answers compared with the final values of their windows", title_style="bold")
    for name in (
        "query",
        "accuracy",
        "early",
        "intervals held",
        "within the error, of promised",
        "error p50",
        "max",
        "earlier than final, p50",
    ):
        result.add_column(name, justify="left" if name in ("query", "accuracy") else "right")
    for r in reports:
        result.add_row(
            r.name,
            r.accuracy,
            f"{r.early} of {r.windows}",
            f"{r.held} of {r.stated}",
            f"{r.within} of {r.promised}",
            *("–" if x is None else f"{100 * x:.2f} %" for x in (r.error_p50, r.error_max)),
            "–" if r.earlier_ms_p50 is None else f"{r.earlier_ms_p50:,.0f} ms",
        )
    return result


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
            r.name,
            str(r.windows),
            str(r.groups),
            f"{r.max_error:.4g}",
            r.budget,
            met,
            f"{r.bytes_shipped / 1024:,.0f} KiB",
            f"{r.bytes_raw_gzip / 1024:,.0f} KiB",
            f"{r.bytes_shipped / r.bytes_raw_gzip:.2f}",
            f"{r.staleness_ms_p50:.0f} ms",
            f"{r.staleness_ms_p95:.0f} ms",
        )
    return result
