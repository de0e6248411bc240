"""`edgewater plan`: what a budget would have bought on the user's own data."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.caching import ESTIMATES, EVICTIONS, SIZINGS, CacheSpec
from edgewater.errors import InvalidConfig, StorageError
from edgewater.query import ErrorBudget, QuerySpec
from edgewater.streams import TIME_COLUMN
from edgewater.syntax import column_names, parse_sql
from sim.budgets.optimal import ROUNDING
from sim.budgets.outcome import truth_per_window
from sim.plan.budgets import Budget, bandwidth, budgets
from sim.plan.cost import update_bytes
from sim.plan.event_times import NUMBER, UNITS, event_times
from sim.plan.grid import POLICIES, Row, Scene, combinations, measure_all, named
from sim.plan.plot import SUFFIXES, plot
from sim.plan.query import Asked, left_out, read_query
from sim.plan.reader import Wanted, read_files
from sim.plan.table import label, table, write_csv
from sim.plan.trace import Note, PlacedTrace, Placement, build_trace

PATH = click.Path(dir_okay=False, path_type=Path)


def _query_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """What is asked, of which columns."""
    for option in reversed((
        click.argument("trace", nargs=-1, required=True, type=click.Path(path_type=Path)),
        click.option("--query", "query_file", type=PATH, help="YAML file of a query; the flags below change it."),
        click.option("--time", "time", multiple=True, required=True, metavar="COL",
                     help="Event time. Twice: a date and a time of day, joined."),
        click.option("--time-unit", type=click.Choice([*UNITS]), help="Of times that are numbers.  [default: ms]"),
        click.option("--key", "keys", multiple=True, metavar="COL", help="Group by it.  [default: as the query does]"),
        click.option("--value", metavar="COL", help="What is aggregated.  [default: that of the query's measure]"),
        click.option("--aggregate", metavar="NAME",
                     help="sum, count, min or max.  [default: the query's; sum of --value, or count]"),
        click.option("--measure", metavar="NAME",
                     help="The query's measure that is judged.  [default: that of its error budget, or its first]"),
        click.option("--window", metavar="DURATION", help="Tumbling windows.  [default: the query's, or 30]"),
    )):  # fmt: skip
        command = option(command)
    return command


def _grid_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """What is tried. Each of these may be given several times."""
    for option in reversed((
        click.option("--bandwidth", "bandwidths", multiple=True, required=True, metavar="SIZE",
                     help="Bytes per second of each edge's link, such as 64KiB."),
        click.option("--budget", "error_budgets", multiple=True, metavar="AMOUNT",
                     help="Error: 1000, 1MB, or 0.1% of the largest possible error.  [default: 1e-5 … 1e-1 of it]"),
        click.option("--staleness", "stalenesses", multiple=True, metavar="DURATION", help="2s, or 10% of a window."),
        click.option("--policy", "policies", multiple=True, metavar="NAME",
                     help=f"{', '.join(POLICIES)}, or all.  [default: caching, what an edge does]"),
        click.option("--eviction", "evictions", multiple=True, metavar="NAME",
                     help=f"Of caching: {', '.join(EVICTIONS)}, or all.  [default: the query's, or {EVICTIONS[0]}]"),
        click.option("--estimate", "estimates", multiple=True, metavar="NAME",
                     help=f"Of caching under --staleness: {', '.join(ESTIMATES)}, or all."),
        click.option("--sizing", "sizings", multiple=True, metavar="NAME",
                     help=f"Of caching under --staleness: {', '.join(SIZINGS)}, or all."),
    )):  # fmt: skip
        command = option(command)
    return command


def _world_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where it runs, and where the results go."""
    for option in reversed((
        click.option("--edges", type=click.IntRange(1, 10_000), help="[default: 1, or the values of --edge-column]"),
        click.option("--edge-column", metavar="COL", help="Records of one value are at one edge."),
        click.option("--spread", type=click.Choice(["records", "keys"]), default="records", show_default=True,
                     help="Without --edge-column: what is drawn an edge for."),
        click.option("--windows", default=30, show_default=True, type=click.IntRange(1), help="At most so many."),
        click.option("--update-bytes", type=click.FloatRange(1), metavar="N",
                     help="What an update costs on the wire.  [default: measured on frames of the trace]"),
        click.option("--seed", default=0, show_default=True, type=click.IntRange(0)),
        click.option("--jobs", type=click.IntRange(1), help="Processes.  [default: as many as there are cores]"),
        click.option("--json", "as_json", is_flag=True, help="Rows as a JSON list instead of a table."),
        click.option("--csv", "csv_file", type=PATH, help="Writes the rows to a CSV file."),
        click.option("--plot", "plot_file", type=PATH, help="Draws the curves: FILE.svg, .png or .pdf."),
    )):  # fmt: skip
        command = option(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@_query_flags
@_grid_flags
@_world_flags
def plan(as_json: bool, csv_file: Path | None, plot_file: Path | None, jobs: int | None, **asked: Any) -> None:
    """Try budgets on your own data: staleness, error and bytes for each.

    TRACE is one or more files: CSV with a header, NDJSON (also .gz) or Parquet. Its records are replayed
    through the production edges over links of the bandwidth you state. A day of CRAN's downloads, four edges
    with 64 bytes a second each, bytes by package and country:

    \b
      edgewater plan 2015-01-02.csv.gz --time date --time time --key package --key country \\
          --value size --window 1h --windows 6 --edges 4 --bandwidth 64 \\
          --policy caching --policy optimal --plot plan.svg

    Pick the budget on the curve and put it into the query (`budget: {error: {bytes: 10MB}}`). Staleness is the 95th
    percentile over windows, error the largest of all groups as a share of the largest group's value.
    """
    if plot_file is not None and plot_file.suffix not in SUFFIXES:
        raise InvalidConfig("--plot", str(plot_file), f"a file that ends in {', '.join(SUFFIXES)}")
    rows = _rows(asked, jobs or os.cpu_count() or 1, lambda text: click.echo(text, err=True))
    for path, write in ((csv_file, write_csv), (plot_file, plot)):
        if path is not None:
            try:
                write(rows, path)
            except OSError as exc:
                raise StorageError(f"{path} cannot be written: {exc.strerror or exc}") from exc
    if as_json:
        click.echo(json.dumps(rows, indent=1, allow_nan=False))
        return
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160).print(table(rows))
    if any(row["budget_of_query"] for row in rows):
        click.echo("* the query's own budget")


