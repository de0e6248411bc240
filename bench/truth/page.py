"""The tables of docs/coverage.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.truth.cases import PATHS, STATES, is_below, is_fault

PAGE = Path(__file__).resolve().parents[2] / "docs/coverage.md"
BEGIN, END = "<!-- begin: python -m bench.truth --write -->", "<!-- end -->"

Row = dict[str, Any]


def written(page: str, rows: Sequence[Row]) -> str:
    """Returns the page with the tables of these rows; those of paths and states without rows stay."""
    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    kept = {text.split("\n")[0]: f"### {text.strip()}" for text in old.split("### ")[1:]}
    sections = kept | _sections(rows)
    ordered = [sections[name] for name in _headings() if name in sections]
    return "\n\n".join([f"{before}{BEGIN}", *ordered, f"{END}{after}"])


def render(rows: Sequence[Row]) -> str:
    """Returns Markdown: tables per path and state, with a line per measure and a column per population.

    A population is the text of `data` up to its first comma. Of the cases of one population, a cell shows the least
    coverage. Every case below its band has its own line.
    """
    return "\n\n".join(_sections(rows).values())


def _headings() -> dict[str, tuple[str, str]]:
    """Returns path and state by heading."""
    return {f"{path.capitalize()}, {state}": (path, state) for path in PATHS for state in STATES}


def _sections(rows: Sequence[Row]) -> dict[str, str]:
    sections = {}
    for heading, (path, state) in _headings().items():
        chosen = [row for row in rows if row["path"] == path and row["state"] == state]
        if chosen:
            most = max(row["trials"] + row["unstated"] for row in chosen)
            cells = f"{len(chosen):,} cells of up to {most:,} trials."
            sections[heading] = "\n\n".join([f"### {heading}", cells, *_matrices(chosen), *_below(chosen)])
    return sections


def _matrices(rows: Sequence[Row]) -> list[str]:
    """Returns a table for all measures that have the same populations."""
    populations: dict[str, list[str]] = {}
    for row in rows:
        names = populations.setdefault(row["measure"], [])
        if _population(row) not in names:
            names.append(_population(row))
    tables = []
    for columns in dict.fromkeys(map(tuple, populations.values())):
        lines = [f"| measure | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for measure in sorted(name for name, names in populations.items() if tuple(names) == columns):
            each = [[r for r in rows if r["measure"] == measure and _population(r) == name] for name in columns]
            lines.append(f"| {measure} | {' | '.join(map(_cell, each))} |")
        tables.append("\n".join(lines))
    return tables


def _population(row: Row) -> str:
    return str(row["data"]).split(",")[0]


def _cell(rows: Sequence[Row]) -> str:
    """Returns the least coverage, in percent, per confidence; a dash if no interval is stated."""
    shown = []
    for confidence in sorted({row["confidence"] for row in rows}):
        of = [row for row in rows if row["confidence"] == confidence and row["coverage"] is not None]
        least = f"{100 * min(row['coverage'] for row in of):.4g}" if of else "–"
        shown.append(f"**{least}**" if any(map(is_below, of)) else least)
    return " ".join(shown)


def _below(rows: Sequence[Row]) -> list[str]:
    below = [row for row in rows if is_below(row)]
    if not below:
        return []
    lines = ["| below its band | data | confidence | coverage | band | trials | listed |", "|---" * 7 + "|"]
    for row in below:
        low, high = row["band"]
        listed = "**no**" if is_fault(row) else row["listed"]
        lines.append(
            f"| {row['measure']} | {row['data']} | {row['confidence']} | {row['coverage']:.3f} | {low:.3f}–{high:.3f} "
            f"| {row['trials']} | {listed} |"
        )
    return ["\n".join(lines)]
