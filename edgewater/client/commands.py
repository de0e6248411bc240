"""The commands `edgewater query`, `edges`, `streams` and `top`: read and control a center from the command line."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
import yaml
from click.core import ParameterSource

from edgewater.base.errors import EdgewaterError, InvalidRequest, NotFound, did_you_mean, plain
from edgewater.client.answers import Answer, Gap, Progress
from edgewater.client.center import Center, Query
from edgewater.client.interval import Interval, shown
from edgewater.client.requests import PHASES, Asked, segment
from edgewater.model.json_types import IntervalCell
from edgewater.model.key_texts import NULL, key_text, text_of_key
from edgewater.model.replies import (
    Borders,
    DryRun,
    DryRunEdge,
    Edge,
    LinkForecast,
    QueryEdge,
    Registered,
    Sides,
    Spec,
    StreamColumns,
)
from edgewater.runtime.terminal import print_table

Command = Callable[..., Any]
FIRST_ITEMS = 3  # limit: items of a list in a row of a table


def asks_center(command: Command) -> Command:
    """Adds the options of the connection and `--json`, and passes the `Center` as the first argument."""

    @click.option("--url", envvar="EDGEWATER_URL", show_envvar=True, help="Address of the API.", metavar="URL")
    @click.option(
        "--ca", envvar="EDGEWATER_CA", show_envvar=True, metavar="FILE", help="Certificates that sign the API's."
    )
    @click.option("--timeout", type=click.FloatRange(0.1), default=30.0, show_default=True, help="Seconds per request.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @functools.wraps(command)
    def wrapped(url: str | None, ca: str | None, timeout: float, as_json: bool, **kwargs: Any) -> Any:
        with Center(url, ca=ca, timeout=timeout) as center:
            try:
                return command(center, as_json=as_json, **kwargs)
            except NotFound as exc:
                raise NotFound(f"{exc}{_meant(center, str(exc))}") from exc

    return wrapped


def _meant(center: Center, missing: str) -> str:
    """Returns ``, did you mean flights?`` for the name in an error, among the names that the caller may read."""
    named = re.search(r"\b(query|table|edge|sink) (\w[\w.-]*)", missing)
    if named is None:
        return ""
    kind = {"query": "queries"}.get(named[1], f"{named[1]}s")
    with contextlib.suppress(EdgewaterError):  # a list may need another role
        names = [each.get("name") or each["edge"] for each in center.get(f"/v1/{kind}")[kind]]
        return "" if named[2] in names else did_you_mean(named[2], names)
    return ""


def selects(command: Command) -> Command:
    """Adds the options that select groups, measures and computed values. Passes them as `questions`."""

    @click.option("--group", "groups", multiple=True, metavar="COLUMN:VALUE", help="Only this group; may be repeated.")
    @click.option("--measure", "measures", multiple=True, help="Only this measure; may be repeated.")
    @click.option(
        "--confidence", type=click.FloatRange(0, 1, min_open=True, max_open=True), help="Confidence of the intervals."
    )
    @click.option(
        "--compute",
        multiple=True,
        metavar="NAME:EXPRESSION",
        help="Another column, such as 'error_rate: errors / requests'; may be repeated.",
    )
    @click.option("--having", metavar="CONDITION", help="Only groups such as 'errors_lower > 100', certainly over 100.")
    @click.option(
        "--order",
        multiple=True,
        metavar="COLUMN",
        help="Sort groups by this column (-COLUMN: descending); may be repeated.",
    )
    @click.option("--limit-groups", type=click.IntRange(1), help="Only this number of groups, the first in the order.")
    @functools.wraps(command)
    def wrapped(*args: Any, groups: tuple[str, ...], measures: tuple[str, ...], **kw: Any) -> Any:
        names = ("confidence", "compute", "having", "order", "limit_groups")
        asked = {name: list(v) if isinstance(v, tuple) else v for name in names if (v := kw.pop(name))}
        questions: Asked = {"group": _groups(groups), "measure": list(measures), **asked}  # type: ignore[typeddict-item]
        return command(*args, questions=questions, **kw)

    return wrapped


def _groups(texts: Iterable[str]) -> dict[str, list[str | None]]:
    found: dict[str, list[str | None]] = {}
    for text in texts:
        column, colon, value = text.partition(":")
        if not colon or not column:
            raise InvalidRequest("--group", text, "column:value, such as carrier:UA")
        found.setdefault(column, []).append(None if value == NULL else text_of_key(value))
    return found


def print_json(value: object) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


def print_list(
    as_json: bool, name: str, found: Sequence[Any], head: Sequence[str], row: Callable[[Any], Sequence[Any]], empty: str
) -> None:
    """Prints resources as JSON, as the API lists them under `name`, or as a table with a row for each."""
    if as_json:
        print_json({name: found})
    else:
        print_table(head, [row(each) for each in found], empty=empty)


def print_edges(found: Iterable[DryRunEdge]) -> None:
    """Prints which edges would accept a query."""
    accepted = {True: "accepts it", False: "refuses it", None: "has never connected"}
    rows = [(e["edge"], accepted[e["accepted"]], e["message"] or "") for e in found]
    print_table(("edge", "would", "reason"), rows, empty="no edge serves the stream")


@click.group()
def query() -> None:
    """Register, list, read and delete the queries of a center.

    EDGEWATER_URL is the center's address (http://127.0.0.1:7480 if it is not set). A token is read from
    EDGEWATER_TOKEN, or from the file that EDGEWATER_TOKEN_FILE names. It is never an argument, because others could
    see it.

    \b
      edgewater query add flights.yaml
      edgewater query edit flights_by_carrier
      edgewater query ls
      edgewater query show flights_by_carrier
      edgewater query tail flights_by_carrier --group carrier:UA
    """


def _dry_run(command: Command) -> Command:
    text = "Register nothing. Print which windows it would have and which edges accept it. Exit status 1 if not all do."
    return click.option("--dry-run", is_flag=True, help=text)(command)


@query.command("add")
@click.argument("file", type=click.Path(allow_dash=True, exists=True, dir_okay=False, path_type=Path))
@click.option("--for", "lasts", metavar="DURATION", help="The query ends by itself after so much event time: 1h.")
@_dry_run
@asks_center
def query_add(center: Center, file: Path, lasts: str | None, dry_run: bool, as_json: bool) -> None:
    """Register the query in FILE (YAML or JSON). If FILE is -, read standard input.

    If the same query is registered already, nothing changes. Another query of this name is an error: see `put`.
    """
    spec = sys.stdin.read() if str(file) == "-" else file
    if dry_run:
        _print_dry_run(center.dry_run(spec, lasts=lasts), as_json)
        return
    _print_registered(center.register(spec, lasts=lasts), as_json)


def _print_registered(found: Query, as_json: bool) -> None:
    if as_json:
        print_json(dict(found.registered))
        return
    click.echo(f"{plain(found.name)} is registered, version {found.version}")
    _print_borders(found.registered)
    _print_forecast(found.registered.get("forecast"))
    for note in found.notes:
        click.echo(f"note: {plain(note)}")


def _print_borders(windows: Borders) -> None:
    if (begins := windows.get("begins")) is not None:
        click.echo(f"it has the windows that start at {plain(begins)} or later")
    if (until := windows.get("until")) is not None:
        click.echo(f"it ends by itself: it has the windows that start before {plain(until)}")


def _print_forecast(found: LinkForecast | None) -> None:
    """Prints what a query takes of links; nothing if no edge has stated anything, or for a center of 0.3.0."""
    if found is None or (found["in_time"] == "unknown" and not any(e["stated_at"] for e in found["edges"])):
        return
    since = f" since {found['since']}" if found["since"] is not None else ""
    click.echo(f"all values in time: {found['in_time']}{plain(since)}")
    rows = [
        (
            e["edge"],
            e["in_time"],
            "unknown" if e["bytes_per_window"] is None else size(e["bytes_per_window"]),
            "unknown" if e["omitted_bytes"] is None else size(e["omitted_bytes"]),
            "unknown" if e["link_share"] is None else f"at most {e['link_share']:.0%}",
            "unknown" if e["least_bytes_s"] is None else f"at least {size(e['least_bytes_s'])}/s",
            "never" if e["age_ms"] is None else f"{e['age_ms'] / 1000:.0f} s ago",
        )
        for e in found["edges"]
    ]
    print_table(("edge", "in time", "a window", "omitted", "of the link", "link", "stated"), rows, empty="")


def border_option(command: Command) -> Command:
    text = "The border. Windows that start at or after it get the new version. Default: soon, in time for all edges."
    return click.option("--at", metavar="TIME", help=text)(command)


@query.command("put")
@click.argument("file", type=click.Path(allow_dash=True, exists=True, dir_okay=False, path_type=Path))
@border_option
@click.option("--for", "lasts", metavar="DURATION", help="The query ends by itself after so much event time: 1h.")
@click.option("--if-version", type=click.IntRange(0), help="Only if this is the newest version; 0: if there is none.")
@_dry_run
@asks_center
def query_put(
    center: Center, file: Path, at: str | None, lasts: str | None, if_version: int | None, dry_run: bool, as_json: bool
) -> None:
    """Change a query to the query in FILE, or register it. If FILE is -, read standard input.

    Windows that start before the border keep the old version, and later windows get the new version. No answer is
    deleted. If the same query is registered already, nothing changes.
    """
    spec = sys.stdin.read() if str(file) == "-" else file
    if dry_run:
        _print_dry_run(center.dry_run(spec, change=True, at=at, version=if_version, lasts=lasts), as_json)
        return
    _print_registered(center.put(spec, at=at, version=if_version, lasts=lasts), as_json)


@query.command("edit")
@click.argument("name")
@border_option
@asks_center
def query_edit(center: Center, name: str, at: str | None, as_json: bool) -> None:
    """Change the query NAME in the editor that EDITOR names.

    If somebody else has changed the query in the meantime, the change is refused. Your text is then saved in a file.
    """
    found = center.query(name)
    before = yaml.safe_dump(dict(found.spec), sort_keys=False, allow_unicode=True)
    after = click.edit(before, extension=".yaml")
    if after is None or after == before:
        click.echo(f"{plain(name)} is not changed")
        return
    try:
        changed = center.put(after, at=at, version=found.version)
    except EdgewaterError:
        with tempfile.NamedTemporaryFile("w", prefix=f"{name}-", suffix=".yaml", delete=False) as kept:
            kept.write(after)
        click.echo(f"your text is saved in {kept.name}; to register it: edgewater query put {kept.name}", err=True)
        raise
    _print_registered(changed, as_json)


def _print_dry_run(found: DryRun, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        if found["registered"]:
            click.echo("the same query is registered already")
        _print_borders(found)
        for text in (found["refused"], *found["notes"]):
            if text:
                click.echo(f"note: {plain(text)}")
        size_of = ", ".join(f"{m} {n}" for m, n in found["entry_bytes"].items())
        click.echo(f"bytes of a group in a frame, at most: {plain(size_of)}")
        _print_forecast(found.get("forecast"))
        print_edges(found["edges"])
    ok = found["refused"] is None and all(e["accepted"] for e in found["edges"]) and found["edges"]
    sys.exit(0 if ok else 1)


@query.command("ls")
@asks_center
def query_ls(center: Center, as_json: bool) -> None:
    """List the queries that the token may read."""

    def row(found: Registered) -> tuple[str, ...]:
        spec = found["spec"]
        return found["name"], str(found["version"]), spec["from"], _window(spec), ", ".join(spec["measures"])

    head = ("query", "version", "stream", "window", "measures")
    print_list(as_json, "queries", [q.registered for q in center.queries()], head, row, empty="no query is registered")


_WHOLE = click.option(
    "--all", "whole", is_flag=True, help="Print whole lists, such as all items of top_k, below each table."
)


@query.command("show")
@click.argument("name")
@_WHOLE
@asks_center
@selects
def query_show(center: Center, name: str, questions: Asked, whole: bool, as_json: bool) -> None:
    """Show the query NAME: whether it has answers, what it waits for, its edges, and its latest answer."""
    found = center.query(name)
    status, detail = found.status(), found.detail()
    latest = found.latest(**questions) if status["latest_window"] is not None else None
    if as_json:
        print_json({"query": detail, "status": status, "latest": None if latest is None else _as_json(latest)})
        return
    click.echo(f"{plain(name)}, version {found.version}: {status['state']}")
    for label in ("reason", "remedy", "budget"):
        if status[label]:
            click.echo(f"  {label}: {plain(status[label])}")

    def row(e: QueryEdge) -> tuple[str, ...]:
        accepted = {True: "accepted", False: f"refused: {e['message']}", None: "not confirmed"}[e["accepted"]]
        shipped = f"{e['shipped']['frames']} frames, {e['shipped']['wire_bytes']} bytes"
        return e["edge"], e["state"], e["watermark"] or ("ended" if e["ended"] else "none yet"), accepted, shipped

    heads = ("edge", "state", "watermark", "query", "shipped")
    print_table(heads, [row(e) for e in detail["edges"]], empty="no edge is expected")
    _print_forecast(detail.get("forecast"))
    if latest is not None:
        click.echo()
        print_answer(latest, whole)


@query.command("windows")
@click.argument("name")
@click.option("--start", help="Only windows that start at this time or later, such as 2013-01-01T00:00:00Z.")
@click.option("--end", help="Only windows that start before this time.")
@click.option("--every", metavar="INTERVAL", help="Merge the windows of each 1h, day, week, month, quarter or year.")
@click.option("--zone", help="Time zone of days and longer units, such as Europe/Berlin.")
@_WHOLE
@asks_center
@selects
def query_windows(
    center: Center,
    name: str,
    start: str | None,
    end: str | None,
    every: str | None,
    zone: str | None,
    questions: Asked,
    whole: bool,
    as_json: bool,
) -> None:
    """Print the answers of the query NAME to a range of windows. With --every, the windows of each interval are merged.

    With --json, each line is an answer as the API returns it.
    """
    if zone is not None and every is None:
        raise click.UsageError("--zone is for --every")
    for answer in center.query(name).windows(start, end, every=every, zone=zone, **questions):
        if as_json:
            print_json(_as_json(answer))
        else:
            print_answer(answer, whole)
            click.echo()


@query.command("explain")
@click.argument("name")
@click.argument("window", required=False)
@click.option("--revision", type=click.IntRange(1), help="Default: the newest.")
@asks_center
@selects
def query_explain(
    center: Center, name: str, window: str | None, revision: int | None, questions: Asked, as_json: bool
) -> None:
    """Explain an answer of the query NAME: what its error consists of, by cause and by edge.

    WINDOW is the start of the window. Default: the latest window. Without --measure, the first measure is explained.
    Without --group, the group with the widest interval is explained.
    """
    found = center.query(name)
    start = window or found.latest().members["window"]["start"]
    explained = found.explain(start, revision=revision, **questions)
    if as_json:
        print_json(explained)
        return
    group = "".join(f" {column}:{key_text(value)}" for column, value in explained["group"].items())
    interval = _interval(explained, explained["confidence"])
    what = f"{name} {explained['window']['start']}{group} {explained['measure']} {explained['value']}".rstrip()
    click.echo(f"{plain(what)}: {interval}, confidence {shown(interval.confidence)}, {explained['phase']}")
    parts = [(p["cause"], _amount(p["below"]), _amount(p["above"]), p["says"]) for p in explained["parts"]]
    print_table(("cause", "below", "above", "says"), parts, empty="nothing makes it uncertain")
    click.echo("(the parts do not add up to the interval)")
    closed = {True: "closed", False: "open", None: "unknown"}
    edges = [
        (
            e["edge"],
            e["state"],
            closed[e["closed"]],
            "ended" if e["ended"] else e["watermark"] or "none",
            _amount(e["late"]),
            _sides(e["withheld"]),
        )
        for e in explained["edges"]
    ]
    print_table(("edge", "state", "window", "watermark", "late", "withheld"), edges, empty="no edge is expected")
    revisions = [(str(r["revision"]), r["phase"], r["given_at"], str(_interval(r))) for r in explained["revisions"]]
    print_table(("revision", "phase", "given at", explained["measure"]), revisions, empty="no revisions")


def _interval(cell: IntervalCell, confidence: float | None = None) -> Interval:
    return Interval(cell["estimate"], cell["lower"], cell["upper"], confidence)


def _amount(value: float | None) -> str:
    return "unknown" if value is None else shown(value)


def _sides(value: Sides | None) -> str:
    if value is None:
        return "unknown"
    return (
        "nothing" if value["below"] == value["above"] == 0 else f"-{_amount(value['below'])} +{_amount(value['above'])}"
    )


@query.command("tail")
@click.argument("name")
@click.option("--count", "-n", type=click.IntRange(1), help="End after this number of answers.")
@click.option(
    "--phase",
    type=click.Choice(PHASES),
    default="early",
    show_default=True,
    help="Only answers in this phase or a later one.",
)
@asks_center
@selects
def query_tail(center: Center, name: str, count: int | None, phase: str, questions: Asked, as_json: bool) -> None:
    """Print the answers of the query NAME when they are published, until Ctrl-C. The latest answer is first.

    With --json, each line is an answer as the API returns it. After a lost connection, the command connects again. If
    answers are left out, a line `gap` says so.
    """
    with contextlib.suppress(KeyboardInterrupt):
        _tail(center.query(name), count, phase, questions, as_json)


def _tail(found: Query, count: int | None, phase: str, questions: Asked, as_json: bool) -> None:
    """Prints the answers, until `count` of them are printed."""
    left = count
    for event in found.live(**questions):
        match event:
            case Progress():
                continue
            case Gap():
                text = f"gap: answers after {event.after} up to {event.through} are left out ({event.reason})"
                if as_json:
                    print_json({"gap": {"after": event.after, "through": event.through, "reason": event.reason}})
                else:
                    click.echo(plain(text), err=True)
                continue
            case Answer() if PHASES.index(event.phase) >= PHASES.index(phase):
                if as_json:
                    print_json(_as_json(event))
                else:
                    print_answer(event)
                    click.echo()
                sys.stdout.flush()
                left = None if left is None else left - 1
                if left == 0:
                    return


@query.command("rm")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@asks_center
def query_rm(center: Center, name: str, yes: bool, as_json: bool) -> None:
    """Delete the query NAME, all its versions and their answers. They cannot be restored."""
    found = center.query(name)
    if not yes:
        click.confirm(f"Delete the query {plain(name)} and its answers?", abort=True, err=True)
    found.delete()
    if as_json:
        print_json({"deleted": name, "version": found.version})
    else:
        click.echo(f"{plain(name)}, version {found.version}, is deleted")


@click.group(invoke_without_command=True)
@asks_center
def edges(center: Center, as_json: bool) -> None:
    """List the edges of a center: state, watermark, delivery, backlog, link, records that were not counted.

    \b
      edgewater edges
      edgewater edges retire jfk
    """
    context = click.get_current_context()
    if context.invoked_subcommand is not None:
        # They would be the list's own: the subcommand would ask another center.
        own = [p for p in context.params if context.get_parameter_source(p) is ParameterSource.COMMANDLINE]
        if own:
            raise click.UsageError(f"write the options after {context.invoked_subcommand}")
        return
    found = center.edges()
    if as_json:
        print_json({"edges": found})
        return
    print_table(EDGE_COLUMNS, edge_rows(found), empty="no edge has ever connected")


@edges.command("retire")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@asks_center
def edges_retire(center: Center, name: str, yes: bool, as_json: bool) -> None:
    """Declare the edge NAME gone for good, so that no answer waits for it. Needs the role admin.

    The center accepts no more frames from it. Its journal keeps the records that it has not shipped.
    """
    path = f"/v1/edges/{segment(name)}"
    center.get(path)
    if not yes:
        asked = f"Retire the edge {plain(name)} at {plain(center.url)}? Answers no longer wait for it."
        click.confirm(asked, abort=True, err=True)
    center.send("DELETE", path)
    print_json({"retired": name}) if as_json else click.echo(f"{plain(name)} is retired")


@edges.command("reinstate")
@click.argument("name")
@asks_center
def edges_reinstate(center: Center, name: str, as_json: bool) -> None:
    """Take the retirement of the edge NAME back: answers need it again. Restart its agent. Needs the role admin."""
    center.send("POST", f"/v1/edges/{segment(name)}/reinstate", b"")
    print_json({"reinstated": name}) if as_json else click.echo(f"{plain(name)} is reinstated")


EDGE_COLUMNS = tuple(
    "edge state release heard stream watermark records delivery backlog bandwidth rtt clock dropped".split()
)
"""The columns of the table of edges. All columns but the state are from the last heartbeat, which arrived at `heard`.
Answers may be newer.
"""


def edge_rows(found: Iterable[Edge]) -> list[tuple[str, ...]]:
    """Returns a row per edge and stream."""
    rows: list[tuple[str, ...]] = []
    for e in found:
        drops = {**e["drops"]}
        for rejected in (r for s in e["streams"] for r in s["rejected"]):
            name = f"rejected {rejected['reason']}"
            drops[name] = drops.get(name, 0) + rejected["records"]
        dropped = ", ".join(f"{reason} {n}" for reason, n in sorted(drops.items()) if n) or "0"
        bandwidth = "unknown" if e["bandwidth_bytes_s"] is None else f"{size(e['bandwidth_bytes_s'])}/s"
        times = f"{e['rtt_ms']:.0f} ms", f"{e['clock_offset_ms']:+.0f} ms"
        link = (size(e["backlog_bytes"]), bandwidth, *times, dropped)
        streams = [
            (s["name"], "ended" if s["ended"] else s["watermark"] or "none yet", s["records"], ", ".join(s["delivery"]))
            for s in e["streams"]
        ]
        for name, watermark, records, delivery in streams or [("", "none yet", 0, "")]:
            known = e["edge"], e["state"], e.get("release") or "", e["last_seen"]
            rows.append((*known, name, watermark, str(records), delivery, *link))
    return rows


def size(count: float) -> str:
    """Returns a number of bytes as text, such as 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


