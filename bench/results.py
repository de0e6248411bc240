"""`python -m bench.results`: puts the figures of `bench/out` into `docs/results.md` and `docs/explanation/papers.md`.

A table of a page stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. A table whose bench has not been run
here keeps its figures and its date; the program names these tables and the commands that measure them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from bench import paper_tables as papers
from bench.budgets.tables import FRESH, GOAL, GOAL_WHERE_FRESH

OUT = Path("bench/out")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "results.md"
PAPERS = PAGE.parent / "explanation" / "papers.md"
Cells = list[list[str]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the page.

    Attributes:
        title: what is measured.
        command: what measures it.
        file: what the command writes, in `bench/out`.
        cells: takes the content of the file and returns the rows, the header first.
    """

    title: str
    command: str
    file: str
    cells: Callable[[Any], Cells]

    def markdown(self, path: Path) -> str:
        """Returns the table, its command, and the day on which the file was written."""
        day = datetime.fromtimestamp(path.stat().st_mtime, UTC).date()
        head, *rows = self.cells(json.loads(path.read_text()))
        lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
        return "\n".join([f"**{self.title}** `{self.command}`, {day}:", "", *lines])


def figure(value: Any) -> str:
    """Returns a number with three digits, or all digits before the point."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "–" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def columns(rows: Sequence[Any], names: dict[str, str]) -> Cells:
    """Returns the members `names` of each row, under their headings."""
    return [list(names.values()), *([figure(row.get(name)) for name in names] for row in rows)]


def named(rows: dict[str, Any], heading: str, names: dict[str, str]) -> Cells:
    """Returns a row per name, for documents that map names to rows."""
    head, *cells = columns([row for row in rows.values() if isinstance(row, dict)], names)
    titles = [name for name, row in rows.items() if isinstance(row, dict)]
    return [[heading, *head], *([title, *row] for title, row in zip(titles, cells, strict=True))]


def edge_core(document: dict[str, Any]) -> Cells:
    edge, memory = document["edge"], document["memory"]
    rates = {
        f"{name.removesuffix('_records_s').replace('_', ' ')}, M records/s": rate / 1e6
        for name, rate in edge.items()
        if name.endswith("records_s")
    }
    row = rates | {"MiB resident": memory["resident_mib"]}
    return columns([row], dict(zip(row, row, strict=True)))


def small_edge(document: dict[str, Any]) -> Cells:
    names = {"core_percent": "% of a core", "us_per_record": "µs of CPU per record", "rss_mib": "MiB resident"}
    return named(document["rows"]["edge"], "load", names)


def center(document: dict[str, Any]) -> Cells:
    rates = document["rows"]["rates"]
    kinds = {
        "small": "3.6 KB, 32 in a frame", "small_of_32_edges": "3.6 KB, of 32 edges", "large": "200 KB, one a window",
        "large_of_8_edges": "200 KB, of 8 edges",
    }  # fmt: skip
    close = rates["queries"]
    each = {"cpu_us_per_partial_of_the_center": 1e6 * close["close_cpu_s"] / close["queries"]}
    names = {"partials_s": "partials/s", "mb_s": "MB/s", "cpu_us_per_partial_of_the_center": "center's CPU, µs"}
    rows = {title: rates[kind] for kind, title in kinds.items()}
    return named(rows | {f"one of {close['queries']} queries that close at once": each}, "partials", names)


def sessions(document: dict[str, Any]) -> Cells:
    return columns(
        [document["rows"]["sessions"]],
        {
            "sessions": "sessions", "active": "that send a frame/s", "first_join_s": "all joined, s",
            "rejoin_after_restart_s": "all back, s", "ack_ms_p50": "ack p50, ms", "ack_ms_p99": "ack p99, ms",
            "gateway_bytes_per_session": "bytes a session",
        },
    )  # fmt: skip


def takeover(document: dict[str, Any]) -> Cells:
    names = {"next_answer_s": "next answer, s", "windows": "windows", "wrong_or_incomplete": "wrong or incomplete"}
    return named(document["rows"]["takeover"], "what fails", names)


def several(document: dict[str, Any]) -> Cells:
    rows = {**document["rows"]["executors"]["rows"], **document["rows"]["drivers"].get("rows", {})}
    return [["", *rows], ["partials/s", *(figure(row["partials_s"]) for row in rows.values())]]


def budgets(rows: list[dict[str, Any]]) -> Cells:
    """Counts the error budgets with which the default policy meets its goal, by trace."""
    best = {_setting(row): row["staleness_p95"] for row in rows if row["label"] == "optimal"}
    met: dict[str, list[bool]] = {}
    for row in rows:
        if row["label"] == "gain" and row["kind"] == "error":
            optimum = best[_setting(row)]
            goal = (GOAL if optimum > FRESH else GOAL_WHERE_FRESH) * optimum
            met.setdefault(row["trace"], []).append(row["staleness_p95"] <= goal)
    counts = [f"{sum(each)} of {len(each)}" for each in met.values()]
    return [["", *met], ["budgets that meet the goal", *counts]]


def _setting(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["trace"], row["aggregate"], row["bandwidth"], row["kind"], row["budget"]


def least_bytes(rows: list[dict[str, Any]]) -> Cells:
    shown = [
        [
            f"{row['error']:.1%}", "error alone" if row["staleness"] is None else "both", figure(row["bytes"]),
            f"1/{row['raw_bytes'] / row['bytes']:.0f}", f"{row['entries'] / row['best_entries']:.2f}",
            figure(row["late_windows"]),
        ]
        for row in rows
    ]  # fmt: skip
    return [["error", "budget", "bytes", "of the columns", "entries / fewest", "late windows"], *shown]


def synopses(document: dict[str, Any]) -> Cells:
    names = {"synopsis": "synopsis", "ours_m_per_s": "M updates/s", "ratio": "times the peer", "goal_ratio": "goal"}
    return columns([row for row in document["throughput"] if row["cores"] == 1], names)


def sources(rows: list[dict[str, Any]]) -> Cells:
    names = {"source": "source", "records_per_cpu_s": "records per second of CPU", "bytes_per_record": "bytes a record"}
    return columns(rows, names)


SCALE = "python -m bench.scale --only"
TABLES = {
    "edge-core": Table(
        "One core, a group-by of three columns over 100,000 groups.", "python -m bench.first_light",
        "first_light.json", edge_core,
    ),
    "small-edge": Table(
        "A real agent, `sum(size), count()` by package and country, windows of 5 s.", f"{SCALE} edge", "scale.json",
        small_edge,
    ),
    "sources": Table("Decoding.", "python -m bench.sources", "sources-cost.json", sources),
    "center": Table("Partials, without a limit per edge.", f"{SCALE} rates", "scale.json", center),
    "sessions": Table("Edges at one gateway, 20 queries.", f"{SCALE} sessions", "scale.json", sessions),
    "takeover": Table(
        "From a fault to the answer of a window that was shipped after it.", f"{SCALE} takeover", "scale.json", takeover
    ),
    "several": Table(
        "Several processes on two cores; a driver has 0.4 of a core.", f"{SCALE} executors --only drivers",
        "scale.json", several,
    ),
    "budgets": Table(
        "Error budgets whose staleness is at most 1.5 times the optimum's (3 times below 0.002 windows).",
        "python -m bench.budgets --only frontier", "budgets.json", budgets,
    ),
    "least-bytes": Table(
        "Four edges on links that carry what must be sent in a fortieth of a window.", "python -m bench.least_bytes",
        "least-bytes.json", least_bytes,
    ),
    "synopses": Table(
        "Updates on one core, beside DataSketches and ddsketch.", "python -m bench.synopses --only throughput",
        "synopses.json", synopses,
    ),
}  # fmt: skip

BUDGETS = (
    "python -m bench.budgets --only policies --only comparison --trace zipf --records 30000 --windows 8 --error 1e-4"
    " --error 3e-4 --staleness 0.03 --processes 1 --json bench/out/budgets-papers.json"
)
EARLY = "python -m bench.early_answers --part baselines --windows 60 --seed 5 --workers 1 --fresh"
KLINK = (
    "python -m bench.scheduling --only load --only nodes --only memory --only accuracy --only overhead --seconds 30"
    " --seeds 1 --processes 1"
)
CONDOR = "python -m bench.condor --rows 1000000 --only"
PAPER_TABLES = {
    "heintz-error": Table(
        "Staleness in windows, 95th percentile.", BUDGETS, "budgets-papers.json", papers.error_budgets
    ),
    "heintz-staleness": Table(
        "Error as a share of the largest group, 95th percentile.", BUDGETS, "budgets-papers.json",
        papers.staleness_budgets,
    ),
    "aion-latency": Table(
        "Milliseconds after the end of the window, median and mean.", EARLY, "early_answers.json", papers.aion_latency
    ),
    "aion-sampling": Table(
        "Share of the records that is processed, and share of the windows within 5 %.", EARLY, "early_answers.json",
        papers.aion_sampling,
    ),
    "klink-load": Table(
        "Mixed costs, uniform delays; seconds, mean and 99th percentile.", KLINK, "scheduling.json", papers.klink_load
    ),
    "klink-nodes": Table(
        "80 queries on several nodes; seconds, mean and 99th percentile.", KLINK, "scheduling.json", papers.klink_nodes
    ),
    "klink-memory": Table(
        "70 queries (110 %), queued records capped; seconds, mean and 99th percentile.", KLINK, "scheduling.json",
        papers.klink_memory,
    ),
    "klink-interval": Table(
        "Share of the watermarks inside the interval.", KLINK, "scheduling.json", papers.klink_interval
    ),
    "klink-overhead": Table("The scheduler's CPU, of the queries'.", KLINK, "scheduling.json", papers.klink_overhead),
    "condor-windows": Table(
        "Windows that overlap; M records/s.", f"{CONDOR} windows", "condor.json",
        papers.by_number("windows", "windows"),
    ),
    "condor-sources": Table(
        "Partitions that records come in; M records/s.", f"{CONDOR} sources", "condor.json",
        papers.by_number("sources", "sources"),
    ),
    "condor-disorder": Table(
        "10 % of the records up to 10 s late; M records/s.", f"{CONDOR} disorder", "condor.json",
        papers.by_number("disorder", "class"),
    ),
    "condor-accuracy": Table(
        "Mean relative error, on New York's green taxis.", f"{CONDOR} accuracy", "condor.json", papers.condor_accuracy
    ),
    "condor-evaluation": Table(
        "The operators that ask synopses.", f"{CONDOR} evaluation", "condor.json", papers.condor_evaluation
    ),
    "condor-skew": Table(
        "Count-min, one synopsis or one per stratum.", f"{CONDOR} skew", "condor.json", papers.condor_skew
    ),
    "condor-cost": Table(
        "Global synopses and one thread without Spark.", f"{CONDOR} cost", "condor.json", papers.condor_cost
    ),
}  # fmt: skip
PAGES = {PAGE: TABLES, PAPERS: PAPER_TABLES}


def assemble(page: str, out: Path, tables: Mapping[str, Table] = TABLES) -> tuple[str, dict[str, str]]:
    """Returns the page with the tables of the files in `out`, and why each other table keeps its figures."""
    kept: dict[str, str] = {}
    for name, table in tables.items():
        path, block = out / table.file, re.compile(rf"(<!-- begin {name} -->).*?(<!-- end {name} -->)", re.DOTALL)
        if not block.search(page):
            kept[name] = "the page has no such table"
        elif not path.exists():
            kept[name] = f"no {path}: {table.command}"
        else:
            try:
                text = table.markdown(path)
            except KeyError as exc:
                kept[name] = f"{path} lacks {exc}: {table.command}"
                continue
            page = block.sub(lambda found, text=text: f"{found[1]}\n{text}\n{found[2]}", page)  # type: ignore[misc]
    return page, kept


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=OUT, show_default=True)
def main(out: Path) -> None:
    """Write the figures of `bench/out` into docs/results.md and docs/explanation/papers.md."""
    for path, tables in PAGES.items():
        page, kept = assemble(path.read_text(), out, tables)
        path.write_text(page)
        for name, reason in kept.items():
            click.echo(f"{name} keeps its figures: {reason}")


if __name__ == "__main__":
    main()
