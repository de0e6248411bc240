"""The `edgewater edge …` commands.

Each command imports what it needs, so that `--help` is fast.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgewater.base.errors import EdgewaterError, InvalidInput, OutdatedState
from edgewater.runtime.log_output import configure_logging, log_options

if TYPE_CHECKING:
    from edge.agent.reload import ConfigFile
    from edge.config import EdgeConfig
    from edgewater.runtime.listeners import Listeners

BEGINS_ANEW = (
    "the edge continues as a new incarnation, without the records that it has accepted and not shipped, because they"
    " may be counted already; the windows that may lack them state it"
)
EXIT_FAILED = 1  # format: of exit statuses
EXIT_BAD_INPUT = 2  # format: of exit statuses


@click.group()
def edge() -> None:
    """Run and inspect an edge agent.

    An edge reads nearby sources, aggregates their records per query, and ships the aggregates to the
    center. It needs neither Java nor Spark. One YAML file names its sources and the center:

    \b
      edge: jfk
      center: {address: "center.example:7400"}
      state_dir: /var/lib/edgewater
      streams:
        flights:
          columns: {carrier: string, distance: int64}
          time: {column: scheduled_ms, unit: ms}
          sources:
            - file: {path: "/var/log/flights/*.csv", follow: true}
    """


def _fail(error: EdgewaterError) -> None:
    for line in error.faults():
        click.echo(f"edgewater: {line}", err=True)
    # Service managers restart the agent after EXIT_FAILED (such as a full disk), but not after EXIT_BAD_INPUT.
    sys.exit(EXIT_BAD_INPUT if isinstance(error, InvalidInput) else EXIT_FAILED)


@edge.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--watch", "watches", is_flag=True, help="Reload CONFIG when the file changes, as with SIGHUP.")
@log_options
def run(config: Path, watches: bool, log_level: str, log_format: str) -> None:
    """Run the agent configured by the file CONFIG until SIGTERM or Ctrl-C.

    It serves /livez, /readyz and /metrics at its `http.listen` address, and POST /v1/streams/NAME for
    streams with an http source. State survives `kill -9` at any moment: a restarted agent resumes.

    SIGHUP reloads CONFIG: the agent begins anew in the same process. No record is lost, counted twice or refused. If
    the file cannot be used, nothing changes. The log and the metric edgewater_edge_configuration_failed report it.
    """
    # See `edge.agent.reload.until_stopped`.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    configure_logging(log_level, log_format)
    from edgewater.runtime.allocator import take_less_memory, use_system_allocator
    from edgewater.runtime.configuration import PRIVATE_UMASK

    take_less_memory()
    use_system_allocator()
    os.umask(PRIVATE_UMASK)
    from edge.agent.reload import ConfigFile
    from edgewater.runtime.listeners import Listeners

    try:
        listeners, file = Listeners(), ConfigFile(config)
        try:
            begins_anew = _run_agent(file.load(), file, listeners, watches)
        except EdgewaterError as exc:
            begins_anew = _run_agent(file.load_previous(exc), file, listeners, watches)
        if begins_anew:
            file.begin_again(listeners)
        listeners.close()
    except EdgewaterError as exc:
        _fail(exc)


def _run_agent(settings: EdgeConfig, file: ConfigFile, listeners: Listeners, watches: bool) -> bool:
    """Runs an agent until a signal ends it. Returns whether to begin anew with the new content of the file."""
    from edge.agent import begin_anew, open_agent
    from edge.agent.reload import until_stopped
    from edge.durability import lock_state_dir
    from edgewater.runtime.allocator import release_start_code

    with lock_state_dir(Path(settings.state_dir)):
        while True:
            agent = open_agent(settings)
            agent.configuration_failure = lambda: file.failure
            release_start_code()
            running = functools.partial(agent.run, listeners=listeners, started=file.confirm)
            try:
                return asyncio.run(until_stopped(running, file, watches, agent.tasks))
            except OutdatedState as exc:
                logging.getLogger("edge").error("%s; %s", exc, BEGINS_ANEW)
                begin_anew(agent)


@edge.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--offline", is_flag=True, help="Connect to no broker.")
@click.option(
    "--query",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A query in YAML: show which of the records it counts, and in which groups.",
)
def check(config: Path, as_json: bool, offline: bool, query: Path | None) -> None:
    """Check CONFIG against existing data, without changing anything.

    Reads some records of each file and broker with the agent's own decoders. Reports which records would be
    accepted, which would be rejected, and why. Exit status 1 if there is a problem, 2 if CONFIG or the query is
    invalid.
    """
    from edge.config import load_config
    from edge.preflight import check as run_check
    from edge.process import now_ms
    from edgewater.model.query import QuerySpec

    try:
        spec = None if query is None else QuerySpec.from_yaml(query.read_text())
        report = run_check(load_config(config), now_ms, connects=not offline, query=spec)
    except EdgewaterError as exc:
        _fail(exc)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else report.to_text())
    sys.exit(0 if report.ok else 1)


@edge.command()
@click.argument("agent")
@click.option(
    "--interval", type=click.FloatRange(0.2), default=2.0, show_default=True, help="Seconds between two updates."
)
@click.option("--once", is_flag=True, help="Print the state once and end. Default without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the state once as JSON.")
def top(agent: str, interval: float, once: bool, as_json: bool) -> None:
    """Show one running agent until Ctrl-C: records in, each source, records that are not counted, queries, backlog.

    AGENT is the agent's configuration file, or its address, such as 127.0.0.1:7410. It needs no center.
    """
    from edge import watch

    watch.top(agent, interval, once, as_json)