def _rows(asked: dict[str, Any], jobs: int, note: Note) -> list[Row]:
    query = read_query(
        Asked(asked["query_file"], asked["keys"], asked["value"], asked["aggregate"], asked["window"], asked["measure"])
    )
    default = query.cache
    policies = named(asked["policies"], "--policy", POLICIES, ("caching",))
    evictions = named(asked["evictions"], "--eviction", EVICTIONS, (default.eviction,))
    estimates = named(asked["estimates"], "--estimate", ESTIMATES, (default.estimate,))
    sizings = named(asked["sizings"], "--sizing", SIZINGS, (default.sizing,))
    widths = list(dict.fromkeys(bandwidth(text) for text in asked["bandwidths"]))
    # Wrong budgets are refused before a large file is read; how large the largest error is, is known later.
    budgets(asked["error_budgets"], asked["stalenesses"], query, 1.0)
    trace, query, edges = _trace(asked, query, note)
    tried = budgets(asked["error_budgets"], asked["stalenesses"], query, _largest(trace, query))
    _tell(asked, query, tried, sizings, note)
    stated: float | None = asked["update_bytes"]
    costs = {width: stated or update_bytes(trace, query, edges, width) for width in widths}
    if stated is None:
        note("an update costs " + ", ".join(f"{cost:g} bytes" for cost in dict.fromkeys(costs.values()))
             + ", as in an edge's frames of the first window")  # fmt: skip
    scene = Scene(trace, query, edges, asked["seed"], costs)
    todo = combinations(policies, evictions, estimates, sizings, default.eager, widths, tried)
    rows = _measured(scene, todo, jobs)
    over = {label(r) for r in rows if r["budget_kind"] == "error" and r["error_p95"] > r["budget"] * (1 + ROUNDING)}
    if over:
        note(f"an error budget is not kept by {', '.join(sorted(over))}: see error_p95")
    return rows


