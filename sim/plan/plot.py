"""Plots of a plan: staleness or error, and bytes, as functions of the budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sim.plan.grid import Row
from sim.plan.table import duration_text, label, size

SUFFIXES = (".svg", ".png", ".pdf")
_STYLE: dict[str, dict[str, Any]] = {
    "caching": {"marker": "o", "lw": 1.8},
    "optimal": {"color": "black", "ls": "--", "marker": ""},
    "batching": {"color": "tab:red", "ls": ":", "marker": "s"},
    "random": {"color": "tab:brown", "ls": ":", "marker": "x"},
    "streaming": {"color": "tab:gray", "ls": ":", "marker": "v"},
}
_TITLES = {
    "error": ("error budget (share of the largest possible error)", "staleness p95 (windows)", "staleness_p95"),
    "staleness": ("staleness budget (windows)", "error p95 (share of the largest possible error)", "error_p95"),
    "combined": ("error budget (share of the largest possible error)", "staleness p95 (windows)", "staleness_p95"),
}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Writes a figure with one row of panels per bandwidth and kind of budget: staleness or error, and bytes.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # A fixed salt: the same rows give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "edgewater", "font.size": 9}):
        lines = list(dict.fromkeys((r["bandwidth_bytes_s"], r["budget_kind"]) for r in rows))
        figure = Figure(figsize=(11, 0.6 + 3.7 * len(lines)), layout="constrained")
        panels = figure.subplots(len(lines), 2, squeeze=False)
        for (bandwidth, kind), (gain, cost) in zip(lines, panels, strict=True):
            here = [r for r in rows if (r["bandwidth_bytes_s"], r["budget_kind"]) == (bandwidth, kind)]
            x, y, column = _TITLES[kind]
            _curves(gain, here, column)
            _curves(cost, here, "bytes")
            cost.yaxis.set_major_formatter(lambda amount, _: size(amount))
            cost.yaxis.set_minor_formatter(lambda amount, _: size(amount) if _leads(amount, (2, 5)) else "")
            cost.tick_params(axis="y", which="both", labelsize=7)
            gain.set(xlabel=x, ylabel=y)
            cost.set(xlabel=x, ylabel=f"bytes, {here[0]['edges']} edges, {here[0]['windows']} windows")
            gain.set_title(f"{size(bandwidth)}/s per edge, {here[0]['aggregate']}", loc="left")
        lines_of = dict(zip(*reversed(panels[0][0].get_legend_handles_labels()), strict=True))
        figure.legend(lines_of.values(), lines_of.keys(), loc="outside lower center", ncols=5, fontsize=8)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=130, metadata=metadata)


def _leads(amount: float, digits: tuple[int, ...]) -> bool:
    """Returns whether the first decimal digit is one of these."""
    return amount > 0 and int(f"{amount:e}"[0]) in digits


def _line(row: Row) -> str:
    """The name of a curve: under combined budgets there is one per staleness budget."""
    within = row["staleness_budget_ms"]
    return label(row) if within is None else f"{label(row)}, {duration_text(within)}"


def _curves(panel: Any, rows: Sequence[Row], column: str) -> None:
    for name in dict.fromkeys(_line(r) for r in rows):
        line = [r for r in rows if _line(r) == name]
        style: dict[str, Any] = {"ms": 4, **_STYLE[line[0]["policy"]]}
        panel.plot([r["budget"] for r in line], [r[column] for r in line], label=name, clip_on=False, **style)
    _scale(panel, "x", [r["budget"] for r in rows])
    _scale(panel, "y", [r[column] for r in rows])
    for own in {r["budget"] for r in rows if r["budget_of_query"]}:
        panel.axvline(own, color="tab:green", lw=1.0, label="the query's budget")
    panel.grid(visible=True, which="major", alpha=0.3)


def _scale(panel: Any, axis: str, values: Sequence[float]) -> None:
    """Sets a logarithmic scale; linear below the least positive value if there are zeros."""
    positive = [v for v in values if v > 0]
    if not positive:
        return
    if len(positive) == len(values):
        getattr(panel, f"set_{axis}scale")("log")
    else:
        getattr(panel, f"set_{axis}scale")("symlog", linthresh=min(positive))
        getattr(panel, f"set_{axis}lim")(**{"left" if axis == "x" else "bottom": 0.0})