@click.group()
def streams() -> None:
    """List the streams of a center. The configuration, or `PUT /v1/streams/NAME/columns`, declares their columns."""


@streams.command("ls")
@asks_center
def streams_ls(center: Center, as_json: bool) -> None:
    """List the streams, their columns, who declared the columns, and the edges with other columns."""

    def row(stream: StreamColumns) -> tuple[str, ...]:
        columns = ", ".join(f"{c['name']} {c['type']}" for c in stream["columns"])
        return stream["stream"], stream["source"], columns, "; ".join(stream["differing"])

    head = ("stream", "declared by", "columns", "refused edges")
    print_list(as_json, "streams", center.streams(), head, row, empty="no edge serves a stream")


def _window(spec: Spec) -> str:
    return " ".join(f"{k} {v}" for k, v in spec["window"].items())


def _as_json(answer: Answer) -> object:
    """Returns an answer without its data, and its rows as a list of mappings."""
    rows = [
        {name: _plain(value, name in answer.group_by) for name, value in row.items()}
        for row in answer.table.to_pylist()
    ]
    return {**answer.members, "rows": json.loads(json.dumps(rows, default=str))}


def _plain(value: Any, is_key: bool) -> Any:
    """Returns a value of a row as JSON: NaN and infinity by name in a key, null in a value, at any depth."""
    if isinstance(value, Decimal):
        return int(value)
    if isinstance(value, float) and not math.isfinite(value):
        return key_text(value) if is_key else None
    if isinstance(value, list):
        return [_plain(each, is_key) for each in value]
    return {n: _plain(v, n == "item") for n, v in value.items()} if isinstance(value, dict) else value


