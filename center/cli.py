"""`edgewater center …`: the commands of a center's operator."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from center.config import ENVIRONMENT_PREFIX, CenterConfig
from edgewater.base.errors import InvalidConfig
from edgewater.runtime.configuration import PRIVATE_UMASK
from edgewater.runtime.log_output import configure_logging, log_options


def _overrides(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> dict[str, object]:
    pairs: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidConfig("--set", text, "key=value, such as spark.master=local[4]")
        if key == "api.token" or key.startswith(("tokens.", "api.principals.")):
            variable = ENVIRONMENT_PREFIX + key.upper().replace(".", "__")
            reason = "other users can see command lines"
            raise InvalidConfig("--set", f"{key}=…", f"the variable {variable} or a file", reason)
        pairs[key] = value
    return pairs


def configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the configuration options to a command and passes it the `CenterConfig` as its first argument."""

    @click.option(
        "--config",
        "-c",
        "path",
        type=click.Path(path_type=Path),
        envvar="EDGEWATER_CENTER_CONFIG",
        show_envvar=True,
        help="YAML file with the keys that `edgewater center --help` shows.",
    )
    @click.option(
        "--data-dir", type=click.Path(path_type=Path), help="Directory of all state. [default: .edgewater/center]"
    )
    @click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_overrides,
        help="Any key of the file, such as spark.master=local[4]. May be repeated.",
    )
    @log_options
    @click.option("--supervised", is_flag=True, hidden=True)
    @functools.wraps(command)
    def wrapped(
        path: Path | None,
        data_dir: Path | None,
        overrides: dict[str, object],
        log_level: str,
        log_format: str,
        supervised: bool,
        **kwargs: Any,
    ) -> Any:
        os.umask(PRIVATE_UMASK)
        configure_logging(log_level, log_format)
        for name in ("py4j", "httpx"):  # httpx logs URLs, and the URL of a webhook may have a token
            logging.getLogger(name).setLevel(logging.WARNING)
        if supervised:
            from center.ops.supervisor import stop_with_supervisor

            stop_with_supervisor()
        if data_dir is not None:
            overrides = {**overrides, "data_dir": str(data_dir)}
        return command(CenterConfig.load(path, overrides, os.environ), **kwargs)

    return wrapped


def _flags(params: Mapping[str, Any]) -> list[str]:
    """Returns the flags of `configured`, which are passed on to the components' processes."""
    flags = ["--log-level", params["log_level"], "--log-format", params["log_format"]]
    for name, flag in (("path", "--config"), ("data_dir", "--data-dir")):
        if params[name] is not None:
            flags += [flag, str(params[name])]
    for key, value in params["overrides"].items():
        flags += ["--set", f"{key}={value}"]
    return flags


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _print(as_json: bool, value: object, text: str) -> None:
    click.echo(json.dumps(value) if as_json else text)


@click.group()
def center() -> None:
    """Run a center, which edges connect to and which answers queries.

    A center has three components. Each is a process over the same state. The *gateway* receives frames from
    edges. The *job* merges frames on Spark and decides when to answer. The *api* serves answers over REST.
    A fourth process, the *sink*, writes answers to other systems. `run` starts all processes on one machine.
    On several machines, start each process alone with the same file.

    \b
      edgewater center run                                   all components, on loopback, state in .edgewater/center
      edgewater center check --config center.yaml            check whether this machine fits the configuration
      edgewater center api -c center.yaml --set api.listen=0.0.0.0:8080

    \b
    An example of the file; every key has a default:
      data_dir: /var/lib/edgewater         # all state, except for the URLs and directories below
      gateway: {listen: "0.0.0.0:7400"}    # edges connect to it
      api: {listen: "127.0.0.1:7480", token: a-secret}
      tokens: {jfk: another-secret}        # one per edge, if other machines connect. Or tokens_file: tokens.yaml
      streams: {flights: {columns: {carrier: string, miles: int64}}}  # see docs/reference/center.md
      tls: {cert: center.pem, key: center.key, client_ca: edges.pem}
      catalog_url: postgresql+psycopg://…  # default: SQLite in data_dir; the same for results_url
      log_dir: /mnt/frames                 # the frame log; deltas_dir: large results of tasks
      spark: {master: "local[2]", driver_memory: 1g, standby: true, conf: {spark.ui.enabled: "true"}}
      retention: {frames: 1h, answers: 7d} # time for which applied frames and final answers are stored
      sinks: {warehouse: {kind: postgres, url: {env: WAREHOUSE_URL}}}  # other systems that get the answers

    A key may also be set in the environment: EDGEWATER_CENTER__API__TOKEN.
    """


