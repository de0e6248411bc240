"""Tables with the 95th percentile of every policy per budget, and the distance of the default from the optimum.

If the goal is missed, they state by how many sends of the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
FRESH = 2e-3
"""Staleness of the optimum, in windows, above which the goal is `GOAL` times the optimum. Below, a few sends decide."""
GOAL, GOAL_WHERE_FRESH = 1.5, 3.0


def figure_of(kind: str) -> str:
    """Returns the column that a budget of this kind minimises."""
    return "staleness_p95" if kind == "error" else "error_p95"


def by_setting(rows: Sequence[Row]) -> dict[tuple[str, str, str, str], list[Row]]:
    grouped: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["trace"], row["aggregate"], row["bandwidth"], row["kind"]), []).append(row)
    return grouped


def markdown(rows: Sequence[Row]) -> str:
    """Formats the rows as Markdown, with updates per window in brackets."""
    return "\n".join(line for key, here in by_setting(rows).items() for line in _table(key, here)) + "\n"


def _table(key: tuple[str, ...], rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(r["label"] for r in rows))
    figure = figure_of(key[-1])
    lines = ["", f"**{', '.join(key)} budget: {figure}, {rows[0]['windows']} windows**", ""]
    lines += [f"| budget | {' | '.join(names)} | gain / optimal | gap | goal |", "|" + "---|" * (len(names) + 4)]
    for budget in dict.fromkeys(r["budget"] for r in rows):
        by = {r["label"]: r for r in rows if r["budget"] == budget}
        shown = [f"{by[n][figure]:.3g} ({by[n]['updates_per_window']:.0f})" if n in by else "" for n in names]
        lines.append(f"| {budget:g} | {' | '.join(shown)} | {' | '.join(_distance(by, figure))} |")
    return lines


def _distance(by: dict[str, Row], figure: str) -> tuple[str, str, str]:
    if "optimal" not in by or "gain" not in by:
        return "", "", ""
    best, ours = by["optimal"][figure], by["gain"][figure]
    goal = ""
    if figure == "staleness_p95":
        factor = GOAL if best > FRESH else GOAL_WHERE_FRESH
        # Percentiles over few windows may exceed the goal by less than the link's time for one entry.
        sends = (ours - factor * best) / by["gain"]["slot"]
        goal = "met" if sends <= 0.0 else f"missed (at most {factor:g}) by {sends:.2g} sends"
    return f"{ours / best:.2f}" if best > 0.0 else "–", f"{ours - best:.2g}", goal