def print_answer(answer: Answer, whole: bool = False) -> None:
    """Prints the state of an answer, and a row per group. If `whole`, all items of lists follow, a row per item."""
    click.echo(plain(summary(answer)))
    columns = [(name, cells) for name in answer.measures if (cells := _cells(answer, name)) is not None]
    rows = [
        (*map(key_text, group.values()), *(cells[at] for _, cells in columns)) for at, group in enumerate(answer.groups)
    ]
    empty = "no groups: edges withhold all of them under the budget" if any(answer.rest.values()) else "no groups"
    print_table((*answer.group_by, *(name for name, _ in columns)), rows, empty=empty)
    for name, total in answer.total.items() if answer.group_by else ():
        click.echo(plain(f"all groups: {name} {total}{_in_no_group(total, answer.rest.get(name))}"))
    for name in filter(lambda name: whole and _is_list(answer, name), answer.measures):
        lists = zip(answer.groups, answer[name].values, strict=True)
        items = [(*map(key_text, group.values()), _shown(each)) for group, values in lists for each in values or ()]
        print_table((*answer.group_by, name), items, empty=f"no {name}")


def _in_no_group(total: Interval, rest: float | None) -> str:
    if not rest or not total.estimate:
        return ""
    return f", of which {shown(rest)} ({100 * rest / total.estimate:.3g}%) are in no group"


