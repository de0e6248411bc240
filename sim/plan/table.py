"""Output of a plan's rows as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.plan.grid import Row

if TYPE_CHECKING:
    from rich.table import Table

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def label(row: Row) -> str:
    """Returns the policy's name with its cache policies."""
    chosen = [row[name] for name in ("eviction", "sizing", "estimate") if row[name] is not None]
    return " ".join([row["policy"], *chosen])


def size(amount: float) -> str:
    """Formats bytes, such as 1.5 MiB."""
    at = 0
    while amount >= 1024 and at < len(_UNITS) - 1:
        amount, at = amount / 1024, at + 1
    return f"{amount:.4g} {_UNITS[at]}"


def share(value: float) -> str:
    return f"{value * 100:.3g}%"


def staleness_text(row: Row, windows: float) -> str:
    """Formats a staleness as a percentage of the window and as a duration."""
    return f"{share(windows)} ({duration_text(windows * row['window_ms'])})"


def duration_text(millis: float) -> str:
    """Formats a duration with three digits."""
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if millis >= length:
            return f"{millis / length:.3g}{unit}"
    return f"{millis:.3g}ms"


def error_text(row: Row, value: float) -> str:
    """Formats an error as a percentage of the largest possible one and in the measure's unit."""
    return f"{share(value)} ({value * row['largest_error']:.4g})"


def budget(row: Row) -> str:
    kind = row["budget_kind"]
    shown = staleness_text(row, row["budget"]) if kind == "staleness" else error_text(row, row["budget"])
    if kind == "combined":
        shown = f"{shown}, {duration_text(row['staleness_budget_ms'])}"
    return f"{shown} *" if row["budget_of_query"] else shown


def table(rows: Sequence[Row]) -> Table:
    """Returns a table with a section per bandwidth, kind of budget and policy."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    several = len({row["bandwidth_bytes_s"] for row in rows}) > 1
    result.add_column("policy")
    if several:
        result.add_column("link", justify="right")
    for name in ("budget", "staleness p95", "error p95", "bytes", "per window"):
        result.add_column(name, justify="right")
    for at, row in enumerate(rows):
        following = rows[at + 1] if at + 1 < len(rows) else None
        result.add_row(
            label(row),
            *([f"{size(row['bandwidth_bytes_s'])}/s"] if several else []),
            f"{row['budget_kind']} {budget(row)}",
            staleness_text(row, row["staleness_p95"]),
            error_text(row, row["error_p95"]),
            size(row["bytes"]),
            size(row["bytes"] / row["windows"]),
            end_section=following is not None and _block(following) != _block(row),
            style="bold" if row["budget_of_query"] else None,
        )
    return result


def _block(row: Row) -> tuple[object, ...]:
    return row["bandwidth_bytes_s"], row["budget_kind"], row["staleness_budget_ms"], label(row)