def _trace(asked: dict[str, Any], query: QuerySpec, note: Note) -> tuple[PlacedTrace, QuerySpec, int]:
    wanted = _wanted(asked, query)
    raw = read_files(asked["trace"], wanted, note)
    if not raw.num_rows:
        raise InvalidConfig("TRACE", [str(p) for p in asked["trace"]], "at least one record", "there is none")
    times, valid = event_times(raw, asked["time"], asked["time_unit"], note)
    if asked["value"] is not None and asked["aggregate"] != "count":
        _check_numbers(raw, asked["value"])
    how = Placement(asked["edges"], asked["edge_column"], asked["spread"] == "keys", asked["seed"])
    return build_trace(raw.filter(pa.array(valid)), times[valid], query, how, asked["windows"], note)


def _check_numbers(raw: pa.Table, name: str) -> None:
    column = raw.column(name)
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return
    first = next((v for v in column.to_pylist() if v is not None), None)
    if pa.types.is_string(column.type):
        first = next(
            iter(column.filter(pc.invert(pc.match_substring_regex(column, NUMBER.pattern))).to_pylist()), first
        )
    raise InvalidConfig("--value", name, "a column of numbers", f"its type is {column.type}, it has {first!r}")


def _wanted(asked: dict[str, Any], query: QuerySpec) -> Wanted:
    """The columns of the query, of time and of place. In CSV a key is text unless the query computes with it."""
    columns = {name: "--key" if asked["keys"] else f"group_by.{i}" for i, name in enumerate(query.group_by)}
    texts = {f"measures.{m.name}": m.argument for m in query.measures} | {"where": query.where}
    for field, text in texts.items():
        for name in column_names(parse_sql(text, field)) if text is not None else []:
            columns.setdefault(name, "--value" if name == asked["value"] else field)
    columns.pop(TIME_COLUMN, None)
    columns.update((name, "--time") for name in asked["time"] if name not in columns)
    if asked["edge_column"] is not None:
        columns.setdefault(asked["edge_column"], "--edge-column")
    computed = {name for text in texts.values() if text is not None for name in column_names(parse_sql(text, ""))}
    as_text = {*query.group_by, *asked["time"], *filter(None, [asked["edge_column"]])} - computed
    return Wanted(columns, as_text)


def _largest(trace: PlacedTrace, query: QuerySpec) -> float:
    truth = truth_per_window(trace, query, query.measures[0].name)
    largest = max(float(np.nanmax(np.abs(values), initial=0.0)) for values in truth.values())
    if largest <= 0.0:
        measure = query.measures[0]
        raise InvalidConfig("TRACE", 0, f"values of {measure.to_text()} other than 0", "there is no error to budget")
    return largest


def _tell(asked: dict[str, Any], query: QuerySpec, tried: list[Budget], sizings: tuple[str, ...], note: Note) -> None:
    """What a user could take for granted and is otherwise."""
    if asked["query_file"] is not None:
        for measure in left_out(asked["query_file"], query):
            note(f"left out of the entries: {measure} (sketches are not simulated)")
    own = isinstance(query.budget, ErrorBudget) and not any(b.own for b in tried)
    if own and not (asked["error_budgets"] or asked["stalenesses"]):
        note("the query's own budget is relative and not tried: the offline policies know absolute ones only")
    if (
        "explicit" in asked["estimates"]
        and sizings == (CacheSpec().sizing,)
        and any(b.kind == "staleness" for b in tried)
    ):
        note(f"--estimate explicit makes no difference to the sizing {sizings[0]}: give --sizing as well")


def _measured(scene: Scene, todo: list[Any], jobs: int) -> list[Row]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("plan", total=len(todo))
        return measure_all(scene, todo, jobs, lambda: bar.advance(task))
