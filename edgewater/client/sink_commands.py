"""The commands `edgewater sinks` and `edgewater alerts`: systems to which a center writes its answers, and alerts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import click

from edgewater.client.center import Center
from edgewater.client.commands import asks_center, print_json, print_list
from edgewater.client.requests import moment, segment
from edgewater.model.json_types import Document
from edgewater.model.replies import ListedSink, SinkQueryState, ToldAlert
from edgewater.runtime.configuration import read_yaml
from edgewater.runtime.terminal import print_table


@click.group()
def sinks() -> None:
    """Show and change the sinks of a center: systems that answers are written to, such as PostgreSQL.

    \b
      edgewater sinks ls
      edgewater sinks put warehouse --file warehouse.yaml
      edgewater sinks replay warehouse --from 2026-01-01T00:00:00Z

    \b
    warehouse.yaml:
      kind: postgres
      url: {env: WAREHOUSE_URL}        # of the process `edgewater center sink`
      queries: [flights]               # default: all
    """


@sinks.command("ls")
@asks_center
def sinks_ls(center: Center, as_json: bool) -> None:
    """List the sinks, how far behind they are, and the problem of each failing sink."""

    def row(s: ListedSink) -> tuple[object, ...]:
        return s["name"], s["state"], _behind(s), s["rows"], _trouble(s)

    head = ("sink", "state", "behind", "rows", "problem")
    print_list(as_json, "sinks", center.get("/v1/sinks")["sinks"], head, row, empty="no sink is defined")


@sinks.command("show")
@click.argument("name")
@asks_center
def sinks_show(center: Center, name: str, as_json: bool) -> None:
    """Show everything about the sink NAME."""
    _print(center.get(_path(name)), as_json)


@sinks.command("put")
@click.argument("name")
@click.option(
    "--file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML with `kind`, the keys of all sinks, and the keys of the kind.",
)
@asks_center
def sinks_put(center: Center, name: str, file: Path, as_json: bool) -> None:
    """Define the sink NAME, or change it. A changed sink continues at its last answer. Needs the role admin."""
    _print(center.send("PUT", _path(name), json.dumps(read_yaml(file, "--file")).encode()), as_json)


@sinks.command("rm")
@click.argument("name")
@asks_center
def sinks_rm(center: Center, name: str, as_json: bool) -> None:
    """Delete the sink NAME. The answers that it has written stay in its system. Needs the role admin."""
    center.send("DELETE", _path(name))
    if as_json:
        print_json({"deleted": name})


@sinks.command("pause")
@click.argument("name")
@asks_center
def sinks_pause(center: Center, name: str, as_json: bool) -> None:
    """Pause the sink NAME. The center keeps the answers to be written for some time. Needs the role admin."""
    _print(center.send("POST", f"{_path(name)}/pause"), as_json)


@sinks.command("resume")
@click.argument("name")
@asks_center
def sinks_resume(center: Center, name: str, as_json: bool) -> None:
    """Resume the sink NAME. Needs the role admin."""
    _print(center.send("POST", f"{_path(name)}/resume"), as_json)


@sinks.command("replay")
@click.argument("name")
@click.option("--from", "start", metavar="TIME", help="Start of the first window; default: the oldest stored answer.")
@asks_center
def sinks_replay(center: Center, name: str, start: str | None, as_json: bool) -> None:
    """Let the sink NAME write stored answers again. They replace the answers in its system. Needs the role admin."""
    since = "" if start is None else f"?from={segment(str(moment(start, '--from')))}"
    _print(center.send("POST", f"{_path(name)}/replay{since}"), as_json)


@click.group()
def alerts() -> None:
    """Show alerts on answers, and try rules. The sinks of the kind `alerts` have the rules.

    \b
      edgewater alerts ls
      edgewater alerts rules
      edgewater alerts check pager.yaml --from 2026-01-01T00:00:00Z
      edgewater sinks put pager --file pager.yaml
    """


@alerts.command("ls")
@asks_center
def alerts_ls(center: Center, as_json: bool) -> None:
    """List the alerts that are firing or pending."""

    def row(a: Any) -> tuple[str, ...]:
        return a["rule"], a["status"], a["query"], _groups(a), _numbers(a), a["since"]

    head = ("alert", "status", "query", "labels", "values", "since")
    print_list(as_json, "alerts", center.get("/v1/alerts")["alerts"], head, row, "no alert fires")


@alerts.command("rules")
@asks_center
def alerts_rules(center: Center, as_json: bool) -> None:
    """List the rules, and the state of each rule."""
    head = ("sink", "rule", "query", "condition", "state", "firing", "pending", "problem")
    found, empty = center.get("/v1/alerts/rules")["rules"], "no process has run a sink of the kind alerts"
    print_list(as_json, "rules", found, head, lambda r: [r[name] for name in head[:-1]] + [r["problem"] or ""], empty)


@alerts.command("check")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--from", "start", metavar="TIME", help="Start of the first window; default: the oldest stored answer.")
@asks_center
def alerts_check(center: Center, file: Path, start: str | None, as_json: bool) -> None:
    """Show which alerts the rules of FILE would have raised on the stored answers. Defines nothing, notifies nobody.

    FILE has the same form as for `edgewater sinks put`.
    """
    since = "" if start is None else f"?from={segment(str(moment(start, '--from')))}"
    checked = center.send("POST", f"/v1/alerts/check{since}", json.dumps(read_yaml(file, "FILE")).encode())
    if as_json:
        print_json(checked)
        return
    rows = [(r["rule"], r["query"], r["condition"], r["fired"], r["problem"] or "") for r in checked["rules"]]
    print_table(("rule", "query", "condition", "fired", "problem"), rows, empty="")
    changes = [
        (rule["rule"], c["status"], c["details"].get("window", {}).get("start", c["at"]), _groups(c), _numbers(c))
        for rule in checked["rules"]
        for c in rule["changes"]
    ]
    if changes:
        print_table(("rule", "change", "window", "labels", "values"), changes, empty="")
    left_out = "" if checked["is_whole"] else "; later ones were left out, see --from"
    click.echo(f"{checked['answers']} answers were evaluated{left_out}")


def _groups(alert: ToldAlert) -> str:
    return ", ".join(f"{n}={v}" for n, v in alert["labels"].items() if n not in ("alertname", "query"))


def _numbers(alert: ToldAlert) -> str:
    values = {n: cast(Document, v) for n, v in alert["details"].items() if isinstance(v, dict) and "lower" in v}
    return ", ".join(f"{n} {v['value']} [{v['lower']}, {v['upper']}]" for n, v in values.items())


def _path(name: str) -> str:
    return f"/v1/sinks/{segment(name)}"


def _print(sink: ListedSink, as_json: bool) -> None:
    if as_json:
        print_json(sink)
        return
    shown = [(key, "" if value is None else str(value)) for key, value in sink.items() if key != "queries"]
    print_table(("", ""), shown, empty="")
    rows = [
        (f"{q['query']}@{q['version']}", _behind(q), q["failing_since"] or "", q["problem"] or "")
        for q in sink["queries"]
    ]
    if rows:
        print_table(("query", "behind", "failing since", "problem"), rows, empty="")


def _behind(sink: ListedSink | SinkQueryState) -> str:
    return f"{sink['behind_answers']} answers, {sink['behind_ms'] / 1000:.1f} s"


def _trouble(sink: ListedSink) -> str:
    gap = sink["gap"]
    lost = f"answers {gap['first']} to {gap['last']} were deleted before it had them" if gap else ""
    return "; ".join(filter(None, (sink["problem"], lost)))
