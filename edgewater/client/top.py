"""The command `edgewater top`: shows the state of a center, once or repeatedly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click
from rich.console import Group
from rich.text import Text

from edgewater.base.errors import EdgewaterError, plain
from edgewater.client.answers import Answer
from edgewater.client.center import Center
from edgewater.client.commands import EDGE_COLUMNS, asks_center, edge_rows, latest_or_none, print_json
from edgewater.client.interval import Interval, shown
from edgewater.model import json_types
from edgewater.model.json_types import Document
from edgewater.model.key_texts import key_text
from edgewater.model.replies import Alarm, AlarmList, Edge, QueryStatus
from edgewater.runtime.terminal import show_again, table

ALARMS = 5  # limit: lines of output
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
        print_json(_look(center).to_json())
        return
    show_again(lambda: _view(_look(center)), interval, once)


@dataclass(frozen=True, slots=True)
class _QueryLook:
    """A query, and its latest answer; None: it has none."""

    name: str
    status: QueryStatus
    latest: Answer | None

    def widest(self) -> tuple[str, json_types.Group, Interval] | None:
        """Returns the group with the widest interval of the first measure that has intervals, and the measure."""
        name = None if self.latest is None else next(iter(self.latest.interval_columns), None)
        if self.latest is None or name is None or not len(self.latest):
            return None
        return name, *max(self.latest[name], key=lambda pair: pair[1].width)

    def to_json(self) -> Document:
        state, latest, widest = self.status, self.latest, self.widest()
        told: dict[str, Any] = {"query": self.name, **{name: state[name] for name in ("state", "reason", "since")}}
        if latest is None:
            return told
        interval: Document | None = None
        if widest is not None:
            name, group, i = widest
            interval = {"measure": name, "group": group, "estimate": i.estimate, "lower": i.lower, "upper": i.upper}
        names = ("phase", "revision", "completeness", "missing", "staleness_ms", "contract_met")
        told |= {"window": latest.members["window"]["start"], **{name: getattr(latest, name) for name in names}}
        violations = [v["code"] for v in latest.violations]
        return told | {"violations": violations, "groups": len(latest), "widest": interval}

    def row(self) -> tuple[str, ...]:
        state = self.status["state"] + (f": {self.status['reason']}" if self.status["reason"] else "")
        latest, widest, value = self.latest, self.widest(), ""
        if latest is None:
            return (self.name, "", "", "", "", "", "", state)
        if widest is not None:
            name, group, interval = widest
            keys = ", ".join(map(key_text, group.values()))
            value = f"{name} {f'{keys}: ' if keys else ''}{interval}"
        stale = "?" if latest.staleness_ms is None else f"{latest.staleness_ms:.0f} ms"
        contract = latest.contract if latest.contract_met else f"not met: {latest.contract}"
        missing = f" without {', '.join(latest.missing)}" if latest.missing else ""
        complete, window = f"{shown(latest.completeness)}{missing}", latest.members["window"]["start"]
        return (self.name, window, latest.phase, value, complete, stale, contract, state)


@dataclass(frozen=True, slots=True)
class _Look:
    """The state of a center.

    Attributes:
        alarms_hidden: why no alarms are shown.
    """

    queries: list[_QueryLook]
    edges: list[Edge]
    alarms: list[Alarm]
    alarms_hidden: str

    def to_json(self) -> object:
        queries = [query.to_json() for query in self.queries]
        return {"queries": queries, "edges": self.edges, "alarms": self.alarms, "alarms_hidden": self.alarms_hidden}


def _look(center: Center) -> _Look:
    queries = [_QueryLook(query.name, query.status(), latest_or_none(query)) for query in center.queries()]
    try:
        found: AlarmList = center.get("/v1/alarms", limit=str(ALARMS))
        alarms, hidden = found["alarms"], ""
    except EdgewaterError as exc:  # alarms need a role on all queries
        alarms, hidden = [], exc.message
    return _Look(queries, center.edges(), alarms, hidden)


def _view(look: _Look) -> Group:
    columns = ("query", "window", "phase", "widest interval", "complete", "stale", "contract", "state")
    alarms = [(a["last_at"], a["kind"], a["edge"], a["message"], str(a["times"])) for a in look.alarms]
    heads = ("last", "alarm", "edge", "message", "times")
    shown_alarms = table(heads, alarms, "alarms") if alarms else Text("no alarms")
    if look.alarms_hidden:
        shown_alarms = Text(f"alarms: {plain(look.alarms_hidden)}")
    return Group(
        table(columns, [query.row() for query in look.queries], "queries")
        if look.queries
        else Text("no query is registered"),
        Text(),
        table(EDGE_COLUMNS, edge_rows(look.edges), "edges") if look.edges else Text("no edge has ever connected"),
        Text(),
        shown_alarms,
    )
