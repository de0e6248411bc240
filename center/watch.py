"""`edgewater center top` shows the state of the queries of a running center, from the center's API."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Group
from rich.text import Text

from edgewater.client.center import Center
from edgewater.runtime.terminal import show_again, table

COLUMNS = ("query", "slack, s", "frames", "late, s", "cost, ms", "state")


def top(center: Center, interval_s: float, once: bool, as_json: bool) -> None:
    """Shows the queries sorted by slack, once or repeatedly until Ctrl-C."""
    if as_json:
        click.echo(json.dumps(_look(center)))
        return
    show_again(lambda: _view(_look(center)), interval_s, once)


def _look(center: Center) -> dict[str, Any]:
    look: dict[str, Any] = center.get("/v1/load")
    return look


def _view(look: dict[str, Any]) -> Group:
    queries = look["queries"]
    late = sum(q["slack_ms"] is not None and q["slack_ms"] < 0 for q in queries)
    frames = sum(q["frames"] for q in queries)
    return Group(
        Text(f"{len(queries)} queries, {late} of them late; {frames} frames are not applied"),
        table(COLUMNS, map(_row, queries), "queries, by slack") if queries else Text("no query is registered"),
    )


def _row(query: dict[str, Any]) -> tuple[str, ...]:
    def seconds(value_ms: float | None) -> str:
        return "" if value_ms is None else f"{value_ms / 1000:.1f}"

    cost_ms = "" if query["cost_ms"] is None else str(query["cost_ms"])
    waiting = seconds(query["slack_ms"]), str(query["frames"]), seconds(query["late_ms"])
    return query["query"], *waiting, cost_ms, query["set_aside"] or ""
