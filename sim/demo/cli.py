"""`edgewater demo`."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from edgewater.base.timestamps import rfc3339
from sim.demo import data
from sim.demo.compare import EarlyReport, QueryReport, compare, compare_early, early_table, table
from sim.demo.landings import landings
from sim.demo.queries import EXPECTATIONS, SPECS, Truth
from sim.demo.run import Demo, DemoFailed

FIRST_MS, LAST_MS = 1_356_998_400_000, 1_388_534_400_000  # format: the year 2013
SETTLE_TIMEOUT_S = 240.0  # limit: wait for the last windows, on a busy machine too


@click.command()
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=70.0,
    show_default=True,
    help="Wall time for the replay of the year 2013.",
)
@click.option("--stay", is_flag=True, help="Keep all processes running afterwards, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=Path(".edgewater/demo"),
    show_default=True,
    help="Directory for state, configurations and logs; removes the state of an earlier run.",
)
@click.option("--port", default=7480, show_default=True, help="Port of the REST API on loopback; 0: a free port.")
def demo(seconds: float, stay: bool, as_json: bool, directory: Path, port: int) -> None:
    """Run a center and three edges on a year of flights, and compare each answer with the truth.

    Starts the center and the edges (EWR, JFK, LGA) as processes on this machine. The edges replay the 336,776
    flights of 2013. The flights of October are also pushed to them, each when it lands, so that the last ones of a day
    come hours after it. The center answers five queries. One of them is answered early, and these answers are compared
    with the final ones. Exit status 0 only if every contract was met. Another query expects an edge that never
    connects: look at it in the console.
    """
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 140)
    began = time.monotonic()
    try:
        flights = data.load()
        tables = {"flights": flights, "landings": landings(flights)}
        files = data.write_airports(flights, directory.absolute() / "data")
    except OSError as exc:
        raise click.ClickException(str(exc)) from exc
    run = Demo(directory.absolute(), seconds, port)
    # SIGTERM stops the demo like Ctrl-C, with all processes that it has started; also where a shell has it in the
    # background, which ignores SIGINT.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    reports: list[QueryReport] = []
    early: list[EarlyReport] = []
    try:
        console.print(f"starting the center (Spark needs a few seconds); logs: {directory}")
        run.start_center()
        run.register()
        console.print(f"look at it: [bold]{run.url}/ui/[/]  (queries: {run.url}/v1/queries, API: {run.url}/docs)")
        run.start_edges(files, tables["landings"])
        truths = {spec["name"]: EXPECTATIONS[spec["name"]].truth(tables[spec["from"]]) for spec in SPECS}
        _follow(run, truths, console)
        took = time.monotonic() - began
        reports = [_report(run, spec["name"], truths[spec["name"]], tables[spec["from"]]) for spec in SPECS]
        early = [
            compare_early(spec, run.first_answers(spec["name"]), run.answers(spec["name"]))
            for spec in SPECS
            if "accuracy" in spec
        ]
        _finish(reports, early, took, console, as_json)
        if stay:
            console.print(f"running until Ctrl-C: {run.url}/ui/")
            while True:
                time.sleep(1)
                run.check_alive()
    except DemoFailed as exc:
        raise click.ClickException(str(exc)) from exc
    except KeyboardInterrupt:
        console.print("stopping")
        if not reports:
            sys.exit(130)
    finally:
        run.stop()
    met = [*(r.contract_met for r in reports), *(r.contract_met for r in early)]
    sys.exit(0 if all(met) else 1)


def _report(run: Demo, name: str, truth: Truth, flights: Any) -> QueryReport:
    raw = data.raw_gzip_bytes(flights, EXPECTATIONS[name].columns)
    return compare(name, run.answers(name), truth, run.shipped_bytes(name), raw)


def _finish(
    reports: list[QueryReport], early: list[EarlyReport], seconds: float, console: Console, as_json: bool
) -> None:
    document = {
        "seconds": round(seconds, 1),
        "queries": [asdict(r) for r in reports],
        "early": [asdict(r) for r in early],
    }
    if as_json:
        click.echo(json.dumps(document))
    else:
        console.print(table(reports, seconds))
        console.print(early_table(early))
    problems = [(r.name, p) for r in reports for p in r.problems] + [(r.name, p) for r in early for p in r.problems]
    for name, problem in problems:
        console.print(f"[red]{name}: {problem}[/]")


def _follow(run: Demo, truths: dict[str, Truth], console: Console) -> None:
    """Shows the progress until the last window of every query is final."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(60),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=console,
    )
    year = bar.add_task("2013", total=LAST_MS - FIRST_MS)
    last = {name: rfc3339(max(truth)) for name, truth in truths.items()}
    deadline: float | None = None
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            state = run.progress()
            reached = min((_watermark(e) for e in state["edges"]), default=FIRST_MS)
            bar.update(year, completed=max(0, min(reached, LAST_MS) - FIRST_MS))
            live.update(_view(bar, state["latest"]))
            if reached >= LAST_MS:
                if all(run.is_final(name, start) for name, start in last.items()):
                    return
                deadline = deadline or time.monotonic() + SETTLE_TIMEOUT_S
                if time.monotonic() > deadline:
                    raise DemoFailed(
                        f"the last windows were not final {SETTLE_TIMEOUT_S:.0f} s after the edges had ended"
                    )
            time.sleep(0.5)


def _watermark(edge: dict[str, Any]) -> int:
    for stream in edge["streams"]:
        if stream["name"] == "flights" and stream["watermark_ms"] is not None:
            return int(stream["watermark_ms"])
    return FIRST_MS


def _view(bar: Progress, latest: dict[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(bar)
    answers = Table(box=None, padding=(0, 2))
    for column in ("query", "window", "phase", "example", "staleness"):
        answers.add_column(column)
    for name, answer in latest.items():
        if answer is not None and answer["data"]:
            stale = f"{answer['quality']['staleness_ms']} ms"
            answers.add_row(name, answer["window"]["start"][:10], answer["phase"], _sample(answer["data"]), stale)
    grid.add_row(answers)
    return grid


def _sample(rows: list[dict[str, Any]]) -> str:
    """Formats one row of an answer."""
    row = rows[0]
    group = " ".join(str(v) for v in row.get("group", {}).values())
    values = []
    for name, value in row.items():
        if name != "group":
            cell = value["quantiles"]["0.5"] if "quantiles" in value else value
            estimate, lower, upper = (
                "?" if x is None else f"{x:.5g}" for x in map(cell.get, ("estimate", "lower", "upper"))
            )
            values.append(f"{name} {estimate} [{lower}, {upper}]")
    return f"{group}: " * bool(group) + ", ".join(values)
