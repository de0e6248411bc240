"""`edgewater plan`: staleness, error and bytes that budgets would give on a user's own data."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa

from edge.codecs.schema import MS_PER_UNIT
from edgewater.base.errors import InvalidConfig
from edgewater.base.streams import TIME_COLUMN
from edgewater.model.link_forecast import Load, verdict
from edgewater.model.query import QuerySpec
from edgewater.model.syntax import column_names, parse_sql
from sim.budgets.optimal import ROUNDING
from sim.budgets.outcome import truth_per_window
from sim.budgets.trace import Trace
from sim.parameters import Duration, chosen_names
from sim.plan.budgets import PlannedBudget, bandwidth, budgets
from sim.plan.cost import update_bytes, window_bytes
from sim.plan.event_times import event_times
from sim.plan.grid import POLICIES, Combination, PlanInputs, Row, combinations, measure_all
from sim.plan.planned_query import omitted_measures, read_query
from sim.plan.reader import ColumnSelection, read_files
from sim.plan.table import label, table
from sim.plan.trace import Notify, Placement, build_trace

PATH = click.Path(dir_okay=False, path_type=Path)


class PlanCommands(click.Group):
    """A group that takes files for the command `trace`: `edgewater plan FILE` is `edgewater plan trace FILE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["trace", *args]
        return super().parse_args(ctx, args)


@click.group(cls=PlanCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def plan() -> None:
    """Predict the staleness, error and bytes of budgets.

    \b
      edgewater plan FILE …      replay your records under budgets: the same as `edgewater plan trace FILE …`
      edgewater plan link FILE … whether several queries are in time on one link
    """


TIMES = click.option(
    "--time",
    "time",
    multiple=True,
    required=True,
    metavar="COL",
    help="Event time. Give it twice for a date and a time of day in two columns.",
)
TIME_UNIT = click.option("--time-unit", type=click.Choice([*MS_PER_UNIT]), help="Unit of numeric times.  [default: ms]")
EDGES = click.option(
    "--edges",
    type=click.IntRange(1, 10_000),
    help="Number of edges.  [default: 1, or the number of values of --edge-column]",
)
EDGE_COLUMN = click.option("--edge-column", metavar="COL", help="All records with the same value are at one edge.")
SEED = click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of all randomness.")


@plan.command()
@click.argument("trace", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--query", "files", type=PATH, multiple=True, required=True, help="YAML file of a query. Give it often.")
@TIMES
@TIME_UNIT
@click.option("--bandwidth", "width", required=True, metavar="SIZE", help="Bytes per second of each edge's link.")
@EDGES
@EDGE_COLUMN
@click.option("--delay", type=Duration(), default="50ms", show_default=True, help="From an edge to an answer.")
@SEED
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON instead of a table.")
def link(files: tuple[Path, ...], width: str, delay: int, as_json: bool, **flags: Any) -> None:
    """Forecast whether several queries are in time on one link.

    TRACE is as for `edgewater plan trace`. For each query, the edge with the most records ships its first window
    exactly, through a production edge. The forecast is the one that `edgewater query show` makes of what edges state:

    \b
      edgewater plan link flights.csv --query miles.yaml --query delays.yaml --time scheduled_ms \\
          --edge-column origin --bandwidth 64

    `yes`: all values of each window arrive by its deadline, also if the windows of all queries end together and need a
    quarter more bytes. Without a staleness budget, a window is due when the next one ends. An error budget needs
    fewer bytes than the forecast has, so such a query is never `no`.
    """
    rate = bandwidth(width)
    notify: Notify = lambda text: click.echo(text, err=True)  # noqa: E731
    loads, limited = dict[str, Load](), set[str]()
    for file in files:
        _, query, parts = _trace({**flags, "windows": 1}, read_query(file), notify)
        sent = window_bytes(max(parts, key=len), query, rate)
        if query.name in loads:
            raise InvalidConfig("--query", str(file), "each query once", f"{query.name} is in two files")
        if query.error_budget is not None:
            limited.add(query.name)
        loads[query.name] = Load.of(query, (sent, 0.0), float(delay))
    found = {name: verdict(load, loads.values(), rate, rate) for name, load in loads.items()}
    rows = [
        {
            "query": name,
            "bytes_per_window": round(load.sent_bytes),
            "link_share": load.bytes_s / rate,
            "in_time": "unknown" if found[name] == "no" and name in limited else found[name],
        }
        for name, load in loads.items()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1, allow_nan=False))
        return
    for row in rows:
        share = f"{row['link_share']:.0%} of the link"
        click.echo(f"{row['query']}: {row['bytes_per_window']} bytes a window, {share}, in time: {row['in_time']}")


@plan.command()
@click.argument("trace", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--query", "query_file", type=PATH, required=True, help="YAML file of the query.")
@TIMES
@TIME_UNIT
@click.option(
    "--bandwidth",
    "bandwidths",
    multiple=True,
    required=True,
    metavar="SIZE",
    help="Bytes per second of each edge's link, such as 64KiB.",
)
@click.option(
    "--budget",
    "error_budgets",
    multiple=True,
    metavar="AMOUNT",
    help="Error budget: 1000, 1MB, or 0.1% of the largest possible error.  [default: 0.001% to 10%]",
)
@click.option(
    "--staleness", "stalenesses", multiple=True, metavar="DURATION", help="Staleness budget: 2s, or 10% of a window."
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help=f"{', '.join(POLICIES)}, or all.  [default: caching, the policy of an edge]",
)
@EDGES
@EDGE_COLUMN
@click.option("--windows", default=30, show_default=True, type=click.IntRange(1), help="Maximum number of windows.")
@click.option(
    "--wire",
    is_flag=True,
    help="For caching: model packets, headers, compression, acknowledgements, and how edges learn "
    "the bandwidth. Takes longer.",
)
@click.option(
    "--delay",
    type=Duration(),
    default="50ms",
    show_default=True,
    help="With --wire: delay of each edge's link, in each direction.",
)
@SEED
@click.option("--jobs", type=click.IntRange(1), help="Number of processes.  [default: number of cores]")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON instead of a table.")
def trace(as_json: bool, jobs: int | None, **flags: Any) -> None:
    """Predict the staleness, error and bytes of budgets on your own data.

    TRACE is one or more files: CSV with a header, NDJSON (both also .gz) or Parquet. The command replays the
    records through production edges over simulated links of the given bandwidth. Example: a day of CRAN
    downloads, bytes by package and country, four edges with 64 bytes per second each:

    \b
      edgewater plan 2015-01-02.csv.gz --query downloads.yaml --time date --time time --windows 6 \\
          --edges 4 --bandwidth 64 --policy caching --policy optimal

    Choose a budget from the table and put it into the query (`budget: {error: {bytes: 10MB}}`).
    Staleness and error are 95th percentiles over windows; a window's error is the largest of all groups, as a
    percentage of the largest group's value.
    """
    rows = _rows(flags, jobs or os.cpu_count() or 1, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps(rows, indent=1, allow_nan=False))
        return
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160).print(table(rows))
    if any(row["budget_of_query"] for row in rows):
        click.echo("* the budget of the query")


def _rows(flags: dict[str, Any], jobs: int, notify: Notify) -> list[Row]:
    query = read_query(flags["query_file"])
    policies = chosen_names(flags["policies"], "--policy", POLICIES, ("caching",))
    widths = list(dict.fromkeys(bandwidth(text) for text in flags["bandwidths"]))
    # Checks the budgets before a large file is read; the largest possible error is not known yet.
    budgets(flags["error_budgets"], flags["stalenesses"], query, 1.0)
    trace, query, parts = _trace(flags, query, notify)
    largest = _largest(trace, query)
    tried = budgets(flags["error_budgets"], flags["stalenesses"], query, largest)
    _report_differences(flags, query, tried, notify)
    costs = {width: update_bytes(max(parts, key=len), query, width) for width in widths}
    sizes = ", ".join(f"{cost:g} bytes" for cost in dict.fromkeys(costs.values()))
    notify(f"size of an update: {sizes}, measured on the frames of the first window")
    inputs = PlanInputs(trace, parts, query, flags["seed"], costs, flags["delay"] if flags["wire"] else None)
    todo = combinations(policies, query.cache, widths, tried)
    rows = _measured(inputs, todo, jobs)
    over = {label(r) for r in rows if r["budget_kind"] != "staleness" and r["error_p95"] > r["budget"] * (1 + ROUNDING)}
    if over:
        notify(f"exceeding an error budget: {', '.join(sorted(over))} (see error_p95)")
    return rows


def _trace(flags: dict[str, Any], query: QuerySpec, notify: Notify) -> tuple[Trace, QuerySpec, list[Trace]]:
    selection = _selection(flags, query)
    raw = read_files(flags["trace"], selection, notify)
    if not raw.num_rows:
        raise InvalidConfig("TRACE", [str(p) for p in flags["trace"]], "at least one record", "the files are empty")
    times, valid = event_times(raw, flags["time"], flags["time_unit"], notify)
    placement = Placement(flags["edges"], flags["edge_column"], flags["seed"])
    return build_trace(raw.filter(pa.array(valid)), times[valid], query, placement, flags["windows"], notify)


def _selection(flags: dict[str, Any], query: QuerySpec) -> ColumnSelection:
    """Returns the columns of the query, of event time and of the edge. CSV keys are text unless the query computes with
    them."""
    columns = {name: f"group_by.{i}" for i, name in enumerate(query.plain_keys)}
    texts = {f"measures.{m.name}": m.argument for m in query.measures} | {"where": query.where}
    texts |= {f"group_by.{name}": text for name, text in query.computed}
    for field, text in texts.items():
        for name in column_names(parse_sql(text, field)) if text is not None else []:
            columns.setdefault(name, field)
    columns.pop(TIME_COLUMN, None)
    columns.update((name, "--time") for name in flags["time"] if name not in columns)
    if flags["edge_column"] is not None:
        columns.setdefault(flags["edge_column"], "--edge-column")
    computed = {name for text in texts.values() if text is not None for name in column_names(parse_sql(text, ""))}
    as_text = {*query.plain_keys, *flags["time"], *filter(None, [flags["edge_column"]])} - computed
    return ColumnSelection(columns, as_text)


def _largest(trace: Trace, query: QuerySpec) -> float:
    truth = truth_per_window(trace, query)
    largest = max(float(np.nanmax(np.abs(values), initial=0.0)) for values in truth.values())
    if largest <= 0.0:
        measure = query.measures[0]
        raise InvalidConfig("TRACE", 0, f"values of {measure.to_text()} other than 0", "all values are 0")
    return largest


def _report_differences(flags: dict[str, Any], query: QuerySpec, tried: list[PlannedBudget], notify: Notify) -> None:
    """Reports where the simulation differs from the query and the flags."""
    for measure in omitted_measures(flags["query_file"], query):
        notify(f"not simulated: {measure} (sketches are not supported)")
    own = query.error_budget is not None and not any(b.of_query for b in tried)
    if own and not (flags["error_budgets"] or flags["stalenesses"]):
        notify("the query's own budget is omitted: it is relative, and offline policies support absolute budgets only")
        for note in query.notes:
            notify(note)


def _measured(inputs: PlanInputs, todo: list[Combination], jobs: int) -> list[Row]:
    from rich.console import Console
    from rich.progress import track

    shown: dict[str, Any] = {"console": Console(stderr=True), "transient": True, "disable": not sys.stderr.isatty()}
    rows = dict(track(measure_all(inputs, todo, jobs), "plan", len(todo), **shown))
    return [rows[combination] for combination in todo]
