"""`edgewater simulate scheduling`: policies of a worker with several queries, under a virtual clock."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import click

from edgewater.model.errors import InvalidConfig
from edgewater.model.quantities import duration_ms, format_duration
from sim.parameters import Duration, Fraction, Size
from sim.scheduling.engine import RECORD_BYTES, Experiment, run
from sim.scheduling.policies import POLICIES
from sim.scheduling.scheduler import DEFAULT_CYCLE_MS
from sim.scheduling.summary import summarise, table
from sim.scheduling.workload import BATCH_MS, BENCHMARKS, COSTS, DELAYS, MAX_BATCH, Load

MAX_QUERY_SECONDS = 500_000
"""Queries times seconds: about 3 GB of arrivals."""
MAX_LOAD = 10.0


def _check_load(value: object, field: str, error: type[InvalidConfig]) -> float:
    if not isinstance(value, float) or not 0 < value <= MAX_LOAD:
        raise error(field, value, f"a share above 0, at most {MAX_LOAD:.0%}")
    return value


@click.command("scheduling")
@click.option(
    "--policy",
    default="klink,fair",
    show_default=True,
    help=f"{', '.join(POLICIES)}, or all; several with commas.",
)
@click.option("--benchmark", type=click.Choice(BENCHMARKS), default="ysb", show_default=True, help="Kind of queries.")
@click.option("--queries", type=click.IntRange(1, 1_000), default=60, show_default=True, help="Number of queries.")
@click.option(
    "--load",
    default="94%",
    show_default=True,
    type=Fraction(_check_load),
    help="Offered work as a share of the CPU of all nodes; above 100% is overload.",
)
@click.option(
    "--delays", type=click.Choice(DELAYS), default="uniform", show_default=True, help="Network delay of watermarks."
)
@click.option(
    "--costs",
    type=click.Choice(COSTS),
    default="equal",
    show_default=True,
    help="Whether a record costs the same in all queries, or differs by lognormal factors.",
)
@click.option("--memory", type=Size(), help="Cap of queued records, over all nodes.  [default: unbounded]")
@click.option("--nodes", type=click.IntRange(1, 64), default=1, show_default=True, help="Nodes of one core each.")
@click.option("--rate", type=float, default=10_000.0, show_default=True, help="Records per second and query.")
@click.option("--duration", "duration_ms", type=Duration(), default="2m", show_default=True, help="Simulated time.")
@click.option(
    "--cycle",
    "cycle_ms",
    type=Duration(),
    default=format_duration(int(DEFAULT_CYCLE_MS)),
    show_default=True,
    help="How long a query runs before another may run.",
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Seed of the arrivals and costs.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with one object per policy.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Plot the distributions of latency to an image file.",
)
def scheduling(policy: str, as_json: bool, plot: Path | None, **flags: Any) -> None:
    """Compare policies that decide which query runs next on too little CPU.

    Queries share one core per node. Their records arrive in batches, and each window is emitted when its watermark,
    delayed by the network, has been processed behind all records before it. klink is Klink as corrected, the others are
    published baselines. Agents have no such scheduler. A run is deterministic.

    \b
    Policies:
      klink      least expected slack first: what is due, or will be soon by what past delays say
      fair       round robin                     fcfs       oldest batch first
      hr         highest output rate first       streambox  closest window end, until it is emitted
      edgewise   longest queue first             edf        closest window end first
      srpt       least queued work first

    \b
    Columns of the output:
      latency_ms_*   from the arrival of a window's watermark until the window is emitted
      window_ms_*    the same from the window's end, so with the network's delay
      throughput     records processed per second while records arrive
      slowdown       latency over the time that emitting takes on an idle node, mean
      memory_peak    bytes of queued records at most; never above --memory

    \b
    Examples:
      edgewater simulate scheduling
      edgewater simulate scheduling --policy all --load 105% --costs mixed
      edgewater simulate scheduling --benchmark lrb --delays zipf --memory 64MiB --load 120%
      edgewater simulate scheduling --policy klink,fair,edf --nodes 4 --queries 80 --plot latency.svg
    """
    loads = _experiments(policy, flags)
    if plot and plot.suffix not in {".png", ".svg", ".pdf"}:
        raise InvalidConfig("--plot", str(plot), "a file that ends in .png, .svg or .pdf")
    outcomes = []
    quiet = as_json or not sys.stderr.isatty()
    with click.progressbar(length=sum(e.nodes for e in loads), label="nodes", file=sys.stderr, hidden=quiet) as bar:
        outcomes = [run(experiment, lambda: bar.update(1)) for experiment in loads]
    rows = [summarise(experiment, outcome) for experiment, outcome in zip(loads, outcomes, strict=True)]
    if plot:
        from sim.scheduling.plots import plot_latency

        plot_latency({row["policy"]: outcome.latency_ms for row, outcome in zip(rows, outcomes, strict=True)}, plot)
    click.echo(json.dumps(rows) if as_json else table(rows))


def _experiments(policy: str, flags: dict[str, Any]) -> list[Experiment]:
    chosen = list(POLICIES) if policy == "all" else [part.strip() for part in policy.split(",")]
    for name in chosen:
        if name not in POLICIES:
            raise InvalidConfig("--policy", name, f"{', '.join(POLICIES)}, or all")
    nodes, rate, queries, memory = flags["nodes"], flags["rate"], flags["queries"], flags["memory"]
    if not 1 <= rate <= 1e7:
        raise InvalidConfig("--rate", rate, "a number of records per second from 1 to 10 million")
    if nodes > queries:
        raise InvalidConfig("--nodes", nodes, f"at most one for each of the {queries} queries")
    if not duration_ms("1s", "") <= flags["duration_ms"] <= MAX_QUERY_SECONDS * 1_000 // queries:
        longest = format_duration(MAX_QUERY_SECONDS // queries * 1_000)
        raise InvalidConfig("--duration", format_duration(flags["duration_ms"]), f"from 1s to {longest}")
    if not 1 <= flags["cycle_ms"] <= 60_000:
        raise InvalidConfig("--cycle", format_duration(flags["cycle_ms"]), "from 1ms to 1m")
    least = math.ceil(nodes * MAX_BATCH * rate * BATCH_MS / 1e3 * RECORD_BYTES)
    if memory is not None and memory < least:
        raise InvalidConfig("--memory", memory, f"room for the largest batch on each node: at least {least} bytes")
    load = Load(
        benchmark=flags["benchmark"],
        queries=queries,
        share=flags["load"] * nodes,
        delays=flags["delays"],
        costs=flags["costs"],
        rate=rate,
        seconds=flags["duration_ms"] / 1e3,
        seed=flags["seed"],
    )
    return [Experiment(load, name, nodes, memory, cycle_ms=flags["cycle_ms"]) for name in chosen]