@center.command()
@configured
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line when ready, for scripts.")
def run(config: CenterConfig, as_json: bool) -> None:
    """Start gateway, job, API and sinks, and keep them running.

    If a component dies, it is restarted, and no acknowledged frame is lost. SIGTERM or Ctrl-C stops all
    components. Process ids are in <data_dir>/pids/. The addresses are printed when all components are ready.

    \b
      edgewater center run --data-dir /var/lib/edgewater --set gateway.listen=127.0.0.1:7500
    """
    from center.ops.preflight import check
    from center.ops.supervisor import Supervisor, exclusive_lock
    from center.spark.workers import SINGLE_THREADED

    with exclusive_lock(config.data_dir) as lock:
        os.environ |= SINGLE_THREADED | dict(os.environ)  # before NumPy and Arrow are loaded: see `fork_components`
        failed = [c for c in check(config, os.environ) if not c.ok]
        if failed:
            for result in failed:
                click.echo(f"edgewater: {result.message}", err=True)
            sys.exit(2)
        from center.ops.forking import fork_components
        from center.ops.startup import Startup

        startup = Startup(config, _flags(click.get_current_context().params), as_json=as_json)
        commands = startup.commands()
        forked = fork_components(commands, lock)
        supervisor = Supervisor(commands, config.pids_dir, monotonic=time.monotonic, started=forked)
        asyncio.run(startup.run(supervisor))


@center.command()
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=1800, show_default=True, help="Limit in seconds."
)
def prepare(timeout_s: float) -> None:
    """Make centers of this installation start faster. Run it once, and again after an update of Java.

    It starts Spark for some seconds, and writes the classes that Java has loaded and verified (160 MB) to the Python
    environment. The job's JVM then needs half of the CPU time to start, also after a crash.
    """
    from center.ops.prepare import prepare

    click.echo(f"written: {prepare(timeout_s)}")


@center.command()
@configured
def gateway(config: CenterConfig) -> None:
    """Receive frames from edges until SIGTERM or Ctrl-C. Any number of gateways may share one catalog and log."""
    from center.ops.processes import run_gateway

    run_gateway(config)


@center.command()
@configured
def job(config: CenterConfig) -> None:
    """Merge frames on Spark and answer queries until SIGTERM or Ctrl-C. Needs Java 17.

    Any number of jobs may share one result store. One job leads, or as many as spark.drivers says, each for a
    partition of the queries. The other jobs are warm standbys that take over.
    """
    from center.ops.processes import run_job

    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        del os.environ[name]  # the variable has been read, and the JVM and the executors need no secrets

    run_job(config)


@center.command()
@configured
def sink(config: CenterConfig) -> None:
    """Write answers to the systems in `sinks` until SIGTERM or Ctrl-C. Any number of processes may run for one center.

    \b
      sinks:
        warehouse: {kind: postgres, url: {env: WAREHOUSE_URL}, queries: [flights]}

    `edgewater sinks` shows the sinks, and defines more sinks through the API.
    """
    from center.ops.processes import run_sinks

    run_sinks(config)


@center.command()
@configured
def api(config: CenterConfig) -> None:
    """Serve answers over REST until SIGTERM or Ctrl-C. Any number of APIs may run. /docs describes the API."""
    from center.ops.processes import run_api

    run_api(config)


@center.command("check")
@configured
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def check_command(config: CenterConfig, as_json: bool) -> None:
    """Check whether this machine fits the configuration: Java, free addresses, writable state, databases.

    Exit status 0 if all checks pass, else 1.
    """
    from center.ops.preflight import check

    results = check(config, os.environ)
    ok = all(c.ok for c in results)
    if as_json:
        click.echo(json.dumps({"ok": ok, "checks": [asdict(c) for c in results]}))
    else:
        for c in results:
            click.echo(f"{'ok ' if c.ok else 'NOT'}  {c.name:<15} {c.message}")
    sys.exit(0 if ok else 1)


@center.command()
@configured
@click.argument("directory", type=click.Path(path_type=Path))
@_json
def backup(config: CenterConfig, directory: Path, as_json: bool) -> None:
    """Write a backup to DIRECTORY, which must be new or empty. The center may run.

    The backup has the catalog, the results, the frame log and the large results of tasks (deltas_dir) at one moment.
    The writers of both stores wait for some milliseconds. A backup is complete when DIRECTORY has a backup.json. The
    configuration is not part of the backup.

    \b
      edgewater center backup --data-dir /var/lib/edgewater /backup/2026-05-01

    Both stores must be SQLite files, or must be in one database of PostgreSQL. `edgewater center restore` can restore
    each backup to SQLite or PostgreSQL.
    """
    from center.ops.backup import take_backup
    from edgewater.runtime.clock import now_ms

    info = take_backup(config, directory, now_ms, _progress)
    size = f"{info.size / 2**20:.1f} MiB, {len(info.segments)} segments"
    _print(as_json, asdict(info), f"{directory}: {size}, as of {info.taken_at}")


