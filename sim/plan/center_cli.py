"""The command `edgewater plan center`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from sim.parameters import Duration, Size
from sim.plan.center import COSTS, DAY_S, CenterPlan, Queries, Workload, plan_center

DAY_MS = DAY_S * 1000


@click.command()
@click.option("--edges", required=True, type=click.IntRange(1, 1_000_000), help="Number of edges.")
@click.option(
    "--queries",
    "queries",
    required=True,
    multiple=True,
    metavar="COUNT@WINDOW",
    help="Number of queries, and the length of their windows, such as 200@1m. May be repeated.",
)
@click.option("--edges-per-query", type=click.IntRange(1), help="Edges that answer each query.  [default: all]")
@click.option(
    "--partial",
    "partial_bytes",
    type=Size(),
    default="3.6KB",
    show_default=True,
    help="Size of a frame: what an edge sends of a query's window.",
)
@click.option(
    "--answer", "answer_bytes", type=Size(), help="What the center stores of a window.  [default: as --partial]"
)
@click.option(
    "--retention-frames",
    "frames_ms",
    type=Duration(),
    default="0s",
    show_default=True,
    help="The center's retention.frames.",
)
@click.option(
    "--retention-answers",
    "answers_ms",
    type=Duration(),
    default="30d",
    show_default=True,
    help="The center's retention.answers.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan and the costs as JSON.")
def center(
    edges: int,
    queries: tuple[str, ...],
    edges_per_query: int | None,
    partial_bytes: int,
    answer_bytes: int | None,
    frames_ms: int,
    answers_ms: int,
    as_json: bool,
) -> None:
    """Plan the pods, cores and bytes per day of a center.

    The figures follow by arithmetic from costs that benches have measured. Each cost is printed with its source. A
    process is planned for 60 % of a core. Example: 2,000 edges, of which 50 answer each query:

    \b
      edgewater plan center --edges 2000 --edges-per-query 50 --queries 300@1m --queries 20@1h

    An edge sends one frame per query and window. Edges combine frames that are due at the same time, so the figures of
    gateways are an upper bound. Reads of answers are not planned.
    """
    workload = Workload(
        edges,
        tuple(Queries.parse(text) for text in queries),
        edges_per_query or edges,
        partial_bytes,
        partial_bytes if answer_bytes is None else answer_bytes,
        frames_ms / DAY_MS,
        answers_ms / DAY_MS,
    )
    planned = plan_center(workload)
    if as_json:
        click.echo(json.dumps(planned.to_json(), indent=1, allow_nan=False))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    for table in _tables(planned):
        console.print(table)
    for warning in planned.warnings:
        click.echo(f"note: {warning}")


def _tables(planned: CenterPlan) -> Iterator[Any]:
    from rich.table import Table

    pods = Table("pods", "number", "cores each", "MiB each", "why", box=None, title_justify="left")
    for each in planned.pods:
        pods.add_row(each.part, str(each.pods), f"{each.cores:g}", f"{each.memory_mib:,}", each.because)
    pods.add_row(
        "database", "1", f"{planned.database_cores:g}", "", f"{planned.workload.frames_s:,.1f} rows of frames a second"
    )
    yield pods
    figures = Table("figure", "value", box=None)
    for name, value in (*planned.bytes_per_day.items(), *planned.storage_bytes.items()):
        per_day = " a day" if name in planned.bytes_per_day else ", stored"
        figures.add_row(f"bytes {name.replace('_', ' ')}{per_day}", f"{value:,}")
    for name, number in planned.settings.items():
        figures.add_row(name, str(number))
    yield figures
    costs = Table("cost", "value", "source", box=None)
    for cost in COSTS.values():
        costs.add_row(cost.name, f"{cost.value:g} {cost.unit}", cost.source)
    yield costs
