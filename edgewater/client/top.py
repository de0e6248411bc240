"""The command `edgewater top`: shows the state of a center, once or repeatedly."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Group
from rich.text import Text

from edgewater.client.answers import Answer
from edgewater.client.center import Center
from edgewater.client.commands import EDGE_COLUMNS, asks_center, edge_rows, latest_or_none, print_json
from edgewater.client.interval import Interval, shown
from edgewater.model.errors import EdgewaterError, plain
from edgewater.model.key_texts import key_text
from edgewater.runtime.terminal import show_again, table

ALARMS = 5
"""The number of newest alarms that are shown."""


@click.command()
@click.option(
    "--interval", type=click.FloatRange(0.2), default=2.0, show_default=True, help="Seconds between two updates."
)
@click.option("--once", is_flag=True, help="Print the state once and end. Default without a terminal.")
@asks_center
def top(center: Center, interval: float, once: bool, as_json: bool) -> None:
    """Show a center's queries, edges and alarms until Ctrl-C; of each query, the group with the widest interval.

    With --json, or without a terminal, the state is printed once.
    """
    if as_json:
        print_json(_look(center))
        return
    show_again(lambda: _view(_look(center)), interval, once)


def _look(center: Center) -> dict[str, Any]:
    queries = []
    for query in center.queries():
        latest = latest_or_none(query)
        state = query.status()
        queries.append({
            "query": query.name, "state": state["state"], "reason": state["reason"], "since": state["since"],
            **({} if latest is None else _latest(latest)),
        })  # fmt: skip
    try:
        alarms, hidden = center.get("/v1/alarms", limit=str(ALARMS))["alarms"], ""
    except EdgewaterError as exc:  # alarms need a role on all queries
        alarms, hidden = [], exc.message
    return {"queries": queries, "edges": center.edges(), "alarms": alarms, "alarms_hidden": hidden}


def _latest(answer: Answer) -> dict[str, Any]:
    widest = _widest(answer)
    return {
        "window": answer.members["window"]["start"], "phase": answer.phase, "revision": answer.revision,
        "completeness": answer.completeness, "missing": answer.missing, "staleness_ms": answer.staleness_ms,
        "contract_met": answer.contract_met, "violations": [v["code"] for v in answer.violations],
        "groups": len(answer), "widest": widest,
    }  # fmt: skip


def _widest(answer: Answer) -> dict[str, Any] | None:
    """Returns the group with the widest interval of the first measure that has intervals."""
    name = next(iter(answer.interval_columns), None)
    if name is None or not len(answer):
        return None
    group, i = max(answer[name], key=lambda pair: pair[1].width)
    return {"measure": name, "group": group, "estimate": i.estimate, "lower": i.lower, "upper": i.upper}


def _view(look: dict[str, Any]) -> Group:
    rows = [_row(q) for q in look["queries"]]
    columns = ("query", "window", "phase", "widest interval", "complete", "stale", "contract", "state")
    alarms = [(a["last_at"], a["kind"], a["edge"], a["message"], str(a["times"])) for a in look["alarms"]]
    parts = [
        table(columns, rows, "queries") if rows else Text("no query is registered"),
        Text(),
        table(EDGE_COLUMNS, edge_rows(look["edges"]), "edges") if look["edges"] else Text("no edge has ever connected"),
        Text(),
        table(("last", "alarm", "edge", "message", "times"), alarms, "alarms") if alarms else Text("no alarms"),
    ]
    return (
        Group(*parts[:-1], Text(f"alarms: {plain(look['alarms_hidden'])}")) if look["alarms_hidden"] else Group(*parts)
    )


def _row(query: dict[str, Any]) -> tuple[str, ...]:
    state = query["state"] + (f": {query['reason']}" if query["reason"] else "")
    if "window" not in query:
        return (query["query"], "", "", "", "", "", "", state)
    widest = query["widest"]
    value = ""
    if widest is not None:
        group = ", ".join(map(key_text, widest["group"].values()))
        interval = Interval(widest["estimate"], widest["lower"], widest["upper"])
        value = f"{widest['measure']} {f'{group}: ' if group else ''}{interval}"
    stale = "?" if query["staleness_ms"] is None else f"{query['staleness_ms']:.0f} ms"
    contract = "met" if query["contract_met"] else "not met: " + ", ".join(query["violations"])
    missing = f" without {', '.join(query['missing'])}" if query["missing"] else ""
    complete = f"{shown(query['completeness'])}{missing}"
    return (query["query"], query["window"], query["phase"], value, complete, stale, contract, state)