@center.command()
@configured
@click.argument("directory", type=click.Path(path_type=Path))
@_json
def restore(config: CenterConfig, directory: Path, as_json: bool) -> None:
    """Write the backup in DIRECTORY to the places that the configuration names, while the center does not run.

    There must be no stores and no frames at these places, so move them away first. Start the center afterwards.

    The frames that edges sent after the backup are lost. When the edges connect, the windows of these frames state the
    loss. New answers have higher revisions than all earlier answers.

    \b
      edgewater center restore --data-dir /var/lib/edgewater /backup/2026-05-01
    """
    from center.ops.backup import restore_backup
    from edgewater.runtime.clock import now_ms

    info = restore_backup(config, directory, now_ms, _progress)
    _print(as_json, asdict(info), f"restored: the center is as of {info.taken_at}; start it")


@center.command()
@configured
def reconcile(config: CenterConfig) -> None:
    """Use a catalog and results of different moments together, if there is no backup of both.

    This is for a center that refuses to start because an older copy has replaced one of its stores. Windows that have
    begun and are not final will state that they may lack records of any edge. They will have no bounds.
    """
    from center.ops.backup import reconcile_stores
    from edgewater.runtime.clock import now_ms

    reconcile_stores(config, now_ms)
    click.echo("the stores are a pair again; start the center")


def _progress(line: str) -> None:
    """Prints a line of progress if standard error is a terminal."""
    if sys.stderr.isatty():
        click.echo(line, err=True)


@center.group()
def quarantine() -> None:
    """Show and retry frames and queries that the job does not process.

    A frame is quarantined if it failed alone, twice. It counts as lost input of its edge. The windows that may lack it
    state the loss. Its bytes stay in the log.

    A query is paused if its frames cannot be applied. The job tries it again at the next start of the job. A query is
    quarantined if the job died three times within an hour while it worked on it. A paused or quarantined query gets no
    answers, and its frames stay in the log. The other queries continue.

    The commands use the catalog and the frame log of the configuration. The center may run.

    \b
      edgewater center quarantine ls
      edgewater center quarantine show flights@1 17
      edgewater center quarantine retry flights@1 17
      edgewater center quarantine retry flights
    """


def _of_frame(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("query")(click.argument("position", type=click.IntRange(1))(_json(command)))


@quarantine.command("ls")
@configured
@_json
def quarantine_ls(config: CenterConfig, as_json: bool) -> None:
    """List the quarantined frames, the latest first, and the paused and quarantined queries."""
    from center.ops.quarantine import QuarantineDesk

    with QuarantineDesk(config) as quarantine:
        frames, queries = quarantine.frames(), quarantine.queries()
    lines = [f"{f['query']} {f['position']}  {f['edge']}  {f['quarantined_at']}  {f['reason']}" for f in frames]
    lines += [f"{q['query']}  {q['state']}  {q['since']}  {q['reason']}" for q in queries]
    text = "\n".join(lines) if lines else "no frame is quarantined, and no query is paused or quarantined"
    _print(as_json, {"frames": frames, "queries": queries}, text)


@quarantine.command("show")
@configured
@_of_frame
def quarantine_show(config: CenterConfig, query: str, position: int, as_json: bool) -> None:
    """Show a frame: its edge, why it was quarantined, and what it states beside its partials. QUERY is name@version."""
    from center.ops.quarantine import QuarantineDesk

    with QuarantineDesk(config) as quarantine:
        shown = quarantine.show(query, position)
    _print(as_json, shown, json.dumps(shown, indent=2))


@quarantine.command("retry")
@configured
@click.argument("query")
@click.argument("position", type=click.IntRange(1), required=False)
@_json
def quarantine_retry(config: CenterConfig, query: str, position: int | None, as_json: bool) -> None:
    """Make the job try a frame or a query once more, for example after an upgrade.

    With POSITION, the job tries a frame of QUERY, which is name@version. The job applies the frame as new data, at the
    query's next position. If the frame fails again, it is in quarantine at this position. Some windows of the frame may
    be final by then. The frame's records are counted on these windows (`after_final`). Windows that have stated the
    loss of the frame still state it.

    Without POSITION, QUERY is the name of a paused or quarantined query. The job tries the query within seconds, with
    all its frames. If the job dies again three times while it works on the query, the query is quarantined again. To
    remove a query, delete it.
    """
    from center.ops.quarantine import QuarantineDesk

    with QuarantineDesk(config) as quarantine:
        if position is None:
            quarantine.retry_query(query)
            _print(as_json, {"query": query}, f"query {query} is tried again")
            return
        at = quarantine.retry_frame(query, position)
    _print(as_json, {"query": query, "position": at}, f"{query} {position} is applied again, at position {at}")


@quarantine.command("drop")
@configured
@_of_frame
def quarantine_drop(config: CenterConfig, query: str, position: int, as_json: bool) -> None:
    """Delete a quarantined frame and its bytes permanently."""
    from center.ops.quarantine import QuarantineDesk

    with QuarantineDesk(config) as quarantine:
        quarantine.drop_frame(query, position)
    _print(as_json, {"query": query, "position": position}, f"{query} {position} is dropped")
