"""`edgewater plan`: staleness, error and bytes that budgets would give on a user's own data."""

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

from edge.codecs import MS_PER_UNIT
from edgewater.model.caching import ESTIMATES, EVICTIONS, SIZINGS, CacheSpec
from edgewater.model.errors import InvalidConfig, StorageError
from edgewater.model.query import QuerySpec
from edgewater.model.streams import TIME_COLUMN
from edgewater.model.syntax import column_names, parse_sql
from sim.budgets.optimal import ROUNDING
from sim.budgets.outcome import truth_per_window
from sim.parameters import Duration
from sim.plan.budgets import PlannedBudget, bandwidth, budgets
from sim.plan.center_cli import center
from sim.plan.cost import update_bytes
from sim.plan.event_times import NUMBER, event_times
from sim.plan.grid import POLICIES, PlanInputs, Row, chosen_names, combinations, measure_all
from sim.plan.planned_query import QueryFlags, omitted_measures, read_query
from sim.plan.plot import SUFFIXES, plot
from sim.plan.reader import ColumnSelection, read_files
from sim.plan.table import label, table, write_csv
from sim.plan.trace import Notify, PlacedTrace, Placement, build_trace

PATH = click.Path(dir_okay=False, path_type=Path)


def _query_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags that define the query."""
    for option in reversed(
        (
            click.argument("trace", nargs=-1, required=True, type=click.Path(path_type=Path)),
            click.option("--query", "query_file", type=PATH, help="YAML file of a query; other flags override it."),
            click.option(
                "--time",
                "time",
                multiple=True,
                required=True,
                metavar="COL",
                help="Event time. Give it twice for a date and a time of day in two columns.",
            ),
            click.option(
                "--time-unit", type=click.Choice([*MS_PER_UNIT]), help="Unit of numeric times.  [default: ms]"
            ),
            click.option(
                "--key", "keys", multiple=True, metavar="COL", help="Column to group by.  [default: the query's]"
            ),
            click.option("--value", metavar="COL", help="Column to aggregate.  [default: the query's]"),
            click.option(
                "--aggregate",
                metavar="NAME",
                help="sum, count, min or max.  [default: the query's; else sum of --value, or count]",
            ),
            click.option(
                "--measure",
                metavar="NAME",
                help="The measure to evaluate.  [default: that of the query's error budget, or its first one]",
            ),
            click.option(
                "--window",
                metavar="DURATION",
                help="Length of the tumbling windows.  [default: the query's, or about 30 windows]",
            ),
        )
    ):
        command = option(command)
    return command


def _grid_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the repeatable flags whose combinations are run."""
    for option in reversed(
        (
            click.option(
                "--bandwidth",
                "bandwidths",
                multiple=True,
                required=True,
                metavar="SIZE",
                help="Bytes per second of each edge's link, such as 64KiB.",
            ),
            click.option(
                "--budget",
                "error_budgets",
                multiple=True,
                metavar="AMOUNT",
                help="Error budget: 1000, 1MB, or 0.1% of the largest possible error.  [default: 0.001% to 10%]",
            ),
            click.option(
                "--staleness",
                "stalenesses",
                multiple=True,
                metavar="DURATION",
                help="Staleness budget: 2s, or 10% of a window.",
            ),
            click.option(
                "--combined",
                is_flag=True,
                help="Each --budget together with each --staleness: bytes against both.  [default: if the query "
                "has both]",
            ),
            click.option(
                "--policy",
                "policies",
                multiple=True,
                metavar="NAME",
                help=f"{', '.join(POLICIES)}, or all.  [default: caching, the policy of an edge]",
            ),
            click.option(
                "--eviction",
                "evictions",
                multiple=True,
                metavar="NAME",
                help=f"For caching: {', '.join(EVICTIONS)}, or all.  [default: the query's, or {EVICTIONS[0]}]",
            ),
            click.option(
                "--estimate",
                "estimates",
                multiple=True,
                metavar="NAME",
                help=f"For caching with --staleness: {', '.join(ESTIMATES)}, or all.",
            ),
            click.option(
                "--sizing",
                "sizings",
                multiple=True,
                metavar="NAME",
                help=f"For caching with --staleness: {', '.join(SIZINGS)}, or all.",
            ),
        )
    ):
        command = option(command)
    return command