def summary(answer: Answer) -> str:
    """Returns one line: the window, phase, completeness and contract."""
    contract = answer.contract if answer.contract_met else f"not met ({answer.contract})"
    return (
        f"{answer.query} {answer.members['window']['start']} {answer.phase} revision {answer.revision}, complete "
        f"{shown(answer.completeness)}{answer.limitations}, confidence {shown(answer.confidence)}, contract {contract}"
    )


def _cells(answer: Answer, name: str) -> list[str]:
    try:
        return [str(i) for i in answer[name].intervals]
    except InvalidRequest:
        return [_shown(value) for value in answer[name].values]


def _is_list(answer: Answer, name: str) -> bool:
    return any(isinstance(value, list) for value in answer[name].values)


def _shown(value: object) -> str:
    """Returns the text of a number, of an item with its interval, or of the first items of a list."""
    if isinstance(value, list):
        more = f", and {len(value) - FIRST_ITEMS} more (--all)" if len(value) > FIRST_ITEMS else ""
        return ", ".join(map(_shown, value[:FIRST_ITEMS])) + more
    if isinstance(value, dict) and "estimate" in value:
        label = key_text(value["item"]) if "item" in value else f"{_shown(value['from'])} to {_shown(value['to'])}"
        return f"{label}: {Interval(value['estimate'], value['lower'], value['upper'])}"
    return shown(value) if isinstance(value, int | float) and not isinstance(value, bool) else key_text(value)


def latest_or_none(found: Query) -> Answer | None:
    try:
        return found.latest()
    except NotFound:
        return None