def _run_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags of edges, windows and output."""
    for option in reversed(
        (
            click.option(
                "--edges",
                type=click.IntRange(1, 10_000),
                help="Number of edges.  [default: 1, or the number of values of --edge-column]",
            ),
            click.option("--edge-column", metavar="COL", help="All records with the same value are at one edge."),
            click.option(
                "--spread",
                type=click.Choice(["records", "keys"]),
                default="records",
                show_default=True,
                help="Without --edge-column: assign records, or whole groups, to random edges.",
            ),
            click.option(
                "--windows", default=30, show_default=True, type=click.IntRange(1), help="Maximum number of windows."
            ),
            click.option(
                "--update-bytes",
                type=click.FloatRange(1),
                metavar="N",
                help="Size of an update on the wire.  [default: measured on frames of the trace]",
            ),
            click.option(
                "--wire",
                is_flag=True,
                help="For caching: model packets, headers, compression, acknowledgements, and how edges learn "
                "the bandwidth. Takes longer.",
            ),
            click.option(
                "--delay",
                type=Duration(),
                default="50ms",
                show_default=True,
                help="With --wire: delay of each edge's link, in each direction.",
            ),
            click.option(
                "--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of all randomness."
            ),
            click.option("--jobs", type=click.IntRange(1), help="Number of processes.  [default: number of cores]"),
            click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON instead of a table."),
            click.option("--csv", "csv_file", type=PATH, help="Write the rows to a CSV file."),
            click.option("--plot", "plot_file", type=PATH, help="Plot the curves to FILE.svg, .png or .pdf."),
        )
    ):
        command = option(command)
    return command


class PlanCommands(click.Group):
    """A group that takes files for the command `trace`: `edgewater plan FILE` is `edgewater plan trace FILE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["trace", *args]
        return super().parse_args(ctx, args)


@click.group(cls=PlanCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def plan() -> None:
    """Predict the staleness, error and bytes of budgets, and the size of a center.

    \b
      edgewater plan FILE …      replay your records under budgets: the same as `edgewater plan trace FILE …`
      edgewater plan center …    pods, cores and bytes per day of a center
    """


plan.add_command(center)


@plan.command()
@_query_flags
@_grid_flags
@_run_flags
def trace(as_json: bool, csv_file: Path | None, plot_file: Path | None, jobs: int | None, **flags: Any) -> None:
    """Predict the staleness, error and bytes of budgets on your own data.

    TRACE is one or more files: CSV with a header, NDJSON (both also .gz) or Parquet. The command replays the
    records through production edges over simulated links of the given bandwidth. Example: a day of CRAN
    downloads, bytes by package and country, four edges with 64 bytes per second each:

    \b
      edgewater plan 2015-01-02.csv.gz --time date --time time --key package --key country \\
          --value size --window 1h --windows 6 --edges 4 --bandwidth 64 \\
          --policy caching --policy optimal --plot plan.svg

    Choose a budget from the table or the plot and put it into the query (`budget: {error: {bytes: 10MB}}`).
    Staleness and error are 95th percentiles over windows; a window's error is the largest of all groups, as a
    percentage of the largest group's value.
    """
    if plot_file is not None and plot_file.suffix not in SUFFIXES:
        raise InvalidConfig("--plot", str(plot_file), f"a file that ends in {', '.join(SUFFIXES)}")
    rows = _rows(flags, jobs or os.cpu_count() or 1, lambda text: click.echo(text, err=True))
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
        click.echo("* the budget of the query")


def _rows(flags: dict[str, Any], jobs: int, notify: Notify) -> list[Row]:
    query = read_query(
        QueryFlags(
            flags["query_file"], flags["keys"], flags["value"], flags["aggregate"], flags["window"], flags["measure"]
        )
    )
    default = query.cache
    policies = chosen_names(flags["policies"], "--policy", POLICIES, ("caching",))
    evictions = chosen_names(flags["evictions"], "--eviction", EVICTIONS, (default.eviction,))
    estimates = chosen_names(flags["estimates"], "--estimate", ESTIMATES, (default.estimate,))
    sizings = chosen_names(flags["sizings"], "--sizing", SIZINGS, (default.sizing,))
    widths = list(dict.fromkeys(bandwidth(text) for text in flags["bandwidths"]))
    # Checks the budgets before a large file is read; the largest possible error is not known yet.
    budgets(flags["error_budgets"], flags["stalenesses"], query, 1.0, combined=flags["combined"])
    trace, query, edges = _trace(flags, query, notify)
    largest = _largest(trace, query)
    tried = budgets(flags["error_budgets"], flags["stalenesses"], query, largest, combined=flags["combined"])
    _report_differences(flags, query, tried, sizings, notify)
    stated: float | None = flags["update_bytes"]
    costs = {width: stated or update_bytes(trace, query, edges, width) for width in widths}
    if stated is None:
        notify(
            "size of an update: "
            + ", ".join(f"{cost:g} bytes" for cost in dict.fromkeys(costs.values()))
            + ", measured on the frames of the first window"
        )
    inputs = PlanInputs(trace, query, edges, flags["seed"], costs, flags["delay"] if flags["wire"] else None)
    todo = combinations(policies, evictions, estimates, sizings, default.eager, widths, tried)
    rows = _measured(inputs, todo, jobs)
    over = {label(r) for r in rows if r["budget_kind"] != "staleness" and r["error_p95"] > r["budget"] * (1 + ROUNDING)}
    if over:
        notify(f"exceeding an error budget: {', '.join(sorted(over))} (see error_p95)")
    return rows


def _trace(flags: dict[str, Any], query: QuerySpec, notify: Notify) -> tuple[PlacedTrace, QuerySpec, int]:
    selection = _selection(flags, query)
    raw = read_files(flags["trace"], selection, notify)
    if not raw.num_rows:
        raise InvalidConfig("TRACE", [str(p) for p in flags["trace"]], "at least one record", "the files are empty")
    times, valid = event_times(raw, flags["time"], flags["time_unit"], notify)
    if flags["value"] is not None and flags["aggregate"] != "count":
        _check_numbers(raw, flags["value"])
    placement = Placement(flags["edges"], flags["edge_column"], flags["spread"] == "keys", flags["seed"])
    return build_trace(raw.filter(pa.array(valid)), times[valid], query, placement, flags["windows"], notify)


def _check_numbers(raw: pa.Table, name: str) -> None:
    column = raw.column(name)
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return
    first = next((v for v in column.to_pylist() if v is not None), None)
    if pa.types.is_string(column.type):
        first = next(
            iter(column.filter(pc.invert(pc.match_substring_regex(column, NUMBER.pattern))).to_pylist()), first
        )
    raise InvalidConfig(
        "--value", name, "a column of numbers", f"its type is {column.type}, with values such as {first!r}"
    )


def _selection(flags: dict[str, Any], query: QuerySpec) -> ColumnSelection:
    """Returns the columns of the query, of event time and of the edge. CSV keys are text unless the query computes with
    them."""
    columns = {name: "--key" if flags["keys"] else f"group_by.{i}" for i, name in enumerate(query.plain_keys)}
    texts = {f"measures.{m.name}": m.argument for m in query.measures} | {"where": query.where}
    texts |= {f"group_by.{name}": text for name, text in query.computed}
    for field, text in texts.items():
        for name in column_names(parse_sql(text, field)) if text is not None else []:
            columns.setdefault(name, "--value" if name == flags["value"] else field)
    columns.pop(TIME_COLUMN, None)
    columns.update((name, "--time") for name in flags["time"] if name not in columns)
    if flags["edge_column"] is not None:
        columns.setdefault(flags["edge_column"], "--edge-column")
    computed = {name for text in texts.values() if text is not None for name in column_names(parse_sql(text, ""))}
    as_text = {*query.plain_keys, *flags["time"], *filter(None, [flags["edge_column"]])} - computed
    return ColumnSelection(columns, as_text)


def _largest(trace: PlacedTrace, query: QuerySpec) -> float:
    truth = truth_per_window(trace, query, query.measures[0].name)
    largest = max(float(np.nanmax(np.abs(values), initial=0.0)) for values in truth.values())
    if largest <= 0.0:
        measure = query.measures[0]
        raise InvalidConfig("TRACE", 0, f"values of {measure.to_text()} other than 0", "all values are 0")
    return largest


def _report_differences(
    flags: dict[str, Any], query: QuerySpec, tried: list[PlannedBudget], sizings: tuple[str, ...], notify: Notify
) -> None:
    """Reports where the simulation differs from the query and the flags."""
    if flags["query_file"] is not None:
        for measure in omitted_measures(flags["query_file"], query):
            notify(f"not simulated: {measure} (sketches are not supported)")
    own = query.error_budget is not None and not any(b.of_query for b in tried)
    if own and not (flags["error_budgets"] or flags["stalenesses"]):
        notify("the query's own budget is omitted: it is relative, and offline policies support absolute budgets only")
        for note in query.notes:
            notify(note)
    if (
        "explicit" in flags["estimates"]
        and sizings == (CacheSpec().sizing,)
        and any(b.kind == "staleness" for b in tried)
    ):
        notify(f"--estimate explicit has no effect with the sizing {sizings[0]}: add --sizing")


def _measured(inputs: PlanInputs, todo: list[Any], jobs: int) -> list[Row]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("plan", total=len(todo))
        return measure_all(inputs, todo, jobs, lambda: bar.advance(task))
